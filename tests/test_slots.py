"""A semaphore of N slots: --max-concurrent, PIDLOCK_SLOT, lock.slot; and callers of different limits on one path."""
import errno
import fcntl
import json
import os
import random
import re
import select
import subprocess
import sys
import threading
import time
import unicodedata

import pytest
from children.extras_variants import load, write_variant
from conftest import CHILDREN, PIDLOCK, ROOT
from test_paths import snapshot

import pidlock
from pidlock import LockHeld, PidLock

blackbox = pytest.mark.blackbox
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="looks into Linux's /proc")
needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd_open(2) here")



def of(limit, path):
    return ("--pidfile", path, "--max-concurrent", str(limit))


def slot_file(path, slot):
    return path if slot == 1 else path.with_name("%s.%d" % (path.name, slot))


def slot_of(holder):
    """Return the (slot, pidfile, PID) that a holder's command sees."""
    with open("/proc/%d/environ" % holder.command_pid) as file:
        seen = dict(entry.split("=", 1) for entry in file.read().split("\0") if entry)
    return int(seen["PIDLOCK_SLOT"]), seen["PIDLOCK_PIDFILE"], int(seen["PIDLOCK_PID"])


def outcome_of(lock):
    """Return the slot that this lock gets, None where it is held."""
    try:
        return lock.acquire().slot
    except LockHeld:
        return None


def unlistable(path):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.fixture
def directory_flocked(tmp_path):
    """Somebody else keeps the flock of the pidfile's directory."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


# ---- N slots ----


@blackbox
@needs_proc
@pytest.mark.parametrize("limit", [2, 3])
def test_n_commands_run_at_once_each_in_a_slot_of_its_own_and_the_next_is_refused(run, holder, pidfile, limit):
    holders = [holder(*of(limit, pidfile)) for _ in range(limit)]
    expected = [(slot, str(slot_file(pidfile, slot)), one.pid) for slot, one in enumerate(holders, 1)]
    bodies = ["%d\n\n\nlimit=%d\n" % (one.pid, limit) for one in holders]
    assert [slot_of(one) for one in holders] == expected
    assert [slot_file(pidfile, slot).read_text() for slot in range(1, limit + 1)] == bodies
    status, stdout, stderr = run(*of(limit, pidfile), "--", "echo", "ran")
    assert (status, stdout, stderr.count("\n")) == (75, "", 1)
    assert re.findall(r"test\.pid[.\d]* held by PID (\d+)", stderr) == [str(one.pid) for one in holders]


@blackbox
@needs_proc
def test_a_slot_that_was_given_back_is_the_next_ones(run, holder, pidfile):
    holders = [holder(*of(3, pidfile)) for _ in range(3)]
    for slot in (2, 1, 3):
        holders[slot - 1].finish()
        assert not slot_file(pidfile, slot).exists()
        holders[slot - 1] = holder(*of(3, pidfile))
        assert slot_of(holders[slot - 1])[0] == slot


@blackbox
def test_a_waiter_gets_whichever_slot_comes_free(holder, pidfile):
    command = [*PIDLOCK, *of(3, pidfile), "--wait", "60", "-v", "--log", "-", "--", "sh", "-c", "echo $PIDLOCK_SLOT"]
    holders = [holder(*of(3, pidfile)) for _ in range(3)]
    for slot in (1, 2, 3):
        waiter = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        holders[slot - 1].finish()
        assert (waiter.communicate(timeout=60)[0], waiter.returncode) == (b"%d\n" % slot, 0)
        holders[slot - 1] = holder(*of(3, pidfile))


@needs_pidfd
@needs_proc
def test_a_waiter_wakes_at_the_end_of_each_slots_holder(holder, pidfile):
    """Its timer never rings here. Red when it polls only the first holder's pidfd."""
    holders = [holder(*of(3, pidfile)) for _ in range(3)]
    for slot in (1, 2, 3):
        waiter = subprocess.Popen([sys.executable, CHILDREN / "slots_waiter.py", pidfile, "3"], stdout=subprocess.PIPE)
        try:
            await_pidfds(waiter.pid, 3)
            holders[slot - 1].finish()
            assert select.select([waiter.stdout], [], [], 10)[0], "the waiter sleeps on"
            assert waiter.communicate(timeout=60)[0] == b"slot %d\n" % slot
        finally:
            waiter.kill()
            waiter.wait()
        holders[slot - 1] = holder(*of(3, pidfile))


def await_pidfds(pid, count):
    """Return when this process has so many pidfds open."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        links = [link_of("/proc/%d/fd/%s" % (pid, number)) for number in os.listdir("/proc/%d/fd" % pid)]
        if sum("pidfd" in link for link in links) == count:
            return
        time.sleep(0.002)
    pytest.fail("it does not watch %d processes" % count)


def link_of(path):
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


@blackbox
def test_the_slot_of_a_killed_pidlock_is_its_commands_until_that_ends(run, holder, pidfile):
    _, killed = holder(*of(2, pidfile)), holder(*of(2, pidfile))
    killed.kill_wrapper()
    refused = run("-q", *of(2, pidfile), "--", "echo", "ran")
    killed.finish()
    accepted = run("-q", *of(2, pidfile), "--", "sh", "-c", "echo $PIDLOCK_SLOT")
    assert (refused, accepted) == ((75, "", ""), (0, "2\n", ""))


@blackbox
def test_a_slot_that_nobody_has_is_taken_over_and_others_are_left_alone(run, holder, pidfile, dead_pid):
    holder(*of(3, pidfile))
    slot_file(pidfile, 2).write_text("%d\n\n\nlimit=3\n" % dead_pid)
    status, stdout, stderr = run(*of(3, pidfile), "--", "sh", "-c", "echo $PIDLOCK_SLOT")
    assert (status, stdout, stderr.count("took over a stale file")) == (0, "2\n", 1)
    assert [path.name for path in pidfile.parent.iterdir()] == ["test.pid"]


@blackbox
def test_a_lost_slot_is_said_and_no_other_slot_is_touched(run, holder, pidfile):
    holder(*of(2, pidfile))
    before = pidfile.read_bytes()
    outcome = run(*of(2, pidfile), "--", "sh", "-c", 'rm "$PIDLOCK_PIDFILE"; exit 7')
    assert (outcome.status, outcome.stdout, re.findall(": lost: ", outcome.stderr)) == (7, "", [": lost: "])
    assert ([path.name for path in pidfile.parent.iterdir()], pidfile.read_bytes()) == (["test.pid"], before)


def test_the_library_tells_the_slot_and_gives_just_that_back(pidfile):
    events = []
    locks = [PidLock(pidfile, max_concurrent=3, on_event=events.append) for _ in range(3)]
    assert [lock.acquire().slot for lock in locks] == [1, 2, 3]
    assert [lock.path for lock in locks] == [str(pidfile)] * 3
    with pytest.raises(LockHeld, match="as many as may hold it do"):
        PidLock(pidfile, max_concurrent=3).acquire()
    assert locks[1].release() and not slot_file(pidfile, 2).exists()
    slot_file(pidfile, 3).unlink()
    assert (locks[2].release(), locks[0].release(), list(pidfile.parent.iterdir())) == (False, True, [])
    assert [(event["event"], event["slot"]) for event in events] == [
        ("acquired", 1), ("acquired", 2), ("acquired", 3), ("released", 2), ("lost", 3), ("released", 1),
    ]


# ---- Mixed limits ----

MIXED = [  # the limits of those that hold it, of the one who asks, and the slot that this one gets
    ((5,), 5, 2), ((5,), 2, 2), ((5, 5), 2, None), ((5, 5), 3, 3), ((5, 5, 5), 3, None), ((5, 2), 5, None),
    ((2,), 5, 2), ((3, 3), 5, 3), ((3, 3, 3), 5, None), ((1,), 5, None), ((1,), 2, None), ((5,), 1, None),
]


@pytest.mark.parametrize("name", ["test.pid", "test.2", "test.2030"])
@pytest.mark.parametrize("holding, asking, slot", MIXED)
def test_the_smallest_limit_of_all_that_hold_it_counts(pidfile, name, holding, asking, slot):
    """Red where a FILE whose own name reads as a slot's is not counted as slot 1."""
    pidfile = pidfile.with_name(name)
    holders = [PidLock(pidfile, max_concurrent=limit).acquire() for limit in holding]
    asked = PidLock(pidfile, max_concurrent=asking)
    assert outcome_of(asked) == slot
    assert all(lock.release() for lock in [asked, *holders])


@blackbox
@pytest.mark.parametrize("holding, asking, status", [([5, 2], 5, 75), ([5], 2, 0), ([5, 5], 2, 75), ([1], 5, 75)])
def test_the_command_line_keeps_the_smallest_limit_too(run, holder, pidfile, holding, asking, status):
    for limit in holding:
        holder(*of(limit, pidfile))
    assert run("-q", *of(asking, pidfile), "--", "true") == (status, "", "")


@blackbox
def test_a_run_without_a_limit_does_not_look_at_the_slots_of_others(run, holder, pidfile):
    first, _ = holder(*of(2, pidfile)), holder(*of(2, pidfile))
    assert run("-q", "--pidfile", pidfile, "--", "true") == (75, "", "")
    first.finish()
    assert run("--pidfile", pidfile, "--", "echo", "ran") == (0, "ran\n", "")


def walk_at_random(module, path, steps):
    """Take and give back slots under mixed limits, and compare each outcome with a model."""
    chance, held = random.Random(3), {}  # slot: lock
    for _ in range(steps):
        if held and chance.random() < 0.45:
            assert held.pop(chance.choice(sorted(held))).release()
            continue
        limit = chance.choice([1, 2, 3, 5])
        limits = [lock._max_concurrent for lock in held.values()]
        room = len(held) < min([limit, *limits]) if limit > 1 else 1 not in held
        lock = module.PidLock(path, max_concurrent=limit)
        try:
            slot = lock.acquire().slot
            held[slot] = lock
        except module.LockHeld:
            slot = None
        assert slot == (min({*range(1, limit + 1)} - {*held} | {slot}) if room else None)
    for lock in held.values():
        assert lock.release()


def test_a_walk_through_mixed_limits_never_exceeds_the_smallest_and_never_refuses_without_need(pidfile):
    walk_at_random(pidlock, pidfile, 300)
    assert list(pidfile.parent.iterdir()) == []


def test_the_walk_notices_when_the_limits_of_others_are_ignored(pidfile, tmp_path_factory):
    broken = load(write_variant("ignoring theirs", tmp_path_factory.mktemp("variant")))
    with pytest.raises(AssertionError):
        walk_at_random(broken, pidfile, 300)


def storm(source, path, cycles):
    command = [sys.executable, CHILDREN / "slots_storm.py", source, path, str(cycles)]
    return json.loads(subprocess.check_output(command, timeout=100).decode())


def test_a_storm_of_mixed_limits_never_exceeds_the_smallest_of_those_that_hold(pidfile):
    figures = storm(ROOT / "pidlock.py", pidfile, 25)
    most = figures.pop("most")
    assert figures == {"excesses": 0, "lost": 0, "statuses": [0] * 6, "left": []} and most > 1


def test_the_storm_notices_when_the_limits_of_others_are_ignored(pidfile, tmp_path_factory):
    source = write_variant("ignoring theirs", tmp_path_factory.mktemp("variant"))
    assert any(storm(source, pidfile, 25)["excesses"] for _ in range(20))  # a storm is a matter of chance


# ---- What a refused one leaves ----


@pytest.mark.parametrize("variant, same", [("pidlock.py", True), ("no count before the take", False)])
@pytest.mark.parametrize("holding, asking", [((2, 2), 2), ((1,), 3), ((5, 2), 5)])
def test_a_contender_that_finds_no_room_has_written_nothing(pidfile, tmp_path_factory, holding, asking, variant, same):
    """Though a slot's name is free. Red when it takes first and only then counts."""
    module = load(write_variant(variant, tmp_path_factory.mktemp("variant")))
    holders = [PidLock(pidfile, max_concurrent=limit).acquire() for limit in holding]
    before = snapshot(pidfile.parent)
    with pytest.raises(module.LockHeld):
        module.PidLock(pidfile, max_concurrent=asking).acquire()
    assert (snapshot(pidfile.parent) == before) is (same or (holding, asking) == ((2, 2), 2))  # no name was free there
    assert all(lock.release() for lock in holders)


# ---- Without the flock of the directory ----


@blackbox
def test_slots_are_taken_where_a_stranger_keeps_the_directorys_flock(run, holder, pidfile, directory_flocked):
    """Red when it waits for that flock for ever."""
    holder(*of(2, pidfile))
    assert run(*of(2, pidfile), "--", "sh", "-c", "echo $PIDLOCK_SLOT", timeout=30) == (0, "2\n", "")


@blackbox
def test_slots_are_taken_in_a_directory_that_one_may_not_list(run_as_nobody, holder, public_directory):
    public_directory.chmod(0o733)
    path = public_directory / "test.pid"
    asked, outcomes = [*of(3, path), "-q", "--", "sh", "-c", "echo $PIDLOCK_SLOT"], []
    for limit in (5, 5, 3):
        outcomes.append(run_as_nobody(*asked))
        holder(*of(limit, path))
    assert outcomes == [(0, "1\n", ""), (0, "2\n", ""), (0, "3\n", "")] and run_as_nobody(*asked) == (75, "", "")


@pytest.mark.parametrize("slot", [1, 2, 3, 101, pidlock.SLOTS_MAX])
def test_each_slot_counts_in_a_directory_that_one_may_not_list(pidfile, monkeypatch, slot):
    """Red where only the names of low slots are tried, or none."""
    with PidLock(slot_file(pidfile, slot)):  # of limit 1
        monkeypatch.setattr(os, "listdir", unlistable)
        assert outcome_of(PidLock(pidfile, max_concurrent=2)) is None


def test_a_slot_counts_whose_name_the_directory_lists_in_another_case(pidfile, monkeypatch):
    """As vfat with shortname=lower does. Red where the list has to have the very name."""
    with PidLock(pidfile):
        usual = os.listdir
        monkeypatch.setattr(os, "listdir", lambda path: [name.upper() for name in usual(path)])
        assert outcome_of(PidLock(pidfile, max_concurrent=2)) is None


def test_a_slot_counts_whose_name_the_directory_lists_in_another_normalisation(tmp_path, monkeypatch):
    """As HFS+ does. Red where the list has to have the very name."""
    path = tmp_path / "caf\u00e9.pid"
    with PidLock(slot_file(path, 2)):  # of limit 1
        usual = os.listdir
        monkeypatch.setattr(os, "listdir", lambda path: [unicodedata.normalize("NFD", name) for name in usual(path)])
        assert outcome_of(PidLock(path, max_concurrent=2)) is None


@pytest.mark.parametrize("number", ["0", "10001", "20261130"])
@pytest.mark.parametrize("may_list", [True, False], ids=["listed", "not to be listed"])
def test_a_number_that_no_slot_has_is_no_slot(pidfile, monkeypatch, number, may_list):
    """Red where a directory of this name makes each run of the semaphore an error."""
    pidfile.with_name("%s.%s" % (pidfile.name, number)).mkdir()
    if not may_list:
        monkeypatch.setattr(os, "listdir", unlistable)
    with PidLock(pidfile, max_concurrent=2) as lock:
        assert lock.slot == 1


def test_two_that_cannot_take_turns_do_not_give_back_for_ever(pidfile, directory_flocked, monkeypatch):
    """With one slot taken of 3, one of limit 2 and one of limit 3 may take theirs at once: then both must give back."""
    monkeypatch.setattr(pidlock, "GUARD_PATIENCE", 0.0)
    first = PidLock(pidfile, max_concurrent=3).acquire()

    def take(limit):
        barrier.wait()
        with PidLock(pidfile, max_concurrent=limit, wait=30) as lock:
            taken.append(lock.slot)

    for _ in range(20):
        taken, barrier = [], threading.Barrier(2, timeout=30)
        threads = [threading.Thread(target=take, args=(limit,)) for limit in (2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(taken) == 2
    assert first.release() and list(pidfile.parent.iterdir()) == []


# ---- Limits that are none ----


@blackbox
@pytest.mark.parametrize("limit", ["0", "-1", "", "x", "1.5", "10001", "9" * 30, " 2", "2\n", "\uff12", "\u00b2"])
def test_a_limit_that_is_no_number_of_slots_is_wrong_usage(run, tmp_path, limit):
    status, stdout, stderr = run("--pidfile=x", "--max-concurrent=" + limit, "--", "echo", "ran", cwd=tmp_path)
    assert (status, stdout, "--max-concurrent: " in stderr, os.listdir(tmp_path)) == (2, "", True, [])


@pytest.mark.parametrize("limit", [0, -1, 1.5, "2", None, float("inf")])
def test_the_library_takes_no_such_limit_either(pidfile, limit):
    with pytest.raises(ValueError, match="max_concurrent: "):
        PidLock(pidfile, max_concurrent=limit)


@pytest.mark.parametrize("line, slot", [
    ("limit=3", 2), ("limit=2", 2), ("limit=1", None), ("", None), ("limit=", None), ("limit=0", None),
    ("limit=-3", None), ("limit=3.0", None), ("limit= 3", None), ("limit=x", None), ("limit=" + "9" * 40, None),
    ("limit=\u00b2", None), ("limit=\u0663", None), ("# debug\nlimit=3", None), ("limit=3\nlimit=1", None),
])
def test_a_file_whose_limit_is_not_legible_allows_nobody_beside_it(pidfile, line, slot):
    pidfile.write_text("%d\n\n\n%s\n" % (os.getpid(), line), encoding="utf-8")
    with open(pidfile) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lock = PidLock(pidfile, max_concurrent=3)
        assert outcome_of(lock) == slot
        lock.release()


@pytest.mark.parametrize("suffix", ["\u00b2", "\u0663", "02", "0", "-2", "2x", "log", "1", "10001", "9" * 30, ""])
@pytest.mark.parametrize("listed", [True, False])
def test_a_name_that_is_no_slots_is_not_looked_at(pidfile, monkeypatch, listed, suffix):
    """It names a living holder of limit 1, who would let nobody in."""
    pidfile.with_name("%s.%s" % (pidfile.name, suffix)).write_text("%d\n" % os.getppid())
    if not listed:
        monkeypatch.setattr(os, "listdir", unlistable)
    with PidLock(pidfile, max_concurrent=2) as first, PidLock(pidfile, max_concurrent=2) as second:
        assert (first.slot, second.slot) == (1, 2)


# ---- Probing ----


@blackbox
def test_check_and_status_tell_free_as_long_as_one_slot_is(run, holder, pidfile):
    probes = [("--check",), ("--status",), ("--status", "--json")]
    seen = [[run(*of(2, pidfile), *probe).status for probe in probes]]
    for _ in range(2):
        holder(*of(2, pidfile))
        seen.append([run(*of(2, pidfile), *probe).status for probe in probes])
    assert seen == [[0, 3, 3], [0, 3, 3], [1, 0, 0]]


@blackbox
def test_status_tells_about_each_slot(run, holder, pidfile):
    one = holder(*of(2, pidfile))
    lines = run(*of(2, pidfile), "--status").stdout.splitlines()
    assert [line.split(" for ")[0] for line in lines] == [
        "%s: held by PID %d (sh)" % (pidfile, one.pid), "%s.2: there is no file" % pidfile,
    ]
    report = json.loads(run(*of(2, pidfile), "--status", "--json").stdout)
    assert report["state"] == "free"
    assert [(slot["slot"], slot["state"], slot["pid"]) for slot in report["slots"]] == [
        (1, "held", one.pid), (2, "free", 0),
    ]


@blackbox
@pytest.mark.parametrize("holding, asking, full", [((1,), 3, True), ((5, 2), 5, True), ((5, 5), 3, False)])
def test_check_and_status_count_as_a_run_would(run, holder, pidfile, holding, asking, full):
    """Red when only the slots of its own limit are looked at, and not the limits of those that hold them."""
    for limit in holding:
        holder(*of(limit, pidfile))
    statuses = [run("-q", *of(asking, pidfile), *probe).status for probe in (["--", "true"], ["--check"], ["--status"])]
    assert statuses == ([75, 1, 0] if full else [0, 0, 3])


@blackbox
def test_a_stale_slot_is_free(run, holder, pidfile, dead_pid):
    holder(*of(2, pidfile))
    slot_file(pidfile, 2).write_text("%d\n\n\nlimit=2\n" % dead_pid)
    assert [run(*of(2, pidfile), probe).status for probe in ("--check", "--status")] == [0, 1]

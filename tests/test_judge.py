"""The judge: one row per rule of the contract and per edge of it; then the same on a filesystem without flock."""
import errno
import fcntl
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pidlock

UNMARKED = pidlock.Record(4231, False, {})
MARKED = pidlock.Record(4231, True, {})


# A minute-old file on a local disk with the PID of a living process, not written by pidlock.
USUAL = pidlock.Facts(
    record=UNMARKED, size=5, links=1, executable=False, nuls=False, age=60, flock=True, filesystem="local",
    process="alive",
)


def facts(**changes):
    return USUAL._replace(**changes)


def no_pid(**changes):
    return facts(**{"record": None, "process": "none", **changes})


ROWS = {
    # rule 2: the body is no PID
    "no PID, old": (no_pid(), "stale"),
    "no PID, empty": (no_pid(size=0), "stale"),
    "no PID, just made": (no_pid(age=0), "held"),
    "no PID, almost 2 s old": (no_pid(age=1.999), "held"),
    "no PID, 2 s old": (no_pid(age=2), "stale"),
    "no PID, 2 s ahead": (no_pid(age=-2), "held"),
    "no PID, more than 2 s ahead": (no_pid(age=-2.001), "stale"),
    "no PID, a year ahead": (no_pid(age=-3e7), "stale"),
    "no PID, 64 bytes": (no_pid(size=64), "stale"),
    "no PID, 65 bytes": (no_pid(size=65), "foreign"),
    "no PID, 65 bytes, just made": (no_pid(size=65, age=0), "foreign"),
    "no PID, 4 KiB of NULs": (no_pid(size=4096, nuls=True), "stale"),
    "no PID, 4 KiB of NULs, just made": (no_pid(size=4096, nuls=True, age=0), "held"),
    "no PID, more NULs": (no_pid(size=4097, nuls=True), "foreign"),
    "no PID, two links": (no_pid(links=2), "foreign"),
    "no PID, executable": (no_pid(executable=True), "foreign"),
    "no PID, executable and empty": (no_pid(executable=True, size=0), "foreign"),
    "no PID, on a network filesystem": (no_pid(filesystem="network"), "stale"),
    "no PID, no flock": (no_pid(flock=False), "stale"),
    "no PID, no flock, just made": (no_pid(flock=False, age=0), "held"),
    "a PID, just made": (facts(age=0, process="none"), "stale"),
    "a PID, executable and two links": (facts(executable=True, links=2, process="none"), "stale"),
    "a PID, 64 KiB long": (facts(size=65536, process="none"), "stale"),
    "a PID, longer": (facts(size=65537, process="none"), "foreign"),
    "marked, longer": (facts(size=65537, record=MARKED), "foreign"),
    # rule 3: marked, on a local filesystem
    "marked, PID alive (recycled)": (facts(record=MARKED), "stale"),
    "marked, PID gone": (facts(record=MARKED, process="none"), "stale"),
    "marked, PID is ours": (facts(record=MARKED, process="ours"), "stale"),
    "marked, just made": (facts(record=MARKED, age=0), "stale"),
    "marked, not known to be local, PID alive": (facts(record=MARKED, filesystem="other"), "held"),
    "marked, not known to be local, PID gone": (facts(record=MARKED, filesystem="other", process="none"), "stale"),
    # rule 4: a network filesystem, and no host recorded
    "network, PID alive": (facts(filesystem="network"), "inconclusive"),
    "network, PID gone": (facts(filesystem="network", process="none"), "inconclusive"),
    "network, PID is ours": (facts(filesystem="network", process="ours"), "inconclusive"),
    "network, marked": (facts(filesystem="network", record=MARKED), "inconclusive"),
    "network, marked, PID gone": (facts(filesystem="network", record=MARKED, process="none"), "inconclusive"),
    # rule 6: nobody is behind the PID
    "PID gone": (facts(process="none"), "stale"),
    "PID is ours": (facts(process="ours"), "stale"),
    "PID is a zombie": (facts(process="zombie"), "stale"),
    "PID is a thread": (facts(process="thread"), "stale"),
    "PID gone, filesystem of neither kind": (facts(process="none", filesystem="other"), "stale"),
    # rule 8: the PID exists
    "PID alive": (facts(), "held"),
    "PID alive, very old": (facts(age=1e9), "held"),
    "PID alive, a time ahead": (facts(age=-1e9), "held"),
    "PID alive, filesystem of neither kind": (facts(filesystem="other"), "held"),
    # no flock to be had
    "no flock, marked": (facts(flock=False, record=MARKED), "inconclusive"),
    "no flock, marked, PID gone": (facts(flock=False, record=MARKED, process="none"), "inconclusive"),
    "no flock, PID alive": (facts(flock=False), "held"),
    "no flock, PID gone": (facts(flock=False, process="none"), "stale"),
    "no flock, PID is a zombie": (facts(flock=False, process="zombie"), "stale"),
    "no flock, PID is ours": (facts(flock=False, process="ours"), "held"),
    "no flock, network": (facts(flock=False, filesystem="network", process="none"), "inconclusive"),
}


@pytest.mark.parametrize("given_facts, state", ROWS.values(), ids=ROWS)
def test_the_first_rule_that_fits_decides(given_facts, state):
    assert pidlock.judge(given_facts)[0] == state


ELSEWHERE = pidlock.Record(4231, False, {"host": "db1"})
REASONS = [
    (no_pid(age=0), "held by a program that is still writing its PID, it seems"),
    (no_pid(), "there is no PID in it"),
    (no_pid(refused=True), "held by a program that writes no PID"),
    (no_pid(size=65), "is somebody's file, not a pidfile"),
    (facts(size=65537), "is too long for a pidfile"),
    (facts(flock=False, record=MARKED), "held by PID 4231, it seems; this filesystem has no flock to tell by"),
    (facts(record=MARKED), "PID 4231 is no longer behind it"),
    (facts(record=ELSEWHERE, host=False), "held by PID 4231 of host db1, it seems"),
    (facts(filesystem="network"), "held by PID 4231, perhaps on another host: this is a network filesystem"),
    (facts(pidns=False), "held by PID 4231 of another PID or time namespace, it seems"),
    (facts(timens=False), "held by PID 4231 of another PID or time namespace, it seems"),
    (facts(boot=False), "PID 4231 was before the last boot"),
    (facts(process="none"), "PID 4231 does not exist"),
    (facts(process="ours"), "PID 4231 is ours, so its writer is gone"),
    (facts(process="zombie"), "PID 4231 has ended"),
    (facts(process="thread"), "PID 4231 is a thread of another process"),
    (facts(start=False), "PID 4231 was given to another process since"),
    (facts(), "held by PID 4231"),
]


@pytest.mark.parametrize("given_facts, reason", REASONS, ids=[reason for _, reason in REASONS])
def test_each_rule_has_its_reason(given_facts, reason):
    assert pidlock.judge(given_facts)[1] == reason


AGED = [
    (facts(lasted=60), "time-only", "PID 4231, alive or not, has had it for too long"),
    (facts(lasted=4), "time-only", "held by PID 4231"),
    (facts(lasted=60, record=ELSEWHERE, host=False), "pid-first",
     "held by PID 4231 of host db1, it seems, but for too long"),
    (no_pid(refused=True, lasted=60), "time-only", "there is no PID in it"),
    (no_pid(refused=True, lasted=4), "time-only", "held by a program that writes no PID"),
    (no_pid(refused=True, lasted=60), "pid-first", "held by a program that writes no PID"),
    (facts(process="none", flock=False), "pid-first",
     "PID 4231 does not exist (without flock on this filesystem, taking over cannot be exact)"),
]


@pytest.mark.parametrize("given_facts, strategy, reason", AGED, ids=["%s: %s" % row[1:] for row in AGED])
def test_an_age_and_a_takeover_without_flock_have_their_reasons(given_facts, strategy, reason):
    assert pidlock.judge(given_facts, 5, strategy)[1] == reason


def test_only_a_takeover_without_flock_is_said_to_be_not_exact():
    reasons = {(flock, process): pidlock.judge(facts(flock=flock, process=process))[1]
               for flock in (True, False) for process in ("none", "alive")}
    assert [case for case in reasons if "cannot be exact" in reasons[case]] == [(False, "none")]


MODES = {0o700: "error", 0o610: "error", 0o601: "error", 0o666: "stale"}


@pytest.mark.parametrize("mode, state", MODES.items())
def test_a_file_that_anybody_may_execute_is_no_damaged_pidfile(mode, state, pidfile):
    write_old(pidfile, b"garbage")
    pidfile.chmod(mode)
    try:
        seen = pidlock.inspect(pidfile).state
    except pidlock.PidLockError:
        seen = "error"
    assert seen == state


def test_whose_file_is_no_pidfile_is_told_what_to_do(pidfile):
    pidfile.write_bytes(b"x" * 65)
    with pytest.raises(pidlock.PidLockError) as raised:
        pidlock.PidLock(pidfile).acquire()
    assert str(raised.value) == (
        "%s: is somebody's file, not a pidfile; name another file, or remove this one if nobody needs it" % pidfile)


BLOCKS = {"NULs": (b"\0" * 4096, "stale"), "an X among them": (b"X" + b"\0" * 4095, "error"),
          "blanks": (b" " * 4096, "error"), "more NULs": (b"\0" * 4097, "error")}


@pytest.mark.parametrize("body, state", BLOCKS.values(), ids=BLOCKS)
def test_only_a_block_of_nuls_is_what_a_power_cut_leaves(body, state, pidfile):
    write_old(pidfile, body)
    try:
        seen = pidlock.inspect(pidfile).state
    except pidlock.PidLockError:
        seen = "error"
    assert seen == state


def test_a_damaged_file_that_was_unlinked_meanwhile_is_not_taken_for_somebodys_file():
    """It has no link left, since another evictor was faster; the contender starts over."""
    assert pidlock.judge(no_pid(links=0))[0] != "foreign"


any_facts = st.builds(
    facts,
    record=st.sampled_from([None, UNMARKED, MARKED]),
    size=st.integers(0, 5000),
    links=st.integers(0, 3),
    executable=st.booleans(),
    nuls=st.booleans(),
    age=st.floats(-1e10, 1e10) | st.floats(-3, 3),
    flock=st.booleans(),
    filesystem=st.sampled_from(["local", "network", "other"]),
    process=st.sampled_from(["none", "ours", "zombie", "thread", "alive"]),
)

SIGNS_OF_LIFE = {
    "its PID is alive": {"process": "alive"},
    "it is of this moment": {"age": 0.0},
    "another host may hold it": {"filesystem": "network"},
    "the kernel cannot say that nobody holds it": {"flock": False},
}


@pytest.mark.parametrize("sign", SIGNS_OF_LIFE.values(), ids=SIGNS_OF_LIFE)
@given(before=any_facts)
def test_a_sign_of_life_never_makes_a_file_stale(sign, before):
    after = before._replace(**sign)
    assert pidlock.judge(before)[0] == "stale" or pidlock.judge(after)[0] != "stale"


@given(any_facts)
def test_every_verdict_is_a_known_one_with_a_reason_of_one_line(some_facts):
    state, reason = pidlock.judge(some_facts)
    assert state in ("held", "stale", "inconclusive", "foreign")
    assert reason and reason.isprintable()


# ---- Without flock, without hard links ----

real_flock = fcntl.flock


@pytest.fixture
def no_flock(monkeypatch):
    """fcntl.flock as on a filesystem that has none: flock(2), EOPNOTSUPP."""
    monkeypatch.setattr(fcntl, "flock", failing_with(errno.EOPNOTSUPP))


def failing_with(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def write_old(path, body):
    path.write_bytes(body)
    os.utime(path, (10 ** 9, 10 ** 9))


def test_without_flock_the_file_has_no_mark(pidfile, no_flock):
    with pidlock.PidLock(pidfile):
        body = pidfile.read_bytes()
    assert (body, pidfile.exists()) == (b"%d\n" % os.getpid(), False)


def test_without_flock_our_own_pid_is_a_holder(pidfile, no_flock):
    with pidlock.PidLock(pidfile), pytest.raises(pidlock.LockHeld):
        pidlock.PidLock(pidfile).acquire()


def test_without_flock_a_dead_pid_is_taken_over_and_it_is_said_that_this_is_not_exact(pidfile, no_flock, dead_pid):
    write_old(pidfile, b"%d\n" % dead_pid)
    events = []
    with pidlock.PidLock(pidfile, on_event=events.append):
        taken = pidfile.read_bytes()
    evictions = [event["reason"] for event in events if event["event"] == "evicted"]
    assert (taken, len(evictions), "flock" in evictions[0]) == (b"%d\n" % os.getpid(), 1, True)


def test_without_flock_a_marked_file_is_held_and_the_message_says_what_to_type(pidfile, no_flock, dead_pid):
    write_old(pidfile, b"%d\n\n\n" % dead_pid)
    with pytest.raises(pidlock.LockHeld, match="rm %s" % pidfile):
        pidlock.PidLock(pidfile).acquire()
    assert pidlock.inspect(pidfile).state == "unknown"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("body", [None, b"4231\n"], ids=["no file", "a file"])
def test_any_other_error_of_flock_is_an_error_and_leaves_nothing(number, body, pidfile, monkeypatch):
    """Catches a downgrade to judging by PID."""
    if body:
        write_old(pidfile, body)
    monkeypatch.setattr(fcntl, "flock", failing_with(number))
    with pytest.raises(pidlock.PidLockError) as raised:
        pidlock.PidLock(pidfile).acquire()
    left = [path.read_bytes() for path in pidfile.parent.iterdir()]
    assert (isinstance(raised.value, pidlock.LockHeld), left) == (False, [body] if body else [])


def test_where_flock_wants_a_write_open_it_gets_one(pidfile, monkeypatch, dead_pid):
    """As over NFS: EBADF for LOCK_EX of a descriptor opened to read only."""
    def flock_of_nfs(descriptor, operation):
        if operation & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    write_old(pidfile, b"%d\n\n\n" % dead_pid)
    with pidlock.PidLock(pidfile), pytest.raises(pidlock.LockHeld):
        pidlock.PidLock(pidfile).acquire()
    assert not pidfile.exists()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_without_hard_links_the_file_is_created_in_place(number, pidfile, monkeypatch):
    monkeypatch.setattr(os, "link", failing_with(number))
    with pidlock.PidLock(pidfile):
        assert (os.listdir(pidfile.parent), pidfile.read_bytes()) == ([pidfile.name], b"%d\n\n\n" % os.getpid())
        assert pidlock.inspect(pidfile).state == "held"
    assert os.listdir(pidfile.parent) == []


def test_without_hard_links_the_holder_waits_for_a_prober_that_has_the_flock(pidfile, monkeypatch):
    """Catches a flock of the new file that is tried only once."""
    monkeypatch.setattr(os, "link", failing_with(errno.EPERM))
    probers = []

    def flock_behind_a_prober(descriptor, operation):
        """The first flock of the pidfile itself comes while a prober has it; he gives it back meanwhile."""
        if not probers and pidfile.exists() and operation & fcntl.LOCK_EX:
            probers.append(os.open(pidfile, os.O_RDONLY))
            real_flock(probers[0], fcntl.LOCK_SH)
            threading.Timer(0.02, os.close, [probers[0]]).start()
        real_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_behind_a_prober)
    with pidlock.PidLock(pidfile):
        assert (len(probers), pidfile.read_bytes()) == (1, b"%d\n\n\n" % os.getpid())

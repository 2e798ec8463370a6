"""Fencing tokens: they only ever grow, whatever is killed, removed or broken; or there is none and no command runs."""
import concurrent.futures
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from children.extras_variants import write_variant
from children.trace_calls import Traced, index_of_start
from conftest import CHILDREN, PIDLOCK
from test_paths import CAN_MOUNT, make_socket
from test_races import Contender

import pidlock
from pidlock import PidLock, PidLockError

blackbox = pytest.mark.blackbox
needs_strace = pytest.mark.skipif(not shutil.which("strace"), reason="strace shows and kills pidlock's calls")

SHOW = ("--", "sh", "-c", "echo $PIDLOCK_TOKEN")


@pytest.fixture
def counter(pidfile):
    return pidfile.with_name("test.pid.fence")


def number_in(counter):
    """Return the number in the counter, which is 20 digits and a newline."""
    assert re.fullmatch(rb"[0-9]{20}\n", counter.read_bytes())
    return int(counter.read_text())


def assert_growing(tokens):
    assert sorted(set(tokens)) == tokens


# ---- Growing ----


@blackbox
@pytest.mark.parametrize("options", [(), ("--max-concurrent", "3")], ids=["singleton", "semaphore"])
def test_each_run_gets_a_greater_token_and_a_counter_starts_at_the_clock(run, pidfile, counter, options):
    before = time.time() * 1000000
    tokens = [int(run("--pidfile", pidfile, "--fence", *options, *SHOW).stdout) for _ in range(3)]
    assert_growing([int(before), *tokens])
    assert tokens[-1] == number_in(counter) < time.time() * 1000000


@pytest.mark.parametrize("disturb", ["nothing", "a stale file", "rm of the pidfile", "rm of the counter"])
@pytest.mark.parametrize("slots", [1, 3])
def test_tokens_grow_across(pidfile, counter, disturb, slots):
    """Red when a counter that is gone starts at 1."""
    tokens, lost = [], []
    for _ in range(4):
        if disturb == "a stale file":
            pidfile.write_text("garbage")
            os.utime(pidfile, (0, 0))
        with PidLock(pidfile, fence=True, max_concurrent=slots) as lock:
            tokens.append(lock.token)
            if disturb == "rm of the pidfile":
                pidfile.unlink()
                lost.append(lock)
                with PidLock(pidfile, fence=True, max_concurrent=slots) as next_lock:
                    tokens.append(next_lock.token)
        if disturb == "rm of the counter":
            counter.unlink()
    assert_growing(tokens)


def test_the_slots_of_a_semaphore_share_the_counter(pidfile, counter):
    locks = [PidLock(pidfile, fence=True, max_concurrent=3).acquire() for _ in range(3)]
    assert_growing([lock.token for lock in locks])
    assert sorted(path.name for path in pidfile.parent.iterdir()) == [
        "test.pid", "test.pid.2", "test.pid.3", "test.pid.fence",
    ]
    for lock in locks:
        lock.release()


def test_a_token_is_one_locks_and_a_lock_without_a_fence_has_none(pidfile, counter):
    lock = PidLock(pidfile, fence=True)
    assert lock.token is None
    tokens = [lock.acquire().token, lock.release() and lock.acquire().token]
    lock.release()
    assert_growing(tokens)
    with PidLock(pidfile) as plain:
        assert (plain.token, number_in(counter)) == (None, tokens[-1])


def test_a_counter_that_is_ahead_of_the_clock_goes_on_from_there(pidfile, counter):
    """As after the clock was set back."""
    counter.write_text("%020d\n" % 10 ** 19)
    with PidLock(pidfile, fence=True) as lock:
        assert lock.token == 10 ** 19 + 1 == number_in(counter)


def test_a_counter_never_gets_longer(pidfile, counter):
    counter.write_text("9" * 20 + "\n")
    with pytest.raises(PidLockError):
        PidLock(pidfile, fence=True).acquire()
    assert (counter.read_text(), pidfile.exists()) == ("9" * 20 + "\n", False)


@blackbox
@pytest.mark.parametrize("slots", [1, 4])
def test_of_20_processes_at_once_each_gets_a_token_in_the_order_of_the_lock(pidfile, slots):
    """Each line is written while the slot is held, so the lines of one slot are in the order of its holders."""
    line = 'echo $PIDLOCK_SLOT $PIDLOCK_TOKEN >> "$0"'
    command = [*PIDLOCK, "-p", pidfile, "-w", "60", "--fence", "--max-concurrent", str(slots), "--", "sh", "-c", line]
    lines = pidfile.with_name("lines")
    runs = [subprocess.Popen([*command, lines]) for _ in range(20)]
    assert [one.wait(60) for one in runs] == [0] * 20
    pairs = [tuple(map(int, line.split())) for line in lines.read_text().splitlines()]
    assert len({token for _, token in pairs}) == 20
    for slot in range(1, slots + 1):
        assert_growing([token for of, token in pairs if of == slot])


FENCE_STORM = """
import os, sys
sys.path.insert(0, sys.argv[1])
import pidlock
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    print(pidlock._next_token(sys.argv[2]))
    if sys.argv[3:]:
        try: os.unlink(sys.argv[2])
        except FileNotFoundError: pass
"""


@pytest.mark.parametrize("variant, remove, distinct", [
    pytest.param("pidlock.py", [], True, id="20 each"),
    pytest.param("pidlock.py", ["rm"], True, id="all remove it all the time"),
    pytest.param("no flock of the counter", [], False, id="no flock of the counter"),
    pytest.param("a counter that is replaced", [], False, id="a counter that is replaced"),
])
def test_no_token_is_handed_out_twice(tmp_path, tmp_path_factory, variant, remove, distinct):
    directory = write_variant(variant, tmp_path_factory.mktemp("variant")).parent
    command = [sys.executable, "-S", "-c", FENCE_STORM, str(directory), str(tmp_path / "counter"), *remove]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(8)]
    assert [one.stdout.readline() for one in workers] == [b"ready\n"] * 8
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda one: one.communicate(b"\n", timeout=60)[0].split(), workers))
    growing = all(sorted(output) == output and len(output) == 20 for output in outputs)
    assert (len(set().union(*outputs)) == 160 and growing) is distinct


def stopped_creator(variant, pidfile, tmp_path_factory):
    """Start a contender that is about to publish a new counter."""
    source = write_variant(variant, tmp_path_factory.mktemp("variant"))
    source.write_text(source.read_text().replace("fence=False,", "fence=True,"))
    arguments = [str(CHILDREN / "race_stop_at.py"), str(source), str(pidfile), "acquire", "os.link:test.pid.fence"]
    contender = Contender([sys.executable, "-S", *arguments])
    contender.require("at os.link", contender.said)
    return contender


@pytest.mark.parametrize("variant, grows", [("pidlock.py", True), ("a stopped creator's clock", False)])
def test_a_creator_of_the_counter_that_was_stopped_hands_out_no_lower_token(
    pidfile, counter, tmp_path_factory, variant, grows
):
    """While it is stopped, another counter comes, gives a token, and is removed."""
    slow = stopped_creator(variant, pidfile, tmp_path_factory)
    try:
        other = pidlock._next_token(str(counter))
        counter.unlink()
        assert (slow.go(), number_in(counter) > other) == ("acquired", grows)
    finally:
        slow.end()


def test_a_creator_of_the_counter_whose_private_name_was_swept_starts_over(pidfile, counter, tmp_path_factory):
    slow = stopped_creator("pidlock.py", pidfile, tmp_path_factory)
    try:
        next(pidfile.parent.glob(".pidlock-*")).unlink()
        assert (slow.go(), number_in(counter) > 10 ** 15) == ("acquired", True)
    finally:
        slow.end()


def test_a_counter_that_was_removed_while_it_was_waited_for_is_not_bumped(pidfile, counter):
    """Red when the number comes from a file that its name no longer names: the next one may be the same."""
    with open(os.open(counter, os.O_RDWR | os.O_CREAT), "w") as old:
        old.write("%020d\n" % 7)
        old.flush()
        fcntl.flock(old, fcntl.LOCK_EX)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            token = pool.submit(pidlock._next_token, str(counter))
            assert not token.done()
            counter.unlink()
            fcntl.flock(old, fcntl.LOCK_UN)
            assert token.result(60) == number_in(counter) > 10 ** 15


# ---- On disk ----

BUMP = ("openat flock pread64 pwrite64 fsync link linkat unlink unlinkat ftruncate rename write"
        " clone clone3 vfork").split()


@pytest.fixture
def traced(tmp_path_factory):
    return Traced(tmp_path_factory.mktemp("strace") / "log", BUMP)


def prepare(pidfile, counter, start):
    for path in pidfile.parent.iterdir():
        path.unlink()
    if start == "there":
        counter.write_text("%020d\n" % 41)


@blackbox
@needs_strace
def test_a_bump_is_one_write_of_the_same_width_and_on_disk_before_the_token_is_out(traced, pidfile, counter):
    """Red without the fsync, with one behind the command's start, and with a truncate, a rename or a second write."""
    prepare(pidfile, counter, "there")
    assert traced.run("-p", pidfile, "--fence", *SHOW) == (0, "42\n", "")
    calls = traced.calls(counter.name)
    names = [call.name for call in calls]
    assert names[:7] == "openat pread64 flock pread64 pwrite64 fsync flock".split() and "LOCK_UN" in calls[6].arguments
    assert not {"pwrite64", "ftruncate", "rename"} & {*names[7:index_of_start(calls)]}
    assert '"%020d\\n", 21, 0)' % 42 in calls[4].arguments


@blackbox
@needs_strace
def test_a_new_counter_appears_complete_and_with_its_name_on_disk(traced, pidfile, counter):
    """Red without the fsync of the directory, and when the counter is created under its own name."""
    assert traced.run("-p", pidfile, "--fence", "--", "true") == (0, "", "")
    calls = [call for call in traced.calls(counter.name) if "/proc/" not in call[2]]
    names = " ".join(name for name, _, _ in calls).replace("linkat", "link")
    assert names.startswith("openat openat flock write fsync link unlink flock openat fsync"
                            " openat pread64 flock pread64 pwrite64 fsync flock")
    assert ".pidlock-" in calls[1][2] and "O_DIRECTORY" in calls[8][2]
    created = [arguments for _, _, arguments in calls if "O_CREAT" in arguments]
    assert len(created) == 1


@blackbox
@needs_strace
@pytest.mark.parametrize("start", ["there", "missing"])
def test_kill_9_before_any_call_of_the_bump_repeats_and_loses_no_token(traced, pidfile, counter, start):
    """Red when the counter is emptied before it is written, and when it is created under its own name."""
    prepare(pidfile, counter, start)
    traced.run("-p", pidfile, "--fence", *SHOW)
    calls = traced.calls(counter.name)
    calls = calls[:index_of_start(calls) + 1]
    assert {"openat", "flock", "pread64", "pwrite64", "fsync"} < {name for name, _, _ in calls}
    highest = number_in(counter)
    for name, ordinal, _ in calls:
        if start == "missing":
            counter.unlink()
        killed = traced.run("-q", "-p", pidfile, "--fence", *SHOW, inject=["%s:signal=KILL:when=%d" % (name, ordinal)])
        left = number_in(counter) if counter.exists() else 0
        with PidLock(pidfile, fence=True) as lock:
            seen = (name, ordinal, killed, start == "missing" or left >= highest, lock.token > max(left, highest))
            assert seen == (name, ordinal, (-9, "", ""), True, True)
            highest = lock.token


@blackbox
@needs_strace
@pytest.mark.parametrize("start, fault", [
    ("there", "pwrite64:error=ENOSPC"), ("there", "pwrite64:error=EIO"), ("there", "pwrite64:retval=3"),
    ("there", "pread64:error=EIO"), ("there", "fsync:error=EIO"), ("missing", "fsync:error=EIO"),
    ("missing", "write:error=ENOSPC"), ("missing", "write:retval=3"),
])
def test_a_call_that_fails_is_125_before_the_command_runs(traced, run, pidfile, counter, start, fault):
    """Red when the token is handed out though it may not be on disk."""
    prepare(pidfile, counter, start)
    name = fault.split(":")[0]
    traced.run("-p", pidfile, "--fence", "--", "true")
    ordinal = [call[1] for call in traced.calls(counter.name) if call[0] == name][0]
    prepare(pidfile, counter, start)
    status, stdout, stderr = traced.run("-p", pidfile, "--fence", *SHOW, inject=["%s:when=%d" % (fault, ordinal)])
    assert (status, stdout, stderr.count("\n"), pidfile.exists()) == (125, "", 1, False)
    problem = os.strerror(errno.EIO if "EIO" in fault else errno.ENOSPC)
    assert stderr.startswith("pidlock: %s: " % counter) and problem in stderr
    assert [path.name for path in pidfile.parent.iterdir()] == ["test.pid.fence"] * (start == "there")
    assert run("-p", pidfile, "--fence", "--", "true") == (0, "", "")


# ---- Counters that are none ----

NO_COUNTERS = {
    "empty": b"", "short": b"12\n", "garbage": b"no number whatsoever\n", "without its newline": b"%020d" % 7,
    "with a second line": b"%020d\n\n" % 7, "a negative number": b"-%019d\n" % 7, "blanks": b" " * 20 + b"\n",
    "of NULs": b"\0" * 21, "long": b"%020d\n" % 7 * 9, "of other digits": "\u0661".encode() * 10 + b"\n",
    "a newline too early": b"%019d\n\n" % 7,
}


@blackbox
@pytest.mark.parametrize("body", NO_COUNTERS.values(), ids=NO_COUNTERS)
def test_a_damaged_counter_is_125_and_never_a_low_number(run, pidfile, counter, body):
    counter.write_bytes(body)
    line = "pidlock: %s: is no fencing counter; name another file; if it is damaged, remove it\n" % counter
    assert run("-p", pidfile, "--fence", "--", "echo", "ran") == (125, "", line)
    assert (counter.read_bytes(), [path.name for path in pidfile.parent.iterdir()]) == (body, [counter.name])


@blackbox
@pytest.mark.parametrize("make", [
    lambda path: path.mkdir(), lambda path: path.symlink_to("elsewhere"), os.mkfifo, make_socket,
    lambda path: path.symlink_to("/dev/null"),
], ids=["a directory", "a dangling link", "a FIFO", "a socket", "a link"])
def test_what_cannot_be_a_counter_is_125_with_a_line(run, pidfile, counter, make):
    make(counter)
    status, stdout, stderr = run("-p", pidfile, "--fence", "--", "echo", "ran", timeout=30)
    assert (status, stdout, stderr.count("\n"), stderr.startswith("pidlock: %s: " % counter)) == (125, "", 1, True)
    assert "pidfile" not in stderr and "seek" not in stderr
    assert [path.name for path in pidfile.parent.iterdir()] == [counter.name]


@blackbox
@pytest.mark.parametrize("name", ["/dev/null", "/dev/zero", "missing/counter", "file/counter", "", "x" * 300, "new/"])
def test_a_fence_file_that_cannot_be_is_said(run, pidfile, tmp_path, name):
    (tmp_path / "file").touch()
    status, stdout, stderr = run("-p", "test.pid", "--fence=" + name, "--", "echo", "ran", cwd=tmp_path)
    if name in ("", "missing/counter"):  # FILE.fence; and missing parents are made, as a pidfile's
        assert (status, stdout, stderr) == (0, "ran\n", "")
    else:
        assert (status, stdout, stderr.count("\n"), pidfile.exists()) == (125, "", 1, False)


@blackbox
@pytest.mark.parametrize("mode", [0o000, 0o400, 0o444, 0o200, 0o222])
def test_a_counter_that_one_may_not_read_or_write_is_125(run_as_nobody, public_directory, mode):
    public_directory.chmod(0o777)
    counter = public_directory / "test.pid.fence"
    counter.write_text("%020d\n" % 7)
    counter.chmod(mode)
    status, stdout, stderr = run_as_nobody("-p", public_directory / "test.pid", "--fence", "--", "echo", "ran")
    assert (status, stdout, stderr.count("\n")) == (125, "", 1)
    assert stderr.startswith("pidlock: %s: " % counter) and os.strerror(errno.EACCES) in stderr
    assert ([path.name for path in public_directory.iterdir()], number_in(counter)) == (["test.pid.fence"], 7)


@blackbox
@pytest.mark.skipif(not CAN_MOUNT, reason="needs root and unshare to mount filesystems of its own")
@pytest.mark.parametrize("options, problem", [
    ("size=4k", "No space left on device"), ("nr_inodes=1", "No space left on device"), ("ro", "Read-only file system"),
])
def test_a_counter_on_a_filesystem_that_takes_none_is_125(tmp_path, options, problem):
    (tmp_path / "mnt").mkdir()
    script = 'mount -t tmpfs -o "$0" none mnt && { head -c 4096 /dev/zero > mnt/filler; } 2>&-; "$@"; echo $?; ls -A'
    pidlock = [*PIDLOCK, "-p", "test.pid", "--fence=mnt/counter", "--", "echo", "ran"]
    done = subprocess.run(["unshare", "-m", "sh", "-c", script, options, *pidlock], cwd=tmp_path, timeout=30,
                          universal_newlines=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.stdout.split(), problem in done.stderr, done.stderr.count("\n")) == (["125", "mnt"], True, 1)


def test_a_counter_whose_flock_a_stranger_keeps_is_an_error_and_not_bumped(pidfile, counter, monkeypatch):
    monkeypatch.setattr(pidlock, "COUNTER_PATIENCE", 0.05)
    counter.write_text("%020d\n" % 7)
    with open(counter) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(PidLockError, match="flock"):
            PidLock(pidfile, fence=True).acquire()
    assert (number_in(counter), pidfile.exists()) == (7, False)


@blackbox
def test_a_lock_named_as_its_own_counter_is_refused_at_once(run, pidfile):
    """Red where its flock, which is ours, is waited for first."""
    line = "pidlock: %s: is no fencing counter; name another file; if it is damaged, remove it\n" % pidfile
    outcome = run("-p", pidfile, "--fence=%s" % pidfile, "--", "echo", "ran", timeout=30)
    assert (outcome, pidfile.exists()) == ((125, "", line), False)


@blackbox
@pytest.mark.parametrize("signum, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_wait_for_the_counter(pidfile, counter, signum, status):
    """Red where it comes through only after COUNTER_PATIENCE."""
    counter.write_text("%020d\n" % 7)
    with open(counter) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = subprocess.Popen([*PIDLOCK, "-p", pidfile, "--fence", "--", "echo", "ran"], stdout=subprocess.PIPE)
        deadline = time.monotonic() + 30
        while not pidfile.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signum)
        assert (process.communicate(timeout=30)[0], process.returncode) == (b"", status)
    assert (number_in(counter), pidfile.exists()) == (7, False)


@blackbox
def test_a_counter_is_never_taken_for_a_stale_pidfile(run, pidfile, counter):
    """Red where 20 digits are a damaged PID: the token would go down, for this counter is ahead of the clock."""
    counter.write_text("%020d\n" % 99991234567890123457)
    os.utime(counter, (0, 0))
    status, stdout, stderr = run("-p", counter, "--", "echo", "ran")
    assert (status, stdout, stderr.partition(";")[0]) == (
        125, "", "pidlock: %s: is a fencing counter, not a pidfile" % counter)
    assert run("-p", pidfile, "--fence", "--", "sh", "-c", "echo $PIDLOCK_TOKEN").stdout == "99991234567890123458\n"


@blackbox
def test_a_pid_of_20_digits_is_a_pid(run, pidfile):
    """Leading zeros are fine in one. Red where the digits' number alone makes a counter of it."""
    pidfile.write_text("%020d\n" % os.getpid())
    assert run("-p", pidfile, "--check") == (1, "", "")


def test_a_relative_counter_in_a_removed_working_directory_is_an_error_of_the_lock(pidfile, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(PidLockError, match="bump the counter"):
        PidLock(pidfile, fence="counter").acquire()
    assert not pidfile.exists()


def test_a_failed_bump_gives_the_lock_and_its_descriptors_back(pidfile, counter):
    counter.write_text("garbage")
    before = sorted(os.listdir("/proc/self/fd"))
    for slots in (1, 2):
        lock = PidLock(pidfile, fence=True, max_concurrent=slots)
        with pytest.raises(PidLockError):
            lock.acquire()
        assert (lock.token, lock.release(), pidfile.exists(), sorted(os.listdir("/proc/self/fd"))) == \
            (None, True, False, before)
    counter.unlink()
    with lock:
        assert lock.token == number_in(counter)


# ---- The command line ----


@blackbox
def test_fence_alone_takes_nothing_from_the_command(run, pidfile, counter):
    """Red when the word behind it is taken for its FILE."""
    assert run("-p", pidfile, "--fence", "echo", "ran") == (0, "ran\n", "")
    assert run("--fence", "-p", pidfile, "echo", "ran") == (0, "ran\n", "")
    assert run("-p", pidfile, "--fence", "--", "echo", "--fence=x") == (0, "--fence=x\n", "")
    assert [path.name for path in pidfile.parent.iterdir()] == [counter.name]


@blackbox
def test_a_fence_file_is_where_pidlock_started_and_may_be_shared(run, tmp_path):
    runs = [run("-p", name, "--fence=shared", *SHOW, cwd=tmp_path) for name in ("a.pid", "b.pid", "a.pid")]
    tokens = [int(one.stdout) for one in runs]
    assert_growing(tokens)
    assert ([path.name for path in tmp_path.iterdir()], number_in(tmp_path / "shared")) == (["shared"], tokens[-1])


@blackbox
def test_the_token_of_an_outer_pidlock_does_not_leak_inward(run, tmp_path):
    inner = [*PIDLOCK, "-p", "inner.pid", "--", "sh", "-c", "echo ${PIDLOCK_TOKEN-none}"]
    assert run("-p", "outer.pid", "--fence", *inner, cwd=tmp_path) == (0, "none\n", "")
    inner.insert(-4, "--fence")
    (tmp_path / "inner.pid.fence").write_text("%020d\n" % 7)
    assert run("-p", "outer.pid", "--fence", *inner, cwd=tmp_path) == (0, "8\n", "")


@blackbox
@pytest.mark.parametrize("probe", ["--check", "--status"])
def test_a_probe_takes_no_token(run, pidfile, probe):
    status, _, stderr = run("-p", pidfile, "--fence", probe)
    assert (status, "--fence" in stderr, list(pidfile.parent.iterdir())) == (2, True, [])


@blackbox
def test_who_is_refused_takes_no_token(run, holder, pidfile, counter):
    holder("-p", pidfile)
    assert run("-q", "-p", pidfile, "--fence", "--", "true") == (75, "", "")
    assert not counter.exists()


def test_the_library_takes_the_path_of_a_counter(pidfile, tmp_path):
    for fence in (tmp_path / "counter", str(tmp_path / "counter"), os.fsencode(tmp_path / "counter")):
        with PidLock(pidfile, fence=fence) as lock:
            assert lock.token == number_in(tmp_path / "counter")

"""Waiting for the lock: how long, what wakes it, what it costs, and what it leaves behind (nothing)."""
import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from conftest import CHILDREN, PIDLOCK, ROOT

import pidlock
from pidlock import LockHeld, PidLock

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's /proc")
needs_hooks = pytest.mark.skipif(sys.version_info < (3, 8), reason="audit hooks came with 3.8")


class Waiter:
    """A process that waits for the lock of this path for ever; see children/lock_waiter.py."""

    def __init__(self, path, *arguments):
        command = [sys.executable, CHILDREN / "lock_waiter.py", path, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self.process.pid

    def says(self, seconds=30):
        """Return its next line; after so many seconds (no wait for a lock comes near them) fail."""
        assert select.select([self.process.stdout], [], [], seconds)[0], "the waiter says nothing"
        return self.process.stdout.readline()


@pytest.fixture
def waiter():
    """Start waiters: waiter(path, *arguments of lock_waiter.py) -> Waiter."""
    waiters = []

    def start(*arguments):
        waiters.append(Waiter(*arguments))
        return waiters[-1]

    yield start
    for one in waiters:
        one.process.kill()
        one.process.communicate()


# ---- How long ----


@pytest.mark.parametrize("wait", [0, 0.0, 0.001, 0.3, 1])
def test_after_its_time_a_waiter_is_told_who_holds_it(wait, pidfile, holder):
    one = holder("-p", pidfile)
    started = time.monotonic()
    with pytest.raises(LockHeld) as raised:
        PidLock(pidfile, wait=wait).acquire()
    assert (raised.value.pid, time.monotonic() - started >= wait) == (one.pid, True)


def test_without_a_wait_nobody_sleeps(pidfile, holder, monkeypatch):
    def sleep(*_):
        raise AssertionError("slept")

    holder("-p", pidfile)
    with monkeypatch.context() as patch, pytest.raises(LockHeld):
        patch.setattr(time, "sleep", sleep)
        patch.setattr(select, "poll", sleep)
        PidLock(pidfile).acquire()


@pytest.mark.parametrize("step", [-3600, 3600], ids=["back", "ahead"])
def test_a_clock_that_jumps_changes_no_deadline(step, pidfile, holder, monkeypatch):
    """Catches a deadline on time.time(): over at once, or never."""
    clock = [time.time()]

    def jumping():
        clock[0] += step
        return clock[0]

    holder("-p", pidfile)
    monkeypatch.setattr(time, "time", jumping)
    started = time.monotonic()
    with pytest.raises(LockHeld):
        PidLock(pidfile, wait=0.2).acquire()
    assert 0.2 <= time.monotonic() - started < 30


# ---- What wakes it ----


@needs_hooks
def test_the_end_of_the_holders_process_wakes_a_waiter(pidfile, holder, waiter):
    one = holder("-p", pidfile)
    other = waiter(pidfile)
    assert other.says() == b"waiting\n"
    one.finish()
    assert other.says() == b"acquired\n"


@needs_proc
@needs_hooks
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open: Linux 5.3, Python 3.9")
@pytest.mark.parametrize("how", ["finish", "kill"])
def test_the_end_of_the_holders_process_wakes_a_waiter_at_once(how, pidfile, waiter):
    """With a timer of an hour only the pidfd can wake it."""
    code = "import pidlock, sys; lock = pidlock.PidLock(sys.argv[1]).acquire(); print(); input(); lock.release()"
    holder = subprocess.Popen([sys.executable, "-c", code, pidfile], cwd=ROOT, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    holder.stdout.readline()
    other = waiter(pidfile, "no-timer", "no-watch")
    wait_for_descriptor(other.pid, "Pid:")
    if how == "kill":
        holder.kill()
    holder.communicate(b"\n", timeout=60)
    assert (other.says(), other.says()) == (b"waiting\n", b"acquired\n")  # a second look, and a success


@needs_hooks
@pytest.mark.parametrize("without", [[], ["no-pidfd"], ["no-watch"], ["no-pidfd", "no-watch"]], ids=" ".join)
def test_a_release_by_a_process_that_lives_on_wakes_a_waiter(without, pidfile, waiter):
    """Catches a waiter that relies on the pidfd or on inotify alone."""
    lock = PidLock(pidfile).acquire()
    other = waiter(pidfile, *without)
    assert other.says() == b"waiting\n"
    assert (lock.release(), other.says()) == (True, b"acquired\n")


def wait_for_descriptor(pid, word):
    """Wait until a process has a descriptor that /proc describes by this word (proc(5), fdinfo), and sleeps."""
    deadline = time.monotonic() + 30
    while not any(word in text for text in descriptors_of(pid)) or state_of(pid) != "S":
        assert time.monotonic() < deadline, "it does not sleep on %s" % word
        time.sleep(0.001)


def descriptors_of(pid):
    for name in os.listdir("/proc/%d/fdinfo" % pid):
        try:
            with open("/proc/%d/fdinfo/%s" % (pid, name)) as file:
                yield file.read()
        except FileNotFoundError:
            pass


def state_of(pid):
    with open("/proc/%d/stat" % pid) as file:
        return file.read().rpartition(")")[2].split()[0]


@needs_proc
@needs_hooks
@pytest.mark.parametrize("how", ["release", "rm", "mv", "replace"])
def test_whoever_takes_the_file_away_wakes_a_waiter_at_once(how, pidfile, waiter, dead_pid):
    """With a timer of an hour only inotify can wake it: the holder lives on."""
    lock = PidLock(pidfile).acquire()
    other = waiter(pidfile, "no-timer", "no-pidfd")
    wait_for_descriptor(other.pid, "inotify wd:")
    if how == "release":
        lock.release()
    elif how == "rm":
        pidfile.unlink()
    elif how == "mv":
        pidfile.rename(pidfile.with_name("elsewhere"))
    else:
        new = pidfile.with_name("new")
        new.write_bytes(b"%d\n\n\n" % dead_pid)
        new.rename(pidfile)
    assert [other.says(), other.says()] == [b"waiting\n", b"acquired\n"]


@needs_proc
def test_the_end_of_a_killed_wrappers_job_wakes_a_sleeper_at_once(pidfile, holder):
    """The file stays, and no process that is known ends: catches a watch that misses the close."""
    one = holder("-p", pidfile)
    one.kill_wrapper()
    found = pidlock._examine(str(pidfile), fcntl.LOCK_SH, (None, "pid-first"))
    watch = pidlock._open_watch()

    def finish_when_watched():
        wait_for_descriptor(os.getpid(), "inotify wd:")
        one.finish()

    thread = threading.Thread(target=finish_when_watched)
    thread.start()
    try:
        assert pidlock._sleep_until_change([found], {found.pid}, watch, 3600) == {0}
    finally:
        thread.join()
        os.close(watch.descriptor)


@needs_proc
@needs_hooks
def test_a_change_between_the_look_and_the_watch_is_not_missed(pidfile, waiter):
    """With a timer of an hour: catches a sleep that trusts in a watch which came too late."""
    lock = PidLock(pidfile).acquire()
    other = waiter(pidfile, "no-timer", "no-pidfd", "pause-before-watch")
    assert other.says() == b"watching\n"
    lock.release()
    other.process.stdin.write(b"\n")
    other.process.stdin.flush()
    assert [other.says(), other.says()] == [b"waiting\n", b"acquired\n"]


@needs_hooks
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there is none anyway")
def test_without_pidfd_open_the_end_of_the_holder_wakes_a_waiter_too(pidfile, holder, waiter):
    one = holder("-p", pidfile)
    other = waiter(pidfile, "no-pidfd")
    assert other.says() == b"waiting\n"
    one.finish()
    assert other.says() == b"acquired\n"


@needs_hooks
def test_a_file_removed_by_hand_wakes_a_waiter(pidfile, holder, waiter):
    one = holder("-p", pidfile)
    other = waiter(pidfile)
    assert other.says() == b"waiting\n"
    pidfile.unlink()
    assert (other.says(), one.process.poll()) == (b"acquired\n", None)


@needs_hooks
def test_the_end_of_a_killed_wrappers_job_wakes_a_waiter(pidfile, holder, waiter):
    """And not the wrapper's death: its job lives on. Catches a holder that does not let its command inherit."""
    one = holder("-p", pidfile)
    other = waiter(pidfile)
    assert other.says() == b"waiting\n"
    one.kill_wrapper()
    with pytest.raises(LockHeld):
        PidLock(pidfile, wait=0.2).acquire()
    one.finish()
    assert other.says() == b"acquired\n"


@needs_proc
def test_where_no_watch_is_to_be_had_the_timer_is_short(pidfile, holder):
    """inotify_add_watch fails with ENOSPC when a user has too many: catches a sleep that trusts in it."""
    holder("-p", pidfile)
    found = pidlock._examine(str(pidfile), fcntl.LOCK_SH, (None, "pid-first"))
    watch = pidlock._open_watch()
    none = watch._replace(libc=types.SimpleNamespace(inotify_add_watch=lambda *_: -1))
    assert pidlock._sleep_until_change([found], {found.pid}, none, 3600) == set()
    os.close(watch.descriptor)


@needs_proc
def test_where_a_stranger_keeps_a_stale_file_busy_the_timer_is_short(pidfile, dead_pid):
    """Its read-only descriptor closes without a word to the watch."""
    pidfile.write_text("%d\n\n\n" % dead_pid)
    with open(pidfile) as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        found = pidlock._examine(str(pidfile), fcntl.LOCK_SH, (None, "pid-first"))
        watch = pidlock._open_watch()
        assert pidlock._sleep_until_change([found], set(), watch, 3600) == set()
        os.close(watch.descriptor)


@needs_proc
def test_where_neither_flock_nor_pidfd_tells_of_the_holder_the_timer_is_short(pidfile):
    """No watch tells of a foreign holder's end."""
    pidfile.write_text("%d\n" % os.getppid())
    found = pidlock._examine(str(pidfile), fcntl.LOCK_SH, (None, "pid-first"))
    watch = pidlock._open_watch()
    assert pidlock._sleep_until_change([found], {found.pid}, watch, 3600) == set()
    os.close(watch.descriptor)


def test_a_watch_that_the_waiters_own_looks_wake_does_not_make_it_spin(pidfile, holder, monkeypatch):
    """As over NFS, where flock wants a write-open, whose close wakes all waiters. Without a brake: 10,000 looks."""
    looks = []

    def flock(descriptor, operation):
        looks.append(operation)
        if operation & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real_flock(descriptor, operation)

    holder("-p", pidfile)
    real_flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(LockHeld):
        PidLock(pidfile, wait=1).acquire()
    assert len(looks) < 300


def test_what_cannot_be_looked_at_ends_the_wait_with_a_pidlock_error(pidfile, holder, monkeypatch):
    """Catches an error of the sleep that nobody explains."""
    holder("-p", pidfile)
    directory = pidfile.parent / "directory"
    path = directory / "test.pid"
    directory.mkdir()
    path.write_text("%d\n" % os.getpid())

    def remove_directory():
        path.unlink()
        directory.rmdir()
        directory.write_text("a file by now")
        return open_watch()

    open_watch = pidlock._open_watch
    monkeypatch.setattr(pidlock, "_open_watch", remove_directory)
    with pytest.raises(pidlock.PidLockError) as raised:
        PidLock(path, wait=1, stale_after=3600, stale_strategy="time-only").acquire()
    assert str(raised.value).startswith("%s: cannot open it: Not a directory; " % path)


def take_after_a_wait(pidfile):
    first = PidLock(pidfile).acquire()
    timer = threading.Timer(0.05, first.release)
    timer.start()
    lock = PidLock(pidfile, wait=30).acquire()
    timer.join()
    return lock


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.parametrize("kind", ["file", "epoll"])
def test_a_descriptor_that_was_closed_and_opened_anew_is_not_the_watch(kind, pidfile):
    """A daemoniser closes all; catches a release that closes a number which is a stranger's by now.

    An epoll has the same st_dev and st_ino as the watch.
    """
    lock = take_after_a_wait(pidfile)
    watch = lock._watch.descriptor
    with open(pidfile.with_name("data"), "w") if kind == "file" else select.epoll() as other:
        os.dup2(other.fileno(), watch)
        lock.release()
        os.fstat(watch)
        os.close(watch)


@needs_proc
def test_a_watch_that_was_closed_is_not_closed_again(pidfile, monkeypatch):
    """Its number may be another thread's a moment later. Red where a /proc without it counts as none."""
    def close(descriptor):
        closed.append(descriptor)
        usual_close(descriptor)

    closed, usual_close = [], os.close
    lock = take_after_a_wait(pidfile)
    watch = lock._watch.descriptor
    os.close(watch)
    monkeypatch.setattr(os, "close", close)
    assert (lock.release(), watch in closed) == (True, False)


def test_a_foreign_holder_that_ends_wakes_a_waiter(pidfile):
    """It has no flock: its PID is all there is."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        pidfile.write_bytes(b"%d\n" % process.pid)
        end = threading.Timer(0.05, process.communicate)  # in this order or the other, the outcome is the same
        end.start()
        with PidLock(pidfile, wait=30):
            assert pidfile.read_bytes() == b"%d\n\n\n" % os.getpid()
        end.join()


def test_a_waiter_may_be_any_thread(pidfile):
    got = []

    def work():
        with PidLock(pidfile, wait=float("inf")) as lock:
            got.append(lock.pid)

    threads = [threading.Thread(target=work) for _ in range(3)]
    with PidLock(pidfile):
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(30)
    assert (got, pidfile.exists()) == ([os.getpid()] * 3, False)


# ---- Whom it must not wait for ----


def test_who_waits_for_others_beside_its_ancestor_is_asked_again_when_they_have_left(pidfile, monkeypatch):
    """Red where only a holder who has not been seen yet brings the question up."""
    monkeypatch.setenv("PIDLOCK_PID", str(os.getppid()))
    sleep = pidlock._make_sleep(str(pidfile), set(), quiet=True)
    other = subprocess.Popen(["sleep", "600"])
    try:
        findings = []
        for name, pid in (("test.pid", os.getppid()), ("test.pid.2", other.pid)):
            pidfile.with_name(name).write_text("%d\n" % pid)
            path = str(pidfile.with_name(name))
            findings.append(pidlock._examine(path, fcntl.LOCK_SH, (None, pidlock.PID_FIRST)))
        assert sleep(findings, set(), None, 0.001) == set()
        with pytest.raises(LockHeld, match="waits for this very process"):
            sleep(findings[:1], set(), None, 0.001)
    finally:
        other.kill()
        other.wait()


CLOSE_AND_LOCK = """
import subprocess, sys
print("ready", flush=True)
input()
print(subprocess.call(sys.argv[1:], stderr=subprocess.DEVNULL), flush=True)
"""


@pytest.mark.blackbox
@pytest.mark.skipif(not os.path.exists("/proc/self/fdinfo"), reason="needs Linux's /proc")
def test_the_job_of_a_killed_pidlock_does_not_wait_for_itself(pidfile):
    """Its ancestor has the flock, and it has not inherited it. Red where only its own descriptors are looked at."""
    inner = [*PIDLOCK, "-p", pidfile, "--wait", "600", "--", "true"]
    with subprocess.Popen([*PIDLOCK, "-p", pidfile, "--", sys.executable, "-c", CLOSE_AND_LOCK, *inner],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        process.wait()
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"75\n"


@pytest.mark.blackbox
@pytest.mark.skipif(not os.path.exists("/proc/self/fdinfo"), reason="needs Linux's /proc")
def test_what_a_program_starts_does_not_wait_for_the_lock_that_this_holds_by_the_library(run, pidfile):
    """No variable says so, as those of a command's lock do. Red where only they are asked."""
    with PidLock(pidfile):
        status, stdout, stderr = run("-p", pidfile, "--wait", "600", "--", "true")
    said = "held by PID %d, which waits for this very process; lock once, outside\n" % os.getpid()
    assert (status, stdout, stderr) == (75, "", "pidlock: %s: %s" % (pidfile, said))


FLOCK_INHERITED = """
import fcntl, sys
fcntl.flock(int(sys.argv[1]), fcntl.LOCK_EX)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/fdinfo"), reason="needs Linux's /proc")
def test_who_has_the_flock_of_a_holder_that_is_no_ancestor_waits_for_it_as_long_as_it_lives(pidfile):
    """A daemon that its command left behind, say. Red where an inherited descriptor alone tells."""
    with pidfile.open("w") as file:
        words = [sys.executable, "-c", FLOCK_INHERITED, str(file.fileno())]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file.fileno()]) as other:
            assert other.stdout.readline() == b"ready\n"
            pidfile.write_bytes(b"%d\n\n\n" % other.pid)
            found = pidlock._examine(str(pidfile), fcntl.LOCK_SH, (None, pidlock.PID_FIRST))
            assert (found.refused, pidlock._waits_for_us(found)) == (True, False)
            other.stdin.close()
        assert pidlock._waits_for_us(found)


@pytest.mark.blackbox
@pytest.mark.skipif(not os.path.exists("/proc/self/fdinfo"), reason="needs Linux's /proc")
@pytest.mark.parametrize("kind", [fcntl.LOCK_SH, fcntl.LOCK_EX], ids=["a prober", "an evictor"])
def test_an_ancestor_that_looks_at_a_stale_file_is_not_its_holder(run, pidfile, dead_pid, kind):
    """We are the ancestor. Red where whoever has a dead holder's file flocked counts as who inherited that."""
    pidfile.write_text("%d\n\n\n" % dead_pid)
    with open(str(pidfile)) as file:
        fcntl.flock(file, kind)
        status, stdout, stderr = run("-p", pidfile, "--wait", "1.5", "--", "true")
    assert (status, stdout) == (75, "") and "busy: PID %d" % os.getpid() in stderr
    assert run("-q", "-p", pidfile, "--wait", "60", "--", "true") == (0, "", "")


# ---- What it costs, and what it leaves ----


def left_behind():
    """Our descriptors, threads and children."""
    children = [open("/proc/self/task/%s/children" % task).read() for task in os.listdir("/proc/self/task")]
    return sorted(os.listdir("/proc/self/fd")), sorted(os.listdir("/proc/self/task")), sorted("".join(children).split())


def comes_back_to(before):
    """Tell whether all is as before; a thread that was joined is in /proc for a moment more."""
    deadline = time.monotonic() + 10
    while left_behind() != before and time.monotonic() < deadline:
        time.sleep(0.001)
    return left_behind() == before


@needs_proc
def test_a_hundred_waits_in_vain_leave_nothing(pidfile, holder):
    one = holder("-p", pidfile)
    before = left_behind()
    for _ in range(100):
        with pytest.raises(LockHeld):
            PidLock(pidfile, wait=0.003).acquire()
    assert left_behind() == before
    one.finish()
    assert not pidfile.exists()


@needs_proc
def test_a_wait_in_vain_leaves_nothing_without_a_proc_either(pidfile, holder, monkeypatch):
    """Catches a watch that is closed only where /proc tells what it is."""
    holder("-p", pidfile)
    before = left_behind()
    readlink, exists = os.readlink, os.path.exists
    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", lambda path: readlink(str(path).replace("/proc/", "/no-proc/")))
        patch.setattr(os.path, "exists", lambda path: exists(str(path).replace("/proc/", "/no-proc/")))
        with pytest.raises(LockHeld):
            PidLock(pidfile, wait=0.1).acquire()
    assert left_behind() == before


@needs_proc
def test_a_failure_behind_the_wait_leaves_nothing_either(pidfile, monkeypatch):
    """There is no token, and then the file cannot be removed: catches a watch that nobody closes."""
    def fail(*_):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    def fail_for_good(*_):
        monkeypatch.setattr(pidlock, "_remove_if_same", fail)
        fail()

    before = left_behind()
    other = PidLock(pidfile).acquire()
    timer = threading.Timer(0.05, other.release)
    timer.start()
    monkeypatch.setattr(pidlock, "_next_token", fail_for_good)
    with pytest.raises(pidlock.PidLockError):
        PidLock(pidfile, wait=30, fence=True).acquire()
    timer.join()
    assert comes_back_to(before)


@needs_proc
def test_a_wait_that_was_worth_it_leaves_nothing_behind_the_release(pidfile, waiter):
    before = left_behind()
    other = PidLock(pidfile).acquire()
    timer = threading.Timer(0.05, other.release)
    timer.start()
    PidLock(pidfile, wait=30).acquire().release()
    timer.join()
    assert comes_back_to(before)


@needs_proc
def test_a_wait_that_an_exception_ends_leaves_nothing(pidfile, holder):
    class Alarm(Exception):
        pass

    def raise_alarm(*_):
        raise Alarm

    holder("-p", pidfile)
    before = left_behind(), pidfile.read_bytes()
    handler = signal.signal(signal.SIGALRM, raise_alarm)
    try:
        for _ in range(10):
            with pytest.raises(Alarm):
                signal.setitimer(signal.ITIMER_REAL, 0.03)
                PidLock(pidfile, wait=30).acquire()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert (left_behind(), pidfile.read_bytes()) == before


def test_the_callers_signal_handlers_run_meanwhile_and_stay(pidfile, holder):
    """Catches a wait by an alarm of its own, and one that a signal ends early."""
    came = []

    def note(signum, frame):
        came.append(signum)

    def picture():
        return [signal.getsignal(number) for number in range(1, 32)], signal.pthread_sigmask(signal.SIG_BLOCK, [])

    holder("-p", pidfile)
    handler = signal.signal(signal.SIGALRM, note)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        before, started = picture(), time.monotonic()
        with pytest.raises(LockHeld):
            PidLock(pidfile, wait=0.4).acquire()
        waited, after = time.monotonic() - started, picture()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert (after, set(came), waited >= 0.4) == (before, {signal.SIGALRM}, True)


def test_a_wait_burns_next_to_no_cpu(pidfile, holder):
    """Catches a loop that spins: it burns all of it."""
    holder("-p", pidfile)
    started, burnt = time.monotonic(), time.process_time()
    with pytest.raises(LockHeld):
        PidLock(pidfile, wait=1).acquire()
    assert time.process_time() - burnt < 0.2 * (time.monotonic() - started)


def test_who_is_woken_after_looks_of_the_timer_looks_without_a_pause(pidfile, monkeypatch):
    """The pause is for who is woken in vain. Red where a look of the timer counts as such: a tenth of a second late."""
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        usual_sleep(seconds)

    usual_sleep = time.sleep
    first = PidLock(pidfile).acquire()
    monkeypatch.setattr(time, "sleep", sleep)
    timer = threading.Timer(0.3, first.release)
    timer.start()
    with PidLock(pidfile, wait=60):
        assert pauses == []
    timer.join()


@needs_proc
def test_a_killed_holder_that_nobody_has_reaped_does_not_make_a_waiter_spin(pidfile, monkeypatch):
    """Its pidfd stays readable, its command has the lock. Red where the waiter forgets whose end it was told of."""
    looks = []

    def flock(descriptor, operation):
        looks.append(operation)
        real_flock(descriptor, operation)

    real_flock = fcntl.flock
    command = [*PIDLOCK, "-p", pidfile, "--", "sh", "-c", "echo ready; read line"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.raises(LockHeld, match="was killed, but its command lives on"):
            PidLock(pidfile, wait=2).acquire()
        process.stdin.close()
        process.stdout.read()
    assert looks.count(fcntl.LOCK_EX | fcntl.LOCK_NB) < 15


WITHOUT_A_WAIT = """
import pidlock, sys
try:
    pidlock.PidLock(sys.argv[1]).acquire()
except pidlock.LockHeld:
    print("ctypes" in sys.modules)
"""


def test_a_refusal_without_a_wait_does_not_load_what_only_a_wait_needs(pidfile, holder):
    """It takes milliseconds. Red where the watch is opened all the same."""
    holder("-p", pidfile)
    assert subprocess.check_output([sys.executable, "-c", WITHOUT_A_WAIT, pidfile], cwd=ROOT, timeout=60) == b"False\n"


PROBE = """
import os, pidlock, sys
print("ready", flush=True)
states = set()
while not os.path.exists(sys.argv[2]):
    states.add(pidlock.inspect(sys.argv[1]).state)
print(sorted(states - {"free", "held", "stale"}))
"""


def test_a_prober_in_a_tight_loop_never_makes_a_contender_of_a_stale_file_fail(pidfile, dead_pid):
    """Catches a flock that is tried once, and a prober that turns its shared flock into an exclusive one."""
    stop, new = pidfile.with_name("stop"), pidfile.with_name("new")
    command = [sys.executable, "-c", PROBE, pidfile, stop]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as prober:
        try:
            assert prober.stdout.readline() == b"ready\n"
            for _ in range(300):
                new.write_bytes(b"%d\n\n\n" % dead_pid)
                new.rename(pidfile)
                with PidLock(pidfile):
                    assert pidfile.read_bytes() == b"%d\n\n\n" % os.getpid()
        finally:
            stop.touch()
        assert (prober.stdout.read(), prober.wait(60)) == (b"[]\n", 0)

"""The library: taking the lock, giving it back, and looking at it without taking anything."""
import asyncio
import contextlib
import copy
import fcntl
import functools
import glob
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from conftest import CHILDREN, PIDLOCK, PYTHON, ROOT

import pidlock
from pidlock import LockHeld, PidLock, PidLockError

CYCLES = 100_000 if "PIDLOCK_STRESS" in os.environ else 2_000

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fdinfo"), reason="needs Linux's /proc")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def body_of(pid):
    return b"%d\n\n\n" % pid


def write(path, body, age=60):
    path.write_bytes(body)
    os.utime(path, (time.time() - age, time.time() - age))


def python(code, *arguments, **options):
    """Run this code in a Python of its own, beside pidlock.py; return what it printed."""
    done = subprocess.run([sys.executable, "-c", code, *map(os.fspath, arguments)], cwd=ROOT, check=True,
                          stdout=subprocess.PIPE, universal_newlines=True, timeout=60, **options)
    return done.stdout


def descriptors():
    return sorted(map(int, os.listdir("/proc/self/fd")))


@pytest.fixture
def stranger():
    """Start processes that flock a file and are no pidlock: stranger(path, operation) -> Popen."""
    code = (
        "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, int(sys.argv[2]))\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    started = []

    def start(path, operation):
        process = subprocess.Popen([sys.executable, "-c", code, path, str(int(operation))],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.communicate(timeout=60)


# ---- Acquire and release ----


def test_the_file_is_there_as_long_as_the_block(pidfile):
    with PidLock(pidfile) as lock:
        inside = (lock.path, lock.pid, pidfile.read_bytes(), os.listdir(pidfile.parent))
    assert inside == (str(pidfile), os.getpid(), body_of(os.getpid()), [pidfile.name])
    assert not pidfile.exists()


def test_an_exception_in_the_block_gives_the_lock_back_and_goes_on(pidfile):
    with pytest.raises(KeyError, match="mine"), PidLock(pidfile):
        raise KeyError("mine")
    assert not pidfile.exists()


def test_a_second_acquire_of_the_same_object_is_an_error_and_the_lock_stays(pidfile):
    with PidLock(pidfile) as lock:
        with pytest.raises(RuntimeError) as raised:
            lock.acquire()
        assert (str(raised.value), pidfile.read_bytes()) == (
            "%s: this PidLock holds it already" % pidfile, body_of(os.getpid()))


def test_a_release_may_be_repeated_and_touches_nobody_elses_lock(pidfile):
    lock = PidLock(pidfile)
    assert (lock.release(), lock.acquire() is lock, lock.release(), lock.release()) == (True, True, True, True)
    with PidLock(pidfile):
        assert (lock.release(), pidfile.exists()) == (True, True)


def test_a_lock_can_be_taken_again_after_its_release(pidfile):
    lock = PidLock(pidfile)
    for _ in range(3):
        with lock:
            assert pidfile.read_bytes() == body_of(os.getpid())
        assert not pidfile.exists()


def test_a_held_lock_says_where_and_by_whom(pidfile, holder):
    one = holder("--pidfile", pidfile)
    with pytest.raises(LockHeld) as raised:
        PidLock(pidfile).acquire()
    held = raised.value
    assert (held.path, held.pid) == (str(pidfile), one.pid)
    assert re.fullmatch(r"%s: held by PID %d \(.+\) for \d+s; .+" % (re.escape(str(pidfile)), one.pid), str(held))


@pytest.mark.parametrize("to_path", [str, os.fsencode, pathlib.Path], ids=["str", "bytes", "PathLike"])
def test_a_path_may_be_of_any_kind(to_path, pidfile):
    with PidLock(to_path(pidfile)) as lock:
        assert (lock.path, pidfile.exists()) == (str(pidfile), True)


def test_a_path_may_hold_bytes_that_are_not_utf_8(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.pid"
    with PidLock(path) as lock:
        assert (os.fsencode(lock.path), os.path.exists(path)) == (path, True)


def test_a_relative_path_means_the_directory_of_the_acquire(pidfile, monkeypatch):
    """Catches a release by the path as it was given."""
    monkeypatch.chdir(pidfile.parent)
    lock = PidLock(pidfile.name).acquire()
    monkeypatch.chdir("/")
    assert (lock.path, lock.release(), pidfile.exists()) == (str(pidfile), True, False)


NO_MODE = "mode: 0%o is not rw for its owner, or lets others write or execute"
WRONG = {
    "an empty path": ({"path": ""}, "path: '' names no file"),
    "an empty path in bytes": ({"path": b""}, "path: '' names no file"),
    "a NUL in the path": ({"path": "a\0b"}, "path: 'a\\x00b' names no file"),
    "a negative wait": ({"wait": -1}, "wait: -1 is not a number of seconds"),
    "a wait that is no number": ({"wait": float("nan")}, "wait: nan is not a number of seconds"),
    "writable for others": ({"mode": 0o666}, NO_MODE % 0o666),
    "executable": ({"mode": 0o755}, NO_MODE % 0o755),
    "executable for others alone": ({"mode": 0o645}, NO_MODE % 0o645),
    "not readable for its owner": ({"mode": 0o200}, NO_MODE % 0o200),
    "not writable for its owner": ({"mode": 0o444}, NO_MODE % 0o444),
    "set-user-ID": ({"mode": 0o4644}, NO_MODE % 0o4644),
}


@pytest.mark.parametrize("options, message", WRONG.values(), ids=WRONG)
def test_what_cannot_be_meant_is_a_value_error(options, message):
    with pytest.raises(ValueError) as raised:
        PidLock(**{"path": "never-made.pid", **options})
    assert str(raised.value) == message


MODES = [(0o077, {}, 0o644), (0, {}, 0o644), (0, {"mode": 0o600}, 0o600), (0o077, {"mode": 0o664}, 0o664)]


@pytest.mark.parametrize("umask, options, mode", MODES)
def test_the_mode_is_the_one_asked_for_whatever_the_umask(umask, options, mode, pidfile):
    before = os.umask(umask)
    try:
        with PidLock(pidfile, **options):
            assert pidfile.stat().st_mode & 0o7777 == mode
    finally:
        os.umask(before)


HELD_DESCRIPTORS = """
import os, sys, pidlock
with pidlock.PidLock(sys.argv[1]) as lock:
    for number in range(100):
        if os.path.exists("/proc/self/fd/%d" % number) and os.path.samefile("/proc/self/fd/%d" % number, lock.path):
            print(number, os.get_inheritable(number))
"""


@needs_proc
def test_the_descriptor_is_10_or_above_and_closed_on_exec(pidfile):
    assert python(HELD_DESCRIPTORS, pidfile) == "10 False\n"


@needs_proc
def test_under_a_tiny_limit_the_descriptor_is_3_or_above(pidfile):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))"
    number, inheritable = python(limit + HELD_DESCRIPTORS, pidfile).split()
    assert (3 <= int(number) < 9, inheritable) == (True, "False")


@needs_proc
def test_a_cycle_leaves_no_descriptor(pidfile):
    before = descriptors()
    with PidLock(pidfile), pytest.raises(LockHeld):
        PidLock(pidfile).acquire()
    assert descriptors() == before


# ---- A lock that was lost ----


def lose_by_rm(pidfile):
    pidfile.unlink()


def lose_to_a_foreign_file(pidfile):
    pidfile.unlink()
    pidfile.write_bytes(b"4231\n")


def lose_to_a_rename(pidfile):
    pidfile.with_name("new").write_bytes(b"new")
    pidfile.with_name("new").rename(pidfile)


def lose_to_a_link(pidfile):
    pidfile.rename(pidfile.with_name("old"))
    pidfile.symlink_to("old")


def look_at(path):
    return os.readlink(path) if path.is_symlink() else path.read_bytes() if path.exists() else None


@pytest.mark.parametrize("lose", [lose_by_rm, lose_to_a_foreign_file, lose_to_a_rename, lose_to_a_link])
def test_the_release_of_a_lost_lock_says_so_and_touches_nothing(lose, pidfile):
    """Catches a release that unlinks without comparing; the link catches one that compares with stat."""
    events = []
    lock = PidLock(pidfile, on_event=events.append).acquire()
    lose(pidfile)
    before = look_at(pidfile)
    assert (lock.release(), look_at(pidfile), lock.release()) == (False, before, True)
    assert [(event["event"], event["reason"]) for event in events] == [
        ("acquired", None), ("lost", "the file was removed or replaced")]


def test_a_lost_lock_is_free_for_the_next_and_its_release_does_not_harm_that_one(pidfile):
    lost = PidLock(pidfile).acquire()
    pidfile.unlink()
    with PidLock(pidfile):
        assert (lost.release(), pidlock.inspect(pidfile).state) == (False, "held")


# ---- The decorator ----


def test_a_decorated_function_runs_under_the_lock_and_is_still_itself(pidfile):
    @PidLock(pidfile)
    def add(one, two=0):
        """Add."""
        return one + two, pidfile.exists()

    assert (add(1, two=2), add(3), pidfile.exists()) == ((3, True), (3, True), False)
    assert (add.__name__, add.__doc__, add.__wrapped__(1)) == ("add", "Add.", (1, False))


def test_an_exception_of_a_decorated_function_gives_the_lock_back(pidfile):
    @PidLock(pidfile)
    def fail():
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            fail()
        assert not pidfile.exists()


def test_each_call_of_a_decorated_function_locks_anew(pidfile):
    """Catches a decorator that locks the one object: RuntimeError."""
    @PidLock(pidfile)
    def call_itself():
        call_itself()

    with pytest.raises(LockHeld):
        call_itself()
    assert not pidfile.exists()


def test_a_decorated_function_runs_in_one_thread_at_a_time(pidfile):
    busy, overlaps, done = threading.Lock(), [], []

    @PidLock(pidfile, wait=60)
    def work():
        if not busy.acquire(blocking=False):
            overlaps.append(threading.current_thread())
        time.sleep(0.001)  # room for an overlap
        busy.release()
        done.append(threading.current_thread())

    threads = [threading.Thread(target=lambda: [work() for _ in range(3)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (overlaps, len(done), len(set(done))) == ([], 9, 3)


async def coroutine():
    await asyncio.sleep(0)


def generator():
    yield


async def asynchronous_generator():
    yield


class Job:
    def __call__(self):
        yield


@pytest.mark.parametrize("function", [
    coroutine, generator, asynchronous_generator, functools.partial(functools.partial(generator)), Job(),
], ids=["coroutine", "generator", "asynchronous generator", "partial", "callable"])
def test_a_function_whose_body_runs_after_the_call_is_refused(function, pidfile):
    with pytest.raises(TypeError) as raised:
        PidLock(pidfile)(function)
    assert str(raised.value) == "%s: its body runs after the call has returned; take the lock inside it" % function


@pytest.mark.parametrize("function", [functools.partial(coroutine), lambda: coroutine()], ids=["partial", "wrapper"])
@pytest.mark.filterwarnings("error")
def test_a_call_that_returns_before_its_body_has_run_is_refused(function, pidfile):
    """Red where only what the function is itself is looked at."""
    with pytest.raises(TypeError, match="its body runs after the call has returned"):
        PidLock(pidfile)(function)()
    assert not pidfile.exists()


def test_a_generator_that_a_call_hands_on_is_the_callers(pidfile):
    lines = (line for line in "ab")
    assert list(PidLock(pidfile)(lambda given: given)(lines)) == ["a", "b"]


# ---- Interrupts ----

CALLS = ["open", "close", "fchmod", "fstat", "link", "lstat", "statvfs", "unlink", "write", "flock"]


def interrupt(monkeypatch, name, ordinal):
    """Let a Ctrl-C come during the so manyth call from now on; the call itself is done as ever."""
    def call(*arguments, **options):
        calls.append(name)
        done = usual(*arguments, **options)
        if len(calls) == ordinal:
            raise KeyboardInterrupt
        return done

    module, calls = fcntl if name == "flock" else os, []
    usual = getattr(module, name)
    monkeypatch.setattr(module, name, call)
    return calls


@pytest.mark.parametrize("name", CALLS)
def test_a_ctrl_c_in_acquire_or_release_leaves_no_lock_that_nobody_holds(pidfile, name):
    """Red where release forgets what it has not given back yet, and where acquire has not stored what it has.

    Also where a private file stays whose descriptor open(2) has returned to nobody.
    """
    ordinal = 0
    while True:
        ordinal += 1
        lock = PidLock(pidfile)
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = interrupt(monkeypatch, name, ordinal)
            with contextlib.suppress(KeyboardInterrupt):
                lock.acquire()
                lock.release()
        lock.release()
        PidLock(pidfile).acquire().release()
        assert os.listdir(str(pidfile.parent)) == []
        if len(calls) < ordinal:
            break
    assert ordinal > 1


def test_a_ctrl_c_behind_the_last_step_loses_no_lock(pidfile):
    """Before Python 3.11 one may come between a return and the storing of what it returned; so does a tracer's."""
    def trace(frame, event, argument):
        if frame.f_code.co_name == "_create" and event == "return":
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    with pytest.raises(KeyboardInterrupt):
        PidLock(pidfile).acquire()
    PidLock(pidfile).acquire().release()


def test_a_ctrl_c_at_any_call_in_release_leaves_an_object_that_can_be_released_and_acquired(pidfile):
    """From Python 3.10 on these are the places where one can come. Red where it is never again anybody's turn."""
    def trace(frame, event, argument):
        if frame.f_code.co_filename == pidlock.__file__:
            calls.append(frame.f_code.co_name)
        if len(calls) == ordinal:
            sys.settrace(None)
            raise KeyboardInterrupt

    ordinal, calls = 0, ["none"]
    while len(calls) >= ordinal:
        ordinal, calls = ordinal + 1, []
        lock = PidLock(pidfile).acquire()
        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            lock.release()
        sys.settrace(None)
        lock.release()
        PidLock(pidfile).acquire().release()
        lock.acquire().release()
    assert {"_release", "_give_up", "_drop", "_give_back"} <= set(calls)


def test_a_ctrl_c_behind_a_second_slot_loses_no_lock(pidfile, monkeypatch):
    """The first was given back again. Red where the second is taken for a file that is no longer ours."""
    def trace(frame, event, argument):
        if frame.f_code.co_name == "_create" and event == "return":
            created.append(frame)
            if len(created) == 2:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    def unlink(path):
        if path == str(pidfile):  # of the first, which keeps its inode: the second must not get its number
            kept.append(open(path))
        usual(path)

    created, kept, usual, room = [], [], os.unlink, iter([True, False, True, True])
    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(pidlock, "_flock_directory", lambda *arguments: None)
    monkeypatch.setattr(pidlock, "_has_room", lambda *arguments: next(room))
    sys.settrace(trace)
    with pytest.raises(KeyboardInterrupt):
        PidLock(pidfile, max_concurrent=2).acquire()
    monkeypatch.undo()
    kept[0].close()
    PidLock(pidfile).acquire().release()


def test_a_ctrl_c_while_a_stale_file_is_judged_keeps_no_flock(pidfile, dead_pid, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    write(pidfile, body_of(dead_pid))
    monkeypatch.setattr(pidlock, "Finding", interrupted)
    with pytest.raises(KeyboardInterrupt):
        PidLock(pidfile).acquire()
    monkeypatch.undo()
    PidLock(pidfile).acquire().release()


def test_a_ctrl_c_in_release_closes_no_strangers_descriptor(pidfile, tmp_path, monkeypatch):
    """Of a lock whose own descriptor a daemoniser has closed, so that another file has its number."""
    lock = PidLock(pidfile).acquire()
    with open(str(tmp_path / "other"), "w") as other:
        os.dup2(other.fileno(), lock._descriptor)
        number = lock._descriptor
        interrupt(monkeypatch, "fstat", 1)
        with pytest.raises(KeyboardInterrupt):
            lock.release()
        monkeypatch.undo()
        assert os.path.samestat(os.fstat(number), os.fstat(other.fileno()))
        os.close(number)


# ---- Threads and forks ----


@pytest.fixture
def busy_threads():
    """Let threads take turns as often as can be."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def stopped_at(name, function):
    """Call function in a thread that stops where it calls the function of that name; return (it, let it go on)."""
    def trace(frame, event, argument):
        if frame.f_code.co_name == name:
            arrived.set()
            go_on.wait(60)

    def work():
        sys.settrace(trace)
        with contextlib.suppress(LockHeld):
            function()

    arrived, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    assert arrived.wait(60)
    return thread, go_on.set


@pytest.mark.parametrize("step", ["_give_up", "_drop"])
def test_a_failing_acquire_gives_back_no_other_threads_lock(pidfile, step):
    """Red where others may acquire by the same object before it has cleaned up: it gives back what is theirs."""
    lock = PidLock(pidfile)
    with PidLock(pidfile):
        thread, go_on = stopped_at(step, lock.acquire)
    with pytest.raises(RuntimeError):
        lock.acquire()
    go_on()
    thread.join(60)
    assert (lock.acquire() is lock, thread.is_alive(), lock.release()) == (True, False, True)


def test_of_two_that_release_at_once_one_does(pidfile, monkeypatch):
    """As a thread and a signal's handler may. Red where the second finds the descriptor that the first gives back."""
    def unlink(path):
        monkeypatch.setattr(os, "unlink", usual)
        usual(path)
        inner.append(lock.release())
        with pytest.raises(RuntimeError):  # it would go on with what this one is to give back
            lock.acquire()

    usual, inner, events = os.unlink, [], []
    lock = PidLock(pidfile, on_event=lambda event: events.append(event["event"])).acquire()
    monkeypatch.setattr(os, "unlink", unlink)
    assert (lock.release(), inner, events) == (True, [True], ["acquired", "released"])


def test_a_release_while_a_failed_acquire_cleans_up_is_no_event(pidfile):
    """As by a signal's handler. Red where it is told as that of a lock which was held."""
    def trace(frame, event, argument):
        if frame.f_code.co_name == "_release":
            sys.settrace(None)
            released.append(lock.release())

    released, events = [], []
    lock = PidLock(pidfile, on_event=lambda event: events.append(event["event"]))
    with PidLock(pidfile):
        sys.settrace(trace)
        with pytest.raises(LockHeld):
            lock.acquire()
    assert (released, events, lock.release()) == ([True], ["held"], True)
    lock.acquire().release()


def test_a_lock_that_a_thread_is_refused_meanwhile_is_given_back(pidfile, busy_threads):
    """Red where the refusal is a turn of its own, in which a release has no effect: as good as surely at once."""
    def work():
        while len(done) < 50 and time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):
                lock.acquire()
                time.sleep(0.001)  # the work that it protects; the others go on being refused
                done.append(lock.release())

    done, deadline, lock = [], time.monotonic() + 20, PidLock(pidfile)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (set(done), len(done) >= 50, pidfile.exists()) == ({True}, True, False)


@pytest.mark.parametrize("is_lost", [True, False])
def test_who_is_told_of_the_end_may_acquire_again(pidfile, is_lost):
    """Red where the event comes before the turn has ended."""
    def on_event(event):
        if event["event"] in ("lost", "released"):
            lock._on_event = None
            lock.acquire()

    lock = PidLock(pidfile, on_event=on_event).acquire()
    if is_lost:
        pidfile.unlink()
    assert (lock.release(), pidlock.inspect(pidfile).state, lock.release()) == (not is_lost, "held", True)


def test_a_span_that_releases_as_it_ends_does_so_once(pidfile):
    """As a signal's handler may that comes in it. Red where the second enters the span's end again."""
    @contextlib.contextmanager
    def span(name):
        yield
        if name == "pidlock.held":
            inner.append(lock.release())

    inner, events = [], []
    lock = PidLock(pidfile, span=span, on_event=lambda event: events.append(event["event"])).acquire()
    assert (lock.release(), inner, events) == (True, [True], ["acquired", "released"])


def test_threads_that_release_at_once_close_nobody_elses_lock(pidfile):
    """Red where both give the same number back, which by then is another lock's."""
    faults = []

    def compete():
        other = PidLock(pidfile, wait=60)
        while not done.is_set():
            other.acquire()
            if not other.release():
                faults.append("lost")

    done = threading.Event()
    rival = threading.Thread(target=compete)
    rival.start()
    lock = PidLock(pidfile, wait=60)
    for _ in range(300):
        lock.acquire()
        releasers = [threading.Thread(target=lock.release) for _ in range(2)]
        for thread in releasers:
            thread.start()
        for thread in releasers:
            thread.join()
    done.set()
    rival.join(60)
    assert (faults, rival.is_alive(), pidfile.exists()) == ([], False, False)


def targets():
    """Return what the descriptors of this process refer to."""
    return [os.readlink(link) for link in glob.glob("/proc/self/fd/*") if os.path.lexists(link)]


@needs_proc
def test_a_copy_and_a_forked_child_acquire_while_a_thread_waits_by_the_original(pidfile):
    """Red where they inherit that somebody is about to acquire, or what they wait with: it is no thread of theirs."""
    lock = PidLock(pidfile, wait=60)
    entered, usual_sleep = threading.Event(), lock._sleep
    lock._sleep = lambda *arguments: entered.set() or usual_sleep(*arguments)
    with PidLock(pidfile):
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        assert entered.wait(60)
        child = os.fork()
        if child == 0:
            lock._wait = 0
            try:
                lock.acquire()
            except LockHeld:
                os._exit("anon_inode:inotify" in targets())
            finally:
                os._exit(1)
        assert "anon_inode:inotify" in targets()
        other = copy.copy(lock)
        other._wait = 0
        with pytest.raises(LockHeld):
            other.acquire()
        assert os.waitpid(child, 0)[1] == 0
    thread.join(60)
    assert lock.release() is True


@pytest.mark.parametrize("copy_of", [copy.copy, lambda lock: pickle.loads(pickle.dumps(lock))], ids=["copy", "pickle"])
def test_a_copy_of_a_lock_that_is_held_holds_nothing(pidfile, copy_of):
    """Red where both give it back: the second time it is another's."""
    lock = PidLock(pidfile, mode=0o600).acquire()
    other = copy_of(lock)
    assert (other.pid, other.release(), pidlock.inspect(pidfile).state, lock.release()) == (None, True, "held", True)
    with other:
        assert pidfile.stat().st_mode & 0o777 == 0o600


def test_an_object_that_a_thread_acquires_by_can_be_copied(pidfile, busy_threads):
    """Red where that thread's turn changes what is being copied: as good as surely in so many copies."""
    lock = PidLock(pidfile)
    done = threading.Event()

    def cycle():
        while not done.is_set():
            lock.acquire().release()

    thread = threading.Thread(target=cycle)
    thread.start()
    try:
        for _ in range(3000):
            copy.copy(lock)
    finally:
        done.set()
        thread.join(60)


def test_one_object_is_acquired_by_one_thread_at_a_time(pidfile):
    """Red where the second thread goes on with what the first one has got so far."""
    lock = PidLock(pidfile, wait=60)
    entered, go = threading.Event(), threading.Event()
    usual_sleep = lock._sleep

    def sleep(*arguments):
        entered.set()
        go.wait(60)
        return usual_sleep(*arguments)

    lock._sleep = sleep
    with PidLock(pidfile):
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        assert entered.wait(60)
        with pytest.raises(RuntimeError) as raised:
            lock.acquire()
        go.set()
    said = "this PidLock is being acquired or released already; have one for each thread"
    assert str(raised.value) == "%s: %s" % (pidfile, said)
    thread.join(60)
    assert (pidlock.inspect(pidfile).state, lock.release(), pidfile.exists()) == ("held", True, False)
    lock.acquire().release()


def test_threads_of_one_process_exclude_each_other(pidfile):
    """Catches fcntl(2)'s locks, which know processes only, and `our own PID is stale` without the flock."""
    outcomes = []

    def attempt():
        try:
            PidLock(pidfile).acquire()
        except LockHeld as held:
            outcomes.append(held.pid)

    with PidLock(pidfile):
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(60)
    assert outcomes == [os.getpid()]


FORK_INSIDE = """
import os, sys, pidlock
with pidlock.PidLock(sys.argv[1]) as lock:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print(pidlock.inspect(lock.path).state, pidlock.active_pid(lock.path) == (os.getpid(), True))
"""


def test_a_forked_child_that_leaves_the_block_and_ends_takes_nothing_with_it(pidfile):
    """Catches a release without `the process that took it`, and one that unlocks in the child."""
    assert (python(FORK_INSIDE, pidfile), pidfile.exists()) == ("held True\n", False)


def test_a_child_forked_by_on_event_gets_the_refusal_too(pidfile):
    """Red where it looks for the turn under its own PID."""
    children = []
    with PidLock(pidfile):
        try:
            PidLock(pidfile, on_event=lambda event: children.append(os.fork())).acquire()
        except LockHeld:
            if children == [0]:
                os._exit(0)
        finally:
            if children == [0]:
                os._exit(1)
    assert os.waitpid(children[0], 0)[1] == 0


def test_a_ctrl_c_in_a_child_that_was_forked_in_mid_acquire_leaves_the_parents_lock(pidfile, monkeypatch):
    """By another thread, say; at each line of the child's acquire. Red where a lock without a PID counts as its own."""
    def fork_once(call):
        def fork(*arguments):
            if lock._descriptor is not None and not children:
                children.append(os.fork())
                if children == [0]:
                    monkeypatch.undo()
                    sys.settrace(interrupt)
                    try:
                        lock.acquire()
                    finally:
                        os._exit(0)
            return call(*arguments)

        return fork

    def interrupt(frame, event, argument):
        lines.append(frame.f_lineno)
        if len(lines) == ordinal:
            raise KeyboardInterrupt
        return interrupt

    for name in ("getpid", "fstat"):  # what is called once the descriptor is there
        monkeypatch.setattr(os, name, fork_once(getattr(os, name)))
    for ordinal in range(1, 15):
        lines, children, lock = [], [], PidLock(pidfile)
        lock.acquire()
        os.waitpid(children[0], 0)
        assert (ordinal, pidlock.inspect(pidfile).state, lock.release()) == (ordinal, "held", True)


def test_a_child_that_on_event_forks_and_ends_gives_nothing_back(pidfile):
    """Red where a failure in acquire is cleaned up whoever took the lock: the child ends by SystemExit, through it."""
    def fork(event):
        children.append(os.fork())
        if children == [0]:
            sys.exit()

    children = []
    try:
        lock = PidLock(pidfile, on_event=fork).acquire()
    except SystemExit:
        os._exit(0)
    os.waitpid(children[0], 0)
    lock._on_event = None
    assert (pidlock.inspect(pidfile).state, lock.release(), pidfile.exists()) == ("held", True, False)


def test_a_forked_child_never_releases(pidfile):
    lock = PidLock(pidfile).acquire()
    child = os.fork()
    if child == 0:
        try:
            lock.release()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (pidlock.inspect(pidfile).state, lock.release(), pidfile.exists()) == ("held", True, False)


def test_a_forked_child_that_closed_its_descriptors_may_acquire_and_closes_nobody_elses(pidfile):
    """As a daemoniser does. Red where acquire closes the parent's descriptor by its number."""
    with PidLock(pidfile) as lock, open(os.devnull) as other:
        number = lock._descriptor
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(other.fileno(), number)
                with contextlib.suppress(LockHeld):
                    lock.acquire()
                status = 0 if os.path.samestat(os.fstat(number), os.fstat(other.fileno())) else 1
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0


FORK_MEANWHILE = """
import fcntl, os, sys, pidlock
path = sys.argv[1]
reading, writing = os.pipe()
forked = []

def fork_once(event, args):
    if event == "fcntl.flock" and not forked:  # what another thread might do at this moment
        forked.append(True)
        if os.fork() == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent has ended
            os._exit(0)

sys.addaudithook(fork_once)
lock = pidlock.PidLock(path)
{call}
fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("not kept", bool(forked))
"""
CALLS = {
    "inspect": "probe = open(path); pidlock.inspect(path)",
    "a refused acquire": "probe = open(path)\ntry: lock.acquire()\nexcept pidlock.LockHeld: pass",
    "acquire and release": "os.unlink(path); lock.acquire(); probe = open(path); lock.release()",
}


@pytest.mark.skipif(sys.version_info < (3, 8), reason="audit hooks came with 3.8")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_process_that_another_thread_forked_meanwhile_keeps_no_flock(call, pidfile):
    """Catches a close without LOCK_UN: a flock belongs to all copies of the descriptor."""
    write(pidfile, b"%d\n" % os.getpid())
    assert python(FORK_MEANWHILE.format(call=call), pidfile) == "not kept True\n"


REMOVE_MEANWHILE = """
import os, sys, pidlock
path = sys.argv[1]
removed = []

def remove_once(event, args):
    if event == "fcntl.flock" and not removed:  # opened, not yet flocked
        removed.append(os.unlink(path))

sys.addaudithook(remove_once)
print({call})
"""


@pytest.mark.skipif(sys.version_info < (3, 8), reason="audit hooks came with 3.8")
@pytest.mark.parametrize("body", [b"", b"garbage", b"%d\n\n\n" % os.getpid()], ids=["empty", "garbage", "marked"])
def test_a_stale_file_that_another_evictor_removes_between_open_and_flock_is_no_error(body, pidfile):
    """Catches a file without links that is taken for somebody's file."""
    write(pidfile, body)
    assert python(REMOVE_MEANWHILE.format(call="pidlock.PidLock(path).acquire().slot"), pidfile) == "1\n"
    write(pidfile, body)
    assert python(REMOVE_MEANWHILE.format(call="pidlock.active_pid(path)[1]"), pidfile) == "False\n"


# ---- Events ----

KEYS = {"event", "path", "pid", "slot", "token", "trace_id", "seconds", "reason"}


def test_events_come_in_order_and_say_all(pidfile, dead_pid):
    write(pidfile, body_of(dead_pid))
    events = []
    with PidLock(pidfile, on_event=events.append), pytest.raises(LockHeld):
        PidLock(pidfile, on_event=events.append).acquire()
    ours = os.getpid()
    told = [(event["event"], event["pid"], event["path"], event["slot"]) for event in events]
    assert told == [(name, pid, str(pidfile), 1) for name, pid in
                    [("evicted", dead_pid), ("acquired", ours), ("held", ours), ("released", ours)]]
    assert all(set(event) >= KEYS for event in events)
    assert 59 <= events[0]["seconds"] < 3600 and all(0 <= event["seconds"] < 60 for event in events[1:])
    assert all(event["reason"] for event in events if event["event"] in ("evicted", "held"))


@needs_proc
@pytest.mark.parametrize("failing", ["evicted", "acquired", "held", "released"])
def test_an_on_event_that_raises_leaves_no_lock_and_no_descriptor(failing, pidfile, dead_pid):
    def on_event(event):
        if event["event"] == failing:
            raise KeyError(failing)

    write(pidfile, b"%d\n" % (os.getppid() if failing == "held" else dead_pid))
    before = descriptors()
    lock = PidLock(pidfile, on_event=on_event)
    with pytest.raises(KeyError, match=failing), lock:
        pass
    assert (pidfile.exists(), descriptors()) == (failing == "held", before)
    pidfile.write_bytes(b"")
    os.utime(pidfile, (0, 0))
    with PidLock(pidfile):
        assert lock.release() is True and pidfile.exists()


@pytest.mark.parametrize("failing", ["evicted", "acquired", "held", "released"])
def test_an_os_error_of_on_event_is_not_taken_for_one_of_the_lock(failing, pidfile, dead_pid):
    def on_event(event):
        if event["event"] == failing:
            raise FileNotFoundError("the log")

    write(pidfile, b"%d\n" % (os.getppid() if failing == "held" else dead_pid))
    with pytest.raises(FileNotFoundError, match="the log"), PidLock(pidfile, on_event=on_event):
        pass


# ---- Looking without taking ----

# What the file holds, its age, and what inspect and active_pid say.
STATES = {
    "no file": (None, 0, "free", "none", False),
    "marked, its PID dead": ("{dead}\n\n\n", 60, "stale", "dead", False),
    "marked, its PID recycled": ("{parent}\n\n\n", 60, "stale", "parent", False),
    "a dead PID": ("{dead}\n", 60, "stale", "dead", False),
    "garbage": ("garbage\n", 60, "stale", "none", False),
    "empty": ("", 60, "stale", "none", False),
    "empty and young": ("", -1, "held", "none", True),  # for 3 s
    "a living PID of another program": ("{parent}\n", 60, "held", "parent", True),
}


@pytest.fixture(params=STATES.values(), ids=STATES)
def told(request, pidfile, dead_pid):
    """Make such a file; return what is to be told of it: (state, PID, alive)."""
    body, age, state, name, alive = request.param
    pids = {"none": 0, "dead": dead_pid, "parent": os.getppid()}
    if body is not None:
        write(pidfile, body.format(**pids).encode(), age)
    return state, pids[name], alive


def picture(pidfile):
    """All that shows whether somebody changed something."""
    files = sorted(pidfile.parent.iterdir())
    return [(path, path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.stat().st_ino)
            for path in files], pidfile.parent.stat().st_mtime_ns, pidfile.parent.stat().st_ctime_ns


def test_inspect_and_active_pid_tell_and_change_nothing(told, pidfile):
    os.utime(pidfile.parent, (10 ** 9, 10 ** 9))
    before = picture(pidfile)
    status, active = pidlock.inspect(pidfile), pidlock.active_pid(pidfile)
    assert ((status.state, status.pid, active[1]), active[0], status.path) == (told, told[1], str(pidfile))
    assert status.reason.isprintable() and picture(pidfile) == before


def test_a_holder_is_told_and_nothing_changed(pidfile, holder, monkeypatch):
    one = holder("--pidfile", pidfile)
    monkeypatch.chdir(pidfile.parent)
    os.utime(pidfile.parent, (10 ** 9, 10 ** 9))
    before = picture(pidfile)
    status = pidlock.inspect(pidfile.name)
    with pytest.raises(LockHeld):
        PidLock(pidfile).acquire()
    assert (status.path, status.state, status.pid) == (str(pidfile), "held", one.pid)
    assert (pidlock.active_pid(os.fsencode(pidfile)), picture(pidfile)) == ((one.pid, True), before)


@pytest.mark.parametrize("look", [pidlock.inspect, pidlock.active_pid, lambda path: PidLock(path).acquire()],
                         ids=["inspect", "active_pid", "acquire"])
def test_what_is_no_pidfile_is_an_error_and_stays(look, pidfile):
    write(pidfile, b"#!/bin/sh\n" + b"echo backup\n" * 9)
    before = picture(pidfile)
    with pytest.raises(PidLockError, match="not a pidfile") as raised:
        look(pidfile)
    assert (raised.value.path, type(raised.value), picture(pidfile)) == (str(pidfile), PidLockError, before)


@needs_root
@needs_proc
@pytest.mark.parametrize("body", [b"%d\n\n\n", b"%d\n", b"garbage", None], ids=["marked", "PID", "garbage", "lock"])
def test_another_user_is_told_the_same_as_root(body, public_directory):
    """Catches a probe that needs to signal the holder, or to open its file for writing."""
    path = public_directory / "test.pid"
    lock = PidLock(path)
    if body is None:
        lock.acquire()
    else:
        write(path, body.replace(b"%d", b"%d" % os.getppid()))
    expression = "pidlock.inspect(%r)[:3]" % str(path)
    as_nobody = subprocess.check_output([sys.executable, CHILDREN / "as_nobody.py", expression], timeout=60)
    assert as_nobody.decode() == "%r\n" % (pidlock.inspect(path)[:3],)
    assert lock.release() is True


@pytest.mark.parametrize("body, state", [(b"%d\n\n\n", "stale"), (b"%d\n", "held")], ids=["stale", "held"])
def test_a_strangers_shared_flock_does_not_disturb_a_probe(body, state, pidfile, stranger):
    """Catches a probe that takes LOCK_EX: two probers would call a stale file held."""
    write(pidfile, body % os.getpid() if state == "stale" else body % os.getppid())
    stranger(pidfile, fcntl.LOCK_SH)
    assert pidlock.inspect(pidfile).state == state


@needs_proc
@pytest.mark.parametrize("operation", [fcntl.LOCK_EX, fcntl.LOCK_SH], ids=["exclusive", "shared"])
def test_a_strangers_flock_keeps_a_stale_file_and_the_message_names_him(operation, pidfile, stranger, dead_pid):
    write(pidfile, body_of(dead_pid))
    process = stranger(pidfile, operation)
    with pytest.raises(LockHeld, match="PID %d " % process.pid) as raised:
        PidLock(pidfile).acquire()
    assert (raised.value.pid, pidfile.read_bytes()) == (dead_pid, body_of(dead_pid))
    process.communicate(timeout=60)
    with PidLock(pidfile):
        assert pidfile.read_bytes() == body_of(os.getpid())


@needs_proc
def test_a_strangers_exclusive_flock_is_held_to_a_probe(pidfile, stranger, dead_pid):
    write(pidfile, body_of(dead_pid))
    process = stranger(pidfile, fcntl.LOCK_EX)
    status = pidlock.inspect(pidfile)
    assert (status.state, status.pid) == ("held", dead_pid)
    assert re.search(r"PID %d\b" % process.pid, status.reason)


# ---- Other PID namespaces ----

NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def can_unshare():
    try:
        return subprocess.run(NAMESPACE + ["true"], stderr=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        return False


needs_namespaces = pytest.mark.skipif(not can_unshare(), reason="needs unshare(1) and root, for a PID namespace")


@needs_namespaces
@pytest.mark.blackbox
def test_a_holder_in_another_pid_namespace_holds_it_here_and_is_named(pidfile, run):
    """It records PID 1, which is somebody else's here: catches a judge of the recorded PID."""
    inside = subprocess.Popen(NAMESPACE + PIDLOCK + ["-p", str(pidfile), "--", "sh", "-c", "echo ready; read line"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert (inside.stdout.readline(), pidfile.read_bytes()) == (b"ready\n", body_of(1))
        here = pathlib.Path("/proc/%d/task/%d/children" % (inside.pid, inside.pid)).read_text().split()[0]
        status, stdout, stderr = run("-p", pidfile, "--", "echo", "overlap")
        assert (status, stdout, run("-p", pidfile, "--check").status) == (75, "", 1)
        assert "namespace" in stderr and re.search(r"\b%s\b" % here, stderr)
    finally:
        inside.communicate(timeout=60)
    assert (inside.returncode, run("-p", pidfile, "--", "echo", "free")) == (1, (0, "free\n", ""))


@needs_namespaces
@pytest.mark.blackbox
def test_a_holder_here_is_held_in_another_pid_namespace(pidfile, holder):
    """Its PID does not exist in there: catches a judge of the recorded PID."""
    holder("-p", pidfile)
    inside = subprocess.run(NAMESPACE + PIDLOCK + ["-p", str(pidfile), "--", "echo", "overlap"],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    assert (inside.returncode, inside.stdout, b"namespace" in inside.stderr) == (75, b"", True)


# ---- Files that stay fresh, and are always whole ----

FRESHEN_OFTEN = "import sys, pidlock; pidlock.FRESHEN_EVERY = 0.02; sys.exit(pidlock.main())"


@pytest.mark.blackbox
def test_a_long_job_sets_the_atime_of_its_file_and_never_the_mtime(pidfile):
    long_ago = 10 ** 18
    command = [PYTHON, "-c", FRESHEN_OFTEN, "-p", str(pidfile), "--", "sh", "-c", "echo ready; read line"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        os.utime(pidfile, ns=(long_ago, long_ago))
        deadline = time.monotonic() + 30
        while pidfile.stat().st_atime_ns == long_ago:
            assert time.monotonic() < deadline, "the atime stays as it was"
            time.sleep(0.005)
        status = pidfile.stat()
        process.communicate(timeout=60)
    assert (status.st_mtime_ns, status.st_atime > time.time() - 3600, pidfile.exists()) == (long_ago, True, False)


CAT_LOOP = 'until [ -e "$1" ]; do cat "$0" 2>/dev/null && echo end; done'


def test_a_cat_beside_acquire_and_release_never_sees_an_empty_or_partial_file(pidfile):
    """Catches a bare O_EXCL create and write: one read in seven is empty then."""
    stop = pidfile.with_name("stop")
    with tempfile.TemporaryFile() as seen:
        reader = subprocess.Popen(["sh", "-c", CAT_LOOP, pidfile, stop], stdout=seen)
        try:
            for _ in range(CYCLES):
                PidLock(pidfile).acquire().release()
            deadline = time.monotonic() + 30
            while not os.fstat(seen.fileno()).st_size:  # a slow start of the reader
                assert time.monotonic() < deadline, "cat saw no file at all"
                PidLock(pidfile).acquire().release()
        finally:
            stop.touch()
            reader.wait(timeout=60)
        seen.seek(0)
        reads = seen.read().split(b"end\n")
    assert (set(reads), reads[-1]) == ({body_of(os.getpid()), b""}, b"") and reads.index(b"") == len(reads) - 1

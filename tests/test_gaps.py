"""Small branches of the lock that coverage or a surviving mutant showed to be unproven; mostly failing system calls."""
import collections
import contextlib
import ctypes
import errno
import fcntl
import inspect
import json
import os
import pathlib
import select
import signal
import stat
import subprocess
import sys
import threading
import time
import types

import pytest
from conftest import ROOT

import pidlock
from pidlock import TIME_ONLY, LockHeld, PidLock, PidLockError

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/mountinfo"), reason="needs Linux's /proc")
real = {name: getattr(os, name) for name in "link unlink write mkdir open pread listdir kill fstat".split()}
real["flock"] = fcntl.flock


def error(number):
    return OSError(number, os.strerror(number))


def fail(monkeypatch, name, number, when=lambda *_: True, module=os):
    """Let a system call fail where `when` says so of its arguments."""
    def call(*arguments, **options):
        if when(*arguments):
            raise error(number)
        return real[name](*arguments, **options)

    monkeypatch.setattr(module, name, call)


def show_as(monkeypatch, path, other):
    """Let a program that opens this file open another one."""
    usual_open = open
    monkeypatch.setattr("builtins.open", lambda name, *rest, **named: usual_open(
        other if name == path else name, *rest, **named))


def hide(monkeypatch, path):
    show_as(monkeypatch, path, path + ".no")


def mount(monkeypatch, path, kind):
    """Let mountinfo say that everything is on a filesystem of this kind, or with None nothing at all."""
    with open("/proc/self/mountinfo") as file:
        mounts = [line.partition(" - ") for line in file]
    mountinfo = path.with_name("mountinfo")
    mountinfo.write_text("".join("%s - %s %s" % (before, kind, after.partition(" ")[2])
                                 for before, _, after in mounts if kind))
    show_as(monkeypatch, "/proc/self/mountinfo", mountinfo)


def is_private(path, *_):
    return ".pidlock-" in str(path)


@pytest.fixture
def leaves_no_descriptor():
    before = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else None
    yield
    assert before is None or os.listdir("/proc/self/fd") == before


@pytest.fixture
def old_garbage(pidfile):
    pidfile.write_bytes(b"garbage")
    os.utime(str(pidfile), (10 ** 9, 10 ** 9))
    return pidfile


# ---- The object ----


def test_the_signature_is_the_documented_one():
    assert str(inspect.signature(PidLock)) == (
        "(path, wait=0, stale_after=None, stale_strategy='pid-first', max_concurrent=1, details=False, fence=False, "
        "trace_id=None, mode=420, on_event=None, span=None)")


def test_the_details_of_a_program_that_uses_the_library_have_its_own_command_line(pidfile, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my backup", "--now"])
    with PidLock(pidfile, details=True):
        assert pidlock.parse_record(pidfile.read_bytes()).details["command"] == "'my backup' --now"


@pytest.mark.parametrize("trace_id", ["two\nlines", "x" * 257, "\x1b"], ids=ascii)
def test_a_trace_id_that_is_no_word_is_a_value_error(trace_id, pidfile):
    with pytest.raises(ValueError) as raised:
        PidLock(pidfile, trace_id=trace_id)
    assert str(raised.value) == "trace_id: %r is too long, or has characters that do not print" % trace_id
    assert PidLock(pidfile, trace_id="x" * 256).path == str(pidfile)


def test_a_forked_child_contends_for_the_lock_like_anybody(pidfile, leaves_no_descriptor):
    """Red where the child's copy of the object says that it holds it already, or where its unlock is the parent's."""
    lock = PidLock(pidfile).acquire()
    child = os.fork()
    if child == 0:
        try:
            inherited = lock._descriptor
            lock.acquire()
        except LockHeld:
            os._exit(75 if os.dup(0) <= inherited else 1)  # the lowest one that is free: its copy is closed
        finally:
            os._exit(1)
    assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 75
    with pytest.raises(LockHeld):
        PidLock(pidfile).acquire()
    assert lock.release()


@needs_proc
def test_a_forked_child_of_one_that_has_waited_closes_its_copies_of_all_descriptors(pidfile, leaves_no_descriptor):
    """Red where the watch of the wait is forgotten."""
    def descriptors():
        paths = ["/proc/self/fd/" + number for number in os.listdir("/proc/self/fd")]
        links = [os.readlink(path) for path in paths if os.path.islink(path)]  # the listing's own has gone
        return [link for link in links if link == "anon_inode:inotify" or link.startswith(str(pidfile.parent))]

    first = PidLock(pidfile).acquire()
    timer = threading.Timer(0.1, first.release)
    timer.start()
    lock = PidLock(pidfile, wait=60).acquire()
    timer.join()
    child = os.fork()
    if child == 0:
        try:
            lock._wait = 0
            lock.acquire()
        except LockHeld:
            os._exit(len(descriptors()))
        finally:
            os._exit(99)
    assert (os.WEXITSTATUS(os.waitpid(child, 0)[1]), lock.release()) == (0, True)


def test_a_path_that_looks_like_a_slots_is_slot_1(old_garbage):
    path = old_garbage.rename(old_garbage.with_name("job.3"))
    events = []
    with PidLock(path, on_event=events.append):
        assert [(event["event"], event["slot"]) for event in events] == [("evicted", 1), ("acquired", 1)]


def test_a_descriptor_that_the_program_closed_is_a_lost_lock_and_nobody_elses_is_closed(pidfile):
    events = []
    lock = PidLock(pidfile, on_event=events.append).acquire()
    os.close(lock._descriptor)
    assert (lock.release(), events[-1]["reason"], pidfile.exists()) == (False, "its descriptor was closed", True)
    assert lock.release() and lock.acquire() is lock and lock.release()


def test_a_new_lock_has_no_pid_no_token_and_slot_1(pidfile):
    lock = PidLock(pidfile, stale_after=0, max_concurrent=pidlock.SLOTS_MAX)
    assert (lock.pid, lock.token, lock.slot) == (None, None, 1)


@pytest.mark.parametrize("limit", [0, -1, pidlock.SLOTS_MAX + 1, "2", 2.0, None])
def test_a_limit_that_is_no_number_of_slots_is_a_value_error(limit, pidfile):
    with pytest.raises(ValueError) as raised:
        PidLock(pidfile, max_concurrent=limit)
    assert str(raised.value) == "max_concurrent: %r is not a number of slots" % limit


def test_acquire_returns_the_lock_under_a_span_too(pidfile):
    lock = PidLock(pidfile, span=lambda name: contextlib.ExitStack())
    assert lock.acquire() is lock and lock.release()


def test_a_span_that_swallows_a_refusal_is_told_of(pidfile):
    def swallowing(_):
        stack = contextlib.ExitStack()
        stack.push(lambda *_: True)
        return stack

    with PidLock(pidfile), pytest.raises(RuntimeError) as raised:
        PidLock(pidfile, span=swallowing).acquire()
    assert str(raised.value) == "%s: not acquired, and the span swallowed why" % pidfile


def test_a_call_of_a_decorated_function_under_its_own_lock_is_refused_like_anybodys(pidfile):
    lock = PidLock(pidfile)
    with lock, pytest.raises(LockHeld):
        lock(os.getpid)()


def test_a_file_that_is_removed_in_the_instant_of_its_release_is_a_lost_lock(pidfile, monkeypatch):
    lock = PidLock(pidfile).acquire()
    fail(monkeypatch, "unlink", errno.ENOENT)
    assert lock.release() is False


@pytest.mark.parametrize("name", ["unlink", "fstat"])
def test_a_release_that_cannot_remove_the_file_gives_it_up_all_the_same(name, pidfile, monkeypatch,
                                                                        leaves_no_descriptor):
    """Red where a descriptor that cannot be looked at counts as closed."""
    with monkeypatch.context() as failing:
        lock = PidLock(pidfile).acquire()
        fail(failing, name, errno.EIO)
        with pytest.raises(PidLockError) as raised:
            lock.release()
    assert str(raised.value) == "%s: cannot remove it: Input/output error; look into that, then try again" % pidfile
    with PidLock(pidfile):
        pass


# ---- Looking ----


@pytest.mark.parametrize("number", [errno.EBADF, errno.EIO], ids=errno.errorcode.get)
def test_a_flock_that_fails_is_an_error_and_keeps_no_descriptor(number, old_garbage, monkeypatch, leaves_no_descriptor):
    """A write-open wakes watchers, so only EBADF is answered by one, as NFS wants it, and only once."""
    fail(monkeypatch, "flock", number, lambda _, operation: operation != fcntl.LOCK_UN, fcntl)
    accesses = []

    def open_recorded(path, flags, *mode):
        accesses.append(flags & os.O_ACCMODE)
        return real["open"](path, flags, *mode)

    monkeypatch.setattr(os, "open", open_recorded)
    with pytest.raises(PidLockError, match=os.strerror(number)):
        PidLock(old_garbage).acquire()
    assert accesses == [os.O_RDONLY] + [os.O_RDWR] * (number == errno.EBADF)


def test_what_is_no_file_keeps_no_descriptor(tmp_path, leaves_no_descriptor):
    with pytest.raises(PidLockError) as raised:
        PidLock(tmp_path).acquire()
    assert str(raised.value) == "%s: is a directory, not a pidfile; name another file" % tmp_path


def test_a_finding_has_a_descriptor_only_where_there_is_something_to_evict(pidfile):
    pidfile.write_bytes(b"%d\n" % os.getppid())
    found = pidlock._examine(str(pidfile), fcntl.LOCK_EX, NO_POLICY)
    assert (found.state, found.descriptor) == ("held", None)


def test_an_interrupt_while_looking_comes_through(old_garbage, monkeypatch, leaves_no_descriptor):
    def flock(_, operation):
        if operation != fcntl.LOCK_UN:
            raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(KeyboardInterrupt):
        PidLock(old_garbage).acquire()


def test_a_path_where_nothing_is_is_looked_at_once(pidfile, monkeypatch):
    """Red where it is taken for refused: then a prober looks again for a while."""
    looks = []

    def open_counted(path, *rest):
        looks.append(path)
        return real["open"](path, *rest)

    monkeypatch.setattr(os, "open", open_counted)
    assert (pidlock.inspect(pidfile).state, looks) == ("free", [str(pidfile)])


@pytest.mark.parametrize("operation, seconds", [(fcntl.LOCK_EX, 0.05), (fcntl.LOCK_SH, 1.0)], ids=["alone", "shared"])
def test_a_flock_that_is_shared_may_be_a_probers_for_longer_than_another(operation, seconds, pidfile, dead_pid,
                                                                         leaves_no_descriptor):
    """No holder's is shared. Red where whoever is refused takes a second to say so, or keeps what it looked with."""
    pidfile.write_bytes(b"%d\n\n\n" % dead_pid)
    with pidfile.open() as file:
        fcntl.flock(file, operation)
        assert pidlock._doubt(pidlock._examine(str(pidfile), fcntl.LOCK_EX, NO_POLICY)) == seconds


def test_a_look_that_fails_is_an_error(old_garbage, monkeypatch, leaves_no_descriptor):
    fail(monkeypatch, "flock", errno.EIO, lambda _, operation: operation != fcntl.LOCK_UN, fcntl)
    with pytest.raises(PidLockError, match="cannot look at it: " + os.strerror(errno.EIO)):
        pidlock.inspect(old_garbage)


def test_a_pid_that_may_not_be_signalled_exists(pidfile, monkeypatch):
    """kill(2) says EPERM of another user's. Red where that is taken for ESRCH."""
    pidfile.write_bytes(b"%d\n" % os.getppid())
    fail(monkeypatch, "kill", errno.EPERM)
    assert pidlock.inspect(pidfile).state == "held"


@needs_proc
def test_a_proc_that_may_not_be_listed_shows_nobody(pidfile, dead_pid, monkeypatch):
    pidfile.write_bytes(b"%d\n\n\n" % dead_pid)
    fail(monkeypatch, "listdir", errno.EACCES, lambda path: path == "/proc")
    with pidfile.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = pidlock.inspect(pidfile)
    assert (found.state, found.pids) == ("held", ()) and "who does is not to be seen from here" in found.reason


@needs_proc
def test_a_process_that_ends_and_a_descriptor_that_is_closed_hide_no_flock(pidfile, dead_pid, monkeypatch):
    """Of what is asked for beside them. Red where the first that cannot be looked at ends the search."""
    def stat_file(path, *rest, **named):
        if path == "/proc/%d/fd/%d" % (os.getpid(), closed.fileno()):
            asked.append(path)
            raise error(errno.ENOENT)
        return usual_stat(path, *rest, **named)

    usual_stat, asked = os.stat, []
    pidfile.write_bytes(b"")
    with pidfile.with_name("other").open("w") as closed, pidfile.open() as file:
        fcntl.flock(closed, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr(os, "stat", stat_file)
        found = list(pidlock._flockers(os.fstat(file.fileno()), [dead_pid, os.getpid()]))
        assert (found, len(asked)) == ([(os.getpid(), os.getpid())], 1)


@needs_proc
def test_all_that_have_a_flock_are_told_and_who_took_it(pidfile):
    """A holder and its command, say. Red where the first one that has it ends the search."""
    with pidfile.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[file.fileno()]) as child:
            found = list(pidlock._flockers(os.fstat(file.fileno()), [os.getpid(), child.pid]))
            child.stdin.close()
        assert found == [(os.getpid(), os.getpid()), (child.pid, os.getpid())]


def test_a_boot_that_is_not_known_tells_nothing(pidfile, monkeypatch):
    """As where /proc is not mounted: rule 5 needs both."""
    hide(monkeypatch, "/proc/sys/kernel/random/boot_id")
    pidfile.write_bytes(b"%d\n\n\nboot=00000000-0000-0000-0000-000000000000\n" % os.getppid())
    mount(monkeypatch, pidfile, "fuse.unheard-of")
    assert pidlock.inspect(pidfile).state == "held"


LOW_DESCRIPTORS = """
import errno, fcntl, os, sys
sys.path.insert(0, sys.argv[1])
import pidlock
def no_more(*_): raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
if sys.argv[3:]: fcntl.fcntl = no_more
before = os.listdir("/proc/self/fd")
try:
    print(pidlock.PidLock(sys.argv[2]).acquire().release())
except pidlock.PidLockError as error:
    print(error)
print(os.listdir("/proc/self/fd") == before)
"""


@needs_proc
def test_a_descriptor_that_is_moved_up_is_closed_below(pidfile):
    """(pytest itself has so many that none is below 10 in its own process.)"""
    said = subprocess.check_output([sys.executable, "-c", LOW_DESCRIPTORS, str(ROOT), str(pidfile)], timeout=60)
    assert said == b"True\nTrue\n"


@needs_proc
def test_a_table_without_room_for_a_descriptor_above_2_leaves_nothing(pidfile):
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", LOW_DESCRIPTORS, str(ROOT), str(pidfile),
               "full"]
    said = subprocess.check_output(command, timeout=60).decode()
    assert "raise the limit of open files" in said and said.endswith("\nTrue\n")
    assert os.listdir(str(pidfile.parent)) == []


# ---- Evicting ----

NO_POLICY = (None, pidlock.PID_FIRST)


def rewrite(path):
    path.write_bytes(b"GARBAGE")
    os.utime(str(path), (10 ** 9, 10 ** 9))  # in the same instant, for a coarse clock


def replace(path):
    other = path.with_name("other")
    other.write_bytes(b"garbage")
    os.utime(str(other), (10 ** 9, 10 ** 9))
    other.rename(path)


def touch(path):
    os.utime(str(path))


def remove(path):
    path.unlink()


def break_by_age(found):
    return pidlock._break(found, False)


@pytest.mark.parametrize("evict, change", [
    (pidlock._evict, rewrite), (pidlock._evict, replace), (pidlock._evict, touch), (pidlock._evict, remove),
    (break_by_age, replace), (break_by_age, touch), (break_by_age, remove),
])
def test_only_the_very_file_that_was_judged_is_evicted(evict, change, old_garbage, leaves_no_descriptor):
    found = pidlock._examine(str(old_garbage), fcntl.LOCK_EX, NO_POLICY)
    change(old_garbage)
    before = old_garbage.read_bytes() if old_garbage.exists() else None
    assert evict(found) is False
    assert (old_garbage.read_bytes() if old_garbage.exists() else None) == before


@pytest.mark.parametrize("evict", [pidlock._evict, break_by_age])
def test_an_eviction_is_told_as_one(evict, old_garbage, leaves_no_descriptor):
    assert evict(pidlock._examine(str(old_garbage), fcntl.LOCK_EX, NO_POLICY)) is True
    assert not old_garbage.exists()


def test_the_longest_pidfile_is_taken_over(pidfile, dead_pid):
    pidfile.write_bytes((b"%d\n" % dead_pid).ljust(pidlock.BODY_MAX, b"x"))
    with PidLock(pidfile):
        assert pidlock.parse_record(pidfile.read_bytes()).pid == os.getpid()


def test_a_breaker_keeps_neither_descriptor_nor_flock(pidfile, leaves_no_descriptor):
    pidfile.write_bytes(b"%d\n" % os.getppid())
    os.utime(str(pidfile), (10 ** 9, 10 ** 9))
    with PidLock(pidfile, stale_after=1, stale_strategy=TIME_ONLY):
        pass


@pytest.mark.parametrize("options", [{}, {"stale_after": 1, "stale_strategy": TIME_ONLY}], ids=["evict", "break"])
def test_a_stale_file_that_goes_away_at_the_last_moment_is_no_error(options, old_garbage, monkeypatch):
    gone = []

    def unlink(path):
        real["unlink"](path)
        if not is_private(path) and not gone:
            gone.append(path)
            raise error(errno.ENOENT)

    monkeypatch.setattr(os, "unlink", unlink)
    events = []
    with PidLock(old_garbage, on_event=events.append, **options):
        assert ([event["event"] for event in events], len(gone)) == (["acquired"], 1)  # it was evicted by another
        assert pidlock.parse_record(old_garbage.read_bytes()).pid == os.getpid()


@pytest.mark.parametrize("options", [{}, {"stale_after": 1, "stale_strategy": TIME_ONLY}], ids=["evict", "break"])
def test_a_stale_file_that_may_not_be_removed_is_an_error_that_names_its_owner(options, old_garbage, monkeypatch,
                                                                               leaves_no_descriptor):
    fail(monkeypatch, "unlink", errno.EPERM)
    with pytest.raises(PidLockError) as raised:
        PidLock(old_garbage, **options).acquire()
    line = "%s: stale (%s), but it is %s's and cannot be removed: %s; remove it as that user or as root"
    assert str(raised.value) == line % (old_garbage, "there is no PID in it", pidlock._user_name(os.geteuid()),
                                        os.strerror(errno.EPERM))
    assert (isinstance(raised.value, LockHeld), old_garbage.read_bytes()) == (False, b"garbage")


@needs_proc
def test_where_every_file_is_executable_a_damaged_pidfile_is_one_all_the_same(old_garbage, monkeypatch):
    """As on vfat."""
    old_garbage.chmod(0o755)
    mount(monkeypatch, old_garbage, "vfat")
    assert pidlock.inspect(old_garbage).state == "stale"


@needs_proc
@pytest.mark.parametrize("listed, state", [(None, "stale"), ("", "held")], ids=["no mountinfo", "not listed in it"])
def test_a_filesystem_is_local_where_nothing_is_listed_and_in_doubt_where_it_alone_is_not(listed, state, pidfile,
                                                                                          monkeypatch):
    """In a chroot its own mount may not be listed. The PID was recycled, which only rule 3 knows."""
    pidfile.write_bytes(b"%d\n\n\n" % os.getppid())
    if listed is None:
        hide(monkeypatch, "/proc/self/mountinfo")
    else:
        mount(monkeypatch, pidfile, None)
    assert pidlock.inspect(pidfile).state == state


# ---- Creating ----


@pytest.mark.parametrize("name, number", [
    ("link", errno.EIO), ("link", errno.EACCES), ("unlink", errno.EIO), ("write", errno.ENOSPC),
], ids=lambda value: value if isinstance(value, str) else errno.errorcode[value])
def test_a_call_that_fails_on_the_way_leaves_no_pidfile(name, number, pidfile, monkeypatch, leaves_no_descriptor):
    fail(monkeypatch, name, number, is_private if name == "unlink" else lambda *_: True)
    with pytest.raises(PidLockError, match=os.strerror(number)):
        PidLock(pidfile).acquire()
    assert not pidfile.exists()


def test_the_first_failure_is_the_one_that_is_told(pidfile, monkeypatch):
    fail(monkeypatch, "write", errno.ENOSPC)
    fail(monkeypatch, "unlink", errno.EIO)
    with pytest.raises(PidLockError, match=os.strerror(errno.ENOSPC)):
        PidLock(pidfile).acquire()


@pytest.mark.parametrize("links", [True, False], ids=["link", "in place"])
def test_a_part_of_the_body_is_as_bad_as_none(links, pidfile, monkeypatch, leaves_no_descriptor):
    """In place it is the second body that is written, the first one is the private file's."""
    def write(descriptor, body):
        return real["write"](descriptor, body[:2] if links or pidfile.exists() else body)

    monkeypatch.setattr(os, "write", write)
    if not links:
        fail(monkeypatch, "link", errno.EPERM)
    with pytest.raises(PidLockError) as raised:
        PidLock(pidfile).acquire()
    line = "%s: cannot take it: %s; make room on that filesystem" % (pidfile, os.strerror(errno.ENOSPC))
    assert (str(raised.value), os.listdir(str(pidfile.parent))) == (line, [])


def test_a_filesystem_that_keeps_no_permissions_will_do(pidfile, monkeypatch):
    def fchmod(*_):
        raise error(errno.EPERM)

    monkeypatch.setattr(os, "fchmod", fchmod)
    with PidLock(pidfile):
        assert stat.S_IMODE(pidfile.stat().st_mode) == 0o600  # as it was made


def test_a_pidfile_that_is_removed_as_it_appears_is_made_again(pidfile, monkeypatch):
    """Red where the path is not looked at after the link, or where no file counts as the same file."""
    made = []

    def link(private, path):
        real["link"](private, path)
        made.append(path)
        if len(made) == 1:
            real["unlink"](path)

    monkeypatch.setattr(os, "link", link)
    lock = PidLock(pidfile).acquire()
    assert (len(made), lock.release(), os.listdir(str(pidfile.parent))) == (2, True, [])


def test_a_name_that_was_taken_is_tried_anew_and_never_written_in_place(pidfile, monkeypatch):
    """Red where EEXIST is taken for a filesystem without links: a reader would see an empty file."""
    taken, created = [], []

    def link(private, path):
        if not taken:
            taken.append(path)
            raise error(errno.EEXIST)
        real["link"](private, path)

    def open_recorded(path, flags, *mode):
        if flags & os.O_CREAT:
            created.append(pidlock._is_private(os.path.basename(path)))
        return real["open"](path, flags, *mode)

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "open", open_recorded)
    with PidLock(pidfile):
        assert (len(taken), created) == (1, [True, True])


def test_a_path_that_never_holds_still_is_an_error_in_the_end(pidfile, monkeypatch, leaves_no_descriptor):
    """As where inode numbers change at each look."""
    fail(monkeypatch, "link", errno.EEXIST)
    monkeypatch.setattr(pidlock, "PROGRESS", 0.05)
    with pytest.raises(PidLockError) as raised:
        PidLock(pidfile).acquire()
    line = "%s: cannot be taken: it changes faster than we can look; find out who changes it" % pidfile
    assert (str(raised.value), isinstance(raised.value, LockHeld)) == (line, False)
    assert os.listdir(str(pidfile.parent)) == []


def test_a_private_file_that_a_sweep_has_the_flock_of_is_made_again(pidfile, monkeypatch, leaves_no_descriptor):
    """Red where it is published all the same, unflocked."""
    sweepers = []

    def flock(descriptor, operation):
        names = [path for path in pidfile.parent.iterdir() if is_private(path)]
        if names and not sweepers:
            sweepers.append(os.open(str(names[0]), os.O_RDONLY))
            real["flock"](sweepers[0], fcntl.LOCK_EX)
        real["flock"](descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with PidLock(pidfile):
        os.close(sweepers[0])
        assert (pidlock.inspect(pidfile).state, os.listdir(str(pidfile.parent))) == ("held", [pidfile.name])


Statvfs = collections.namedtuple("Statvfs", "f_bsize")
FuseStatvfs = collections.namedtuple("FuseStatvfs", "f_fsid")


@needs_proc
@pytest.mark.parametrize("answer, kind, links", [
    (Statvfs(4096), "ext4", 1), (Statvfs(4096), "fuse.sshfs", 0), (FuseStatvfs(0), "fuse.sshfs", 0),
    (FuseStatvfs(0), "fuseblk", 0), (FuseStatvfs(0), "ext4", 1), (FuseStatvfs(7), "ext4", 1),
    (FuseStatvfs(7), "fuse.unheard-of", 1), (FuseStatvfs(0), None, 0), (FuseStatvfs(7), None, 1),
], ids=lambda value: str(value))
def test_only_on_fuse_is_the_pidfile_made_in_place(answer, kind, links, pidfile, monkeypatch, leaves_no_descriptor):
    """Before Python 3.7 no f_fsid tells, and FUSE has none: then mountinfo does. In a chroot that may say nothing."""
    linked = []

    def link(private, path):
        real["link"](private, path)
        linked.append(path)

    mount(monkeypatch, pidfile, kind)
    monkeypatch.setattr(os, "statvfs", lambda descriptor: answer)
    monkeypatch.setattr(os, "link", link)
    with PidLock(pidfile):
        assert (len(linked), pidfile.read_bytes()) == (links, b"%d\n\n\n" % os.getpid())


def test_the_parents_that_are_made_have_the_usual_mode(tmp_path):
    before = os.umask(0)
    try:
        with PidLock(tmp_path / "a" / "b" / "test.pid"):
            assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b")] == [0o755, 0o755]
    finally:
        os.umask(before)


def test_parents_that_somebody_else_makes_meanwhile_are_as_good(tmp_path, monkeypatch):
    def mkdir(path, mode):
        real["mkdir"](path, mode)
        real["mkdir"](path, mode)  # EEXIST

    monkeypatch.setattr(os, "mkdir", mkdir)
    with PidLock(tmp_path / "a" / "b" / "test.pid") as lock:
        assert os.path.exists(lock.path)


# ---- Creating in place, where there are no hard links ----


@pytest.fixture
def no_links(monkeypatch):
    fail(monkeypatch, "link", errno.EPERM)


def test_in_place_a_file_that_appeared_meanwhile_is_left_alone(pidfile, monkeypatch, leaves_no_descriptor):
    """Red where it is opened without O_EXCL."""
    def link(private, path):
        if not pidfile.exists():
            pidfile.write_bytes(b"%d\n" % os.getppid())
        raise error(errno.EPERM)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(LockHeld):
        PidLock(pidfile).acquire()
    assert pidfile.read_bytes() == b"%d\n" % os.getppid()


def test_in_place_a_file_that_is_evicted_before_it_is_flocked_is_made_again(pidfile, no_links, monkeypatch,
                                                                            leaves_no_descriptor):
    """As old and empty, while its maker was stopped. Red where the path is not looked at after the flock."""
    evicted = []

    def flock(descriptor, operation):
        if pidfile.exists() and not evicted:
            pidfile.unlink()
            evicted.append(pidfile)
        real["flock"](descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with PidLock(pidfile):
        assert (len(evicted), pidlock.inspect(pidfile).state) == (1, "held")


def test_in_place_a_flock_that_others_keep_is_an_error_and_their_file_stays(pidfile, no_links, monkeypatch):
    """Nobody removes the path without its flock."""
    keepers = []

    def flock(descriptor, operation):
        if pidfile.exists() and not keepers:
            keepers.append(os.open(str(pidfile), os.O_RDONLY))
            real["flock"](keepers[0], fcntl.LOCK_SH)
        real["flock"](descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(pidlock, "PATIENCE", 0.05)
    try:
        with pytest.raises(PidLockError) as raised:
            PidLock(pidfile).acquire()
        line = "%s: another process keeps the flock of this new file; stop that process" % pidfile
        assert (str(raised.value), isinstance(raised.value, LockHeld), pidfile.read_bytes()) == (line, False, b"")
    finally:
        os.close(keepers[0])


def test_in_place_a_flock_that_fails_is_the_error_that_is_told(pidfile, no_links, monkeypatch, leaves_no_descriptor):
    """Without its flock the path is not removed either."""
    fail(monkeypatch, "flock", errno.ENOLCK, lambda *_: pidfile.exists(), fcntl)
    with pytest.raises(PidLockError, match=os.strerror(errno.ENOLCK)):
        PidLock(pidfile).acquire()
    assert os.listdir(str(pidfile.parent)) == [pidfile.name]


def test_a_flock_that_fails_while_its_taker_is_looked_for_is_no_errors_to_the_caller(pidfile, monkeypatch):
    """A stranger has it, by whom is asked with a shared flock. Red where that is asked outside what explains errors."""
    pidfile.write_text("99999999\n\n\n")
    with open(pidfile) as file:
        real["flock"](file, fcntl.LOCK_EX)
        fail(monkeypatch, "flock", errno.ENOLCK, lambda _, operation: operation & fcntl.LOCK_SH, fcntl)
        with pytest.raises(LockHeld):
            PidLock(pidfile).acquire()


@needs_proc
def test_without_mountinfo_what_has_no_f_fsid_may_be_fuse(pidfile, monkeypatch):
    """Red where the name is linked there: on FUSE that would be a second inode, without the flock."""
    show_as(monkeypatch, "/proc/self/mountinfo", pidfile)
    monkeypatch.setattr(os, "statvfs", lambda _: FuseStatvfs(0))
    fail(monkeypatch, "link", errno.ENOSPC)
    with PidLock(pidfile):
        assert pidfile.read_bytes() == b"%d\n\n\n" % os.getpid()


@pytest.mark.parametrize("name", ["tcgetpgrp", "get_terminal_size"])
def test_a_terminal_that_hangs_up_is_no_error_of_a_wait(monkeypatch, name):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
    monkeypatch.setattr(select, "select", lambda *_: ([], [2], []))
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((20, 2)))
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)  # ignored in a script's background
    assert pidlock._room_to_rewrite() == 19
    monkeypatch.setattr(os, name, lambda _: os.close(-1))
    assert pidlock._room_to_rewrite() == 0


# ---- Slots ----


def test_the_first_slot_makes_the_directory(tmp_path):
    with PidLock(tmp_path / "new" / "test.pid", max_concurrent=2) as lock:
        assert lock.slot == 1


def test_a_fifo_for_a_directory_is_an_error_at_once(pidfile):
    """Red where it is opened to be flocked: that waits for a writer."""
    os.mkfifo(str(pidfile))
    with pytest.raises(PidLockError, match=os.strerror(errno.ENOTDIR)):
        PidLock(pidfile / "test.pid", max_concurrent=2).acquire()


@pytest.mark.parametrize("link_fails", [False, True], ids=["and taken", "and not taken"])
def test_the_eviction_of_a_slot_is_told_with_its_number(link_fails, pidfile, dead_pid, monkeypatch):
    pidfile.with_name("test.pid.2").write_bytes(b"%d\n" % dead_pid)
    pidfile.write_bytes(b"%d\n\n\nlimit=2\n" % os.getppid())
    fail(monkeypatch, "link", errno.EIO, lambda *_: link_fails)
    events = []
    with pidfile.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            PidLock(pidfile, max_concurrent=2, on_event=events.append).acquire().release()
        except PidLockError:
            assert link_fails
    told = [(event["event"], event["slot"], event["pid"]) for event in events]
    taken = [("acquired", 2, os.getpid()), ("released", 2, os.getpid())]
    assert told == [("evicted", 2, dead_pid), *([] if link_fails else taken)]


def test_the_directorys_flock_makes_a_take_and_its_count_one_step(pidfile, monkeypatch):
    """Red where the slot is taken without it."""
    def may_flock_directory():
        directory = os.open(str(pidfile.parent), os.O_RDONLY)
        try:
            real["flock"](directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(directory)

    def link(private, path):
        real["link"](private, path)
        seen.append(may_flock_directory())

    seen = []
    monkeypatch.setattr(os, "link", link)
    with PidLock(pidfile, max_concurrent=2):
        assert (seen, may_flock_directory()) == ([False], True)


def test_who_breaks_a_slot_does_not_wait_for_the_directorys_flock_that_it_has(pidfile, monkeypatch):
    asked = []

    def flock(descriptor, operation):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) and operation != fcntl.LOCK_UN:
            asked.append(descriptor)
        real["flock"](descriptor, operation)

    for name in ("test.pid", "test.pid.2"):
        pidfile.with_name(name).write_bytes(b"%d\n" % os.getppid())
        os.utime(str(pidfile.with_name(name)), (10 ** 9, 10 ** 9))
    monkeypatch.setattr(fcntl, "flock", flock)
    with PidLock(pidfile, max_concurrent=2, stale_after=1, stale_strategy=TIME_ONLY):
        assert len(asked) == 1


def test_a_directory_that_cannot_be_flocked_does_not_keep_a_slot_from_being_taken(pidfile, monkeypatch,
                                                                                  leaves_no_descriptor):
    fail(monkeypatch, "flock", errno.ENOLCK, lambda descriptor, _: stat.S_ISDIR(os.fstat(descriptor).st_mode), fcntl)
    with PidLock(pidfile, max_concurrent=2) as one, PidLock(pidfile, max_concurrent=2) as other:
        assert {one.slot, other.slot} == {1, 2}
        with pytest.raises(LockHeld):
            PidLock(pidfile, max_concurrent=2).acquire()


def test_without_the_directorys_flock_a_slot_given_back_is_tried_for_again(pidfile, monkeypatch):
    """A rival of limit 1 takes another slot in the instant between my take and my count, and gives it back too."""
    rival = pidfile.with_name("test.pid.2")
    came = []

    def link(private, path):
        real["link"](private, path)
        if not came:
            rival.write_bytes(b"%d\n" % os.getppid())
            came.append(rival)

    def sleep(seconds):
        usual_sleep(seconds)
        if rival.exists():
            rival.unlink()

    usual_sleep = time.sleep
    fail(monkeypatch, "flock", errno.ENOLCK, lambda descriptor, _: stat.S_ISDIR(os.fstat(descriptor).st_mode), fcntl)
    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(time, "sleep", sleep)
    with PidLock(pidfile, max_concurrent=2) as lock:
        assert (len(came), lock.slot, rival.exists()) == (1, 1, False)


@pytest.mark.parametrize("rivals, message, taken", [
    (["test.pid", "test.pid.2"], "as many as may hold it do: test.pid held by .+, test.pid.2 held by", []),
    (["test.pid"], ": held by PID", ["test.pid.2"]),
], ids=["all", "one, of limit 1"])
def test_who_finds_the_slots_taken_after_the_count_is_refused_and_leaves_none(rivals, message, taken, pidfile,
                                                                              monkeypatch, leaves_no_descriptor):
    """A run without a limit takes the first slot without the directory's flock.

    Red without a count after the take, and where a third slot is tried, if only to be given back.
    """
    def link(private, path):
        links.append(os.path.basename(path))
        real["link"](private, path)

    def open_file(path, *rest):
        try:
            return real["open"](path, *rest)
        finally:
            if path == str(pidfile):  # which the count has just found missing
                for name in rivals:
                    pidfile.with_name(name).write_bytes(b"%d\n" % os.getppid())

    links = []
    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "open", open_file)
    with pytest.raises(LockHeld, match=message):
        PidLock(pidfile, max_concurrent=2).acquire()
    assert (links, sorted(real["listdir"](str(pidfile.parent)))) == (taken, rivals)


def test_a_slot_that_comes_free_after_all_were_seen_taken_is_nobodys(pidfile, monkeypatch):
    """Red where who has taken none counts the living once more, and finds room: it would hold the lock by no file."""
    slots = [pidfile, pidfile.with_name("test.pid.2")]

    def open_file(path, *rest):
        try:
            return real["open"](path, *rest)
        finally:
            if path == str(pidfile) and not looks:  # which the first count has just found missing
                for slot in slots:
                    slot.write_bytes(b"%d\nlimit=2\n" % os.getppid())

    def listdir(path):
        if path == str(pidfile.parent):
            looks.extend(slot.unlink() for slot in slots if slot.exists())
        return real["listdir"](path)

    looks = []
    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(LockHeld):
        PidLock(pidfile, max_concurrent=2).acquire()


# ---- Waiting ----


def test_a_waiter_looks_less_and_less_often(pidfile, monkeypatch):
    """After 20 ms at first, then up to 100 ms: nine looks in half a second. Red where the pauses do not grow."""
    looks = []

    def open_counted(path, *rest):
        looks.append(path)
        return real["open"](path, *rest)

    pidfile.write_bytes(b"%d\n" % os.getppid())
    monkeypatch.setattr(os, "open", open_counted)
    with pytest.raises(LockHeld):
        PidLock(pidfile, wait=0.5).acquire()
    assert 1 < looks.count(str(pidfile)) < 15


def sleeps_of(lock):
    """Wait with this lock in vain; return for how long it asked to sleep each time."""
    def sleep(held, ended, watch, seconds):
        asked.append(seconds)
        return usual_sleep(held, ended, watch, seconds)

    asked = []
    usual_sleep, lock._sleep = lock._sleep, sleep
    with pytest.raises(LockHeld):
        lock.acquire()
    return asked


def test_a_waiter_never_sleeps_past_its_deadline(pidfile):
    pidfile.write_bytes(b"%d\n" % os.getppid())
    assert max([0, *sleeps_of(PidLock(pidfile, wait=0.3))]) <= 0.3  # without a look at it the third is 0.32


def test_a_waiter_without_a_watch_never_sleeps_for_long(pidfile, monkeypatch):
    """Nothing but its timer tells it of a release by a process that lives on."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: os.close(-1))
    with PidLock(pidfile):
        assert max(sleeps_of(PidLock(pidfile, wait=0.5))) == 0.1


# ---- What is around the lock ----


def test_a_counter_where_there_are_no_hard_links_is_an_error(pidfile, monkeypatch, leaves_no_descriptor):
    fail(monkeypatch, "link", errno.EPERM)
    with pytest.raises(PidLockError, match="no hard links"):
        PidLock(pidfile, fence=True).acquire()
    assert os.listdir(str(pidfile.parent)) == []


def test_a_new_counter_has_the_mode_of_the_pidfile(pidfile):
    with PidLock(pidfile, fence=True, mode=0o600):
        assert stat.S_IMODE(pidfile.with_name("test.pid.fence").stat().st_mode) == 0o600


def test_a_counter_that_somebody_else_makes_in_the_same_instant_is_the_one(pidfile, monkeypatch, leaves_no_descriptor):
    counter = pidfile.with_name("test.pid.fence")

    def link(private, path):
        if path == str(counter):
            counter.write_bytes(b"%020d\n" % 41)
        real["link"](private, path)

    monkeypatch.setattr(os, "link", link)
    with PidLock(pidfile, fence=True) as lock:
        assert (lock.token, counter.read_bytes()) == (42, b"%020d\n" % 42)
    assert os.listdir(str(pidfile.parent)) == [counter.name]


def test_a_counter_that_is_replaced_while_it_is_bumped_is_not_the_one(pidfile, monkeypatch, leaves_no_descriptor):
    """Red where the path is not looked at after the write: the next run would get that token again."""
    counter = pidfile.with_name("test.pid.fence")
    counter.write_bytes(b"%020d\n" % 7)

    def pread(descriptor, size, offset):
        body = real["pread"](descriptor, size, offset)
        if body == b"%020d\n" % 7:
            counter.unlink()
            counter.write_bytes(b"%020d\n" % 41)
        return body

    monkeypatch.setattr(os, "pread", pread)
    with PidLock(pidfile, fence=True) as lock:
        assert (lock.token, counter.read_bytes()) == (42, b"%020d\n" % 42)


def test_a_new_counter_in_a_directory_that_may_not_be_read_is_handed_out_all_the_same(pidfile, monkeypatch):
    fail(monkeypatch, "open", errno.EACCES, lambda path, flags, *_: path == str(pidfile.parent))
    with PidLock(pidfile, fence=True) as lock:
        assert pidfile.with_name("test.pid.fence").read_bytes() == b"%020d\n" % lock.token


# ---- Sweeping ----


def become_unmarked(path):
    path.write_bytes(b"GARBAGE")
    os.utime(str(path), (10 ** 9, 10 ** 9))


def become_directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("nth, change", [
    (0, remove), (1, remove), (1, become_unmarked), (1, become_directory),
], ids=["gone before the first look", "gone after it", "rewritten after it", "a directory after it"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_file_that_changes_while_it_is_swept_is_no_left_over(nth, change, dry_run, pidfile, dead_pid, monkeypatch,
                                                               leaves_no_descriptor):
    """Red where the second look does not ask for the mark again."""
    looks = []

    def open_raced(path, *rest):
        if path == str(pidfile):
            if len(looks) == nth:
                change(pidfile)
            looks.append(path)
        return real["open"](path, *rest)

    pidfile.write_bytes(b"%d\n\n\n" % dead_pid)
    monkeypatch.setattr(os, "open", open_raced)
    swept, failures = pidlock._sweep_all(str(pidfile.parent), dry_run)
    assert (swept, [failure.reason for failure in failures], pidfile.exists()) == (
        [], ["is a directory, not a pidfile"] * (change == become_directory), change != remove)


# ---- Signalling the holder ----


@needs_proc
@pytest.mark.parametrize("missing", [[], [(signal, "pidfd_send_signal")], [(os, "pidfd_open")]],
                         ids=["with", "without pidfd_send_signal", "without pidfd_open"])
def test_the_command_is_killed_without_a_pidfd_too(missing, pidfile, holder, monkeypatch):
    """As before Python 3.9 and Linux 5.3."""
    one = holder("-p", pidfile)
    for module, name in missing:
        monkeypatch.delattr(module, name, raising=False)
    assert pidlock.signal_holder(pidfile, signal.SIGKILL) is True
    assert (one.process.wait(timeout=60), pidfile.exists()) == (137, False)


@needs_proc
@pytest.mark.parametrize("number, sent", [(errno.ESRCH, False), (errno.EPERM, None)], ids=errno.errorcode.get)
def test_a_holder_that_ends_is_nobody_and_one_that_may_not_be_signalled_an_error(number, sent, pidfile, holder,
                                                                                 monkeypatch):
    one = holder("-p", pidfile)
    monkeypatch.delattr(signal, "pidfd_send_signal", raising=False)
    fail(monkeypatch, "kill", number)
    if sent is None:
        with pytest.raises(PidLockError, match="cannot signal its holder: " + os.strerror(number)):
            pidlock.signal_holder(pidfile, signal.SIGTERM)
    else:
        assert pidlock.signal_holder(pidfile, signal.SIGTERM) is sent
    assert one.finish() == 1


BETWEEN_COMMANDS = """
import sys
sys.path.insert(0, sys.argv[1])
import pidlock
with pidlock.PidLock(sys.argv[2]):
    pidlock._set_comm()
    print("ready", flush=True)
    sys.stdin.read()
"""


@needs_proc
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_kill_and_stop_reach_no_pidlock_that_has_no_command_yet(signum, pidfile):
    """Red where they go to pidlock itself then: a command just started would be left without its lock."""
    process = subprocess.Popen([sys.executable, "-c", BETWEEN_COMMANDS, str(ROOT), str(pidfile)],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    try:
        with pytest.raises(PidLockError, match="PID %d has no command to be seen" % process.pid):
            pidlock.signal_holder(pidfile, signum)
    finally:
        process.communicate(timeout=60)
    assert process.returncode == 0


# ---- Running the command ----


def test_a_file_that_cannot_be_kept_fresh_is_no_reason_to_stop():
    assert pidlock._freshen(2 ** 20) is None  # and not EBADF


AS_ON_MACOS = """
import signal, sys
del signal.sigtimedwait, signal.SIGRTMIN, signal.SIGRTMAX
sys.path.insert(0, sys.argv.pop(1))
import pidlock
sys.exit(pidlock.main())
"""


def test_without_sigtimedwait_and_real_time_signals_a_run_has_its_status_and_its_signals(pidfile):
    run = [sys.executable, "-c", AS_ON_MACOS, str(ROOT), "-p", str(pidfile), "--", "sh", "-c"]
    assert (subprocess.call([*run, "exit 7"], timeout=60), pidfile.exists()) == (7, False)
    process = subprocess.Popen([*run, "echo ready; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.terminate()
    assert (process.wait(timeout=60), pidfile.exists()) == (143, False)
    process.communicate()


# ---- The log and the metrics ----


@pytest.mark.parametrize("lines, more", [(0, 5), (1, 0), (1, 5), (2, 0)])
def test_a_log_that_has_room_for_parts_only_tells_each_event_whole_and_once(lines, more, tmp_path, monkeypatch, capfd,
                                                                            leaves_no_descriptor):
    """A disk takes 5 bytes of the first event, then so much of it and the second, then one byte, then everything."""
    log = tmp_path / "events.log"
    options = types.SimpleNamespace(log=str(log), unlogged=b"", unwritable=set())
    rooms = [5]

    def write(descriptor, data):
        is_log = os.path.samestat(os.fstat(descriptor), log.stat())
        return real["write"](descriptor, data[:rooms[-1]] if is_log else data)

    monkeypatch.setattr(os, "write", write)
    pidlock._log({"event": 0}, options)
    size = len(options.unlogged) - 1  # but for the end of the line that was cut
    for event, room in enumerate([1 + lines * size + more, 1, 10 ** 6], 1):
        rooms.append(room)
        pidlock._log({"event": event}, options)
    told = log.read_text().splitlines()
    assert [json.loads(line)["event"] for line in told if line.endswith("}")] == [0, 1, 2, 3]
    assert [line for line in told if not line.endswith("}")] == [told[0], told[-1][:more or 1]] and len(told[0]) == 5
    said = "pidlock: %s: cannot write this log: No space left on device; the command runs all the same\n"
    assert capfd.readouterr().err == said % log


def test_a_stderr_that_nobody_reads_is_waited_for_by_one_event_only(monkeypatch):
    """Red where the events of a run each delay it, and where one that has no room just now is lost."""
    class Poll:
        def register(self, *_):
            pass

        def poll(self, milliseconds):
            waits.append(milliseconds)
            return []

    waits = []
    options = types.SimpleNamespace(log="-", unlogged=b"", unwritable=set())
    monkeypatch.setattr(select, "poll", Poll)
    for event in range(3):
        pidlock._log({"event": event}, options)
    assert waits == [1000, 0, 0]


def test_a_busy_directory_of_the_metrics_is_waited_for_once_before_and_once_behind_the_command(tmp_path, monkeypatch):
    """Red where a takeover and the acquire behind it both wait, or where nobody does."""
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds

    options = types.SimpleNamespace(metrics=str(tmp_path / "pidlock.prom"), uncounted={}, unwritable=set())
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    waits = []
    directory = os.open(str(tmp_path), os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        for is_last in (False, False, True):
            before = now
            pidlock._count("test.pid", {"pidlock_runs_total": 1.0}, options, is_last)
            waits.append(round(now - before))
    finally:
        os.close(directory)
    assert (waits, os.listdir(str(tmp_path))) == ([2, 0, 2], [])


def test_the_start_of_a_run_that_is_counted_behind_a_later_ones_is_not_the_last(tmp_path):
    """It could not be counted at its time. Red where the last that is written counts."""
    def count(name, value, options):
        pidlock._count("test.pid", {"pidlock_last_%s" % name: value}, options, is_last=True)

    place = tmp_path / "place"
    metrics = str(place / "pidlock.prom")
    one, other = (types.SimpleNamespace(metrics=metrics, uncounted={}, unwritable=set()) for _ in range(2))
    count("start_timestamp_seconds", 1000.0, one)
    place.mkdir()
    count("start_timestamp_seconds", 2000.0, other)
    count("duration_seconds", 9.0, other)
    count("duration_seconds", 5.0, one)
    values = [line for line in pathlib.Path(metrics).read_text().splitlines() if not line.startswith("#")]
    assert values == ['pidlock_last_start_timestamp_seconds{pidfile="test.pid"} 2000.0',
                      'pidlock_last_duration_seconds{pidfile="test.pid"} 5.0']


# ---- Words ----


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_self_test_that_cannot_be_printed_is_a_failure(unbuffered):
    """Red where what is still in the buffer at the end is forgotten."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, str(ROOT / "pidlock.py"), "--self-test"], stdout=full, timeout=100,
                              stderr=subprocess.PIPE, env=dict(os.environ, PYTHONUNBUFFERED=unbuffered))
    assert (done.returncode, done.stderr.count(b"\n") <= 1, b"Traceback" in done.stderr) == (125, True, False)


def test_a_user_without_a_name_is_told_by_number():
    assert pidlock._user_name(4000000000) == "user 4000000000"


NO_FORK = """
import errno, os, sys
sys.path.insert(0, sys.argv.pop(1))
import pidlock
def fork(*_, **__): raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
os.fork = os.posix_spawn = fork
sys.exit(pidlock.main())
"""


@pytest.mark.parametrize("options", [[], ["--group"]], ids=["posix_spawn", "fork"])
def test_a_fork_that_fails_is_one_line_and_leaves_no_lock(pidfile, options):
    command = [sys.executable, "-c", NO_FORK, str(ROOT), "-p", str(pidfile), *options, "true"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    line = "pidlock: %s: %s; look into that, then try again\n" % (pidfile, os.strerror(errno.EAGAIN))
    assert (done.returncode, done.stdout, done.stderr.decode(), pidfile.exists()) == (125, b"", line, False)

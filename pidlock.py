#!/usr/bin/env python3
"""Run a command under a lock that people can read: a pidfile.

Guarantee: at no moment do two holders of one path exist, and a path that nobody holds is
free for the next run, whatever was killed, rebooted, recycled or left half-written.

The file.  `4231\\n\\n\\n`: the holder's PID, then two blank lines.  FHS 3.15 asks for the
first line and asks readers to ignore the rest.  The blank lines are the mark: whoever wrote
this keeps an flock(2) on the file for life.  A file without the mark was written by
something else and is judged by its PID.

The file is the lock, the kernel vouches for it.  Creating the path exclusively decides who
gets the lock.  The flock never decides that; it tells whether a file that is there still has
anybody behind it.

Acquire, all of it in PidLock._attempt:
  1. Open what is there, creating nothing.  Nothing there: step 4.
  2. flock it without waiting.  Refused: somebody is behind it, so it is held.
  3. Granted: nobody is.  Judge it.  Held: give the flock back.  Stale: see that the path
     still names this file with this content, unlink it while holding its flock, start over.
  4. Create a private file in the same directory, flock it, write the whole record, set the
     mode, link(2) it to the path (fails when the name is taken), see that the path names our
     file, unlink the private name.  So the pidfile appears complete and flocked, or not at
     all.  Without hard links: O_CREAT|O_EXCL on the path itself, then flock, check, write.
  5. The descriptor is 10 or above: never the command's stdin, stdout or stderr.
Release, in PidLock.release: if the path still names our file and we are the process that
took it, unlink it, unlock, close.  Otherwise the lock was lost: touch nothing and say so.

Who may unlink the path: only who holds the flock of the very file that it names and has
compared st_dev and st_ino under it; the holder to release, a contender or sweeper after the
judge called the file stale.

What kill -9 leaves: before link, a private file (`.pidlock-...`, for a sweep); after it, a
marked file whose flock the kernel has freed, so the next run evicts it.  While the command
lives on it keeps the inherited flock, and the path stays held until it has ended.

Limits.  Advisory: only who uses pidlock respects it.  One host: on a network filesystem it
refuses rather than guesses.  Whoever may read the file may flock it and so keep a stale one
busy; `--mode 0600` where that matters.  Races that remain: a path removed by hand in the
instant between release's check and its unlink; on a filesystem without flock, two evictors
between check and unlink.

PidLock, LockHeld, PidLockError, Status, active_pid, inspect and main are the stable API;
names with an underscore are not, nor is the wording of messages.
"""
import errno
import os
import select
import signal
import stat
import sys
import time
from collections import namedtuple

try:
    import fcntl
except ImportError:
    sys.exit("pidlock: this system has no flock(2); pidlock runs on Linux and other POSIX systems")

# argparse, functools, pwd, shutil, subprocess and tempfile are imported where they are used: each
# costs a run that does not need it milliseconds, and argparse has to wait until signals are blocked.

__all__ = ["PidLock", "PidLockError", "LockHeld", "Status", "active_pid", "inspect", "main"]
__version__ = "0.1.0"

EXIT_OK = 0
EXIT_CHECK_HELD = 1
EXIT_USAGE = 2
EXIT_HELD = 75  # EX_TEMPFAIL, as lockf(1)
EXIT_FAILED = 125  # as timeout(1) and env(1), and the two below
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127
EXIT_BY_SIGNAL = 128

FREE = "free"
HELD = "held"
STALE = "stale"
UNKNOWN = "unknown"
INCONCLUSIVE = "inconclusive"  # the judge's own; an acquire takes it for held, inspect for unknown
FOREIGN = "foreign"  # the judge's own: somebody's file, not a pidfile

MARK = b"\n\n"
PID_MAX = 2 ** 31 - 1  # no pid_t is wider (sys/types.h on every system that Python runs on)
BODY_MAX = 65536  # bytes; no pidfile is longer, and a huge file given by mistake is not read whole
DAMAGED_MAX = 64  # bytes; what a damaged pidfile may hold
NULS_MAX = 4096  # bytes; a block of NULs is what some filesystems leave after a power cut
WRITING = 2.0  # seconds in which another program may still be writing an empty or partial pidfile
LOOK_AGAIN = 0.050  # seconds; evictors and probers hold a file's flock for microseconds
LOOK_PAUSE = 0.001  # seconds between two looks meanwhile
TICK_FIRST = 0.020  # seconds; the wait's timer, for what a pidfd cannot tell
TICK_MAX = 0.100
FRESHEN_EVERY = 3600.0  # seconds; /tmp cleaners count in days
IN_PLACE_PATIENCE = 2.0  # seconds; see _create_in_place
PRIVATE_PREFIX = ".pidlock-"  # and 16 hex digits; short, for FILE's own name may be NAME_MAX long
LOWEST_FD = 10  # shells use the descriptors below themselves

NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
LOCAL_FILESYSTEMS = frozenset(
    "ext2 ext3 ext4 xfs btrfs zfs f2fs bcachefs jfs reiserfs nilfs2 tmpfs ramfs devtmpfs hugetlbfs overlay aufs"
    " vfat exfat msdos ntfs ntfs3 fuseblk hfsplus ubifs jffs2 squashfs erofs iso9660 rootfs".split()
)
NETWORK_FILESYSTEMS = frozenset(
    "nfs nfs4 cifs smb3 smbfs 9p virtiofs ceph lustre afs gfs2 ocfs2 gpfs beegfs glusterfs orangefs pvfs2 coda ncpfs"
    " fuse.sshfs fuse.glusterfs fuse.ceph fuse.s3fs fuse.gcsfuse fuse.rclone fuse.davfs fuse.lustre fuse.moosefs"
    " fuse.mfs fuse.juicefs fuse.vmhgfs-fuse".split()
)


# ---- Errors and results ----


class PidLockError(Exception):
    """The lock could not be taken, looked at or given back; the text says why and what to do."""

    def __init__(self, path, what, advice):
        super().__init__("%s: %s; %s" % (path, what, advice))
        self.path = path


class LockHeld(PidLockError):
    """Somebody else holds the lock: `.path`, and `.pid` as the file records it (0: none is legible)."""

    def __init__(self, path, pid, reason, advice):
        super().__init__(path, reason, advice)
        self.pid = pid


# What inspect() found. state: free, held, stale or unknown. pid: int, 0 where none is recorded. reason: one line
# for people. seconds: since it was taken, None where there is no file. holder: a Holder, None unless it is held.
Status = namedtuple("Status", "path state pid reason seconds holder")

# Who is behind a file. reason, advice: for people. command: the name of what runs under the lock, or None.
# stopped: bool. pids: the processes that have the file's flock, as far as /proc shows them.
Holder = namedtuple("Holder", "reason advice command stopped pids")

# What a pidfile says. details: the key=value lines below the mark, as a dict of str.
Record = namedtuple("Record", "pid marked details")

# All that the judge decides by. record: Record or None. size: bytes. age: seconds since the mtime, negative when
# that is in the future. flock: False where the filesystem has none. filesystem: "local", "network" or "other".
# process: "none", "ours", "zombie", "thread" or "alive".
Facts = namedtuple("Facts", "record size links executable nuls age flock filesystem process")

# One look at a path. pid: int, 0 where none is recorded. body: bytes and status: os.stat_result, as judged.
# refused: somebody else has the flock. descriptor: an int that has it, only of a stale file looked at with LOCK_EX.
Finding = namedtuple("Finding", "path state reason pid record body status refused descriptor")


# ---- The lock ----


class PidLock:
    """A lock on `path`, for processes and for threads: `with PidLock("/run/backup.pid", wait=60): ...`

    path: str, bytes or os.PathLike. wait: seconds to wait for it, 0 for not at all, float("inf") for ever.
    mode: the pidfile's permissions. on_event: called with a dict for each of acquired, held, evicted, released
    and lost. The lock belongs to the process that took it: a forked child never releases it, and a daemon
    acquires after it has forked into the background.

    Raises ValueError for a path, wait or mode that cannot be meant.
    """

    def __init__(self, path, wait=0, mode=0o644, on_event=None):
        self._options = {"wait": wait, "mode": mode, "on_event": on_event}
        self.path = os.fsdecode(path)
        if not self.path or "\0" in self.path:
            raise ValueError("path: %r names no file" % (path,))
        if not wait >= 0:
            raise ValueError("wait: %r is not a number of seconds" % (wait,))
        if mode & 0o600 != 0o600 or mode & ~0o664:
            raise ValueError("mode: 0%o is not rw for its owner, or lets others write or execute" % mode)
        self._wait = wait
        self._mode = mode
        self._on_event = on_event
        self._on_tick = None  # the command line's: called with the Finding before each sleep of a wait
        self._descriptor = None
        self._since = 0.0
        self.pid = None
        self.slot = 1
        self.token = None

    def acquire(self):
        """Take the lock and return self.

        Raises LockHeld when it is still held after `wait` seconds, PidLockError when it cannot be had at all,
        RuntimeError when this object holds it already.
        """
        if self._descriptor is not None:
            raise RuntimeError("%s: this PidLock holds it already" % self.path)
        started = time.monotonic()
        try:
            self.path = os.path.join(os.getcwd(), self.path) if not os.path.isabs(self.path) else self.path
            held = self._attempt()
            if held is not None:
                held = self._wait_for(held, started)
        except OSError as error:
            raise _explain(error, self.path, "take it") from error
        if held is not None:
            self._emit("held", held.reason, held.pid, time.monotonic() - started)
            holder = _find_holder(held)
            raise LockHeld(self.path, held.pid, holder.reason, holder.advice)
        self.pid = os.getpid()
        self._since = time.monotonic()
        try:
            self._emit("acquired", None, self.pid, self._since - started)
        except BaseException:
            self.release()
            raise
        return self

    def _attempt(self):
        """Go through steps 1 to 5: return None with the lock taken, or the Finding that says it is held."""
        while True:
            found = _examine(self.path, fcntl.LOCK_EX)  # steps 1, 2 and 3
            if found.state == STALE:
                if _evict(found):
                    self._emit("evicted", found.reason, found.pid, _age(found.status))
            elif found.state == FREE:
                descriptor = _create(self.path, Record(os.getpid(), True, {}), self._mode)  # steps 4 and 5
                if descriptor is not None:
                    self._descriptor = descriptor
                    return None
            else:
                return found

    def _wait_for(self, held, started):
        """Attempt again until the deadline: return None with the lock taken, or the last Finding."""
        deadline = started + self._wait
        tick, ended = TICK_FIRST, 0
        while held is not None:
            now = time.monotonic()
            if now < started + LOOK_AGAIN and not _is_certain(held):
                time.sleep(LOOK_PAUSE)
            elif now >= deadline:
                return held
            else:
                if self._on_tick:
                    self._on_tick(held)
                if _sleep_until_end_of(held.pid if held.pid != ended else 0, min(tick, deadline - now)):
                    ended = held.pid  # who still holds it is not that process: from here on the timer alone
                tick = min(tick * 1.5, TICK_MAX)
            held = self._attempt()
        return held

    def release(self):
        """Give the lock back; return False when it was lost: removed or replaced by others while we held it.

        Without effect (and True) when it is not held, and in a forked child. Raises PidLockError when the file
        cannot be removed; it is given up all the same, and the next run takes it over.
        """
        if self._descriptor is None or self.pid != os.getpid():
            return True
        descriptor, self._descriptor = self._descriptor, None
        try:
            ours = _remove_if_same(self.path, descriptor)
        except OSError as error:
            raise _explain(error, self.path, "remove it") from error
        finally:
            _give_back(descriptor)
        if ours:
            self._emit("released", None, self.pid, time.monotonic() - self._since)
        else:
            self._emit("lost", "the file was removed or replaced", self.pid, time.monotonic() - self._since)
        return ours

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *exc_info):
        self.release()

    def __call__(self, function):
        """Decorate: each call of the function takes a lock of its own, in any thread."""
        import functools

        flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
        if flags & 0x2A0:  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR (the inspect module's table)
            raise TypeError("%s: its body runs after the call has returned; take the lock inside it" % function)

        @functools.wraps(function)
        def locked(*args, **kwargs):
            with PidLock(self.path, **self._options):
                return function(*args, **kwargs)

        return locked

    def _emit(self, event, reason, pid, seconds):
        if self._on_event:
            self._on_event({"event": event, "path": self.path, "pid": pid, "slot": self.slot, "token": self.token,
                            "trace_id": None, "seconds": seconds, "reason": reason})


# ---- Steps of the lock ----


def _examine(path, operation):
    """Steps 1 to 3: open, flock with LOCK_EX or LOCK_SH, judge. Raises PidLockError for what is no pidfile."""
    descriptor, granted = _open_and_flock(path, operation)
    if descriptor is None:
        return Finding(path, FREE, "there is no file", 0, None, b"", None, False, None)
    stale = False
    try:
        status = os.fstat(descriptor)
        body = os.pread(descriptor, BODY_MAX + 1, 0)
        record = parse_record(body)
        pid = record.pid if record else 0
        if granted is False:
            return Finding(path, HELD, "held by PID %d" % pid if pid else "held", pid, record, body, status, True, None)
        state, reason = judge(_gather_facts(descriptor, status, body, record, granted is True))
        if state == FOREIGN:
            raise PidLockError(path, reason, "name another file, or remove this one if nobody needs it")
        stale = state == STALE and operation == fcntl.LOCK_EX
        return Finding(path, state, reason, pid, record, body, status, False, descriptor if stale else None)
    finally:
        if not stale:
            _give_back(descriptor)


def _open_and_flock(path, operation):
    """Steps 1 and 2: return (descriptor, granted), (None, None) where there is no file.

    granted: True, False when somebody else has the flock, None where the filesystem has no flock.
    """
    for access in (os.O_RDONLY, os.O_RDWR):  # a write-open wakes watchers and needs permission, so only over NFS
        try:
            descriptor = _move_fd_up(os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
        except FileNotFoundError:
            return None, None
        except OSError as error:
            raise _explain_open(error, path) from error
        try:
            kind = _kind_of(os.fstat(descriptor))
            if kind:
                raise PidLockError(path, "is %s, not a pidfile" % kind, "name another file")
            return descriptor, _flock(descriptor, operation)
        except OSError as error:
            _give_back(descriptor)
            if error.errno != errno.EBADF or access == os.O_RDWR:  # flock(2): NFS wants a write-open for LOCK_EX
                raise
        except BaseException:
            _give_back(descriptor)
            raise
    raise AssertionError("unreachable: the second round returns or raises")


def _evict(found):
    """Step 3: unlink the stale file that was judged, holding its flock; return whether it was this one."""
    try:
        if not _is_same_file(found.path, found.descriptor):
            return False  # another evictor was faster, and this may be a living holder's file
        now = os.fstat(found.descriptor)
        if now.st_mtime_ns != found.status.st_mtime_ns or os.pread(found.descriptor, BODY_MAX + 1, 0) != found.body:
            return False  # `echo $$ > FILE` writes in place: judge anew
        os.unlink(found.path)
        return True
    except FileNotFoundError:
        return False
    except PermissionError as error:
        owner = _user_name(found.status.st_uid)
        what = "stale (%s), but it is %s's and cannot be removed: %s" % (found.reason, owner, error.strerror)
        raise PidLockError(found.path, what, "remove it as that user or as root") from error
    finally:
        _give_back(found.descriptor)


def _create(path, record, mode):
    """Step 4: publish a complete, flocked file at path; return its descriptor, or None to start over."""
    private = os.path.join(os.path.dirname(path), PRIVATE_PREFIX + os.urandom(8).hex())
    try:
        descriptor = _open_new(private)
    except FileNotFoundError:
        _make_parents(os.path.dirname(path))
        descriptor = _open_new(private)
    published = False
    try:
        flocked = _flock(descriptor, fcntl.LOCK_EX)
        if flocked is False:
            return None  # we were stopped for so long that a sweep is judging our private file
        _write_record(descriptor, record._replace(marked=flocked is True), mode)
        os.link(private, path)
        # The flock was taken before the name appeared, so nobody can have judged the file stale meanwhile.
        if not _is_same_file(path, descriptor):
            return None
        os.unlink(private)
        published = True
        return descriptor
    except (FileExistsError, FileNotFoundError):
        return None  # the path was taken; or a sweep took our private name for a left-over
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    finally:
        if not published:
            _discard(path, descriptor)
            _discard(private, descriptor)
            _give_back(descriptor)
    return _create_in_place(path, record, mode)


def _create_in_place(path, record, mode):
    """Step 4 where there are no hard links. An empty file shows until it is written; rule 2 spares it."""
    try:
        descriptor = _open_new(path)
    except FileExistsError:
        return None
    published = False
    flocked = False
    try:
        deadline = time.monotonic() + IN_PLACE_PATIENCE
        while flocked is False:  # an evictor or prober may have the flock of our empty file for a moment
            flocked = _flock(descriptor, fcntl.LOCK_EX)
            if flocked is False and time.monotonic() > deadline:
                raise PidLockError(path, "another process keeps the flock of this new file", "stop that process")
            if flocked is False:
                time.sleep(LOOK_PAUSE)
        if not _is_same_file(path, descriptor):
            return None
        _write_record(descriptor, record._replace(marked=flocked is True), mode)
        published = True
        return descriptor
    finally:
        if not published:
            if flocked is not False:  # nobody removes the path without its flock, we neither
                _discard(path, descriptor)
            _give_back(descriptor)


def _open_new(path):
    return _move_fd_up(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def _write_record(descriptor, record, mode):
    body = encode_record(record)
    if os.write(descriptor, body) != len(body):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        os.fchmod(descriptor, mode)
    except PermissionError:
        pass  # an owner may always, so this filesystem keeps no permissions (vfat)


def _make_parents(directory):
    try:
        os.mkdir(directory, 0o755)
    except FileExistsError:
        pass
    except FileNotFoundError:
        _make_parents(os.path.dirname(directory))
        os.mkdir(directory, 0o755)


def _flock(descriptor, operation):
    """Return True when granted, False when somebody else has it, None where the filesystem has no flock."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_FLOCK:
            return None
        raise


def _give_back(descriptor):
    """Unlock, then close: a close alone would leave the flock with whatever was forked meanwhile."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError:
        pass  # there is no flock here, or the close has to do
    finally:
        os.close(descriptor)


def _move_fd_up(descriptor):
    """Step 5: return a descriptor that is at least 10, or 3 under a tiny limit, in place of this one."""
    for lowest in (LOWEST_FD, 3):
        if descriptor >= lowest:
            break
        try:
            moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EMFILE) and lowest != 3:
                continue
            os.close(descriptor)
            raise
        os.close(descriptor)
        return moved
    return descriptor


def _is_same_file(path, descriptor):
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_if_same(path, descriptor):
    """Unlink path if it names the file of this descriptor, whose flock we hold; return whether it did."""
    if not _is_same_file(path, descriptor):
        return False
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _discard(path, descriptor):
    """Take back what a failing step made. What cannot be removed is a left-over for the next run or a sweep."""
    try:
        _remove_if_same(path, descriptor)
    except OSError:
        pass  # the failure that brought us here is the one to report


# ---- The judge ----


def judge(facts):
    """Decide by the rules of design section 3 about a file that nobody has the flock of; the first that fits.

    Pure: Facts in, (state, reason) out. Rule 1 has been applied where the file was opened; rules 4, 5 and 7
    over recorded facts come with the details.
    """
    record = facts.record
    if record is None:  # rule 2
        damaged = facts.size <= DAMAGED_MAX or (facts.nuls and facts.size <= NULS_MAX)
        if facts.links != 1 or facts.executable or not damaged:
            return FOREIGN, "is somebody's file, not a pidfile"
        if -WRITING <= facts.age < WRITING:
            return HELD, "held by a program that is still writing its PID, it seems"
        return STALE, "there is no PID in it"
    if facts.size > BODY_MAX:
        return FOREIGN, "is too long for a pidfile"
    if record.marked and not facts.flock:
        return INCONCLUSIVE, "held by PID %d, it seems; this filesystem has no flock to tell by" % record.pid
    if record.marked and facts.filesystem == "local":  # rule 3
        return STALE, "PID %d is no longer behind it" % record.pid
    if facts.filesystem == "network":  # rule 4
        return INCONCLUSIVE, "held by PID %d, perhaps on another host: this is a network filesystem" % record.pid
    if facts.process == "none":  # rule 6
        return STALE, "PID %d does not exist" % record.pid
    if facts.process == "ours" and facts.flock:
        return STALE, "PID %d is ours, so its writer is gone" % record.pid
    if facts.process == "zombie":
        return STALE, "PID %d has ended" % record.pid
    if facts.process == "thread":
        return STALE, "PID %d is a thread of another process" % record.pid
    return HELD, "held by PID %d" % record.pid  # rule 8


def _gather_facts(descriptor, status, body, record, flock):
    return Facts(
        record=record,
        size=status.st_size,
        links=status.st_nlink,
        executable=bool(status.st_mode & 0o111),
        nuls=not body.strip(b"\0"),
        age=_age(status),
        flock=flock,
        filesystem=_filesystem_of(descriptor),
        process=_process_state(record.pid) if record else "none",
    )


# ---- The holder's record, and what the system says ----


def encode_record(record):
    """Return the bytes of a pidfile: the PID, and the mark if the record has it."""
    return b"%d\n%s" % (record.pid, MARK if record.marked else b"")


def parse_record(body):
    """Return the Record in these bytes, or None when they begin with no PID."""
    first = body[3:] if body.startswith(b"\xef\xbb\xbf") else body
    digits = first.split(b"\n", 1)[0].rstrip(b"\0").strip(b" \t\r")
    significant = digits.lstrip(b"0")
    if not digits.isdigit() or not 1 <= len(significant) <= 10 or int(significant) > PID_MAX:  # ASCII only, for bytes
        return None
    return Record(int(significant), body.startswith(digits + b"\n" + MARK), {})


def _age(status):
    return time.time() - status.st_mtime


def _filesystem_of(descriptor):
    """Return "local", "network" or "other"; local also where no mountinfo lists it (no /proc, a chroot)."""
    try:
        mounts = _read("/proc/self/mountinfo").splitlines()
    except OSError:
        return "local"
    mount_id = _field_of("/proc/self/fdinfo/%d" % descriptor, "mnt_id:")
    for mount in mounts:  # proc(5): ID parent dev root mountpoint options [optional ...] - type source options
        if mount.split(" ", 1)[:1] == mount_id:
            kind = mount.split(" - ", 1)[1].split(" ", 1)[0]
            return "local" if kind in LOCAL_FILESYSTEMS else "network" if kind in NETWORK_FILESYSTEMS else "other"
    return "local"


def _process_state(pid):
    """Return "none", "ours", "zombie", "thread" or "alive"; what /proc does not show counts as alive."""
    if pid == os.getpid():
        return "ours"
    if not pid:
        return "none"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "none"
    except PermissionError:
        pass  # kill(2): it exists
    fields = _stat_fields(pid)
    if fields and _field_of("/proc/%d/status" % pid, "Tgid:") not in (None, [str(pid)]):
        return "thread"
    if fields and fields[0] in "ZX" and int(fields[17]) <= 1:  # the leader of a living process may be a zombie
        return "zombie"
    return "alive"


def _stat_fields(pid):
    """Return the fields of /proc/PID/stat from the 3rd (state) on, proc(5); [] where that cannot be read."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return []  # the /proc of another PID namespace: its numbers are not ours
        return _read("/proc/%d/stat" % pid).rpartition(")")[2].split()
    except OSError:
        return []


def _field_of(path, name):
    """Return the words behind `name` in the first such line, None where there is none to read."""
    try:
        lines = _read(path).splitlines()
    except OSError:
        return None
    return next((line[len(name):].split() for line in lines if line.startswith(name)), None)


def _read(path):
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


# ---- Who holds it ----


def active_pid(path):
    """Return (pid, alive): alive tells whether it is held; (0, False) where there is no file. Takes nothing.

    Raises PidLockError when the path is no pidfile or cannot be read.
    """
    status = inspect(path)
    return status.pid, status.state in (HELD, UNKNOWN)


def inspect(path):
    """Return the Status of path, without taking or changing anything.

    Raises PidLockError when the path is no pidfile or cannot be read.
    """
    path = os.path.abspath(os.fsdecode(path))
    deadline = time.monotonic() + LOOK_AGAIN
    try:
        found = _examine(path, fcntl.LOCK_SH)
        while time.monotonic() < deadline and not _is_certain(found):
            time.sleep(LOOK_PAUSE)
            found = _examine(path, fcntl.LOCK_SH)
    except OSError as error:
        raise _explain(error, path, "look at it") from error
    if found.state == FREE:
        return Status(path, FREE, 0, found.reason, None, None)
    if found.state == STALE:
        return Status(path, STALE, found.pid, found.reason, _age(found.status), None)
    holder = _find_holder(found)
    return Status(path, HELD if found.state == HELD else UNKNOWN, found.pid, holder.reason, _age(found.status), holder)


def _is_certain(found):
    """Tell whether a refused flock is the recorded holder's; an evictor or prober gives it back at once."""
    return not found.refused or any(_flockers(found.status, [found.pid]))


def _find_holder(found):
    """Return the Holder for a Finding that says held or inconclusive."""
    since = _duration(_age(found.status))
    if found.state == INCONCLUSIVE:
        return Holder(found.reason, "if it is gone: rm %s" % found.path, None, False, ())
    if not found.refused and not found.pid:
        return Holder(found.reason, "try again in %g s" % WRITING, None, False, ())
    name, stopped = _command_of(found.pid), _stat_fields(found.pid)[:1] == ["T"]
    if not found.refused:
        reason = "held by PID %s for %s, says a file that pidlock did not write" % (_named(found.pid, name), since)
        return Holder(reason, "wait for it or stop it; if it is a stranger: rm %s" % found.path, name, stopped, ())
    takers = dict(_flockers(found.status, [found.pid]))
    if not takers and (_process_state(found.pid) in ("none", "zombie") or os.geteuid() == 0):
        takers = dict(_flockers(found.status, _all_pids()))
    if takers and found.pid not in takers:
        return _find_odd_holder(found, takers, since)
    if not takers and (not found.pid or _process_state(found.pid) == "none"):
        reason = "held for %s, but PID %d is not to be seen: in another PID namespace, or its command outlives it"
        return Holder(reason % (since, found.pid), "wait for it, or look as root", None, False, ())
    reason = "held by PID %s%s for %s" % (_named(found.pid, name), ", which is stopped," if stopped else "", since)
    advice = "continue it (kill -CONT %d) or stop it" % found.pid if stopped else "wait for it or stop it"
    return Holder(reason, advice, name, stopped, tuple(sorted(takers)))


def _find_odd_holder(found, takers, since):
    """Return the Holder where processes other than the recorded one have the flock. takers: {PID: who took it}."""
    pids = tuple(sorted(takers))
    names = ", ".join("PID " + _named(pid, _name_of(pid)) for pid in pids)
    here = [pid for pid in pids if (_field_of("/proc/%d/status" % pid, "NSpid:") or [])[1:][-1:] == [str(found.pid)]]
    if here:
        name = _command_of(here[0])
        reason = "held for %s by PID %d of another PID namespace, here " % (since, found.pid) + _named(here[0], name)
        return Holder(reason, "wait for it or stop it", name, _stat_fields(here[0])[:1] == ["T"], pids)
    if found.pid and any(taker in (0, found.pid) for taker in takers.values()):  # a dead taker may read as 0
        reason = "held for %s: its holder, PID %d, was killed, but its command lives on: %s" % (since, found.pid, names)
        return Holder(reason, "wait for it or stop it", _name_of(pids[0]), False, pids)
    reason = "busy: %s has its flock without being its holder" % names
    return Holder(reason, "stop that, and use --mode 0600 where such readers matter", None, False, pids)


def _flockers(status, pids):
    """Yield (pid, taker) for each of these processes that has this file open and flocked; taker took the flock.

    By /proc/PID/fdinfo, proc(5): /proc/locks names dead takers, hides other namespaces and disagrees on overlayfs.
    """
    for pid in pids:
        try:
            numbers = os.listdir("/proc/%d/fd" % pid)
        except OSError:
            continue  # it has ended, or is another user's
        for number in numbers:
            lock = _field_of("/proc/%d/fdinfo/%s" % (pid, number), "lock:")  # 1: FLOCK ADVISORY WRITE PID DEV:INO ...
            try:
                if lock and lock[1] == "FLOCK" and os.path.samestat(os.stat("/proc/%d/fd/%s" % (pid, number)), status):
                    yield pid, int(lock[4])
                    break
            except OSError:
                continue  # it was closed meanwhile


def _all_pids():
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _command_of(pid):
    """Return the name of what runs under the lock: the holder's child where the holder is a pidlock, else its own."""
    try:
        words = _read("/proc/%d/cmdline" % pid).split("\0")[:4]  # an interpreter and its options come before the script
        if any(os.path.basename(word) in ("pidlock", "pidlock.py") for word in words):
            children = _read("/proc/%d/task/%d/children" % (pid, pid)).split()
            return _name_of(int(children[0])) if children else None
    except OSError:
        return None
    return _name_of(pid)


def _name_of(pid):
    try:
        return _read("/proc/%d/comm" % pid).rstrip("\n")
    except OSError:
        return None


def _named(pid, name):
    return "%d (%s)" % (pid, name) if name else "%d" % pid


def _user_name(uid):
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "user %d" % uid


# ---- What people read ----


def _duration(seconds):
    """Return for example 45s, 2h13m or 3d4h."""
    seconds = max(0, int(seconds))
    for unit, size, lesser, lesser_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            rest = seconds % size // lesser_size
            return "%d%s%s" % (seconds // size, unit, "%d%s" % (rest, lesser) if rest else "")
    return "%ds" % seconds


def _printable(text):
    """Make control characters visible, and bytes that are not UTF-8: nothing from a file may drive a terminal."""
    return "".join(
        char if char.isprintable()
        else "\\x%02x" % (ord(char) & 0xFF) if "\udc80" <= char <= "\udcff"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


ADVICE = {
    errno.EACCES: "check the permissions of it and of its directory",
    errno.EPERM: "check the permissions of it and of its directory",
    errno.ENOSPC: "make room on that filesystem",
    errno.EDQUOT: "make room within the quota",
    errno.EROFS: "name a file on a writable filesystem",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "one of its parents is a file",
    errno.ENOENT: "one of its parents is missing or a dangling link",
    errno.ELOOP: "name the file itself",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def _explain(error, path, doing):
    advice = ADVICE.get(error.errno, "look into that, then try again")
    return PidLockError(path, "cannot %s: %s" % (doing, error.strerror), advice)


def _explain_open(error, path):
    try:
        status = os.lstat(path)
    except OSError:
        return _explain(error, path, "open it")
    kind = _kind_of(status)
    if kind:
        return PidLockError(path, "is %s, not a pidfile" % kind, "name another file")
    owned = "open it, %s's with mode %04o" % (_user_name(status.st_uid), stat.S_IMODE(status.st_mode))
    return _explain(error, path, owned)


def _kind_of(status):
    """Return what is there, in words; None for a regular file."""
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO",
             stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFREG: None}
    return kinds.get(stat.S_IFMT(status.st_mode), "something else")


# ---- Waiting ----


def _sleep_until_end_of(pid, seconds):
    """Sleep; return True early when process pid ends, False after the time is up. pid 0: only the time.

    A pidfd (pidfd_open(2), Linux 5.3) is readable once its process has ended and its files are closed. What it
    cannot tell is a release by a process that lives on, hence the caller's short times.
    """
    if pid and pid != os.getpid() and hasattr(os, "pidfd_open"):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            pass  # ESRCH: not in this namespace any more; else no pidfd is to be had
        else:
            try:
                poller = select.poll()
                poller.register(pidfd, select.POLLIN)
                return bool(poller.poll(max(1, int(seconds * 1000))))
            finally:
                os.close(pidfd)
    time.sleep(seconds)
    return False


# ---- The command ----

SI_KERNEL = 128  # sigaction(2): sent by the kernel, here by the terminal
TERMINAL_SIGNALS = {signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH, signal.SIGHUP, signal.SIGCONT, signal.SIGTSTP}
SignalInfo = namedtuple("SignalInfo", "si_signo si_code")
STOP_SIGNALS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


class _Interrupted(Exception):
    """A signal came while waiting for the lock."""

    def __init__(self, signum, from_terminal):
        super().__init__(signum)
        self.signum = signum
        self.from_terminal = from_terminal


def _run_command(lock, argv, mask, signals, close):
    """Run argv under the acquired lock; return (wait status, whether the terminal's Ctrl-C came).

    mask: the signal mask for the command. signals: those to take and pass on, all blocked. close: keep the lock's
    descriptor from the command.
    """
    environment = _original_environment()
    environment.pop("PIDLOCK_TOKEN", None)  # an outer pidlock's, of another lock
    environment.update(PIDLOCK_PIDFILE=lock.path, PIDLOCK_PID=str(lock.pid), PIDLOCK_SLOT=str(lock.slot))
    child = os.fork()
    if child == 0:
        _become_command(argv, environment, mask, None if close else lock._descriptor)
    interrupted = False
    before_fork = True  # what was pending at the fork has not reached the child, whoever sent it
    while True:
        info = _next_signal(signals | {signal.SIGCHLD}, 0 if before_fork else FRESHEN_EVERY)
        if info is None and before_fork:
            before_fork = False
        elif info is None:
            _freshen(lock._descriptor)
        elif info.si_signo == signal.SIGCHLD:
            status = _reap(child)
            if status is not None and os.WIFSTOPPED(status):
                _stop_as(os.WSTOPSIG(status))
            elif status is not None:
                return status, interrupted
        else:
            interrupted = interrupted or _is_ctrl_c(info)
            _pass_on(info, child, before_fork)


def _become_command(argv, environment, mask, descriptor):
    """In the forked child: become the command, with the signals and descriptors that pidlock was started with."""
    status = EXIT_FAILED
    try:
        for signum in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # those that Python sets at its start
            if signum != signal.SIGINT or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        if descriptor is not None:
            os.set_inheritable(descriptor, True)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _execute(argv, environment)
    except FileNotFoundError:
        status = EXIT_NOT_FOUND
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        _say("%s: not found; check the name and PATH" % argv[0])
    except OSError as error:
        status = EXIT_CANNOT_EXECUTE
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        _say("%s: cannot be executed: %s; check its permissions and its first line" % (argv[0], error.strerror))
    finally:
        os._exit(status)


def _execute(argv, environment):
    """Search PATH and execute, as execvp(3) does: a script without `#!` runs under /bin/sh. Raises OSError."""
    name = argv[0]
    places = [name] if "/" in name else [os.path.join(place, name) for place in os.get_exec_path(environment)]
    failure = OSError(errno.ENOENT, os.strerror(errno.ENOENT))  # of this errno, so a FileNotFoundError
    for place in places:
        try:
            os.execve(place, argv, environment)
        except (FileNotFoundError, NotADirectoryError):
            if os.path.isfile(place):  # then it is the interpreter in its first line that was not found
                failure = OSError(errno.ENOEXEC, "the interpreter that its first line names was not found")
        except PermissionError as error:
            failure = error
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                os.execve("/bin/sh", ["/bin/sh", place] + argv[1:], environment)
            raise
    raise failure


def _original_environment():
    """Return the environment without the LC_CTYPE that Python puts there in a C locale (PEP 538)."""
    environment = dict(os.environ)
    if environment.get("LC_CTYPE") in ("C.UTF-8", "C.utf8", "UTF-8"):
        try:
            original = _read("/proc/self/environ").split("\0")
        except OSError:
            return environment
        values = [entry[9:] for entry in original if entry.startswith("LC_CTYPE=")]
        if values:
            environment["LC_CTYPE"] = values[0]
        else:
            del environment["LC_CTYPE"]
    return environment


def _reap(child):
    """Reap what has ended, as PID 1 of a container has to; return the child's wait status if it ended or stopped."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid in (0, child):
            return status if pid else None


def _pass_on(info, child, before_fork):
    """Pass a signal on to the command, unless the terminal has sent it to both of us."""
    group = os.getpgid(child)
    own_group = group != os.getpgrp()
    # A hang-up goes to the session's leader alone (tty_ioctl(4), TIOCNOTTY): then the command has not got it.
    lone_hangup = info.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid()
    if _is_from_terminal(info) and not own_group and not before_fork and not lone_hangup:
        return
    if group == child and own_group and info.si_signo in (signal.SIGTSTP, signal.SIGCONT):
        os.killpg(group, info.si_signo)  # what the terminal, or the shell's fg, does to a whole job
    else:
        os.kill(child, info.si_signo)


def _is_from_terminal(info):
    return info.si_code == SI_KERNEL and info.si_signo in TERMINAL_SIGNALS


def _is_ctrl_c(info):
    return info.si_signo == signal.SIGINT and _is_from_terminal(info)


def _stop_as(signum):
    """The command was stopped by the terminal: stop too, so that the shell gets the terminal back."""
    if signum not in STOP_SIGNALS:
        return  # SIGSTOP: somebody stopped the command alone
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return  # no controlling terminal, so nobody would continue us
    os.kill(os.getpid(), signum)  # still blocked: merges with the one that the terminal sent, so we stop once
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signum})


def _freshen(descriptor):
    """Set the atime, never the mtime, so that cleaners of /tmp leave a long job's file alone."""
    try:
        os.utime(descriptor, ns=(time.time_ns() if hasattr(time, "time_ns") else int(time.time() * 1e9),
                                 os.fstat(descriptor).st_mtime_ns))
    except OSError:
        pass  # a courtesy: nothing depends on it


def _next_signal(signals, seconds):
    """Return the siginfo of the next of these blocked signals, None after so many seconds."""
    if hasattr(signal, "sigtimedwait"):
        return signal.sigtimedwait(signals, seconds)
    if not seconds and not signals & signal.sigpending():
        return None
    signum = signal.sigwait(signals)  # macOS: no time limit, and no telling who sent it
    return SignalInfo(signum, 0)


def _passed_signals():
    """Return the signals that the command gets from us: all that may be meant for it and were not ignored."""
    names = "HUP INT QUIT TERM USR1 USR2 ALRM WINCH CONT PWR TSTP".split()
    signals = {getattr(signal, "SIG" + name) for name in names if hasattr(signal, "SIG" + name)}
    if hasattr(signal, "SIGRTMIN"):
        signals.update(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
    return {signum for signum in signals if signal.getsignal(signum) != signal.SIG_IGN}


def status_of(wait_status):
    """Return the exit status for a wait status: the command's own, or 128+N for its death by signal N."""
    if os.WIFSIGNALED(wait_status):
        return EXIT_BY_SIGNAL + os.WTERMSIG(wait_status)
    return os.WEXITSTATUS(wait_status)


# ---- The command line ----

HELP = """exit status:
  the command's own; 128+N when signal N ended it; else
  75   held (-E sets another)      126  the command cannot be executed
  125  pidlock itself failed       127  the command was not found
  2    wrong usage
  --check: 0 free, 1 held, 125 cannot tell

examples:
  pidlock --pidfile /run/backup.pid -- /home/me/backup.sh
  pidlock --pidfile /run/backup.pid --wait 60 -- ./backup.sh
  pidlock --pidfile /run/backup.pid --check && echo free
"""


def main(argv=None):
    """Run the command line (sys.argv without argv); return the exit status.

    With argv None this is a process of its own, about to end: signals stay blocked behind it.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _passed_signals() | STOP_SIGNALS | {signal.SIGCHLD})
    try:
        options = _parse(argv)
        if options.self_test:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return _self_test()
        if options.check:
            return EXIT_CHECK_HELD if _check(options.pidfile) else EXIT_OK
        return _run(options, mask)
    except SystemExit as stop:  # argparse has spoken
        return stop.code
    except LockHeld as held:
        if not options.quiet:
            _say(held)
        return options.held_exit_code
    except PidLockError as error:
        _say(error)
        return EXIT_FAILED
    except OSError as error:  # of a system call outside the lock's steps, as fork
        _say("%s: %s; look into that, then try again" % (options.pidfile, error.strerror))
        return EXIT_FAILED
    except _Interrupted as interruption:
        return _end_by(interruption.signum, interruption.from_terminal, mask)
    finally:
        if argv is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _check(path):
    state = inspect(path)
    if state.state == UNKNOWN:
        raise PidLockError(state.path, "cannot tell: " + state.reason, state.holder.advice)
    return state.state == HELD


def _run(options, mask):
    signals = _passed_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored at the start, it would lose us the command's status
    lock = PidLock(options.pidfile, options.wait, options.mode, lambda event: _report(event, options))
    asked = []

    def on_tick(found):
        _raise_pending(signals)
        if found.pid not in asked:
            asked.append(found.pid)
            _begin_wait(lock.path, found, options.quiet)

    lock._on_tick = on_tick
    # The stop signals stay unblocked until the lock is ours: Ctrl-Z stops a waiting pidlock.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS - mask)
    try:
        lock.acquire()
    except LockHeld:
        _raise_pending(signals)
        raise
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        wait_status, interrupted = _run_command(lock, options.command, mask, signals, options.close)
    finally:
        try:
            lock.release()
        except PidLockError as error:
            _say(error)
    status = status_of(wait_status)
    return _end_by(status - EXIT_BY_SIGNAL, interrupted, mask) if os.WIFSIGNALED(wait_status) else status


def _raise_pending(signals):
    """Raise _Interrupted when a signal has come that would end a process."""
    info = _next_signal(signals - {signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP}, 0)
    if info is not None:
        raise _Interrupted(info.si_signo, _is_from_terminal(info))


def _begin_wait(path, found, quiet):
    holder = _find_holder(found)
    if found.pid in _ancestors() or os.getpid() in holder.pids:
        reason = "held by PID %d, which waits for this very process" % found.pid
        raise LockHeld(path, found.pid, reason, "lock once, outside")
    if not quiet and sys.stderr and sys.stderr.isatty():
        _say("%s: waiting: %s" % (path, holder.reason))


def _ancestors():
    """Yield the PIDs of our parent, its parent and so on, as far as /proc shows them."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        fields = _stat_fields(pid)
        pid = int(fields[1]) if fields else 0


def _end_by(signum, from_terminal, mask):
    """Return 128+N; but end by the terminal's Ctrl-C itself, so that a shell's loop stops too."""
    if signum == signal.SIGINT and from_terminal and os.getpid() != 1:  # no default action for PID 1, signal(7)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return EXIT_BY_SIGNAL + signum


def _report(event, options):
    """Say on stderr what happened, as far as -q and -v ask for it."""
    kind = event["event"]
    texts = {
        "evicted": "took over a stale file: %s" % event["reason"],
        "lost": "lost: %s while the command ran; find out who did that" % event["reason"],
        "acquired": "acquired by PID %d" % event["pid"],
        "released": "released after %s" % _duration(event["seconds"]),
    }
    if kind == "lost" or (kind == "evicted" and not options.quiet) or (kind in texts and options.verbose):
        _say("%s: %s" % (event["path"], texts[kind]))


def _say(message):
    """Write one line on stderr; a line that cannot be written changes nothing."""
    if sys.stderr is None:
        return  # closed at the start, and by now descriptor 2 may be anything
    line = "pidlock: %s\n" % _printable(str(message))
    try:
        os.write(2, line.encode(sys.stderr.encoding or "ascii", "backslashreplace"))
    except OSError:
        pass


def _parse(argv):
    """Return the options. Wrong usage ends in SystemExit(2) with argparse's message."""
    import argparse

    class Formatter(argparse.RawDescriptionHelpFormatter):
        def _format_action_invocation(self, action):  # as 3.13 does, on every version
            words = ", ".join(action.option_strings)
            return words if action.nargs == 0 else words + " " + action.metavar

    def print_message(message, file=None):  # the stream may be closed or full, which is no reason to fail
        try:
            os.write(1 if file is sys.stdout else 2, message.encode("utf-8", "surrogateescape"))
        except OSError:
            pass

    parser = argparse.ArgumentParser(
        prog="pidlock",
        usage="pidlock --pidfile FILE [options] [--] COMMAND [ARG...]\n"
        "       pidlock --pidfile FILE --check\n"
        "       pidlock --self-test | --version | --help",
        description="Run COMMAND under a lock that people can read: a pidfile.",
        epilog=HELP,
        add_help=False,
        allow_abbrev=sys.version_info < (3, 8),  # False breaks -qq and -pX before 3.8
        formatter_class=lambda prog: Formatter(prog, max_help_position=30, width=80),
    )
    parser._print_message = print_message  # type: ignore[method-assign]
    add = parser.add_argument_group("options").add_argument
    add("-p", "--pidfile", metavar="FILE", help="the lock; missing parent directories are made")
    add("-w", "--wait", metavar="TIME", type=_seconds, default=0.0, help="wait so long: 90, 0.5, 30s, 1h30m, inf")
    add("-E", "--held-exit-code", "--conflict-exit-code", metavar="N", type=_exit_code, default=EXIT_HELD,
        help="exit with N instead of 75 when it is held")
    add("-o", "--close", action="store_true", help="keep the lock's descriptor from the command")
    add("-q", "--quiet", action="store_true", help="say nothing of held, waiting, taking over")
    add("-v", "--verbose", action="store_true", help="also say acquired and released")
    add("--mode", metavar="MODE", type=_mode, default=0o644, help="the pidfile's permissions; default 0644")
    add("--check", action="store_true", help="tell by the exit status whether it is held")
    add("--self-test", action="store_true", help="test this pidlock on this machine")
    add("--version", action="version", version="pidlock " + __version__, help="print the version")
    add("-h", "--help", action="help", help="print this")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.self_test:
        return options
    if not options.pidfile:
        parser.error("--pidfile FILE is required" if options.pidfile is None else "--pidfile: an empty name")
    if options.check and options.command:
        parser.error("--check runs no command")
    if not options.check and not options.command:
        parser.error("no command given")
    return options


def _seconds(text):
    """Return a TIME in seconds: 90, 0.5, 30s, 5m, 1h30m, 2d or inf. Raises argparse.ArgumentTypeError."""
    import argparse
    import re

    if text == "inf":
        return float("inf")
    number = r"([0-9]+(?:\.[0-9]+)?)"
    match = re.match("(?:{0}|(?:{0}d)?(?:{0}h)?(?:{0}m)?(?:{0}s)?)$".format(number), text)
    if not text or not match or text.endswith("\n"):
        raise argparse.ArgumentTypeError("%r is no time; try 90, 0.5, 30s, 5m, 1h30m, 2d or inf" % text)
    return sum(float(value) * unit for value, unit in zip(match.groups(), (1, 86400, 3600, 60, 1)) if value)


def _exit_code(text):
    import argparse

    if not (text.isdigit() and text.isascii() if hasattr(text, "isascii") else text.isdigit()) or int(text) > 255:
        raise argparse.ArgumentTypeError("%r is no exit status; try a number from 0 to 255" % text)
    return int(text)


def _mode(text):
    import argparse

    try:
        mode = int(text, 8)
        PidLock("checked", mode=mode)
    except ValueError:
        raise argparse.ArgumentTypeError("%r is no mode for a pidfile; try 0644 or 0600" % text) from None
    return mode


# ---- Self-test ----


def _self_test():
    """Run each promise's test in a directory of its own; print a line for each; return the exit status."""
    import shutil
    import tempfile

    failed = 0
    for name, test in SELF_TESTS:
        directory = tempfile.mkdtemp(prefix="pidlock-self-test-")
        try:
            problem = test(os.path.join(directory, "test.pid"))
        except Exception as error:  # a broken protocol may break anything
            problem = "%s: %s" % (type(error).__name__, error)
        finally:
            shutil.rmtree(directory)
        failed += problem is not None
        print("%s %s%s" % ("ok  " if problem is None else "FAIL", name, "" if problem is None else ": " + problem))
    print("%d passed, %d failed" % (len(SELF_TESTS) - failed, failed))
    return 1 if failed else 0


def _start(path, *arguments, **options):
    import subprocess

    command = [sys.executable, os.path.abspath(__file__), "--pidfile", path]
    return subprocess.Popen(command + list(arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, universal_newlines=True, **options)


def _status(path, *arguments):
    process = _start(path, *arguments)
    process.communicate(timeout=60)
    return process.returncode


def _start_holder(path):
    """Start a pidlock whose command says its PID and ends when its standard input does."""
    holder = _start(path, "--", "/bin/sh", "-c", "echo $$; read line")
    return holder, int(holder.stdout.readline())


def _write_file(path, body, age):
    with open(path, "wb") as file:
        file.write(body)
    os.utime(path, (time.time() - age, time.time() - age))


def _differ(expected, seen):
    return None if expected == seen else "expected %r, saw %r" % (expected, seen)


def _dead_pid():
    import subprocess

    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def _test_file(path):
    process = _start(path, "--", "cat", path)
    seen = process.communicate(timeout=60)[0]
    return _differ(("%d\n\n\n" % process.pid, False), (seen, os.path.exists(path)))


def _test_blocks(path):
    holder, _ = _start_holder(path)
    seen = [_status(path, "--", "true"), _status(path, "--check")]
    holder.communicate(timeout=60)
    return _differ([75, 1, 0, 0], seen + [_status(path, "--check"), _status(path, "--", "true")])


def _test_taken_over(body):
    def test(path):
        _write_file(path, body() if callable(body) else body, age=60)
        return _differ((0, False), (_status(path, "--", "true"), os.path.exists(path)))

    return test


def _test_respected(body, age):
    def test(path):
        _write_file(path, body() if callable(body) else body, age)
        return _differ((75, 1, True), (_status(path, "--", "true"), _status(path, "--check"), os.path.exists(path)))

    return test


def _test_killed_holder(path):
    holder, command = _start_holder(path)
    holder.kill()
    holder.wait()
    seen = [_status(path, "--", "true")]
    holder.communicate(timeout=60)  # ends the command
    seen.append(_status(path, "--wait", "60", "--", "true"))
    return _differ([75, 0], seen)


def _test_evictor(path):
    _write_file(path, b"%d\n" % _dead_pid(), age=60)
    found = _examine(path, fcntl.LOCK_EX)
    os.unlink(path)
    with PidLock(path):  # another evictor was faster
        evicted = _evict(found)
        return _differ((STALE, False, True), (found.state, evicted, os.path.exists(path)))


def _test_release(path):
    lock = PidLock(path).acquire()
    os.unlink(path)
    with PidLock(path):
        return _differ((False, True), (lock.release(), os.path.exists(path)))


def _test_exit_statuses(path):
    _write_file(path + ".sh", b"", age=0)
    commands = ("exit 0", "exit 7", "kill -INT $$", "kill -TERM $$")
    seen = [_status(path, "--", "/bin/sh", "-c", command) for command in commands]
    return _differ([0, 7, 130, 143, 126, 127], seen + [_status(path, path + ".sh"), _status(path, path + ".no")])


def _test_wait(path):
    holder, _ = _start_holder(path)
    waiter = _start(path, "--wait", "60", "--", "echo", "mine")
    holder.communicate(timeout=60)
    return _differ(("mine\n", 0), (waiter.communicate(timeout=60)[0], waiter.returncode))


SELF_TESTS = [
    ("the file holds the PID and the mark, and goes with its holder", _test_file),
    ("a living holder blocks, and --check tells", _test_blocks),
    ("a dead PID is taken over", _test_taken_over(lambda: b"%d\n" % _dead_pid())),
    ("garbage is taken over", _test_taken_over(b"garbage\n")),
    ("a young empty file is not", _test_respected(b"", age=0)),
    ("a recycled PID under the mark is taken over", _test_taken_over(lambda: b"%d\n\n\n" % os.getpid())),
    ("a living PID of another program is not", _test_respected(lambda: b"%d\n" % os.getpid(), age=60)),
    ("a killed holder's command keeps the lock until it ends", _test_killed_holder),
    ("an evictor removes only the file that it judged", _test_evictor),
    ("release leaves another's lock alone", _test_release),
    ("exit statuses are 0, 7, 130, 143, 126 and 127", _test_exit_statuses),
    ("--wait gets the lock when it is free", _test_wait),
]


if __name__ == "__main__":
    sys.exit(main())

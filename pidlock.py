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
     all.  Without hard links, and on FUSE: O_CREAT|O_EXCL on the path itself, then flock,
     check, write.
  5. The descriptor is 10 or above: never the command's stdin, stdout or stderr.
Release, in PidLock.release: if the path still names our file and we are the process that
took it, unlink it, unlock, close.  Otherwise the lock was lost: touch nothing and say so.

Who may unlink the path: only who holds the flock of the very file that it names and has
compared st_dev and st_ino under it; the holder to release, a contender or sweeper after the
judge called the file stale.  (But for the strategy time-only, which breaks a living holder's
lock by its age: under the directory's flock, after a last look at the inode.)

What kill -9 leaves: before link, a private file (`.pidlock-...`, for a sweep), without hard
links an empty file, stale after 2 s; after it, a marked file whose flock the kernel has freed,
so the next run evicts it.  While the command lives on it keeps the inherited flock, and the
path stays held until it has ended (not with `--close`: then the next run evicts it).

Limits.  Advisory: only who uses pidlock respects it.  One host: on a network filesystem it
refuses rather than guesses.  Whoever may read the file may flock it and so keep a stale one
busy; `--mode 0600` where that matters.  Races that remain: a path removed or replaced by others
in the instant between a check (release's or the evictor's) and its unlink; one written in place
by another program in the instant between the evictor's check and its unlink.  On a filesystem
without flock: two evictors between check and unlink; and nothing tells that the command of a
killed pidlock lives on.

The names in __all__ are the stable API; the others are not, nor is the wording of messages.
"""
import errno
import os
import select
import signal
import stat
import sys
import time
import types
from collections import namedtuple

try:
    import fcntl
except ImportError:
    sys.exit("pidlock: this system has no flock(2); pidlock runs on Linux and other POSIX systems")

# ctypes, json, re, subprocess and their like are imported where they are used: each costs a run that does not need it
# milliseconds. argparse takes as long as all the rest together, so the command line is read without it.

__all__ = ["PidLock", "PidLockError", "LockHeld", "LockDir", "Status", "active_pid", "inspect", "sweep"]
__version__ = "0.1.0"

EXIT_OK = 0
EXIT_CHECK_HELD = 1
EXIT_USAGE = 2
EXIT_NOBODY = 3  # LSB Core, 20.2: init script actions; and the next
EXIT_UNKNOWN = 4
EXIT_HELD = 75  # EX_TEMPFAIL, as lockf(1)
EXIT_FAILED = 125  # as timeout(1) and env(1), and the two below
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127
EXIT_BY_SIGNAL = 128

FREE = "free"
HELD = "held"
STALE = "stale"
UNKNOWN = "unknown"
STATUS_CODES = {HELD: 0, STALE: 1, FREE: EXIT_NOBODY, UNKNOWN: EXIT_UNKNOWN}
INCONCLUSIVE = "inconclusive"  # the judge's own; an acquire takes it for held, inspect for unknown
FOREIGN = "foreign"  # the judge's own: somebody's file, not a pidfile

PID_FIRST = "pid-first"
PID_ONLY = "pid-only"
TIME_ONLY = "time-only"
STRATEGIES = (PID_FIRST, PID_ONLY, TIME_ONLY)

MARK = b"\n\n"
COUNTER = b"%020d\n"  # what a fencing counter holds
PID_MAX = 2 ** 31 - 1  # no pid_t is wider (sys/types.h on every system that Python runs on)
BODY_MAX = 65536  # bytes; no pidfile is longer, and a huge file given by mistake is not read whole
DAMAGED_MAX = 64  # bytes; what a damaged pidfile may hold
NULS_MAX = 4096  # bytes; a block of NULs is what some filesystems leave after a power cut
TRACE_ID_MAX = 256  # characters; W3C's has 32
COMMAND_MAX = 4096  # characters of the command line in the details, so that escaped they stay below BODY_MAX
WRITING = 2.0  # seconds in which another program may still be writing an empty or partial pidfile
LOOK_AGAIN = 0.050  # seconds; evictors and probers hold a file's flock for microseconds, unless the CPU is taken away
LOOK_LONG = 1.0  # seconds; the same where the flock is shared, which no holder's is
LOOK_PAUSE = 0.001  # seconds between two looks meanwhile
TICK_FIRST = 0.020  # seconds; the wait's timer, for what neither a pidfd nor inotify can tell
TICK_MAX = 0.100
TICK_WATCHED = 5.0  # the same where inotify tells of each release: other hosts' and a file's age are left
TICK_SHOWN = 1.0  # the same on a terminal that shows the seconds
FRESHEN_EVERY = 3600.0  # seconds; /tmp cleaners count in days
WATCH_KEPT = 1.0  # seconds into the command; then the wait's watch, of which a user may have 128, is closed
PROGRESS = 10.0  # seconds; longer without a held, stale or created file is a filesystem with unstable inode numbers
PATIENCE = 2.0  # seconds to wait for the flock of a file or directory that is only ever held for an instant
COUNTER_PATIENCE = 60.0  # seconds; a queue of contenders that each wait for a disk
GUARD_PATIENCE = 1.0  # seconds; the same for the directory's, which others may flock for longer
SLOTS_MAX = 10000  # of one semaphore
UNGUARDED_TRIES = 5  # to take a slot without the directory's flock
PRIVATE_PREFIX = ".pidlock-"  # and 16 hex digits; short, for FILE's own name may be NAME_MAX long
COMM = "pidlock"  # the holder's /proc/PID/comm, which ps and pgrep show, however it was started
LOWEST_FD = 10  # shells use the descriptors below themselves

WARILY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # to open what may be anything by now
NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
LOCAL_FILESYSTEMS = frozenset(
    "ext2 ext3 ext4 xfs btrfs zfs f2fs bcachefs jfs reiserfs nilfs2 tmpfs ramfs devtmpfs hugetlbfs overlay aufs"
    " vfat exfat msdos ntfs ntfs3 fuseblk hfsplus ubifs jffs2 squashfs erofs iso9660 rootfs".split()
)
MODELESS_FILESYSTEMS = frozenset("vfat exfat msdos ntfs ntfs3 fuseblk".split())  # every file there is executable
NETWORK_FILESYSTEMS = frozenset(
    "nfs nfs4 cifs smb3 smbfs 9p virtiofs ceph lustre afs gfs2 ocfs2 gpfs beegfs glusterfs orangefs pvfs2 coda ncpfs"
    " fuse.sshfs fuse.glusterfs fuse.ceph fuse.s3fs fuse.gcsfuse fuse.rclone fuse.davfs fuse.lustre fuse.moosefs"
    " fuse.mfs fuse.juicefs fuse.vmhgfs-fuse".split()
)


# ---- Errors and results ----


class PidLockError(Exception):
    """The lock could not be taken, looked at or given back: `.path`, `.reason`, `.advice`; one line as text."""

    def __init__(self, path, reason, advice):
        super().__init__(path, reason, advice)
        self.path = path
        self.reason = reason
        self.advice = advice

    def __str__(self):
        return _printable("%s: %s; %s" % (self.path, self.reason, self.advice))


class LockHeld(PidLockError):
    """Somebody else holds the lock: `.path`, and `.pid` as the file records it (0: none is legible)."""

    def __init__(self, path, pid, reason, advice):
        super().__init__(path, reason, advice)
        self.args = (path, pid, reason, advice)  # for pickle
        self.pid = pid


# What inspect() found. state: free, held, stale or unknown. pid, slot: int, pid 0 where none is recorded. reason,
# advice, command, host, trace_id: str or None. since: seconds since the epoch, seconds: how long, both None where there
# is no file. The rest as in Holder.
Status = namedtuple("Status", "path state pid slot reason advice command since seconds host trace_id"
                    " stopped elsewhere orphaned pids")

# Who is behind a file. reason, advice: for people. command: the name of what runs under the lock, or None. stopped,
# elsewhere (in another PID namespace), orphaned (the holder was killed, its command lives on): bool. pids: the
# processes that have the file's flock, as far as /proc shows them.
Holder = namedtuple("Holder", "reason advice command stopped elsewhere orphaned pids")

# What a pidfile says. details: the key=value lines below the mark, debug: those below "# debug", by which nobody
# decides; dicts of str.
Record = namedtuple("Record", "pid marked details debug")
Record.__new__.__defaults__ = ({}, {})

# All that the judge decides by. record: Record or None. size: bytes. age: seconds since the mtime, lasted: since the
# recorded time or else the mtime; negative when that is in the future. flock: False where the filesystem has none.
# refused: somebody else has the flock, which only time-only goes on from. counter: it is a fencing token's.
# filesystem: "local", "network" or "other". process: "none", "ours", "zombie", "thread" or "alive". host, boot, pidns,
# timens, start: whether what is recorded agrees with what we see; None where one of the two is not known.
Facts = namedtuple("Facts", "record size links executable nuls age flock filesystem process"
                   " lasted host boot pidns timens start refused counter")
Facts.__new__.__defaults__ = (0, None, None, None, None, None, False, False)

# One look at a path. pid: int, 0 where none is recorded. body: bytes and status: os.stat_result, as judged.
# refused: somebody else has the flock. descriptor: an int that has it, only of a stale file looked at with LOCK_EX.
Finding = namedtuple("Finding", "path state reason pid record body status refused descriptor")


# ---- The lock ----


class PidLock:
    """A lock on `path`, for processes and for threads: `with PidLock("/run/backup.pid", wait=60): ...`

    path: str, bytes or os.PathLike. wait: seconds to wait for it, 0 for not at all, float("inf") for ever.
    stale_after: seconds after which a holder that cannot be judged counts as gone, None for never. stale_strategy:
    "pid-first", "pid-only" (ignores stale_after) or "time-only" (the age alone decides; breaks living locks).
    max_concurrent: how many may hold it at once. details: whether to record who, where, since when and why.
    fence: True, or the path of a counter, to take a fencing token. trace_id: str to record, by default the trace of
    the environment's TRACEPARENT. mode: the pidfile's permissions. on_event: called with a dict for each of acquired,
    held, evicted, released and lost. span: a function from a name to a context manager, entered around each acquire
    and while the lock is held.

    The lock belongs to the process that took it: a forked child never releases it, and a daemon acquires after it has
    forked into the background. Raises ValueError for an argument that cannot be meant.
    """

    def __init__(self, path, wait=0, stale_after=None, stale_strategy=PID_FIRST, max_concurrent=1, details=False,
                 fence=False, trace_id=None, mode=0o644, on_event=None, span=None):
        self.path = _checked_path(path)
        self._wait = wait
        self._policy = (stale_after, stale_strategy)
        self._max_concurrent = max_concurrent
        self._details = details
        self._fence = fence
        self._trace_id = _trace_of_environment() if trace_id is None else str(trace_id)
        self._mode = mode
        self._on_event = on_event
        self._span = span
        self._command = sys.argv  # the command line has another to record
        self._sleep = _sleep_until_change  # the command line has others, which look at signals too
        self._pause = None
        # By PID, for a fork copies it: {} while that process acquires by this object, "held" then, False if it failed,
        # "giver" while it gives back. Of two threads the one goes on whose object setdefault has stored, in one step.
        self._turns = {}  # type: dict[int, dict[str, object]]
        self._check_arguments()
        self._reset()

    def _check_arguments(self):
        _check_policy(*self._policy)
        if not self._wait >= 0:
            raise ValueError("wait: %r is not a number of seconds" % self._wait)
        if not isinstance(self._max_concurrent, int) or not 1 <= self._max_concurrent <= SLOTS_MAX:
            raise ValueError("max_concurrent: %r is not a number of slots" % (self._max_concurrent,))
        if self._trace_id is not None and not (self._trace_id.isprintable() and len(self._trace_id) <= TRACE_ID_MAX):
            raise ValueError("trace_id: %r is too long, or has characters that do not print" % self._trace_id)
        if self._mode & 0o600 != 0o600 or self._mode & ~0o664:
            raise ValueError("mode: 0%o is not rw for its owner, or lets others write or execute" % self._mode)

    def _reset(self):
        self._descriptor = None
        self._file = None  # the os.stat_result of what the descriptor refers to
        self._slot_path = None
        self._watch = None  # the wait's; closing it soon takes the kernel milliseconds, so not before the release
        self._acquired_at = 0.0
        self._held_span = None
        self.pid = None
        self.slot = 1
        self.token = None

    def acquire(self):
        """Take the lock and return self.

        Raises LockHeld when it is still held after `wait` seconds, PidLockError when it cannot be had at all,
        RuntimeError when this object holds it, or acquires or releases it just now, as in another thread.
        """
        pid, turn = os.getpid(), {}  # type: tuple[int, dict[str, object]]
        try:
            current = self._turns.setdefault(pid, turn)
            if current is not turn:
                why = "this PidLock holds it already" if list(current) == ["held"] else \
                    "this PidLock is being acquired or released already; have one for each thread"
                raise RuntimeError("%s: %s" % (self.path, why))
            inherited, self._descriptor = self._descriptor, None
            if inherited is not None and _refers_to(inherited, self._file):
                _close(inherited)  # by a fork: an unlock would free the parent's
            self._end_watch()  # which may be inherited, too
            self._reset()
            if self._span is None:
                self._acquire()
            else:
                self._acquire_in_span()
            turn["held"] = True
            return self  # within the try: a Ctrl-C that comes now would find nobody else to give it back
        except BaseException:
            if self._turns.get(pid) is turn:
                turn["held"] = False
                self._release(turn)
            raise

    def __getstate__(self):
        """Return what a copy is to have: all but what this object holds and is about to do."""
        copy = PidLock.__new__(PidLock)
        copy.__dict__.update(self.__dict__, _turns={})  # in one step, whatever another thread does
        copy._reset()
        return copy.__dict__

    def _acquire_in_span(self):
        acquired = False
        with self._span("pidlock.acquire"):
            self._acquire()
            acquired = True
        if not acquired:
            raise RuntimeError("%s: not acquired, and the span swallowed why" % self.path)
        self._held_span = self._span("pidlock.held")
        self._held_span.__enter__()

    def _acquire(self):
        started = time.monotonic()
        try:
            held = self._look()
            if held:
                held = self._wait_for(held, started)
            if held:
                raise _refuse(self.path, held)
            self._acquired_at = time.monotonic()
            if self._fence:
                counter = self.path + ".fence" if self._fence is True else _checked_path(self._fence)
                self.token = _next_token(counter, self._mode, self._pause)
            self._emit("acquired", None, self.pid, self._acquired_at - started)
        except LockHeld as refusal:
            self._emit("held", refusal.reason, refusal.pid, time.monotonic() - started)
            raise

    def _look(self):
        """Try once to take the lock or a slot of it: return [] with it taken, else the Findings that say held."""
        evicted = []  # type: list[Finding]
        try:
            self.path = _absolute(self.path)
            return self._attempt_slots(evicted) if self._max_concurrent > 1 else self._attempt(1, evicted)
        except OSError as error:
            raise _explain(error, self.path, "take it") from error
        finally:
            for found in evicted:
                slot = 1 if found.path == self.path else _slot_of(found.path)
                self._emit("evicted", found.reason, found.pid, _lasted(found), slot)

    def _attempt(self, slot, evicted, guarded=False):
        """Go through steps 1 to 5 for one slot's file: return [] with it taken, else [the Finding that says held]."""
        path = _slot_path(self.path, slot)
        deadline = time.monotonic() + PROGRESS
        while time.monotonic() < deadline:
            found = _examine(path, fcntl.LOCK_EX, self._policy)  # steps 1, 2 and 3
            if found.state == STALE:
                if _break(found, guarded) if self._policy[1] == TIME_ONLY else _evict(found):
                    evicted.append(found)
            elif found.state == FREE:
                self.pid, self._slot_path, self._file = os.getpid(), path, None
                _create(path, self._make_record(slot), self)  # steps 4 and 5
                if self._descriptor is not None:  # and from here on a failure or Ctrl-C gives it back
                    self.slot = slot
                    self._file = os.fstat(self._descriptor)
                    return []
            else:
                return [found]
        raise PidLockError(path, "cannot be taken: it changes faster than we can look", "find out who changes it")

    def _attempt_slots(self, evicted):
        """Take a slot, count the living ones, and give it back if they are more than my limit or one of theirs.

        The directory's flock makes that one step. Without it two contenders may both give back, hence the tries.
        """
        guard = _flock_directory(self.path, GUARD_PATIENCE)
        try:
            for _ in range(UNGUARDED_TRIES if guard is None else 1):
                living = _living_slots(self.path, self._policy)
                if not _has_room(self._max_concurrent, living):
                    return living  # nothing is written where there is no room
                held = self._attempt_slots_in_turn(evicted, guard is not None)
                if held:
                    return held
                living = [found for found in _living_slots(self.path, self._policy) if found.path != self._slot_path]
                if _has_room(self._max_concurrent, living):
                    return []
                self._drop()
                if guard is None:
                    time.sleep(LOOK_PAUSE * (1 + os.urandom(1)[0] % 16))
            return living
        finally:
            _give_back(guard)

    def _attempt_slots_in_turn(self, evicted, guarded):
        held = []
        for slot in range(1, self._max_concurrent + 1):
            found = self._attempt(slot, evicted, guarded)
            if not found:
                return []
            held += found
        return held

    def _make_record(self, slot):
        details = {"limit": str(self._max_concurrent)} if self._max_concurrent > 1 else {}
        debug = {}
        if self._details:
            details.update(_describe_self(self._command))
            stale_after, strategy = self._policy
            debug = {"strategy": strategy, "stale_after": stale_after, "max_concurrent": self._max_concurrent,
                     "slot": slot, "trace_id": self._trace_id}
            debug = {key: str(value) for key, value in debug.items() if value is not None}
        return Record(os.getpid(), True, details, debug)

    def _wait_for(self, held, started):
        """Look again until the deadline: return [] with the lock taken, or the last Findings."""
        deadline = started + self._wait
        self._watch = _open_watch() if self._wait > TICK_FIRST else None
        tick = TICK_FIRST
        in_vain = 0
        ended = set()  # type: set[int]
        while held:
            now = time.monotonic()
            woken = set()  # type: set[int]
            if now < deadline:
                # Who still holds it after its process has ended is not that process: then the timer and the watch.
                woken = self._sleep(held, ended, self._watch, min(tick, deadline - now))
                ended |= woken
                tick = TICK_FIRST if woken else min(tick * 4, TICK_WATCHED if self._watch else TICK_MAX)
                if woken and in_vain:  # over NFS each look opens for writing, which wakes all waiters, us too
                    time.sleep(min(TICK_MAX, LOOK_PAUSE * 2 ** in_vain))
            elif now < started + LOOK_LONG and now < started + max(map(_doubt, held)):
                time.sleep(LOOK_PAUSE)
            else:
                break
            before, held = held, self._look()
            in_vain = min(in_vain + 1, 7) if woken and _contents(held) == _contents(before) else 0
        return held

    def release(self):
        """Give the lock back; return False when it was lost: removed or replaced by others while we held it.

        Without effect (and True) when it is not held, or not yet, or is being released already (by another thread, or
        by what a signal's handler interrupted), and in a forked child. Raises PidLockError when the file cannot be
        removed; it is given up all the same, and the next run takes it over.
        """
        return self._release(self._turns.get(os.getpid(), {}))

    def _release(self, turn, exc_info=(None, None, None)):
        """Give back what this turn has taken; without span and event where its acquire has failed."""
        giver, lost = object(), None
        try:
            if "held" not in turn or turn.setdefault("giver", giver) is not giver:
                return True
            try:
                told = self.pid, time.monotonic() - self._acquired_at, self.slot, self.token  # soon another thread's
                if turn["held"] and self._held_span is not None:
                    self._held_span.__exit__(*exc_info)
            finally:
                lost = self._give_up()
        finally:  # without a call, at which a Ctrl-C could come (before Python 3.10, at any step)
            if "giver" in turn and turn["giver"] is giver:
                if self._descriptor is None:
                    self._turns = {}
                else:
                    del turn["giver"]  # one came before: it can be released again
        if turn["held"]:
            self._emit("lost" if lost else "released", lost, *told)
        return not lost

    def _give_up(self):
        """Give the file back and end the wait's watch, where there are any; return as _drop does."""
        try:
            return self._drop()
        finally:
            self._end_watch()

    def _drop(self):
        """Give the file back without a word; return None, or why it was lost."""
        path, descriptor, ours = self._slot_path, self._descriptor, None
        if descriptor is None or self.pid != os.getpid():
            return None  # never taken, or by the process that forked us
        # By the file, not by the PID in it: another container's holder may have the same. Unlinked before unlocked: a
        # marked file without its flock is stale to everybody, and we might unlink the next holder's.
        try:
            ours = _refers_to(descriptor, self._file)
            if not ours:
                return "its descriptor was closed"  # by a daemoniser; the number may be a stranger's by now
            return None if _remove_if_same(path, descriptor) else "the file was removed or replaced"
        except OSError as error:
            raise _explain(error, path, "remove it") from error
        finally:
            if ours is None:  # a Ctrl-C came meanwhile
                ours = _refers_to(descriptor, self._file)
            self._descriptor = None  # no sooner, so that a Ctrl-C before leaves something to release
            if ours:
                _give_back(descriptor)

    def _end_watch(self):
        watch, self._watch = self._watch, None
        if watch is None:
            return
        # As in _drop; but all that is anonymous has one inode. Without a /proc nothing tells that it is not ours.
        target = _target_of("/proc/self/fd/%d" % watch.descriptor)
        if target == "anon_inode:inotify" or not (target or os.path.exists("/proc/self/fd")):
            _close(watch.descriptor)

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *exc_info):
        self._release(self._turns.get(os.getpid(), {}), exc_info)

    def __call__(self, function):
        """Decorate: each call of the function takes a lock of its own, in any thread."""
        import functools

        problem = "%s: its body runs after the call has returned; take the lock inside it" % function
        inner = function
        while isinstance(inner, functools.partial):
            inner = inner.func
        code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
        flags = getattr(code, "co_flags", 0)
        if flags & 0x2A0:  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR (the inspect module's table)
            raise TypeError(problem)

        @functools.wraps(function)
        def locked(*args, **kwargs):
            lock = PidLock.__new__(PidLock)
            lock.__dict__.update(self.__getstate__())
            with lock:
                result = function(*args, **kwargs)
                if isinstance(result, types.CoroutineType):
                    result.close()  # for no warning that nobody awaits it
                    raise TypeError(problem)
                return result

        return locked

    def _emit(self, event, reason, pid, seconds, slot=None, token=None):
        if self._on_event:
            self._on_event({"event": event, "path": self.path, "pid": pid, "slot": slot or self.slot, "reason": reason,
                            "token": token or self.token, "trace_id": self._trace_id, "seconds": seconds})


# ---- Steps of the lock ----


def _examine(path, operation, policy):
    """Steps 1 to 3: open, flock with LOCK_EX or LOCK_SH, judge. Raises PidLockError for what is no pidfile."""
    descriptor, granted = _open_and_flock(path, operation)
    if descriptor is None:
        return Finding(path, FREE, "there is no file", 0, None, b"", None, False, None)
    try:
        status = os.fstat(descriptor)
        body = os.pread(descriptor, BODY_MAX + 1, 0)
        record = parse_record(body)
        pid = record.pid if record else 0
        refused = granted is False
        if refused and policy[1] != TIME_ONLY:
            return Finding(path, HELD, "held", pid, record, body, status, True, None)
        state, reason = judge(_gather_facts(descriptor, status, body, record, granted), *policy)
        if state == FOREIGN:
            raise PidLockError(path, reason, "name another file, or remove this one if nobody needs it")
        kept = state == STALE and operation == fcntl.LOCK_EX and not refused
        found = Finding(path, state, reason, pid, record, body, status, refused, descriptor if kept else None)
        if kept:
            descriptor = None  # no sooner: behind a Ctrl-C nobody else would give it back
        return found
    finally:
        _give_back(descriptor)


def _open_and_flock(path, operation, access=os.O_RDONLY):
    """Steps 1 and 2: return (descriptor, granted), (None, None) where there is no file.

    granted: True, False when somebody else has the flock, None where the filesystem has no flock.
    """
    try:
        descriptor = _move_fd_up(os.open(path, access | WARILY))
    except FileNotFoundError:
        return None, None
    except OSError as error:
        raise _explain_open(error, path) from error
    try:
        kind = _kind_of(os.fstat(descriptor))
        if kind:
            raise PidLockError(path, "is %s, not a pidfile" % kind, "name another file")
        return descriptor, _flock(descriptor, operation)
    except BaseException as error:
        _give_back(descriptor)
        if getattr(error, "errno", None) != errno.EBADF or access == os.O_RDWR:
            raise
    # flock(2): NFS wants a write-open for LOCK_EX. Only there: it wakes watchers and needs permission.
    return _open_and_flock(path, operation, os.O_RDWR)


def _evict(found):
    """Step 3: unlink the stale file that was judged, holding its flock; return whether it was this one."""
    try:
        if not _is_same_file(found.path, found.descriptor):
            return False  # another evictor was faster, and this may be a living holder's file
        now = os.fstat(found.descriptor)
        if now.st_mtime_ns != found.status.st_mtime_ns or os.pread(found.descriptor, BODY_MAX + 1, 0) != found.body:
            return False  # `echo $$ > FILE` writes in place: judge anew
        # Still flocked: unlocked first, a second evictor passes the check too, and the slower of us unlinks the
        # faster one's lock.
        os.unlink(found.path)
        return True
    except FileNotFoundError:
        return False
    except PermissionError as error:
        raise _not_ours(error, found) from error
    finally:
        _give_back(found.descriptor)


def _not_ours(error, found):
    owner = _user_name(found.status.st_uid)
    what = "stale (%s), but it is %s's and cannot be removed: %s" % (found.reason, owner, error.strerror)
    return PidLockError(found.path, what, "remove it as that user or as root")


def _break(found, guarded):
    """Unlink a file by its age alone, as time-only wants it; return whether it was the one that was judged.

    Its flock may be a living holder's, so breakers take turns by the directory's. A release, or an eviction by a run
    of another strategy, in the instant between the check and the unlink is the one race that remains.
    guarded: the caller has that flock already.
    """
    guard = None if guarded else _flock_directory(found.path, PATIENCE)
    try:
        if guard is None and not guarded:
            raise PidLockError(found.path, "not broken: its directory's flock is not to be had", "remove it by hand")
        now = os.lstat(found.path)
        if not os.path.samestat(now, found.status) or now.st_mtime_ns != found.status.st_mtime_ns:
            return False
        os.unlink(found.path)
        return True
    except FileNotFoundError:
        return False
    except PermissionError as error:
        raise _not_ours(error, found) from error
    finally:
        _give_back(guard)
        _give_back(found.descriptor)


def _create(path, record, lock):
    """Step 4: publish a complete, flocked file at path and store its descriptor in the lock, or none, to start over."""
    private, descriptor = _open_private(path)
    in_place = False
    try:
        flocked = _flock(descriptor, fcntl.LOCK_EX)
        if flocked is False:
            return  # we were stopped for so long that a sweep is judging our private file
        _fill_file(descriptor, encode_record(record._replace(marked=flocked is True)), lock._mode)
        in_place = _names_are_inodes(descriptor) or not _link(private, path)
        # The flock was taken before the name appeared, so nobody can have judged the file stale meanwhile.
        if not in_place and _is_same_file(path, descriptor):
            os.unlink(private)
            lock._descriptor = descriptor  # not returned: a Ctrl-C behind the return would lose it (Python 3.10)
    except (FileExistsError, FileNotFoundError):
        pass  # the path was taken; or a sweep took our private name for a left-over
    finally:
        if lock._descriptor is None:
            _discard(path, descriptor)
            _discard(private, descriptor)
            _give_back(descriptor)
    if in_place:
        _create_in_place(path, record, lock)


def _names_are_inodes(descriptor):
    """Return whether a second name would be a second inode here, without the flock of the first.

    FUSE's high-level library (sshfs, bindfs, ntfs-3g) has an inode for each name, whatever number stat(2) reports.
    """
    if getattr(os.statvfs(descriptor), "f_fsid", 0):  # FUSE has none, most others do; Python 3.7
        return False
    kind = _filesystem_type(descriptor)
    if not kind:  # hidden by a chroot or a missing /proc: then in place, to be on the safe side
        return sys.platform.startswith("linux")
    return kind.startswith("fuse")


def _link(private, path):
    """Link and return True, False where there are no hard links. Never rename: that does not fail on a taken name."""
    try:
        os.link(private, path)
        return True
    except OSError as error:
        if error.errno in NO_LINKS:
            return False
        raise


def _create_in_place(path, record, lock):
    """Step 4 where there are no hard links. An empty file shows until it is written; rule 2 spares it."""
    try:
        descriptor = _open_new(path)
    except FileExistsError:
        return
    flocked = False
    try:
        flocked = _flock_patiently(descriptor, PATIENCE)  # an evictor or prober may have our empty file for a moment
        if flocked is False:
            raise PidLockError(path, "another process keeps the flock of this new file", "stop that process")
        if not _is_same_file(path, descriptor):
            return  # evicted as old and empty while we were stopped before the flock
        _fill_file(descriptor, encode_record(record._replace(marked=flocked is True)), lock._mode)
        lock._descriptor = descriptor
    finally:
        if lock._descriptor is None:
            if flocked is not False:  # nobody removes the path without its flock, we neither
                _discard(path, descriptor)
            _give_back(descriptor)


def _open_private(path):
    """Create a file under a name of our own in path's directory, made if missing; return (its path, descriptor)."""
    private = os.path.join(os.path.dirname(path), PRIVATE_PREFIX + os.urandom(8).hex())
    try:
        try:
            return private, _open_new(private)
        except FileNotFoundError:
            _make_parents(os.path.dirname(path))
            return private, _open_new(private)
    except BaseException:
        if os.path.lexists(private):
            os.unlink(private)  # a Ctrl-C came behind the open
        raise


def _open_new(path):
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return _move_fd_up(descriptor)
    except OSError:
        os.unlink(path)  # the table of descriptors is full
        raise


def _fill_file(descriptor, body, mode):
    if os.write(descriptor, body) != len(body):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        os.fchmod(descriptor, mode)
    except PermissionError:
        pass  # an owner may always, so this filesystem keeps no permissions (vfat)


def _make_parents(directory):
    missing = []
    while not os.path.isdir(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o755)
        except FileExistsError:
            pass  # another contender's, or a dangling link, which the next step finds


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


def _flock_patiently(descriptor, patience, pause=None):
    """flock exclusively what others hold for an instant only; return as _flock does, False after so many seconds."""
    deadline = time.monotonic() + patience
    while True:
        granted = _flock(descriptor, fcntl.LOCK_EX)
        if granted is not False or time.monotonic() > deadline:
            return granted
        (pause or time.sleep)(LOOK_PAUSE)


def _flock_directory(path, patience):
    """Return a descriptor that has the flock of path's directory, None where that is not to be had in time."""
    try:
        descriptor = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None  # not there yet, or not readable
    granted = False
    try:
        granted = _flock_patiently(descriptor, patience)
    except OSError:
        pass
    finally:
        if not granted:
            _close(descriptor)
    return descriptor if granted else None


def _give_back(descriptor):
    """Unlock, then close, if there is one: a close alone would leave the flock with whatever was forked meanwhile."""
    if descriptor is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError:
        pass  # there is no flock here, or the close has to do
    finally:
        _close(descriptor)


def _close(descriptor):
    try:
        os.close(descriptor)
    except OSError:
        pass  # it is closed all the same (close(2): EINTR, EIO), and what has to be on disk was fsynced before


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
            _close(descriptor)
            raise
        _close(descriptor)
        return moved
    return descriptor


def _is_same_file(path, descriptor):
    return _still_names(path, os.fstat(descriptor))


def _still_names(path, status):
    try:
        return os.path.samestat(os.lstat(path), status)
    except FileNotFoundError:
        return False


def _refers_to(descriptor, status):
    """Tell whether it is still the file of this status (None: not known yet), rather than closed or another's."""
    try:
        return status is None or os.path.samestat(os.fstat(descriptor), status)
    except OSError as error:
        return error.errno != errno.EBADF


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


def judge(facts, stale_after=None, strategy=PID_FIRST):
    """Decide about a file that nobody has the flock of. Pure: Facts in, (state, reason) out; stale_after in seconds.

    The first rule that fits decides; what is inconclusive is stale once it is older than stale_after. With time-only
    the first two do, then the age alone, also of a file that somebody has the flock of.
      1. Not a regular file, or not readable: an error, raised where it was opened.
      2. No PID in it: stale, unless somebody may still be writing it; or no pidfile, as a fencing counter is none.
      3. Marked, on a local filesystem: stale, for its holder would have the flock.
      4. Written on another host, or in another PID or time namespace, or perhaps so: inconclusive.
      5. Written before the last boot: stale.
      6. Its PID does not exist, or is ours, a zombie's or only a thread's: stale.
      7. Its PID has not the start time that it records: stale.
      8. Its PID exists: held.
    """
    old = stale_after is not None and facts.lasted > stale_after
    if facts.record is None:  # rule 2
        if facts.counter:  # with a number beyond any PID
            return FOREIGN, "is a fencing counter, not a pidfile"
        damaged = facts.size <= DAMAGED_MAX or (facts.nuls and facts.size <= NULS_MAX)
        if facts.links > 1 or facts.executable or not damaged:  # no link: another evictor was faster
            return FOREIGN, "is somebody's file, not a pidfile"
        if -WRITING <= facts.age < WRITING:
            return HELD, "held by a program that is still writing its PID, it seems"
        if facts.refused and not (strategy == TIME_ONLY and old):
            return HELD, "held by a program that writes no PID"
        return STALE, "there is no PID in it"
    if facts.size > BODY_MAX:
        return FOREIGN, "is too long for a pidfile"
    if strategy == TIME_ONLY:
        pid = facts.record.pid
        return (STALE, "PID %d, alive or not, has had it for too long" % pid) if old else (HELD, "held by PID %d" % pid)
    state, reason = _judge_holder(facts)
    if state == INCONCLUSIVE and strategy == PID_FIRST and old:
        state, reason = STALE, "%s, but for too long" % reason
    if state == STALE and not facts.flock:
        reason += " (without flock on this filesystem, taking over cannot be exact)"
    return state, reason


def _judge_holder(facts):
    record, pid = facts.record, facts.record.pid
    if record.marked and not facts.flock:
        return INCONCLUSIVE, "held by PID %d, it seems; this filesystem has no flock to tell by" % pid
    if record.marked and facts.filesystem == "local":  # rule 3
        return STALE, "PID %d is no longer behind it" % pid
    if facts.host is False:  # rule 4
        return INCONCLUSIVE, "held by PID %d of host %s, it seems" % (pid, record.details.get("host"))
    if facts.filesystem == "network" and facts.host is None:
        return INCONCLUSIVE, "held by PID %d, perhaps on another host: this is a network filesystem" % pid
    if facts.pidns is False or facts.timens is False:
        return INCONCLUSIVE, "held by PID %d of another PID or time namespace, it seems" % pid
    if facts.boot is False:  # rule 5
        return STALE, "PID %d was before the last boot" % pid
    if facts.process == "none":  # rule 6
        return STALE, "PID %d does not exist" % pid
    if facts.process == "ours" and facts.flock:
        return STALE, "PID %d is ours, so its writer is gone" % pid
    if facts.process == "zombie":
        return STALE, "PID %d has ended" % pid
    if facts.process == "thread":
        return STALE, "PID %d is a thread of another process" % pid
    if facts.start is False:  # rule 7
        return STALE, "PID %d was given to another process since" % pid
    return HELD, "held by PID %d" % pid  # rule 8


def _gather_facts(descriptor, status, body, record, granted):
    recorded = record.details if record else {}
    here = _describe_place()
    if "start" in recorded:
        here["start"] = _start_of(record.pid, recorded["start"])
    filesystem = _filesystem_type(descriptor)
    return Facts(
        record=record,
        size=status.st_size,
        links=status.st_nlink,
        executable=bool(status.st_mode & 0o111) and filesystem not in MODELESS_FILESYSTEMS,
        nuls=not body.strip(b"\0"),
        age=time.time() - status.st_mtime,
        flock=granted is not None,
        refused=granted is False,
        counter=_is_counter(body),
        filesystem=_filesystem_class(filesystem),
        process=_process_state(record.pid) if record else "none",
        lasted=time.time() - _since(record, status),
        **{key: recorded[key] == value for key, value in here.items() if value and recorded.get(key)}
    )


# ---- The holder's record, and what the system says ----


def encode_record(record):
    """Return the bytes of a pidfile: the PID, the mark if the record has it, and its details."""
    lines = ["%s=%s" % (key, _escape(value)) for key, value in record.details.items()]
    if record.debug:
        lines.append("# debug")
        lines += ["%s=%s" % (key, _escape(value)) for key, value in record.debug.items()]
    text = "".join(line + "\n" for line in lines)
    return b"%d\n%s%s" % (record.pid, MARK if record.marked else b"", text.encode("utf-8"))


def parse_record(body):
    """Return the Record in these bytes, or None when there is no PID: neither as first line nor as `pid=`."""
    text = body[3:] if body.startswith(b"\xef\xbb\xbf") else body
    first, _, rest = text.partition(b"\n")
    digits = first.rstrip(b"\0").strip(b" \t\r")
    pid = _parse_pid(digits)
    if pid:
        marked = body.startswith(digits + b"\n" + MARK) and _are_details(rest)
        details, debug = _parse_details(rest, marked)
        return Record(pid, marked, details, debug)
    details, debug = _parse_details(text, False)  # another tool's marker
    pid = _parse_pid(details.get("pid", "").encode("ascii", "replace"))
    return Record(pid, False, details, debug) if pid else None


def _are_details(rest):
    """Tell whether nothing but key=value lines follows: a text with two blank lines in it is no pidfile of ours."""
    lines = rest.split(b"\n")
    return lines.pop() == b"" and all(line in (b"", b"# debug") or b"=" in line for line in lines)


def _parse_pid(digits):
    significant = digits.lstrip(b"0")
    if not digits.isdigit() or not 1 <= len(significant) <= 10 or int(significant) > PID_MAX:  # bytes: ASCII only
        return 0
    return int(significant)


def _parse_details(body, ours):
    """Return the key=value lines of these bytes as (details, debug), but for another tool's times of start and boot."""
    details = {}  # type: dict[str, str]
    debug = {}  # type: dict[str, str]
    section = details
    for line in body[:BODY_MAX].decode("utf-8", "surrogateescape").split("\n"):
        key, equals, value = line.rstrip("\r").partition("=")
        if line == "# debug":
            section = debug
        elif equals and key.isidentifier():
            section[key] = _unescape(value)
    start, boot = details.get("start", ""), details.get("boot", "")
    if not ours and len(boot) != 36 and (len(start) > 9 if start.isdigit() else len(start.split()) != 5):
        details.pop("start", None)  # neither ticks since boot nor what ps says, but seconds since the epoch, say
    if not ours and len(boot) != 36:
        details.pop("boot", None)  # no UUID
    return details, debug


def _escape(value):
    """Keep a value in its line: a backslash, and what does not print, as escapes that _unescape reverts."""
    return "".join(char if char.isprintable() and char != "\\" else _escape_char(char) for char in value)


def _escape_char(char):
    return char.encode("unicode_escape").decode("ascii")


def _unescape(value):
    if "\\" not in value:
        return value
    import re

    escapes = r"\\(?:[\\nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4})"
    return re.sub(escapes, lambda match: match.group().encode("ascii").decode("unicode_escape"), value)


def _limit_of(record):
    """Return how many holders this one allows beside it, itself included."""
    return max(1, _small_number(record.details.get("limit", ""))) if record else 1


def _small_number(text):
    """Return a number of at most 9 digits, 0 for any other text: ASCII only, not all that int() or isdigit() takes."""
    return int(text) if 0 < len(text) < 10 and not text.strip("0123456789") else 0


def _describe_self(command):
    """Return the details of this process: who, where, since when and why."""
    import shlex

    pid = os.getpid()
    start = _start_of(pid, None)
    details = dict(_describe_place(), pid_start=_start_time(start), start=start, acquired=_format_time(time.time()),
                   command=" ".join(map(shlex.quote, command))[:COMMAND_MAX])
    return {key: value for key, value in details.items() if value}


def _describe_place():
    """Return what the PIDs that we see belong to, as far as /proc tells: random(4), namespaces(7)."""
    return {"host": os.uname().nodename, "boot": _read_proc("/proc/sys/kernel/random/boot_id").strip(),
            "pidns": _target_of("/proc/self/ns/pid"), "timens": _target_of("/proc/self/ns/time")}


def _start_of(pid, like):
    """Return when pid started, to compare: ticks since boot from /proc, else what ps says; None where neither does.

    like: what it is to be compared with, if anything; ticks and ps's words do not compare.
    """
    fields = _stat_fields(pid)
    if fields and (like is None or like.isdigit()):
        return fields[19]  # starttime, proc(5)
    if fields or (like is not None and like.isdigit()):
        return None
    import subprocess

    try:
        answer = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL, env={"PATH": "/bin:/usr/bin", "LC_ALL": "C", "TZ": "UTC0"})
    except OSError:
        return None
    return " ".join(answer.stdout.decode("ascii", "replace").split()) or None


def _start_time(start):
    """Return the ticks of _start_of as a time for people."""
    boot = _field_of("/proc/stat", "btime")
    if not start or not start.isdigit() or not boot:
        return None
    return _format_time(int(boot[0]) + int(start) / os.sysconf("SC_CLK_TCK"))


def _format_time(seconds):
    """Return seconds since the epoch as RFC 3339 has it, to the millisecond."""
    whole, milliseconds = divmod(int(seconds * 1000 + 0.001), 1000)  # .001: a float of .123 may be a bit less
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + ".%03dZ" % milliseconds


def _parse_time(text):
    """Return the seconds since the epoch of an RFC 3339 time, None where it is none."""
    import calendar
    import re

    zone = r"(?:[Zz]|([+-])(\d\d):(\d\d))"
    match = re.match(r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(\.\d+)?" + zone + "$", text, re.ASCII)
    if not match:
        return None
    try:
        seconds = calendar.timegm(tuple(map(int, match.groups()[:6]))) + float(match.group(7) or 0)
    except ValueError:
        return None  # of a 13th month
    sign, hours, minutes = match.groups()[7:]
    return seconds - (int(sign + "1") * (int(hours) * 3600 + int(minutes) * 60) if sign else 0)


def _since(record, status):
    """Return when the lock was taken: the recorded time, else the mtime; in seconds since the epoch."""
    recorded = _parse_time(record.details["acquired"]) if record and "acquired" in record.details else None
    return status.st_mtime if recorded is None else recorded


def _lasted(found):
    return time.time() - _since(found.record, found.status)


def _trace_of_environment():
    """Return the trace ID in TRACEPARENT (W3C Trace Context, 3.2), None where there is none."""
    fields = os.environ.get("TRACEPARENT", "").split("-")
    trace = fields[1] if len(fields) >= 4 else ""
    valid = len(trace) == 32 and not trace.strip("0123456789abcdef") and trace.strip("0")  # all zeros are invalid
    return trace if valid else None


def _filesystem_type(descriptor):
    """Return its type as mountinfo has it, None where there is no mountinfo, "" where that does not list it."""
    try:
        mounts = _read("/proc/self/mountinfo").split("\n")
    except OSError:
        return None
    mount_id = _field_of("/proc/self/fdinfo/%d" % descriptor, "mnt_id:")
    for mount in mounts:  # proc(5): ID parent dev root mountpoint options [optional ...] - type source options
        if mount.split(" ", 1)[:1] == mount_id:
            return mount.partition(" - ")[2].split(" ", 1)[0]
    return ""  # in a chroot the root's own mount may not be listed


def _filesystem_class(name):
    if name is None or name in LOCAL_FILESYSTEMS:
        return "local"
    return "network" if name in NETWORK_FILESYSTEMS else "other"


def _process_state(pid):
    """Return "none", "ours", "zombie", "thread" or "alive"; what /proc does not show counts as alive."""
    if pid == os.getpid():
        return "ours"
    if not _exists(pid):
        return "none"
    fields = _stat_fields(pid)
    if fields and _field_of("/proc/%d/status" % pid, "Tgid:") not in (None, [str(pid)]):
        return "thread"
    if fields and fields[0] in "ZX" and int(fields[17]) <= 1:  # the leader of a living process may be a zombie
        return "zombie"
    return "alive"


def _exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # kill(2)
    return pid > 0  # 0 is our own process group


def _stat_fields(pid):
    """Return the fields of /proc/PID/stat from the 3rd (state) on, proc(5); [] where that cannot be read."""
    return _read_proc("/proc/%d/stat" % pid).rpartition(")")[2].split() if _proc_is_ours() else []


def _proc_is_ours():
    """Tell whether there is a /proc and it is our PID namespace's: another's numbers are not ours."""
    return _target_of("/proc/self") == str(os.getpid())


def _field_of(path, name):
    """Return the words behind `name` in the first such line, None where there is none to read."""
    lines = _read_proc(path).split("\n")
    return next((line[len(name):].split() for line in lines if line.startswith(name)), None)


def _target_of(path):
    """Return where a symbolic link in /proc points, "" where that cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read_proc(path):
    """Return the text of a file in /proc, "" where that cannot be read."""
    try:
        return _read(path)
    except OSError:
        return ""


def _read(path):
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return file.read()


# ---- Who holds it ----


def active_pid(path):
    """Return (pid, alive): alive tells whether it is held; (0, False) where there is no file. Takes nothing.

    Raises PidLockError when the path is no pidfile or cannot be read.
    """
    status = inspect(path)
    return status.pid, status.state in (HELD, UNKNOWN)


def inspect(path, stale_after=None, stale_strategy=PID_FIRST):
    """Return the Status of path, without taking or changing anything. The options are PidLock's.

    Raises PidLockError when the path is no pidfile or cannot be read, ValueError for an option that cannot be meant.
    """
    _check_policy(stale_after, stale_strategy)
    try:
        path = _absolute(_checked_path(path))
        found = _probe(path, (stale_after, stale_strategy))
    except OSError as error:
        raise _explain(error, path, "look at it") from error
    record = found.record or Record(0, False, {}, {})
    if found.state in (FREE, STALE):
        holder = _holder(found.reason, "the next run takes it over" if found.state == STALE else None)
    else:
        holder = _find_holder(found)
    since = None if found.state == FREE else _since(found.record, found.status)
    return Status(
        path=path,
        state=UNKNOWN if found.state == INCONCLUSIVE else found.state,
        pid=found.pid,
        slot=_slot_of(path) if _limit_of(record) > 1 else 1,
        since=since,
        seconds=None if since is None else time.time() - since,
        host=record.details.get("host"),
        trace_id=record.debug.get("trace_id"),
        **dict(holder._asdict(), command=record.details.get("command") or holder.command)
    )


def _probe(path, policy):
    """Examine a path to tell of it; look again while its flock may be an evictor's or another prober's."""
    started = time.monotonic()
    found = _examine(path, fcntl.LOCK_SH, policy)
    while time.monotonic() < started + _doubt(found):
        time.sleep(LOOK_PAUSE)
        found = _examine(path, fcntl.LOCK_SH, policy)
    return found


def _refuse(path, held):
    """Return the LockHeld for these Findings."""
    holders = [_find_holder(found) for found in held]
    if len(held) == 1:
        return LockHeld(path, held[0].pid, holders[0].reason, holders[0].advice)
    reasons = ["%s %s" % (os.path.basename(found.path), holder.reason) for found, holder in zip(held, holders)]
    return LockHeld(path, held[0].pid, "as many as may hold it do: " + ", ".join(reasons), "wait for one or stop it")


def _doubt(found):
    """Return for how many seconds a refused flock may be an evictor's or prober's, rather than the holder's."""
    if not found.refused or any(_flockers(found.status, [found.pid])):
        return 0
    try:
        descriptor, granted = _open_and_flock(found.path, fcntl.LOCK_SH)
    except OSError:
        return LOOK_AGAIN  # the next look says what it is
    _give_back(descriptor)
    return LOOK_LONG if granted else LOOK_AGAIN


def _find_holder(found):
    """Return the Holder for a Finding that says held or inconclusive."""
    pid, lasted, either = found.pid, _duration(_lasted(found)), "wait for it or stop it"
    if found.state == INCONCLUSIVE:
        return _holder(found.reason, "if it is gone: %s" % _removal(found.path))
    if not found.refused and not pid:
        return _holder(found.reason, "try again in %g s" % WRITING)
    command = _command_pid(pid)
    name, stopped = _name_of(command), _is_stopped(pid) or _is_stopped(command)
    if not found.refused:
        by = "PID" if _exists(pid) else "age"  # as time-only does
        reason = "held by PID %s for %s, to judge by the %s alone" % (_named(pid, name), lasted, by)
        return _holder(reason, "%s; if it is a stranger: %s" % (either, _removal(found.path)), name, stopped)
    takers = dict(_flockers(found.status, [pid])) or dict(_flockers(found.status, _all_pids()))
    pids = tuple(sorted(takers))
    # Or we may look at its descriptors, and this file is not among them.
    gone = _process_state(pid) in ("none", "zombie") or os.access("/proc/%d/fd" % pid, os.R_OK)
    if pid in takers or not gone:
        reason = "held by PID %s%s for %s" % (_named(pid, name), ", which is stopped," if stopped else "", lasted)
        advice = "continue it (kill -CONT %d) or stop it" % pid if stopped else either
        return _holder(reason, advice, name, stopped, pids=pids)
    names = ", ".join("PID " + _named(taker, _name_of(taker)) for taker in pids)
    here = [taker for taker in pids if _innermost_pid(taker) == pid]
    if here:
        name = _name_of(_command_pid(here[0]))
        reason = "held by PID %d of another PID namespace, here %s, for %s" % (pid, _named(here[0], name), lasted)
        return _holder(reason, either, name, _is_stopped(here[0]), elsewhere=True, pids=pids)
    if pid and any(taken_by in (0, pid) for taken_by in takers.values()):  # a dead taker may read as 0
        reason = "held for %s: its holder, PID %d, was killed, but its command lives on: %s" % (lasted, pid, names)
        return _holder(reason, either, _name_of(pids[0]), orphaned=True, pids=pids)
    if takers:
        reason = "busy: %s has its flock without being its holder" % names
        return _holder(reason, either + "; --mode 0600 keeps others from that", pids=pids)
    recorded = "PID %d does not have it" % pid if pid else "its PID is not legible"
    reason = "held for %s, but %s; who does is not to be seen from here" % (lasted, recorded)
    return _holder(reason, "wait for it, or look as root, outside this PID namespace")


def _removal(path):
    import shlex

    return "rm %s" % shlex.quote(path)


def _holder(reason, advice, command=None, stopped=False, elsewhere=False, orphaned=False, pids=()):
    return Holder(reason, advice, command, stopped, elsewhere, orphaned, pids)


def signal_holder(path, signum):
    """Send a signal to the holder of path, or with KILL and STOP to its command; return False if nobody holds it.

    Only where the kernel says that the recorded process itself took the flock of this very file. Raises PidLockError
    where it does not.
    """
    pidfd = None
    try:
        path = _absolute(_checked_path(path))
        found = _probe(path, (None, PID_FIRST))
        if found.state in (FREE, STALE):
            return False
        holder = receiver = found.pid
        if signum in (signal.SIGKILL, signal.SIGSTOP):  # pidlock could not pass them on
            receiver = _command_pid(holder)
        if receiver and hasattr(signal, "pidfd_send_signal"):
            pidfd = _open_pidfd(receiver)  # before the questions, so that the answers hold for whom we signal
        if (holder, holder) not in _flockers(found.status, [holder]):
            reason = "not signalled: PID %d has not this file open and locked, as far as this user may see" % holder
            raise PidLockError(path, reason, "see who it is, then signal that by hand")
        if receiver != holder and (receiver is None or _stat_fields(receiver)[1:2] != [str(holder)]):
            raise PidLockError(path, "not signalled: PID %d has no command to be seen" % holder,
                               "see which of its children that is, then signal it by hand")
        if receiver != holder and os.getpgid(receiver) == receiver:
            os.killpg(receiver, signum)  # with all its group: nothing is left without its lock
        elif pidfd is not None:
            signal.pidfd_send_signal(pidfd, signum)
        else:
            os.kill(receiver, signum)
    except ProcessLookupError:
        return False
    except OSError as error:
        raise _explain(error, path, "signal its holder") from error
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return True


def _flockers(status, pids):
    """Yield (pid, taker) for each of these processes that has this file open and flocked; taker took the flock.

    By /proc/PID/fdinfo, proc(5): /proc/locks names dead takers, hides other namespaces and disagrees on overlayfs.
    """
    for pid in pids if _proc_is_ours() else ():
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


def _command_pid(pid):
    """Return the PID of what runs under the lock: the holder's child where the holder is a pidlock, else its own.

    None where it is a pidlock whose child is not to be seen, or not to be told from other children of its process.
    """
    if _name_of(pid) != COMM:
        return pid
    children = _read_proc("/proc/%d/task/%d/children" % (pid, pid)).split()  # proc(5), CONFIG_PROC_CHILDREN
    # A shell that executes pidlock leaves it its own children, and PID 1 gets everybody's orphans, younger ones.
    variable = "PIDLOCK_PID=%d" % pid
    started = [child for child in children if variable in _read_proc("/proc/%s/environ" % child).split("\0")]
    return int((started or children)[0]) if started or len(children) == 1 else None


def _innermost_pid(pid):
    """Return the PID that a process of an inner PID namespace has there, None for one of ours."""
    numbers = _field_of("/proc/%d/status" % pid, "NSpid:") or []
    return int(numbers[-1]) if len(numbers) > 1 else None


def _is_stopped(pid):
    return pid is not None and _stat_fields(pid)[:1] == ["T"]


def _name_of(pid):
    name = _read_proc("/proc/%d/comm" % pid).rstrip("\n") if pid and _proc_is_ours() else ""
    return _printable(name) or None


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


def _checked_path(path):
    """Return path as str. Raises ValueError for no file's name, PidLockError for a directory's."""
    path = os.fsdecode(path)
    if not path or "\0" in path:
        raise ValueError("path: %r names no file" % path)
    if os.path.basename(path) in ("", ".", ".."):
        raise PidLockError(path, "names a directory", "name a file in it")
    return path


def _check_policy(stale_after, strategy):
    if stale_after is not None and not stale_after >= 0:
        raise ValueError("stale_after: %r is not a number of seconds" % stale_after)
    if strategy not in STRATEGIES:
        raise ValueError("stale_strategy: %r is none of %s" % (strategy, ", ".join(STRATEGIES)))
    if strategy == TIME_ONLY and stale_after is None:
        raise ValueError("stale_strategy: time-only needs stale_after")


def _absolute(path):
    """Return path made absolute, but not normalised: `link/..` is not `.`."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def _printable(text):
    """Make control characters visible, and bytes that are not UTF-8: nothing from a file may drive a terminal."""
    return "".join(
        char if char.isprintable()
        else "\\x%02x" % (ord(char) & 0xFF) if "\udc80" <= char <= "\udcff"
        else _escape_char(char)
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


def _explain_open(error, path, wanted="pidfile"):
    try:
        status = os.lstat(path)
    except OSError:
        return _explain(error, path, "open it")
    kind = _kind_of(status)
    if kind:
        return PidLockError(path, "is %s, not a %s" % (kind, wanted), "name another file")
    owned = "open it, %s's with mode %04o" % (_user_name(status.st_uid), stat.S_IMODE(status.st_mode))
    return _explain(error, path, owned)


def _kind_of(status):
    """Return what is there, in words; None for a regular file."""
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO",
             stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFREG: None}
    return kinds.get(stat.S_IFMT(status.st_mode), "something else")


# ---- Waiting ----


# An inotify(7) descriptor, and the C library.
Watch = namedtuple("Watch", "descriptor libc")
WATCHED = 0x4 | 0x8 | 0x800 | 0x80000000  # IN_ATTRIB (also an unlink), IN_CLOSE_WRITE, IN_MOVE_SELF; IN_ONESHOT


def _open_watch():
    """Return a Watch, None where none is to be had: not on Linux, or as many as this user may have."""
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor < 0:
            return None
        return Watch(_move_fd_up(descriptor), libc)
    except (ImportError, AttributeError, OSError, MemoryError):  # the last where no memory may be made executable
        return None


def _sleep_until_change(held, ended, watch, seconds, also=None):
    """Sleep so long at most; return early when one of these Findings may be out of date, or `also` is readable.

    Returns the PIDs of those whose process has ended, and 0 for anything else that woke it; empty after the time.
    ended: the PIDs that it told before. A pidfd (pidfd_open(2), Linux 5.3) is readable once its process has ended and
    its files are closed. The watch tells of a release by a process that lives on, of a removal by hand, and of the end
    of a killed holder's command. All that neither can tell is left to the caller's timer.
    """
    pidfds = {}
    poller = select.poll()
    try:
        for pid in {found.pid for found in held} - ended - {0, os.getpid()}:
            pidfd = _open_pidfd(pid)
            if pidfd is not None:
                pidfds[pidfd] = pid
                poller.register(pidfd, select.POLLIN)
        if also is not None:
            poller.register(also, select.POLLIN)
        if watch:
            poller.register(watch.descriptor, select.POLLIN)
            for found in held:
                added = watch.libc.inotify_add_watch(watch.descriptor, os.fsencode(found.path), WATCHED)
                if added < 0 or found.pid not in pidfds.values() and not (found.refused and _exists(found.pid)):
                    seconds = min(seconds, TICK_MAX)  # no watch is to be had, or none may tell of that holder's end
            if not all(map(_is_up_to_date, held)):
                return {0}  # what changed before the watch woke nobody
        ready = {descriptor for descriptor, _ in poller.poll(max(1, int(seconds * 1000)))}
        if watch and watch.descriptor in ready:
            os.read(watch.descriptor, 4096)  # all that it has to tell, but for a crowd of slots; inotify(7)
        return {pidfds.get(descriptor, 0) for descriptor in ready}
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def _is_up_to_date(found):
    try:
        return _still_names(found.path, found.status)
    except OSError:
        return False  # the next look says what it is


def _contents(findings):
    return [(found.path, found.body, found.status.st_mtime_ns) for found in findings]


def _open_pidfd(pid):
    """Return a pidfd, None where it has ended (or is not in this namespace) or none is to be had."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None


# ---- Slots, fencing tokens, sweeping ----


def _slot_path(path, slot):
    return path if slot == 1 else "%s.%d" % (path, slot)


def _slot_of(path):
    """Return the slot that a path's name tells: k for FILE.k, else 1."""
    digits = path.rpartition(".")[2]
    slot = _small_number(digits)
    return slot if 1 < slot <= SLOTS_MAX and not digits.startswith("0") else 1


def _has_room(limit, living):
    """Tell whether one more, of this limit, may hold it beside the living slots' holders."""
    return len(living) < min([limit] + [_limit_of(found.record) for found in living])


def _living_slots(path, policy):
    """Return the Findings of all of a semaphore's files that are held, whatever limit they were taken under."""
    try:
        ours = os.path.basename(path).casefold() + "."  # a name may be listed in other case
        names = os.listdir(os.path.dirname(path))
        plain = max(ours) <= "~"  # other names may be listed in another normalisation
        slots = {1}.union(_slot_of(name) for name in names if name.casefold().startswith(ours) or not plain)
    except FileNotFoundError:
        return []
    except PermissionError:  # a directory to write into, but not to list
        slots = {slot for slot in range(1, SLOTS_MAX + 1) if os.path.lexists(_slot_path(path, slot))}
    findings = (_examine(_slot_path(path, slot), fcntl.LOCK_SH, policy) for slot in sorted(slots))
    return [found for found in findings if found.state in (HELD, INCONCLUSIVE)]


def _next_token(path, mode=0o644, pause=None):
    """Bump the counter at path, on disk before it is returned; a missing one starts at the clock's microseconds.

    The counter is 20 digits and a newline, always the same width, and written in one pwrite: a truncate or a rename
    would lose or repeat tokens in a crash. Raises PidLockError rather than start again.
    """
    try:
        path = _absolute(path)
        while True:
            descriptor = _open_counter(path, mode)
            if descriptor is None:
                continue
            try:
                kind = _kind_of(os.fstat(descriptor))
                if kind:
                    raise PidLockError(path, "is %s, not a fencing counter" % kind, "name another file")
                _read_counter(path, descriptor)  # who has named a lock by mistake waits for nobody's flock
                granted = _flock_patiently(descriptor, COUNTER_PATIENCE, pause)
                if not granted:
                    problem = "somebody keeps the counter's flock" if granted is False else "no flock is to be had here"
                    raise PidLockError(path, problem, "name a counter elsewhere (--fence=FILE)")
                last = _read_counter(path, descriptor)
                # 0: a new one. Its clock is read only here, for its creator may have been stopped for long.
                token = last + 1 if last else int(time.time() * 1000000)
                if os.pwrite(descriptor, COUNTER % token, 0) != len(COUNTER % token):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
                if _is_same_file(path, descriptor):
                    return token
            finally:
                _give_back(descriptor)
    except OSError as error:
        raise _explain(error, path, "bump the counter") from error


def _read_counter(path, descriptor):
    body = os.pread(descriptor, BODY_MAX, 0)
    if not _is_counter(body) or body == COUNTER % (10 ** 20 - 1):
        raise PidLockError(path, "is no fencing counter", "name another file; if it is damaged, remove it")
    return int(body)


def _is_counter(body):
    return len(body) == len(COUNTER % 0) and body[:-1].isdigit() and body.endswith(b"\n")


def _open_counter(path, mode):
    """Open the counter; make a missing one, complete by link(2) and on disk, and return None to start over."""
    try:
        return os.open(path, os.O_RDWR | WARILY)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _explain_open(error, path, "fencing counter") from error
    private, descriptor = _open_private(path)
    try:
        _flock(descriptor, fcntl.LOCK_EX)
        _fill_file(descriptor, COUNTER % 0, mode)
        os.fsync(descriptor)
        if not _link(private, path):
            raise PidLockError(path, "this filesystem has no hard links", "name a counter elsewhere (--fence=FILE)")
    except (FileExistsError, FileNotFoundError):
        pass  # somebody else's is as good; or a sweep took our private name
    finally:
        _discard(private, descriptor)
        _give_back(descriptor)
    try:
        directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return None  # a directory that one may not list cannot be put on disk
    try:
        os.fsync(directory)
    finally:
        _close(directory)
    return None


def sweep(directory):
    """Remove the stale marked pidfiles and private left-overs in a directory; return the paths, sorted.

    Never a file that carries no mark, a living one, or a private one younger than 2 s. Raises PidLockError when the
    directory cannot be read or, after all the others, when a file in it cannot be removed.
    """
    swept, failures = _sweep_all(directory, dry_run=False)
    if failures:
        raise failures[0]
    return swept


def _sweep_all(directory, dry_run):
    """Sweep as far as it goes; return (paths, the PidLockErrors of files that could not be)."""
    directory = os.fsdecode(directory)
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise _explain(error, directory, "sweep it") from error
    swept, failures = [], []
    for path in (os.path.join(directory, name) for name in names):
        try:
            if _sweep_file(path, dry_run):
                swept.append(path)
        except PidLockError as error:
            failures.append(error)
        except OSError as error:
            failures.append(_explain(error, path, "sweep it"))
    return swept, failures


def _sweep_file(path, dry_run):
    """Remove one left-over under its flock; return whether it was one."""
    operation = fcntl.LOCK_SH if dry_run else fcntl.LOCK_EX
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    if _is_private(os.path.basename(path)):
        return _sweep_private(path, operation)
    if not _has_mark(path):  # reads before it flocks: most files are somebody else's
        return False
    found = _examine(path, operation, (None, PID_FIRST))
    if found.state == STALE and found.record and found.record.marked:
        return dry_run or _evict(found)
    _give_back(found.descriptor)
    return False


def _sweep_private(path, operation):
    """Remove a private file that nobody has the flock of: its maker takes that at once, and keeps it."""
    descriptor, granted = _open_and_flock(path, operation)
    if descriptor is None:
        return False
    try:
        young = -WRITING <= time.time() - os.fstat(descriptor).st_mtime < WRITING
        if granted is False or young:
            return False
        return operation == fcntl.LOCK_SH or _remove_if_same(path, descriptor)
    finally:
        _give_back(descriptor)


def _is_private(name):
    digits = name[len(PRIVATE_PREFIX):]
    return name.startswith(PRIVATE_PREFIX) and len(digits) == 16 and set(digits) <= set("0123456789abcdef")


def _has_mark(path):
    try:  # as in step 1: it may be a FIFO by now
        descriptor = os.open(path, os.O_RDONLY | WARILY)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        record = parse_record(os.pread(descriptor, BODY_MAX + 1, 0))
        return record is not None and record.marked and os.fstat(descriptor).st_size <= BODY_MAX
    finally:
        _close(descriptor)


class LockDir:
    """A directory of locks: `LockDir("/run/locks", wait=10).lock("backup")` is a PidLock on /run/locks/backup.lock.

    defaults and overrides are PidLock's arguments; an override wins. Raises ValueError for a name that leaves the
    directory.
    """

    def __init__(self, directory, **defaults):
        self.directory = os.fsdecode(directory)
        self._defaults = defaults

    def lock(self, name, **overrides):
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise ValueError("name: %r is no name within the directory" % (name,))
        return PidLock(os.path.join(self.directory, name + ".lock"), **dict(self._defaults, **overrides))

    def sweep(self):
        """Sweep the directory; see pidlock.sweep."""
        return sweep(self.directory)


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


def _run_command(lock, start, signals, group):
    """Run the command under the acquired lock; return (wait status, whether the terminal's Ctrl-C came).

    start: what _make_start returned. signals: those to take and pass on, all blocked. group: the command runs in a
    process group of its own, in the foreground if we are.
    """
    ours = os.getpgrp()
    try:
        child = start(lock)
    except _CannotExecute as failure:
        _say(failure)
        return failure.status << 8, False  # as wait(2) has it
    # Only now, for Ctrl-Z stops a waiting pidlock; so late, for to turn the old mask into names takes Python 0.1 ms.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    if group:
        _make_group(child, ours)  # here and in the child: whoever comes first
    return _attend(lock, child, signals, group)


def _attend(lock, child, signals, group):
    """Pass signals on to the command until it has ended; return as _run_command does."""
    ours = os.getpgrp()
    interrupted = got_int = False
    before_fork = True  # what was pending at the fork has not reached the child, whoever sent it
    fresh_until = time.monotonic() + (WATCH_KEPT if lock._watch else FRESHEN_EVERY)
    while True:
        patience = 0 if before_fork else max(0, fresh_until - time.monotonic())
        info = _next_signal(signals | {signal.SIGCHLD}, patience)
        if info is None and before_fork:
            before_fork = False
        elif info is None:
            if lock._watch:
                lock._end_watch()  # the wait's, which by now costs nothing
            else:
                _freshen(lock._descriptor)
            fresh_until = time.monotonic() + FRESHEN_EVERY
        elif info.si_signo == signal.SIGCHLD:
            status = _reap(child)
            if status is not None and os.WIFSTOPPED(status):
                _stop_as(os.WSTOPSIG(status), child, group)
            elif status is not None:
                given_back = group and _move_foreground(child, ours)
                if given_back and os.WTERMSIG(status) == signal.SIGINT and not got_int:
                    interrupted = True
                    os.killpg(ours, signal.SIGINT)  # the terminal's Ctrl-C, which but for --group all of us had got
                return status, interrupted
        else:
            if info.si_signo == signal.SIGINT:
                got_int = True
                interrupted = interrupted or _is_from_terminal(info)
            try:
                _pass_on(info, child, before_fork, group)
            except OSError as error:  # EPERM: it has become another user's (sudo)
                _say("%s: cannot pass signal %d on to PID %d: %s; signal it yourself"
                     % (lock.path, info.si_signo, child, error.strerror))


def _make_start(argv, mask, close, group):
    """Return a function that starts the command under an acquired lock, with signal mask `mask`, and returns its PID.

    All that does not depend on the lock is done here, before a wait rather than behind it. close: keep the lock's
    descriptor from the command. The function raises OSError where no process is to be had, and _CannotExecute; a
    forked child says the latter itself.

    By posix_spawn(3) where that does: it takes half the time of a fork of the interpreter, a tenth of a short run's.
    (glibc's leaves the signals 32 and 33, which it keeps for itself, ignored in the command.)
    """
    environment = _original_environment()
    ours = os.getpgrp()
    # A group has to be moved to the terminal's foreground before the command runs. And a spawned child that Ctrl-Z
    # stops before its execve would leave us in vfork(2) behind it: nobody could continue it.
    forks = group or _has_terminal() or not _can_spawn()

    def start(lock):
        environment.update(PIDLOCK_PIDFILE=lock._slot_path, PIDLOCK_PID=str(lock.pid), PIDLOCK_SLOT=str(lock.slot))
        if lock.token is not None:
            environment["PIDLOCK_TOKEN"] = str(lock.token)
        if not close:
            os.set_inheritable(lock._descriptor, True)
        try:
            if not forks:
                return _spawn_command(argv, environment, mask)
            child = os.fork()
            if child == 0:
                _become_command(argv, environment, mask, ours if group else None)
            return child
        finally:
            if not close:
                os.set_inheritable(lock._descriptor, False)

    return start


def _can_spawn():
    """Tell whether posix_spawn is there (Python 3.8) and reports what execve(2) answers: not so before glibc 2.24."""
    try:
        _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (OSError, ValueError):
        version = "2.24"  # it is another C library
    return hasattr(os, "posix_spawn") and [int(number) for number in version.split(".")[:2]] >= [2, 24]


def _spawn_command(argv, environment, mask):
    def spawn(place, words):  # handlers, as Python has one for SIGINT, do not outlive execve(2); what it ignores does
        return os.posix_spawn(place, words, environment, setsigmask=mask, setsigdef={signal.SIGPIPE, signal.SIGXFSZ})

    try:
        return _execute(argv, environment, spawn)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) in (errno.EAGAIN, errno.ENOMEM):  # clone(2)'s rather than execve(2)'s
            raise
        raise _CannotExecute(argv[0], error) from error


def _become_command(argv, environment, mask, leave_group):
    """In the forked child: become the command."""
    status = EXIT_FAILED
    try:
        for signum in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # those that Python sets at its start
            if signum != signal.SIGINT or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        if leave_group is not None:
            _make_group(os.getpid(), leave_group)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _execute(argv, environment, lambda place, words: os.execve(place, words, environment))
    except Exception as error:
        failure = _CannotExecute(argv[0], error)
        status = failure.status
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # it was made the command's; a closed stderr changes no status
        _say(failure)
    finally:
        os._exit(status)


class _CannotExecute(Exception):
    """The command was not found or cannot be executed, as `.status` says; one line as text."""

    def __init__(self, name, error):
        if isinstance(error, FileNotFoundError):
            super().__init__("%s: not found; check the name and PATH" % name)
            self.status = EXIT_NOT_FOUND
        else:
            what = getattr(error, "strerror", None) or error
            super().__init__("%s: cannot be executed: %s; check its permissions and its first line" % (name, what))
            self.status = EXIT_CANNOT_EXECUTE


def _execute(argv, environment, execute):
    """Search PATH and execute, as execvp(3) does: a script without `#!` runs under /bin/sh. Raises OSError."""
    name = argv[0]
    path = environment.get("PATH", "/bin:/usr/bin")  # os.defpath of 3.6 has the current directory in it
    places = [name] if "/" in name else [os.path.join(place, name) for place in path.split(":") if name]
    failure = OSError(errno.ENOENT, os.strerror(errno.ENOENT))  # of this errno, so a FileNotFoundError
    for place in places:
        try:
            os.stat(place)  # cheaper than a process that does not find it
            return execute(place, argv)
        except (FileNotFoundError, NotADirectoryError):
            if os.path.isfile(place):  # then it is the interpreter in its first line that was not found
                failure = OSError(errno.ENOEXEC, "the interpreter that its first line names was not found")
        except PermissionError as error:
            failure = error
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            return execute("/bin/sh", ["/bin/sh", place] + argv[1:])
    raise failure


def _original_environment():
    """Return the environment without an outer pidlock's token, and the LC_CTYPE of Python in a C locale (PEP 538)."""
    environment = {name: value for name, value in os.environ.items() if name}  # Python refuses `=x`, execve(2) does not
    environment.pop("PIDLOCK_TOKEN", None)
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
    """Reap what has ended, PID 1 also what was re-parented to it; return the child's wait status if it changed."""
    is_init = os.getpid() == 1
    changed = None
    while True:
        try:
            pid, status = os.waitpid(-1 if is_init else child, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return changed
        if pid == child:
            changed = status
        if pid == 0 or not is_init:
            return changed


def _pass_on(info, child, before_fork, group):
    """Pass a signal on to the command, or all its group, unless the terminal has sent it to both of us."""
    leads_group = os.getpgid(child) == child
    # A hang-up, and the CONT with it, goes to the session's leader alone (tty_ioctl(4)): the command has not got it.
    lone_hangup = info.si_signo in (signal.SIGHUP, signal.SIGCONT) and os.getsid(0) == os.getpid()
    shares_group = os.getpgid(child) == os.getpgrp()
    if _is_from_terminal(info) and shares_group and not before_fork and not lone_hangup:
        return
    if info.si_signo == signal.SIGTSTP and _is_orphaned():
        return  # the kernel lets no terminal stop us either, and nobody would continue the command
    if group and info.si_signo == signal.SIGCONT:
        _move_foreground(os.getpgrp(), child)  # the shell's fg gave the terminal to us
    if leads_group and (group or info.si_signo in (signal.SIGTSTP, signal.SIGCONT)):
        os.killpg(child, info.si_signo)  # job control is for a whole job, as the terminal and fg have it
    else:
        os.kill(child, info.si_signo)


def _make_group(child, ours):
    """Put the child into a process group of its own, in the terminal's foreground if ours is there."""
    try:
        os.setpgid(child, child)
    except OSError:
        return  # EACCES, setpgid(2): it has executed the command, so it has done all this itself
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in a script's `pidlock ... &`: the keys are the script's
        _move_foreground(ours, child)


def _move_foreground(group, to):
    """If the terminal's foreground group is this one, make it that one; return whether it was."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False  # there is no controlling terminal
    try:
        if os.tcgetpgrp(terminal) != group:
            return False
        os.tcsetpgrp(terminal, to)  # SIGTTOU is blocked, so this does not stop us
        return True
    except OSError:
        return False  # the terminal hung up, or the group is gone
    finally:
        os.close(terminal)


def _has_terminal():
    """Tell whether we have a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        return True
    except OSError:
        return False


def _is_orphaned():
    """Tell whether our process group has no shell above it (POSIX.1 3.264, orphaned process group)."""
    ours = os.getpgrp()
    for pid in _ancestors():
        try:
            if os.getpgid(pid) != ours:
                return os.getsid(pid) != os.getsid(0)
        except OSError:
            break
    return True


def _is_from_terminal(info):
    return info.si_code == SI_KERNEL and info.si_signo in TERMINAL_SIGNALS


def _stop_as(signum, child, group):
    """The command was stopped by the terminal: stop too, so that the shell gets the terminal back."""
    if signum not in STOP_SIGNALS:
        return  # SIGSTOP: somebody stopped the command alone
    if not _has_terminal():
        return  # nobody would continue us
    ours = os.getpgrp()
    if group and (_is_orphaned() if signum == signal.SIGTSTP else _move_foreground(ours, child)):
        os.killpg(child, signal.SIGCONT)  # nobody would continue us; or bash's fg gave us the terminal without a word
        return
    _move_foreground(child, ours)
    if signal.SIGCONT in signal.sigpending():
        return  # we are too late: the shell has gone on
    # Still blocked: merges with the one that the terminal sent, so we stop once. With --group it sent none to ours.
    if group:
        os.killpg(ours, signum)
    else:
        os.kill(os.getpid(), signum)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signum})


def _freshen(descriptor):
    """Set the atime, never the mtime, so that cleaners of /tmp leave a long job's file alone."""
    try:
        os.utime(descriptor, ns=(int(time.time() * 1e9), os.fstat(descriptor).st_mtime_ns))
    except OSError:
        pass  # a courtesy: nothing depends on it


def _next_signal(signals, seconds):
    """Return the siginfo of the next of these blocked signals, None after so many seconds."""
    if hasattr(signal, "sigtimedwait"):
        info = signal.sigtimedwait(signals, seconds)
        # Where we were stopped beyond the time (SIGSTOP, docker pause), Python 3.6 to 3.13 return rubbish for None.
        return info if info and info.si_signo in signals and -64 < info.si_code <= SI_KERNEL else None
    if not seconds and not signals & signal.sigpending():
        return None
    signum = signal.sigwait(signals)  # macOS: no time limit, and no telling who sent it
    return SignalInfo(signum, 0)


def _set_comm():
    try:
        with open("/proc/self/comm", "wb", buffering=0) as comm:
            comm.write(COMM.encode("ascii"))
    except OSError:
        pass  # there is no /proc: then nobody looks there either


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


# ---- Events, log, metrics ----

TOLD = {
    "evicted": "took over a stale file: %(reason)s",
    "lost": "lost: %(reason)s while the command ran; find out who did that",
    "acquired": "acquired by PID %(pid)d",
    "released": "released after %(lasted)s",
}


LOG = "this log"
COUNTED = {"evicted": "pidlock_evictions_total", "held": "pidlock_skips_total", "acquired": "pidlock_runs_total"}


def _report(event, options):
    """Say on stderr what happened, as far as -q and -v ask for it; log and count it."""
    kind = event["event"]
    breaks = kind == "evicted" and options.stale_strategy == TIME_ONLY  # it may have been a living holder's
    if kind == "lost" or breaks or (kind == "evicted" and not options.quiet) or (kind in TOLD and options.verbose):
        _say("%s: %s" % (event["path"], TOLD[kind] % dict(event, lasted=_duration(event["seconds"]))))
    if options.log:
        _log(event, options)
    if kind in COUNTED:
        changes = {COUNTED[kind]: 1.0}
        if kind == "acquired":
            changes["pidlock_last_start_timestamp_seconds"] = time.time()
        _count(event["path"], changes, options, is_last=kind == "held")


def _log(event, options):
    """Append the event as a line of JSON in one write, which O_APPEND keeps whole (write(2)).

    What cannot be written to a file is tried again with the next event; a line that was cut, whole and on a new line.
    """
    import json

    line = (json.dumps(dict({"time": _format_time(time.time())}, **event)) + "\n").encode("ascii")
    try:
        if options.log == "-":
            if sys.stderr is not None:
                _write_message(2, line, 0 if LOG in options.unwritable else LOOK_LONG)
            return
        options.unlogged += line
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(options.log, flags | os.O_NONBLOCK, 0o644)  # a FIFO that nobody reads stops no command
        try:
            written = os.write(descriptor, options.unlogged)
            whole = options.unlogged.rfind(b"\n", 0, written) + 1
            options.unlogged = (b"\n" if whole < written else b"") + options.unlogged[whole:]
            if options.unlogged:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
    except OSError as error:
        _say_unwritable(LOG, options.log, error, options)


def _say_unwritable(what, path, error, options):
    """Say once that the log or the metrics cannot be written; where stderr is the log that would go the same way."""
    if what not in options.unwritable and path != "-":
        problem = getattr(error, "strerror", None) or error
        _say("%s: cannot write %s: %s; the command runs all the same" % (path, what, problem))
    options.unwritable.add(what)


METRICS = {  # name: (type, help); the counters end in _total, as Prometheus has it
    "pidlock_last_start_timestamp_seconds": ("gauge", "When the last run started."),
    "pidlock_last_success_timestamp_seconds": ("gauge", "When a run last ended with status 0."),
    "pidlock_last_duration_seconds": ("gauge", "How long the last run took."),
    "pidlock_last_exit_status": ("gauge", "The exit status of the last run."),
    "pidlock_runs_total": ("counter", "Runs that got the lock."),
    "pidlock_skips_total": ("counter", "Runs that found the lock held."),
    "pidlock_evictions_total": ("counter", "Stale files that were taken over."),
}


def _count(path, changes, options, is_last):
    """Bring the metrics file up to date: counters by addition, the rest by replacement.

    The directory's flock keeps two runs from losing each other's counts, and a rename keeps a reader from half a file.
    What cannot be written is counted with the next event. So a busy flock may be waited for once before the command,
    and once behind the release (is_last), where nobody waits for us.
    """
    if not options.metrics:
        return
    path = os.fsencode(path).decode("utf-8", "backslashreplace")  # Prometheus takes UTF-8 alone
    label = 'pidfile="%s"' % "".join({"\\": "\\\\", '"': '\\"', "\n": "\\n"}.get(char, char) for char in path)
    patience = PATIENCE if is_last or not options.uncounted else 0
    _add(options.uncounted, {(name, label): value for name, value in changes.items()})
    guard = None
    try:
        metrics = _absolute(options.metrics)
        guard = _flock_directory(metrics, patience)
        if guard is None:
            raise OSError(errno.EAGAIN, "its directory is missing, or its flock is not to be had")
        values = _parse_metrics(metrics)
        _add(values, options.uncounted)
        _replace_metrics(metrics, values)
        options.uncounted.clear()
    except (OSError, ValueError) as error:
        _say_unwritable("these metrics", options.metrics, error, options)
    finally:
        _give_back(guard)


def _add(values, changes):
    for (name, label), value in changes.items():
        before = values.get((name, label), 0)
        if METRICS[name][0] == "counter":
            value += before
        elif name.endswith("_timestamp_seconds") and before <= time.time():  # else the clock was set back since
            value = max(value, before)  # ours may be an older one, tried again behind another run's
        values[name, label] = value


def _parse_metrics(metrics):
    """Return {(name, label): value} of a file that pidlock wrote. Raises ValueError for any other."""
    try:
        kind = _kind_of(os.lstat(metrics))
        if kind:
            raise ValueError("it is %s" % kind)  # a rename would replace /dev/null too
        text = _read(metrics)
    except FileNotFoundError:
        return {}
    values = {}
    for line in text.split("\n"):
        name, _, rest = line.partition("{")
        label, _, value = rest.rpartition("} ")
        if name in METRICS:
            values[name, label] = float(value)
        elif line and not line.startswith("#"):
            raise ValueError("it holds other metrics too")
    return values


def _replace_metrics(metrics, values):
    lines = []
    for name, (kind, text) in METRICS.items():
        series = sorted(key for key in values if key[0] == name)
        if series:
            lines += ["# HELP %s %s" % (name, text), "# TYPE %s %s" % (name, kind)]
            lines += ["%s{%s} %s" % (name, label, repr(values[name, label])) for _, label in series]
    private, descriptor = _open_private(metrics)
    try:
        _flock(descriptor, fcntl.LOCK_EX)
        _fill_file(descriptor, ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"), 0o644)
        os.rename(private, metrics)
    finally:
        _discard(private, descriptor)
        _give_back(descriptor)


# ---- The command line ----

USAGE = """pidlock --pidfile FILE [options] [--] COMMAND [ARG...]
       pidlock --pidfile FILE --check | --status [--json] | --signal SIG
       pidlock --sweep DIR [--dry-run] | --self-test | --version | --help"""
HELP = """usage: %s

Run COMMAND under a lock that people can read: a pidfile.

options:
%s

exit status: the command's own; 128+N when signal N ended it; else 75 held,
  125 pidlock failed, 126 not executable, 127 not found, 2 wrong usage
  --check: 0 free, 1 held, 125 cannot tell; --signal: 0 sent, 3 not held
  --status: 0 held, 1 stale, 3 free, 4 cannot tell

more options:
%s

examples:
  pidlock --pidfile /run/backup.pid -- /home/me/backup.sh
  pidlock --pidfile /run/backup.pid --wait 60 -- ./backup.sh
  pidlock --pidfile /run/backup.pid --status
"""


def main(argv=None):
    """Run the command line (sys.argv without argv); return the exit status.

    For a run there may be no other thread: it waits for SIGCHLD, which the kernel may give to any that does not block
    it. Signals are blocked for a run alone: whatever else takes long, or writes to a pipe that nobody reads, they end.
    With argv None this is a process of its own, about to end: behind a run they stay blocked.
    """
    mask = None
    try:
        options = _parse(sys.argv[1:] if argv is None else argv)
        if options.action:
            return options.action(options)
        signals = _passed_signals()
        ours = (signals | STOP_SIGNALS | {signal.SIGCHLD}) - {signal.SIGTSTP}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ours) - {32, 33}  # glibc's own, signal(7)
        return _run(options, signals, mask)
    except SystemExit as stop:  # wrong usage, --help or --version, and it has been said
        return stop.code
    except LockHeld as held:
        if not options.quiet:
            _say(held)
        return options.held_exit_code
    except PidLockError as error:
        _say(error)
        return EXIT_UNKNOWN if options.status else EXIT_FAILED
    except OSError as error:  # of a system call outside the lock's steps, as fork
        _say("%s: %s; look into that, then try again" % (options.pidfile or "pidlock", error.strerror))
        return EXIT_UNKNOWN if options.status else EXIT_FAILED
    except _Interrupted as interruption:
        return _end_by(interruption.signum, interruption.from_terminal)
    finally:
        if argv is not None and mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run_as_process():
    """Run main as the whole process: end without the interpreter's clean-up, which every waiter would wait for."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C prints no traceback, where it is not blocked
    status = main()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        status = status or EXIT_FAILED  # what was asked for could not be printed
    os._exit(status)


def _inspect_slots(options):
    """Return the Status of the lock, and those of its slots: as many as asked for, and all others that are held."""
    policy = (options.stale_after, options.stale_strategy)
    statuses = [inspect(_slot_path(options.pidfile, slot), *policy) for slot in range(1, options.max_concurrent + 1)]
    states = [FREE, STALE, UNKNOWN, HELD]  # one free slot makes the lock free
    if len(statuses) > 1:
        statuses = [status._replace(slot=slot) for slot, status in enumerate(statuses, 1)]
        living = {found.path: found for found in _living_slots(statuses[0].path, policy)}
        statuses += [inspect(path, *policy) for path in living if path not in {status.path for status in statuses}]
        held = [living[status.path] for status in statuses if status.state in (HELD, UNKNOWN) and status.path in living]
        if not _has_room(options.max_concurrent, held):
            states = [UNKNOWN, HELD]  # whatever names are free
    return next(status for state in states for status in statuses if status.state == state), statuses


def _check(options):
    status, _ = _inspect_slots(options)
    if status.state == UNKNOWN:
        raise PidLockError(status.path, "cannot tell: " + status.reason, status.advice)
    return EXIT_CHECK_HELD if status.state == HELD else EXIT_OK


def _show_status(options):
    best, statuses = _inspect_slots(options)
    if options.json:
        import json

        reports = [dict(status._asdict(), since=status.since and _format_time(status.since)) for status in statuses]
        text = json.dumps(dict(reports[statuses.index(best)], slots=reports) if len(reports) > 1 else reports[0]) + "\n"
    else:
        text = "".join(_printable("%s: %s" % (status.path, _describe(status))) + "\n" for status in statuses)
    return STATUS_CODES[best.state] if _write(sys.stdout, text) else EXIT_UNKNOWN


def _describe(status):
    if status.reason.startswith((status.state, "there is no file")):
        return status.reason
    return "%s: %s" % (status.state, status.reason)


def _send_signal(options):
    return EXIT_OK if signal_holder(options.pidfile, options.signal) else EXIT_NOBODY


def _sweep(options):
    swept, failures = _sweep_all(options.sweep, options.dry_run)
    printed = not swept or _write(sys.stdout, "".join(_printable(path) + "\n" for path in swept))
    for failure in failures:
        _say(failure)
    return EXIT_OK if printed and not failures else EXIT_FAILED


def _run(options, signals, mask):
    """Run the command; return its exit status. signals: those to pass on, all blocked. mask: the one to give it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored at the start, it would lose us the command's status
    lock = PidLock(
        options.pidfile, options.wait, options.stale_after, options.stale_strategy, options.max_concurrent,
        options.details, options.fence, options.trace_id, options.mode, lambda event: _report(event, options),
    )
    options.unwritable, options.unlogged, options.uncounted = set(), b"", {}  # for the events, what has failed
    lock._command = options.command
    interrupts = signals - mask - {signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP}  # those that would end a process
    lock._sleep = _make_sleep(lock.path, interrupts, options.quiet)
    lock._pause = lambda seconds: _pause(seconds, interrupts)
    start = _make_start(options.command, mask, options.close, options.group)
    _set_comm()
    try:
        lock.acquire()
    except LockHeld:
        _raise_pending(interrupts)
        raise
    started = time.monotonic()
    status = EXIT_FAILED  # where no process is to be had
    try:
        _raise_pending(interrupts)  # what came during the wait ends it, rather than a command just started
        wait_status, interrupted = _run_command(lock, start, signals, options.group)
        status = status_of(wait_status)
    except _Interrupted as interruption:
        status = EXIT_BY_SIGNAL + interruption.signum
        raise
    finally:
        try:
            lock.release()
        except PidLockError as error:
            _say(error)
        outcome = {"pidlock_last_duration_seconds": time.monotonic() - started, "pidlock_last_exit_status": status}
        if status == EXIT_OK:
            outcome["pidlock_last_success_timestamp_seconds"] = time.time()
        _count(lock.path, outcome, options, is_last=True)
    return _end_by(status - EXIT_BY_SIGNAL, interrupted) if os.WIFSIGNALED(wait_status) else status


def _make_sleep(path, interrupts, quiet):
    """Return the _sleep of a command's wait: these signals end it, and a terminal shows for whom it waits."""
    started = time.monotonic()
    told = set()  # type: set[tuple[int, bool]]
    before = None
    orphans_end = {signal.SIGCHLD} if os.getpid() == 1 else set()

    def sleep(held, ended, watch, seconds):
        nonlocal before
        _raise_pending(interrupts)
        if orphans_end:
            _next_signal(orphans_end, 0)  # before the reaping, so that whoever ends behind it wakes this sleep
            _reap(None)
        holders = {(found.pid, _exists(found.pid)) for found in held}  # asked anew when one has ended
        if holders != before and all(map(_waits_for_us, held)):  # asked anew also when another one has left
            reason = "held by PID %d, which waits for this very process" % held[0].pid
            raise LockHeld(path, held[0].pid, reason, "lock once, outside")
        erase = "" if quiet else _show_wait(path, held, started, again=holders <= told)
        told.update(holders)
        before = holders
        signalfd = _open_signalfd(watch.libc, interrupts | orphans_end) if watch else None
        seconds = min(seconds, TICK_MAX if signalfd is None else TICK_SHOWN if erase else seconds)
        try:
            return _sleep_until_change(held, ended, watch, seconds, signalfd)
        finally:
            if signalfd is not None:
                os.close(signalfd)
            if erase and _room_to_rewrite():  # not after Ctrl-Z and bg: there is the shell's prompt by now
                _write(sys.stderr, erase)

    return sleep


def _pause(seconds, interrupts):
    _raise_pending(interrupts)
    time.sleep(seconds)


def _raise_pending(interrupts):
    """Raise _Interrupted when one of these blocked signals has come."""
    info = _next_signal(interrupts, 0)
    if info is not None:
        raise _Interrupted(info.si_signo, _is_from_terminal(info))


def _open_signalfd(libc, signals):
    """Return a descriptor that is readable when one of these blocked signals has come, signalfd(2); None without."""
    import ctypes

    mask = ctypes.create_string_buffer(128)  # sigset_t
    libc.sigemptyset(mask)
    for signum in signals:
        libc.sigaddset(mask, int(signum))
    try:
        descriptor = libc.signalfd(-1, mask, os.O_CLOEXEC)
    except AttributeError:
        return None  # FreeBSD has inotify without it
    return descriptor if descriptor >= 0 else None


def _show_wait(path, held, started, again):
    """Say on a terminal for whom we wait; return what erases it. Where it cannot be rewritten say it once."""
    if not sys.stderr or not sys.stderr.isatty():
        return ""
    room = _room_to_rewrite()
    if again and not room:
        return ""
    tell = "waiting for %s: %s" % (_duration(time.monotonic() - started), _refuse(path, held).reason)
    if not room:
        _say("%s: %s" % (path, tell))
        return ""
    line = "pidlock: %s: %s" % (path, tell)
    if _width(line) > room:
        line = "pidlock: %s: %s" % (os.path.basename(path), tell)
    while _width(line) > room:
        line = line[:-1]
    erase = "\r\033[K"  # ECMA-48: to the line's start, erase to its end
    _write(sys.stderr, erase + _printable(line))
    return erase


def _room_to_rewrite():
    """Return how many columns a line may have that is rewritten; 0 where the terminal is not ours alone, or cannot."""
    if os.environ.get("TERM", "dumb") == "dumb" or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return 0  # the latter in a script's `pidlock ... &`: the terminal is the script's
    try:
        if os.tcgetpgrp(2) != os.getpgrp() or not select.select([], [2], [], 0)[1]:  # not after Ctrl-S
            return 0
        return (os.get_terminal_size(2).columns or 80) - 1  # a line that wraps could not be erased
    except OSError:
        return 0  # it is another terminal than ours, or hung up


def _width(text):
    """Return how many columns it takes on a terminal, as _write and _printable show it."""
    import unicodedata

    encoding = sys.stderr.encoding or "ascii"
    shown = _printable(text).encode(encoding, "backslashreplace").decode(encoding)
    return sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in shown)


def _waits_for_us(found):
    """Tell whether our own ancestor holds it, or one of us does by a descriptor inherited from a killed holder."""
    if found.pid in _ancestors():  # and not merely of the same number, as PID 1 of another namespace is
        return any(_flockers(found.status, [found.pid])) or os.environ.get("PIDLOCK_PID") == str(found.pid)
    if _exists(found.pid):
        return False
    # The taker's PID, or 0 if dead, tells a holder's flock from one that an ancestor has just to look at a stale file.
    return any(taker in (0, found.pid) for _, taker in _flockers(found.status, [os.getpid(), *_ancestors()]))


def _ancestors():
    """Yield the PIDs of our parent, its parent and so on, as far as /proc shows them."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        fields = _stat_fields(pid)
        pid = int(fields[1]) if fields else 0


def _end_by(signum, from_terminal):
    """Return 128+N; but end by the terminal's Ctrl-C itself, so that a shell's loop stops too."""
    if signum == signal.SIGINT and from_terminal and os.getpid() != 1:  # no default action for PID 1, signal(7)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return EXIT_BY_SIGNAL + signum


def _say(message):
    """Write one line on stderr; a line that cannot be written changes nothing."""
    _write(sys.stderr, "pidlock: %s\n" % _printable(str(message)))


def _write(stream, text):
    """Write to sys.stdout or sys.stderr; return whether that went well."""
    if stream is None:
        return False  # closed at the start, and by now its descriptor may be anything
    try:
        line = text.encode(stream.encoding or "ascii", "backslashreplace")
        if stream is sys.stderr:
            _write_message(stream.fileno(), line)
        else:
            os.write(stream.fileno(), line)
    except OSError as error:
        if stream is sys.stdout:
            _say("stdout: cannot be written: %s; ask again with another" % error.strerror)
        return False
    return True


def _write_message(descriptor, line, patience=LOOK_LONG):
    """Write to stderr what a run does not wait for: raise OSError where nobody has read for so many seconds.

    Where poll(2) finds room in a pipe, PIPE_BUF bytes do not block, unless another writer takes it meanwhile. A longer
    line is torn there anyway (pipe(7)).
    """
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    size = select.PIPE_BUF if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else len(line)
    while line:
        if not poller.poll(patience * 1000):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        line = line[os.write(descriptor, line[:size]):]


def _parse(argv):
    """Return the options, with .command and .action. Raises SystemExit after a usage error, --help and --version."""
    by_name = {name: option for option in COMMON_OPTIONS + MORE_OPTIONS for name in option.names}
    options = types.SimpleNamespace(**{_key(option): option.default for option in by_name.values()})
    given = set()
    words = list(argv)
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--") and len(name) > 2:  # -pFILE, or -qv
            name, equals, value = word[:2], "", word[2:]
        if name not in by_name:
            _end_usage("unknown option: %s; pidlock --help lists them" % word)
        option = by_name[name]
        label = "/".join(option.names[:2])
        if option.metavar is None:
            if equals or value.startswith("-"):  # -q-check would go on as --check, and -q- as --
                _end_usage("argument %s: it takes no value, and was given %r" % (label, value))
            if value:
                words.insert(0, "-" + value)
            value = True
        else:
            if not equals and not value and option.metavar != OPTIONAL:
                if not words or words[0].startswith("-") and words[0] != "-" and not words[0][1:2].isdigit():
                    _end_usage("argument %s: its value is missing; one that starts with - is written %s=-..."
                               % (label, _long_name(option)))
                value = words.pop(0)
            try:
                value = option.convert(value)
            except ValueError as problem:
                _end_usage("argument %s: %s" % (label, problem))
        setattr(options, _key(option), value)
        given.add(_key(option))
        if options.help or options.version:
            tables = ["\n".join(map(_describe_option, table)) for table in (COMMON_OPTIONS, MORE_OPTIONS)]
            told = _write(sys.stdout, HELP % (USAGE, *tables) if options.help else "pidlock %s\n" % __version__)
            raise SystemExit(EXIT_OK if told else EXIT_FAILED)
    options.command = words[1:] if words[:1] == ["--"] else words
    _check_usage(options, given)
    return options


def _long_name(option):
    return next(name for name in option.names if name.startswith("--"))


def _key(option):
    return _long_name(option)[2:].replace("-", "_")


def _describe_option(option):
    value = "" if option.metavar is None else option.metavar if option.metavar == OPTIONAL else " " + option.metavar
    return "  %-22s  %s" % (", ".join(option.names[:2]) + value, option.help)


def _end_usage(problem):
    _write(sys.stderr, "usage: %s\npidlock: error: %s\n" % (USAGE, _printable(problem)))
    raise SystemExit(EXIT_USAGE)


ACTIONS = {"check": _check, "status": _show_status, "signal": _send_signal, "sweep": _sweep,
           "self_test": lambda options: _self_test()}
PROBE_OPTIONS = {"pidfile", "max_concurrent", "stale_after", "stale_strategy", "quiet", "verbose"}
GOES_WITH = {"check": PROBE_OPTIONS, "status": PROBE_OPTIONS | {"json"}, "signal": {"pidfile", "quiet", "verbose"},
             "sweep": {"dry_run", "quiet", "verbose"}, "self_test": set()}


def _check_usage(options, given):
    """Choose options.action, None for a run; end with usage errors for options that do not belong together."""
    asked = next((name for name in ACTIONS if name in given), "")  # "": to run a command
    options.action = ACTIONS.get(asked)
    what = "--" + asked.replace("_", "-") if asked else "a command"
    if asked and options.command:
        _end_usage("%s runs no command" % what)
    strange = sorted(given - GOES_WITH[asked] - {asked} if asked else given & {"json", "dry_run"})
    if strange:
        _end_usage("--%s does not go with %s" % (strange[0].replace("_", "-"), what))
    if "pidfile" not in given and asked not in ("sweep", "self_test"):
        _end_usage("--pidfile FILE is required")
    for name in ("pidfile", "sweep", "log", "metrics"):
        if getattr(options, name) == "":
            _end_usage("--%s: an empty name" % name)
    if not asked and not options.command:
        _end_usage("no command given")
    if options.stale_strategy == TIME_ONLY and options.stale_after is None:
        _end_usage("--stale-strategy time-only needs --stale-after")


def _parse_seconds(text):
    """Return a TIME in seconds: 90, 0.5, 30s, 5m, 1h30m, 2d or inf."""
    if text == "inf" or _is_decimal(text):
        return float(text)
    rest, seconds = text, 0.0
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        value, found, behind = rest.partition(unit)
        if found and _is_decimal(value):
            rest, seconds = behind, seconds + float(value) * size
    if rest or not text:
        raise ValueError("%r is no time; try 90, 0.5, 30s, 5m, 1h30m, 2d or inf" % text)
    return seconds


def _is_decimal(text):
    """Tell whether it is digits, or digits with a point among them: ASCII only, not all that float() takes."""
    return all(part and not part.strip("0123456789") for part in text.split(".", 1))


def _parse_number(text, lowest, highest, what):
    if not 0 < len(text) < 10 or text.strip("0123456789") or not lowest <= int(text) <= highest:
        raise ValueError("%r is no %s; try a number from %d to %d" % (text, what, lowest, highest))
    return int(text)


def _parse_signal(text):
    name = text.upper() if text.upper().startswith("SIG") else "SIG" + text.upper()
    if name in signal.Signals.__members__:
        return int(signal.Signals[name])
    return _parse_number(text, 1, signal.NSIG - 1, "signal")


def _parse_strategy(text):
    if text not in STRATEGIES:
        raise ValueError("%r is no strategy; try %s" % (text, ", ".join(STRATEGIES)))
    return text


def _parse_trace_id(text):
    if not text.isprintable() or not 1 <= len(text) <= TRACE_ID_MAX:
        raise ValueError("%r is empty, too long, or has characters that do not print" % text)
    return text


def _parse_mode(text):
    mode = int(text, 8) if text and set(text) <= set("01234567") else 0
    try:
        PidLock("checked", mode=mode)
    except ValueError:
        raise ValueError("%r is no mode for a pidfile; try 0644 or 0600" % text) from None
    return mode


# names: a third is not shown. metavar: its value's, None for a flag. convert: from the value's text, or ValueError.
Option = namedtuple("Option", "names metavar help convert default")
OPTIONAL = "[=FILE]"


def _flag(names, text):
    return Option(names, None, text, None, None)


def _option(names, metavar, text, convert=str, default=None):
    return Option(names, metavar, text, convert, default)


COMMON_OPTIONS = [
    _option(("-p", "--pidfile"), "FILE", "the lock; missing parent directories are made"),
    _option(("-w", "--wait"), "TIME", "wait so long: 90, 0.5, 30s, 1h30m, inf", _parse_seconds, 0.0),
    _option(("-E", "--held-exit-code", "--conflict-exit-code"), "N", "exit with N, not 75, when it is held",
            lambda text: _parse_number(text, 0, 255, "exit status"), EXIT_HELD),
    _flag(("-q", "--quiet"), "say nothing of held, waiting, taking over"),
    _flag(("-v", "--verbose"), "also say acquired and released"),
    _flag(("--check",), "tell by the exit status whether it is held"),
    _flag(("--status",), "tell who holds it"),
    _option(("--signal",), "SIG", "signal the holder, never a stranger", _parse_signal),
    _flag(("-h", "--help"), "print this"),
]
MORE_OPTIONS = [
    _flag(("-o", "--close"), "keep the lock's descriptor from the command"),
    _flag(("-g", "--group"), "run the command in a process group of its own"),
    _option(("--mode",), "MODE", "the pidfile's permissions; default 0644", _parse_mode, 0o644),
    _option(("--stale-after",), "TIME", "doubtful holders count as gone after that long", _parse_seconds),
    _option(("--stale-strategy",), "S", ", ".join(STRATEGIES), _parse_strategy, PID_FIRST),
    _option(("--max-concurrent",), "N", "let N hold it at once",
            lambda text: _parse_number(text, 1, SLOTS_MAX, "number of slots"), 1),
    _flag(("--details",), "record who, where, since when and why"),
    _option(("--trace-id",), "ID", "recorded; default: the trace of TRACEPARENT", _parse_trace_id),
    _option(("--fence",), OPTIONAL, "take a token; default: FILE.fence", lambda file: file or True, False),
    _option(("--log",), "FILE", "append events as JSON lines; - is stderr"),
    _option(("--metrics",), "FILE", "keep a Prometheus textfile"),
    _flag(("--json",), "tell it as JSON"),
    _option(("--sweep",), "DIR", "remove pidlock's stale files there"),
    _flag(("--dry-run",), "only print what it would remove"),
    _flag(("--self-test",), "test this pidlock on this machine"),
    _flag(("--version",), "print the version"),
]


# ---- Self-test ----


def _self_test():
    """Run each promise's test in a directory of its own; print a line for each; return the exit status."""
    import shutil
    import tempfile

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):  # as no caller's nohup or mask has them
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
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


def _start_pidlock(path, *arguments):
    import subprocess

    command = [sys.executable, os.path.abspath(__file__), "--pidfile", path, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            universal_newlines=True)


def _run_one(path, *arguments):
    process = _start_pidlock(path, *arguments)
    process.communicate(timeout=60)
    return process.returncode


def _start_holder(path):
    """Start a pidlock and its command, which ends when its standard input does."""
    holder = _start_pidlock(path, "--", "/bin/sh", "-c", "echo ready; read line")
    holder.stdout.readline()
    return holder


def _write_file(path, body, age):
    with open(path, "wb") as file:
        file.write(body)
    os.utime(path, (time.time() - age, time.time() - age))


def _differ(expected, seen):
    return None if expected == seen else "expected %r, saw %r" % (expected, seen)


def _test_file(path):
    process = _start_pidlock(path, "--", "cat", path)
    seen = process.communicate(timeout=60)[0]
    return _differ(("%d\n\n\n" % process.pid, False), (seen, os.path.exists(path)))


def _test_blocks(path):
    holder = _start_holder(path)
    seen = [_run_one(path, "--", "true"), _run_one(path, "--check")]
    holder.communicate(timeout=60)
    return _differ([75, 1, 0, 0], seen + [_run_one(path, "--check"), _run_one(path, "--", "true")])


def _test_left(path, body, age, expected):
    """A file with this body is there already, so many seconds old."""
    _write_file(path, body, age)
    return _differ(expected, (_run_one(path, "--", "true"), _run_one(path, "--check"), os.path.exists(path)))


def _test_killed_holder(path):
    holder = _start_holder(path)
    holder.kill()
    holder.wait()
    seen = [_run_one(path, "--", "true")]
    holder.communicate(timeout=60)  # ends the command
    seen.append(_run_one(path, "--wait", "60", "--", "true"))
    return _differ([75, 0], seen)


def _test_evictor(path):
    _write_file(path, NOBODYS, age=60)
    found = _examine(path, fcntl.LOCK_EX, (None, PID_FIRST))
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
    seen = [_run_one(path, "--", "/bin/sh", "-c", command) for command in commands]
    return _differ([0, 7, 130, 143, 126, 127], seen + [_run_one(path, path + ".sh"), _run_one(path, path + ".no")])


def _test_wait(path):
    holder = _start_holder(path)
    waiter = _start_pidlock(path, "--wait", "60", "--", "echo", "mine")
    holder.communicate(timeout=60)
    return _differ(("mine\n", 0), (waiter.communicate(timeout=60)[0], waiter.returncode))


NOBODYS = b"99999999\n"  # beyond every kernel's greatest PID
LIVING = b"%d\n" % os.getpid()
TAKEN_OVER, RESPECTED = (0, 0, False), (75, 1, True)  # the statuses of a run and of --check; whether it is still there
SELF_TESTS = [
    ("the file holds the PID and the mark, and goes with its holder", _test_file),
    ("a living holder blocks, and --check tells", _test_blocks),
    ("a dead PID is taken over", lambda path: _test_left(path, NOBODYS, 60, TAKEN_OVER)),
    ("garbage is taken over", lambda path: _test_left(path, b"garbage\n", 60, TAKEN_OVER)),
    ("a young empty file is not", lambda path: _test_left(path, b"", -1, RESPECTED)),
    ("a recycled PID under the mark is taken over", lambda path: _test_left(path, LIVING + MARK, 60, TAKEN_OVER)),
    ("a living PID of another program is not", lambda path: _test_left(path, LIVING, 60, RESPECTED)),
    ("a killed holder's command keeps the lock until it ends", _test_killed_holder),
    ("an evictor removes only the file that it judged", _test_evictor),
    ("release leaves another's lock alone", _test_release),
    ("exit statuses are 0, 7, 130, 143, 126 and 127", _test_exit_statuses),
    ("--wait gets the lock when it is free", _test_wait),
]


if __name__ == "__main__":
    run_as_process()

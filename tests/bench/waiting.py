"""What waiting costs: the CPU of waiters that get nothing, whole commands and processes of the library."""
import contextlib
import os
import resource
import statistics
import struct
import time

from measure import Holder, Missing, cpu_of, end, fork, new_path, reap, settle, start
from peers import find, pidlock, waiting_locks


def measure_cpu(figure, commands, make_directory, waiters, span):
    """Add to the figure the CPU that each of so many waiters uses in span seconds.

    All wait at the same time, and each kind in a directory of its own: none is woken by what the others do.
    """
    filelock = waiting_locks()["filelock FileLock"]
    with contextlib.ExitStack() as stack:
        pids = {}
        for name, words in commands.items():
            if isinstance(words, Missing):
                figure.missing[name] = str(words)
                continue
            command = words(new_path(make_directory()))
            stack.callback(Holder(command).finish)
            pids[name] = [start([*command, find("true")]) for _ in range(waiters)]
            stack.callback(end, pids[name])
        settle(sum(pids.values(), []))
        held = stack.enter_context(pidlock.PidLock(new_path(make_directory())))
        libraries = {"pidlock library": Library(lambda: pidlock.PidLock(held.path, wait=span), waiters)}
        if isinstance(filelock, Missing):
            figure.missing["filelock FileLock"] = str(filelock)
        else:
            path = new_path(make_directory())
            stack.enter_context(filelock(path))
            libraries["filelock FileLock"] = Library(lambda: filelock(path, timeout=span), waiters)
        before = {name: sum(map(cpu_of, pids[name])) for name in pids}
        time.sleep(span)
        for name in pids:
            figure.add(name, (sum(map(cpu_of, pids[name])) - before[name]) / waiters)
        for name, processes in libraries.items():
            figure.add(name, processes.cpu())


class Library:
    """Processes that each wait in vain for a lock of the library, for as long as the lock says."""

    def __init__(self, make_lock, waiters):
        self._reports, self._report = os.pipe()
        self._pids = [fork(lambda: self._wait(make_lock())) for _ in range(waiters)]

    def _wait(self, lock):
        before = resource.getrusage(resource.RUSAGE_SELF)
        try:
            lock.acquire()
        except (pidlock.LockHeld, TimeoutError):  # filelock's Timeout is one
            after = resource.getrusage(resource.RUSAGE_SELF)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            os.write(self._report, struct.pack("d", used * 1e3))

    def cpu(self):
        """Wait for them; return the mean of the milliseconds that each wait has used, user and system."""
        reap(self._pids)
        used = struct.unpack("%dd" % len(self._pids), os.read(self._reports, 8 * len(self._pids)))
        os.close(self._reports)
        os.close(self._report)
        return statistics.mean(used)

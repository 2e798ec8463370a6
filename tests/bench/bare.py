"""The system calls of pidlock's protocol and nothing else: what a cycle of it costs at the least in Python.

Run as a program, `bare.py PATH`, it goes through a few cycles of each for strace to see.
"""
import fcntl
import os
import re
import shutil
import subprocess
import sys

# The allocator's and Python's; and who we are, which pidlock asks more than once: nothing else is as cheap.
OTHER_CALLS = {"brk", "mmap", "munmap", "mremap", "madvise", "futex", "rt_sigaction", "getpid"}
MARKER = "getpgid"  # a call that neither makes


class Bare:
    """In the order of the steps in pidlock's docstring, with every check, and no error that is not expected."""

    def __init__(self, path):
        self._path = path
        self._directory = os.path.dirname(path)

    def acquire(self):
        path = self._path
        try:
            os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except FileNotFoundError:
            pass
        pid = os.getpid()
        private = os.path.join(self._directory, ".pidlock-" + os.urandom(8).hex())
        low = os.open(private, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 10)
        os.close(low)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, b"%d\n\n\n" % pid)
        os.fchmod(descriptor, 0o644)
        os.statvfs(descriptor)
        os.link(private, path)
        assert os.path.samestat(os.fstat(descriptor), os.lstat(path))
        os.unlink(private)
        self._file = os.fstat(descriptor)
        self._descriptor = descriptor

    def release(self):
        descriptor = self._descriptor
        assert os.path.samestat(os.fstat(descriptor), self._file)
        assert os.path.samestat(os.fstat(descriptor), os.lstat(self._path))
        os.unlink(self._path)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def trace(directory):
    """Return the calls of the last cycle of pidlock and of Bare as strace shows them; None without strace."""
    if shutil.which("strace") is None:
        return None
    log = os.path.join(directory, "strace.log")
    subprocess.run(["strace", "-qq", "-o", log, sys.executable, __file__, os.path.join(directory, "traced.pid")],
                   check=True)
    with open(log) as file:
        cycles = file.read().split(MARKER + "(")[1:-1]  # before the first and behind the last is Python's own
    cycles = [[normalize(line) for line in cycle.splitlines()[1:] if line.split("(")[0] not in OTHER_CALLS]
              for cycle in cycles]
    return cycles[len(cycles) // 2 - 1], cycles[-1]


def normalize(line):
    """Leave out what differs between any two cycles: random bytes, and the free space and times in structures."""
    line = re.sub(r"\.pidlock-[0-9a-f]{16}", ".pidlock-PRIVATE", line)
    return re.sub(r"\{.*\}|getrandom\(.*\"", "...", line)


def main(path):
    from peers import pidlock

    for lock in (pidlock.PidLock(path), Bare(path)):
        for _ in range(3):
            os.getpgid(0)
            lock.acquire()
            lock.release()
    os.getpgid(0)


if __name__ == "__main__":
    main(sys.argv[1])

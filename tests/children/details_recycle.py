"""In a PID namespace of our own: leave a lock by its details, give its PID to another process, and judge it.

details_recycle.py PATH. There is no flock here, so no mark: the details, or the PID alone, have to tell.
"""
import errno
import fcntl
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import pidlock  # noqa: E402


def no_flock(*_):
    raise OSError(errno.ENOSYS, "no flock here")


def run_as(pid, function):
    """Fork until the child has this PID, which is free; it calls the function and ends."""
    for _ in range(100):
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write("%d" % (pid - 1))
        child = os.fork()
        if child == 0:
            function()
            os._exit(0)
        if child == pid:
            return
        os.waitpid(child, 0)
    sys.exit("PID %d is not to be had" % pid)


def read_start(pid):
    with open("/proc/%d/stat" % pid) as file:
        return file.read().rpartition(")")[2].split()[19]


fcntl.flock = no_flock
path, pid = sys.argv[1], 4231
run_as(pid, lambda: pidlock.PidLock(path, details=True).acquire())
os.waitpid(pid, 0)
with open(path, "rb") as file:
    left = pidlock.parse_record(file.read())
ticks = os.sysconf("SC_CLK_TCK")
while time.clock_gettime(time.CLOCK_BOOTTIME) * ticks <= int(left.details["start"]) + 2:
    time.sleep(1 / ticks)  # a start is known to the tick only
reader, writer = os.pipe()
run_as(pid, lambda: (os.close(writer), os.read(reader, 1)))
print("recycled" if (left.pid, left.marked) == (pid, False) and read_start(pid) != left.details["start"] else left)
status = pidlock.inspect(path)
print("%s: %s" % (status.state, "another process" if "another process" in status.reason else status.reason))
with open(path, "w") as file:
    file.write("%d\n" % pid)
print(pidlock.inspect(path).state)

"""In a PID namespace of our own, recycle a lock's PID: env_recycle.py PATH RECORD PIDLOCK...

RECORD: `marked`, `details` (a killed pidlock's file), `job` (the same, while its command lives) or `unmarked`. Then the
PID is given to a stranger, and it is printed as JSON what pidlock says and does, and whether the stranger survived.
"""
import json
import os
import subprocess
import sys
import time

PID = 4231
CLOCK_BOOTTIME = 7  # clock_gettime(2); Python has the name since 3.7
path, record, *pidlock = sys.argv[1:]


def fork_with_pid(function):
    """Fork until the child has our PID; it calls the function and ends."""
    for _ in range(100):
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write("%d" % (PID - 1))
        child = os.fork()
        if child == 0:
            function()
            os._exit(0)
        if child == PID:
            return
        os.kill(child, 9)
        os.waitpid(child, 0)
    sys.exit("PID %d is not to be had" % PID)


def read_start():
    with open("/proc/%d/stat" % PID) as file:
        return int(file.read().rpartition(")")[2].split()[19])


def leave_file():
    script = "kill -9 $PPID; " + ("read line" if record == "job" else "")
    os.dup2(lifeline, 0)
    options = ["--details"] if record == "details" else []
    os.execv(pidlock[0], pidlock + ["-p", path] + options + ["--", "sh", "-c", script])


def ask(*arguments):
    done = subprocess.run(pidlock + ["-p", path] + list(arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=60)
    return [done.returncode, done.stdout.decode(), done.stderr.decode()]


lifeline, writer = os.pipe()
if record == "unmarked":
    with open(path, "w") as file:
        file.write("%d\n" % PID)
else:
    fork_with_pid(leave_file)
    os.waitpid(PID, 0)
ticks = os.sysconf("SC_CLK_TCK")
late = time.clock_gettime(CLOCK_BOOTTIME) + 2 / ticks
while time.clock_gettime(CLOCK_BOOTTIME) <= late:
    time.sleep(1 / ticks)  # a start is known to the tick only
reader, other = os.pipe()
fork_with_pid(lambda: (os.close(other), os.close(writer), os.read(reader, 1)))
result = {"check": ask("--check"), "signal": ask("--signal", "TERM")[0], "run": ask("--", "echo", "ran")}
result["stranger"] = "alive" if os.waitpid(PID, os.WNOHANG) == (0, 0) else "dead"
print(json.dumps(result))
os.close(writer)

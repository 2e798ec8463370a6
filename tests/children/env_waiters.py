"""Many waiters, forked from one process: env_waiters.py PATH WAITERS TURNS SECONDS. The figures are printed as JSON.

Each runs pidlock.main(). They wait SECONDS for a living holder, then so many take their turns: a `+` at the start, a
`-` at the end of each command, which ends when it is told to. Then all that are left get SIGTERM.
"""
import collections
import json
import os
import select
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import pidlock  # noqa: E402

path, waiters, turns, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
go, start = os.pipe()
report, tell = os.pipe()
ready, say_ready = os.pipe()
COMMAND = ["sh", "-c", "printf +; read line; printf -"]


def wait_as_command():
    def look(event, args):
        if event == "fcntl.flock" and len(looks) < 2:
            looks.append(event)
            if len(looks) == 2:
                os.write(say_ready, b"r")

    looks = []
    os.dup2(go, 0)
    os.dup2(tell, 1)
    sys.addaudithook(look)
    os._exit(pidlock.main(["-q", "-p", path, "-w", "inf", "--"] + COMMAND))


def read_word(pid, file, name):
    with open("/proc/%d/%s" % (pid, file)) as lines:
        return int(next(line.split()[1] for line in lines if line.startswith(name)))


def read_cpu(pid):
    with open("/proc/%d/stat" % pid) as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_story(length):
    story = ""
    while len(story) < length and select.select([report], [], [], 60)[0]:
        story += os.read(report, 1).decode()
    return story


holder = os.fork()
if holder == 0:  # an ancestor's lock would not be waited for
    with pidlock.PidLock(path):
        os.write(say_ready, b"r")
        os.read(go, 1)
    os._exit(0)
os.read(ready, 1)
pids = []
for _ in range(waiters):
    pid = os.fork()
    if pid == 0:
        wait_as_command()
    pids.append(pid)
left = waiters
while left:
    left -= len(os.read(ready, left))
before = sum(map(read_cpu, pids)), time.monotonic()
time.sleep(seconds)  # the span of the measurement
burnt, passed = sum(map(read_cpu, pids)) - before[0], time.monotonic() - before[1]
memory = sum(read_word(pid, "smaps_rollup", "Pss:") for pid in pids)
os.write(start, b"\n")
began = time.monotonic()
story = read_story(1)
for _ in range(turns):
    os.write(start, b"\n")
    story += read_story(2)
handing = time.monotonic() - began
if select.select([report], [], [], 0.2)[0]:
    story += " and " + os.read(report, 100).decode()
for pid in pids:
    os.kill(pid, signal.SIGTERM)
began = time.monotonic()
statuses = collections.Counter(str(os.WEXITSTATUS(os.waitpid(pid, 0)[1])) for pid in pids)
print(json.dumps({
    "waiters": waiters, "CPU of them all, of one": round(burnt / passed, 3),
    "memory of each in KiB": memory // waiters, "seconds for a turn": round(handing / turns, 3),
    "seconds until all had left": round(time.monotonic() - began, 2), "statuses": statuses, "story": story,
}))

"""What a lock has to do on every filesystem: env_battery.py DIRECTORY. It prints a JSON object {promise: outcome}."""
import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import pidlock  # noqa: E402

directory = sys.argv[1]
path = os.path.join(directory, "test.pid")
told = []


def ask():
    """Try to take the lock, and give it back; return the outcome in a word."""
    del told[:]
    lock = pidlock.PidLock(path, wait=0, on_event=lambda event: told.append(event["event"]))
    try:
        lock.acquire()
    except pidlock.LockHeld:
        return "held"
    return " ".join(told) if lock.release() else "lost"


def die_as_holder(child_lives):
    """Leave the file of a killed holder, and if so wished a child of it; return the child's lifeline."""
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        lock = pidlock.PidLock(path).acquire()
        if child_lives and os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        os._exit(0 if lock else 1)
    os.waitpid(holder, 0)
    os.close(reader)
    return writer


def write(body, age=0):
    with open(path, "w") as file:
        file.write(body)
    moment = os.stat(path).st_mtime - age
    os.utime(path, (moment, moment))


def lose(change):
    lock = pidlock.PidLock(path).acquire()
    change()
    return "released" if lock.release() else "lost"


def replace():
    os.unlink(path)
    write("another's\n")


results = {}
with pidlock.PidLock(path) as first:
    with open(path, "rb") as file:
        body = file.read()
    marks = {b"%d\n\n\n" % os.getpid(): "marked", b"%d\n" % os.getpid(): "unmarked"}
    results["the file is"] = marks.get(body, repr(body))
    results["a second one in the process"] = ask()
    child = os.fork()
    if child == 0:
        os._exit(0 if ask() == "held" else 1)
    results["another process"] = "held" if os.waitpid(child, 0)[1] == 0 else "not held"
results["free again"] = ask()
os.close(die_as_holder(False))
results["a killed holder's"] = ask()
lifeline = die_as_holder(True)
results["a killed holder's, while its child lives"] = ask()
os.close(lifeline)
with pidlock.PidLock(path, wait=30):
    results["when the child has ended"] = "acquired"
ended = os.fork()
if ended == 0:
    os._exit(0)
os.waitpid(ended, 0)
write("%d\n" % ended)
results["another program's, dead"] = ask()
write("%d\n" % os.getppid())
results["another program's, alive"] = ask()
write("garbage\n")
results["garbage, being written"] = ask()
write("garbage\n", age=60)
results["garbage, old"] = ask()
results["removed meanwhile"] = lose(lambda: os.unlink(path))
results["replaced meanwhile"] = lose(replace)
with open(path) as file:
    results["the other's file"] = file.read()
os.unlink(path)
deadline = time.monotonic() + 10
while any(name.startswith(".fuse_hidden") for name in os.listdir(directory)) and time.monotonic() < deadline:
    time.sleep(0.01)  # libfuse renames what is unlinked while it is open, and removes it soon after the close
results["left"] = os.listdir(directory)
print(json.dumps(results))

"""Contend for a lock when told to: fault_contenders.py MODULE, then `PATH<tab>MARKER<tab>LIMIT` on stdin for each time.

For 400 ms ten processes take the lock at PATH, or a slot of LIMIT, again and again, once at least, and create MARKER
while they hold it; it must not be there yet. Each time a line of JSON tells how they fared.
"""
import importlib.util
import json
import os
import sys
import time

spec = importlib.util.spec_from_file_location("pidlock", sys.argv[1])
pidlock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pidlock)


def contend(path, marker, limit):
    """Return a word for each time that somebody else was inside or removed the lock."""
    word = ""
    lock = pidlock.PidLock(path, wait=60, max_concurrent=int(limit))
    until = time.monotonic() + 0.4  # longer than the delay against which they contend
    while True:
        lock.acquire()
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            word += "overlap "
        time.sleep(0.020)
        try:
            os.unlink(marker)
        except FileNotFoundError:
            word += "overlap "
        if not lock.release():
            word += "lost "
        if time.monotonic() > until:
            return word
        time.sleep(0.002)


for line in sys.stdin:
    reader, writer = os.pipe()
    children = []
    for _ in range(10):
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, contend(*line.rstrip("\n").split("\t")).encode() + b"done\n")
            except BaseException as error:
                os.write(writer, ("%s: %s\n" % (type(error).__name__, error)).encode())
            finally:
                os._exit(0)
        children.append(child)
    os.close(writer)
    with open(reader) as answers:
        words = answers.read().splitlines()
    for child in children:
        os.waitpid(child, 0)
    print(json.dumps({"done": words.count("done"), "odd": [word for word in words if word != "done"]}), flush=True)

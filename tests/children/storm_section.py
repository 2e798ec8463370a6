"""The critical section of storm_chaos.py; as a command: storm_section.py DIRECTORY NAME LIMIT SECONDS LAUNCH EXTRA

Two detectors, independent of each other and of what pidlock uses. Occupancy: a record lock, fcntl(2), on one of a few
bytes; more than LIMIT that are taken, at its beginning or end, are an overlap. When a process dies the kernel frees its
record locks before its flocks, and no fork inherits them, so they tell who is inside whatever is killed. Lost updates:
a counter for each slot, read, and written back a moment later with its writer's name. What was read is logged before,
and that it is done behind it.
So the counter's writer names the one before it, and so on back to 0: who is done, but not in that chain, lost its
update; who is in it, but not done, was killed in between.

EXTRA: "fork" leaves a child behind that keeps running, "check" asks pidlock whether this lock is held.
"""
import fcntl
import os
import struct
import sys
import threading
import time
from collections import namedtuple

LIMITS = {"one": [1], "few": [2, 3], "removed": [1]}  # of the holders, by the kind of storm
MOST = 3
PATIENCE = 100  # seconds; a longer wait or run hangs

Files = namedtuple("Files", "directory log witness guard taken")


def open_files(directory):
    """Open the log and the witness of the occupants: anew in each process, for a close ends its record locks."""
    log = os.open(os.path.join(directory, "log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    witness = os.open(os.path.join(directory, "witness"), os.O_RDWR | os.O_CREAT)
    return Files(directory, log, witness, threading.Lock(), set())


def make_name():
    return int.from_bytes(os.urandom(7), "big")


def say(files, *words):
    # One write, which O_APPEND keeps whole; but a kill -9 between two pages cuts it: a new line, and a mark at the end.
    os.write(files.log, ("\n%s .\n" % " ".join(map(str, words))).encode())


def occupy(files):
    """Take the first free byte and return it, None when there is none."""
    with files.guard:  # record locks are the process's: among its threads the set decides
        for byte in sorted(set(range(MOST)) - files.taken):
            try:
                fcntl.lockf(files.witness, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except OSError:
                continue
            files.taken.add(byte)
            return byte
    return None


def count_occupants(files):
    """Return how many bytes are taken.

    Who comes takes the first free one, so that upwards none is counted that was not there together with the others.
    """
    with files.guard:
        return sum(byte in files.taken or is_locked(files.witness, byte) for byte in range(MOST))


def is_locked(witness, byte):
    flock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)  # fcntl(2): who would refuse it
    return struct.unpack("hhqqi", fcntl.fcntl(witness, fcntl.F_GETLK, flock))[0] != fcntl.F_UNLCK


def vacate(files, byte):
    with files.guard:
        files.taken.discard(byte)
        fcntl.lockf(files.witness, fcntl.LOCK_UN, 1, byte)


def read_counter(directory, slot):
    """Return (the descriptor of a slot's counter, its value, the name of its last writer)."""
    counter = os.open(os.path.join(directory, "counter.%d" % slot), os.O_RDWR | os.O_CREAT)
    value, writer = map(int, (os.pread(counter, 64, 0) or b"0 0").split())
    return counter, value, writer


def be_inside(files, name, slot, limit, token, seconds):
    byte = occupy(files)
    alone = byte is not None and count_occupants(files) <= limit
    counter, value, writer = read_counter(files.directory, slot)
    say(files, "read", name, slot, value, writer, token)
    time.sleep(seconds)
    os.pwrite(counter, b"%020d %020d\n" % (value + 1, name), 0)
    if not alone or count_occupants(files) > limit:
        say(files, "overlap", name)
    say(files, "done", name)
    os.close(counter)
    if byte is not None:
        vacate(files, byte)


def leave_child(seconds):
    if os.fork() == 0:
        time.sleep(seconds)
        os._exit(0)


def main(directory, name, limit, seconds, launch, extra):
    files = open_files(directory)
    if extra == "fork":
        leave_child(float(seconds) * 5)
    if extra == "check":
        arguments = [sys.executable, "-IS", "-c", launch, "--pidfile", os.environ["PIDLOCK_PIDFILE"], "--check"]
        if os.spawnv(os.P_WAIT, sys.executable, arguments) != 1:
            say(files, "unseen", name)
    token = int(os.environ.get("PIDLOCK_TOKEN", "0"))
    be_inside(files, int(name), int(os.environ["PIDLOCK_SLOT"]), int(limit), token, float(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])

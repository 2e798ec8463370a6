"""Take a lock, inspect it or sweep, and stop at audit events: race_stop_at.py MODULE PATH ACTION [STOP...]

An ACTION is acquire, inspect or sweep. A STOP is a trail of steps `EVENT` or `EVENT:TEXT` (a text in one of the event's
arguments); it stops at the last one, where it says `at EVENT` and reads a byte before it goes on. A holder says
`acquired` and reads one before it releases.
"""
import importlib.util
import os
import sys

source, path, action, *stops = sys.argv[1:]
spec = importlib.util.spec_from_file_location("pidlock", source)
pidlock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pidlock)
trails = [stop.split() for stop in stops]


def say(text, and_wait):
    os.write(1, text.encode() + b"\n")
    if and_wait and not os.read(0, 1):
        os._exit(1)  # the test is over


def follow_trail(event, arguments):
    if not trails:
        return
    name, _, text = trails[0][0].partition(":")
    if event in name.split("|") and any(text in str(argument) for argument in arguments):
        del trails[0][0]
        if not trails[0]:
            del trails[0]
            say("at " + event, and_wait=True)


sys.addaudithook(follow_trail)
try:
    if action == "inspect":
        say(pidlock.inspect(path).state, and_wait=False)
    elif action == "sweep":
        say(" ".join(["swept", *pidlock.sweep(os.path.dirname(path))]), and_wait=False)
    else:
        lock = pidlock.PidLock(path).acquire()
        say("acquired", and_wait=True)
        say("released" if lock.release() else "lost", and_wait=False)
except pidlock.LockHeld:
    say("held", and_wait=False)
except pidlock.PidLockError as error:
    say("error: %s" % error, and_wait=False)

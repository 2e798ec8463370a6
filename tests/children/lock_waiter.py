"""Wait for ever for the lock of argv[1]: print `waiting` at the second look, `acquired` when it is there; then end.

Further arguments, as TICK_FIRST=3600, set pidlock's constants; `no-pidfd` takes os.pidfd_open away.
"""
import fcntl
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import pidlock  # noqa: E402

looks = 0


def count_looks(event, args):
    global looks
    if event == "fcntl.flock" and args[1] & fcntl.LOCK_EX:
        looks += 1
        if looks == 2:
            print("waiting", flush=True)


for argument in sys.argv[2:]:
    if argument == "no-pidfd":
        del os.pidfd_open
    else:
        name, _, value = argument.partition("=")
        assert hasattr(pidlock, name)
        setattr(pidlock, name, float(value))
sys.addaudithook(count_looks)
with pidlock.PidLock(sys.argv[1], wait=float("inf")):
    print("acquired", flush=True)

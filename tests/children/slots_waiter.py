"""Wait for a slot, woken by nothing but pidfds: slots_waiter.py PATH LIMIT. It says `slot K` when it has one."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import pidlock  # noqa: E402

pidlock.TICK_FIRST = pidlock.TICK_MAX = pidlock.TICK_WATCHED = 3600.0
with pidlock.PidLock(sys.argv[1], wait=float("inf"), max_concurrent=int(sys.argv[2])) as lock:
    print("slot %d" % lock.slot, flush=True)

"""Run pidlock.main(), and act once when an audit event comes for the first time.

signals_at_event.py EVENT[|EVENT...]=TEXT ACTION ARGUMENTS: TEXT is part of the event's first argument. ACTION is the
number of a signal that pidlock then gets, or `ctrl-c`: say `press`, and go on when the terminal's SIGINT has come.
"""
import os
import pathlib
import signal
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
events, _, text = sys.argv[1].partition("=")
action = sys.argv[2]
pidlock_pid = os.getpid()
done = []


def act():
    if action != "ctrl-c":
        os.kill(pidlock_pid, int(action))
        return
    os.write(1, b"press\n")
    deadline = time.monotonic() + 30
    while signal.SIGINT not in signal.sigpending():
        if time.monotonic() > deadline:
            os._exit(99)
        time.sleep(0.001)


def hook(event, args):
    if not done and event in events.split("|") and text in str(args[0] if args else ""):
        done.append(event)
        act()


sys.path.insert(0, str(ROOT))
import pidlock  # noqa: E402

sys.argv[:] = ["pidlock"] + sys.argv[3:]
sys.addaudithook(hook)
sys.exit(pidlock.main())

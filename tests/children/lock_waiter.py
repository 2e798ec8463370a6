"""Wait for ever for the lock of argv[1]: print `waiting` at the second look, `acquired` when it is there; then end.

Further arguments: `no-timer` makes each tick an hour, `no-pidfd` takes os.pidfd_open away, `no-watch` takes inotify,
`pause-before-watch` says `watching` before it watches the file first, and waits for a line.
"""
import fcntl
import os
import sys
import types

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import pidlock  # noqa: E402

looks = 0


def count_looks(event, args):
    global looks
    if event == "fcntl.flock" and args[1] & fcntl.LOCK_EX:
        looks += 1
        if looks == 2:
            print("waiting", flush=True)


def pause_before(open_watch):
    def open_slowly():
        def add(*arguments):
            if not said:
                said.append(print("watching", flush=True))
                sys.stdin.readline()
            return watch.libc.inotify_add_watch(*arguments)

        said = []
        watch = open_watch()
        return watch._replace(libc=types.SimpleNamespace(inotify_add_watch=add))

    return open_slowly


for argument in sys.argv[2:]:
    if argument == "no-pidfd":
        del os.pidfd_open
    elif argument == "no-watch":
        assert pidlock._open_watch()
        pidlock._open_watch = lambda: None
    elif argument == "pause-before-watch":
        pidlock._open_watch = pause_before(pidlock._open_watch)
    else:
        assert argument == "no-timer" and pidlock.TICK_FIRST < pidlock.TICK_MAX < pidlock.TICK_WATCHED
        pidlock.TICK_FIRST = pidlock.TICK_MAX = pidlock.TICK_WATCHED = 3600.0
sys.addaudithook(count_looks)
with pidlock.PidLock(sys.argv[1], wait=float("inf")):
    print("acquired", flush=True)

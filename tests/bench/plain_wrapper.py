#!/usr/bin/env python3
"""Run a command unless it runs already: the wrapper that most would write, and a careful one of its kind.

pidlock is measured against it. It is no model: two contenders that find a stale file can delete each other's lock,
and a recycled PID keeps the job out for ever.
"""
import argparse
import os
import signal
import subprocess
import sys


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def take(path):
    """Create the pidfile, in place of one whose process is gone; return False while that one lives."""
    while True:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            try:
                with open(path) as file:
                    pid = int(file.read())
            except (FileNotFoundError, ValueError):
                return False
            if is_alive(pid):
                return False
            os.unlink(path)
            continue
        os.write(descriptor, b"%d\n" % os.getpid())
        os.close(descriptor)
        return True


def main():
    parser = argparse.ArgumentParser(description="Run a command unless it runs already.")
    parser.add_argument("--pidfile", required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if not take(options.pidfile):
        print("%s: held" % options.pidfile, file=sys.stderr)
        return 75
    try:
        process = subprocess.Popen(options.command)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: process.send_signal(number))
        status = process.wait()
        return 128 - status if status < 0 else status
    finally:
        os.unlink(options.pidfile)


if __name__ == "__main__":
    sys.exit(main())

"""Hand-off: from one holder's release to the next one's start, and what waiting for it costs meanwhile."""
import contextlib
import os
import random
import struct
import subprocess
import threading
import time

from measure import ENVIRONMENT, Figure, Holder, Missing, bind, fork, interleave, new_path, reap
from peers import find, install_pidlock, waiting_commands, waiting_locks
from waiting import measure_cpu

HOLD = (0.02, 0.06)  # seconds that a holder has it while the other waits: of no fixed phase to anybody's timer
HOLD_COMMAND = (0.06, 0.11)  # a command has to start before it waits
STAMP = "date +%s%N"  # the smallest program that knows the time to the nanosecond
FLOCK = "blocking flock"
FLOCK_COMMAND = "flock(1)"
WAIT, END = b"w", b"e"  # what a waiter is told


def run(scale, make_directory):
    commands = waiting_commands(install_pidlock(make_directory()))
    figures = {
        "threads": Figure("from release to acquire, between threads", "us", FLOCK),
        "processes": Figure("from release to acquire, between processes", "us", FLOCK),
        "commands": Figure("from command to command (`date` itself included)", "ms", FLOCK_COMMAND),
    }
    for key, start_waiter in (("threads", start_thread), ("processes", start_process)):
        with contextlib.ExitStack() as stack:
            pairs = {name: make if isinstance(make, Missing)
                     else Pair(make, new_path(make_directory()), start_waiter, stack)
                     for name, make in waiting_locks().items()}
            interleave(figures[key], bind(pairs, Pair.hand_off), scale.rounds)
    interleave(figures["commands"], bind(commands, lambda words: hand_off_command(words(new_path(make_directory())))),
               scale.rounds)
    for key, waiters in (("cpu_of_one", 1), ("cpu_of_many", scale.crowd)):
        whose = "one waiter" if waiters == 1 else "each of %d waiters" % waiters
        figures[key] = Figure("CPU of %s in %g s" % (whose, scale.span), "ms")
        measure_cpu(figures[key], commands, make_directory, waiters, scale.span)
    return figures


# ---- The library ----


class Pair:
    """A holder, which is we, and a waiter, a thread or a process, that goes on until the stack is left."""

    def __init__(self, make_lock, path, start_waiter, stack):
        self._lock = make_lock(path)
        orders, self._order = os.pipe()
        self._reports, report = os.pipe()
        for descriptor in (orders, self._order, self._reports, report):
            stack.callback(os.close, descriptor)
        stack.callback(start_waiter(lambda: wait_in_turns(make_lock(path), orders, report)))
        stack.callback(os.write, self._order, END)

    def hand_off(self):
        """Return how many microseconds pass from our release to the waiter's acquire."""
        self._lock.acquire()
        try:
            os.write(self._order, WAIT)
            os.read(self._reports, 1)
            time.sleep(random.uniform(*HOLD))
        finally:
            let_go = time.monotonic_ns()
            self._lock.release()
        (got,) = struct.unpack("q", os.read(self._reports, 8))
        return (got - let_go) / 1e3


def wait_in_turns(lock, orders, report):
    """At each order say that we are about to wait, wait, and report when we got the lock."""
    while os.read(orders, 1) == WAIT:
        os.write(report, WAIT)
        lock.acquire()
        got = time.monotonic_ns()
        lock.release()
        os.write(report, struct.pack("q", got))


def start_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread.join


def start_process(function):
    pid = fork(function)
    return lambda: reap([pid])


# ---- Commands ----


def hand_off_command(lock_command):
    """Return how many milliseconds pass from the last act of the holder's command to the first of the waiter's."""
    holder = Holder(lock_command, "exec " + STAMP)
    waiter = subprocess.Popen([*lock_command, find("date"), "+%s%N"], stdout=subprocess.PIPE, env=ENVIRONMENT)
    time.sleep(random.uniform(*HOLD_COMMAND))
    let_go, got = int(holder.finish()), int(waiter.communicate()[0])
    return (got - let_go) / 1e6

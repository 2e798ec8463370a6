"""The library: acquire and release where nobody else is, against other libraries and the bare system calls."""
import contextlib
import os
import time

from bare import Bare, trace
from measure import Figure, Missing, bind, directories, filesystem_of, interleave, new_path
from peers import LIBRARIES, library, pidlock

BASELINE = "bare system calls"
CYCLES = 50  # of each contender in a round
ROUNDS = 50
TMPFS = "/dev/shm"


def run(scale, make_directory):
    with contextlib.ExitStack() as stack:
        places = {"disk": make_directory(), "tmpfs": Missing("no tmpfs at %s" % TMPFS)}
        if os.path.isdir(TMPFS) and filesystem_of(TMPFS) == "tmpfs":
            places["tmpfs"] = stack.enter_context(directories(TMPFS))()
        figures = {
            "disk": Figure("acquire + release on %s" % filesystem_of(places["disk"]), "us", BASELINE),
            "tmpfs": Figure("acquire + release on tmpfs", "us", BASELINE),
        }
        for key, figure in figures.items():
            interleave(figure, bind(make_locks(places[key]), time_cycles), min(ROUNDS, scale.rounds))
    return figures


def make_locks(place):
    makers = {"pidlock": pidlock.PidLock, BASELINE: Bare, **{name: library(name) for name in LIBRARIES}}
    if isinstance(place, Missing):
        return dict.fromkeys(makers, place)
    return {name: make if isinstance(make, Missing) else make(new_path(place)) for name, make in makers.items()}


def time_cycles(lock, cycles=CYCLES):
    """Return how many microseconds one of so many cycles takes."""
    acquire, release = lock.acquire, lock.release
    began = time.perf_counter_ns()
    for _ in range(cycles):
        acquire()
        release()
    return (time.perf_counter_ns() - began) / cycles / 1e3


def compare_calls(make_directory):
    """Tell whether the bare system calls are those that pidlock makes: True, False, None where strace is missing."""
    calls = trace(make_directory())
    return calls and calls[0] == calls[1]

"""Contention: many processes that all want one lock all the time, and a busy queue with work inside; no overlaps."""
import mmap
import os
import time

from measure import Figure, Missing, bind, fork, interleave, new_path, reap
from peers import waiting_locks

BASELINE = "blocking flock"
ROUNDS = 5
WORK = 0.002  # seconds inside, and outside, in the busy queue
INSIDE, COUNTER, PER_PROCESS = 0, 1, 2  # words of the shared memory: who is inside, how often somebody was, and
OVERLAPS, BEGAN, ENDED, WORDS = 0, 1, 2, 3  # for each process


def run(scale, make_directory):
    directory = make_directory()
    storm, queue = scale.storm, scale.queue
    ideal = queue[0] * queue[1] * WORK
    figures = {
        "storm": Figure("%d processes x %d cycles: all of it" % storm, "s", BASELINE),
        "queue": Figure("busy queue %d x %d, 2 ms in, 2 ms out, ideal %.2f s" % (*queue, ideal), "s", BASELINE),
        "queue_of_ideal": Figure("busy queue against its ideal", "x"),
        "overlaps": Figure("overlaps and lost updates in all of these", ""),
    }
    for key, sizes, work in (("storm", storm, 0), ("queue", queue, WORK)):
        contenders = {name: make if isinstance(make, Missing) else Contenders(make, new_path(directory), *sizes, work)
                      for name, make in waiting_locks().items()}
        interleave(figures[key], bind(contenders, Contenders.run), min(ROUNDS, scale.rounds), warm=False)
        for name, them in contenders.items():
            if isinstance(them, Missing):
                figures["overlaps"].missing[name] = str(them)
            else:
                figures["overlaps"].add(name, them.overlaps)
    figures["queue_of_ideal"].missing = figures["queue"].missing
    figures["queue_of_ideal"].samples = {name: [seconds / ideal for seconds in samples]
                                         for name, samples in figures["queue"].samples.items()}
    return figures


class Contenders:
    """So many processes that each go through so many cycles on one lock, with so many seconds' work in and outside."""

    def __init__(self, make_lock, path, processes, cycles, work):
        self._make_lock = make_lock
        self._path = path
        self._processes = processes
        self._cycles = cycles
        self._work = work
        self.overlaps = 0  # in all runs: how often two were inside at once, or an update was lost

    def run(self):
        """Start them all together; return how many seconds it takes from the first start to the last end."""
        words = memoryview(mmap.mmap(-1, 8 * (PER_PROCESS + WORDS * self._processes))).cast("q")
        ready, say_ready = os.pipe()
        go, say_go = os.pipe()
        pids = [fork(lambda number=number: self._contend(number, words, say_ready, go))
                for number in range(self._processes)]
        for _ in pids:
            os.read(ready, 1)
        os.write(say_go, b"g" * self._processes)
        if any(reap(pids)):
            raise RuntimeError("%s: a contender failed" % self._path)
        for descriptor in (ready, say_ready, go, say_go):
            os.close(descriptor)
        overlaps, began, ended = (list(words[PER_PROCESS + word::WORDS]) for word in (OVERLAPS, BEGAN, ENDED))
        self.overlaps += sum(overlaps) + self._processes * self._cycles - words[COUNTER]
        return (max(ended) - min(began)) / 1e9

    def _contend(self, number, words, say_ready, go):
        overlaps, began, ended = (PER_PROCESS + WORDS * number + word for word in (OVERLAPS, BEGAN, ENDED))
        lock = self._make_lock(self._path)
        os.write(say_ready, b"r")
        os.read(go, 1)
        words[began] = time.monotonic_ns()
        for _ in range(self._cycles):
            lock.acquire()
            words[overlaps] += words[INSIDE] != 0
            words[INSIDE] = number + 1
            value = words[COUNTER]
            self._do_work()
            words[COUNTER] = value + 1
            words[overlaps] += words[INSIDE] != number + 1
            words[INSIDE] = 0
            lock.release()
            self._do_work()
        words[ended] = time.monotonic_ns()

    def _do_work(self):
        if self._work:
            time.sleep(self._work)

"""A storm of processes over one lock: stress_storm.py MODULE DIRECTORY SCENARIO ROUNDS CYCLES DEADLINE

All are forked once, and start each round together from SCENARIO: nothing, or a marked or unmarked stale pidfile. In a
round each asks for the lock CYCLES times; from nothing, until it has had it so often. It ends after ROUNDS; with a
DEADLINE (seconds, else 0) then, or once both detectors have noticed an overlap. The figures are printed as JSON.

The detectors, independent of each other: a marker file that must not be there yet (occupancy), and a counter that is
read, and written back a moment later (lost updates).
"""
import importlib.util
import json
import multiprocessing
import os
import sys
import time

PROCESSES = 8
source, directory, scenario, rounds, cycles, seconds = sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:])
spec = importlib.util.spec_from_file_location("pidlock", source)
pidlock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pidlock)
path, inside, counter = (os.path.join(directory, name) for name in ("storm.pid", "inside", "counter"))

context = multiprocessing.get_context("fork")
ready, go = (context.Barrier(PROCESSES, timeout=600) for _ in range(2))
over, overlapped = context.Event(), context.Event()
acquired, rounds_done = context.Value("l", 0), context.Value("l", 0)
figures = context.Queue()


def read_counter():
    with open(counter) as file:
        return int(file.read())


def write_counter(value):
    with open(counter + ".new%d" % os.getpid(), "w") as file:
        file.write("%d" % value)
    os.rename(file.name, counter)  # so that an overlap loses an update and never shows an empty file


def do_alone():
    """Be inside for a moment; return whether somebody else was there."""
    try:
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        alone = True
    except FileExistsError:
        alone = False
    value = read_counter()
    time.sleep(0.0002)
    write_counter(value + 1)
    if alone:
        os.unlink(inside)
    return not alone


def prepare():
    """What each round starts from."""
    if scenario != "nothing":
        dead = context.Process(target=int)
        dead.start()
        dead.join()
        with open(path, "w") as file:
            file.write("%d\n%s" % (dead.pid, "\n\n" if scenario == "marked" else ""))


def work(number):
    try:
        figures.put(contend(number))
    except Exception as error:
        figures.put({"error": "%s: %s" % (type(error).__name__, error)})
        ready.abort()
        go.abort()


def contend(number):
    """Go through all rounds; return this process's figures."""
    result = dict.fromkeys(["acquired", "held", "overlaps", "released_lost", "barren_rounds"], 0)
    # From nothing half of them wait, and half of them ask again.
    lock = pidlock.PidLock(path, wait=60 if scenario == "nothing" and number % 2 else 0)
    while not over.is_set():
        before = acquired.value
        if ready.wait() == 0:
            prepare()
            rounds_done.value += 1
        go.wait()
        done = 0
        while done < cycles:
            try:
                lock.acquire()
            except pidlock.LockHeld:
                result["held"] += 1
                done += scenario != "nothing"
                time.sleep(0.001)
                continue
            done += 1
            with acquired.get_lock():
                acquired.value += 1
            if do_alone():
                result["overlaps"] += 1
                overlapped.set()
            result["acquired"] += 1
            result["released_lost"] += not lock.release()
        if ready.wait() == 0:  # all are between two barriers
            result["barren_rounds"] += acquired.value == before
            noticed = overlapped.is_set() and acquired.value != read_counter()
            if time.monotonic() > began + seconds or noticed if seconds else rounds_done.value == rounds:
                over.set()
        go.wait()
    return result


write_counter(0)
began = time.monotonic()
workers = [context.Process(target=work, args=(number,)) for number in range(PROCESSES)]
for worker in workers:
    worker.start()
results = [figures.get(timeout=3600) for _ in workers]
for worker in workers:
    worker.join()
print(json.dumps(dict(
    {name: sum(result.get(name, 0) for result in results) for name in results[0]},
    rounds=rounds_done.value,
    lost_updates=acquired.value - read_counter(),
    errors=[result["error"] for result in results if "error" in result],
    left=[name for name in os.listdir(directory) if not name.startswith("counter")],
    seconds=round(time.monotonic() - began, 1),
)))

"""A storm over one semaphore with mixed limits: slots_storm.py MODULE PATH CYCLES. The figures are printed as JSON.

The occupancy detector is a table in shared memory of who is inside, under which limit: never more than the smallest.
"""
import importlib.util
import json
import multiprocessing
import os
import random
import sys
import time

LIMITS = [5, 5, 5, 3, 3, 2]  # one process each
source, path, cycles = sys.argv[1], sys.argv[2], int(sys.argv[3])
spec = importlib.util.spec_from_file_location("pidlock", source)
pidlock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pidlock)

context = multiprocessing.get_context("fork")
inside = context.Array("i", len(LIMITS))
most, excesses, lost = (context.Value("i", 0) for _ in range(3))


def work(number):
    chance = random.Random(number)
    lock = pidlock.PidLock(path, max_concurrent=LIMITS[number])
    done = 0
    while done < cycles:
        try:
            lock.acquire()
        except pidlock.LockHeld:
            time.sleep(chance.uniform(0, 0.002))
            continue
        done += 1
        with inside.get_lock():
            inside[number] = LIMITS[number]
            limits = [limit for limit in inside if limit]
            most.value = max(most.value, len(limits))
            excesses.value += len(limits) > min(limits)
        time.sleep(chance.uniform(0, 0.002))
        with inside.get_lock():
            inside[number] = 0
        if not lock.release():
            lost.value += 1


workers = [context.Process(target=work, args=(number,)) for number in range(len(LIMITS))]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
print(json.dumps({
    "most": most.value, "excesses": excesses.value, "lost": lost.value, "statuses": [one.exitcode for one in workers],
    "left": os.listdir(os.path.dirname(path)),
}))

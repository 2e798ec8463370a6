"""The library's holders of storm_chaos.py: storm_holders.py MODULE DIRECTORY KIND SEED COUNT

So many are kept alive, whom the storm kills, until standard input ends. One in three holds in two threads, and one in
three forks children that keep running, and with them the flock when it is killed.
"""
import importlib
import os
import random
import select
import signal
import sys
import threading
import time
import traceback

from storm_section import LIMITS, PATIENCE, be_inside, leave_child, make_name, open_files, say

source, directory, kind, seed, count = sys.argv[1:]
sys.path.insert(0, os.path.dirname(source))
pidlock = importlib.import_module("pidlock")
path, stop = os.path.join(directory, "locks", "storm.pid"), os.path.join(directory, "stop")


def hold_often(chance, files, forks):
    """Hold the lock time and again, until the storm is over."""
    while not os.path.exists(stop):
        name, limit, wait = make_name(), chance.choice(LIMITS[kind]), chance.choice([0, PATIENCE])
        lock = pidlock.PidLock(
            path, wait, max_concurrent=limit, details=kind == "removed" or chance.random() < 0.3, trace_id=str(name),
            fence=chance.random() < 0.5, on_event=lambda event: notice_eviction(event, files),
        )
        try:
            lock.acquire()
        except pidlock.LockHeld:
            if wait:
                say(files, "starved", name)
            time.sleep(chance.uniform(0, 0.005))
            continue
        if forks and chance.random() < 0.2:
            leave_child(chance.uniform(0, 0.03))
        slot_path = path if lock.slot == 1 else "%s.%d" % (path, lock.slot)
        if kind != "removed" and chance.random() < 0.2 and pidlock.inspect(slot_path).state != "held":
            say(files, "unseen", name)
        be_inside(files, name, lock.slot, limit, lock.token or 0, chance.uniform(0, 0.004))
        say(files, "released" if lock.release() else "lost", name)
        time.sleep(chance.uniform(0, 0.01))


def notice_eviction(event, files):
    if event["event"] == "evicted":
        say(files, "evicted", make_name())


def live(number):
    """Be a holder."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the children that it leaves need no wait
    files = open_files(directory)
    chances = [random.Random("%s holder %d.%d" % (seed, number, thread)) for thread in range(2)]
    if number % 3:
        hold_often(chances[0], files, number % 3 == 1)
        return
    threads = [threading.Thread(target=hold_often, args=(chance, files, False)) for chance in chances]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def start(number):
    """Fork the holder of this number; return its PID."""
    pid = os.fork()
    if pid == 0:
        try:
            live(number)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid


alive, number, over = set(), 0, False
while alive or not over:
    while not over and len(alive) < int(count):
        number += 1
        alive.add(start(number))
    if not over and select.select([0], [], [], 0.01)[0]:
        over = True
        open(stop, "w").close()
    pid = os.waitpid(-1, 0 if over else os.WNOHANG)[0]
    alive.discard(pid)

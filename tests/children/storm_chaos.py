"""A storm of all that happens to a lock, at once: storm_chaos.py MODULE DIRECTORY KIND SEED ROUNDS SECONDS

Contenders (pidlocks around storm_section.py, and storm_holders.py) want one lock. Tormentors kill -9 pidlocks, their
commands, both, and the library's holders; sweep, probe, and read the file. KIND: "one" is a lock, "few" a semaphore
with mixed limits, "removed" a lock whose file they also remove by hand, so that a second holder is legitimate there.

It ends after ROUNDS of each contender and SECONDS, when each torment has been done. Printed as JSON: the figures, how
often there was which fault, and the first of each.

Only what is surely ours is killed, by a pidfd: a process that we have started and not reaped, or its child.
"""
import collections
import concurrent.futures
import fcntl
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

from storm_account import review
from storm_section import LIMITS, PATIENCE, make_name, open_files, say

CONTENDERS, HOLDERS, TORMENTORS = 4, 6, 2
SECTION, HOLDERS_SCRIPT = (os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
                           for name in ("storm_section.py", "storm_holders.py"))
BODY = re.compile(rb"[1-9][0-9]*\n\n\n(limit=[0-9]+\n)?"
                  rb"(host=.*\n([a-z_]+=.*\n)+# debug\n([a-z_]+=.*\n)+trace_id=[0-9]+\n)?")
LOST = "lost: the file was removed or replaced while the command ran; find out who did that"
SAID = r"took over a stale file: PID \d+ is no longer behind it|acquired by PID \d+|released after \d+s"
REFUSED = r"(held|busy|as many as may hold it do)\b.*"

Run = collections.namedtuple("Run", "pid pidfd kills")

source, directory, kind, seed, rounds, seconds = sys.argv[1:]
sys.path.insert(0, os.path.dirname(source))
pidlock = importlib.import_module("pidlock")
# As `make install` starts it: compiled beforehand.
launch = "import sys; sys.path.insert(0, %r); import pidlock; pidlock.run_as_process()" % os.path.dirname(source)
locks = os.path.join(directory, "locks")
path = os.path.join(locks, "storm.pid")
paths = [path] + ["%s.%d" % (path, slot) for slot in range(2, max(LIMITS[kind]) + 1)]
over, guard = threading.Event(), threading.Lock()
runs, killed = {}, {}  # what is not reaped yet, by name; when it was killed, by PID
rounds_done, counts = [0] * CONTENDERS, collections.Counter()
faults = collections.defaultdict(list)


def notice(fault, *what):
    faults[fault].append(" ".join(map(str, what)))


# The contenders.


def start(*arguments):
    command = [sys.executable, "-IS", "-c", launch, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def contend(number):
    chance = random.Random("%s contender %d" % (seed, number))
    while not over.is_set():
        run_once(chance)
        rounds_done[number] += 1


def run_once(chance):
    """Run a section under a pidlock; see that its status and what it said are what was done to it."""
    name, limit, patient = make_name(), chance.choice(LIMITS[kind]), chance.random() < 0.8
    options = ["--max-concurrent", limit] if limit > 1 else []
    options += ["--wait", PATIENCE] if patient else []
    options += ["--details", "--trace-id", name] if kind == "removed" or chance.random() < 0.3 else []
    options += [word for word in ("--fence", "--group", "--verbose") if chance.random() < 0.5]
    extra = chance.choice(["none"] * 6 + ["fork", "none" if kind == "removed" else "check"])
    section = [sys.executable, "-IS", SECTION, directory, name, limit, chance.uniform(0, 0.01), launch, extra]
    process = start("--pidfile", path, *options, "--", *section)
    run = runs[name] = Run(process.pid, os.pidfd_open(process.pid), set())
    try:
        output = process.communicate(timeout=2 * PATIENCE)[0].decode()  # ends when a killed pidlock's command has, too
    finally:
        with guard:  # nobody is about to use the pidfd
            del runs[name]
        os.close(run.pidfd)
    statuses = {0} | ({-9} if "wrapper" in run.kills else set()) | ({137} if "command" in run.kills else set())
    statuses |= set() if patient else {75}
    refused = not patient and process.returncode in (75, -9)  # -9: killed when it had said so
    said = [SAID] + ([REFUSED] if refused else []) + ([LOST] if kind == "removed" else [])
    if process.returncode not in statuses or not is_said(output, "|".join(said)):
        notice("outcomes", options, extra, run, process.returncode, output)
    for _ in range(output.count("took over")):
        say(files, "evicted", make_name())
    if LOST in output or process.returncode in (0, 137):
        say(files, "lost" if LOST in output else "released", name)


def is_said(output, pattern):
    """Tell whether all of this is lines of pidlock's about the lock, and what they say of this pattern."""
    return re.fullmatch("(pidlock: %s: (%s)\n)*" % (re.escape(path), pattern), output) is not None


# The torments: each returns whether there was anything to do.


def torment(number):
    chance = random.Random("%s tormentor %d" % (seed, number))
    while not over.wait(chance.uniform(0, 0.03)):
        name = chance.choices(list(TORMENTS), [weight for weight, _ in TORMENTS.values()])[0]
        try:
            done = TORMENTS[name][1](chance)
        except pidlock.PidLockError as error:
            notice("outcomes", name, error)
        else:
            with guard:
                counts[name] += done


def pid_in(name):
    try:
        with open(name) as file:
            return int(file.readline() or 0)
    except FileNotFoundError:
        return 0


def choose(chance, pids):
    """Choose one of these PIDs, mostly of those that hold the lock; 0 where there is none."""
    holding = set(map(pid_in, paths)).intersection(pids)
    return chance.choice(sorted(holding if chance.random() < 0.9 else pids) or [0])


def kill_wrapper(chance):
    return kill_run(chance, "wrapper")


def kill_command(chance):
    return kill_run(chance, "command")


def kill_both(chance):
    return kill_run(chance, "wrapper", "command")


def kill_run(chance, *victims):
    with guard:
        by_pid = {run.pid: run for run in runs.values()}
        run = by_pid.get(choose(chance, by_pid))
        child = open_child(run.pid, run.pidfd, min) if run and "command" in victims else None
        if run is None or ("command" in victims and child is None):
            return False
        run.kills.update(victims)
        if "wrapper" in victims:
            kill(run.pid, run.pidfd)
        if child is not None:
            kill(*child)
            os.close(child[1])
        return True


def kill_holder(chance):
    child = open_child(holders.pid, holders_pidfd, lambda pids: choose(chance, pids))
    if child is None:
        return False
    kill(*child)
    os.close(child[1])
    return True


def open_child(pid, pidfd, choose_one):
    """Return (PID, pidfd) of a child of this process of ours, None where there is none."""
    try:
        with open("/proc/%d/task/%d/children" % (pid, pid)) as file:
            children = [int(word) for word in file.read().split()]
        child = choose_one(children) if children else 0
        opened = os.pidfd_open(child) if child else None
    except OSError:
        return None
    if not child:
        return None
    try:
        with open("/proc/%d/stat" % child) as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
        signal.pidfd_send_signal(pidfd, 0)  # not reaped: so that PID was our process's all the time, and its child's
        if parent == pid:
            return child, opened
    except OSError:
        pass  # one of them has ended
    os.close(opened)
    return None


def kill(pid, pidfd):
    killed[pid] = time.time()
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended


def sweep(chance):
    """Sweep, by the command or the library; what was swept is ours."""
    if chance.random() < 0.3:
        process = start("--sweep", locks)
        swept = process.communicate(timeout=PATIENCE)[0].decode().splitlines()
        status = process.returncode
    else:
        swept, status = pidlock.sweep(locks), 0
    private = re.escape(os.path.join(locks, ".pidlock-")) + "[0-9a-f]{16}"
    if status or not all(name in paths or re.fullmatch(private, name) for name in swept):
        notice("outcomes", "a sweep", status, swept)
    return True


def probe(chance):
    """Ask whether it is held, by the command or the library; there always is an answer."""
    how = chance.choice(["--check", "--status", "inspect", "inspect", "active_pid"])
    if how == "inspect":
        answer = pidlock.inspect(chance.choice(paths)).state
        fine = answer in ("free", "held", "stale")
    elif how == "active_pid":
        answer = pidlock.active_pid(path)
        fine = answer[0] > 0 or answer == (0, False)
    else:
        probing = ["--check"] if how == "--check" else ["--status", "--json"]
        process = start("--pidfile", path, "--max-concurrent", chance.choice(LIMITS[kind]), *probing)
        output = process.communicate(timeout=PATIENCE)[0].decode()
        answer = process.returncode, output
        if how == "--check":
            fine = answer in ((0, ""), (1, ""))
        else:
            fine = {"held": 0, "stale": 1, "free": 3}[json.loads(output)["state"]] == answer[0]
    if not fine:
        notice("answers", how, answer)
    return True


def read(chance):
    """Read a file: it is complete; and whose flock is free is that of a holder that was killed."""
    try:
        descriptor = os.open(chance.choice(paths), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        body, status = os.read(descriptor, 65536), os.fstat(descriptor)
        if not BODY.fullmatch(body):
            notice("incomplete", body)
            return True
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        stands = any(os.path.exists(name) and os.path.samestat(os.stat(name), status) for name in paths)
        if stands and killed.get(int(body.split()[0]), 0) + 1 < status.st_mtime:  # + 1: a file's clock is another
            notice("unvouched", body)
    except (BlockingIOError, FileNotFoundError):
        pass  # it has somebody behind it; or it went while we looked
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a close alone would leave it with what is being forked
        os.close(descriptor)
    return True


def remove(chance):
    """Remove the file as `rm` does, but in a way that tells whose it was."""
    number, aside = make_name(), os.path.join(directory, "aside.%d" % threading.get_ident())
    say(files, "removing", number)
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return False
    with open(aside) as file:
        say(files, "removed", int(file.read().rpartition("trace_id=")[2]), number)
    os.unlink(aside)
    return True


TORMENTS = {  # name: (weight, what to do)
    "kill_wrapper": (4, kill_wrapper), "kill_command": (4, kill_command), "kill_both": (5, kill_both),
    "kill_holder": (12, kill_holder), "sweeps": (4, sweep), "probes": (4, probe), "reads": (8, read),
}
if kind == "removed":
    TORMENTS["rms"] = (8, remove)


# The course of the storm.


def is_over():
    enough = time.monotonic() - began > float(seconds) and min(rounds_done) >= int(rounds)
    return enough and all(counts[name] for name in TORMENTS)


def let_loose():
    """Let them all at it until it is over; raise what one of them raised."""
    with concurrent.futures.ThreadPoolExecutor(CONTENDERS + TORMENTORS) as pool:
        futures = [pool.submit(contend, number) for number in range(CONTENDERS)]
        futures += [pool.submit(torment, number) for number in range(TORMENTORS)]
        while not is_over() and not any(future.done() for future in futures):
            time.sleep(0.05)
        over.set()
        for future in futures:
            future.result()


def look_after():
    """See that nothing is left that the next run, then one sweep, does not put right."""
    process = start("--pidfile", path, "--wait", 10, "--", "true")  # the kernel may still be ending what was killed
    output = process.communicate(timeout=PATIENCE)[0].decode()
    if process.returncode or not is_said(output, SAID):
        notice("outcomes", "the next run", process.returncode, output)
    for name in os.listdir(locks):
        if name.startswith(".pidlock-"):
            os.utime(os.path.join(locks, name), (0, 0))  # a sweep spares young ones
    start("--sweep", locks).communicate(timeout=PATIENCE)
    left = set(os.listdir(locks)) - {"storm.pid.fence"}
    if left:
        notice("left", *sorted(left))


began = time.monotonic()
os.mkdir(locks)
files = open_files(directory)
arguments = [source, directory, kind, seed, HOLDERS]
holders = subprocess.Popen([sys.executable, HOLDERS_SCRIPT, *map(str, arguments)], stdin=subprocess.PIPE,
                           stderr=subprocess.PIPE)
holders_pidfd = os.pidfd_open(holders.pid)
try:
    let_loose()
finally:
    stderr = holders.communicate(timeout=PATIENCE)[1].decode()  # ends when all that they have forked has
if stderr:
    notice("outcomes", "the holders said", stderr)
look_after()
figures, found = review(directory, kind == "removed")
faults.update(found)
figures.update(counts, runs=sum(rounds_done), seconds=round(time.monotonic() - began, 1))
print(json.dumps({
    "figures": figures, "faults": {fault: len(what) for fault, what in faults.items() if what},
    "examples": {fault: what[:3] for fault, what in faults.items() if what},
}))

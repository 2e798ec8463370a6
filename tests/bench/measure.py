"""What the sections share: figures with medians and paired ratios, rounds, and what a process costs."""
import collections
import contextlib
import ctypes
import functools
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
import traceback

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}  # no shims, nobody's PYTHONPATH
PR_SET_CHILD_SUBREAPER = 36

# rounds: at most so many of each measurement. names, waiters, slots: the sizes of the growth section. crowd: waiters
# whose CPU is measured, for span seconds. storm, queue: processes and cycles of the contention section.
Scale = collections.namedtuple("Scale", "rounds names waiters slots crowd span storm queue")
FULL = Scale(100, (1, 10, 100, 1000), (1, 10, 100, 300), (1, 4, 16, 64), 100, 10.0, (16, 200), (16, 25))
SMALL = Scale(2, (1, 10), (1, 4), (1, 4), 4, 0.2, (4, 10), (4, 5))


class Missing(str):
    """Stands for a contender that is not there; says why."""


class Figure:
    """One quantity of several contenders: samples by name, one per round, so that those of two names pair up."""

    def __init__(self, title, unit, baseline=None):
        self.title = title
        self.unit = unit
        self.baseline = baseline
        self.samples = {}
        self.missing = {}

    def add(self, name, sample):
        self.samples.setdefault(name, []).append(sample)

    def median(self, name):
        return statistics.median(self.samples[name])

    def worst(self, name):
        return max(self.samples[name])

    def ratio(self, name, baseline):
        """Return the median of the ratios within each round: what disturbs a round disturbs both."""
        pairs = zip(self.samples[name], self.samples[baseline])
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def as_json(self):
        """Return it with {name: {median, worst, ratio, rounds}, or {missing: why}} as rows, by which it is printed."""
        rows = {}
        for name, samples in self.samples.items():
            ratio = self.ratio(name, self.baseline) if self.baseline in self.samples else None
            rows[name] = {"median": self.median(name), "worst": self.worst(name), "ratio": ratio,
                          "rounds": len(samples)}
        rows.update((name, {"missing": why}) for name, why in self.missing.items())
        return {"title": self.title, "unit": self.unit, "baseline": self.baseline, "rows": rows}


def interleave(figure, contenders, rounds, warm=True):
    """Measure each contender once per round, in an order that changes, after a round that does not count.

    contenders: {name: what measures it once and returns the sample, or Missing}.
    """
    figure.missing.update((name, str(why)) for name, why in contenders.items() if isinstance(why, Missing))
    names = [name for name in contenders if name not in figure.missing]
    for name in names if warm else []:
        contenders[name]()
    figure.samples.update((name, []) for name in names)  # the table's order is that of the contenders
    for number in range(rounds):
        for name in random.Random(number).sample(names, len(names)):
            figure.add(name, contenders[name]())


def bind(things, measure):
    """Return {name: what measures that thing}, for interleave; what is Missing stays so."""
    return {name: thing if isinstance(thing, Missing) else functools.partial(measure, thing)
            for name, thing in things.items()}


@contextlib.contextmanager
def directories(parent):
    """Give out fresh directories below parent: make() -> path; all of them go at the end."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as top:
        yield lambda: tempfile.mkdtemp(dir=top)


def new_path(directory):
    return os.path.join(directory, os.urandom(4).hex() + ".pid")


def filesystem_of(directory):
    command = ["df", "--output=fstype", directory]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode().split()[-1]


# ---- Processes ----


def start(command, **options):
    return os.posix_spawn(command[0], command, ENVIRONMENT, **options)


def fork(function):
    """Run the function in a process of its own; return its PID. It exits with 1 when the function raises."""
    pid = os.fork()
    if pid:
        return pid
    try:
        function()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def time_run(command):
    """Return how many milliseconds the command takes, from its start until it has been waited for."""
    began = time.perf_counter_ns()
    _, status = os.waitpid(start(command), 0)
    took = time.perf_counter_ns() - began
    if status:
        raise RuntimeError("%s: wait status %d" % (command, status))
    return took / 1e6


def peak_memory(command):
    """Return the peak of the command's memory and its children's in MiB, as wait4(2) tells it.

    A process begins with the peak of the one that forked it, and exec keeps that. So a shell forks it, smaller than
    any of ours, and ends, and we wait for what it leaves to us.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    shell = start(["/bin/sh", "-c", '"$@" &', "sh", *command])
    ended = [os.wait4(-1, 0) for _ in range(2)]
    (peak,) = (usage.ru_maxrss for pid, status, usage in ended if pid != shell)
    return peak / 1024


def cpu_of(pid):
    """Return the CPU that a living process has used, user and system, in milliseconds.

    It is the sum that getrusage(2) tells of oneself, to the nanosecond: clock_getcpuclockid(3)'s clock.
    """
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e6


def settle(pids):
    """Return once all these processes have started up and only wait: for a while they use next to no CPU."""
    deadline = time.monotonic() + 120
    before, calm = sum(map(cpu_of, pids)), 0
    while calm < 2:
        if time.monotonic() > deadline:
            raise RuntimeError("waiters that do not come to rest")
        time.sleep(0.2)
        now = sum(map(cpu_of, pids))
        calm = calm + 1 if now - before < 3 + len(pids) else 0
        before = now


def reap(pids):
    """Wait for all of them; return their wait statuses."""
    return [os.waitpid(pid, 0)[1] for pid in pids]


def end(pids):
    """Send TERM to all; return how many seconds it takes until all have ended."""
    began = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    reap(pids)
    return time.monotonic() - began


class Holder:
    """A lock command (a list of words) whose own command has the lock until finish()."""

    def __init__(self, lock_command, last_act=":"):
        self._process = subprocess.Popen(
            [*lock_command, "/bin/sh", "-c", "echo ready; read line; " + last_act],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT,
        )
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("%s: does not get the lock" % lock_command)

    def finish(self):
        """Let it end, after its last act; return what that printed."""
        return self._process.communicate(b"")[0]

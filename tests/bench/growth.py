"""Growth: whether a cycle, a turn or a farewell costs more when there are more names, waiters or slots."""
import os
import resource
import statistics
import time

from library import time_cycles
from measure import Figure, Missing, bind, cpu_of, end, fork, interleave, new_path, reap, settle, start
from peers import install_pidlock, pidlock, waiting_commands

ROUNDS = 20
CYCLES = 20  # in a round
CROWD_ROUNDS = 3  # each starts hundreds of processes
TURNS = 10  # in each
BUSY_CYCLES = 1000  # of other names, beside a waiter


def run(scale, make_directory):
    raise_descriptor_limit(sum(scale.names) + sum(scale.slots) + 100)
    figures = {
        "names": Figure("acquire + release beside held names of the directory", "us", label(1, "name")),
        "slots": Figure("acquire + release of the last slot", "us", label(1, "slot")),
        "neighbours": Figure("CPU of a waiter while others take %d locks" % BUSY_CYCLES, "ms"),
    }
    rounds = min(ROUNDS, scale.rounds)
    held = []
    for key, sizes, prepare in (("names", scale.names, prepare_names), ("slots", scale.slots, prepare_slots)):
        contenders = {label(size, key[:-1]): prepare(size, make_directory(), held) for size in sizes}
        interleave(figures[key], contenders, rounds)
    for lock in held:
        lock.release()
    measure_neighbours(figures["neighbours"], make_directory, rounds)
    commands = waiting_commands(install_pidlock(make_directory()))
    for name, words in commands.items():
        turn = Figure("%s: from command to command while others wait" % name, "ms", label(1, "waiter"))
        leave = Figure("%s: until all that wait have left after TERM" % name, "s", label(1, "waiter"))
        measure_crowds(turn, leave, words, scale, make_directory)
        key = name.partition("(")[0]
        figures.update({"turn_" + key: turn, "leave_" + key: leave})
    return figures


def label(size, what):
    return "%d %s%s" % (size, what, "s" if size > 1 else "")


def raise_descriptor_limit(wanted):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def prepare_names(size, directory, held):
    """Hold all names but one; return what measures a cycle of that one."""
    held += [pidlock.PidLock(os.path.join(directory, "%d.pid" % number)).acquire() for number in range(1, size)]
    lock = pidlock.PidLock(os.path.join(directory, "0.pid"))
    return lambda: time_cycles(lock, CYCLES)


def prepare_slots(size, directory, held):
    locks = [pidlock.PidLock(os.path.join(directory, "slots.pid"), max_concurrent=size) for _ in range(size)]
    held += [lock.acquire() for lock in locks[1:]]
    return lambda: time_cycles(locks[0], CYCLES)


def measure_neighbours(figure, make_directory, rounds):
    """Measure a waiter's CPU while others come and go, beside it or elsewhere, where only the time passes for it."""
    directory, elsewhere = make_directory(), make_directory()
    path = os.path.join(directory, "waited-for.pid")
    locks = {"in other directories": pidlock.PidLock(os.path.join(elsewhere, "other.pid")),
             "in its own directory": pidlock.PidLock(os.path.join(directory, "other.pid"))}
    with pidlock.PidLock(path):
        waiter = fork(lambda: pidlock.PidLock(path, wait=float("inf")).acquire().release())
        settle([waiter])

        def measure(lock):
            before = cpu_of(waiter)
            time_cycles(lock, BUSY_CYCLES)
            return cpu_of(waiter) - before

        interleave(figure, bind(locks, measure), rounds)
    reap([waiter])


# ---- Waiters ----


def measure_crowds(turn, leave, words, scale, make_directory):
    """Start as many commands as are to wait and some more; those take their turns, the others then get TERM."""
    sizes = {label(size, "waiter"): size for size in scale.waiters}
    if isinstance(words, Missing):
        turn.missing = leave.missing = dict.fromkeys(sizes, str(words))
        return

    def measure(size):
        turns = min(TURNS, scale.rounds)
        with Crowd(words(new_path(make_directory())), size + turns) as crowd:
            took = statistics.median(crowd.take_turn() for _ in range(turns))
            leave.add(label(size, "waiter"), crowd.leave())
        return took

    leave.samples = {name: [] for name in sizes}
    interleave(turn, bind(sizes, measure), min(CROWD_ROUNDS, scale.rounds), warm=False)


class Crowd:
    """A command that has the lock, and so many that wait; each says who it is when it begins, and ends when told to."""

    def __init__(self, lock_command, waiters):
        self._command = [*lock_command, "/bin/sh", "-c", "echo $PPID; read line"]
        self._go, self._say_go = os.pipe()
        report, self._tell = os.pipe()
        self._reports = open(report, "rb")
        self._finished = []
        self._start()
        self._holder = int(self._reports.readline())
        self._waiting = {self._start() for _ in range(waiters)}
        settle(self._waiting)

    def _start(self):
        pipes = [(os.POSIX_SPAWN_DUP2, self._go, 0), (os.POSIX_SPAWN_DUP2, self._tell, 1)]
        return start(self._command, file_actions=pipes)

    def take_turn(self):
        """Let the one that has it end; return how many milliseconds pass until another one's command has begun."""
        self._finished.append(self._holder)
        began = time.monotonic()
        os.write(self._say_go, b"\n")
        self._holder = int(self._reports.readline())
        took = time.monotonic() - began
        self._waiting.remove(self._holder)
        return took * 1e3

    def leave(self):
        """Send TERM to all that wait; return how many seconds it takes until all have ended."""
        waiting, self._waiting = self._waiting, set()
        return end(waiting)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        end(self._waiting)
        os.close(self._say_go)  # so that the last one ends
        reap([*self._finished, self._holder])
        os.close(self._go)
        os.close(self._tell)
        self._reports.close()

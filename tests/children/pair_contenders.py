"""Play pairs of operations on one pidfile: pair_contenders.py MODULE DIRECTORY, then a line of JSON for each pair.

`[FIRST, STOP, SECOND]`: a forked child begins FIRST and stops at STOP for an hour; meanwhile SECOND runs to its end, in
this process; then the first goes on. The answer is a line of JSON: how the first ended, how the second did, what stood
there then, and what was lost or left over when all had given back what they held. `[FIRST]`: the answer is a list of
the steps of an undisturbed FIRST.

A step is a call like `open file`, numbered where it comes again; a STOP is `before` or `after` a step. The calls are
wrapped in the child, for an audit hook can only stop before one, and hears nothing of write(2) and lstat(2).
"""
import errno
import fcntl
import gc
import importlib.util
import json
import os
import signal
import sys
import time

spec = importlib.util.spec_from_file_location("pidlock", sys.argv[1])
pidlock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pidlock)
HOUR = 3600
NO_PATIENCE = -1.0
# Nobody has patience for an hour. A machine that is slow for seconds changes nothing.
pidlock.LOOK_AGAIN = pidlock.LOOK_LONG = pidlock.PATIENCE = pidlock.GUARD_PATIENCE = NO_PATIENCE
pidlock.PROGRESS = HOUR
BY_AGE = {"stale_strategy": pidlock.TIME_ONLY, "stale_after": 60}


# ---- What stands there at first; a living holder is returned ----


def nothing(path):
    pass


def stale(path):
    put(path, "%d\n" % ZOMBIE)


def stale_and_marked(path):
    put(path, "%d\n\n\n" % ZOMBIE)


def stale_of_three(path):
    put(path, "%d\n\n\nlimit=3\n" % ZOMBIE)


def stale_beside_a_left_over(path):
    stale_and_marked(path)
    put(os.path.join(os.path.dirname(path), ".pidlock-0123456789abcdef"), "")


def a_strangers(path):
    put(path, "%d\n" % os.getppid())


def held(path, **options):
    lock = pidlock.PidLock(path, **options).acquire()
    make_old(path)
    return lock


def held_by_one_of_three(path):
    return held(path, max_concurrent=3)


def put(path, body):
    with open(path, "w") as file:
        file.write(body)
    make_old(path)


def make_old(path):
    os.utime(path, (time.time() - HOUR, time.time() - HOUR))


def make_zombie():
    """Return the PID of one that has ended, and that nobody else is given as long as this process lives."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    return child


# ---- The first one: operate(path, begin, end) calls begin() where its steps begin, and end(word) where they end ----


def taking(**options):
    def operate(path, begin, end):
        lock = pidlock.PidLock(path, **options)
        begin()
        end(word_of_taking(lock))
        return word_of_loss(lock)

    return operate


def taking_without_links(path, begin, end):
    def refuse(*paths):
        raise OSError(errno.EPERM, "no hard links here")

    os.link = refuse
    return taking()(path, begin, end)


def releasing(path, begin, end):
    lock = pidlock.PidLock(path).acquire()
    begin()
    end("released" if lock.release() else "lost")
    return ""


def sweeping(path, begin, end):
    begin()
    end(word_of_sweeping(path))
    return ""


FIRSTS = {
    "acquire": (nothing, taking()),
    "acquire in place": (nothing, taking_without_links),
    "acquire a held one": (held, taking()),
    "evict": (stale, taking()),
    "evict a marked one": (stale_and_marked, taking()),
    "release": (nothing, releasing),
    "sweep": (stale_beside_a_left_over, sweeping),
    "sweep a held one": (held, sweeping),
    "break": (held, taking(**BY_AGE)),
    "break a stale one": (stale, taking(**BY_AGE)),
    "slots": (nothing, taking(max_concurrent=3)),
    "slots beside one": (held_by_one_of_three, taking(max_concurrent=3)),
    "slots from a stale one": (stale_of_three, taking(max_concurrent=3)),
}


def word_of_taking(lock):
    try:
        lock.acquire()
        return "acquired" if lock._max_concurrent == 1 else "slot %d" % lock.slot
    except pidlock.LockHeld:
        return "held"
    except pidlock.PidLockError as error:
        return "error: " + error.reason.split(":")[0]


def word_of_sweeping(path):
    try:
        return " ".join(["swept", *map(kind_of, pidlock.sweep(os.path.dirname(path)))])
    except pidlock.PidLockError as error:
        return "error: " + error.reason.split(":")[0]


def word_of_loss(lock):
    try:
        return "" if lock.release() else ", lost"
    except pidlock.PidLockError:
        return ", lost"  # a broken copy finds it gone


def kind_of(path):
    name = os.path.basename(path)
    return "private" if name.startswith(".pidlock-") else name


def watch_steps(directory, stop_at):
    """Have stop_at called before and after each step in the directory from now on, with its name."""
    kinds = {entry.inode(): kind_of(entry.path) for entry in os.scandir(directory)}
    counts = {}
    os_open = os.open

    def of_path(path):
        return kind_of(path) if os.path.dirname(path) == directory else "directory" if path == directory else None

    def of_descriptor(descriptor):
        return kinds.get(os.fstat(descriptor).st_ino)

    def stopping(call, verb, kind_of_call):
        def stop_and_call(*arguments, **options):
            kind = kind_of_call(*arguments)
            if not kind:
                return call(*arguments, **options)
            step = "%s %s" % ("unlock" if verb == "flock" and arguments[1] & fcntl.LOCK_UN else verb, kind)
            counts[step] = counts.get(step, 0) + 1
            if counts[step] > 1:
                step += " %d" % counts[step]
            stop_at("before " + step)
            try:
                result = call(*arguments, **options)
                if call is os_open:
                    kinds[os.fstat(result).st_ino] = kind
                return result
            finally:
                stop_at("after " + step)

        return stop_and_call

    os.open = stopping(os.open, "open", lambda path, *_: of_path(path))
    fcntl.flock = stopping(fcntl.flock, "flock", lambda descriptor, _: of_descriptor(descriptor))
    os.lstat = stopping(os.lstat, "check", of_path)
    os.write = stopping(os.write, "write", lambda descriptor, _: of_descriptor(descriptor))
    os.link = stopping(os.link, "link", lambda _, path: of_path(path))
    os.rename = stopping(os.rename, "link", lambda _, path: of_path(path))  # a broken copy's
    os.unlink = stopping(os.unlink, "unlink", of_path)
    os.listdir = stopping(os.listdir, "list", of_path)


class First:
    """A child for one operation on path. It begins when told, says where it stops, then how it ended."""

    def __init__(self, operate, path, stop):
        go_reader, self._go = os.pipe()
        self._said, said_writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.alarm(60)
                os.close(self._go)
                self._live(operate, path, stop, go_reader, said_writer)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        os.close(go_reader)
        os.close(said_writer)
        self.go_to("ready")

    def _live(self, operate, path, stop, go_reader, said_writer):
        stops = []
        write = os.write

        def say(line):
            write(said_writer, line.encode() + b"\n")
            if not os.read(go_reader, 1):
                os._exit(1)

        def stop_at(step):
            stops.append(step)
            if step == stop:
                say("stopped")

        os.read(go_reader, 1)
        say("ready")
        # How it ended is what it says first, or the stops that it came to where it is to stop at none.
        loss = operate(path, lambda: watch_steps(os.path.dirname(path), stop_at),
                       lambda word: say(word if stop else json.dumps(stops)))
        say(loss)

    def go(self):
        """Let it go on; return what it says next."""
        os.write(self._go, b"\n")
        line = os.read(self._said, 4096).decode()  # whole: pipe(7), PIPE_BUF
        if not line:
            raise EOFError("the first one has died")
        return line.rstrip("\n")

    def go_to(self, said):
        seen = self.go()
        if seen != said:
            raise LookupError("the first one was to say %r, and said %r" % (said, seen))

    def end(self):
        os.close(self._go)
        os.close(self._said)
        os.waitpid(self.pid, 0)


# ---- The second one: (path, the living holder or None) -> (how it ended, the lock that it may hold) ----


def take(path, holder, **options):
    lock = pidlock.PidLock(path, **options)
    return word_of_taking(lock), lock


def evict(path, holder):
    provide(stale, path)
    return take(path, holder)


def release(path, holder):
    """The holder's, or of one who has come in the meantime."""
    if not holder:
        word, holder = take(path, None)
        if word != "acquired":
            return word, None
    return "lost" if word_of_loss(holder) else "released", None


def hand_over(path, holder):
    word, _ = release(path, holder)
    return take(path, holder) if word == "released" else (word, None)


def sweep(path, holder):
    provide(stale_and_marked, path)
    return word_of_sweeping(path), None


def break_by_age(path, holder):
    provide(a_strangers, path)
    return take(path, holder, **BY_AGE)


def take_slot(path, holder):
    return take(path, holder, max_concurrent=2)


def in_turn(second):
    """Let it wait for its turn by the directory's flock, as long as it takes."""

    def patient(path, holder):
        pidlock.PATIENCE = pidlock.GUARD_PATIENCE = HOUR
        try:
            return second(path, holder)
        finally:
            pidlock.PATIENCE = pidlock.GUARD_PATIENCE = NO_PATIENCE

    return patient


SECONDS = {
    "acquire": take,
    "evict": evict,
    "release": release,
    "hand over": hand_over,
    "sweep": sweep,
    "break": break_by_age,
    "break in turn": in_turn(break_by_age),
    "slots": take_slot,
    "slots in turn": in_turn(take_slot),
}


def provide(make, path):
    """What the second one needs comes into being right before it, where there is nothing."""
    if not os.path.exists(path):
        make(path)


# ---- The pair ----


def tell_steps(name, path):
    first, holder = set_the_scene(name, None, path)
    stops = json.loads(first.go())
    first.go()
    first.end()
    if holder:
        word_of_loss(holder)
    return [stop[len("before "):] for stop in stops if stop.startswith("before ")]


def set_the_scene(name, stop, path):
    scene, operate = FIRSTS[name]
    first = First(operate, path, stop)  # forked before there is a holder, whose descriptor it would inherit
    return first, scene(path)


def play(name, stop, second, path):
    first, holder = set_the_scene(name, stop, path)
    first.go_to("stopped")
    let_an_hour_pass(os.path.dirname(path))
    waited_for = []
    time.sleep = lambda seconds: waited_for or waited_for.append(first.go())  # who waits, waits for the first one
    try:
        second_word, lock = SECONDS[second](path, holder)
    finally:
        time.sleep = sleep
    first_word = waited_for[0] if waited_for else first.go()
    stands = tell_what_stands(path, first.pid, holder)
    holder_word = "; holder lost" if holder and word_of_loss(holder) else ""
    if lock:
        second_word += word_of_loss(lock)
    first_word += first.go()
    first.end()
    left = "".join("; left " + kind_of(name) for name in sorted(os.listdir(os.path.dirname(path))))
    return "%s; %s%s; %s%s%s" % (first_word, "waited, " if waited_for else "", second_word, stands, holder_word, left)


def let_an_hour_pass(directory):
    """What the first one has made becomes old. All else is old already, and has to keep its mtime."""
    for entry in os.scandir(directory):
        if time.time() - entry.stat().st_mtime < HOUR / 2:
            make_old(entry.path)


def tell_what_stands(path, first_pid, holder):
    stands = []
    for name in sorted(os.listdir(os.path.dirname(path))):
        with open(os.path.join(os.path.dirname(path), name)) as file:
            pid = int(file.readline() or "0")
            is_holders = holder and holder._descriptor is not None and os.path.sameopenfile(
                file.fileno(), holder._descriptor)
        whose = "holder's" if is_holders else {
            first_pid: "first's", os.getpid(): "second's", os.getppid(): "stranger's"}.get(pid, "stale")
        stands.append(whose if name == "file" else "%s %s" % (kind_of(name), whose))
    return ", ".join(stands) or "nothing"


ZOMBIE = make_zombie()
sleep = time.sleep
gc.freeze()  # else a collection in each child copies all of its memory
for number, line in enumerate(sys.stdin):
    signal.alarm(60)  # a pair that hangs ends this process, and so fails the test
    row = json.loads(line)
    directory = os.path.join(sys.argv[2], str(number))
    os.mkdir(directory)
    answer = (play if len(row) == 3 else tell_steps)(*row, os.path.join(directory, "file"))
    for name in os.listdir(directory):
        os.unlink(os.path.join(directory, name))
    os.rmdir(directory)
    signal.alarm(0)
    print(json.dumps(answer), flush=True)

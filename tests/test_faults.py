"""Every system call of a run: kill -9 there, each error that the kernel may give there, and a delay there.

The calls are found by a first traced run. Left out, because nothing can go wrong there that a lock could mend:
everything before the first call on the pidfile's directory (the interpreter starts, pidlock reads its options: no file
of ours exists yet, so that a fault there is a fault before the run), what the interpreter imports later, and the calls
in HARMLESS. A part of it in `make test`, so chosen that each call is hit in one scenario at least; all of it with
PIDLOCK_STRESS. The calls of the child before it is the command have tests of their own.
"""
import collections
import concurrent.futures
import errno
import os
import re
import shutil
import signal
import subprocess
import time
import zlib

import pytest
from children.fault_strace import Traced, normalise
from children.race_variants import write_variant
from conftest import CHILDREN, PYTHON, Holder

import pidlock

pytestmark = [
    pytest.mark.blackbox,
    pytest.mark.skipif(not shutil.which("strace"), reason="strace kills pidlock at its calls, and lets them fail"),
]

ALL = bool(os.environ.get("PIDLOCK_STRESS"))
DEADLINE = 60
COMMAND = ("--", "/bin/sh", "-c", "echo ran $PIDLOCK_TOKEN; read line; exit 7")
BYSTANDERS = {"notes": "1\n", ".pidlock-notes": "", "other.pid": "1\n", "test.pid.old": "9\n\n\nbut more"}
LEFT_OVER = ".pidlock-0123456789abcdef"  # of an earlier crash

METRICS = 'pidlock_runs_total{pidfile="other.pid"} 41.0\n'

# options: before --pidfile, DIR: the directory. files: {name: body}, an hour old, %d: a dead PID. status: of a run
# without a fault. held: by a living holder. faults: injected into every run of it. says: a pattern of what it says.
Scenario = collections.namedtuple("Scenario", "name options files status held faults pidfile says")
Scenario.__new__.__defaults__ = ("", {}, 7, False, (), "test.pid", "")
NO_LINKS = ("/^link(at)?$:error=EPERM",)
SCENARIOS = [
    Scenario("from nothing"),
    Scenario("from a marked file", files={"test.pid": "%d\n\n\n"}),
    Scenario("from an unmarked file", files={"test.pid": "%d\n"}),
    Scenario("from garbage", files={"test.pid": "garbage\n"}),
    Scenario("by age", "--stale-strategy time-only --stale-after 60", files={"test.pid": "1\n"}),
    Scenario("without hard links", faults=NO_LINKS),
    Scenario("missing parents", pidfile="a/b/test.pid"),
    Scenario("details", "--details"),
    Scenario("details of a dead one", "--details", files={"test.pid": "%d\n\n\nhost=elsewhere\nstart=1\n"}),
    Scenario("first token", "--fence"),
    Scenario("next token", "--fence", files={"test.pid.fence": "00000000000000000041\n"}),
    Scenario("slots", "--max-concurrent 3", held=True),
    Scenario("held", status=75, held=True),
    Scenario("wait", "--wait 60", held=True),
    Scenario("sweep", files={"test.pid": "%d\n\n\n", LEFT_OVER: ""}, status=0),
    Scenario("log", "--log DIR/events.log"),
    Scenario("log on stderr", "--log -"),
    Scenario("metrics", "--metrics DIR/metrics.prom", files={"metrics.prom": METRICS}),
    Scenario("check", "--check", status=1, held=True, says="^$"),
    Scenario("status", "--status", files={"test.pid": "%d\n\n\n"}, status=1, says=": stale: "),
    Scenario("status as JSON", "--status --json", status=0, held=True, says='"state": "held"'),
    Scenario("signal", "--signal TERM", status=0, held=True, says="^signalled$"),
]
PROBES = ("check", "status", "status as JSON", "signal")
HARMLESS = re.compile(  # they change nothing that outlives the process, and do not fail
    "(mmap|brk|munmap|mprotect|mremap|madvise|getpid|getpgrp|getppid|gettid|getsid|getpgid|geteuid|getuid|futex|lseek"
    "|uname|ioctl|rt_sigprocmask|rt_sigaction|rt_sigpending|rt_sigreturn|exit_group|restart_syscall|clock_nanosleep"
    r"|readlink|getcwd|fcntl\(<[^>]*>, F_[GS]ETFD|sysinfo|prlimit64)\b"
    r"|rt_sigtimedwait\(tv_sec=N"  # with no time to wait
)
CHANGING = re.compile(r"(flock|fchmod|link|unlink|rename|mkdir|p?write(64)?|fsync|clone3?|v?fork|kill"
                      r"|pidfd_send_signal|wait4|exit_group"
                      r"|rt_sigtimedwait)\(|openat\(.*O_CREAT")
OURS = re.compile('["<]DIR[/">]')


# Behind its first sleep the number of a waiter's other calls depends on the time: for a second it asks /proc too.
NEVER_ON_PROC = ("flock", "fcntl", "pread64", "inotify_add_watch", "poll")


class Bench:
    """A directory for a scenario, an installed pidlock, and the runs of both under strace."""

    def __init__(self, place, installed, scenario):
        self.scenario = scenario
        self.directory, self.copy = place / "locks", place / "copy"
        self.pidfile = self.directory / scenario.pidfile
        self.program = [PYTHON, str(CHILDREN / "fault_program.py"), str(installed)]
        self.traced = Traced(place / "log", self.program)
        self.holder = None
        self.token = 0
        self.options = scenario.options.replace("DIR", str(self.directory)).split()
        if scenario.name == "sweep":
            self.arguments = ("--sweep", self.directory)
        else:
            self.arguments = (*self.options, "--pidfile", self.pidfile, *(() if scenario.name in PROBES else COMMAND))

    def prepare(self):
        """Make the directory anew, but for a living holder's file."""
        self.directory.mkdir(exist_ok=True)
        for path in self.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif self.holder is None or path != self.pidfile:
                path.unlink()
        dead = subprocess.Popen(["true"])  # each time: there are so many processes that a PID comes again
        dead.wait()
        for name, body in dict(BYSTANDERS, **self.scenario.files).items():
            (self.directory / name).write_text(body.replace("%d", str(dead.pid)))
            os.utime(self.directory / name, (time.time() - 3600,) * 2)
        self.token = 41
        if self.scenario.held and self.holder is None:
            limit = ["--max-concurrent", "2"] if self.scenario.name == "slots" else []
            self.holder = Holder(*limit, "--pidfile", self.pidfile)
        return self.files()

    def free(self):
        """End the living holder."""
        if self.holder is not None:
            self.holder.finish()
            self.holder = None

    def end_signalled(self, sent):
        """End the living holder; return b"signalled" if a signal did. sent: whether one is on its way."""
        holder, self.holder = self.holder, None
        if sent:
            holder.process.wait(timeout=DEADLINE)
        return b"signalled" if holder.finish() == 143 else b""

    def files(self, directory=None):
        """Return {name: body} of what lies in the directory, but for the fencing counter, the log and the metrics."""
        paths = (path for path in (directory or self.directory).rglob("*") if path.is_file())
        return {path.name: path.read_bytes() for path in paths if path.suffix not in (".fence", ".log", ".prom")}

    def has_whole_books(self):
        """Tell whether the log is whole lines, and the metrics are the old ones or those with this run."""
        if self.scenario.name == "log" and (self.directory / "events.log").exists():
            return bool(re.fullmatch('({"time": .*}\n)*', (self.directory / "events.log").read_text()))
        if self.scenario.name == "metrics":
            values = pidlock._parse_metrics(self.directory / "metrics.prom")
            runs = [values.get(("pidlock_runs_total", 'pidfile="%s"' % name)) for name in ("other.pid", self.pidfile)]
            return runs in ([41.0, None], [41.0, 1.0])
        return True

    def start(self, faults, names, arguments):
        if self.traced.log.exists():
            self.traced.log.unlink()
        return self.traced.start(*arguments, inject=faults, trace=names, stdin=subprocess.PIPE)

    def run(self, fault=None, call=None):
        """Run the scenario, with a fault for strace; return (status, what the command said, stderr)."""
        faults = [*self.scenario.faults, *(["%s:%s:when=%d" % (call.name, fault, call.nth)] if fault else [])]
        process = self.start(faults, "all" if fault is None or self.scenario.faults else call.name, self.arguments)
        if self.scenario.name == "wait" and fault != "signal=KILL":
            self.wait_for(lambda log: "(INJECTED)" in log or log.count("poll([") > 2 or process.poll() is not None)
            self.free()
        said = process.stdout.readline()
        if said.startswith(b"ran") and fault is None:  # let it come to its wait for the command, before that ends
            self.wait_for(lambda log: log.partition("clone")[2].count("rt_sigtimedwait(") > 1)
        elif said.startswith(b"ran") and call.phase == "run" and fault != "signal=KILL":
            self.wait_for(lambda log: "(INJECTED)" in log)
        elif said.startswith(b"ran") and call.phase == "run":
            process.wait(timeout=DEADLINE)
            contender = subprocess.run([*self.program, *map(str, self.arguments)], stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=DEADLINE)
            said += b"" if (contender.returncode, contender.stdout) == (75, b"") else b"and a second one got in"
        rest, stderr = process.communicate(timeout=DEADLINE)
        if self.scenario.name == "signal" and (process.returncode != -9 or call.phase == "end"):
            said += self.end_signalled(process.returncode in (0, -9))
        return process.returncode, (said + rest).decode(), stderr.decode()

    def run_again(self):
        """Run the scenario without a fault and strace; return (status, what the command said)."""
        arguments = self.arguments if self.scenario.name != "wait" else self.arguments[2:]
        again = subprocess.run([*self.program, *map(str, arguments)], stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=DEADLINE)
        if self.scenario.name == "signal" and again.returncode == 0:
            return 0, self.end_signalled(True).decode()
        return again.returncode, again.stdout.decode()

    def wait_for(self, condition):
        deadline = time.monotonic() + DEADLINE
        while not condition(self.traced.log.read_text() if self.traced.log.exists() else ""):
            assert time.monotonic() < deadline, "it never happened:\n" + self.traced.log.read_text()
            time.sleep(0.002)

    def run_delayed(self, call, delay, module):
        """Run the scenario with a delay, and contenders once it is there; return (status, stdout, stderr, theirs).

        Who has found the lock held is overtaken by its release; of the slots one stays taken, by a holder who wants no
        more than two to be.
        """
        contenders = subprocess.Popen([PYTHON, str(CHILDREN / "fault_contenders.py"), str(module)],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, universal_newlines=True)
        marker = self.directory.parent / "inside"
        command = 'set -C; { : >"$1"; } 2>/dev/null || echo overlap; echo ran; rm "$1" 2>/dev/null || echo overlap'
        arguments = self.arguments
        if self.scenario.name != "sweep":
            patience = () if self.scenario.name == "held" else ("--wait", "60")
            arguments = (*patience, *self.arguments[:-1], command, "sh", marker)
        faults = [*self.scenario.faults, "%s:%s=300000:when=%d" % (call.name, delay, call.nth)]
        process = self.start(faults, "all" if self.scenario.faults else call.name, arguments)
        there = r"^(?:[0-9]+ +)?%s\(" % call.name
        self.wait_for(lambda log: len(re.findall(there, log, re.MULTILINE)) >= call.nth or process.poll() is not None)
        if self.scenario.name != "slots":
            self.free()
        limit = 3 if self.scenario.name == "slots" else 1
        words, _ = contenders.communicate("%s\t%s\t%d\n" % (self.pidfile, marker, limit), timeout=DEADLINE)
        stdout, stderr = process.communicate(timeout=DEADLINE)
        return process.returncode, stdout.decode(), stderr.decode(), words

    def hit(self, call, mark):
        """Tell whether the last run's fault has hit this call, and no other."""
        pattern = r"^(?:[0-9]+ +)?%s\((.*(?:%s))$" % (call.name, mark)
        hits = re.findall(pattern, self.traced.log.read_text(), re.MULTILINE)
        text = call.text.replace("tv_sec=N, tv_nsec=N", "") if "= " in mark else call.text  # not shown of a killed one
        return [normalise(call.name, arguments, self.directory) for arguments in hits] == [text]

    def grown(self, said):
        """Tell whether the token that the command said, if any, is greater than those before."""
        tokens = [self.token, *map(int, re.findall("ran ([0-9]+)", said))]
        self.token = tokens[-1]
        return sorted(set(tokens)) == tokens


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """A directory with pidlock.py, and its bytecode."""
    directory = tmp_path_factory.mktemp("installed")
    write_variant("pidlock.py", directory)
    program = [PYTHON, str(CHILDREN / "fault_program.py"), str(directory)]
    writing = dict(os.environ, PYTHONDONTWRITEBYTECODE="")
    subprocess.run([*program, "--version"], stdout=subprocess.DEVNULL, check=True, env=writing)
    return directory


@pytest.fixture(scope="session")
def plan(tmp_path_factory, installed):
    """Return the calls of a scenario's run without a fault: plan(scenario) -> [Call]."""
    plans = {}

    def trace(scenario):
        if scenario.name not in plans:
            bench = Bench(tmp_path_factory.mktemp("plan"), installed, scenario)
            bench.prepare()
            outcome = bench.run()
            bench.free()
            assert outcome[0] == scenario.status, outcome
            calls = bench.traced.calls(bench.directory)
            if scenario.name == "wait":  # how often it looks depends on the time; what follows is as in the others
                first, second = [place for place, call in enumerate(calls) if call.name == "poll"][:2]
                again = [call for call in calls[first + 1:second + 1] if call.name in NEVER_ON_PROC]
                calls = calls[:first + 1] + again
            plans[scenario.name] = calls
        return plans[scenario.name]

    return trace


@pytest.fixture(params=SCENARIOS, ids=lambda scenario: scenario.name)
def bench(request, tmp_path, installed):
    bench = Bench(tmp_path, installed, request.param)
    yield bench
    bench.free()


def is_news(plan, scenario, call, chosen):
    """Tell whether no earlier scenario has such a call, nor this one before it, among the chosen."""
    for earlier in SCENARIOS:
        for other in filter(chosen, plan(earlier)):
            if kind(other) == kind(call):
                return earlier == scenario and other == call
    raise AssertionError("unreachable: the call is one of its own scenario")


def kind(call):
    """Return what makes a call another one for the sample: one that changes nothing is tried once for alike files."""
    if re.match(r"(flock.*LOCK_EX|link|unlink|p?write|openat.*O_CREAT|newfstatat.*deleted)", call.text):
        return label(call)
    return re.sub(r"DIR/(\.pidlock-notes|notes|other\.pid|test\.pid\.(old|N))\b", "DIR/test.pid", call.text), call.phase


def sample(plan, scenario, chosen):
    """Return the scenario's calls of the chosen kind: all of them, or the news, some others, and at least one."""
    calls = list(filter(chosen, plan(scenario)))
    if ALL:
        return calls
    special = {}
    for call in reversed(calls):  # the first that each row of OTHERWISE fits
        special.update(((row, call.phase), call) for row in OTHERWISE if is_special(scenario, call, row))
    news = [call for call in calls if call in special.values() or is_news(plan, scenario, call, chosen)]
    return news or [calls[zlib.crc32(scenario.name.encode()) % len(calls)]]


def label(call):
    return "%s %s%s" % (call.text, call.phase, " again" * call.again)


def show(record_property, kind, bench, planned, outcomes):
    parts = ", ".join("%d %s" % (count, outcome) for outcome, count in sorted(outcomes.items()))
    line = "%-7s %-22s %4d planned, %4d hit: %s" % (kind, bench.scenario.name, planned, sum(outcomes.values()), parts)
    record_property("summary", line)
    print(line)


# ---- kill -9 ----


def is_killable(call):
    """Without PIDLOCK_STRESS only what changes something: a kill before a look leaves what one after it leaves."""
    return CHANGING.match(call.text) or (ALL and OURS.search(call.text))


def test_after_kill_9_at_any_call_the_next_run_succeeds_and_a_sweep_leaves_nothing(bench, plan, record_property):
    """Red when the pidfile has no mark, when the command does not inherit the descriptor, when a sweep spares private
    files, when a counter is written anew in place."""
    calls = sample(plan, bench.scenario, is_killable)
    outcomes, problems = collections.Counter(), []
    for call in calls:
        before = bench.prepare()
        status, said, _ = bench.run("signal=KILL", call)
        hit = bench.hit(call, r"= \?|<unfinished \.\.\.>") and status == -9
        grown, whole = bench.grown(said), bench.has_whole_books()
        left = bench.files()
        shutil.rmtree(bench.copy, ignore_errors=True)
        shutil.copytree(bench.directory, bench.copy)
        for path in [bench.directory, bench.copy]:
            age_unwritten(path, bench.scenario)
        again = bench.run_again()
        grown = grown and bench.grown(again[1])
        swept = sweep(bench)
        fine = (
            hit and grown and whole and said.count("ran") <= 1 and "a second one" not in said
            and again[0] == status_again(bench.scenario, call) and again[1].count("ran") == (again[0] == 7)
            and (again[0] == pidlock.EXIT_NOBODY or re.search(bench.scenario.says, again[1]))
            and swept == expected_after_sweep(bench, before)
            and all(bench.files().get(name) == before[name] for name in BYSTANDERS)
        )
        outcomes[name_left(left, before)] += hit
        if not fine:
            problems.append((call, status, said, again, sorted(left), sorted(swept), hit, grown))
    show(record_property, "kill -9", bench, len(calls), outcomes)
    for problem in problems:
        print(problem)
    assert problems == []


def status_again(scenario, call):
    """Return the status of the run after the one that was killed at this call."""
    if scenario.name == "signal" and call.phase == "end":  # it was sent, so its holder has ended
        return pidlock.EXIT_NOBODY
    return pidlock.EXIT_HELD if scenario.name == "wait" else scenario.status


def age_unwritten(directory, scenario):
    """Age what is spared for a time: private files, a pidfile in place and not yet written, all where age decides."""
    for path in directory.rglob("*"):
        unwritten = scenario.faults and path.name == "test.pid" and not path.stat().st_size
        if path.name.startswith(".pidlock-") or unwritten or "time-only" in scenario.options:
            os.utime(path, (0, 0))


def sweep(bench):
    """Sweep what was left, in the copy; return what that leaves."""
    for directory in {path.parent for path in bench.copy.rglob("*") if path.is_file()}:
        pidlock.sweep(directory)
    return set(bench.files(bench.copy))


def expected_after_sweep(bench, before):
    """The bystanders, what is not marked, an unwritten pidfile (garbage, so not surely ours)."""
    names = set(BYSTANDERS)
    for path in bench.copy.rglob("test.pid"):
        body = path.read_bytes()
        if not body or body == before.get("test.pid") and not pidlock.parse_record(body):
            names.add("test.pid")
    for name, body in before.items():
        record = pidlock.parse_record(body)
        if (bench.copy / name).exists() and not (record and record.marked) and name != LEFT_OVER:
            names.add(name)
    return names


def name_left(left, before):
    private = [name for name in left if re.fullmatch(r"\.pidlock-[0-9a-f]{16}", name) and name != LEFT_OVER]
    new = [name for name in left if name not in before and name not in private]
    changed = [name for name in left if name in before and left[name] != before[name]]
    words = ["private file"] * bool(private) + ["pidfile"] * bool(new or changed)
    return "left a " + " and a ".join(words) if words else "left nothing"


# ---- Calls that fail ----

# A call of the traced run, its phase, the errors that open(2), flock(2) and so on list for it (and ESTALE, which a
# network filesystem gives to any), and what has to come of it. All rows that fit a call are tried.
# runs: as if nothing had happened. fails: 125, one line that has the error's text, nothing run, left or removed (but
# for the stale file, once it was evicted). refused: the same, in other words than the error's. held: 75. kept: the
# command's status, and one line about the release. left: fails, and leaves an empty pidfile (nobody removes one without
# its flock). swept: 125 and one line, or 0; what is to be swept is gone, but for one, and nothing else. untold: 125 and
# one line, but what it printed was lost. unwritten: the command's status, and one line about the log or the metrics.
# unknown: --status says so. nobody: 3, and nobody was signalled. For --status it is 4 instead of 125.
TROUBLE = "EIO ESTALE"
FULL = "ENOSPC EDQUOT EROFS"
ERRORS = [
    (r'openat\("DIR/[^"]*", O_RDONLY\|O_NOCTTY', "start end", "EACCES EPERM EMFILE ENFILE " + TROUBLE, "fails"),
    (r'openat\("DIR/[^"]*", O_RDWR', "start end", "EACCES EPERM EMFILE ENFILE " + TROUBLE + " " + FULL, "fails"),
    (r'openat\("DIR/[^"]*", O_WRONLY', "start end", "EACCES EPERM EMFILE ENFILE " + TROUBLE + " " + FULL, "fails"),
    (r'openat\("DIR/', "start end", "EINTR", "runs"),
    (r'openat\("DIR/[^"]*", O_WRONLY', "start end", "EAGAIN ENXIO", "fails"),  # a FIFO that nobody reads
    (r'openat\("DIR"', "start end", "EACCES EMFILE ENFILE " + TROUBLE, "fails"),
    (r"fcntl\(<DIR.*F_DUPFD", "start end", "EMFILE EINVAL", "runs"),
    (r"close\(<DIR", "start end", "EIO EINTR ENOSPC EDQUOT", "runs"),
    (r"flock\(<DIR.*LOCK_(EX|SH)", "start end", "EIO ENOLCK ESTALE", "fails"),
    (r"flock\(<DIR.*LOCK_(EX|SH)", "start end", "EINTR ENOSYS EOPNOTSUPP", "runs"),
    (r"flock\(<DIR.*LOCK_UN", "start end", "EIO EINTR ENOLCK ENOSYS EOPNOTSUPP ESTALE", "runs"),
    (r"p?write(64)?\(<DIR", "start end", "EFBIG EPERM " + TROUBLE + " " + FULL, "fails"),
    (r"p?read(64)?\(<DIR", "start end", TROUBLE, "fails"),
    (r"p?(write|read)(64)?\(<DIR", "start end", "EINTR", "runs"),
    (r"fchmod\(<DIR", "start end", "EROFS " + TROUBLE, "fails"),
    (r"fchmod\(<DIR", "start end", "EACCES EPERM", "runs"),
    (r"fsync\(<DIR", "start", "EINVAL " + TROUBLE + " " + FULL, "fails"),
    (r"fsync\(<DIR", "start", "EINTR", "runs"),
    (r"fstatfs\(<DIR", "start", TROUBLE, "fails"),
    (r"link\(", "start", "EACCES ENOMEM " + TROUBLE + " " + FULL, "fails"),
    (r"link\(", "start", "EPERM EMLINK ENOSYS EOPNOTSUPP", "runs"),
    (r"link\(", "start", "EEXIST ENOENT", "runs"),
    (r"p?write(64)?\(<DIR/events.log", "start end", "EAGAIN", "fails"),
    (r"rename\(", "start end", "EACCES EBUSY EPERM EXDEV " + TROUBLE + " " + FULL, "fails"),
    (r"unlink\(", "start", "EACCES EBUSY EPERM EROFS " + TROUBLE, "fails"),
    (r"unlink\(", "start", "ENOENT", "runs"),
    (r"unlink\(", "end", "EACCES EBUSY EPERM EROFS " + TROUBLE, "kept"),
    (r'newfstatat\("DIR/(?!a[/"])|newfstatat\(<DIR', "start", TROUBLE, "fails"),
    (r'newfstatat\("DIR/|newfstatat\(<DIR', "end", TROUBLE, "kept"),
    (r'newfstatat\("DIR(/a(/b)?)?"', "start", "EACCES " + TROUBLE, "runs"),  # whether it is there mkdir(2) knows too
    (r"mkdir\(", "start", "EACCES EMLINK EPERM " + TROUBLE + " " + FULL, "fails"),
    (r"getdents64\(<DIR", "start", TROUBLE, "fails"),
    (r'(openat|newfstatat|readlink)\("/proc', "start", "EACCES EIO EMFILE ENOENT", "runs"),
    (r"(read|getdents64)\(</proc", "start", "EINTR EIO ESRCH", "runs"),
    (r"newfstatat\(</proc", "start", "EIO", "runs"),
    (r"kill\(\)", "start", "EPERM", "runs"),
    (r"clone3?\(|v?fork\(", "start", "EAGAIN ENOMEM ENOSYS", "fails"),
    (r"getrandom\(", "start end", "EINTR ENOSYS", "runs"),
    (r"rt_sigtimedwait\((SIGCHLD)?\)", "run", "EINTR", "runs"),  # of one that sleeps; the others ask only
    (r"wait4\(", "end", "EINTR", "runs"),
    (r"poll\(", "start", "EINTR", "runs"),
    (r"inotify_init1\(", "start", "EMFILE ENFILE ENOMEM ENOSYS", "runs"),
    (r"inotify_add_watch\(", "start", "EACCES ENOENT ENOMEM ENOSPC", "runs"),
    (r"signalfd4\(", "start", "EMFILE ENFILE ENODEV ENOMEM ENOSYS", "runs"),
    (r"pidfd_open\(", "start", "EMFILE ENFILE ENODEV ENOMEM ENOSYS EPERM ESRCH", "runs"),
    (r"pidfd_send_signal\(|kill\(SIGTERM", "start", "EPERM", "fails"),
    (r"pidfd_send_signal\(|kill\(SIGTERM", "start", "ESRCH", "nobody"),
    (r"write\(<(?!DIR)", "start end", "EIO ENOSPC EPIPE", "runs"),
]
# Where a scenario (a pattern of its name) has another outcome: its call with phase, the errors, the outcome; the first
# that fits.
OTHERWISE = [
    ("from a marked file|details of a dead one", r"flock\(<DIR/test.*LOCK_EX", "ENOSYS|EOPNOTSUPP", "held"),
    ("from an unmarked file", r"kill\(", "EPERM", "held"),
    ("details of a dead one", r"(openat|read)\(.*/fdinfo/.* start$", "(?!EINTR).*", "held"),  # maybe not local
    ("details of a dead one", r"(openat|read)\(.*/fdinfo/", "(?!EINTR).*", "held|runs"),  # 3.6 asks again
    ("sweep", r'openat\("DIR/(?!PRIV|test.pid")[^"]+".* start$', "EACCES|EPERM", "runs"),  # not for us
    ("sweep", r'openat\("DIR/test.pid".* start$', "EACCES|EPERM", "swept"),
    ("sweep", r"unlink\(", "ENOENT", "swept"),  # somebody else was faster
    ("sweep", r"flock\(<DIR/test.pid>, LOCK_EX", "ENOSYS|EOPNOTSUPP", "swept"),  # so it is not known to be stale
    ("sweep", r"write\(<(?!DIR)", ".*", "untold"),
    ("by age", r"openat\(\"DIR\"|flock\(<DIR>.*LOCK_EX", "(?!EINTR).*", "refused"),  # its flock is all there is
    ("slots", r'openat\("DIR", O_RDONLY\|O_NONBLOCK', "EACCES", "runs"),  # may not be listed: then by name
    ("slots", r'openat\("DIR", O_RDONLY\|O_CLOEXEC|flock\(<DIR>', ".*", "runs"),  # its flock is a courtesy
    ("first token|next token", r"flock\(<DIR/test.pid.fence>, LOCK_EX", "ENOSYS|EOPNOTSUPP", "refused"),
    ("first token", r'openat\("DIR", O', "EACCES", "runs"),  # a directory to write into, but not to read: no fsync
    ("first token", r"link\(.*fence", "EPERM|EMLINK|ENOSYS|EOPNOTSUPP", "refused"),
    ("first token", r'newfstatat\("DIR/PRIVATE|(newfstatat|unlink)\(.*PRIVATE\W+start again', ".*", "runs"),
    ("without hard links", r"(newfstatat|unlink)\(.*PRIVATE|newfstatat\(\"DIR/test.pid\"\) start$", ".*", "runs"),
    ("without hard links", r"flock\(<DIR/test.pid>, LOCK_EX", "EIO|ENOLCK|ESTALE", "left"),
    ("log", r"close\(.*events.log", ".*", "unwritten"),
    ("log", r"(openat|write)\(.*events.log", "(?!EINTR).*", "unwritten"),
    ("log on stderr", r"write\(<pipe", ".*", "runs"),  # there is no other place to say it
    ("metrics", r'newfstatat\(<DIR/metrics|newfstatat\("DIR/PRIVATE', ".*", "runs"),
    ("metrics", r"rename\(|close\(<DIR/metrics.prom>\) (start|end)$", ".*", "unwritten"),  # again: after the rename
    ("metrics", r'(openat|newfstatat|read)\(.*metrics|openat\("DIR"|flock\(<DIR>, LOCK_EX', "(?!EINTR).*", "unwritten"),
    ("metrics", r"(openat|write)\(.*PRIVATE.*( again| end)$", "(?!EINTR).*", "unwritten"),
    ("metrics", r"(flock\(<DIR/PRIVATE>, LOCK_EX|fchmod).*( again| end)$", "EIO|ENOLCK|EROFS|ESTALE", "unwritten"),
    ("check|status.*|signal", r'openat\("DIR/test.pid"', "(?!EINTR).*", "fails"),  # as usual; so the sample has it
    ("check", r"flock\(.*LOCK_SH", "ENOSYS|EOPNOTSUPP", "refused"),
    ("status.*", r"flock\(.*LOCK_SH", "ENOSYS|EOPNOTSUPP", "unknown"),
    ("status.*", r"write\(<pipe", ".*", "untold"),
    ("signal", r'(readlink|openat|newfstatat)\("/proc/(self|N/fd)|.*</proc/N/fd', ".*", "refused|runs"),  # asks twice
    ("wait", r'newfstatat\("DIR/test.pid"', ".*", "runs"),  # asked when the watch is set: then it looks again
    (".*", r"clone3\(", "ENOSYS", "runs"),  # the C library knows others
    (".*", r"newfstatat\(<DIR/[^>]*>(\(deleted\))?\) end$", ".*", "runs"),  # is the descriptor ours? only EBADF tells
]


def is_planned(call):
    return any(re.match(pattern, call.text) and call.phase in phases.split() for pattern, phases, _, _ in ERRORS)


def errors_of(scenario, call):
    """Return the errors to try at a call, with their outcomes."""
    return [(error, expected_outcome(scenario, call, error, outcome)) for pattern, phases, errors, outcome in ERRORS
            if re.match(pattern, call.text) and call.phase in phases.split() for error in errors.split()]


def some(pairs, call):
    """Return all of these, or one: of the special ones if the call has some."""
    odd = [pair for pair in pairs if pair[1] not in ("fails", "runs", "kept")] or pairs
    return pairs if ALL else [odd[zlib.crc32(call.text.encode()) % len(odd)]]


def is_special(scenario, call, row):
    names, pattern, _, _ = row
    return re.fullmatch(names, scenario.name) and re.match(pattern, label(call)) and names != ".*"


def expected_outcome(scenario, call, error, usual):
    for names, pattern, errors, outcome in OTHERWISE:
        if re.fullmatch(names, scenario.name) and re.match(pattern, label(call)) and re.fullmatch(errors, error):
            return outcome
    if scenario.name == "sweep" and usual == "fails" and not re.search('"DIR"|<DIR>', call.text):
        return "swept"
    return usual


def test_each_error_of_each_call_has_the_outcome_that_is_documented(bench, plan, record_property):
    strange = [call for call in plan(bench.scenario) if not is_planned(call) and not HARMLESS.match(call.text)
               and (OURS.search(call.text) or CHANGING.match(call.text))]
    assert [call.text for call in strange] == [], "calls that the table does not know"
    cases = [(call, error, outcome) for call in sample(plan, bench.scenario, is_planned)
             for error, outcome in some(errors_of(bench.scenario, call), call)]
    outcomes, problems = collections.Counter(), []
    for call, error, outcome in cases:
        before = bench.prepare()
        status, said, stderr = bench.run("error=" + error, call)
        hit = bench.hit(call, r"\(INJECTED\)")
        found = name_outcome(bench, call, before, (status, said, stderr), error)
        outcomes[found] += hit
        if not hit or found not in outcome.split("|"):
            problems.append((call, error, "expected: " + outcome, "found: " + found, status, said, stderr, hit))
    show(record_property, "errors", bench, len(cases), outcomes)
    for problem in problems:
        print(problem)
    assert problems == []


def name_outcome(bench, call, before, outcome, error):
    status, said, stderr = outcome
    stderr, evictions = re.subn("pidlock: [^\n]+: took over a stale file: [^\n]+\n", "", stderr)
    stderr = re.sub('(?m)^{"time": .*}\n', "", stderr)  # the log
    line = bool(re.fullmatch("pidlock: [^\n]+; [^\n]+\n", stderr))
    silenced = "write(<pipe" in call.text
    usual = status == bench.scenario.status and said.count("ran") == (status == 7)
    usual = usual and bool(re.search(bench.scenario.says, said))
    failure = 4 if bench.scenario.name.startswith("status") else 125
    if not bench.has_whole_books():
        return "odd: torn"
    files, clean = bench.files(), dict(before)
    if re.search("(unlink|newfstatat).*PRIVATE", call.text):  # what cannot be removed is for a sweep
        files = {name: files[name] for name in files if name in before or not re.match(r"\.pidlock-.{16}$", name)}
    if bench.scenario.name in ("wait", "signal") or evictions:
        before.pop("test.pid")  # its holder has released it; or it was ours to remove
    if status in (0, 7) and bench.scenario.name not in ("slots", "status as JSON"):
        clean.pop("test.pid", None)
    if status == 0:
        clean.pop(LEFT_OVER, None)
    if usual and files == clean and (line or silenced if status == 75 else not stderr):
        return "runs"
    if status == failure and line and not said:
        if files == before and "cannot be written" in stderr:
            return "untold"
        if files == before:
            return "fails" if os.strerror(getattr(errno, error)) in stderr else "refused"
        if files == dict(before, **{"test.pid": b""}):
            return "left"
    if status == 75 and line and not said and files == before:
        return "held"
    if status == failure == 4 and "unknown" in said and not stderr and files == before:
        return "unknown"
    if status == 3 and files == before and not said + stderr:
        return "nobody"
    if usual and files == clean and re.fullmatch(".*: cannot write th[^\n]*; the command runs all the same\n", stderr):
        return "unwritten"
    if usual and line and status == 7:
        if bench.pidfile.exists():
            os.utime(bench.pidfile, (0, 0))  # for who judges by its age
        return "kept" if files == clean or bench.run_again()[0] == 7 else "odd: not freed"
    if bench.scenario.name == "sweep" and set(BYSTANDERS) <= set(files) and len(files) <= len(BYSTANDERS) + 1:
        if status == 125 and line and not said:
            return "untold"
        return "swept" if status == 125 and line or status == 0 and not stderr else "odd: not told"
    return "odd: left %s" % sorted(set(files) ^ set(before))


# ---- Delays ----

DELAYED = [scenario for scenario in SCENARIOS[:15] if scenario.name != "by age"]
CRITICAL = re.compile(r'(flock.*LOCK_EX|link|unlink\("DIR/test|newfstatat\("DIR/test.pid"|openat.*CREAT).* (start|end)')


def is_delayable(call):
    if ALL:  # not its end, nor its wait for the command, which may have ended meanwhile
        return is_killable(call) and not re.match(r"exit_group|rt_sigtimedwait\(\)", call.text)
    return CRITICAL.match(label(call))


@pytest.mark.parametrize("bench", DELAYED, indirect=True, ids=lambda scenario: scenario.name)
def test_a_delay_at_any_call_lets_nobody_in_beside_a_holder(bench, installed, plan, tmp_path, record_property):
    """Ten contenders begin when one stands at the call. Red with blind unlink, unlink without the flock, rename instead
    of link, release unlocks first, sweep without flock; and for slots, where nobody waits for the flock of the
    directory, with no count after the take, ignoring theirs. By age a living holder's lock is broken, so not here."""

    def run(number, call, delay):
        (tmp_path / str(number)).mkdir()
        own = Bench(tmp_path / str(number), installed, bench.scenario)
        own.prepare()
        try:
            outcome = own.run_delayed(call, delay, installed / "pidlock.py")
        finally:
            own.free()
        return call, delay, own.hit(call, r"\(DELAYED\)"), outcome, set(own.files())

    calls = sample(plan, bench.scenario, is_delayable)
    cases = [(call, delay) for call in calls for delay in (["delay_enter", "delay_exit"] if ALL else ["delay_enter"])]
    said = "" if bench.scenario.name == "sweep" else "ran\n"
    outcomes, problems = collections.Counter(), []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # they sleep nearly all the time
        for call, delay, hit, outcome, files in pool.map(run, range(len(cases)), *zip(*cases)):
            outcomes[["without an overlap", "refused"][outcome[0] == 75]] += hit and "overlap" not in str(outcome)
            usual = [(75, "")] * (bench.scenario.name == "held") + [(0, said or outcome[1])]
            if not hit or outcome[:2] not in usual or outcome[3] != TEN_DONE or files != set(BYSTANDERS):
                problems.append((call, delay, hit, outcome, sorted(files)))
    show(record_property, "delays", bench, len(cases), outcomes)
    for problem in problems:
        print(problem)
    assert problems == []


TEN_DONE = '{"done": 10, "odd": []}\n'


# ---- The child, before it is the command ----

CHILD_ERRORS = "E2BIG EACCES EINVAL EIO EISDIR ELOOP EMFILE ENAMETOOLONG ENFILE ENOTDIR EPERM ETXTBSY".split()


@pytest.mark.parametrize("bench", SCENARIOS[:1], indirect=True, ids=["execve"])
def test_a_command_that_is_not_executed_ends_in_its_status(bench, record_property):
    faults = [("signal=KILL", [137]), ("error=ENOMEM", [125, 126])]  # it may be clone(2)'s when it was spawned
    faults += [("error=" + error, [126]) for error in (CHILD_ERRORS if ALL else CHILD_ERRORS[::4])]
    outcomes = collections.Counter()
    for fault, expected in faults:
        before = bench.prepare()
        inject = ["execve:%s:when=1" % fault]  # when= counts for each process, and leaves strace's own execve out
        status, stdout, stderr = bench.traced.run(*bench.arguments, inject=inject, trace="execve")
        said = bool(re.fullmatch("pidlock: (/bin/sh: cannot be executed|[^\n:]+): [^\n:]+; [^\n]+\n", stderr))
        outcomes[status] += bool(re.search(r"INJECTED|\+\+\+ killed by SIGKILL", bench.traced.log.read_text()))
        assert (fault, status in expected, stdout, said, bench.files()) == (fault, True, "", status != 137, before)
    show(record_property, "execve", bench, len(faults), outcomes)
    assert sum(outcomes.values()) == len(faults)


def run_child(bench, *faults):
    """Run with a strace of the forked child alone; return (status, stdout, stderr, the child's calls)."""
    tell_us, tell = os.pipe()
    go, let_go = os.pipe()
    process = subprocess.Popen([*bench.program, *map(str, bench.arguments)], stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(tell, go),
                               env=dict(os.environ, FAULT_GATE="%d %d" % (tell, go)))
    os.close(tell)
    child = os.read(tell_us, 20).decode().strip()
    injections = [word for fault in faults for word in ("-e", "inject=" + fault)]
    strace = subprocess.Popen(["strace", "-y", "-s0", "-o", str(bench.traced.log), *injections, "-p", child],
                              stderr=subprocess.PIPE)
    assert b"attached" in strace.stderr.readline()
    os.write(let_go, b"!")
    stdout, stderr = process.communicate(timeout=DEADLINE)
    strace.communicate(timeout=DEADLINE)
    for descriptor in (tell_us, go, let_go):
        os.close(descriptor)
    names = re.findall(r"^(\w+)\(.*$", bench.traced.log.read_text(), re.MULTILINE)
    calls = names[:names.index("execve") + 1] if "execve" in names else names
    return process.returncode, stdout.decode(), stderr.decode(), calls


@pytest.mark.parametrize("bench", [Scenario("in a group", "--group")], indirect=True, ids=["child"])
def test_a_kill_of_the_forked_child_before_it_executes_the_command_ends_in_its_status(bench, record_property):
    """With --group, or before Python 3.8, pidlock forks; posix_spawn leaves no moment for strace to come in."""
    if subprocess.run([PYTHON, "-c", "import os; os.register_at_fork"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("before Python 3.7 there is no stopping a forked child for strace")
    bench.prepare()
    status, stdout, _, calls = run_child(bench)
    assert (status, stdout, calls[-1]) == (7, "ran\n", "execve")
    faults = ["%s:signal=KILL:when=%d" % (name, calls[:place + 1].count(name))
              for place, name in enumerate(calls) if name not in ("read", "restart_syscall")]
    outcomes = collections.Counter()
    for fault in faults:
        before = bench.prepare()
        status, stdout, stderr, _ = run_child(bench, fault)
        outcomes[status] += "+++ killed by SIGKILL" in bench.traced.log.read_text()
        assert (fault, status, stdout, stderr, bench.files()) == (fault, 137, "", "", before)
    show(record_property, "child", bench, len(faults), outcomes)
    assert sum(outcomes.values()) == len(faults)


def test_a_stop_across_the_hourly_freshening_passes_no_signal_on(tmp_path):
    """Red when the rubbish counts that Python's sigtimedwait returns, 3.6 to 3.13, where its time ran out in a stop."""
    program = write_variant("pidlock.py", tmp_path)
    program.write_text(program.read_text().replace("FRESHEN_EVERY = 3600.0", "FRESHEN_EVERY = 0.5"))
    process = subprocess.Popen([PYTHON, str(program), "-p", str(tmp_path / "x.pid"), "--", "/bin/sh", "-c",
                                "echo ran; read line; exit 7"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"ran\n"
    for _ in range(3):
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.6)  # past the next freshening, which is all that matters
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.1)
    stdout, stderr = process.communicate(b"\n", timeout=DEADLINE)
    assert (process.returncode, stdout, stderr) == (7, b"", b"")

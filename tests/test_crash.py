"""kill -9 before each system call of a run, and each of these calls failing (strace does both)."""
import collections
import errno
import functools
import os
import re
import shutil
import subprocess

import pytest
from conftest import PIDLOCK

pytestmark = [
    pytest.mark.blackbox,
    pytest.mark.skipif(not shutil.which("strace"), reason="strace kills pidlock at its calls, and lets them fail"),
]

STEPS = "openat flock write fchmod link linkat unlink unlinkat clone exit_group".split()  # whatever changes something
Call = collections.namedtuple("Call", "name nth arguments")
SAME_CALLS = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}  # in each run of a test


class Traced:
    """Runs pidlock under strace, which traces pidlock itself and not its command."""

    def __init__(self, log):
        self._log = log

    def run(self, *arguments, inject=(), **options):
        """Return (status, stdout, stderr) of a run in which strace injects these faults."""
        faults = [word for fault in inject for word in ("-e", "inject=" + fault)]
        command = ["strace", "-qq", "-o", self._log, "-e", "trace=" + ",".join("?" + name for name in STEPS)]
        process = subprocess.run(
            [*command, *faults, "--", *PIDLOCK, *map(os.fspath, arguments)], env=dict(os.environ, **SAME_CALLS),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60, **options,
        )
        return process.returncode, process.stdout.decode(), process.stderr.decode()

    def calls(self, pidfile):
        """Return what the last run called from its first look at the pidfile on, each with its ordinal for strace."""
        calls, seen = [], collections.Counter()
        for name, arguments in re.findall(r"^(\w+)\((.*)$", self._log.read_text(), re.MULTILINE):
            seen[name] += 1
            if '"/proc/self/comm"' in arguments or '"pidlock", 7)' in arguments:
                continue  # the holder's name for ps, which no promise hangs on
            if calls or '"%s"' % pidfile in arguments:
                calls.append(Call(name, seen[name], arguments))
        return calls


@pytest.fixture
def traced(tmp_path_factory):
    return Traced(tmp_path_factory.mktemp("strace") / "log")


@pytest.fixture(scope="module")
def first_call(tmp_path_factory):
    """Return the first call of a run that has this name (or its *at form) and text: first_call(start, name, text)."""

    @functools.lru_cache(maxsize=None)
    def calls_of_run(start):
        directory = tmp_path_factory.mktemp("first_call")
        prepare(directory / "test.pid", start)
        traced = Traced(directory / "log")
        traced.run("--pidfile", directory / "test.pid", "--", "true")
        return traced.calls(directory / "test.pid")

    return lambda start, name, text: next(
        call for call in calls_of_run(start) if call.name in (name, name + "at") and text in call.arguments
    )


def prepare(pidfile, start):
    """Leave nothing in the pidfile's directory, or one stale pidfile."""
    for path in pidfile.parent.iterdir():
        path.unlink()
    if start == "stale":
        process = subprocess.Popen(["true"])
        process.wait()
        pidfile.write_text("%d\n" % process.pid)


def names_beside(pidfile):
    return sorted(path.name for path in pidfile.parent.iterdir())


def one_line(pidfile, what):
    return re.compile("pidlock: %s: [^\n]*%s[^\n]*; [^\n]+\n" % (re.escape(str(pidfile)), re.escape(what)))


# ---- kill -9 ----


@pytest.mark.parametrize("start, faults", [
    pytest.param("nothing", [], id="from nothing"),
    pytest.param("stale", [], id="from a stale file"),
    pytest.param("nothing", ["/^link(at)?$:error=EPERM"], id="without hard links"),
])
def test_after_kill_9_before_any_call_of_a_run_the_next_run_succeeds(traced, run, pidfile, start, faults):
    """Red when the pidfile is created in place although there are hard links, and when a young one counts as held."""
    arguments = ("--quiet", "--pidfile", pidfile, "--", "true")
    prepare(pidfile, start)
    assert traced.run(*arguments, inject=faults) == (0, "", "")
    calls = [call for call in traced.calls(pidfile) if "/proc/" not in call.arguments]
    assert {"openat", "flock", "write", "fchmod", "clone", "exit_group"} < {call.name for call in calls}
    for call in calls:
        prepare(pidfile, start)
        killed = traced.run(*arguments, inject=faults + ["%s:signal=KILL:when=%d" % call[:2]])
        if faults and pidfile.exists() and not pidfile.read_bytes():
            os.utime(pidfile, (0, 0))  # created in place and not yet written: respected, but only for 2 s
        outcome = run(*arguments)
        public = [name for name in names_beside(pidfile) if not name.startswith(".pidlock-")]
        assert (call, killed[0], outcome, public) == (call, -9, (0, "", ""), [])


def test_the_command_of_a_killed_pidlock_keeps_the_lock_until_it_ends(run, holder, pidfile):
    """Red when the command does not inherit the lock's descriptor."""
    killed = holder("--pidfile", pidfile)
    killed.kill_wrapper()
    refused, probed = run("--pidfile", pidfile, "--", "echo", "ran"), run("--pidfile", pidfile, "--check")
    killed.finish()
    accepted = run("--quiet", "--pidfile", pidfile, "--", "echo", "ran")
    assert (refused.status, refused.stdout, probed, accepted) == (75, "", (1, "", ""), (0, "ran\n", ""))
    assert one_line(pidfile, "PID %d, was killed, but its command lives on" % killed.pid).fullmatch(refused.stderr)


# ---- Calls that fail ----

FAULTS = [  # what is there, the call, a text in its arguments, how it fails
    ("nothing", "openat", "test.pid", "EACCES EIO EMFILE"),
    ("nothing", "openat", ".pidlock-", "EACCES EIO EMFILE ENOSPC EROFS"),
    ("nothing", "flock", "LOCK_EX", "EIO ENOLCK ESTALE"),
    ("nothing", "write", "", "EDQUOT EIO ENOSPC"),
    ("nothing", "fchmod", "", "EIO EROFS"),
    ("nothing", "link", "", "EACCES EIO ENOSPC EROFS"),
    ("nothing", "unlink", ".pidlock-", "EACCES EIO EROFS"),
    ("stale", "openat", "test.pid", "EACCES EIO EMFILE"),
    ("stale", "flock", "LOCK_EX", "EIO ENOLCK ESTALE"),
    ("stale", "unlink", "test.pid", "EACCES EIO EPERM EROFS"),
]


@pytest.mark.parametrize("start, name, text, error", [
    pytest.param(start, name, text, error, id="-".join((start, name, *filter(None, [text.strip(".-")]), error)))
    for start, name, text, errors in FAULTS for error in errors.split()
])
def test_a_call_that_fails_is_one_line_and_125(traced, first_call, pidfile, start, name, text, error):
    call = first_call(start, name, text)
    prepare(pidfile, start)
    status, stdout, stderr = traced.run(
        "--quiet", "--pidfile", pidfile, "--", "echo", "ran",
        inject=["%s:error=%s:when=%d" % (call.name, error, call.nth)],
    )
    assert (status, stdout, names_beside(pidfile)) == (125, "", ["test.pid"] if start == "stale" else [])
    assert one_line(pidfile, os.strerror(getattr(errno, error))).fullmatch(stderr)


def test_a_short_write_is_a_full_disk(traced, pidfile):
    """Red when what write(2) returns is ignored."""
    status, stdout, stderr = traced.run("--pidfile", pidfile, "--", "echo", "ran", inject=["write:retval=3:when=1"])
    assert (status, stdout, names_beside(pidfile)) == (125, "", [])
    assert one_line(pidfile, os.strerror(errno.ENOSPC)).fullmatch(stderr)


def test_only_a_private_file_is_left_where_nothing_can_be_removed(traced, run, pidfile):
    faults = ["/^unlink(at)?$:error=EIO", "/^link(at)?$:error=EIO"]
    status, stdout, stderr = traced.run("--pidfile", pidfile, "--", "echo", "ran", inject=faults)
    assert (status, stdout, [name[:9] for name in names_beside(pidfile)]) == (125, "", [".pidlock-"])
    assert one_line(pidfile, os.strerror(errno.EIO)).fullmatch(stderr)
    assert run("--pidfile", pidfile, "--", "echo", "ran") == (0, "ran\n", "")


def test_a_release_that_fails_is_said_and_the_status_stays_the_commands(traced, first_call, run, pidfile):
    arguments = ("--pidfile", pidfile, "--", "/bin/sh", "-c", "exit 7")
    fault = "%s:error=EROFS:when=%d" % first_call("nothing", "unlink", "test.pid")[:2]
    status, stdout, stderr = traced.run(*arguments, inject=[fault])
    assert (status, stdout, names_beside(pidfile)) == (7, "", ["test.pid"])
    assert one_line(pidfile, os.strerror(errno.EROFS)).fullmatch(stderr)
    assert run("--quiet", *arguments) == (7, "", "")


# ---- Filesystems with less of flock(2) ----

no_flock = pytest.mark.parametrize("fault", ["flock:error=ENOSYS", "flock:error=EOPNOTSUPP"])


@no_flock
def test_without_flock_the_pidfile_has_no_mark(traced, pidfile, fault):
    status, stdout, stderr = traced.run("--pidfile", pidfile, "--", "cat", pidfile, inject=[fault])
    assert (status, bool(re.fullmatch("[0-9]+\n", stdout)), stderr, names_beside(pidfile)) == (0, True, "", [])


@no_flock
def test_without_flock_a_dead_pid_is_taken_over_and_the_doubt_is_said(traced, pidfile, fault):
    prepare(pidfile, "stale")
    status, stdout, stderr = traced.run("--pidfile", pidfile, "--", "echo", "ran", inject=[fault])
    doubts = re.findall(r"\bflock\b", stderr)  # as a word, for the directory is named after this test
    assert (status, stdout, names_beside(pidfile), len(doubts)) == (0, "ran\n", [], 1)


@no_flock
@pytest.mark.parametrize("mark", ["\n", "\n\n\n"], ids=["unmarked", "marked"])
def test_without_flock_a_living_pid_is_respected(traced, pidfile, fault, mark):
    pidfile.write_text("%d%s" % (os.getpid(), mark))
    status, stdout, stderr = traced.run("--pidfile", pidfile, "--", "echo", "ran", inject=[fault])
    assert (status, stdout, names_beside(pidfile)) == (75, "", ["test.pid"])
    assert one_line(pidfile, "held by PID %d" % os.getpid()).fullmatch(stderr)


@no_flock
def test_without_flock_a_marked_file_of_a_dead_pid_is_left_to_people(traced, pidfile, dead_pid, fault):
    pidfile.write_text("%d\n\n\n" % dead_pid)
    status, stdout, stderr = traced.run("--pidfile", pidfile, "--", "echo", "ran", inject=[fault])
    assert (status, stdout, names_beside(pidfile)) == (75, "", ["test.pid"])
    assert one_line(pidfile, "no flock").fullmatch(stderr) and stderr.endswith("rm %s\n" % pidfile)


def test_a_flock_that_wants_a_write_open_gets_one(traced, pidfile):
    """As over NFS. Red when the second open is read-only too, and when every open is read-write."""
    prepare(pidfile, "stale")
    outcome = traced.run("--quiet", "--pidfile", pidfile, "--", "echo", "ran", inject=["flock:error=EBADF:when=1"])
    opens = [call.arguments for call in traced.calls(pidfile) if call.name == "openat"]
    accesses = re.findall('"%s", (O_[A-Z]+)' % re.escape(str(pidfile)), "\n".join(opens))
    assert (outcome, accesses) == ((0, "ran\n", ""), ["O_RDONLY", "O_RDWR", "O_RDONLY"])

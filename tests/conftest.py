"""Fixtures for all tests: the command as users run it, a living holder, a PID that is dead for certain."""
import collections
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHILDREN = ROOT / "tests" / "children"
PYTHON = os.environ.get("PIDLOCK_PYTHON", sys.executable)
OF_THE_TESTS = ("PIDLOCK_PYTHON", "PIDLOCK_FLAGS")
PIDLOCK = [PYTHON, *os.environ.get("PIDLOCK_FLAGS", "").split(), str(ROOT / "pidlock.py")]
PUBLIC = tempfile.TemporaryDirectory(prefix="pidlock-test-")  # where everybody may look; removed at the end

sys.path.insert(0, str(ROOT))

Outcome = collections.namedtuple("Outcome", "status stdout stderr")


def pytest_configure(config):
    config.addinivalue_line("markers", "blackbox: runs pidlock as a command; `make pythons` runs these everywhere")


def pytest_terminal_summary(terminalreporter):
    """Print what tests have recorded: record_property("summary", line)."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    lines = [value for report in reports if getattr(report, "when", None) == "call"
             for name, value in report.user_properties if name == "summary"]
    if lines:
        terminalreporter.section("what was tried")
        terminalreporter.write("".join(line + "\n" for line in sorted(lines)))
    if "PIDLOCK_OUTCOMES" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:  # whose reports come here too
        record_outcomes(terminalreporter.stats, os.environ["PIDLOCK_OUTCOMES"])


def record_outcomes(stats, path):
    """Append for each test of this run: its name, the Python if it is not the usual one, why it was skipped if so."""
    python = os.environ.get("PIDLOCK_PYTHON", "")
    with open(path, "a") as file:
        for report in [report for outcome in ("passed", "failed", "skipped") for report in stats.get(outcome, ())]:
            reason = report.longrepr[2].partition("Skipped: ")[2] if report.skipped else ""
            file.write("%s\t%s\t%s\n" % (report.nodeid, python, reason))


def tell_skips(path):
    """Print how many tests were skipped why, but for those that another run with the same Python has run."""
    with open(path) as file:
        outcomes = [line.rstrip("\n").split("\t") for line in file]
    ran = {(test, python) for test, python, reason in outcomes if not reason}
    counts = collections.Counter()
    for test, python, reason in {tuple(outcome) for outcome in outcomes if outcome[2]}:
        if (test, python) not in ran:
            under = " under %s, but not under the usual Python" % python if (test, "") in ran else ""
            counts["skipped%s: %s" % (under, reason)] += 1
    print("== what `make check` skipped" if counts else "== `make check` skipped nothing")
    for line, count in sorted(counts.items()):
        print("%4d %s" % (count, line))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIDLOCK_") and name not in OF_THE_TESTS]:
        monkeypatch.delenv(name)


@pytest.fixture
def pidfile(tmp_path):
    return tmp_path / "test.pid"


@pytest.fixture
def run():
    """Run pidlock to its end: run(*arguments, **Popen options) -> Outcome."""

    def run_pidlock(*arguments, stdin=b"", timeout=60, **options):
        process = subprocess.Popen(
            PIDLOCK + [os.fspath(argument) for argument in arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
        )
        stdout, stderr = process.communicate(stdin, timeout=timeout)
        texts = [stream.decode(errors="surrogateescape") for stream in (stdout, stderr)]
        return Outcome(process.returncode, *texts)

    return run_pidlock


AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


@functools.lru_cache()
def nobodys_pidlock():
    """Return the words that run pidlock as another user, None where there are none.

    He may be unable to enter this clone, or where this Python lies (both may be in /root): he gets a copy of the one,
    and of the other a second mount, for himself alone.
    """
    os.chmod(PUBLIC.name, 0o755)
    program = [*PIDLOCK[1:-1], shutil.copy(PIDLOCK[-1], PUBLIC.name)]
    python = pathlib.Path(os.path.realpath(PYTHON))
    here = pathlib.Path(PUBLIC.name, "python")
    here.mkdir()
    script = 'mount --bind "$0" "$1"; shift; exec "$@"'
    mount = ["unshare", "-m", "sh", "-ec", script, str(python.parents[1]), str(here)]
    mounted = [*mount, *AS_NOBODY, "env", "LD_LIBRARY_PATH=%s/lib" % here, str(here / "bin" / python.name)]
    for words in [[*AS_NOBODY, PYTHON, *program], [*mounted, *program]]:
        if os.geteuid() == 0 and shutil.which("setpriv") and shutil.which("unshare") and not subprocess.call(
                [*words, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            return words
    return None


@pytest.fixture
def run_as_nobody():
    """Run pidlock as another user: run_as_nobody(*arguments) -> Outcome."""
    if nobodys_pidlock() is None:
        pytest.skip("needs root, setpriv and unshare")

    def run_pidlock(*arguments):
        done = subprocess.run([*nobodys_pidlock(), *arguments], cwd="/", timeout=60, universal_newlines=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run_pidlock


@pytest.fixture
def public_directory():
    """A directory of ours that everybody can reach; tmp_path's parents are closed."""
    with tempfile.TemporaryDirectory(prefix="pidlock-test-") as directory:
        os.chmod(directory, 0o755)
        yield pathlib.Path(directory)


class Holder:
    """A pidlock whose command has said `ready` and lives until finish(), kill() or the end of the test."""

    def __init__(self, *arguments, **options):
        self.process = subprocess.Popen(
            [*PIDLOCK, *map(os.fspath, arguments), "--", "/bin/sh", "-c", "echo $$; read line"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
        )
        self.command_pid = int(self.process.stdout.readline())
        self.pid = self.process.pid

    def finish(self):
        """Let the command end; return pidlock's exit status."""
        self.process.communicate(timeout=60)
        return self.process.returncode

    def kill_wrapper(self):
        """kill -9 the pidlock alone: its command lives on until finish()."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait(timeout=60)


@pytest.fixture
def holder():
    """Start living holders: holder("--pidfile", path) -> Holder."""
    holders = []

    def start(*arguments, **options):
        holders.append(Holder(*arguments, **options))
        return holders[-1]

    yield start
    for one in holders:
        if one.process.poll() is None or not one.process.stdin.closed:
            one.process.communicate(timeout=60)


@pytest.fixture
def dead_pid():
    """A PID that has ended and been reaped."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


if __name__ == "__main__":  # the end of `make check`
    tell_skips(os.environ["PIDLOCK_OUTCOMES"])

"""A killed holder, writes that fall short, filesystems with less of flock(2); test_faults.py has each call's faults."""
import errno
import os
import re
import shutil
import subprocess

import pytest
from children.fault_strace import Traced
from conftest import PIDLOCK

pytestmark = [
    pytest.mark.blackbox,
    pytest.mark.skipif(not shutil.which("strace"), reason="strace lets pidlock's calls fail"),
]


@pytest.fixture
def traced(tmp_path_factory):
    return Traced(tmp_path_factory.mktemp("strace") / "log", PIDLOCK)


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


def test_the_command_of_a_killed_pidlock_keeps_the_lock_until_it_ends(run, holder, pidfile):
    """Red when the command does not inherit the lock's descriptor."""
    killed = holder("--pidfile", pidfile)
    killed.kill_wrapper()
    refused, probed = run("--pidfile", pidfile, "--", "echo", "ran"), run("--pidfile", pidfile, "--check")
    killed.finish()
    accepted = run("--quiet", "--pidfile", pidfile, "--wait", "60", "--", "echo", "ran")  # closed after its stdout
    assert (refused.status, refused.stdout, probed, accepted) == (75, "", (1, "", ""), (0, "ran\n", ""))
    assert one_line(pidfile, "PID %d, was killed, but its command lives on" % killed.pid).fullmatch(refused.stderr)


# ---- Calls that fail ----


def test_a_short_write_is_a_full_disk(traced, pidfile):
    """Red when what write(2) returns is ignored. The first write gives the process its name."""
    status, stdout, stderr = traced.run("--pidfile", pidfile, "--", "echo", "ran", inject=["write:retval=3:when=2"])
    assert (status, stdout, names_beside(pidfile)) == (125, "", [])
    assert one_line(pidfile, os.strerror(errno.ENOSPC)).fullmatch(stderr)


def test_only_a_private_file_is_left_where_nothing_can_be_removed(traced, run, pidfile):
    faults = ["/^unlink(at)?$:error=EIO", "/^link(at)?$:error=EIO"]
    status, stdout, stderr = traced.run("--pidfile", pidfile, "--", "echo", "ran", inject=faults)
    assert (status, stdout, [name[:9] for name in names_beside(pidfile)]) == (125, "", [".pidlock-"])
    assert one_line(pidfile, os.strerror(errno.EIO)).fullmatch(stderr)
    assert run("--pidfile", pidfile, "--", "echo", "ran") == (0, "ran\n", "")


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
    calls = "\n".join(call.text for call in traced.calls(pidfile.parent))
    accesses = re.findall(r'openat\("DIR/test.pid", (O_[A-Z]+)', calls)
    assert (outcome, accesses) == ((0, "ran\n", ""), ["O_RDONLY", "O_RDWR", "O_RDONLY"])

"""--signal: `kill $(cat FILE)` done safely, to the holder of this very file and to nobody else."""
import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import CHILDREN, PIDLOCK

import pidlock

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs Linux's /proc")

blackbox = pytest.mark.blackbox
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fdinfo"), reason="the kernel tells by /proc")
REPORT = [sys.executable, "-I", "-S", str(CHILDREN / "report_signals.py")]
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
LAST = str(int(signal.SIGRTMAX))  # ends REPORT; lower numbers come first, so whatever came before precedes it


def until(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "not within 30 s: " + what
        time.sleep(0.002)


def state_of(pid):
    return pathlib.Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def start():
    """Start something that says `ready`, and maybe its PID: start(*command) -> Popen with .words."""
    started = []

    def start_ready(*command):
        started.append(subprocess.Popen(list(map(os.fspath, command)), **PIPES))
        started[-1].words = started[-1].stdout.readline().split()
        assert started[-1].words[:1] == [b"ready"]
        return started[-1]

    yield start_ready
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


@pytest.fixture
def victim():
    """A process that nobody may signal."""
    process = subprocess.Popen(["sh", "-c", "echo ready; read line"], **PIPES)
    process.stdout.readline()
    yield process
    state = state_of(process.pid)
    process.kill()
    process.communicate(timeout=60)
    assert state in ("R", "S", "D"), "it was signalled"


# ---- Which signal ----


NAMES = {"TERM": "SIGTERM", "SIGTERM": "SIGTERM", "term": "SIGTERM", "sigterm": "SIGTERM", "SigUsr1": "SIGUSR1",
         "HUP": "SIGHUP", "10": "SIGUSR1", "010": "SIGUSR1", "1": "SIGHUP", "winch": "SIGWINCH", "RTMIN": "SIGRTMIN",
         str(signal.SIGRTMIN + 3): "SIGRTMIN+3"}


@blackbox
def test_each_name_and_number_reaches_the_command_once(run, start, pidfile):
    """Catches a signal that is sent to pidlock and to the command as well."""
    process = start(*PIDLOCK, "-p", pidfile, "--", *REPORT)
    for given, said in NAMES.items():
        assert run("-p", pidfile, "--signal", given) == (0, "", "")
        assert process.stdout.readline().decode() == said + "\n"
    assert run("-p", pidfile, "--signal", LAST) == (0, "", "")
    assert process.communicate(timeout=60) == (b"SIGRTMAX\n", b"")
    assert (process.returncode, pidfile.exists()) == (0, False)


@blackbox
@pytest.mark.parametrize("name", ["", "NONE", "SIG", "SIGSIGTERM", "0", "-1", "65", "9.5", "TERM ", "1\n", "+1"],
                         ids=ascii)
def test_an_unknown_signal_is_wrong_usage(run, holder, pidfile, name):
    one = holder("-p", pidfile)
    status, stdout, stderr = run("-p", pidfile, "--signal=" + name)
    assert (status, stdout, stderr.splitlines()[-1].startswith("pidlock: error: ")) == (2, "", True)
    assert one.finish() == 1


@blackbox
def test_term_ends_the_command_and_the_lock(run, holder, pidfile):
    one = holder("-p", pidfile)
    assert run("-p", pidfile, "--signal", "TERM") == (0, "", "")
    assert (one.process.wait(timeout=60), pidfile.exists()) == (143, False)


# ---- Nobody there ----


@blackbox
@pytest.mark.parametrize("body", [None, "{dead}\n", "{dead}\n\n\n", "{victim}\n\n\n", "garbage\n"],
                         ids=["no file", "dead", "marked, dead", "marked, recycled", "garbage"])
def test_where_nobody_holds_it_nobody_is_signalled(run, pidfile, dead_pid, victim, body):
    if body:
        pidfile.write_text(body.format(dead=dead_pid, victim=victim.pid))
        os.utime(pidfile, (10 ** 9, 10 ** 9))
    assert run("-p", pidfile, "--signal", "KILL") == (3, "", "")


def test_an_evictor_that_has_the_flock_for_an_instant_does_not_hide_that_nobody_holds_it(
        pidfile, dead_pid, monkeypatch):
    """Catches a single look: it finds a stranger behind the file, and refuses."""
    pidfile.write_bytes(b"%d\n\n\n" % dead_pid)
    evictor = os.open(pidfile, os.O_RDONLY)
    fcntl.flock(evictor, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(evictor, fcntl.LOCK_UN))  # between two looks
    assert pidlock.signal_holder(str(pidfile), signal.SIGTERM) is False
    os.close(evictor)


# ---- Strangers ----


def refusal(pidfile, pid):
    what = "not signalled: PID %d has not this file open and locked, as far as this user may see" % pid
    return 125, "", "pidlock: %s: %s; see who it is, then signal that by hand\n" % (pidfile, what)


every_way = pytest.mark.parametrize("name", ["TERM", "KILL", "STOP"])


@blackbox
@every_way
@pytest.mark.parametrize("body", ["{}\n", "pid={}\n", "{}"], ids=["a PID", "pid=", "without newline"])
def test_a_file_that_names_a_stranger_is_refused(run, pidfile, victim, body, name):
    """Catches `kill $(cat FILE)`."""
    pidfile.write_text(body.format(victim.pid))
    assert run("-p", pidfile, "--signal", name) == refusal(pidfile, victim.pid)


@blackbox
@every_way
def test_a_file_that_names_a_process_group_or_everybody_names_nobody(run, pidfile, name):
    for body in ("-1\n", "0\n", "-%d\n" % os.getpid()):
        pidfile.write_text(body)
        os.utime(pidfile, (10 ** 9, 10 ** 9))
        assert run("-p", pidfile, "--signal", name) == (3, "", "")


@blackbox
@every_way
@pytest.mark.parametrize("operation", [fcntl.LOCK_EX, fcntl.LOCK_SH], ids=["exclusive", "shared"])
def test_a_recycled_pid_is_refused_though_a_stranger_has_the_flock(run, pidfile, victim, name, operation):
    pidfile.write_text("%d\n\n\n" % victim.pid)
    with pidfile.open() as file:
        fcntl.flock(file, operation)
        outcome = run("-p", pidfile, "--signal", name)
    assert outcome == (refusal(pidfile, victim.pid) if operation == fcntl.LOCK_EX else (3, "", ""))


def rewrite(pidfile, pid):
    """Let the same file name another process."""
    with pidfile.open("r+") as file:
        file.write("%d\n\n\n" % pid)
        file.truncate()


@blackbox
@every_way
def test_a_holders_file_that_was_rewritten_to_name_another_process_is_refused(run, holder, pidfile, victim, name):
    """Where others may write the file, they must not choose whom root signals."""
    one = holder("-p", pidfile)
    pidfile.chmod(0o666)
    rewrite(pidfile, victim.pid)
    assert run("-p", pidfile, "--signal", name) == refusal(pidfile, victim.pid)
    assert one.finish() == 1


@blackbox
@every_way
def test_a_command_that_only_inherited_the_flock_is_refused(run, holder, pidfile, name):
    """Catches a check that the named process has the file open and locked, whoever took the lock."""
    one = holder("-p", pidfile)
    rewrite(pidfile, one.command_pid)
    assert run("-p", pidfile, "--signal", name) == refusal(pidfile, one.command_pid)
    assert one.finish() == 1


@blackbox
@every_way
def test_the_job_of_a_killed_holder_is_not_signalled_by_the_holders_number(run, holder, pidfile, name):
    one = holder("-p", pidfile)
    one.kill_wrapper()
    assert run("-p", pidfile, "--signal", name) == refusal(pidfile, one.pid)


@blackbox
@every_way
def test_another_users_holder_is_refused(holder, run_as_nobody, public_directory, name):
    pidfile = public_directory / "test.pid"
    one = holder("-p", pidfile)
    assert run_as_nobody("-p", pidfile, "--signal", name) == refusal(pidfile, one.pid)
    assert one.finish() == 1


# ---- KILL and STOP ----


@blackbox
@needs_proc
def test_kill_reaches_the_command_and_not_an_older_child_of_pidlocks_process(run, pidfile):
    """A shell that executes pidlock leaves it its own children. Red where the first child is taken for the command."""
    script = 'sleep 600 >/dev/null & echo $!; exec "$@"'
    with subprocess.Popen(["sh", "-c", script, "sh", *PIDLOCK, "-p", pidfile, "--", "sh", "-c", "echo $$; exec cat"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        bystander, command = int(process.stdout.readline()), int(process.stdout.readline())
        try:
            deadline = time.monotonic() + 30
            while "(cat)" not in run("-p", pidfile, "--status").stdout:
                assert time.monotonic() < deadline, "it is never told as cat"
            assert run("-p", pidfile, "--signal", "KILL") == (0, "", "")
            assert (process.wait(30), os.path.exists("/proc/%d" % command), pidfile.exists()) == (137, False, False)
        finally:
            os.kill(bystander, signal.SIGKILL)  # fails where it was not left alone


@blackbox
def test_kill_ends_the_command_and_pidlock_reports_it_and_releases(run, holder, pidfile):
    """Catches a KILL of pidlock itself, which would leave the job without its holder."""
    one = holder("-p", pidfile)
    assert run("-p", pidfile, "--signal", "KILL") == (0, "", "")
    assert (one.process.wait(timeout=60), pidfile.exists(), os.path.exists("/proc/%d" % one.command_pid)) == (
        137, False, False)


@blackbox
def test_stop_stops_the_command_and_pidlock_goes_on(run, holder, pidfile):
    one = holder("-p", pidfile)
    assert run("-p", pidfile, "--signal", "STOP") == (0, "", "")
    until(lambda: state_of(one.command_pid) == "T", "the command stops")
    assert (state_of(one.pid) != "T", run("-p", pidfile, "--check").status) == (True, 1)
    assert run("-p", pidfile, "--signal", "CONT") == (0, "", "")
    until(lambda: state_of(one.command_pid) != "T", "the command goes on")
    assert one.finish() == 1


LONG = ["sh", "-c", "sleep 60 & echo ready $$ $!; wait"]


@blackbox
@pytest.mark.skipif(not shutil.which("timeout"), reason="needs timeout(1)")
@pytest.mark.parametrize("name", ["KILL", "TERM"])
@pytest.mark.parametrize("options, command", [
    ([], ["timeout", "60", *LONG]), (["-g"], LONG), (["-g"], ["timeout", "60", *LONG]),
], ids=["timeout", "group", "both"])
def test_of_a_command_in_its_own_group_no_process_is_left(run, start, pidfile, options, command, name):
    """Catches a KILL of timeout(1) alone, which orphans what it runs."""
    process = start(*PIDLOCK, "-p", pidfile, *options, "--", *command)
    pids = [int(word) for word in process.words[1:]]
    assert len(pids) == 2 and run("-p", pidfile, "--signal", name) == (0, "", "")
    assert process.wait(timeout=60) in ((137,) if name == "KILL" else (124, 143))
    until(lambda: not any(os.path.exists("/proc/%d" % pid) and state_of(pid) != "Z" for pid in pids), "all have ended")
    assert not pidfile.exists()


# ---- Holders by the library ----


@blackbox
def test_a_holder_by_the_library_gets_the_signal_itself(run, start, pidfile):
    process = start(sys.executable, CHILDREN / "signal_lib_holder.py", pidfile)
    for name in ("USR1", "TERM"):
        assert run("-p", pidfile, "--signal", name) == (0, "", "")
        assert process.stdout.readline() == b"SIG%s\n" % name.encode()
    assert (process.wait(timeout=60), pidfile.exists()) == (0, False)


@blackbox
@pytest.mark.parametrize("arguments", [[], ["pidlock"]], ids=["", "with pidlock among its arguments"])
def test_a_holder_by_the_library_gets_kill_itself(run, start, pidfile, arguments):
    process = start(sys.executable, CHILDREN / "signal_lib_holder.py", pidfile, *arguments)
    assert run("-p", pidfile, "--signal", "KILL") == (0, "", "")
    assert (process.wait(timeout=60), run("-p", pidfile, "--check")) == (-signal.SIGKILL, (0, "", ""))


# ---- Without pidfd_send_signal ----


@pytest.mark.parametrize("missing", [[], [(signal, "pidfd_send_signal")], [(signal, "pidfd_send_signal"),
                                     (os, "pidfd_open")]], ids=["with", "without", "without pidfd_open too"])
def test_without_pidfd_send_signal_it_is_sent_all_the_same(start, pidfile, victim, monkeypatch, missing):
    for module, name in missing:
        monkeypatch.delattr(module, name, raising=False)
    process = start(*PIDLOCK, "-p", pidfile, "--", *REPORT)
    assert pidlock.signal_holder(pidfile, signal.SIGTERM)
    assert process.stdout.readline() == b"SIGTERM\n"
    other = pidfile.with_name("other.pid")
    other.write_text("%d\n" % victim.pid)
    with pytest.raises(pidlock.PidLockError, match="not signalled: PID %d " % victim.pid):
        pidlock.signal_holder(other, signal.SIGTERM)
    assert pidlock.signal_holder(pidfile, signal.SIGRTMAX) and process.wait(timeout=60) == 0
    assert not pidlock.signal_holder(pidfile, signal.SIGTERM)

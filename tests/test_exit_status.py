"""The exit status tells what happened: the command's own, 128+N, 75, 125, 126, 127 and 2."""
import contextlib
import os
import signal
import subprocess

import pytest
from conftest import PIDLOCK

import pidlock

pytestmark = pytest.mark.blackbox

PAGE = os.sysconf("SC_PAGE_SIZE")  # a pipe counts its room in pages
SIGNALS = "HUP INT QUIT ILL TRAP ABRT FPE KILL USR1 SEGV USR2 PIPE ALRM TERM XCPU XFSZ".split()


def make_executable(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("status", [0, 1, 2, 7, 75, 125, 126, 127, 128, 143, 254, 255])
def test_the_status_is_the_commands_own(run, pidfile, status):
    assert run("-p", pidfile, "--", "sh", "-c", "exit %d" % status) == (status, "", "")
    assert not pidfile.exists()


@pytest.mark.parametrize("number", [getattr(signal, "SIG" + name) for name in SIGNALS] + [signal.SIGRTMAX], ids=int)
def test_death_by_signal_n_is_128_plus_n(run, pidfile, tmp_path, number):
    """PIPE and XFSZ: Python ignores them, so a command that got its dispositions would survive."""
    command = ["sh", "-c", "ulimit -c 0; kill -%d $$; echo survived" % number]
    assert run("-p", pidfile, "--", *command, cwd=tmp_path) == (128 + number, "", "")
    assert not pidfile.exists()


def test_an_interrupt_that_no_terminal_sent_does_not_kill_pidlock_itself(run, pidfile):
    assert run("-p", pidfile, "--", "sh", "-c", "kill -INT $$").status == 130


def test_held_is_75(run, holder, pidfile):
    holder("-p", pidfile)
    assert run("-p", pidfile, "-q", "--", "echo", "ran") == (75, "", "")


def test_check_is_0_for_free_and_stale_and_1_for_held_in_silence(run, holder, pidfile, dead_pid):
    assert run("-p", pidfile, "--check") == (0, "", "")
    pidfile.write_text("%d\n" % dead_pid)
    assert run("-p", pidfile, "--check") == (0, "", "")
    holder("-q", "-p", pidfile)
    assert run("-p", pidfile, "--check") == (1, "", "")


@pytest.mark.parametrize("probe", [["--check"], ["--", "true"]], ids=" ".join)
def test_a_failure_of_pidlock_is_125(run, tmp_path, probe):
    line = "pidlock: %s: is a directory, not a pidfile; name another file\n" % tmp_path
    assert run("-p", tmp_path, *probe) == (125, "", line)


def test_no_wait_is_spent_on_a_failure(run, tmp_path):
    assert run("-p", tmp_path, "--wait", "inf", "--", "true", timeout=30).status == 125


def test_wrong_usage_is_2(run, pidfile):
    assert run("-p", pidfile).status == 2


# ---- Commands that cannot be run ----


@pytest.mark.parametrize("name", ["no-such-command", "/no/such/command", "./no-such-command", ""], ids=repr)
def test_a_command_that_is_not_there_is_127(run, pidfile, tmp_path, name):
    line = "pidlock: %s: not found; check the name and PATH\n" % name
    assert run("-p", pidfile, "--", name, cwd=tmp_path) == (127, "", line)
    assert not pidfile.exists()


@pytest.mark.parametrize("prepare, problem", [
    (lambda path: path.write_text("echo ran\n"), "Permission denied"),
    (lambda path: path.mkdir(), "Permission denied"),
    (lambda path: make_executable(path, "#!/no/such\n"), "the interpreter that its first line names was not found"),
    (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
], ids=["no permission", "directory", "no interpreter", "link to itself"])
@pytest.mark.parametrize("by_path", [False, True], ids=["as a path", "found in PATH"])
def test_a_command_that_cannot_be_executed_is_126(run, pidfile, tmp_path, prepare, problem, by_path):
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "command"
    prepare(command)
    name = "command" if by_path else str(command)
    line = "pidlock: %s: cannot be executed: %s; check its permissions and its first line\n" % (name, problem)
    assert run("-p", pidfile, "--", name, env={"PATH": str(tmp_path / "bin")}) == (126, "", line)
    assert not pidfile.exists()


@pytest.mark.parametrize("by_path", [False, True], ids=["as a path", "found in PATH"])
def test_a_script_without_a_first_line_runs_under_sh(run, pidfile, tmp_path, by_path):
    script = make_executable(tmp_path / "job", 'echo "$0 $#: $1 $2"; exit 7\n')
    name = "job" if by_path else str(script)
    outcome = run("-p", pidfile, "--", name, "a b", "-c", env={"PATH": str(tmp_path)})
    assert outcome == (7, "%s 2: a b -c\n" % script, "")


def test_an_empty_executable_succeeds_as_under_a_shell(run, pidfile, tmp_path):
    assert run("-p", pidfile, "--", make_executable(tmp_path / "empty", "")) == (0, "", "")


def test_path_is_searched_in_order_beyond_what_cannot_be_executed(run, pidfile, tmp_path):
    for place in ("plain", "first", "second"):
        (tmp_path / place).mkdir()
        make_executable(tmp_path / place / "job", "#!/bin/sh\necho %s\n" % place)
    (tmp_path / "plain" / "job").chmod(0o644)
    (tmp_path / "file").touch()
    places = ":".join(str(tmp_path / place) for place in ("missing", "file", "plain", "first", "second"))
    assert run("-p", pidfile, "--", "job", env={"PATH": places}) == (0, "first\n", "")


def test_without_path_the_systems_default_is_searched(run, pidfile):
    assert run("-p", pidfile, "--", "echo", "found", env={}) == (0, "found\n", "")


def test_without_path_the_current_directory_is_not_searched(run, pidfile, tmp_path):
    """execvp(3) stopped doing that for safety; os.defpath of Python 3.6 still begins with it."""
    make_executable(tmp_path / "planted-job", "#!/bin/sh\necho ran\n")
    assert run("-p", pidfile, "--", "planted-job", cwd=tmp_path, env={})[:2] == (127, "")


# ---- Streams that cannot be written ----


@pytest.mark.parametrize("arguments, status", [
    (["-p", "FILE", "--", "sh", "-c", "exit 7"], 7),
    (["-v", "-p", "FILE", "--", "true"], 0),
    (["-v", "-p", "STALE", "--", "true"], 0),
    (["-p", "HELD", "--", "true"], 75),
    (["-p", "HELD", "--check"], 1),
    (["-p", ".", "--", "true"], 125),
    (["-p", "FILE", "--", "."], 126),
    (["-p", "FILE", "--", "no-such-command"], 127),
    (["-p", "FILE"], 2),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", ">&-", ">/dev/full 2>&1", "<&- >&- 2>&-"])
def test_a_stream_that_cannot_be_written_changes_no_status(tmp_path, dead_pid, arguments, status, redirection):
    """Catches a plain print(), which makes it 1 or 120."""
    (tmp_path / "STALE").write_text("%d\n" % dead_pid)
    command = ["sh", "-c", 'exec "$@" ' + redirection, "sh", *PIDLOCK, *arguments]
    with pidlock.PidLock(tmp_path / "HELD"):
        assert subprocess.run(command, cwd=tmp_path, timeout=60).returncode == status
    assert not (tmp_path / "FILE").exists()


@pytest.mark.parametrize("option", ["--version", "--help"])
@pytest.mark.parametrize("redirection, status", [
    ("2>&-", 0), (">&-", 125), (">/dev/full", 125), (">/dev/full 2>&1", 125),
])
def test_what_was_asked_for_and_cannot_be_printed_is_a_failure(option, redirection, status):
    command = ["sh", "-c", 'exec "$@" ' + redirection, "sh", *PIDLOCK, option]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
    assert done.returncode == status


@pytest.mark.parametrize("arguments, status", [
    (["-p", "FILE", "--", "no-such-command"], 127),
    (["-v", "-p", "FILE", "--", "true"], 0),
    (["-p", "."], 2),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_stderr_that_nobody_reads_any_more_changes_no_status(tmp_path, arguments, status):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert subprocess.run(PIDLOCK + arguments, cwd=tmp_path, stderr=writer, timeout=60).returncode == status
    finally:
        os.close(writer)


@pytest.fixture
def unread_pipe():
    """A pipe that nobody reads; unread_pipe(room) returns its end for writing, with room for so many bytes."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(PAGE))
    os.set_blocking(writer, True)

    def make_room(room):
        assert not room or len(os.read(reader, room)) == room
        return writer

    yield make_room
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("arguments, status", [
    (["-p", "FILE", "--", "touch", "ran"], 0),
    (["-p", "STALE", "--", "touch", "ran"], 0),
    (["-v", "-p", "FILE", "--", "touch", "ran"], 0),
    (["-p", "FILE", "--log", "-", "--", "touch", "ran"], 0),
    (["-p", "FILE", "--", "rm", "FILE"], 0),
    (["-p", "HELD", "--", "true"], 75),
    (["-p", ".", "--check"], 125),
    (["-p", "FILE", "--", "no-such-command"], 127),
    (["-p", "FILE", "--group", "--", "no-such-command"], 127),
    (["-p", "FILE"], 2),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_full_stderr_that_nobody_reads_changes_nothing(tmp_path, dead_pid, unread_pipe, arguments, status):
    """Red where a message is written without a look whether there is room: write(2) blocks, with the lock held."""
    (tmp_path / "STALE").write_text("%d\n" % dead_pid)
    with pidlock.PidLock(tmp_path / "HELD"):
        done = subprocess.run(PIDLOCK + arguments, cwd=tmp_path, stderr=unread_pipe(0), timeout=30)
    left = {"ran"} & {*arguments} | {"STALE"} - {*arguments}
    assert (done.returncode, {*os.listdir(tmp_path)}) == (status, left)


@pytest.mark.parametrize("pages", [1, 2])
def test_a_long_line_for_a_stderr_with_little_room_changes_nothing(tmp_path, unread_pipe, pages):
    """Red where it is one write: poll(2) promises room for PIPE_BUF bytes, and this is an event of 6,000."""
    path = os.path.join(*["\1" * 250] * 4, "FILE")
    command = [*PIDLOCK, "-p", path, "--log", "-", "--", "touch", "ran"]
    done = subprocess.run(command, cwd=tmp_path, stderr=unread_pipe(pages * PAGE), timeout=30)
    assert (done.returncode, (tmp_path / "ran").exists(), (tmp_path / path).exists()) == (0, True, False)

"""On a real terminal: its keys reach the command once, job control works, and a shell's loop stops at Ctrl-C."""
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from conftest import CHILDREN, PIDLOCK, PYTHON, ROOT
from test_signals import (
    LAST,
    REPORT,
    is_stopped,
    kill_session,
    needs_audit,
    needs_bash,
    needs_unshare,
    status_field,
    until,
)

pytestmark = [
    pytest.mark.blackbox,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]

CTRL_C, CTRL_Z, CTRL_BACKSLASH = b"\x03", b"\x1a", b"\x1c"
needs_timeout = pytest.mark.skipif(not shutil.which("timeout"), reason="needs timeout(1)")


class Terminal:
    """A pseudo-terminal without echo, and the leader of its session: a command or an interactive shell."""

    def __init__(self, *command):
        self.master, slave = pty.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[1] &= ~termios.OPOST
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        self.leader = subprocess.Popen(
            [os.fspath(word) for word in command], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=dict(os.environ, PS1="", PS2="", ENV="", TERM="xterm"),
        )
        os.close(slave)
        self.unread = ""

    def type(self, text):
        os.write(self.master, text if isinstance(text, bytes) else text.encode() + b"\n")

    def read_until(self, pattern):
        """Read on until the pattern has come; return all that came up to and with it."""
        deadline = time.monotonic() + 30
        while True:
            match = re.search(pattern, self.unread)
            if match:
                seen, self.unread = self.unread[:match.end()], self.unread[match.end():]
                return seen
            if not self._read_more(deadline):
                pytest.fail("no %r in what the terminal shows: %r" % (pattern, self.unread))

    def finish(self):
        """Return (status, the rest of what the terminal shows) at the end of the session's leader."""
        deadline = time.monotonic() + 30
        while self._read_more(deadline):
            pass
        return self.leader.wait(timeout=60), self.unread

    def hang_up(self):
        os.close(self.master)
        self.master = None

    def close(self):
        kill_session(self.leader.pid)
        self.leader.wait(timeout=60)
        if self.master is not None:
            self.hang_up()

    def _read_more(self, deadline):
        if not select.select([self.master], [], [], max(0, deadline - time.monotonic()))[0]:
            return pytest.fail("the terminal shows nothing more behind %r" % self.unread)
        try:
            more = os.read(self.master, 65536)
        except OSError:  # EIO: nobody has the other side open any more
            return False
        self.unread += more.decode()
        return bool(more)


@pytest.fixture
def terminal():
    """Open terminals: terminal(*command) -> Terminal."""
    terminals = []

    def open_terminal(*command):
        terminals.append(Terminal(*command))
        return terminals[-1]

    yield open_terminal
    for one in terminals:
        one.close()


@pytest.fixture
def locked(pidfile):
    """Return a command line: locked(*command, options=[...]) -> [python, pidlock.py, --pidfile, ..., *command]."""

    def command_line(*command, options=()):
        return [*PIDLOCK, "--pidfile", str(pidfile), *options, "--", *map(str, command)]

    return command_line


@pytest.fixture
def shell(terminal):
    """An interactive shell with job control."""
    return terminal("sh", "-i")


def quoted(command):
    return " ".join("'%s'" % word.replace("'", "'\\''") for word in command)


def pid_in(pidfile):
    return int(pidfile.read_text())


# ---- Keys ----


@pytest.mark.parametrize("arguments", [(), ("--own-group",)], ids=["same group", "own group"])
@pytest.mark.parametrize("key, name", [(CTRL_C, "SIGINT"), (CTRL_BACKSLASH, "SIGQUIT")], ids=["Ctrl-C", "Ctrl-\\"])
def test_a_key_reaches_the_command_exactly_once(terminal, locked, key, name, arguments):
    """Red in the same group where the terminal's signals are passed on, in the other where they are not."""
    one = terminal(*locked(*REPORT, *arguments))
    one.read_until("ready\n")
    one.type(key)
    one.read_until(name + "\n")
    os.kill(one.leader.pid, LAST)
    assert one.finish() == (0, "SIGRTMAX\n")


@pytest.mark.parametrize("before", [(), pytest.param(("timeout", "60"), marks=needs_timeout)], ids=["alone", "timeout"])
def test_ctrl_c_ends_the_command_and_then_pidlock_by_sigint(terminal, locked, pidfile, before):
    one = terminal(*locked(*before, "sh", "-c", "echo parent $PPID; exec sleep 60"))
    parent_pid = int(one.read_until(r"parent \d+\n").split()[-1])
    # timeout(1) leaves its command alone when the signal comes before its own fork(2) has returned
    until(lambda: status_field(parent_pid, "State") == "S", "the command's parent sleeps")
    one.type(CTRL_C)
    assert (one.finish(), pidfile.exists()) == ((-signal.SIGINT, ""), False)


def test_ctrl_backslash_is_131(terminal, locked, pidfile):
    one = terminal(*locked("sh", "-c", "ulimit -c 0; echo ready; exec sleep 60"))
    one.read_until("ready\n")
    one.type(CTRL_BACKSLASH)
    assert (one.finish(), pidfile.exists()) == ((131, ""), False)


@needs_bash
@pytest.mark.parametrize("waiting", [False, True], ids=["running", "waiting"])
def test_ctrl_c_stops_a_loop_of_a_script(terminal, locked, holder, pidfile, waiting):
    """bash stops only when what it ran has died by SIGINT: red where pidlock exits with 130."""
    ready = "ready\n"
    if waiting:
        holder("--pidfile", pidfile)
        ready = "waiting for "
    command = locked("sh", "-c", "echo ready; exec sleep 60", options=["--wait", "60"])
    one = terminal("bash", "-c", 'for i in 1 2 3; do "$@"; done; echo survived', "bash", *command)
    one.read_until(ready)
    one.type(CTRL_C)
    status, said = one.finish()
    assert (status, said.rpartition("\r\33[K")[2]) == (-signal.SIGINT, "")


def test_after_ctrl_c_a_shell_sees_130(shell, locked, pidfile):
    shell.type(quoted(locked("sh", "-c", "echo ready; exec sleep 60")))
    shell.read_until("ready\n")
    shell.type(CTRL_C)
    until(lambda: not pidfile.exists(), "the lock is free")
    shell.type("echo status=$?")
    shell.read_until("status=130\n")


def test_an_exit_status_of_130_does_not_become_a_death_by_sigint(terminal, locked):
    """The command has dealt with Ctrl-C in its own way, and so decides what a loop makes of it."""
    one = terminal(*locked("sh", "-c", "trap 'exit 130' INT; echo ready; while :; do sleep 0.1; done"))
    one.read_until("ready\n")
    one.type(CTRL_C)
    assert one.finish() == (130, "")


def test_ctrl_c_ends_the_wait_by_sigint(terminal, holder, locked, pidfile):
    """And the line that says whom it waits for is gone."""
    one = holder("--pidfile", pidfile)
    waiter = terminal(*locked("echo", "mine", options=["--wait", "60"]))
    waiter.read_until("waiting for 0s")
    waiter.type(CTRL_C)
    status, said = waiter.finish()
    assert (status, said.rpartition("\r")[2], pid_in(pidfile)) == (-signal.SIGINT, "\33[K", one.pid)


def test_a_wait_says_for_whom_and_for_how_long_on_one_line_that_it_cleans_up(terminal, holder, locked, pidfile):
    one = holder("--pidfile", pidfile)
    waiter = terminal(*locked("echo", "mine", options=["--wait", "60"]))
    said = waiter.read_until("waiting for 1s[^\r]*\r")
    one.finish()
    status, rest = waiter.finish()
    lines = [line for line in (said + rest).split("\r\33[K") if line]
    assert (status, lines.pop()) == (0, "mine\n")
    assert re.match(r"pidlock: test\.pid: waiting for 0s: held by PID %d \(sh\) for \d+s$" % one.pid, lines[0])
    assert [line for line in lines if not line.startswith("pidlock: test.pid: waiting for ")] == []


@pytest.mark.parametrize("locale, name, line", [
    ("C.UTF-8", "test.pid", "pidlock: test.pid: waiting fo"),
    ("C.UTF-8", "\u65e5\u672c.pid", "pidlock: \u65e5\u672c.pid: waiting fo"),
    ("POSIX", "\xfc.pid", "pidlock: \\xc3\\xbc.pid: waitin"),
], ids=["narrow", "wide", "ASCII"])
def test_the_line_of_a_wait_is_cut_to_the_width_of_the_terminal(terminal, holder, tmp_path, locale, name, line):
    """A line that wraps could not be erased. Catches a count of characters, rather than columns."""
    holder("--pidfile", tmp_path / name)
    environment = ["env", "LC_ALL=" + locale, "PYTHONUTF8=0", "PYTHONCOERCECLOCALE=0"]
    waiter = terminal("sh", "-c", 'stty cols 30; exec "$@"', "sh", *environment, *PIDLOCK, "-p", tmp_path / name,
                      "-w", "0.1", "true")
    status, said = waiter.finish()
    _, first, *_, last = said.split("\r\33[K")
    assert (status, first, last[:10]) == (75, line, "pidlock: /")


def test_a_stopped_terminal_does_not_stop_a_wait(terminal, holder, locked, pidfile):
    """Ctrl-S: catches a line that is written all the same, and never returns."""
    one = holder("--pidfile", pidfile)
    marker = pidfile.with_name("ran")
    waiter = terminal(*locked("touch", marker, options=["--wait", "60"]))
    waiter.read_until("waiting for ")
    waiter.type(b"\x13")
    one.finish()
    until(marker.exists, "the command has run")
    waiter.type(b"\x11")
    assert waiter.finish()[0] == 0


@needs_bash
def test_behind_ctrl_z_and_bg_a_wait_leaves_the_prompt_alone(terminal, holder, locked, pidfile):
    """Catches a line that is erased when there is a prompt in its place by now."""
    one = holder("--pidfile", pidfile)
    shell = terminal("bash", "--norc", "--noediting", "-i")
    shell.type(quoted(locked("echo", "mine", options=["--wait", "60"])))
    shell.read_until("waiting for ")
    shell.type(CTRL_Z)
    shell.read_until("Stopped")
    shell.type("bg; echo BACK")
    shell.read_until("BACK\n")
    one.finish()
    assert "\33[K" not in shell.read_until("mine\n")


@needs_audit
@pytest.mark.parametrize("has_terminal", [False, True], ids=["no terminal", "terminal"])
def test_on_a_terminal_the_command_is_forked(terminal, locked, has_terminal):
    """Ctrl-Z would stop a spawned one before its execve, and pidlock in vfork(2) behind it, which no fg continues."""
    code = ("import pidlock, sys; sys.addaudithook(lambda event, _: event in ('os.fork', 'os.posix_spawn')"
            " and print(event, flush=True)); sys.exit(pidlock.main())")
    command = ["env", "PYTHONPATH=%s" % ROOT, PYTHON, "-c", code, *locked("true")[len(PIDLOCK):]]
    one = terminal(*([] if has_terminal else ["setsid", "--wait"]), *command)
    assert one.finish() == (0, "os.fork\n" if has_terminal else "os.posix_spawn\n")


@pytest.mark.parametrize("how", ["background", "background of a script", "dumb"])
def test_where_a_line_cannot_be_rewritten_a_wait_says_it_once(shell, holder, locked, pidfile, how):
    one = holder("--pidfile", pidfile)
    command = quoted(locked("echo", "mine", options=["--wait", "0.5"]))
    shell.type({"background": command + " &", "background of a script": "sh -c %s" % quoted([command + " & wait"]),
                "dumb": "TERM=dumb " + command}[how])
    said = shell.read_until("stop it\n")
    reason = "held by PID %d (sh) for 0s" % one.pid
    assert said.split("pidlock: ")[1:] == ["%s: waiting for 0s: %s\n" % (pidfile, reason),
                                           "%s: %s; wait for it or stop it\n" % (pidfile, reason)]


@needs_audit
@pytest.mark.parametrize("event", ["os.link=", "os.remove=.pidlock-", "os.fork|os.posix_spawn="])
def test_ctrl_c_between_acquire_and_the_command_is_not_lost(terminal, locked, pidfile, event):
    """It came before the command existed, so nobody else passes it on. Red where all of the terminal's are left out."""
    arguments = locked("sleep", "60")[len(PIDLOCK):]
    one = terminal(PYTHON, CHILDREN / "signals_at_event.py", event, "ctrl-c", *arguments)
    one.read_until("press\n")
    one.type(CTRL_C)
    assert (one.finish(), list(pidfile.parent.iterdir())) == ((-signal.SIGINT, ""), [])


@needs_unshare
def test_as_pid_1_ctrl_c_exits_with_130(terminal, locked, pidfile):
    """PID 1 cannot die by its own SIGINT: the kernel drops it."""
    one = terminal("unshare", "-pf", "--mount-proc", *locked("sh", "-c", "echo ready; exec sleep 60"))
    one.read_until("ready\n")
    one.type(CTRL_C)
    seen = one.finish()
    assert (seen[0] if seen[0] >= 0 else 128 - seen[0], seen[1], pidfile.exists()) == (130, "", False)


# ---- Window and line ----


@pytest.mark.parametrize("arguments", [(), ("--own-group",)], ids=["same group", "own group"])
def test_a_change_of_the_windows_size_arrives_once(terminal, locked, arguments):
    one = terminal(*locked(*REPORT, *arguments))
    one.read_until("ready\n")
    fcntl.ioctl(one.master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    one.read_until("SIGWINCH\n")
    os.kill(one.leader.pid, LAST)
    assert one.finish() == (0, "SIGRTMAX\n")


@pytest.mark.parametrize("arguments", ["", "--own-group"], ids=["same group", "own group"])
def test_a_hang_up_reaches_the_command_of_a_session_leader(terminal, locked, pidfile, tmp_path, arguments):
    """The kernel tells the leader alone. Red where every HUP of the kernel's is taken for everybody's."""
    log = tmp_path / "log"
    one = terminal(*locked("sh", "-c", "exec %s %s >'%s'" % (quoted(REPORT), arguments, log)))
    until(lambda: log.exists() and log.read_text() == "ready\n", "the command is ready")
    one.hang_up()
    until(lambda: "SIGHUP\n" in log.read_text(), "the command got SIGHUP")
    os.kill(one.leader.pid, LAST)
    status = one.leader.wait(timeout=60)
    assert (status, log.read_text().replace("SIGCONT\n", ""), pidfile.exists()) == (
        0, "ready\nSIGHUP\nSIGRTMAX\n", False)


def test_a_hang_up_ends_command_and_lock(terminal, locked, pidfile):
    one = terminal(*locked("sh", "-c", "echo ready; exec sleep 60"))
    one.read_until("ready\n")
    one.hang_up()
    assert (one.leader.wait(timeout=60), pidfile.exists()) == (129, False)


# ---- Job control ----


def stop_and_continue_twice(shell, pid, command_pid):
    for _ in range(2):
        shell.type(CTRL_Z)
        until(lambda: is_stopped(pid) and is_stopped(command_pid), "both are stopped")
        shell.type("echo prompt is back")
        shell.read_until("prompt is back\n")
        shell.type("fg")
        until(lambda: not is_stopped(pid) and not is_stopped(command_pid), "both go on")


def test_ctrl_z_and_fg(shell, locked, pidfile):
    """Red where pidlock does not stop with its command: the shell never gets the terminal back."""
    shell.type(quoted(locked("sh", "-c", "echo ready $$; read line; echo got $line")))
    command_pid = int(shell.read_until(r"ready \d+\n").split()[-1])
    stop_and_continue_twice(shell, pid_in(pidfile), command_pid)
    shell.type("hello")
    shell.read_until("got hello\n")
    shell.type("echo status=$?")
    shell.read_until("status=0\n")


@needs_timeout
def test_ctrl_z_and_fg_with_a_command_in_a_group_of_its_own(shell, locked, pidfile):
    """Red where the stop and the continuation are not passed on to all of that group."""
    shell.type(quoted(locked("timeout", "60", "sh", "-c", "echo ready $$; exec sleep 60")))
    command_pid = int(shell.read_until(r"ready \d+\n").split()[-1])
    stop_and_continue_twice(shell, pid_in(pidfile), command_pid)
    shell.type(CTRL_C)
    until(lambda: not pidfile.exists(), "the lock is free")


def test_ctrl_z_stops_no_command_that_nobody_could_continue(terminal, locked):
    """A session's leader, as in a container with a terminal: the kernel lets no Ctrl-Z stop its group (signal(7)).

    Red where pidlock passes it on to the command's own group all the same.
    """
    one = terminal(*locked(*REPORT, "--own-group"))
    one.read_until("ready\n")
    one.type(CTRL_Z + CTRL_C)
    one.read_until("SIGINT\n")
    os.kill(one.leader.pid, LAST)
    one.read_until("SIGRTMAX\n")


def test_ctrl_z_and_fg_while_waiting(shell, holder, locked, pidfile):
    one = holder("--pidfile", pidfile)
    shell.type("sh -c 'echo waiter $$; exec \"$@\"' sh " + quoted(locked("echo", "mine", options=["--wait", "60"])))
    waiter_pid = int(shell.read_until(r"waiter \d+\n").split()[-1])
    shell.read_until("waiting for ")
    shell.type(CTRL_Z)
    until(lambda: is_stopped(waiter_pid), "the waiter is stopped")
    shell.type("fg")
    until(lambda: not is_stopped(waiter_pid), "the waiter goes on")
    one.finish()
    shell.read_until("mine\n")


def test_a_background_job_that_reads_the_terminal_stops_and_fg_resumes_it(shell, locked, pidfile):
    shell.type(quoted(locked("sh", "-c", "echo ready; read line; echo got $line")) + " &")
    shell.read_until("ready\n")
    pid = until(lambda: pid_in(pidfile), "the lock is taken")
    until(lambda: is_stopped(pid), "the job is stopped by TTIN")
    shell.type("fg")
    until(lambda: not is_stopped(pid) and os.tcgetpgrp(shell.master) == os.getpgid(pid), "it has the terminal")
    shell.type("hello")
    shell.read_until("got hello\n")


def test_a_sigstop_of_the_command_alone_does_not_stop_pidlock(shell, locked, pidfile):
    """Red where pidlock stops itself for every stop of its command: it would not pass on the next signal."""
    shell.type(quoted(locked("sh", "-c", "echo command $$; exec %s" % quoted(REPORT))))
    command_pid = int(shell.read_until(r"command \d+\n").split()[-1])
    shell.read_until("ready\n")
    pid = pid_in(pidfile)
    os.kill(command_pid, signal.SIGSTOP)
    until(lambda: is_stopped(command_pid), "the command is stopped")
    os.kill(pid, signal.SIGUSR1)
    os.kill(command_pid, signal.SIGCONT)
    shell.read_until("SIGUSR1\n")
    os.kill(pid, LAST)
    shell.read_until("SIGRTMAX\n")

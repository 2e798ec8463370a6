"""--group: the command leads a process group, gets signals with all of it, and has the terminal meanwhile."""
import os
import signal
import sys

import pytest
import test_signals
import test_terminal
from conftest import PIDLOCK
from test_signals import LAST, REPORT, finish, is_stopped, name_of, named, needs_bash, until
from test_terminal import CTRL_C, CTRL_Z, pid_in, quoted

start, marker = test_signals.start, test_signals.marker  # fixtures
locked, shell, terminal = test_terminal.locked, test_terminal.shell, test_terminal.terminal

pytestmark = [
    pytest.mark.blackbox,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]

GROUP = ["--group"]
TWO_REPORT = ["sh", "-c", '"$@" & exec "$@"', "sh", *REPORT]  # of one group; SIGRTMAX ends both
READ = ["sh", "-c", "echo ready $$; read line && echo got $line"]
shells = pytest.mark.parametrize("words", [
    pytest.param(["sh", "-i"], id="sh"),
    pytest.param(["bash", "--norc", "--noediting", "-i"], id="bash", marks=needs_bash),
])


def start_ready(shell, command, behind=""):
    """Type the command line of a command that says `ready` and its PID; return that PID."""
    shell.type(quoted(command) + behind)
    return int(shell.read_until(r"ready \d+\n").split()[-1])


def has_foreground(terminal, pid):
    return os.tcgetpgrp(terminal.master) == os.getpgid(pid)


# ---- Without a terminal ----


@pytest.mark.parametrize("options, leads", [(["-g"], "True"), (GROUP, "True"), ([], "False")])
def test_the_command_leads_a_process_group_in_pidlocks_session(start, pidfile, options, leads):
    code = "import os; print(os.getpgrp() == os.getpid(), os.getsid(0) == os.getsid(os.getppid()))"
    process = start(*PIDLOCK, "--pidfile", pidfile, *options, "--", sys.executable, "-c", code)
    assert finish(process) == (0, leads + " True\n", "")


@named(*(getattr(signal, "SIG" + name) for name in "HUP INT QUIT TERM USR1 CONT WINCH".split()), signal.SIGRTMIN + 5)
def test_a_signal_reaches_all_of_the_group_exactly_once(start, pidfile, signum):
    process = start(*PIDLOCK, "--pidfile", pidfile, "-g", "--", *TWO_REPORT)
    said = [process.stdout.readline() for _ in range(2)]
    os.kill(process.pid, signum)
    said += [process.stdout.readline() for _ in range(2)]
    os.kill(process.pid, LAST)
    assert said == 2 * ["ready\n"] + 2 * [name_of(signum) + "\n"]
    assert (finish(process), pidfile.exists()) == ((0, 2 * "SIGRTMAX\n", ""), False)


@pytest.mark.parametrize("send, signum", [
    pytest.param("kill", signal.SIGTERM, id="kill -TERM"),
    pytest.param("--signal", signal.SIGTERM, id="--signal TERM"),
    pytest.param("--signal", signal.SIGKILL, id="--signal KILL"),
])
def test_what_ends_the_command_leaves_no_process_of_its_group(start, run, marker, pidfile, send, signum):
    """With --signal, KILL goes past pidlock. Red where the command alone gets it."""
    process = start(*PIDLOCK, "--pidfile", pidfile, "-g", "--", "sh", "-c", "sleep 60 & echo ready; wait",
                    pass_fds=[marker.writer])
    assert process.stdout.readline() == "ready\n"
    if send == "kill":
        os.kill(process.pid, signum)
    else:
        assert run("--pidfile", pidfile, "--signal", name_of(signum)) == (0, "", "")
    marker.wait_for_end()
    assert (finish(process), pidfile.exists()) == ((128 + signum, "", ""), False)


def test_a_command_that_cannot_be_executed_has_its_usual_status(run, pidfile, tmp_path):
    (tmp_path / "data").write_text("")
    found = [run("--pidfile", pidfile, "-g", "--", command).status for command in ("/nowhere/cmd", tmp_path / "data")]
    assert (found, pidfile.exists()) == ([127, 126], False)


# ---- The terminal's keys ----


def test_the_command_reads_the_keyboard(shell, locked):
    """Red where the group is made but not brought into the foreground."""
    command_pid = start_ready(shell, locked(*READ, options=GROUP))
    assert has_foreground(shell, command_pid)
    shell.type("hello")
    shell.read_until("got hello\n")
    shell.type("echo status=$?")
    shell.read_until("status=0\n")


def test_ctrl_c_reaches_all_of_the_group_exactly_once(terminal, locked):
    one = terminal(*locked(*TWO_REPORT, options=GROUP))
    one.read_until("ready\nready\n")
    one.type(CTRL_C)
    one.read_until("SIGINT\nSIGINT\n")
    os.kill(one.leader.pid, LAST)
    assert one.read_until("SIGRTMAX\nSIGRTMAX\n") == "SIGRTMAX\nSIGRTMAX\n"


@shells
def test_after_ctrl_c_a_shell_sees_130(terminal, words, locked, pidfile):
    shell = terminal(*words)
    start_ready(shell, locked("sh", "-c", "echo ready $$; exec sleep 60", options=GROUP))
    shell.type(CTRL_C)
    until(lambda: not pidfile.exists(), "the lock is free")
    shell.type("echo status=$?")
    shell.read_until("status=130\n")


@needs_bash
def test_ctrl_c_stops_a_loop_of_a_script(terminal, locked, pidfile):
    """The terminal tells the command's group alone. Red where pidlock dies by SIGINT without telling its own."""
    command = locked("sh", "-c", "echo ready; exec sleep 60", options=GROUP)
    one = terminal("bash", "-c", 'for i in 1 2 3; do "$@"; done; echo survived', "bash", *command)
    one.read_until("ready\n")
    one.type(CTRL_C)
    assert (one.finish(), pidfile.exists()) == ((-signal.SIGINT, ""), False)


@needs_bash
def test_a_sigint_from_elsewhere_does_not_stop_a_loop(terminal, locked, pidfile):
    """kill -INT of pidlock is no Ctrl-C, as without --group. Red where every death by SIGINT counts as one."""
    command = locked("sh", "-c", "echo ready; exec sleep 60", options=GROUP)
    one = terminal("bash", "-c", '"$@"; echo status=$?', "bash", *command)
    one.read_until("ready\n")
    os.kill(pid_in(pidfile), signal.SIGINT)
    assert one.finish() == (0, "status=130\n")


# ---- Job control ----


@shells
@pytest.mark.parametrize("script", [(), ("sh", "-c", '"$@"; exit 0', "sh")], ids=["typed", "in a script"])
def test_ctrl_z_and_fg(terminal, words, locked, pidfile, script):
    """In a script, red where pidlock stops itself without the rest of its group: the shell waits for the script."""
    shell = terminal(*words)
    command_pid = start_ready(shell, [*script, *locked(*READ, options=GROUP)])
    pid = pid_in(pidfile)
    for _ in range(2):
        shell.type(CTRL_Z)
        until(lambda: is_stopped(pid) and is_stopped(command_pid), "both are stopped")
        shell.type("echo prompt is back")
        shell.read_until("prompt is back\n")
        shell.type("fg")
        until(lambda: not is_stopped(pid) and has_foreground(shell, command_pid), "the command has the terminal")
    shell.type("hello")
    shell.read_until("got hello\n")
    shell.type("echo status=$?")
    shell.read_until("status=0\n")


@shells
def test_bg_lets_the_command_go_on_without_the_terminal_and_fg_gives_it_the_terminal(terminal, words, locked, pidfile):
    """bash sends no SIGCONT to a job that runs: red where only that makes pidlock hand the terminal on."""
    shell = terminal(*words)
    go_on = pidfile.with_name("fifo")
    os.mkfifo(go_on)
    wait_and_read = "echo ready $$; read go <'%s'; read line; echo got $line" % go_on
    command_pid = start_ready(shell, locked("sh", "-c", wait_and_read, options=GROUP))
    pid = pid_in(pidfile)
    shell.type(CTRL_Z)
    until(lambda: is_stopped(pid) and is_stopped(command_pid), "both are stopped")
    shell.type("bg")
    until(lambda: not is_stopped(pid) and not is_stopped(command_pid), "both go on")
    shell.type("echo prompt is back")
    shell.read_until("prompt is back\n")
    assert has_foreground(shell, shell.leader.pid)
    shell.type("fg")
    until(lambda: not has_foreground(shell, shell.leader.pid), "the job has the terminal")
    go_on.write_text("go\n")
    shell.type("hello")
    shell.read_until("got hello\n")


def test_started_in_the_background_it_does_not_take_the_terminal(shell, locked, pidfile):
    """Red where the group is brought into the foreground, or the terminal given back, unasked."""
    command_pid = start_ready(shell, locked("sh", "-c", "echo ready $$; exec sleep 60", options=GROUP), " &")
    shell.type("echo typed on")
    shell.read_until("typed on\n")
    seen = [has_foreground(shell, shell.leader.pid)]
    os.kill(command_pid, signal.SIGTERM)
    until(lambda: not pidfile.exists(), "the lock is free")
    shell.type("wait; echo ended")
    shell.read_until("ended\n")
    assert [*seen, has_foreground(shell, shell.leader.pid)] == [True, True]


def test_in_the_background_of_a_script_it_does_not_take_the_terminal(terminal, locked):
    """There, background is no process group: the shell ignores SIGINT. Red where pidlock looks at the group alone."""
    command = locked("sh", "-c", "echo ready; exec sleep 60", options=GROUP)
    one = terminal("sh", "-c", '"$@" & trap "kill $!; wait; exit 7" INT; wait', "sh", *command)
    one.read_until("ready\n")
    one.type(CTRL_C)
    assert one.finish() == (7, "")


@pytest.mark.parametrize("arguments", [(), ("bash", "-c", '"$@"; exit', "bash")], ids=["alone", "in a script"])
def test_ctrl_z_stops_no_command_that_nobody_could_continue(terminal, locked, arguments):
    """As in a container with a terminal. Red where pidlock leaves the command stopped, or takes the terminal back."""
    one = terminal(*arguments, *locked(*READ, options=GROUP))
    one.read_until("ready .*\n")
    one.type(CTRL_Z)
    one.type("hello")
    one.read_until("got hello\n")
    assert one.finish() == (0, "")


@pytest.mark.parametrize("command, status", [
    pytest.param(("true",), 0, id="it ends"),
    pytest.param(("sh", "-c", "kill -9 $$"), 137, id="it dies"),
    pytest.param(("sh", "-c", "kill -s KILL 0"), 137, id="all its group dies"),
    pytest.param(("/nowhere/cmd",), 127, id="it is not found"),
    pytest.param((os.devnull,), 126, id="it cannot be executed"),
])
def test_afterwards_the_terminal_is_given_back(terminal, locked, command, status):
    """A script has no job control that would take it back. Red where pidlock does not give it back."""
    script = '"$@" 2>/dev/null; echo status=$?; read line && echo got $line'
    one = terminal("sh", "-c", script, "sh", *locked(*command, options=GROUP))
    one.read_until("status=%d\n" % status)
    one.type("hello")
    assert one.finish() == (0, "got hello\n")

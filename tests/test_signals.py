"""Signals: each reaches the command once, none is lost in any window, and what was ignored stays ignored."""
import os
import pathlib
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import types

import pytest
from conftest import CHILDREN, PIDLOCK, PYTHON, ROOT
from test_wait import wait_for_descriptor

pytestmark = [
    pytest.mark.blackbox,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]

REPORT = [sys.executable, "-I", "-S", str(CHILDREN / "report_signals.py")]
ROUNDS = 500 if os.environ.get("PIDLOCK_STRESS") else 30
LAST = signal.SIGRTMAX  # ends REPORT; pidlock takes the lowest number first, so whatever came before precedes it
HAS_AUDIT = subprocess.call([PYTHON, "-c", "import sys; sys.exit(not hasattr(sys, 'addaudithook'))"]) == 0
MAY_UNSHARE = subprocess.call(["unshare", "-pf", "--mount-proc", "true"], stderr=subprocess.DEVNULL) == 0

needs_audit = pytest.mark.skipif(not HAS_AUDIT, reason="audit hooks came with Python 3.8")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
needs_unshare = pytest.mark.skipif(not MAY_UNSHARE, reason="may not make a PID namespace")
needs_bash = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")


def named(*signals):
    return pytest.mark.parametrize("signum", signals, ids=[name_of(signum) for signum in signals])


def name_of(signum):
    names = {one.value: one.name for one in signal.Signals}
    return names.get(signum) or "SIGRTMIN+%d" % (signum - signal.SIGRTMIN)


def until(condition, what, seconds=30):
    """Poll until condition() is true and return that; fail loudly at the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen = condition()
        if seen:
            return seen
        time.sleep(0.002)
    return pytest.fail("not within %d s: %s" % (seconds, what))


def status_field(pid, name):
    with open("/proc/%d/status" % pid) as file:
        return next(line.split()[1] for line in file if line.startswith(name + ":"))


def is_in(pid, field, signum):
    return bool(int(status_field(pid, field), 16) >> (signum - 1) & 1)


def is_stopped(pid):
    return status_field(pid, "State") == "T"


def wait_until_it_runs(process):
    """Wait until pidlock's main() takes care of signals; before that it is just a Python that starts."""
    until(lambda: is_in(process.pid, "SigBlk", signal.SIGTERM), "pidlock blocks signals")


def status_in_shell(process):
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def kill_session(leader_pid):
    """End what a failed test has left of a session."""
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        try:
            if os.getsid(pid) == leader_pid:
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.fixture
def start():
    """Start something in a session of its own: start(*command, **Popen options) -> Popen with pipes."""
    processes = []

    def start_process(*command, **options):
        for stream in ("stdin", "stdout", "stderr"):
            options.setdefault(stream, subprocess.PIPE)
        command = [os.fspath(word) for word in command]
        processes.append(subprocess.Popen(command, universal_newlines=True, start_new_session=True, **options))
        return processes[-1]

    yield start_process
    for process in processes:
        kill_session(process.pid)
        process.communicate(timeout=60)


@pytest.fixture
def start_report(start, pidfile):
    """Start a pidlock whose command reports its signals; return when that is ready."""

    def start_reporting(*arguments, **options):
        process = start(*PIDLOCK, "--pidfile", pidfile, "--", *REPORT, *arguments, **options)
        assert process.stdout.readline() == "ready\n"
        return process

    return start_reporting


@pytest.fixture
def marker():
    """A pipe end for `pass_fds`; marker.wait_for_end() returns when no process has it any more."""

    class Marker:
        def __init__(self):
            self.reader, self.writer = os.pipe()

        def wait_for_end(self):
            os.close(self.writer)
            self.writer = None
            assert select.select([self.reader], [], [], 30)[0], "a process that has the marker is left"
            assert os.read(self.reader, 1) == b""

    one = Marker()
    yield one
    for descriptor in (one.reader, one.writer):
        if descriptor is not None:
            os.close(descriptor)


def finish(process):
    """Return (status, the rest of stdout, stderr) at the end of a process."""
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


# ---- Passing on ----


@named(
    *(getattr(signal, "SIG" + name) for name in "HUP INT QUIT TERM USR1 USR2 ALRM WINCH CONT PWR".split()),
    signal.SIGRTMIN, signal.SIGRTMIN + 5, signal.SIGRTMAX - 1,
)
@pytest.mark.parametrize("arguments", [(), ("--own-group",)], ids=["same group", "own group"])
def test_each_signal_reaches_the_command_exactly_once(start_report, signum, arguments, pidfile):
    process = start_report(*arguments)
    os.kill(process.pid, signum)
    assert process.stdout.readline() == name_of(signum) + "\n"
    os.kill(process.pid, LAST)
    assert (finish(process), pidfile.exists()) == ((0, "SIGRTMAX\n", ""), False)


@pytest.mark.skipif(not shutil.which("setsid"), reason="needs setsid(1)")
def test_a_signal_reaches_nobody_but_the_command(start, pidfile, tmp_path):
    """Red where it goes to all of the group that the command leads."""
    log = tmp_path / "log"
    process = start(*PIDLOCK, "--pidfile", pidfile, "--", "setsid", "sh", "-c", '"$@" >"$0" & echo $!; exec "$@"', log,
                    *REPORT)
    other_pid = int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    until(lambda: log.exists() and log.read_text() == "ready\n", "the other one is ready")
    os.kill(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    os.kill(process.pid, LAST)
    process.wait(timeout=60)
    os.kill(other_pid, LAST)
    assert (finish(process), log.read_text()) == ((0, "SIGRTMAX\n", ""), "ready\nSIGRTMAX\n")


def test_queued_real_time_signals_all_arrive(start_report):
    """Red where pidlock looks at sigpending() and passes each number on once."""
    process = start_report()
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: is_stopped(process.pid), "pidlock is stopped")
    for _ in range(3):
        os.kill(process.pid, signal.SIGRTMIN + 3)
    os.kill(process.pid, LAST)
    os.kill(process.pid, signal.SIGCONT)
    assert finish(process) == (0, "SIGCONT\n" + "SIGRTMIN+3\n" * 3 + "SIGRTMAX\n", "")


@named(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGRTMIN)
def test_death_by_a_signal_passed_on_is_128_and_its_number(start, signum, pidfile):
    process = start(*PIDLOCK, "--pidfile", pidfile, "--", "sh", "-c", "echo ready; exec sleep 60")
    process.stdout.readline()
    os.kill(process.pid, signum)
    assert (finish(process), pidfile.exists()) == ((128 + signum, "", ""), False)


@needs_root
@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv, of util-linux 2.33 or later")
def test_a_command_that_may_not_be_signalled_keeps_its_lock(start, run, pidfile):
    """As `pidlock ... -- sudo cmd` of a plain user: kill(2) says EPERM. Red where that ends pidlock."""
    other_user = "import os, sys; os.setuid(65534); print('ready', flush=True); sys.stdin.read(); sys.exit(7)"
    process = start("setpriv", "--bounding-set=-kill", *PIDLOCK, "--pidfile", pidfile, "--", sys.executable, "-c",
                    other_user)
    process.stdout.readline()
    os.kill(process.pid, signal.SIGTERM)
    until(lambda: process.poll() is not None or not is_in(process.pid, "ShdPnd", signal.SIGTERM), "SIGTERM was taken")
    assert run("--pidfile", pidfile, "--", "true").status == 75
    status, _, _ = finish(process)
    assert (status, pidfile.exists()) == (7, False)


# ---- Windows: waiting, before the command, behind it ----


def snapshot(directory):
    entries = [directory, *directory.iterdir()]
    return [(entry, os.lstat(str(entry)).st_mtime_ns, os.lstat(str(entry)).st_ino) for entry in entries]


@named(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGRTMIN)
def test_a_signal_ends_the_wait_and_changes_nothing_on_disk(start, holder, pidfile, signum):
    holder("--pidfile", pidfile)
    before = snapshot(pidfile.parent)
    waiter = start(*PIDLOCK, "--pidfile", pidfile, "--wait", "60", "--", "touch", pidfile.parent / "ran")
    wait_until_it_runs(waiter)
    os.kill(waiter.pid, signum)
    assert (finish(waiter), snapshot(pidfile.parent)) == ((128 + signum, "", ""), before)


TICK_HOURLY = ("import pidlock, sys; pidlock.TICK_FIRST = pidlock.TICK_MAX = pidlock.TICK_WATCHED = 3600.0;"
               " sys.exit(pidlock.main())")


@named(signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGRTMIN)
def test_a_signal_ends_the_wait_at_once(start, holder, pidfile, signum):
    """With a timer of an hour: red where only the timer looks for signals."""
    holder("--pidfile", pidfile)
    waiter = start(PYTHON, "-c", TICK_HOURLY, "--pidfile", pidfile, "--wait", "inf", "--", "true", cwd=ROOT)
    wait_for_descriptor(waiter.pid, "sigmask:")
    os.kill(waiter.pid, signum)
    assert finish(waiter) == (128 + signum, "", "")


def test_where_there_is_no_signalfd_the_wait_does_without():
    import pidlock

    libc = types.SimpleNamespace(sigemptyset=len, sigaddset=lambda mask, signum: 0)  # as FreeBSD's, which has inotify
    assert pidlock._open_signalfd(libc, {signal.SIGTERM}) is None


def links_of(pid):
    """Return what its descriptors refer to."""
    directory = "/proc/%d/fd" % pid
    return [os.readlink(os.path.join(directory, name)) for name in os.listdir(directory)]


def test_a_second_into_the_command_the_waits_watch_is_closed(start, holder, pidfile):
    """A user may have 128 of them, and the command may run for days."""
    one = holder("--pidfile", pidfile)
    waiter = start(*PIDLOCK, "--pidfile", pidfile, "--wait", "inf", "--", "sh", "-c", "echo ready; read line")
    wait_for_descriptor(waiter.pid, "inotify wd:")
    one.finish()
    assert waiter.stdout.readline() == "ready\n"
    until(lambda: "anon_inode:inotify" not in links_of(waiter.pid), "the watch is closed")
    assert finish(waiter) == (1, "", "")


@named(signal.SIGWINCH, signal.SIGCONT)
def test_a_harmless_signal_does_not_end_the_wait(start, holder, pidfile, signum):
    one = holder("--pidfile", pidfile)
    waiter = start(*PIDLOCK, "--pidfile", pidfile, "--wait", "60", "--", "echo", "mine")
    wait_until_it_runs(waiter)
    os.kill(waiter.pid, signum)
    switches = int(status_field(waiter.pid, "voluntary_ctxt_switches"))
    until(lambda: int(status_field(waiter.pid, "voluntary_ctxt_switches")) > switches + 5, "it has looked again")
    one.finish()
    assert finish(waiter) == (0, "mine\n", "")


@needs_audit
@named(signal.SIGTERM, signal.SIGINT)
@pytest.mark.parametrize("body, event, option", [
    pytest.param(None, "open=test.pid", "--quiet", id="looking at the path"),
    pytest.param(None, "open=.pidlock-", "--quiet", id="creating the private file"),
    pytest.param(None, "os.link=", "--quiet", id="publishing"),
    pytest.param(None, "os.remove=.pidlock-", "--quiet", id="removing the private name"),
    pytest.param(None, "os.fork|os.posix_spawn=", "--quiet", id="starting the command"),
    pytest.param(None, "os.exec=", "--group", id="becoming the command"),
    pytest.param(b"2147483647\n\n\n", "os.remove=test.pid", "--quiet", id="evicting"),
])
def test_a_signal_before_the_command_ends_it_all(start, marker, pidfile, body, event, option, signum):
    """Red where the signals are blocked only once the lock is taken, or unblocked for the fork."""
    if body:
        pidfile.write_bytes(body)
    process = start(PYTHON, CHILDREN / "signals_at_event.py", event, str(int(signum)),
                    option, "--pidfile", pidfile, "--", "sleep", "60", pass_fds=[marker.writer])
    assert (finish(process), list(pidfile.parent.iterdir())) == ((128 + signum, "", ""), [])
    marker.wait_for_end()


@needs_audit
@named(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
def test_a_signal_between_the_commands_end_and_the_release_leaves_no_file(start, pidfile, signum):
    """Red where the signals are unblocked before the release."""
    process = start(PYTHON, CHILDREN / "signals_at_event.py", "os.remove=test.pid", str(int(signum)),
                    "--pidfile", pidfile, "--", "sh", "-c", "exit 7")
    assert (finish(process), list(pidfile.parent.iterdir())) == ((7, "", ""), [])


@pytest.mark.timeout(600)
def test_sigterm_at_any_moment_leaves_nothing_behind(start, pidfile):
    seed = random.randrange(2 ** 32)
    random_moments = random.Random(seed)
    for number in range(ROUNDS):
        reader, writer = os.pipe()
        process = start(*PIDLOCK, "--pidfile", pidfile, "--", "sleep", "60", pass_fds=[writer])
        os.close(writer)
        time.sleep(random_moments.uniform(0, 0.1))  # the moment itself, not a way to wait for something
        process.terminate()
        _, stdout, stderr = finish(process)
        gone = bool(select.select([reader], [], [], 30)[0])  # readable: no process has the other end any more
        os.close(reader)
        seen = (status_in_shell(process), stdout, stderr, gone, list(pidfile.parent.iterdir()))
        assert seen == (143, "", "", True, []), "seed %d, round %d" % (seed, number)


# ---- Without a command ----


@named(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["for people", "JSON"])
def test_a_signal_ends_a_status_that_nobody_reads(start, pidfile, signum, options):
    """Red where signals are blocked without a command to pass them on to, or Python's traceback tells of a Ctrl-C."""
    process = start(*PIDLOCK, "--pidfile", pidfile, "--status", "--max-concurrent", "2000", *options)
    assert select.select([process.stdout], [], [], 30)[0]  # it writes, and more than a pipe takes
    os.kill(process.pid, signum)
    assert (process.wait(timeout=30), process.stderr.read()) == (-signum, "")


@named(signal.SIGTERM, signal.SIGINT)
def test_a_signal_ends_no_status_where_it_was_ignored_at_the_start(start, pidfile, signum):
    """Red where SIGINT gets its default whatever it was."""
    process = start(*PIDLOCK, "--pidfile", pidfile, "--status", "--max-concurrent", "2000",
                    preexec_fn=lambda: signal.signal(signum, signal.SIG_IGN))
    assert select.select([process.stdout], [], [], 30)[0]
    os.kill(process.pid, signum)
    status, stdout, stderr = finish(process)
    assert (status, stdout.count("\n"), stderr) == (3, 2000, "")


MAIN_BETWEEN_PICTURES = """
import signal, sys
import pidlock

def picture():
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return mask, [signal.getsignal(signum) for signum in range(1, signal.NSIG) if signum != signal.SIGCHLD]

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
before = picture()
pidlock.main(sys.argv[1:])
print("the same" if picture() == before else picture())
"""


@pytest.mark.parametrize("arguments", [["--check"], ["--status"], ["--wait", "soon"], ["--", "true"]], ids=" ".join)
def test_main_called_as_a_function_leaves_the_mask_and_the_handlers(pidfile, arguments):
    """Red where only a run's mask is put back, or SIGINT's handler goes for more than a process of its own."""
    done = subprocess.run([sys.executable, "-c", MAIN_BETWEEN_PICTURES, "--pidfile", str(pidfile), *arguments],
                          cwd=ROOT, timeout=60, stdout=subprocess.PIPE)
    assert done.stdout.endswith(b"the same\n")


# ---- What the command starts with ----


def ignore_some_and_block_some():
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTSTP, signal.SIGRTMIN + 2):
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2, signal.SIGTTIN, signal.SIGRTMIN + 3})


@pytest.mark.parametrize("before, options", [
    pytest.param([], {}, id="plain"),
    pytest.param(["nohup"], {}, id="nohup"),
    pytest.param(["sh", "-c", '"$@" & wait $!', "sh"], {}, id="background of a script"),
    pytest.param([], {"preexec_fn": ignore_some_and_block_some}, id="some ignored, some blocked"),
])
def test_the_command_has_the_callers_mask_and_dispositions(start, pidfile, before, options):
    command = ["grep", "-E", "^(Sig|Shd)(Blk|Ign|Pnd)", "/proc/self/status"]
    directly = finish(start(*before, *command, **options))
    under_pidlock = finish(start(*before, *PIDLOCK, "--pidfile", pidfile, "--", *command, **options))
    assert without_32_and_33(under_pidlock) == without_32_and_33(directly)


def without_32_and_33(outcome):
    """Take away the signals that glibc keeps for itself, signal(7): its posix_spawn(3) leaves them ignored."""
    status, masks, stderr = outcome
    return status, re.sub("[0-9a-f]{16}", lambda mask: "%016x" % (int(mask.group(), 16) & ~(3 << 31)), masks), stderr


@named(signal.SIGPIPE, signal.SIGXFSZ)
def test_the_signals_that_python_ignores_have_their_default(run, pidfile, signum):
    kill_itself = "kill -%d $$" % signum
    assert run("--pidfile", pidfile, "--", "sh", "-c", kill_itself) == (128 + signum, "", "")


@named(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGRTMIN + 1)
@pytest.mark.parametrize("blocked", [False, True], ids=["not blocked", "blocked"])
def test_what_was_ignored_at_the_start_is_not_passed_on(start_report, signum, blocked):
    def prepare():
        signal.signal(signum, signal.SIG_IGN)
        if blocked:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signum})

    process = start_report(preexec_fn=prepare)
    os.kill(process.pid, signum)
    os.kill(process.pid, LAST)
    assert finish(process) == (0, "SIGRTMAX\n", "")


def test_what_was_ignored_at_the_start_does_not_end_the_wait(start, holder, pidfile):
    one = holder("--pidfile", pidfile)
    waiter = start("nohup", *PIDLOCK, "--pidfile", pidfile, "--wait", "60", "--", "echo", "mine",
                   stdin=subprocess.DEVNULL)
    wait_until_it_runs(waiter)
    os.kill(waiter.pid, signal.SIGHUP)
    one.finish()
    assert finish(waiter) == (0, "mine\n", "")


def test_a_caller_that_ignores_sigchld_gets_the_status(run, pidfile):
    def prepare():
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    assert run("--pidfile", pidfile, "--", "sh", "-c", "exit 7", preexec_fn=prepare) == (7, "", "")


@needs_bash
def test_descriptors_of_the_caller_pass_through(start, pidfile):
    process = start("bash", "-c", 'pidfile=$1; shift; "$@" --pidfile "$pidfile" -- cat <(echo hello)', "bash",
                    pidfile, *PIDLOCK)
    assert finish(process) == (0, "hello\n", "")


# ---- A killed pidlock, a daemon, an ancestor ----


def test_the_command_of_a_killed_pidlock_keeps_the_lock_until_its_end(run, holder, pidfile):
    """Red where the command does not inherit the descriptor, or the mark is judged by the PID."""
    one = holder("--pidfile", pidfile)
    one.kill_wrapper()
    refused = run("--pidfile", pidfile, "--", "true")
    one.process.communicate(timeout=60)  # EOF on its stdin ends the command
    after = run("--quiet", "--pidfile", pidfile, "--", "echo", "mine")
    assert (refused.status, refused.stdout, refused.stderr.count("\n"), after) == (75, "", 1, (0, "mine\n", ""))
    assert re.search(r"\bPID %d\b.*\b%d\b" % (one.pid, one.command_pid), refused.stderr)


def test_with_close_the_lock_of_a_killed_pidlock_is_free_at_once(run, holder, pidfile):
    one = holder("--close", "--pidfile", pidfile)
    one.kill_wrapper()
    assert run("--quiet", "--pidfile", pidfile, "--", "echo", "mine") == (0, "mine\n", "")


def test_a_daemon_that_the_command_leaves_behind_does_not_keep_the_lock(start, run, pidfile):
    """Red where only the close of the descriptor gives the lock back, as flock(1) does."""
    leave_daemon = "exec 3<&0; cat <&3 >/dev/null 2>&1 & echo $!"
    first = start(*PIDLOCK, "--pidfile", pidfile, "--", "sh", "-c", leave_daemon)
    daemon_pid = int(first.stdout.readline())
    assert first.wait(timeout=60) == 0
    second = run("--pidfile", pidfile, "--", "echo", "mine")
    assert (second, os.path.exists("/proc/%d" % daemon_pid)) == ((0, "mine\n", ""), True)
    assert finish(first) == (0, "", "")  # closes its stdin, which ends the daemon


@pytest.mark.parametrize("options", [[], ["--close"]], ids=["inherited", "closed"])
@pytest.mark.parametrize("between", [[], ["sh", "-c", '"$@"; exit $?', "sh"], "another lock"],
                         ids=["parent", "grandparent", "behind another lock"])
def test_a_pidlock_that_would_wait_for_its_ancestor_says_so(run, pidfile, options, between):
    if between == "another lock":
        between = [*PIDLOCK, "--pidfile", str(pidfile) + ".other", "--"]
    inner = [*PIDLOCK, "--pidfile", str(pidfile), "--wait", "inf", "--", "true"]
    seen = run(*options, "--pidfile", pidfile, "--", *between, *inner, timeout=30)
    assert (seen.status, seen.stdout) == (75, "")
    assert re.fullmatch(r"pidlock: %s: held by PID \d+, which waits for .*\n" % re.escape(str(pidfile)), seen.stderr)


def test_the_message_says_when_the_holder_is_stopped(run, holder, pidfile):
    one = holder("--pidfile", pidfile)
    os.kill(one.pid, signal.SIGSTOP)
    try:
        until(lambda: is_stopped(one.pid), "the holder is stopped")
        seen = run("--pidfile", pidfile, "--", "true")
    finally:
        os.kill(one.pid, signal.SIGCONT)
    assert (seen.status, seen.stdout) == (75, "")
    assert "held by PID %d (sh), which is stopped," % one.pid in seen.stderr


# ---- PID 1, and warnings ----


@needs_unshare
@pytest.mark.parametrize("name, status", [("TERM", 143), ("INT", 130), ("HUP", 129)])
def test_as_pid_1_it_passes_a_signal_on_and_exits_with_128_and_its_number(start, pidfile, name, status):
    signal_pid_1 = "echo $PIDLOCK_PID; kill -%s 1; exec sleep 60" % name
    process = start("unshare", "-pf", "--mount-proc", *PIDLOCK, "--pidfile", pidfile, "--", "sh", "-c", signal_pid_1)
    assert (finish(process), pidfile.exists()) == ((status, "1\n", ""), False)


@needs_unshare
def test_as_pid_1_it_reaps_orphans(start, pidfile):
    """Red where pidlock waits for its own child only."""
    process = start("unshare", "-pf", "--mount-proc", *PIDLOCK, "--pidfile", pidfile, "--",
                    sys.executable, CHILDREN / "make_orphans.py")
    assert finish(process) == (0, "left 3 orphans, all reaped\n", "")


@needs_unshare
def test_as_pid_1_it_reaps_orphans_while_it_waits(start, holder, pidfile):
    """Red where only the command's end is waited for; and, the timer being an hour, where the timer alone reaps."""
    one = holder("--pidfile", pidfile)
    waiter = start("unshare", "-pf", "--mount-proc", PYTHON, "-c", TICK_HOURLY, "--pidfile", pidfile, "--wait", "inf",
                   "--", "echo", "mine", cwd=ROOT)
    children = pathlib.Path("/proc/%d/task/%d/children" % (waiter.pid, waiter.pid))
    pid_1 = int(until(children.read_text, "unshare has forked"))
    wait_for_descriptor(pid_1, "sigmask:")
    orphans = start("nsenter", "-t", str(pid_1), "-p", "-m", sys.executable, CHILDREN / "make_orphans.py")
    assert finish(orphans) == (0, "left 3 orphans, all reaped\n", "")
    one.finish()
    assert finish(waiter) == (0, "mine\n", "")


@pytest.mark.parametrize("body, options, command, status", [
    pytest.param(None, [], ["sh", "-c", "exit 7"], 7, id="a run"),
    pytest.param(None, [], ["sh", "-c", "kill -TERM $PPID; exec sleep 60"], 143, id="a signal"),
    pytest.param(b"2147483647\n\n\n", ["--quiet"], ["true"], 0, id="a takeover"),
    pytest.param(b"1\n", ["--quiet", "--wait", "0.2"], ["true"], 75, id="a wait"),
])
def test_no_warning_under_python_w_error_x_dev(start, pidfile, body, options, command, status):
    if body:
        pidfile.write_bytes(body)
    process = start(PYTHON, "-W", "error", "-X", "dev", *PIDLOCK[1:], *options, "--pidfile", pidfile, "--", *command)
    assert finish(process) == (status, "", "")

"""--status, for people and as JSON, and inspect(): who holds it, since when, and in which state he is."""
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest
from conftest import PIDLOCK

import pidlock
from pidlock import PidLock

blackbox = pytest.mark.blackbox
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fdinfo"), reason="needs Linux's /proc")
needs_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
FIELDS = set(pidlock.Status._fields)
DAY = 86400
HELD, STALE, FREE, UNKNOWN = 0, 1, 3, 4  # LSB Core, 20.2


def write(path, body, age=60):
    path.write_bytes(body)
    os.utime(path, (time.time() - age, time.time() - age))


def status_of(run, path, *options):
    """Return the exit status of --status --json, and what it says."""
    outcome = run("-p", path, "--status", "--json", *options)
    assert (outcome.stderr, outcome.stdout.count("\n"), outcome.stdout[-1:]) == ("", 1, "\n")
    return outcome.status, json.loads(outcome.stdout, parse_constant=pytest.fail)


STATES = {
    "no file": (None, 60, FREE, "free", "there is no file"),
    "marked, its PID dead": ("{dead}\n\n\n", 60, STALE, "stale", "stale: PID {dead} is no longer behind it"),
    "marked, its PID recycled": ("{alive}\n\n\n", 60, STALE, "stale", "stale: PID {alive} is no longer behind it"),
    "a dead PID": ("{dead}\n", 60, STALE, "stale", "stale: PID {dead} does not exist"),
    "garbage": ("garbage\n", 60, STALE, "stale", "stale: there is no PID in it"),
    "empty and young": ("", 0, HELD, "held", "held by a program that is still writing its PID, it seems"),
    "of another program": ("{alive}\n", 100 * DAY, HELD, "held",
                           "held by PID {alive} ({name}) for 100d, to judge by the PID alone"),
    "of another host": ("pid=4231\nhost=no.such.host\n", 60, UNKNOWN, "unknown",
                        "unknown: held by PID 4231 of host no.such.host, it seems"),
}


@blackbox
@needs_proc
@pytest.mark.parametrize("body, age, code, state, line", STATES.values(), ids=STATES)
def test_the_state_is_told_to_people_and_programs(run, pidfile, dead_pid, body, age, code, state, line):
    parent = os.getppid()
    name = pathlib.Path("/proc/%d/comm" % parent).read_text().strip()
    names = {"dead": dead_pid, "alive": parent, "name": name}

    def ask(question, *arguments):
        while True:
            if body is not None:
                write(pidfile, body.format(**names).encode(), age)
            began = time.monotonic()
            answer = question(*arguments)
            if age or time.monotonic() < began + pidlock.WRITING:  # else the young one may have become old meanwhile
                return answer

    assert ask(run, "-p", pidfile, "--status") == (code, "%s: %s\n" % (pidfile, line.format(**names)), "")
    told = ask(status_of, run, pidfile)
    assert (told[0], told[1]["state"], set(told[1])) == (code, state, FIELDS)
    assert ask(pidlock.active_pid, pidfile) == (told[1]["pid"], state in ("held", "unknown"))


@blackbox
@pytest.mark.parametrize("make", [lambda path: write(path, b"#!/bin/sh\n" + b"echo backup\n" * 9), pathlib.Path.mkdir,
                                  lambda path: path.symlink_to("/etc/passwd"), os.mkfifo],
                         ids=["a script", "a directory", "a link", "a FIFO"])
def test_what_is_no_pidfile_cannot_be_told(run, pidfile, make):
    make(pidfile)
    outcome = run("-p", pidfile, "--status")
    assert (outcome.status, outcome.stdout) == (UNKNOWN, "")
    assert re.fullmatch(r"pidlock: %s: is .*, not a pidfile; name another file.*\n" % re.escape(str(pidfile)),
                        outcome.stderr)


@blackbox
@pytest.mark.parametrize("age, options, code", [
    (60, ["--stale-after", "30s"], STALE), (60, ["--stale-after", "2m"], UNKNOWN),
    (60, ["--stale-after", "30s", "--stale-strategy", "pid-only"], UNKNOWN),
])
def test_the_status_judges_by_its_own_options(run, pidfile, age, options, code):
    write(pidfile, b"pid=4231\nhost=no.such.host\n", age)
    assert status_of(run, pidfile, *options)[0] == code


# ---- A holder ----


@blackbox
@needs_proc
def test_a_holder_is_told_with_all_that_is_known(run, holder, pidfile):
    one = holder("-p", pidfile, "--details", "--trace-id", "job 7")
    code, told = status_of(run, pidfile)
    acquired = pidlock.parse_record(pidfile.read_bytes()).details["acquired"]
    assert (code, dict(told, seconds=None, reason=None)) == (HELD, {
        "path": str(pidfile), "state": "held", "pid": one.pid, "slot": 1, "reason": None, "seconds": None,
        "advice": "wait for it or stop it", "command": "/bin/sh -c 'echo $$; read line'", "since": acquired,
        "host": os.uname().nodename, "trace_id": "job 7", "stopped": False, "elsewhere": False, "orphaned": False,
        "pids": [one.pid],
    })
    assert re.fullmatch(r"held by PID %d \(sh\) for \d+s" % one.pid, told["reason"])
    assert 0 <= told["seconds"] <= time.time() - pidlock._parse_time(acquired)


@blackbox
@needs_proc
def test_without_details_the_command_is_its_name_and_the_time_the_files(run, holder, pidfile):
    one = holder("-p", pidfile)
    os.utime(pidfile, (10 ** 9, 10 ** 9))
    code, told = status_of(run, pidfile)
    assert (code, told["pid"], told["command"], told["host"], told["trace_id"]) == (HELD, one.pid, "sh", None, None)
    assert (told["since"], told["seconds"] > 10 ** 8) == ("2001-09-09T01:46:40.000Z", True)


@blackbox
@needs_proc
def test_the_time_since_when_is_the_recorded_one_whatever_was_touched(run, holder, pidfile):
    holder("-p", pidfile, "--details")
    os.utime(pidfile, (10 ** 9, 10 ** 9))
    assert status_of(run, pidfile)[1]["seconds"] < 3600


@blackbox
@needs_proc
def test_a_stopped_holder_is_told_with_the_way_to_continue_it(run, holder, pidfile):
    one = holder("-p", pidfile)
    os.kill(one.pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, one.pid, os.WSTOPPED | os.WNOWAIT)
        code, told = status_of(run, pidfile)
    finally:
        os.kill(one.pid, signal.SIGCONT)
    assert (code, told["state"], told["stopped"], "which is stopped" in told["reason"]) == (HELD, "held", True, True)
    assert "kill -CONT %d" % one.pid in told["advice"]


@blackbox
@needs_proc
def test_the_job_of_a_killed_holder_is_told_with_its_processes(run, holder, pidfile):
    one = holder("-p", pidfile)
    one.kill_wrapper()
    code, told = status_of(run, pidfile)
    assert (code, told["state"], told["pid"], told["orphaned"]) == (HELD, "held", one.pid, True)
    assert (told["pids"], told["command"]) == ([one.command_pid], "sh")
    assert pidlock.active_pid(pidfile) == (one.pid, True)
    line = run("-p", pidfile, "--status").stdout
    assert "was killed, but its command lives on: PID %d (sh)" % one.command_pid in line
    one.finish()
    assert status_of(run, pidfile)[0] == STALE


NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
MAY_UNSHARE = bool(shutil.which("unshare")) and subprocess.call(NAMESPACE + ["true"], stderr=subprocess.DEVNULL) == 0
needs_namespace = pytest.mark.skipif(not MAY_UNSHARE, reason="needs unshare(1) and root, for a PID namespace")


@blackbox
@needs_proc
@needs_namespace
@pytest.mark.parametrize("options", [[], ["--details"]], ids=["", "details"])
def test_a_holder_in_another_pid_namespace_is_told_by_its_pid_here(run, pidfile, options):
    inside = subprocess.Popen([*NAMESPACE, *PIDLOCK, "-p", pidfile, *options, "sh", "-c", "echo ready; read line"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert inside.stdout.readline() == b"ready\n"
        here = pathlib.Path("/proc/%d/task/%d/children" % (inside.pid, inside.pid)).read_text().split()
        code, told = status_of(run, pidfile)
    finally:
        inside.communicate(timeout=60)
    assert (code, told["state"], told["pid"], told["elsewhere"], told["orphaned"]) == (HELD, "held", 1, True, False)
    assert str(told["pids"][0]) == here[0] and "PID 1 of another PID namespace, here %s " % here[0] in told["reason"]


@needs_proc
@needs_namespace
def test_seen_from_within_a_namespace_the_holder_outside_is_held(run, holder, pidfile):
    holder("-p", pidfile)
    command = [*NAMESPACE, *PIDLOCK, "-p", pidfile, "--status", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, json.loads(done.stdout)["state"]) == (HELD, "held")


STRANGE_PROC = [word for word in NAMESPACE if word != "--mount-proc"]  # it stays that of the namespace outside


@blackbox
@needs_proc
@needs_namespace
def test_where_proc_is_another_namespaces_nobody_is_looked_for_there(holder, pidfile):
    """Red where its PIDs are told: they are not those that one can signal or wait for here."""
    holder("-p", pidfile)
    done = subprocess.run([*STRANGE_PROC, *PIDLOCK, "-p", pidfile, "--status", "--json"], stdout=subprocess.PIPE,
                          timeout=60)
    told = json.loads(done.stdout)
    assert (done.returncode, told["state"], told["pids"], told["command"]) == (HELD, "held", [], None)


@blackbox
@needs_proc
@needs_namespace
def test_where_proc_is_another_namespaces_it_neither_judges_nor_names_a_pid_of_ours(pidfile):
    """PID 1 is there in both. Red where the start or the name of the one outside is taken for that of ours."""
    write(pidfile, b"1\nstart=999999999\n")
    command = [*STRANGE_PROC, "sh", "-c", '"$@"; exit $?', "sh", *PIDLOCK, "-p", pidfile, "--status", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=60)
    told = json.loads(done.stdout)
    assert (done.returncode, told["pid"], told["command"]) == (HELD, 1, None)
    assert re.match("held by PID 1 for ", told["reason"])


@needs_proc
def test_a_stranger_who_keeps_a_stale_files_flock_is_told(pidfile, dead_pid):
    write(pidfile, b"%d\n\n\n" % dead_pid)
    with open(pidfile) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status = pidlock.inspect(pidfile)
    assert (status.state, status.pid) == ("held", dead_pid)
    assert str(os.getpid()) in status.reason and os.getpid() in status.pids


# ---- inspect() and the command line agree ----


@needs_proc
@pytest.mark.parametrize("details", [False, True], ids=["", "details"])
def test_inspect_says_the_same_as_the_command_line(run, pidfile, details):
    with PidLock(pidfile, details=details, trace_id="T"):
        status = pidlock.inspect(pidfile)
        told = status_of(run, pidfile)[1]
    seconds = pidlock._parse_time(told["since"])
    assert seconds == pytest.approx(status.since, abs=0.001)
    moments = {name: told[name] for name in ("since", "seconds", "reason")}  # the reason says for how long
    assert json.loads(json.dumps(dict(status._asdict(), **moments))) == told
    assert (status.trace_id, status.pid, status.pids) == ("T" if details else None, os.getpid(), (os.getpid(),))


def test_of_a_free_path_there_is_nothing_to_tell(pidfile):
    assert pidlock.inspect(pidfile) == pidlock.Status(
        path=str(pidfile), state="free", pid=0, slot=1, reason="there is no file", advice=None, command=None,
        since=None, seconds=None, host=None, trace_id=None, stopped=False, elsewhere=False, orphaned=False, pids=(),
    )


# ---- Slots ----


@blackbox
@needs_proc
def test_of_a_semaphore_each_slot_is_told_and_one_free_one_makes_it_free(run, holder, pidfile):
    two = ["--max-concurrent", "2"]
    first = holder("-p", pidfile, *two)
    code, told = status_of(run, pidfile, *two)
    assert (code, told["state"], [slot["state"] for slot in told["slots"]]) == (FREE, "free", ["held", "free"])
    assert run("-p", pidfile, *two, "--check") == (0, "", "")
    second = holder("-p", pidfile, *two)
    code, told = status_of(run, pidfile, *two)
    slots = [(slot["path"], slot["pid"], slot["slot"], slot["state"]) for slot in told["slots"]]
    assert (code, told["state"]) == (HELD, "held")
    assert slots == [(str(pidfile), first.pid, 1, "held"), ("%s.2" % pidfile, second.pid, 2, "held")]
    assert run("-p", pidfile, *two, "--check") == (1, "", "")
    code, stdout, stderr = run("-p", pidfile, *two, "--status")
    assert (code, stderr) == (HELD, "")
    assert re.fullmatch(r"{0}: held by PID {1} \(sh\) for \d+s\n{0}\.2: held by PID {2} \(sh\) for \d+s\n".format(
        re.escape(str(pidfile)), first.pid, second.pid), stdout)


# ---- Other users ----


@blackbox
@needs_proc
@needs_root
@pytest.mark.parametrize("body, codes", [
    (None, [FREE, 0]), (b"{dead}\n\n\n", [STALE, 0]), (b"{alive}\n\n\n", [STALE, 0]), (b"{dead}\n", [STALE, 0]),
    (b"{alive}\n", [HELD, 1]), (b"pid=1\nhost=no.such.host\n", [UNKNOWN, 125]),
    ("lock", [HELD, 1]), ("killed", [HELD, 1]), ("stopped", [HELD, 1]),
], ids=str)
def test_another_user_gets_the_same_state_as_root(run, holder, public_directory, run_as_nobody, dead_pid, body, codes):
    """Catches a state that needs to signal the holder, or to see his descriptors."""
    path = public_directory / "test.pid"
    if isinstance(body, bytes):
        write(path, body.replace(b"{dead}", b"%d" % dead_pid).replace(b"{alive}", b"%d" % os.getpid()))
    elif body:
        one = holder("-p", path)
        if body == "killed":
            one.kill_wrapper()
        elif body == "stopped":
            os.kill(one.pid, signal.SIGSTOP)
    try:
        for ask in (run, run_as_nobody):
            assert [ask("-p", path, action).status for action in ("--status", "--check")] == codes
    finally:
        if body == "stopped":
            os.kill(one.pid, signal.SIGCONT)


# ---- Odd names ----


@blackbox
@needs_proc
@pytest.mark.parametrize("name", ["a\nb", 'a"b\\', "\x1b[31mred", "é", "\u2028", os.fsdecode(b"\xff")], ids=ascii)
def test_json_is_one_line_whatever_the_path_the_command_and_the_host_are(run, tmp_path, name):
    path = tmp_path / name
    script = 'echo "$0" >&2; exec "$@" 2>&1'
    outcome = run("-p", path, "--details", "--", "sh", "-c", script, name, *PIDLOCK, "-p", path, "--status", "--json")
    told = json.loads(outcome.stdout)
    assert (outcome.status, outcome.stdout.count("\n"), told["state"]) == (0, 1, "held")
    assert os.fsencode(told["path"]) == os.fsencode(path)
    assert os.fsencode(name).replace(b"'", b"") in os.fsencode(told["command"])


@blackbox
def test_hostile_words_in_a_file_stay_in_their_line(run, pidfile):
    write(pidfile, b"pid=4231\nhost=\x1b]0;x\x07\\n\\u202e\xff\ncommand=\x1b[31m\\r\n")
    code, stdout, stderr = run("-p", pidfile, "--status")
    assert (code, stdout.count("\n"), stdout[:-1].isprintable(), stderr) == (UNKNOWN, 1, True, "")
    code, told = status_of(run, pidfile)
    assert (told["host"], told["command"]) == ("\x1b]0;x\x07\n\u202e\udcff", "\x1b[31m\r")


@blackbox
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_answer_that_cannot_be_written_is_a_failure(pidfile):
    write(pidfile, b"%d\n" % os.getpid())
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PIDLOCK, "-p", pidfile, "--status", "--json"], stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.count(b"\n") <= 1, b"Traceback" in done.stderr) == (4, True, False)

"""--log and --metrics: whole lines and whole files, no count lost, and never a reason for the command not to run."""
import fcntl
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time

import pytest
from children.trace_calls import Traced, index_of_start
from conftest import PIDLOCK
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.blackbox

needs_strace = pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
MAY_MOUNT = subprocess.call(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], stderr=subprocess.DEVNULL) == 0
needs_mount = pytest.mark.skipif(not MAY_MOUNT, reason="may not mount a filesystem of its own")
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
KEYS = {"time", "event", "path", "pid", "slot", "token", "trace_id", "seconds", "reason"}


STEPS = "openat flock write fchmod link linkat unlink unlinkat clone clone3 vfork rename renameat exit_group".split()


@pytest.fixture
def traced(tmp_path_factory):
    return Traced(tmp_path_factory.mktemp("strace") / "log", STEPS)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "events.log"


@pytest.fixture
def metrics(tmp_path):
    (tmp_path / "textfile").mkdir()
    return tmp_path / "textfile" / "pidlock.prom"


def events_in(log):
    text = log.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def values_in(text):
    """Return {(metric without pidlock_ and unit, pidfile): value}, as Prometheus' own parser reads them."""
    return {(re.sub("^pidlock_|_timestamp_seconds$|_seconds$|_total$", "", sample.name), sample.labels["pidfile"]):
            sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def values_of(metrics, pidfile):
    return {name: value for (name, path), value in values_in(metrics.read_text()).items() if path == str(pidfile)}


def start_all(count, *arguments):
    return [subprocess.Popen([*PIDLOCK, *map(str, arguments)]) for _ in range(count)]


# ---- The log ----


def test_each_event_is_a_line_of_json(run, pidfile, log, dead_pid):
    pidfile.write_text("%d\n\n\n" % dead_pid)
    logged = ("--quiet", "--pidfile", pidfile, "--log", log, "--trace-id", "mine", "--")
    outer = run(*logged, *PIDLOCK, *logged, "true")
    run(*logged, "rm", pidfile)
    told = events_in(log)
    assert outer.status == 75
    assert [event["event"] for event in told] == ["evicted", "acquired", "held", "released", "acquired", "lost"]
    assert all(set(event) == KEYS for event in told)
    assert {(event["path"], event["slot"], event["trace_id"]) for event in told} == {(str(pidfile), 1, "mine")}
    assert told[0]["pid"] == dead_pid and told[1]["pid"] == told[2]["pid"] == told[3]["pid"] != told[4]["pid"]
    assert [re.sub(r"\d", "0", event["time"]) for event in told] == ["0000-00-00T00:00:00.000Z"] * 6


def test_a_token_is_logged(run, pidfile, log):
    printed = run("--pidfile", pidfile, "--log", log, "--fence", "--", "sh", "-c", "echo $PIDLOCK_TOKEN").stdout
    assert {event["token"] for event in events_in(log)} == {int(printed)}


def test_traceparent_gives_the_trace_id(run, pidfile, log):
    environment = dict(os.environ, TRACEPARENT="00-%s-00f067aa0ba902b7-01" % TRACE_ID)
    run("--pidfile", pidfile, "--log", log, "--", "true", env=environment)
    run("--pidfile", pidfile, "--log", log, "--trace-id", "mine", "--", "true", env=environment)
    assert [event["trace_id"] for event in events_in(log)] == [TRACE_ID] * 2 + ["mine"] * 2


def test_a_dash_is_stderr_and_no_file(run, pidfile, tmp_path):
    status, stdout, stderr = run("--pidfile", pidfile, "--log", "-", "--", "echo", "ran", cwd=tmp_path)
    told = [json.loads(line)["event"] for line in stderr.splitlines()]
    assert (status, stdout, told, os.listdir(tmp_path)) == (0, "ran\n", ["acquired", "released"], [])


@pytest.mark.parametrize("umask, mode", [("000", 0o644), ("077", 0o600)])
def test_a_new_log_is_an_ordinary_file(pidfile, log, umask, mode):
    """Red where others may write into it, or it can be executed."""
    script = 'umask %s; exec "$@"' % umask
    subprocess.check_call(["sh", "-c", script, "sh", *PIDLOCK, "-p", str(pidfile), "--log", str(log), "--", "true"])
    assert oct(stat.S_IMODE(log.stat().st_mode)) == oct(mode)


def test_a_path_that_is_not_utf_8_is_valid_json(run, tmp_path, log):
    name = b"\xff \x1b\"\n\xc3\xa9"
    run("--pidfile", os.path.join(os.fsencode(str(tmp_path)), name), "--log", log, "--", "true")
    assert [os.path.basename(os.fsencode(event["path"])) for event in events_in(log)] == [name] * 2


@needs_strace
def test_each_event_is_one_write_at_the_end_of_the_file(traced, pidfile, log):
    """write(2) with O_APPEND is what keeps lines whole. Red without O_APPEND, or where print() writes in parts."""
    traced.run("--pidfile", pidfile, "--log", log, "--", "true")
    calls = traced.calls(log)
    sizes = []
    for opened, written in zip(calls, calls[1:]):
        if '"%s"' % log in opened.arguments:
            assert "O_APPEND" in opened.arguments and "O_TRUNC" not in opened.arguments
            assert (written.name, written.arguments.split(",")[0]) == ("write", opened.arguments.rpartition("= ")[2])
            sizes.append(int(written.arguments.rpartition("= ")[2]))
    assert sizes == [len(line) for line in log.read_bytes().splitlines(keepends=True)] and len(sizes) == 2


def test_many_processes_at_once_lose_and_tear_no_line(pidfile, log):
    log.write_text('{"event": "earlier"}\n')
    processes = start_all(8, "-p", pidfile, "--max-concurrent", "8", "--log", log, "--", "true")
    assert [process.wait(timeout=60) for process in processes] == [0] * 8
    told = [event["event"] for event in events_in(log)]
    assert (told[0], sorted(told[1:])) == ("earlier", ["acquired"] * 8 + ["released"] * 8)


# ---- What cannot be written ----

MOUNT = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=4k none "$0" && %s exec "$@"')
FULL = (*MOUNT[:-1], MOUNT[-1] % 'head -c $((4096 - 10)) /dev/zero >"$0/file" &&')
READ_ONLY = (*MOUNT[:-1], MOUNT[-1] % 'mount -o remount,ro "$0" &&')


def make_device(path):
    os.mknod(str(path), stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null


UNWRITABLE = [  # which option, what is made in the place, the file named in it, who mounts something there before
    pytest.param(option, make, name, before, id="%s: %s" % (option[2:], id), marks=marks)
    for option, id, make, name, before, marks in [
        ("--log", "directory missing", None, "no/file", (), ()),
        ("--log", "a directory", None, "", (), ()),
        ("--log", "a FIFO that nobody reads", lambda place: os.mkfifo(str(place / "file")), "file", (), ()),
        ("--log", "full disk", lambda place: (place / "file").symlink_to("/dev/full"), "file", (), ()),
        ("--log", "room for half a line", None, "file", FULL, needs_mount),
        ("--log", "read-only", None, "file", READ_ONLY, needs_mount),
        ("--metrics", "directory missing", None, "no/file", (), ()),
        ("--metrics", "a directory", None, "", (), ()),
        ("--metrics", "a FIFO", lambda place: os.mkfifo(str(place / "file")), "file", (), ()),
        ("--metrics", "a device", lambda place: make_device(place / "file"), "file", (),
         pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
        ("--metrics", "full disk", None, "other", FULL, needs_mount),
        ("--metrics", "read-only", None, "file", READ_ONLY, needs_mount),
    ]
]


@pytest.mark.parametrize("option", ["--log", "--metrics"])
def test_a_working_directory_that_the_command_removes_takes_no_status_away(pidfile, tmp_path, option):
    """The name is relative to it. Red where that is found out outside of what may fail."""
    (tmp_path / "gone").mkdir()
    command = [*PIDLOCK, "-p", str(pidfile), option, "file", "--", "sh", "-c", "rm -r ../gone; exit 7"]
    process = subprocess.run(command, cwd=str(tmp_path / "gone"), stderr=subprocess.PIPE, timeout=60)
    assert (process.returncode, pidfile.exists(), process.stderr.count(b"\n")) == (7, False, 1)


@pytest.mark.parametrize("option, make, name, before", UNWRITABLE)
def test_what_cannot_be_written_is_said_once_and_changes_nothing_else(pidfile, tmp_path, option, make, name, before):
    """Red where a FIFO is opened blocking, or a device is replaced."""
    place = tmp_path / "place"
    place.mkdir()
    if make:
        make(place)
    kinds = [stat.S_IFMT(path.lstat().st_mode) for path in place.iterdir()]
    command = [*(before and (*before, str(place))), *PIDLOCK, "-p", str(pidfile), option, str(place / name), "--"]
    process = subprocess.run([*command, "sh", "-c", "echo ran; exit 7"], stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    said = "pidlock: %s: cannot write [^\n]+; the command runs all the same\n" % re.escape(str(place / name))
    assert (process.returncode, process.stdout, pidfile.exists()) == (7, b"ran\n", False)
    assert re.fullmatch(said, process.stderr.decode())
    assert [stat.S_IFMT(path.lstat().st_mode) for path in place.iterdir()] == kinds


@pytest.mark.parametrize("option, before", [
    pytest.param("--log", (), id="log: directory missing"),
    pytest.param("--log", FULL, id="log: room for half a line", marks=needs_mount),
    pytest.param("--metrics", (), id="metrics: directory missing"),
])
def test_held_stays_75_where_its_event_cannot_be_written(holder, pidfile, tmp_path, option, before):
    """Red where a short write, here of the only event, is taken for a whole one."""
    holder("--pidfile", pidfile)
    place = tmp_path / "place"
    if before:
        place.mkdir()
    command = [*(before and (*before, str(place))), *PIDLOCK, "-qp", str(pidfile), option, str(place / "file"), "--"]
    process = subprocess.run([*command, "echo", "ran"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    assert (process.returncode, process.stdout) == (75, b"")
    assert re.fullmatch("pidlock: [^\n]+: cannot write [^\n]+\n", process.stderr.decode())


def test_what_could_not_be_written_at_the_start_is_written_at_the_end(run, pidfile, tmp_path):
    """The command makes the directory. Red where a failure is the last try: the success would never be told."""
    place = tmp_path / "place"
    log, metrics = place / "events.log", place / "pidlock.prom"
    status, stdout, stderr = run("--pidfile", pidfile, "--log", log, "--metrics", metrics, "--", "mkdir", place)
    said = "pidlock: %s: cannot write %s: %s; the command runs all the same\n"
    missing = "its directory is missing, or its flock is not to be had"
    assert (status, stdout, stderr) == (0, "", said % (log, "this log", "No such file or directory")
                                        + said % (metrics, "these metrics", missing))
    assert [event["event"] for event in events_in(log)] == ["acquired", "released"]
    values = values_of(metrics, pidfile)
    assert (values["runs"], values["last_exit_status"]) == (1, 0) and values["last_start"] <= values["last_success"]


@needs_mount
def test_a_line_that_was_cut_is_written_whole_once_there_is_room(pidfile, tmp_path):
    """Red where the next event goes behind the half line, or where its rest alone does: another run may come first."""
    place = tmp_path / "place"
    place.mkdir()
    log = str(place / "file")
    command = [*FULL[:-1], FULL[-1].replace('exec "$@"', '"$@"; cat "$0/file"'), str(place), *PIDLOCK, "-p",
               str(pidfile), "--log", log, "--", "mount", "-o", "remount,size=8k", str(place)]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    half, *lines = process.stdout.decode().strip("\0").splitlines()
    told = [json.loads(line)["event"] for line in lines]
    assert (process.returncode, told, process.stderr.count(b"\n")) == (0, ["acquired", "released"], 1)
    assert lines[0].startswith(half)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_or_full_stream_as_the_log_changes_nothing(pidfile, stream):
    for redirection in (">&-", ">/dev/full"):
        number = {"stdout": 1, "stderr": 2}[stream]
        log = {"stdout": "/dev/stdout", "stderr": "-"}[stream]
        script = '"$@" %d%s' % (number, redirection)
        command = [*PIDLOCK, "-p", str(pidfile), "--log", log, "--", "sh", "-c", "exit 7"]
        status = subprocess.call(["sh", "-c", script, "sh", *command], stderr=subprocess.DEVNULL)
        assert (redirection, status, pidfile.exists()) == (redirection, 7, False)


# ---- The metrics ----


def test_metrics_after_a_success_a_failure_a_skip_and_an_eviction(run, holder, pidfile, metrics, dead_pid):
    """The last success outlives failures and skips: what an alert on `has not succeeded for a day` needs."""
    counted = ("--quiet", "--pidfile", pidfile, "--metrics", metrics, "--")
    began = time.time()
    run(*counted, "true")
    success = values_of(metrics, pidfile)
    assert began <= success["last_start"] <= success["last_success"] <= time.time()
    assert 0 < success["last_duration"] < 60
    assert {key: success[key] for key in set(success) - {"last_start", "last_success", "last_duration"}} == {
        "runs": 1, "last_exit_status": 0}

    run(*counted, "sh", "-c", "exit 7")
    failure = values_of(metrics, pidfile)
    assert failure == dict(success, runs=2, last_exit_status=7, last_start=failure["last_start"],
                           last_duration=failure["last_duration"])
    assert failure["last_start"] > success["last_start"]

    one = holder("--pidfile", pidfile)
    run(*counted, "true")
    one.finish()
    assert values_of(metrics, pidfile) == dict(failure, skips=1)

    pidfile.write_text("%d\n\n\n" % dead_pid)
    run(*counted, "sh", "-c", "kill -9 $$")
    evicted = values_of(metrics, pidfile)
    assert {key: evicted[key] for key in ("runs", "skips", "evictions", "last_exit_status", "last_success")} == {
        "runs": 3, "skips": 1, "evictions": 1, "last_exit_status": 137, "last_success": success["last_success"]}


@needs_strace
@pytest.mark.parametrize("fault, status", [
    ("/^(vfork|clone3?)$:error=EAGAIN", 125), ("/^link(at)?$:signal=TERM:when=1", 143),
], ids=["no process to be had", "a signal between the lock and the command"])
def test_a_run_whose_command_is_never_started_counts_with_its_status(traced, run, pidfile, metrics, fault, status):
    """Red where only a command's end is counted: the success before it would look like this run's."""
    counted = ("--pidfile", pidfile, "--metrics", metrics, "--", "true")
    assert run(*counted) == (0, "", "")
    before = values_of(metrics, pidfile)
    assert traced.run(*counted, inject=[fault])[0] == status
    after = values_of(metrics, pidfile)
    assert after == dict(before, runs=2, last_exit_status=status, last_start=after["last_start"],
                         last_duration=after["last_duration"])
    assert after["last_start"] > before["last_start"] and after["last_duration"] != before["last_duration"]


def test_counters_are_counters_and_the_rest_are_gauges(run, pidfile, metrics, dead_pid):
    pidfile.write_text("%d\n\n\n" % dead_pid)
    counted = ("--quiet", "--pidfile", pidfile, "--metrics", metrics, "--")
    run(*counted, *PIDLOCK, *counted, "true")
    run(*counted, "true")
    families = list(text_string_to_metric_families(metrics.read_text()))
    assert {family.name for family in families if family.type == "counter"} == {
        "pidlock_runs", "pidlock_skips", "pidlock_evictions"}
    assert len(families) == 7 and {family.type for family in families} == {"counter", "gauge"}
    assert all(family.documentation for family in families)


def test_a_directory_that_is_busy_at_the_start_loses_no_count(run, pidfile, metrics, dead_pid):
    """The command frees it. Red where what cannot be counted at once is never counted."""
    pidfile.write_text("%d\n\n\n" % dead_pid)
    directory = os.open(str(metrics.parent), os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        free = "import fcntl; fcntl.flock(%d, fcntl.LOCK_UN)" % directory
        status, stdout, stderr = run("--quiet", "--pidfile", pidfile, "--metrics", metrics, "--", sys.executable, "-c",
                                     free, pass_fds=[directory])
    finally:
        os.close(directory)
    values = values_of(metrics, pidfile)
    assert (status, stdout, stderr.count("these metrics")) == (0, "", 1)
    assert {key: value for key, value in values.items() if key not in ("last_start", "last_success", "last_duration")} \
        == {"runs": 1, "evictions": 1, "last_exit_status": 0}
    assert values["last_start"] <= values["last_success"]


def test_two_locks_share_one_file(run, tmp_path, metrics):
    for name in ("a.pid", "b.pid", "b.pid"):
        run("--pidfile", tmp_path / name, "--metrics", metrics, "--", "true")
    runs = {path: value for (name, path), value in values_in(metrics.read_text()).items() if name == "runs"}
    assert runs == {str(tmp_path / "a.pid"): 1, str(tmp_path / "b.pid"): 2}


def test_ten_runs_at_once_lose_no_count_and_a_reader_never_sees_a_partial_file(run, pidfile, metrics):
    """Red without the directory's flock, and where the file is written in place."""
    counted = ("--quiet", "--pidfile", pidfile, "--metrics", metrics, "--", "true")
    run(*counted)
    processes = start_all(10, *counted)
    seen = []
    while any(process.poll() is None for process in processes):
        values = values_of(metrics, pidfile)
        seen.append(values["runs"] + values.get("skips", 0))
        assert values["last_start"] and values["last_duration"]
    values = values_of(metrics, pidfile)
    assert seen == sorted(seen) and values["runs"] + values["skips"] == 11
    assert {process.returncode for process in processes} <= {0, 75}


def test_a_time_in_the_future_is_not_believed(run, pidfile, metrics):
    """The clock was set back since. Red where the latest counts: the alert `no success for a day` would never come."""
    run("--pidfile", pidfile, "--metrics", metrics, "--", "true")
    metrics.write_text(re.sub(r"(_timestamp_seconds\{.*\}) .*", r"\1 4102444800.0", metrics.read_text()))
    run("--pidfile", pidfile, "--metrics", metrics, "--", "true")
    values = values_of(metrics, pidfile)
    assert max(values["last_start"], values["last_success"]) <= time.time()


def test_the_file_is_replaced_and_readable_for_all_whatever_the_umask(run, pidfile, metrics):
    counted = ["--pidfile", pidfile, "--metrics", metrics, "--", "true"]
    run(*counted)
    with metrics.open() as reader:
        old = metrics.read_text()
        metrics.chmod(0o600)
        subprocess.check_call(["sh", "-c", 'umask 077; exec "$@"', "sh", *PIDLOCK, *map(str, counted)])
        assert reader.read() == old != metrics.read_text()
    assert (stat.S_IMODE(metrics.stat().st_mode), os.listdir(str(metrics.parent))) == (0o644, [metrics.name])


NAMES = {
    "quotes": b'"a" \'b\'', "backslash": b"a\\nb\\", "newline": b"a\nb", "brace": b'a"} 1',
    "other line ends": "a\rb\x0bc\u2028d\x85e".encode(), "no UTF-8": b"a\xff\xfe",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_label_is_escaped_and_found_again_by_the_next_run(run, tmp_path, metrics, name):
    """Red where a byte that is no UTF-8 becomes \\udcff: Prometheus knows three escapes and refuses others."""
    pidfile = os.path.join(os.fsencode(str(tmp_path)), name)
    said = [run("--pidfile", pidfile, "--metrics", metrics, "--", "true").stderr for _ in range(2)]
    text = metrics.read_bytes().decode()
    runs = {path: value for (key, path), value in values_in(text).items() if key == "runs"}
    assert (said, runs) == (["", ""], {pidfile.decode("utf-8", "backslashreplace"): 2})
    assert re.findall(r'(?m)^pidlock_runs_total\{pidfile="(?:[^"\\\n]|\\[\\"n])*"\} \d\.0$', text)


FOREIGN = {
    "another program's metrics": b"# HELP up x\n# TYPE up gauge\nup 1\n", "a script": b"#!/bin/sh\necho hello\n",
    "ours without a label": b"pidlock_runs_total 5\n", "binary": b"\xff\0\xfe",
    "a value that is none": b'pidlock_runs_total{pidfile="x"} many\n',
}


@pytest.mark.parametrize("body", FOREIGN.values(), ids=FOREIGN)
def test_a_file_that_is_not_ours_is_left_alone(run, pidfile, metrics, body):
    metrics.write_bytes(body)
    outcome = run("--pidfile", pidfile, "--metrics", metrics, "--", "sh", "-c", "echo ran; exit 7")
    said = "pidlock: %s: [^\n]+; the command runs all the same\n" % re.escape(str(metrics))
    assert (outcome[:2], metrics.read_bytes(), os.listdir(str(metrics.parent))) == ((7, "ran\n"), body, [metrics.name])
    assert re.fullmatch(said, outcome.stderr)


@needs_strace
def test_kill_9_at_each_step_leaves_the_old_or_the_new_file(traced, run, pidfile, metrics):
    """Of the count behind the command. Red where the file is written in place, or renamed before it is written."""
    arguments = ("--quiet", "--pidfile", pidfile, "--metrics", metrics, "--", "true")
    assert [run(*arguments), traced.run(*arguments)] == [(0, "", "")] * 2
    calls = [call for call in traced.calls(pidfile) if '"pidlock", 7)' not in call.arguments]
    behind = calls[index_of_start(calls):]
    first = next(nth for nth, call in enumerate(behind) if '"%s"' % metrics.parent in call.arguments)
    steps = behind[first:]
    assert {"openat", "flock", "write", "fchmod", "rename", "exit_group"} <= {call.name for call in steps}
    seen = []
    for call in steps:
        old = values_of(metrics, pidfile)
        killed = traced.run(*arguments, inject=["%s:signal=KILL:when=%d" % call[:2]])
        new = values_of(metrics, pidfile)
        names = [name for name in os.listdir(str(metrics.parent)) if not name.startswith(".pidlock-")]
        assert (call, killed[0], set(new), new["runs"], names) == (call, -9, set(old), old["runs"] + 1, [metrics.name])
        seen.append(new["last_success"] > old["last_success"])
    assert seen == sorted(seen) and set(seen) == {False, True}

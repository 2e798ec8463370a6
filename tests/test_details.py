"""Details: what stands below the mark, that each value stays in its line, and what the judge makes of them."""
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest
from conftest import CHILDREN, PIDLOCK, ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

import pidlock

blackbox = pytest.mark.blackbox
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/ns/pid"), reason="needs Linux's /proc")


def may_unshare(option):
    try:
        return subprocess.call(["unshare", option, "true"], stderr=subprocess.DEVNULL) == 0
    except FileNotFoundError:
        return False


def needs_unshare(option, what):
    return pytest.mark.skipif(not may_unshare(option), reason="needs unshare(1) and root, for %s" % what)


def start_of(pid):
    return pathlib.Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()[19]


# ---- Writing them ----


@blackbox
@needs_proc
def test_the_details_say_who_where_since_when_and_why(holder, pidfile):
    earliest = time.time()
    one = holder("-p", pidfile, "--details", "--trace-id", "a trace", "--stale-after", "1h")
    record = pidlock.parse_record(pidfile.read_bytes())
    acquired, pid_start = (pidlock._parse_time(record.details[key]) for key in ("acquired", "pid_start"))
    btime = int(re.search(r"^btime (\d+)", pathlib.Path("/proc/stat").read_text(), re.MULTILINE).group(1))
    assert record == pidlock.Record(one.pid, True, {
        "host": os.uname().nodename,
        "boot": pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pidns": os.readlink("/proc/self/ns/pid"),
        "timens": os.readlink("/proc/self/ns/time"),
        "pid_start": record.details["pid_start"],
        "start": start_of(one.pid),
        "acquired": record.details["acquired"],
        "command": "/bin/sh -c 'echo $$; read line'",
    }, {"strategy": "pid-first", "stale_after": "3600.0", "max_concurrent": "1", "slot": "1", "trace_id": "a trace"})
    assert earliest - 0.001 <= acquired <= time.time()
    assert pid_start == pytest.approx(btime + int(start_of(one.pid)) / os.sysconf("SC_CLK_TCK"), abs=0.001)


@blackbox
def test_without_the_option_there_are_none(run, pidfile):
    lock_file = run("-p", pidfile, "--trace-id", "T", "--", "cat", pidfile).stdout
    assert re.match(r"\d+\n\n\n\Z", lock_file)


@blackbox
@pytest.mark.skipif(not shutil.which("strace"), reason="strace shows the system calls")
def test_the_file_is_written_complete_in_one_write(pidfile, tmp_path):
    """Catches a record that is written line by line, or the details after the PID."""
    trace = ["strace", "-qq", "-s", "9999", "-e", "trace=write,pwrite64,writev", "-o", tmp_path / "log"]
    lock_file = subprocess.check_output([*trace, *PIDLOCK, "-p", pidfile, "--details", "--", "cat", pidfile])
    writes = re.findall(r'^(\w+)\(\d+, "(.*)", \d+\) += (\d+)$', (tmp_path / "log").read_text(), re.MULTILINE)
    assert len(writes) == 2 and writes[0] == ("write", "pidlock", "7")  # the first is the holder's name, for ps
    name, text, size = writes[1]
    assert (name, int(size)) == ("write", len(lock_file))


READ_LOOP = """
import sys
ends = []
while len(ends) < 300 and set(ends) <= {b"trace_id=1\\n"}:
    try:
        with open(sys.argv[1], "rb") as file:
            ends.append(file.read()[-11:])
    except FileNotFoundError:
        pass
print(set(ends))
"""


def test_a_reader_in_a_tight_loop_never_sees_a_part(pidfile):
    """Catches a file that gets its name before its content."""
    with subprocess.Popen([sys.executable, "-c", READ_LOOP, pidfile], stdout=subprocess.PIPE) as reader:
        deadline = time.monotonic() + 60
        while reader.poll() is None:
            assert time.monotonic() < deadline, "the reader sees no file"
            with pidlock.PidLock(pidfile, details=True, trace_id="1"):
                pass
        assert reader.stdout.read() == b"{b'trace_id=1\\n'}\n"


TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACES = {
    "none": (None, [], None),
    "TRACEPARENT": ("00-%s-b7ad6b7169203331-01" % TRACE, [], TRACE),
    "a later version of it": ("cc-%s-b7ad6b7169203331-01-what-the-future-brings" % TRACE, [], TRACE),
    "--trace-id": (None, ["--trace-id", "job 7"], "job 7"),
    "--trace-id wins": ("00-%s-b7ad6b7169203331-01" % TRACE, ["--trace-id", "mine"], "mine"),
    "an empty one": ("", [], None),
    "nonsense": ("nonsense", [], None),
    "too short": ("00-0af7-b7ad6b7169203331-01", [], None),
    "no hexadecimal": ("00-%s-b7ad6b7169203331-01" % ("z" * 32), [], None),
    "all zeros, which W3C calls invalid": ("00-%s-b7ad6b7169203331-01" % ("0" * 32), [], None),
    "a newline in it": ("00-%s\nstart=1-b7ad6b7169203331-01" % TRACE[8:], [], None),
}


@blackbox
@pytest.mark.parametrize("traceparent, options, trace_id", TRACES.values(), ids=TRACES)
def test_the_trace_id_is_the_option_or_the_environments(run, pidfile, monkeypatch, traceparent, options, trace_id):
    monkeypatch.delenv("TRACEPARENT", raising=False)
    if traceparent is not None:
        monkeypatch.setenv("TRACEPARENT", traceparent)
    record = pidlock.parse_record(run("-p", pidfile, "--details", *options, "--", "cat", pidfile).stdout.encode())
    assert record.debug.get("trace_id") == trace_id


# ---- Values stay in their lines ----

EVIL = {
    "a newline": "a\nstart=1",
    "two newlines": "\n\n",
    "CR": "a\rb\r",
    "CR LF": "a\r\nstart=1",
    "the debug line": "\n# debug\nslot=9",
    "the debug line alone": "# debug",
    "an equals sign": "start=1",
    "a backslash": "a\\nb\\\\",
    "an escape sequence": "\x1b]0;title\x07\x1b[31m",
    "a C1 control": "\x9b31m",
    "line separators": "a\u2028b\x85c",
    "a right-to-left override": "\u202egpj.sh",
    "letters of the world": "größe 備份",
    "bytes that are not UTF-8": os.fsdecode(b"\xff\xfe\x80"),
    "nothing": "",
    "blanks": "  a  ",
}
NAMES = ["host", "boot", "pidns", "timens", "pid_start", "start", "acquired", "command",
         "strategy", "max_concurrent", "slot"]


@blackbox
@needs_proc
@pytest.mark.parametrize("value", EVIL.values(), ids=EVIL)
def test_a_command_line_cannot_break_out_of_its_line(run, pidfile, value):
    outcome = run("-p", pidfile, "--details", "--", "sh", "-c", 'cat "$PIDLOCK_PIDFILE"', value)
    lines = outcome.stdout[:-1].split("\n")
    assert [line.partition("=")[0] for line in lines[3:]] == NAMES[:8] + ["# debug"] + NAMES[8:]
    assert all(line.isprintable() for line in lines)
    record = pidlock.parse_record(outcome.stdout.encode("utf-8"))
    words = ["sh", "-c", 'cat "$PIDLOCK_PIDFILE"', value]
    assert shlex.split(os.fsdecode(os.fsencode(record.details["command"]))) == words


def test_a_nul_cannot_break_out_either():
    record = pidlock.Record(4231, True, {"command": "a\0b"}, {})
    assert pidlock.encode_record(record) == b"4231\n\n\ncommand=a\\x00b\n"


@blackbox
def test_a_very_long_command_line_leaves_a_file_that_the_next_run_can_judge(run, pidfile):
    """Catches a record longer than what a pidfile may be: that would be somebody's file for ever."""
    words = ["sh", "-c", 'kill -9 $PPID; cat "$0"', pidfile, *["\\\x7f" * 20000] * 3]
    killed = run("-p", pidfile, "--details", "--trace-id", "\\" * 256, "--", *words)
    record = pidlock.parse_record(killed.stdout.encode())
    assert record.details["command"].startswith("sh -c 'kill -9 $PPID; cat ")
    assert run("-q", "-p", pidfile, "--wait", "60", "--", "echo", "free") == (0, "free\n", "")


@blackbox
@pytest.mark.parametrize("value", [EVIL["a newline"], EVIL["CR"], EVIL["an escape sequence"], "", "\x85",
                                   EVIL["bytes that are not UTF-8"]], ids=ascii)
def test_a_trace_id_that_does_not_print_is_wrong_usage(run, pidfile, value):
    outcome = run("-p", pidfile, "--details", "--trace-id", value, "--", "echo", "ran")
    assert (outcome.status, outcome.stdout, outcome.stderr.splitlines()[-1].isprintable()) == (2, "", True)


texts = st.text() | st.binary().map(os.fsdecode) | st.sampled_from(sorted(EVIL.values()))
fields = st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), texts, max_size=5)
records = st.builds(pidlock.Record, st.integers(1, pidlock.PID_MAX), st.just(True), fields, fields)


@settings(max_examples=60)
@given(records)
def test_what_is_encoded_is_parsed_again_with_its_details(record):
    assert pidlock.parse_record(pidlock.encode_record(record)) == record


@settings(max_examples=60)
@given(records)
def test_each_detail_is_one_line_of_printable_text(record):
    lines = pidlock.encode_record(record).decode("utf-8").split("\n")
    assert len(lines) == 4 + len(record.details) + len(record.debug) + bool(record.debug)
    assert all(line.isprintable() for line in lines)


@settings(max_examples=60)
@given(st.binary(max_size=300) | st.lists(st.sampled_from(
    [b"7\n\n\n", b"pid=7\n", b"start=", b"\n", b"\\", b"\\x", b"\\U0010ffff", b"\\U00110000", b"\\ud800", b"# debug\n",
     b"\xff", b"=", b"limit=", b"9" * 400, b"acquired=2024-13-01T00:00:00Z\n"]), max_size=12).map(b"".join))
def test_any_bytes_below_the_pid_are_details_and_never_an_error(body):
    record = pidlock.parse_record(b"4231\n\n\n" + body)
    assert record.pid == 4231 and set(map(type, record.details.values())) <= {str}
    pidlock._since(record, os.stat("."))


# ---- Other tools' files ----

UUID = "6d6ee3c1-4a4b-4ba6-9d3c-0123456789ab"
OTHERS = {
    "pid alone": (b"pid=4231\n", (4231, {"pid": "4231"})),
    "without a newline": (b"pid=4231", (4231, {"pid": "4231"})),
    "CR LF": (b"host=here\r\npid=4231\r\n", (4231, {"host": "here", "pid": "4231"})),
    "not the first key": (b"# made by x\nhost=here\npid=4231\n", (4231, {"host": "here", "pid": "4231"})),
    "ticks": (b"pid=4231\nstart=123456789\n", (4231, {"pid": "4231", "start": "123456789"})),
    "seconds since the epoch are no ticks": (b"pid=4231\nstart=1733000000\n", (4231, {"pid": "4231"})),
    "nor with a fraction": (b"pid=4231\nstart=1733000000.25\n", (4231, {"pid": "4231"})),
    "nor as text": (b"pid=4231\nstart=2024-11-30T18:00:00Z\n", (4231, {"pid": "4231"})),
    "nor below a PID line": (b"4231\nstart=1733000000\n", (4231, {})),
    "a boot time is no boot ID": (b"pid=4231\nboot=1733000000\n", (4231, {"pid": "4231"})),
    "a boot ID is": (b"pid=4231\nboot=" + UUID.encode() + b"\n", (4231, {"pid": "4231", "boot": UUID})),
    "blanks in it": (b"pid= 4231\n", None),
    "missing": (b"host=here\nstart=12\n", None),
    "empty": (b"pid=\n", None),
    "zero": (b"pid=0\n", None),
    "negative": (b"pid=-1\n", None),
    "no ASCII digits": ("pid=４２３１\n".encode(), None),
    "only below the debug line": (b"host=here\n# debug\npid=4231\n", None),
}


@pytest.mark.parametrize("body, read", OTHERS.values(), ids=OTHERS)
def test_another_tools_file_is_read_by_its_pid_key(body, read):
    record = pidlock.parse_record(body)
    assert (record and (record.pid, record.details)) == read
    assert not record or not record.marked


@blackbox
@pytest.mark.parametrize("body, status", [
    ("pid={alive}\r\nhost={host}\r\n", 1),
    ("pid={alive}\nstart=1733000000\nhost={host}\n", 1),
    ("{alive}\nstart=1733000000\nboot=1733000000\n", 1),
    ("pid={dead}\n", 0),
    ("start=1733000000\n", 0),
    ("pid={alive}\nhost=no.such.host\n", 125),
], ids=["alive", "alive, an epoch", "alive, an epoch below a PID line", "dead", "no PID", "another host"])
def test_another_tools_file_is_judged_by_its_pid(run, pidfile, dead_pid, body, status):
    pidfile.write_text(body.format(alive=os.getpid(), dead=dead_pid, host=os.uname().nodename))
    os.utime(pidfile, (10 ** 9, 10 ** 9))
    assert run("-p", pidfile, "--check").status == status


# ---- Judging by them: rules 4, 5 and 7 ----

UNMARKED, MARKED = pidlock.Record(4231, False), pidlock.Record(4231, True)
FACTS = pidlock.Facts(record=UNMARKED, size=90, links=1, executable=False, nuls=False, age=60, flock=True,
                      filesystem="local", process="alive", lasted=60, host=True, boot=True, pidns=True, timens=True,
                      start=True)
NETWORK = {"filesystem": "network"}
ROWS = {
    "all agree": ({}, "held"),
    "nothing is known": (dict.fromkeys(["host", "boot", "pidns", "timens", "start"]), "held"),
    # rule 3 comes first: marked and local
    "marked: another host": ({"record": MARKED, "host": False}, "stale"),
    "marked: another PID namespace": ({"record": MARKED, "pidns": False}, "stale"),
    "marked: all agree": ({"record": MARKED}, "stale"),
    "marked, not known to be local: all agree": ({"record": MARKED, "filesystem": "other"}, "held"),
    "marked, not known to be local: another host": ({"record": MARKED, "filesystem": "other", "host": False},
                                                    "inconclusive"),
    # rule 4
    "another host": ({"host": False}, "inconclusive"),
    "another host, its PID is none of ours": ({"host": False, "process": "none"}, "inconclusive"),
    "another host, another boot": ({"host": False, "boot": False}, "inconclusive"),
    "another host, another start": ({"host": False, "start": False}, "inconclusive"),
    "another PID namespace": ({"pidns": False}, "inconclusive"),
    "another PID namespace, no such PID": ({"pidns": False, "process": "none"}, "inconclusive"),
    "another PID namespace, another boot": ({"pidns": False, "boot": False}, "inconclusive"),
    "another time namespace": ({"timens": False}, "inconclusive"),
    "another time namespace, another start": ({"timens": False, "start": False}, "inconclusive"),
    "network, our host": (NETWORK, "held"),
    "network, our host, no such PID": ({**NETWORK, "process": "none"}, "stale"),
    "network, our host, another boot": ({**NETWORK, "boot": False}, "stale"),
    "network, our host, another start": ({**NETWORK, "start": False}, "stale"),
    "network, our host, marked": ({**NETWORK, "record": MARKED}, "held"),
    "network, no host": ({**NETWORK, "host": None, "process": "none"}, "inconclusive"),
    "network, no host, another boot": ({**NETWORK, "host": None, "boot": False}, "inconclusive"),
    "network, another host": ({**NETWORK, "host": False, "process": "none"}, "inconclusive"),
    "other, no host, no such PID": ({"filesystem": "other", "host": None, "process": "none"}, "stale"),
    "other, another host": ({"filesystem": "other", "host": False}, "inconclusive"),
    # rule 5
    "another boot": ({"boot": False}, "stale"),
    "another boot, our own PID without flock": ({"boot": False, "process": "ours", "flock": False}, "stale"),
    "another boot, start agrees": ({"boot": False, "start": True}, "stale"),
    # rules 6 and 7
    "no such PID, start not known": ({"process": "none", "start": None}, "stale"),
    "another start": ({"start": False}, "stale"),
    "another start, no boot known": ({"start": False, "boot": None}, "stale"),
    "another start, our own PID without flock": ({"start": False, "process": "ours", "flock": False}, "stale"),
    # no flock to be had
    "no flock, marked, another boot": ({"flock": False, "record": MARKED, "boot": False}, "inconclusive"),
    "no flock, all agree": ({"flock": False}, "held"),
    "no flock, another start": ({"flock": False, "start": False}, "stale"),
}


@pytest.mark.parametrize("changes, state", ROWS.values(), ids=ROWS)
def test_the_first_rule_that_fits_decides(changes, state):
    assert pidlock.judge(FACTS._replace(**changes))[0] == state


@pytest.fixture
def on_filesystem(tmp_path_factory, monkeypatch):
    """Let mountinfo say that our files are on such a filesystem."""
    real = open

    def fake(name):
        mountinfo = tmp_path_factory.mktemp("fake") / "mountinfo"
        with mountinfo.open("w") as file:
            fdinfo = pathlib.Path("/proc/self/fdinfo/%d" % file.fileno()).read_text()
            file.write("%s 0 0:40 / /mnt rw - %s x:/y rw\n" % (re.search(r"mnt_id:\s+(\d+)", fdinfo).group(1), name))
        fakes = {"/proc/self/mountinfo": mountinfo}
        monkeypatch.setattr("builtins.open", lambda path, *rest, **named: real(fakes.get(path, path), *rest, **named))

    return fake


def write_details(path, pid, marked=False, **changes):
    """Write the record that this process would have in its file, as of this PID; None takes a key away."""
    details = dict(pidlock._describe_self(["true"]), start=start_of(pid) if os.path.exists("/proc/%d" % pid) else "1")
    details = {key: value for key, value in dict(details, **changes).items() if value is not None}
    path.write_bytes(pidlock.encode_record(pidlock.Record(pid, marked, details)))
    os.utime(path, (10 ** 9, 10 ** 9))


REAL = {
    "all agree": ({}, "held", "held by PID"),
    "another host": ({"host": "elsewhere"}, "unknown", "host elsewhere"),
    "another boot": ({"boot": UUID}, "stale", "last boot"),
    "another PID namespace": ({"pidns": "pid:[1]"}, "unknown", "namespace"),
    "another time namespace": ({"timens": "time:[1]"}, "unknown", "namespace"),
    "another start": ({"start": "1"}, "stale", "another process"),
    "no start": ({"start": None}, "held", "held by PID"),
    "a start that is no number": ({"start": "early"}, "held", "held by PID"),
    "debug fields decide nothing": ({"strategy": "time-only", "stale_after": "0"}, "held", "held by PID"),
}


@needs_proc
@pytest.mark.parametrize("changes, state, reason", REAL.values(), ids=REAL)
def test_what_is_recorded_is_compared_with_what_we_see(pidfile, changes, state, reason):
    write_details(pidfile, os.getppid(), **changes)
    status = pidlock.inspect(pidfile)
    assert (status.state, reason in status.reason) == (state, True)


@needs_proc
@pytest.mark.parametrize("name", ["nfs4", "cifs", "9p", "fuse.sshfs"])
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize("host, pid, state", [
    (None, "dead", "unknown"), ("elsewhere", "dead", "unknown"), ("here", "dead", "stale"), ("here", "alive", "held"),
])
def test_on_a_network_filesystem_only_our_own_hosts_files_are_judged(
        pidfile, dead_pid, on_filesystem, name, marked, host, pid, state):
    on_filesystem(name)
    host = os.uname().nodename if host == "here" else host
    write_details(pidfile, os.getppid() if pid == "alive" else dead_pid, marked, host=host)
    assert pidlock.inspect(pidfile).state == state
    if state == "unknown":
        with pytest.raises(pidlock.LockHeld, match="rm %s" % pidfile):
            pidlock.PidLock(pidfile).acquire()


# ---- A PID that was really recycled, other namespaces ----


@needs_proc
@needs_unshare("-pf", "a PID namespace in which we choose PIDs")
def test_a_pid_that_was_given_to_another_process_is_told_by_its_start(pidfile):
    """Without flock there is no mark, so that the details have to tell. The second file has none: so it is held."""
    unshare = ["unshare", "-pf", "--mount-proc", "--kill-child"]
    recycle = [sys.executable, CHILDREN / "details_recycle.py", pidfile]
    told = subprocess.check_output(unshare + recycle, timeout=60).decode().splitlines()
    assert told == ["recycled", "stale: another process", "held"]


NO_FLOCK_HOLDER = """
import errno, fcntl, os, sys
def no_flock(*_): raise OSError(errno.ENOSYS, "no flock here")
fcntl.flock = no_flock
import pidlock
pidlock.PidLock(sys.argv[1], details=True).acquire()
print(os.readlink("/proc/self/ns/" + sys.argv[2]))
os._exit(0)
"""


@needs_proc
@pytest.mark.parametrize("options, kind, key", [
    pytest.param(["-T", "-f"], "time", "timens", marks=needs_unshare("-T", "a time namespace")),
    pytest.param(["-pf", "--mount-proc"], "pid", "pidns", marks=needs_unshare("-pf", "a PID namespace")),
], ids=["time", "PID"])
def test_a_holder_of_another_namespace_records_it_and_is_inconclusive_here(pidfile, options, kind, key):
    command = ["unshare", *options, sys.executable, "-c", NO_FLOCK_HOLDER, pidfile, kind]
    theirs = subprocess.check_output(command, timeout=60, cwd=ROOT).decode().strip()
    record = pidlock.parse_record(pidfile.read_bytes())
    assert (record.details[key], record.marked, theirs != os.readlink("/proc/self/ns/" + kind)) == (theirs, False, True)
    status = pidlock.inspect(pidfile)
    assert (status.state, "another PID or time namespace" in status.reason) == ("unknown", True)


# ---- Without /proc ----

HIDE_PROC = 'mount --bind "$1" "$(realpath /bin/ps)"; mount -t tmpfs none /proc; shift; exec "$@"'
LSTART = "Sat Nov 30 18:00:00 2024"


@pytest.fixture
def run_without_proc(tmp_path):
    """Run pidlock where /proc is empty and ps is a script of ours, which notes its arguments in tmp_path/asked."""

    def run(script, *arguments, **options):
        stub = tmp_path / "stub"
        stub.write_text("#!/bin/sh\necho \"$*\" >>'%s'\n%s\n" % (tmp_path / "asked", script))
        stub.chmod(0o755)
        done = subprocess.run(["unshare", "-m", "sh", "-ec", HIDE_PROC, "sh", stub, *PIDLOCK, *arguments], timeout=60,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, **options)
        return done.returncode, done.stdout, done.stderr

    return run


@blackbox
@needs_unshare("-m", "a mount namespace without /proc")
@pytest.mark.parametrize("script, status", [
    ("echo '%s'" % LSTART, 1), ("echo ' Sat Nov  30 18:00:00 2024 '", 1), ("echo 'Sat Nov 30 18:00:01 2024'", 0),
    ("exit 1", 1), ("echo; exit 1", 1),
], ids=["agrees", "agrees but for blanks", "differs", "ps does not know", "ps fails"])
def test_without_proc_the_start_is_what_ps_says(run_without_proc, pidfile, tmp_path, script, status):
    """Catches a start that is not compared, or compared as ps pads it."""
    pidfile.write_text("%d\nstart=%s\n" % (os.getpid(), LSTART))
    assert run_without_proc(script, "-p", pidfile, "--check") == (status, "", "")
    asked = (tmp_path / "asked").read_text()
    assert set(asked.splitlines()) == {"-o lstart= -p %d" % os.getpid()}


@blackbox
@needs_unshare("-m", "a mount namespace without /proc")
def test_without_proc_ticks_are_not_compared_with_what_ps_says(run_without_proc, pidfile):
    pidfile.write_text("%d\nstart=12345\n" % os.getpid())
    assert run_without_proc("echo '%s'" % LSTART, "-p", pidfile, "--check") == (1, "", "")


@blackbox
@needs_unshare("-m", "a mount namespace without /proc")
def test_without_proc_the_details_have_what_there_is(run_without_proc, pidfile):
    """A ps in the working directory must not be run, where Python 3.6 looks first by os.defpath."""
    trap = pidfile.parent / "ps"
    trap.write_text("#!/bin/sh\necho trapped\n")
    trap.chmod(0o755)
    status, stdout, stderr = run_without_proc("echo '%s'" % LSTART, "-p", pidfile, "--details", "cat", pidfile,
                                              cwd=pidfile.parent)
    record = pidlock.parse_record(stdout.encode())
    assert (status, stderr, record.marked, pidfile.exists()) == (0, "", True, False)
    assert dict(record.details, acquired=None) == {
        "host": os.uname().nodename, "start": LSTART, "acquired": None, "command": "cat %s" % pidfile,
    }


@blackbox
@needs_unshare("-m", "a mount namespace without /proc")
def test_without_proc_and_ps_a_living_pid_is_held(run_without_proc, pidfile):
    pidfile.write_text("%d\nstart=%s\n" % (os.getpid(), LSTART))
    assert run_without_proc(":", "-p", pidfile, "--check") == (1, "", "")

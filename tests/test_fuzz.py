"""Fuzz: whatever stands in a file, a time, a command line or an event, there is an answer and never a traceback."""
import contextlib
import fcntl
import json
import os
import re
import subprocess
import tempfile
import time
import types

import pytest
from conftest import PIDLOCK
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import pidlock
from pidlock import PID_FIRST, PID_ONLY, LockHeld, PidLock, PidLockError

fuzz = settings(max_examples=60, deadline=None)
raw_texts = st.text() | st.binary(max_size=40).map(os.fsdecode)
words = st.binary(max_size=12).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"")))  # as an argv has them


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def living_pid():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process.pid


def say(function, *arguments):
    """Call it; return (what it returns or its exit status, what it wrote on stdout, on stderr)."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out, tempfile.TemporaryFile("w+", encoding="utf-8") as err:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                result = function(*arguments)
            except SystemExit as stop:
                result = stop.code
        texts = []
        for file in (out, err):
            file.flush()
            file.seek(0)
            texts.append(file.read())
        return (result, *texts)


# ---- Bodies ----

PIECES = [
    b"\n", b"\n\n\n", b"\r", b"\0", b"\0" * 4096, b"\t ", b"-", b"\xef\xbb\xbf", b"\xff\xfe", b"0", b"2147483647",
    b"{living}", b"{ours}", b"pid={living}\n", b"host=no.such.host\n", b"boot=-\n", b"start=1\n",
    b"start=Mon Jan 1 00:00:00 2024\n", b"acquired=2001-09-09T01:46:40Z\n", b"acquired=9999-12-31T23:59:59-99:99\n",
    b"limit=3\n", b"limit=0\n", b"# debug\n", b"trace_id=\\x1b[31m\n", b"command=\x1b[31m\xc2\x9b\n", b"\\", b"=",
    b"x" * 70000,
]
FIRST = st.sampled_from([b"", b"{living}\n", b"{living}\n\n\n", b"pid={living}\n"])
pieces = st.tuples(FIRST, st.lists(st.sampled_from(PIECES), max_size=6).map(b"".join))
bodies = st.binary(max_size=100) | pieces.map(b"".join)


@fuzz
@given(bodies)
def test_what_a_body_says_it_says_again_when_it_is_written_again(body):
    record = pidlock.parse_record(body)
    if record is not None:
        written = pidlock.encode_record(record)
        assert pidlock.parse_record(written) == record
        assert all(line.isprintable() for line in written.decode("utf-8").split("\n"))


lines = st.fixed_dictionaries({}, optional={
    "host": raw_texts, "boot": st.uuids().map(str), "pidns": st.just("pid:[4026531836]"), "command": raw_texts,
    "start": st.integers(0, 2 ** 63).map(str) | st.just("Mon Jan 1 00:00:00 2024"),
})
debug_lines = st.dictionaries(st.sampled_from(["strategy", "slot", "trace_id"]), raw_texts)


@fuzz
@given(st.integers(1, pidlock.PID_MAX), lines, debug_lines)
def test_details_without_the_mark_are_parsed_again(pid, details, debug):
    """As written where there is no flock. Red where the guard against other tools' times drops our own."""
    if details.get("start", "").isdigit():
        details.setdefault("boot", "6d6ee3c1-4a4b-4ba6-9d3c-0123456789ab")  # whoever sees ticks sees the boot ID
    record = pidlock.Record(pid, False, details, debug)
    assert pidlock.parse_record(pidlock.encode_record(record)) == record


def examine(path, operation=fcntl.LOCK_SH, *policy):
    """Return the state, or "error" where there is none to tell."""
    try:
        found = pidlock._examine(str(path), operation, policy or (None, PID_FIRST))
    except PidLockError:
        return "error"
    if found.descriptor is not None:
        pidlock._give_back(found.descriptor)
    return found.state


def write(path, body, age=0.0, mode=0o644):
    path.write_bytes(body)
    path.chmod(mode)
    os.utime(path, (time.time() - age, time.time() - age))


AGES = st.sampled_from([-1e9, -1.0, 60.0, 1e9])  # -1: of this moment, and so for the length of the test
OUTCOMES = {"stale": {"stale"}, "held": {"held", "inconclusive"}, "error": {"error"}}


@fuzz
@given(body=bodies, age=AGES, mode=st.sampled_from([0o644, 0o755]))
def test_probe_and_run_agree_and_only_what_is_stale_is_ever_removed(directory, living_pid, body, age, mode):
    path = directory / "body.pid"
    body = body.replace(b"{living}", b"%d" % living_pid).replace(b"{ours}", b"%d" % os.getpid())
    write(path, body, age, mode)
    state = examine(path)
    try:
        with PidLock(path):
            outcome = "stale"
    except LockHeld:
        outcome = "held"
    except PidLockError:
        outcome = "error"
    assert state in OUTCOMES[outcome]
    assert outcome == "stale" or path.read_bytes() == body


@fuzz
@given(body=bodies, age=AGES, as_json=st.booleans())
def test_status_tells_about_any_body_in_one_line(directory, living_pid, body, age, as_json):
    path = directory / "status.pid"
    write(path, body.replace(b"{living}", b"%d" % living_pid), age)
    status, out, err = say(pidlock.main, ["-p", str(path), "--status"] + ["--json"] * as_json)
    said = out or err
    assert status in (0, 1, 4) and said[-1:] == "\n" and said[:-1].isprintable()
    assert not as_json or not out or pidlock.STATUS_CODES[json.loads(out)["state"]] == status


# ---- The judge, over files and processes that are really there ----

PLACES = ("host", "pidns", "timens")  # who is elsewhere is in doubt; who is here can be judged
KEYS = PLACES + ("boot", "start")
EVIDENCE = {"the flock is held": {"flocked": True}, "its process lives": {"process": "living"},
            "it is young": {"age": -1.0}, **{"its %s agrees" % key: {key: True} for key in KEYS}}
USUAL = {"process": "living", "marked": False, "flocked": False, "age": 60.0, **dict.fromkeys(KEYS)}
cases = st.fixed_dictionaries({}, optional={
    "process": st.sampled_from(["ended", "ours"]), "marked": st.just(True), "flocked": st.just(True), "age": AGES,
    **dict.fromkeys(KEYS, st.booleans()),
}).map(lambda changes: dict(USUAL, **changes))


@pytest.fixture(scope="module")
def pids(living_pid):
    ended = subprocess.Popen(["true"])
    ended.wait()
    return {"ended": ended.pid, "ours": os.getpid(), "living": living_pid}


def judge_file(case, path, pid, *policy):
    """Write the file that this case describes; return its state for a contender."""
    here = dict(pidlock._describe_place(), start=pidlock._start_of(pid, "1"))
    elsewhere = dict(here, host="no.such.host", boot="6d6ee3c1-4a4b-4ba6-9d3c-0123456789ab", pidns="pid:[1]",
                     timens="time:[1]", start="1")
    said = {key: (here if case[key] else elsewhere)[key] for key in KEYS if case[key] is not None}
    details = {key: value for key, value in said.items() if value}
    write(path, pidlock.encode_record(pidlock.Record(pid, case["marked"], details)), case["age"])
    with open(str(path)) as file:
        if case["flocked"]:
            fcntl.flock(file, fcntl.LOCK_SH)
        return examine(path, fcntl.LOCK_EX, *policy)


@fuzz
@given(case=cases, signs=st.sets(st.sampled_from(sorted(EVIDENCE)), min_size=1),
       stale_after=st.sampled_from([None, 30]), strategy=st.sampled_from([PID_FIRST, PID_ONLY]))
def test_no_evidence_of_life_ever_turns_held_into_stale(directory, pids, case, signs, stale_after, strategy):
    """Several signs at once too. Red where the flock is not asked first, or an agreement is taken for a difference."""
    more = dict(case)
    for sign in signs:
        more.update(EVIDENCE[sign])
    before, after = (judge_file(one, directory / "judged.pid", pids[one["process"]], stale_after, strategy)
                     for one in (case, more))
    in_doubt = before == "inconclusive" and not any("its %s agrees" % place in signs for place in PLACES)
    assert after != "stale" or not (before == "held" or in_doubt)
    assert after == "held" or not more["flocked"]


# ---- Times ----

units = st.tuples(*[st.none() | st.integers(0, 10 ** 6) | st.floats(0, 1e6).map(lambda value: "%.3f" % value)] * 4)


@fuzz
@given(st.text(st.sampled_from("0123456789.dhms+-einf \n٣²"), max_size=9) | st.text(max_size=6) | raw_texts)
def test_any_text_is_a_time_or_a_usage_error(text):
    try:
        seconds = pidlock._parse_seconds(text)
    except ValueError as error:
        assert "is no time" in str(error)
    else:
        assert seconds >= 0 and (text == "inf" or re.fullmatch("([0-9]+([.][0-9]+)?[dhms]?)+", text))


@fuzz
@given(units)
def test_a_time_is_the_sum_of_its_parts(values):
    text = "".join("%s%s" % pair for pair in zip(values, "dhms") if pair[0] is not None)
    if text:
        parts = [float(value) * unit for value, unit in zip(values, (86400, 3600, 60, 1)) if value is not None]
        assert pidlock._parse_seconds(text) == pytest.approx(sum(parts))


# ---- Command lines ----

FLAGS = {"-o": "close", "-g": "group", "-q": "quiet", "-v": "verbose", "--close": "close", "--group": "group",
         "--quiet": "quiet", "--verbose": "verbose", "--details": "details"}
VALUES = {"-w": ("wait", "1h30m", 5400.0), "--wait": ("wait", "0.5", 0.5), "-E": ("held_exit_code", "0", 0),
          "--held-exit-code": ("held_exit_code", "255", 255), "--conflict-exit-code": ("held_exit_code", "7", 7),
          "--mode": ("mode", "0600", 0o600), "--stale-after": ("stale_after", "inf", float("inf")),
          "--stale-strategy": ("stale_strategy", PID_ONLY, PID_ONLY), "--max-concurrent": ("max_concurrent", "3", 3),
          "--trace-id": ("trace_id", "x y=z", "x y=z"), "--log": ("log", "-", "-"), "--metrics": ("metrics", "m", "m"),
          "-p": ("pidfile", "FILE", "FILE"), "--pidfile": ("pidfile", "-", "-")}


@st.composite
def options(draw):
    """Draw one option as (its words, what it sets)."""
    name = draw(st.sampled_from([*FLAGS, *VALUES, "--fence", "--fence=F"]))
    if name in FLAGS:
        return [name], {FLAGS[name]: True}
    if name.startswith("--fence"):
        return [name], {"fence": "F" if "=" in name else True}
    key, text, value = VALUES[name]
    if name.startswith("--"):
        return draw(st.sampled_from([["%s=%s" % (name, text)], [name, text]])), {key: value}
    flags = draw(st.sampled_from(["", "q", "vq"]))  # -vqp FILE, -vqpFILE
    short = "-%s%s" % (flags, name[1])
    given_flags = {FLAGS["-" + letter]: True for letter in flags}
    return draw(st.sampled_from([[short, text], [short + text]])), dict(given_flags, **{key: value})


@fuzz
@given(st.lists(options(), max_size=6), st.booleans(),
       st.lists(words | st.sampled_from(["--", "-p", "-q"]), min_size=1, max_size=5))
def test_every_option_is_understood_and_the_commands_words_come_through_unchanged(drawn, dashes, command):
    """Red where an option is looked for behind the first word, or a second `--` is taken away."""
    if command[0].startswith("-") and command[0] != "-":
        dashes = True
    argv, expected = ["-p", "FILE"], {"pidfile": "FILE"}
    for option, values in drawn:
        argv += option
        expected.update(values)
    parsed = vars(pidlock._parse(argv + ["--"] * dashes + command))
    assert parsed["command"] == command
    assert {key: parsed[key] for key in expected} == expected


SOUP = [
    "-p", "-pF", "-qp", "-p--", "-w", "-w5", "-E", "-Eq", "-o", "-g", "-x", "-5", "-²", "-", "--", "---", "--=", "=",
    "", "--pidfile=--", "--wait", "--wait=", "--wai", "--fence", "--fence=", "--fence=--", "--check", "--status", "-h",
    "--json", "--signal", "--signal=9", "--sweep", "--dry-run", "--self-test", "--mode=0600", "--mode=" + "7" * 5000,
    "--max-concurrent=0", "--stale-strategy=time-only", "--trace-id=\n", "--log=", "--metrics", "--version", "echo",
    "5", "-\udcff", "é",
]


@fuzz
@given(st.lists(st.sampled_from(SOUP) | words, max_size=7))
def test_any_words_are_a_usage_or_a_usage_error_in_one_line_more(argv):
    parsed, out, err = say(pidlock._parse, argv)
    if parsed == 2:
        assert not out and err.splitlines()[-1].startswith("pidlock: error: ")
    elif parsed == 0:
        assert out and {"--version", "-h"} & set(argv)
    else:
        assert not out and not err
        assert parsed.command == argv[len(argv) - len(parsed.command):]
        assert parsed.command or parsed.action is not pidlock._run


@pytest.mark.blackbox
@settings(max_examples=8, deadline=None)
@given(st.lists(words | st.sampled_from(SOUP), max_size=60))
def test_a_real_command_gets_its_words_byte_for_byte(command):
    with tempfile.TemporaryDirectory() as directory:
        argv = [*PIDLOCK, "-p", os.path.join(directory, "test.pid"), "printf", "%s\\0", *command, "end"]
        printed = subprocess.check_output(argv, timeout=60)
    assert printed == b"".join(os.fsencode(word) + b"\0" for word in [*command, "end"])


# ---- Events ----

events = st.fixed_dictionaries({
    "event": st.sampled_from(["acquired", "held", "evicted", "released", "lost"]), "path": raw_texts,
    "slot": st.integers(1), "pid": st.none() | st.integers(0), "token": st.none() | st.integers(0, 10 ** 20),
    "trace_id": st.none() | raw_texts, "seconds": st.floats(allow_nan=False, allow_infinity=False),
    "reason": st.none() | raw_texts,
})


def no_constant(name):
    raise ValueError("%s is no JSON (RFC 8259)" % name)


@fuzz
@given(drawn=st.lists(events, max_size=4))
def test_each_event_is_one_valid_line_of_json_that_says_the_same(directory, drawn):
    log = directory / "events.log"
    log.write_bytes(b"")
    options = types.SimpleNamespace(log=str(log), unlogged=b"")
    for event in drawn:
        pidlock._log(event, options)
    *lines, rest = log.read_bytes().split(b"\n")
    assert rest == b"" and all(line.decode("ascii").isprintable() for line in lines)
    read = [json.loads(line, parse_constant=no_constant) for line in lines]
    assert [{key: one[key] for key in one if key != "time"} for one in read] == drawn


counts = st.fixed_dictionaries({}, optional={
    name: st.integers(1, 3) if kind == "counter" else st.floats(0, 1.7e9) | st.floats(4e9, 5e9) | st.integers(0, 255)
    for name, (kind, _) in pidlock.METRICS.items()
})
paths = words | st.sampled_from(["", "a", "a\\", 'a"', 'a"} 1', "a\nb", "a\r", "#", "a{", "\udcff"])


@settings(max_examples=30, deadline=None)
@given(changes=st.lists(st.tuples(paths, counts), max_size=5))
def test_metrics_of_any_paths_are_parseable_and_add_up(directory, changes):
    """Prometheus' own parser reads the file, and so does the next run: nothing is lost on the way."""
    metrics = directory / "pidlock.prom"
    with contextlib.suppress(FileNotFoundError):
        metrics.unlink()
    options = types.SimpleNamespace(metrics=str(metrics), uncounted={}, unwritable=set())
    expected = {}
    for path, values in changes:
        pidlock._count(path, values, options, is_last=False)
        label = os.fsencode(path).decode("utf-8", "backslashreplace")
        for name, value in values.items():
            before = expected.get((label, name), 0)
            if name.endswith("_total"):
                value += before
            is_past = before < 4e9  # a time in the future is not believed
            expected[label, name] = max(value, before) if "_timestamp_" in name and is_past else value
    assert options.unwritable == set()
    text = metrics.read_bytes().decode("utf-8") if changes else ""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    seen = {(sample.labels["pidfile"], sample.name): sample.value for sample in samples}
    assert (seen, len(samples)) == (expected, len(expected))
    before = pidlock._parse_metrics(str(metrics))
    pidlock._replace_metrics(str(metrics), before)
    assert pidlock._parse_metrics(str(metrics)) == before


# ---- What people read ----


@fuzz
@given(raw_texts, raw_texts, raw_texts)
def test_an_error_about_anything_is_one_line_for_a_terminal(path, reason, advice):
    _, _, err = say(pidlock._say, LockHeld(path, 1, reason, advice))
    assert err[-1:] == "\n" and err[:-1].isprintable()

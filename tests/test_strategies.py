"""stale_after and the three strategies, in library and command line; and breaking a living lock by its age."""
import calendar
import fcntl
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pidlock
from pidlock import PID_FIRST, PID_ONLY, STRATEGIES, TIME_ONLY, LockHeld, PidLock

blackbox = pytest.mark.blackbox
HOUR = 3600
ELSEWHERE = "pid=1\nhost=no.such.host\n"  # of a host that we cannot ask


def write(path, body, age=0):
    path.write_text(body)
    os.utime(path, (time.time() - age, time.time() - age))


def at(age):
    """An `acquired` line of so many seconds ago."""
    return "acquired=%s\n" % time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - age + 0.999))


# ---- The judge ----

ALIVE = pidlock.Facts(record=pidlock.Record(4231, False), size=5, links=1, executable=False, nuls=False, age=HOUR,
                      flock=True, filesystem="local", process="alive", lasted=HOUR)
DOUBTFUL = ALIVE._replace(host=False)
DEAD = ALIVE._replace(process="none")
NO_PID = ALIVE._replace(record=None)
ROWS = {
    "alive, no stale_after": (ALIVE, None, PID_FIRST, "held"),
    "alive and old": (ALIVE, 60, PID_FIRST, "held"),
    "dead": (DEAD, 7200, PID_FIRST, "stale"),
    "doubtful, no stale_after": (DOUBTFUL, None, PID_FIRST, "inconclusive"),
    "doubtful and old": (DOUBTFUL, 60, PID_FIRST, "stale"),
    "doubtful and not old enough": (DOUBTFUL, 7200, PID_FIRST, "inconclusive"),
    "doubtful, exactly so old": (DOUBTFUL, HOUR, PID_FIRST, "inconclusive"),
    "doubtful, at once": (DOUBTFUL, 0, PID_FIRST, "stale"),
    "doubtful, never": (DOUBTFUL, float("inf"), PID_FIRST, "inconclusive"),
    "doubtful, a time in the future": (DOUBTFUL._replace(lasted=-1), 0, PID_FIRST, "inconclusive"),
    "doubtful, the recorded time is old, the mtime is not": (DOUBTFUL._replace(age=0), 60, PID_FIRST, "stale"),
    "doubtful, the mtime is old, the recorded time is not": (DOUBTFUL._replace(lasted=0), 60, PID_FIRST,
                                                             "inconclusive"),
    "pid-only: doubtful and old": (DOUBTFUL, 60, PID_ONLY, "inconclusive"),
    "pid-only: dead and young": (DEAD, 7200, PID_ONLY, "stale"),
    "pid-only: alive and old": (ALIVE, 60, PID_ONLY, "held"),
    "time-only: alive and old": (ALIVE, 60, TIME_ONLY, "stale"),
    "time-only: alive and not old enough": (ALIVE, 7200, TIME_ONLY, "held"),
    "time-only: dead and not old enough": (DEAD, 7200, TIME_ONLY, "held"),
    "time-only: doubtful and old": (DOUBTFUL, 60, TIME_ONLY, "stale"),
    "time-only: a time in the future": (ALIVE._replace(lasted=-1), 0, TIME_ONLY, "held"),
    "time-only: no PID, old": (NO_PID, 7200, TIME_ONLY, "stale"),
    "time-only: no PID, young": (NO_PID._replace(age=0), 0, TIME_ONLY, "held"),
    "time-only: no PID yet, flocked": (NO_PID._replace(refused=True), 7200, TIME_ONLY, "held"),
    "time-only: no PID, flocked, old": (NO_PID._replace(refused=True), 60, TIME_ONLY, "stale"),
    "time-only: somebody's file": (NO_PID._replace(links=2), 0, TIME_ONLY, "foreign"),
}


@pytest.mark.parametrize("facts, stale_after, strategy, state", ROWS.values(), ids=ROWS)
def test_the_strategy_says_what_an_age_means(facts, stale_after, strategy, state):
    assert pidlock.judge(facts, stale_after, strategy)[0] == state


knowledge = st.sampled_from([None, True, False])
any_facts = st.builds(
    ALIVE._replace, record=st.sampled_from([None, pidlock.Record(7, False), pidlock.Record(7, True)]),
    size=st.integers(0, 5000), links=st.integers(1, 2), nuls=st.booleans(), flock=st.booleans(), refused=st.booleans(),
    filesystem=st.sampled_from(["local", "network", "other"]), host=knowledge, boot=knowledge, pidns=knowledge,
    timens=knowledge, start=knowledge, process=st.sampled_from(["none", "ours", "zombie", "thread", "alive"]),
    age=st.floats(-1e10, 1e10) | st.floats(-3, 3), lasted=st.floats(-1e10, 1e10) | st.floats(-3, 3),
)
limits = st.none() | st.floats(0, 1e10) | st.sampled_from([0.0, 1.0, float("inf")])


@settings(max_examples=60)
@given(any_facts, limits, st.sampled_from(STRATEGIES), st.sampled_from([
    {"age": 0.0}, {"lasted": 0.0}, {"lasted": -5.0}, {"process": "alive", "boot": None, "start": None},
    {"flock": False}, {"host": False}, {"pidns": False}, {"start": True}, {"boot": True}]))
def test_a_sign_of_life_never_makes_a_file_stale_under_any_strategy(before, stale_after, strategy, sign):
    """Who is alive, young or elsewhere is not evicted for it, except by his age."""
    after = before._replace(**sign)
    if pidlock.judge(before, stale_after, strategy)[0] != "stale" == pidlock.judge(after, stale_after, strategy)[0]:
        doubted = pidlock.judge(after, None, PID_FIRST)[0] == "inconclusive"
        assert doubted and strategy == PID_FIRST and stale_after is not None and after.lasted > stale_after


@settings(max_examples=60)
@given(any_facts, limits, limits, st.sampled_from(STRATEGIES))
def test_more_patience_never_makes_a_file_stale(facts, one, other, strategy):
    shorter, longer = sorted(float("inf") if limit is None else limit for limit in (one, other))
    states = [pidlock.judge(facts, limit, strategy)[0] for limit in (shorter, longer)]
    assert states[0] == "stale" or states[1] != "stale"


@settings(max_examples=60)
@given(any_facts, limits)
def test_pid_only_never_looks_at_stale_after(facts, stale_after):
    assert pidlock.judge(facts, stale_after, PID_ONLY) == pidlock.judge(facts, None, PID_FIRST)


@settings(max_examples=60)
@given(any_facts, limits)
def test_without_a_doubt_pid_first_never_looks_at_stale_after(facts, stale_after):
    state = pidlock.judge(facts)[0]
    assert pidlock.judge(facts, stale_after)[0] == state or state == "inconclusive"


# ---- The same in the library and on the command line ----

CASES = {
    "doubtful, no stale_after": (ELSEWHERE, HOUR, [], "unknown"),
    "doubtful and old": (ELSEWHERE, HOUR, ["--stale-after", "1m"], "stale"),
    "doubtful and not old enough": (ELSEWHERE, HOUR, ["--stale-after", "2h"], "unknown"),
    "doubtful, never": (ELSEWHERE, HOUR, ["--stale-after", "inf"], "unknown"),
    "doubtful and old, pid-only": (ELSEWHERE, HOUR, ["--stale-after", "1m", "--stale-strategy", PID_ONLY], "unknown"),
    "doubtful and old, time-only": (ELSEWHERE, HOUR, ["--stale-after", "1m", "--stale-strategy", TIME_ONLY], "stale"),
    "doubtful, an mtime in the future": (ELSEWHERE, -HOUR, ["--stale-after", "0"], "unknown"),
    "doubtful, recorded long ago, touched now": (ELSEWHERE + "acquired=2001-09-09T01:46:40Z\n", 0,
                                                 ["--stale-after", "1h"], "stale"),
    "doubtful, recorded for the future, touched long ago": (ELSEWHERE + "acquired=2201-09-09T01:46:40Z\n", HOUR,
                                                            ["--stale-after", "0"], "unknown"),
    "doubtful, a time that is none": (ELSEWHERE + "acquired=yesterday\n", HOUR, ["--stale-after", "1m"], "stale"),
    "alive and old": ("{alive}\n", HOUR, ["--stale-after", "1m"], "held"),
    "alive and old, time-only": ("{alive}\n", HOUR, ["--stale-after", "1m", "--stale-strategy", TIME_ONLY], "stale"),
    "alive, in the future, time-only": ("{alive}\n", -HOUR, ["--stale-after", "0", "--stale-strategy", TIME_ONLY],
                                        "held"),
    "marked and young, time-only": ("{alive}\n\n\n", 0, ["--stale-after", "1m", "--stale-strategy", TIME_ONLY], "held"),
    "dead and young": ("{dead}\n", 0, ["--stale-after", "1h", "--stale-strategy", PID_FIRST], "stale"),
    "its debug lines ask for it": (ELSEWHERE + "# debug\nstrategy=time-only\nstale_after=0\n", HOUR, [], "unknown"),
}
OUTCOMES = {"stale": (0, "ran\n"), "held": (75, ""), "unknown": (75, "")}
CHECKS = {"stale": 0, "held": 1, "unknown": 125}


@blackbox
@pytest.mark.parametrize("body, age, options, state", CASES.values(), ids=CASES)
def test_a_run_and_a_probe_judge_by_the_options(run, pidfile, dead_pid, body, age, options, state):
    write(pidfile, body.format(alive=os.getpid(), dead=dead_pid), age)
    assert run("-p", pidfile, *options, "--check").status == CHECKS[state]
    assert run("-p", pidfile, *options, "--", "echo", "ran")[:2] == OUTCOMES[state]


@pytest.mark.parametrize("body, age, options, state", CASES.values(), ids=CASES)
def test_the_library_judges_the_same(pidfile, dead_pid, body, age, options, state):
    write(pidfile, body.format(alive=os.getppid(), dead=dead_pid), age)
    named = dict(zip([name[2:].replace("-", "_") for name in options[::2]], options[1::2]))
    if "stale_after" in named:
        named["stale_after"] = {"0": 0, "1m": 60, "1h": HOUR, "2h": 2 * HOUR, "inf": float("inf")}[named["stale_after"]]
    assert pidlock.inspect(pidfile, **named).state == state
    if state == "stale":
        with PidLock(pidfile, **named):
            assert pidlock.parse_record(pidfile.read_bytes()).pid == os.getpid()
    else:
        with pytest.raises(LockHeld):
            PidLock(pidfile, **named).acquire()


@blackbox
def test_who_is_in_doubt_is_told_what_to_type(run, pidfile):
    write(pidfile, ELSEWHERE, HOUR)
    line = "pidlock: %s: held by PID 1 of host no.such.host, it seems; if it is gone: rm %s\n" % (pidfile, pidfile)
    assert run("-p", pidfile, "--", "echo", "ran") == (75, "", line)


@blackbox
def test_a_wait_ends_when_the_doubtful_holder_is_old_enough(run, pidfile):
    """Catches a wait that judges the age only once."""
    write(pidfile, ELSEWHERE + at(0))
    assert run("-q", "-p", pidfile, "--stale-after", "0.5", "--wait", "60", "--", "echo", "ran") == (0, "ran\n", "")


TIMES = {
    "2001-09-09T01:46:40Z": 10 ** 9,
    "2001-09-09T01:46:40.250Z": 10 ** 9 + 0.25,
    "2001-09-09t01:46:40z": 10 ** 9,
    "2001-09-09 03:46:40+02:00": 10 ** 9,
    "2001-09-08T20:16:40-05:30": 10 ** 9,
    "2001-09-09T01:46:40": None,
    "2001-13-09T01:46:40Z": None,
    "2001-09-09": None,
    "1000000000": None,
    "": None,
    "２001-09-09T01:46:40Z": None,
}


@pytest.mark.parametrize("text, seconds", TIMES.items(), ids=ascii)
def test_a_recorded_time_is_read_as_rfc_3339_has_it(text, seconds):
    assert pidlock._parse_time(text) == seconds


@settings(max_examples=60)
@given(st.floats(0, 4e9))
def test_what_is_recorded_is_read_again_to_the_millisecond(seconds):
    assert abs(pidlock._parse_time(pidlock._format_time(seconds)) - seconds) < 0.00101
    assert calendar.timegm(time.gmtime(seconds)) == int(seconds)


# ---- Nonsense ----

NO_STRATEGY = "stale_strategy: %r is none of pid-first, pid-only, time-only"
NO_AGE = "stale_after: %r is not a number of seconds"
WRONG = {
    "a wrong name": ({"stale_strategy": "pid_first"}, ["--stale-strategy", "pid_first"], NO_STRATEGY % "pid_first"),
    "an empty name": ({"stale_strategy": ""}, ["--stale-strategy", ""], NO_STRATEGY % ""),
    "another case": ({"stale_strategy": "PID-FIRST"}, ["--stale-strategy", "PID-FIRST"], NO_STRATEGY % "PID-FIRST"),
    "time-only without an age": ({"stale_strategy": TIME_ONLY}, ["--stale-strategy", TIME_ONLY],
                                 "stale_strategy: time-only needs stale_after"),
    "a negative age": ({"stale_after": -1}, ["--stale-after=-1"], NO_AGE % -1),
    "no number": ({"stale_after": float("nan")}, ["--stale-after", "nan"], NO_AGE % float("nan")),
}


@pytest.mark.parametrize("arguments, message", [row[::2] for row in WRONG.values()], ids=WRONG)
@pytest.mark.parametrize("use", [PidLock, pidlock.inspect])
def test_a_wrong_strategy_or_age_is_a_value_error(pidfile, arguments, message, use):
    with pytest.raises(ValueError) as raised:
        use(pidfile, **arguments)
    assert str(raised.value) == message


@blackbox
@pytest.mark.parametrize("options", [row[1] for row in WRONG.values()], ids=WRONG)
@pytest.mark.parametrize("action", [["--", "echo", "ran"], ["--check"]], ids=["run", "check"])
def test_a_wrong_strategy_or_age_is_wrong_usage(run, pidfile, options, action):
    outcome = run("-p", pidfile, *options, *action)
    assert (outcome.status, outcome.stdout, "--stale-" in outcome.stderr.splitlines()[-1]) == (2, "", True)


# ---- time-only breaks a living lock ----

BREAK = ["--stale-strategy", TIME_ONLY, "--stale-after", "1m"]


def make_old(path):
    os.utime(path, (time.time() - HOUR, time.time() - HOUR))


@blackbox
@pytest.mark.parametrize("quiet", [[], ["-q"]], ids=["", "-q"])
def test_time_only_breaks_a_living_lock_and_says_so_even_when_quiet(run, holder, pidfile, quiet):
    one = holder("-p", pidfile)
    make_old(pidfile)
    status, stdout, stderr = run("-p", pidfile, *BREAK, *quiet, "--", "sh", "-c", 'cat "$PIDLOCK_PIDFILE"')
    said = "pidlock: %s: took over a stale file: PID %d, alive or not, has had it for too long\n" % (pidfile, one.pid)
    assert (status, stderr) == (0, said)
    assert stdout.endswith("\n\n\n") and stdout != "%d\n\n\n" % one.pid
    one.finish()


@blackbox
def test_the_broken_holder_finds_it_lost_and_leaves_the_new_file_alone(holder, pidfile):
    first = holder("-p", pidfile)
    make_old(pidfile)
    second = holder("-p", pidfile, *BREAK)
    err = first.process.communicate(timeout=60)[1]  # its command ends with status 1, as the end of its input
    lost = "pidlock: %s: lost: the file was removed or replaced while the command ran; find out who did that\n"
    assert (first.process.returncode, err.decode()) == (1, lost % pidfile)
    assert pidfile.read_text() == "%d\n\n\n" % second.pid
    second.finish()
    assert not pidfile.exists()


@blackbox
def test_time_only_leaves_a_young_lock_to_its_holder(run, holder, pidfile):
    one = holder("-p", pidfile)
    assert run("-p", pidfile, *BREAK, "--", "echo", "ran")[:2] == (75, "")
    assert pidfile.read_text() == "%d\n\n\n" % one.pid


def test_time_only_tells_who_holds_a_young_lock_by_its_flock(pidfile):
    """Red where what it looked at counts as a file that nobody has the flock of."""
    with PidLock(pidfile), pytest.raises(LockHeld) as raised:
        PidLock(pidfile, stale_after=60, stale_strategy=TIME_ONLY).acquire()
    assert (raised.value.pid, "to judge by the PID alone" in str(raised.value)) == (os.getpid(), False)


def test_time_only_leaves_an_empty_file_to_who_has_its_flock(pidfile):
    """Red where rule 2, which is for files that nobody has the flock of, takes a lockfile of flock(1) for damaged."""
    write(pidfile, "", age=10)
    with open(pidfile) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LockHeld):
            PidLock(pidfile, stale_after=HOUR, stale_strategy=TIME_ONLY).acquire()
        PidLock(pidfile, stale_after=5, stale_strategy=TIME_ONLY).acquire().release()


def test_time_only_says_that_it_judges_a_dead_holder_by_the_age(pidfile, dead_pid):
    write(pidfile, "%d\n" % dead_pid, age=60)
    with pytest.raises(LockHeld, match="held by PID %d for 1m, to judge by the age alone;" % dead_pid):
        PidLock(pidfile, stale_after=HOUR, stale_strategy=TIME_ONLY).acquire()


def test_what_to_type_is_quoted_for_the_shell(pidfile):
    path = pidfile.with_name("a b.pid")
    write(path, ELSEWHERE)
    assert pidlock.inspect(path).advice == "if it is gone: rm '%s'" % path


@blackbox
def test_time_only_breaks_a_slot_of_a_semaphore_too(run, holder, pidfile):
    """Catches a breaker that waits for the directory's flock, which he has himself."""
    for _ in range(2):
        holder("-p", pidfile, "--max-concurrent", "2")
    make_old(pidfile)
    assert run("-q", "-p", pidfile, "--max-concurrent", "2", *BREAK, "--", "echo", "ran")[:2] == (0, "ran\n")


def test_without_the_directorys_flock_nothing_is_broken(holder, pidfile, monkeypatch):
    """Somebody keeps it: the breaker gives up with an error, rather than break without his turn."""
    one = holder("-p", pidfile)
    make_old(pidfile)
    keeper = os.open(pidfile.parent, os.O_RDONLY)
    try:
        fcntl.flock(keeper, fcntl.LOCK_EX)
        monkeypatch.setattr(pidlock, "PATIENCE", 0.1)
        with pytest.raises(pidlock.PidLockError) as raised:
            PidLock(pidfile, stale_after=60, stale_strategy=TIME_ONLY).acquire()
    finally:
        os.close(keeper)
    line = "%s: not broken: its directory's flock is not to be had; remove it by hand" % pidfile
    assert (str(raised.value), isinstance(raised.value, LockHeld)) == (line, False)
    assert pidfile.read_text() == "%d\n\n\n" % one.pid

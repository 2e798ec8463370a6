"""The bench in its smallest form: every row is there, what is missing is named, and its detectors notice."""
import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

BENCH = ROOT / "tests" / "bench"
COMMANDS = {
    "pidlock", "pidlock.py as a file", "flock -n", "setlock -n", "chpst -L", "run-one", "with-lock-ex -q",
    "dotlockfile -p", "lckdo", "plain wrapper", "python3 -c pass", "python3 -IS -c pass", "python3 -IS, 3 imports",
    "true alone",
}
PEERS = {
    "filelock FileLock", "filelock SoftFileLock", "fasteners", "portalocker Lock", "portalocker PidFileLock",
    "pid PidFile", "zc.lockfile",
}
LIBRARIES = PEERS | {"pidlock", "bare system calls"}
WAITING = {"pidlock", "blocking flock", "filelock FileLock"}
IN_VAIN = {"pidlock", "flock(1)", "pidlock library", "filelock FileLock"}
CROWDS = {"1 waiter", "4 waiters"}
ROWS = {
    "runs": {"wall": COMMANDS, "memory": COMMANDS},
    "library": {"disk": LIBRARIES, "tmpfs": LIBRARIES},
    "handoff": {"threads": WAITING, "processes": WAITING, "commands": {"pidlock", "flock(1)"},
                "cpu_of_one": IN_VAIN, "cpu_of_many": IN_VAIN},
    "contention": {"storm": WAITING, "queue": WAITING, "queue_of_ideal": WAITING, "overlaps": WAITING},
    "growth": {"names": {"1 name", "10 names"}, "slots": {"1 slot", "4 slots"},
               "neighbours": {"in other directories", "in its own directory"},
               "turn_pidlock": CROWDS, "leave_pidlock": CROWDS, "turn_flock": CROWDS, "leave_flock": CROWDS},
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the bench needs Linux")


@pytest.fixture
def bench(tmp_path):
    """Measure one section without the peers from PyPI, whatever is installed: bench(section) -> (table, JSON)."""

    def run_bench(section):
        command = [sys.executable, "-S", BENCH / "bench.py", "--small", "--only", section,
                   "--venv", tmp_path / "none", "--output", tmp_path / "bench.json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=110)
        assert (done.returncode, done.stderr) == (0, b"")
        assert os.listdir(tmp_path) == ["bench.json"]
        return done.stdout.decode(), json.loads((tmp_path / "bench.json").read_text())

    return run_bench


def evaluate(expression):
    """Return what the expression comes to beside the bench's modules."""
    code = "import bare, contention, json, measure, peers; print(json.dumps(%s))" % expression
    done = subprocess.run([sys.executable, "-c", code], cwd=str(BENCH), stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("section", ROWS)
def test_the_smallest_run_of_a_section_has_every_row(section, bench):
    """Red where a contender that is missing is left out."""
    table, result = bench(section)
    figures = result["sections"][section]
    assert {key: set(figure["rows"]) for key, figure in figures.items()} == ROWS[section]
    missing = [(name, row["missing"]) for figure in figures.values() for name, row in figure["rows"].items()
               if "missing" in row]
    lines = [line.split("missing: ") for line in table.splitlines() if "missing: " in line]
    assert [(name.strip(), why) for name, why in lines] == missing


def test_each_peer_that_is_missing_is_named(bench):
    _, result = bench("library")
    rows = result["sections"]["library"]["disk"]["rows"]
    assert {name for name, row in rows.items() if "missing" in row} == PEERS


def test_the_machine_and_the_date_are_in_both(bench):
    table, result = bench("contention")
    heading = table.splitlines()
    assert (heading[0], heading[1]) == (result["date"],
                                        ", ".join("%s %s" % item for item in result["machine"].items()))


def test_a_goal_is_met_or_not_or_not_measured(bench):
    _, result = bench("contention")
    verdicts = {key: goal["met"] for key, goal in result["goals"].items() if goal["met"] is not None}
    assert (set(verdicts), verdicts["overlaps"]) == ({"overlaps", "queue"}, True)


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_bare_system_calls_are_those_of_pidlock(tmp_path):
    """Red without Bare's fchmod, or with a second lstat in it."""
    pidlock, bare = evaluate("bare.trace(%r)" % str(tmp_path))
    assert bare == pidlock and len(bare) > 15


def test_the_peak_of_memory_is_not_that_of_the_process_that_measures():
    """Red where it forks the command itself: exec keeps the peak of what forked it."""
    peak, own = evaluate("(lambda ballast: (measure.peak_memory([peers.find('true')]), len(ballast) >> 20))"
                         "(b'-' * (64 << 20))")
    assert (0 < peak < 8, own) == (True, 64)


def test_a_lock_that_does_not_lock_is_noticed(tmp_path):
    crowd = "contention.Contenders(lambda path: peers.Cycle(int, int), None, 4, 10, 0.002)"
    assert evaluate("(lambda crowd: (crowd.run(), crowd.overlaps))(%s)" % crowd)[1] > 0


def test_a_ratio_is_the_median_of_the_rounds_own():
    """Red as the ratio of the medians: 20 / 10."""
    figure = "(lambda figure: (figure.samples.update(ours=[1, 20, 30], theirs=[2, 40, 10]), figure)[1])"
    assert evaluate("%s(measure.Figure('', '')).ratio('ours', 'theirs')" % figure) == 0.5

"""Storms: two holders at once, 0 times. PIDLOCK_STRESS=20 makes them 20 times as long; -s shows the figures."""
import concurrent.futures
import json
import os
import random
import subprocess
import sys
import time

import pytest
from children.race_variants import write_variant
from conftest import CHILDREN, PIDLOCK, ROOT

STRESS = int(os.environ.get("PIDLOCK_STRESS", "1"))
SCENARIOS = {"nothing": (5, 20 if STRESS == 1 else 50), "marked": (100, 1), "unmarked": (100, 1)}  # rounds and cycles

pytestmark = pytest.mark.timeout(120 * STRESS)


def storm(source, directory, scenario, deadline=0):
    """Return the figures of a storm through the library."""
    rounds, cycles = SCENARIOS[scenario]
    arguments = [source, directory, scenario, rounds * STRESS, cycles, deadline]
    output = subprocess.check_output([sys.executable, CHILDREN / "stress_storm.py", *map(str, arguments)])
    figures = json.loads(output.decode())
    print(scenario, figures)
    return figures


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_two_processes_hold_the_lock_at_once(tmp_path, scenario):
    figures = storm(ROOT / "pidlock.py", tmp_path, scenario)
    rounds, cycles = SCENARIOS[scenario]
    asked = 8 * rounds * STRESS * cycles
    counts = ("overlaps", "lost_updates", "released_lost", "barren_rounds", "errors", "left")
    assert [figures[name] for name in counts] == [0, 0, 0, 0, [], []]
    assert asked == (figures["acquired"] if scenario == "nothing" else figures["acquired"] + figures["held"])


@pytest.mark.parametrize("scenario", ["marked", "unmarked"])
def test_both_detectors_notice_when_eviction_is_a_blind_unlink(tmp_path, tmp_path_factory, scenario):
    figures = storm(write_variant("blind unlink", tmp_path_factory.mktemp("variant")), tmp_path, scenario, deadline=60)
    assert figures["overlaps"] > 0 and figures["lost_updates"] > 0


COMMAND = """
mkdir inside || echo >>overlaps
echo >>runs
read count <counter
sleep 0.02
echo $((count + 1)) >counter
rmdir inside
"""


@pytest.mark.blackbox
def test_no_two_commands_run_at_once_while_pidlocks_are_killed(run, tmp_path):
    """Red (surely in longer storms) when the command does not inherit the lock, and with rename instead of link."""
    arguments = ("--quiet", "--pidfile", "test.pid", "--wait", "300", "--", "/bin/sh", "-c", COMMAND)
    seed = random.randrange(2 ** 32)
    (tmp_path / "counter").write_text("0\n")

    def run_often(number):
        """Return the outcomes of some runs, about a third of them killed at a random moment."""
        chance, outcomes = random.Random(seed + number), set()
        for _ in range(4 * STRESS):
            process = subprocess.Popen([*PIDLOCK, *arguments], cwd=tmp_path, stderr=subprocess.PIPE)
            if chance.random() < 0.33:
                try:
                    process.wait(chance.uniform(0, 0.3))
                except subprocess.TimeoutExpired:
                    process.kill()
            stderr = process.communicate()[1]  # ends when the command of a killed pidlock has ended, too
            outcomes.add((process.returncode, stderr))
        return outcomes

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        outcomes = set().union(*pool.map(run_often, range(8)))
    runs = len((tmp_path / "runs").read_text())
    print("seed %d: %d commands in %.1f s" % (seed, runs, time.monotonic() - began))
    assert outcomes <= {(0, b""), (-9, b"")}
    assert (run(*arguments, cwd=tmp_path), (tmp_path / "counter").read_text()) == ((0, "", ""), "%d\n" % (runs + 1))
    assert {path.name for path in tmp_path.iterdir() if path.name[:9] != ".pidlock-"} == {"counter", "runs"}

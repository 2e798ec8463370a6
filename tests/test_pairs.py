"""Every pair of operations on one pidfile: one is stopped at each of its steps, while another runs to its end.

The one stopped is stopped for an hour, longer than anybody waits: what it has made is old by then. The tables say for
each pair how both end and what stands at the path, from which stop on. Broken copies of pidlock.py
(children/race_variants.py, children/extras_variants.py) have to differ from them where the last table says.
"""
import itertools
import json
import os
import subprocess
import sys

import pytest
from children.extras_variants import write_variant
from conftest import CHILDREN, ROOT

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="what is stale here is a zombie's PID")

# ---- What the first one does when nobody disturbs it ----

TAKE = "open private, flock private, write private, link file, check file, unlink private"
TAKE_ANEW = "open file 2, open private, flock private, write private, link file, check file 2, unlink private"
STEPS = {
    "acquire": "open file, " + TAKE,
    "acquire in place": "open file, open private, flock private, write private, link file, check file, check private,"
                        " unlink private, unlock private, open file 2, flock file, check file 2, write file",
    "acquire a held one": "open file, flock file, unlock file",
    "evict": "open file, flock file, check file, unlink file, unlock file, " + TAKE_ANEW,
    "evict a marked one": "open file, flock file, check file, unlink file, unlock file, " + TAKE_ANEW,
    "release": "check file, unlink file, unlock file",
    "sweep": "list directory, check private, open private, flock private, check private 2, unlink private, unlock"
             " private, check file, open file, open file 2, flock file, check file 2, unlink file, unlock file",
    "sweep a held one": "list directory, check file, open file, open file 2, flock file, unlock file",
    "break": "open file, flock file, unlock file, open directory, flock directory, check file, unlink file,"
             " unlock directory, " + TAKE_ANEW,
    "break a stale one": "open file, flock file, open directory, flock directory, check file, unlink file,"
                         " unlock directory, unlock file, " + TAKE_ANEW,
    "slots": "open directory, flock directory, list directory, open file, open file 2, " + TAKE + ", list directory 2,"
             " open file 3, flock file, unlock file, unlock directory",
    "slots beside one": "open directory, flock directory, list directory, open file, flock file, unlock file,"
                        " open file 2, flock file 2, unlock file 2, open file.2, open private, flock private,"
                        " write private, link file.2, check file.2, unlink private, list directory 2, open file 3,"
                        " flock file 3, unlock file 3, open file.2 2, flock file.2, unlock file.2, unlock directory",
    "slots from a stale one": "open directory, flock directory, list directory, open file, flock file, unlock file,"
                              " open file 2, flock file 2, check file, unlink file, unlock file 2, open file 3, open"
                              " private, flock private, write private, link file, check file 2, unlink private,"
                              " list directory 2, open file 4, flock file 3, unlock file 3, unlock directory",
}

# ---- How a pair ends: "the first; the second; what stands there then", from the stop named on ----
#
# The path names one file, so of two who have it at once one has lost it: "lost" is who found it removed or replaced
# when it gave it back, and "left" is what is there when all have. "holder" is one who was there before both.
#
# The second one has no patience, but "in turn" it waits for the directory's flock, and the first one goes on. What it
# needs and does not find comes into being right before it: a stale file to evict, a marked one to sweep, an old one of
# a stranger who lives to break; to release a lock, it takes it. To "hand over" is to release, and another one takes it.

EXPECTED = {
    "acquire": {
        "acquire, evict, hand over": {
            "before open file": "held; acquired; second's",
            "after link file": "acquired; held; first's"},
        "release": {
            "before open file": "acquired; released; first's",
            "after link file": "acquired; held; first's"},
        "sweep": {
            "before open file": "acquired; swept file; first's",
            "after open private": "acquired; swept private file; first's",  # not flocked yet: it starts over
            "after flock private": "acquired; swept file; first's",
            "after link file": "acquired; swept; first's"},
        "break": {
            "before open file": "held; acquired; second's",
            "after check file": "acquired, lost; acquired; second's"},
        "slots": {
            "before open file": "held; slot 1; second's",
            "after link file": "acquired; held; first's"},
    },
    "acquire in place": {
        "acquire, evict, hand over": {
            "before open file": "held; acquired; second's",  # its empty file too is evicted, when it is old
            "after flock file": "acquired; held; first's"},
        "release": {
            "before open file": "acquired; released; first's",
            "after flock file": "acquired; held; first's"},
        "sweep": {
            "before open file": "acquired; swept file; first's",
            "after open private": "acquired; swept private file; first's",
            "after flock private": "acquired; swept file; first's",
            "after open file 2": "acquired; swept; first's"},
        "break": {
            "before open file": "held; acquired; second's",
            "after check file 2": "acquired, lost; acquired; second's"},
        "slots": {
            "before open file": "held; slot 1; second's",
            "after flock file": "acquired; held; first's"},
    },
    "acquire a held one": {
        "acquire, evict, slots": {
            "before open file": "held; held; holder's"},
        "hand over": {
            "before open file": "held; acquired; second's"},
        "release": {
            "before open file": "acquired; released; first's",
            "after flock file": "held; released; nothing"},
        "sweep": {
            "before open file": "held; swept; holder's"},
        "break": {
            "before open file": "held; acquired; second's; holder lost"},
    },
    "evict": {
        "acquire, evict, hand over": {
            "before open file": "held; acquired; second's",
            "after flock file": "acquired; held; first's",
            "after unlink file": "held; acquired; second's",
            "after link file": "acquired; held; first's"},
        "release": {
            "before open file": "acquired; released; first's",
            "after flock file": "acquired; held; first's",
            "after unlink file": "acquired; released; first's",
            "after link file": "acquired; held; first's"},
        "sweep": {
            "before open file": "acquired; swept; first's",  # no mark
            "after unlink file": "acquired; swept file; first's",
            "after open private": "acquired; swept private file; first's",
            "after flock private": "acquired; swept file; first's",
            "after link file": "acquired; swept; first's"},
        "break": {
            "before open file": "held; acquired; second's",
            "after check file": "acquired; acquired, lost; first's",  # a race that the docstring names
            "after unlink file": "held; acquired; second's",
            "after check file 2": "acquired, lost; acquired; second's"},
        "slots": {
            "before open file": "held; slot 1; second's",
            "after flock file": "acquired; held; first's",
            "after unlink file": "held; slot 1; second's",
            "after link file": "acquired; held; first's"},
    },
    "release": {
        "acquire, evict, hand over": {
            "before check file": "released; held; nothing",
            "after unlink file": "released; acquired; second's"},
        "release": {
            "before check file": "released; held; nothing",
            "after unlink file": "released; released; nothing"},
        "sweep": {
            "before check file": "released; swept; nothing",
            "after unlink file": "released; swept file; nothing"},
        "break": {
            "before check file": "lost; acquired; second's",
            "after check file": "released; acquired, lost; nothing",  # a race that the docstring names
            "after unlink file": "released; acquired; second's"},
        "slots": {
            "before check file": "released; held; nothing",
            "after unlink file": "released; slot 1; second's"},
    },
    "sweep": {
        "acquire, evict, hand over": {
            "before list directory": "swept private; acquired; second's",
            "after flock file": "swept private file; held; nothing",
            "after unlink file": "swept private file; acquired; second's"},
        "release": {
            "before list directory": "swept private; released; nothing",
            "after flock file": "swept private file; held; nothing",
            "after unlink file": "swept private file; released; nothing"},
        "sweep": {
            "before list directory": "swept; swept private file; nothing",
            "after flock private": "swept private; swept file; nothing",
            "after flock file": "swept private file; swept; nothing",
            "after unlink file": "swept private file; swept file; nothing"},
        "break": {
            "before list directory": "swept private; acquired; second's",
            "after check file 2": "swept private file; acquired, lost; nothing",  # a race that the docstring names
            "after unlink file": "swept private file; acquired; second's"},
        "slots": {
            "before list directory": "swept private; slot 1; second's",
            "after flock file": "swept private file; held; nothing",
            "after unlink file": "swept private file; slot 1; second's"},
    },
    "sweep a held one": {
        "acquire, evict, slots": {
            "before list directory": "swept; held; holder's"},
        "hand over": {
            "before list directory": "swept; acquired; second's"},
        "release": {
            "before list directory": "swept; released; nothing"},
        "sweep": {
            "before list directory": "swept; swept; holder's"},
        "break": {
            "before list directory": "swept; acquired; second's; holder lost"},
    },
    "break": {
        "acquire, evict": {
            "before open file": "acquired; held; first's; holder lost",
            "after unlink file": "held; acquired; second's; holder lost",
            "after link file": "acquired; held; first's; holder lost"},
        "hand over": {
            "before open file": "held; acquired; second's",
            "after check file": "acquired; acquired, lost; first's",  # a race that _break names
            "after unlink file": "acquired; lost; first's"},
        "release": {
            "before open file": "acquired; released; first's",
            "after unlink file": "acquired; lost; first's"},
        "sweep": {
            "before open file": "acquired; swept; first's; holder lost",
            "after unlink file": "acquired; swept file; first's; holder lost",
            "after open private": "acquired; swept private file; first's; holder lost",
            "after flock private": "acquired; swept file; first's; holder lost",
            "after link file": "acquired; swept; first's; holder lost"},
        "break": {
            "before open file": "held; acquired; second's; holder lost",
            "after flock directory": "acquired; error: not broken; first's; holder lost",
            "after unlock directory": "held; acquired; second's; holder lost",
            "after check file 2": "acquired, lost; acquired; second's; holder lost"},
        "break in turn": {
            "before open file": "held; acquired; second's; holder lost",
            "after flock directory": "acquired; waited, held; first's; holder lost",
            "after unlock directory": "held; acquired; second's; holder lost",
            "after check file 2": "acquired, lost; acquired; second's; holder lost"},
        "slots": {
            "before open file": "acquired; held; first's; holder lost",
            "after unlink file": "held; slot 1; second's; holder lost",
            "after link file": "acquired; held; first's; holder lost"},
        "slots in turn": {
            "before open file": "acquired; held; first's; holder lost",
            "after flock directory": "acquired; waited, held; first's; holder lost",
            "after unlock directory": "held; slot 1; second's; holder lost",
            "after link file": "acquired; held; first's; holder lost"},
    },
    "break a stale one": {
        "acquire, evict, hand over": {
            "before open file": "held; acquired; second's",
            "after flock file": "acquired; held; first's",
            "after unlink file": "held; acquired; second's",
            "after link file": "acquired; held; first's"},
        "release": {
            "before open file": "acquired; released; first's",
            "after flock file": "acquired; held; first's",
            "after unlink file": "acquired; released; first's",
            "after link file": "acquired; held; first's"},
        "sweep": {
            "before open file": "acquired; swept; first's",
            "after unlink file": "acquired; swept file; first's",
            "after open private": "acquired; swept private file; first's",
            "after flock private": "acquired; swept file; first's",
            "after link file": "acquired; swept; first's"},
        "break": {
            "before open file": "held; acquired; second's",
            "after flock directory": "acquired; error: not broken; first's",
            "after unlock directory": "held; acquired; second's",
            "after check file 2": "acquired, lost; acquired; second's"},
        "break in turn": {
            "before open file": "held; acquired; second's",
            "after flock directory": "acquired; waited, held; first's",
            "after unlock directory": "held; acquired; second's",
            "after check file 2": "acquired, lost; acquired; second's"},
        "slots": {
            "before open file": "held; slot 1; second's",
            "after flock file": "acquired; held; first's",
            "after unlink file": "held; slot 1; second's",
            "after link file": "acquired; held; first's"},
        "slots in turn": {
            "before open file": "held; slot 1; second's",
            "after flock file": "acquired; held; first's",
            "after flock directory": "acquired; waited, held; first's",
            "after unlock directory": "held; slot 1; second's",
            "after link file": "acquired; held; first's"},
    },
    # The first one has a limit of 3, the second one of 2, and one of no limit allows nobody beside it.
    "slots": {
        "acquire, evict, hand over": {
            "before open directory": "held; acquired; second's",
            "after link file": "slot 1; held; first's"},
        "release": {
            "before open directory": "slot 1; released; first's",
            "after link file": "slot 1; held; first's"},
        "sweep": {
            "before open directory": "slot 1; swept file; first's",
            "after open private": "slot 1; swept private file; first's",
            "after flock private": "slot 1; swept file; first's",
            "after link file": "slot 1; swept; first's"},
        "break": {
            "before open directory": "held; acquired; second's",
            "after flock directory": "held; error: not broken; stranger's; left file",
            "after link file": "slot 1; error: not broken; first's",
            "after unlock directory": "slot 1, lost; acquired; second's"},
        "break in turn": {
            "before open directory": "held; acquired; second's",
            "after flock directory": "held; waited, acquired; second's",
            "after link file": "slot 1, lost; waited, acquired; second's",
            "after unlock directory": "slot 1, lost; acquired; second's"},
        "slots": {
            "before open directory": "slot 2; slot 1; second's, file.2 first's",
            "after link file": "slot 1; slot 2; first's, file.2 second's"},
        "slots in turn": {
            "before open directory": "slot 2; slot 1; second's, file.2 first's",
            "after flock directory": "slot 1; waited, slot 2; first's, file.2 second's",
            "after unlock directory": "slot 1; slot 2; first's, file.2 second's"},
    },
    "slots beside one": {
        "acquire, evict": {
            "before open directory": "slot 2; held; holder's, file.2 first's"},
        "hand over": {
            "before open directory": "held; acquired; second's",
            "after open file 3": "slot 2; acquired; second's, file.2 first's"},  # without a limit it counts nobody
        "release": {
            "before open directory": "slot 1; released; first's",
            "after flock file 2": "slot 2; released; file.2 first's"},
        "sweep": {
            "before open directory": "slot 2; swept; holder's, file.2 first's",
            "after open private": "slot 2; swept private; holder's, file.2 first's",
            "after flock private": "slot 2; swept; holder's, file.2 first's"},
        "break": {
            "before open directory": "held; acquired; second's; holder lost",
            "after flock directory": "slot 2; error: not broken; holder's, file.2 first's",
            "after unlock directory": "slot 2; acquired; second's, file.2 first's; holder lost"},
        "break in turn": {
            "before open directory": "held; acquired; second's; holder lost",
            "after flock directory": "slot 2; waited, acquired; second's, file.2 first's; holder lost",
            "after unlock directory": "slot 2; acquired; second's, file.2 first's; holder lost"},
        "slots": {
            "before open directory": "held; slot 2; holder's, file.2 second's",
            "after link file.2": "slot 2; held; holder's, file.2 first's"},
        "slots in turn": {
            "before open directory": "held; slot 2; holder's, file.2 second's",
            "after flock directory": "slot 2; waited, held; holder's, file.2 first's",
            "after unlock directory": "slot 2; held; holder's, file.2 first's"},
    },
    "slots from a stale one": {
        # It only probes the file at first, and evicts it when it takes the slot.
        "acquire, evict, hand over": {
            "before open directory": "held; acquired; second's",
            "after flock file": "slot 1; held; first's",
            "after unlock file": "held; acquired; second's",
            "after flock file 2": "slot 1; held; first's",
            "after unlink file": "held; acquired; second's",
            "after link file": "slot 1; held; first's"},
        "release": {
            "before open directory": "slot 1; released; first's",
            "after flock file": "slot 1; held; first's",
            "after unlock file": "slot 1; released; first's",
            "after flock file 2": "slot 1; held; first's",
            "after unlink file": "slot 1; released; first's",
            "after link file": "slot 1; held; first's"},
        "sweep": {
            "before open directory": "slot 1; swept file; first's",
            "after flock file": "slot 1; swept; first's",
            "after unlock file": "slot 1; swept file; first's",
            "after flock file 2": "slot 1; swept; first's",
            "after unlink file": "slot 1; swept file; first's",
            "after open private": "slot 1; swept private file; first's",
            "after flock private": "slot 1; swept file; first's",
            "after link file": "slot 1; swept; first's"},
        "break": {
            "before open directory": "held; acquired; second's",
            "after flock directory": "slot 1; error: not broken; first's",
            "after unlink file": "held; error: not broken; stranger's; left file",
            "after link file": "slot 1; error: not broken; first's",
            "after unlock directory": "slot 1, lost; acquired; second's"},
        "break in turn": {
            "before open directory": "held; acquired; second's",
            "after flock directory": "slot 2; waited, acquired; second's, file.2 first's",  # the breaker has its flock
            "after flock file": "slot 1; waited, held; first's",
            "after unlock file": "slot 2; waited, acquired; second's, file.2 first's",
            "after flock file 2": "slot 1; waited, held; first's",
            "after unlink file": "held; waited, acquired; second's",
            "after link file": "slot 1, lost; waited, acquired; second's",
            "after unlock directory": "slot 1, lost; acquired; second's"},
        "slots": {
            "before open directory": "slot 2; slot 1; second's, file.2 first's",
            "after flock file": "slot 1; slot 2; first's, file.2 second's",
            "after unlock file": "slot 2; slot 1; second's, file.2 first's",
            "after flock file 2": "slot 1; slot 2; first's, file.2 second's",
            "after unlink file": "slot 2; slot 1; second's, file.2 first's",
            "after link file": "slot 1; slot 2; first's, file.2 second's"},
        "slots in turn": {
            "before open directory": "slot 2; slot 1; second's, file.2 first's",
            "after flock directory": "slot 1; waited, slot 2; first's, file.2 second's",
            "after unlock directory": "slot 1; slot 2; first's, file.2 second's"},
    },
}
EXPECTED["evict a marked one"] = dict(EXPECTED["evict"], sweep={
    "before open file": "acquired; swept file; first's",
    "after flock file": "acquired; swept; first's",
    "after unlink file": "acquired; swept file; first's",
    "after open private": "acquired; swept private file; first's",
    "after flock private": "acquired; swept file; first's",
    "after link file": "acquired; swept; first's",
})


def at_each_stop(first, turns):
    """Return {stop: outcome} for all stops of the first, from the outcomes at the stops where another one begins."""
    stops = [moment + step for step in STEPS[first].split(", ") for moment in ("before ", "after ")]
    assert [stop for stop in stops if stop in turns] == list(turns)
    expected, outcome = {}, turns[stops[0]]
    for stop in stops:
        expected[stop] = outcome = turns.get(stop, outcome)
    return expected


PAIRS = {(first, second): at_each_stop(first, turns) for first, row in EXPECTED.items()
         for seconds, turns in row.items() for second in seconds.split(", ")}


class Stage:
    """Plays pairs with one copy of pidlock.py; see children/pair_contenders.py."""

    def __init__(self, source, directory):
        command = [sys.executable, "-S", CHILDREN / "pair_contenders.py", source, directory]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def play(self, *pair):
        self._process.stdin.write(json.dumps(pair).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            pytest.fail("%r: pair_contenders.py has died" % (pair,))
        return json.loads(answer.decode())

    def end(self):
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    stage = Stage(ROOT / "pidlock.py", tmp_path_factory.mktemp("pairs"))
    yield stage
    stage.end()


@pytest.mark.parametrize("first", STEPS)
def test_the_steps_of_an_operation_are_those_that_it_is_stopped_at(stage, first):
    assert stage.play(first) == STEPS[first].split(", ")


@pytest.mark.parametrize("first, second", PAIRS, ids=map(" - ".join, PAIRS))
def test_one_is_stopped_at_each_step_while_another_runs_to_its_end(stage, first, second):
    expected = PAIRS[first, second]
    assert {stop: stage.play(first, stop, second) for stop in expected} == expected


# ---- The tables themselves ----


def test_each_of_the_36_pairs_is_there():
    operations = ["acquire", "evict", "release", "sweep", "break", "slots"]
    assert {(first.split()[0], second.split()[0]) for first, second in PAIRS} >= set(
        itertools.product(operations, operations))


def test_a_lock_is_lost_to_nobody_but_who_breaks_by_age():
    losing = {pair for pair, outcomes in PAIRS.items() if any("lost" in outcome for outcome in outcomes.values())}
    assert {(first, second) for first, second in losing if "break" not in first + second} == set()


def test_a_young_lock_is_lost_only_between_check_and_unlink_where_the_docstrings_name_the_race():
    """The second one's is young, and the first one's an hour old."""
    races = [("evict", "check file", "break"), ("evict a marked one", "check file", "break"),
             ("release", "check file", "break"), ("sweep", "check file 2", "break"),
             ("break", "check file", "hand over")]
    losing = {(first, stop, second) for (first, second), outcomes in PAIRS.items()
              for stop, outcome in outcomes.items() if outcome.split("; ")[1].endswith("acquired, lost")}
    assert losing == {(first, stop, second) for first, check, second in races
                      for stop in ("after " + check, "before unlink file")}


# ---- Broken copies: where each has to differ from the tables, and what it does there ----

BROKEN = {
    "blind unlink": [
        ("evict", "before flock file", "acquire", "acquired; acquired, lost; first's"),
        ("acquire a held one", "before flock file", "hand over", "acquired; acquired, lost; first's"),
        ("sweep", "before flock file", "acquire", "swept private file; acquired, lost; nothing"),
    ],
    "unlink without the flock": [
        ("evict", "before unlink file", "acquire", "acquired; acquired, lost; first's"),
        ("sweep", "before unlink file", "acquire", "swept private file; acquired, lost; nothing"),
    ],
    "judging before the flock": [  # the stranger's file, which came after the judging, is evicted
        ("slots", "before open file 2", "break", "slot 1; error: not broken; first's"),
    ],
    "rename instead of link": [
        ("acquire", "before link file", "acquire", "acquired; acquired, lost; first's"),
        ("evict", "before link file", "evict", "acquired; acquired, lost; first's"),
        ("break", "before link file", "slots", "acquired; slot 1, lost; first's; holder lost"),
    ],
    "flock after the link": [("acquire", "after link file", "acquire", "acquired, lost; acquired; second's")],
    "no check after the link": [("acquire", "after link file", "break", "acquired, lost; acquired; second's")],
    "no check in place": [("acquire in place", "before flock file", "acquire", "acquired, lost; acquired; second's")],
    "a swept private name is fatal": [
        ("acquire", "before flock private", "sweep", "error: cannot take it; swept private file; nothing"),
    ],
    "release unlocks first": [
        ("release", "before check file", "evict", "lost; acquired; second's"),
        ("release", "before unlink file", "acquire", "released; acquired, lost; nothing"),
    ],
    "release by PID alone": [  # the holder and the second one are of one process
        ("acquire a held one", "before flock file", "break", "held; acquired, lost; second's"),
    ],
    "sweep without flock": [
        ("sweep", "before unlink file", "acquire", "swept private file; acquired, lost; nothing"),
    ],
    "sweep of flocked private files": [
        ("acquire", "before write private", "sweep", "acquired; swept private file; first's"),
    ],
    "break without turns": [
        ("break", "before unlink file", "break", "acquired; acquired, lost; first's; holder lost"),
        ("break", "before unlink file", "break in turn", "acquired; acquired, lost; first's; holder lost"),
    ],
    "break without the re-check": [
        ("break", "before open directory", "break", "acquired; acquired, lost; first's; holder lost"),
        ("break", "before open directory", "hand over", "acquired; acquired, lost; first's"),
    ],
    "slots without turns": [
        ("slots beside one", "before link file.2", "slots in turn", "held; slot 2; holder's, file.2 second's"),
    ],
    "no count after the take": [  # three hold it, of which one allows two; and the same below
        ("slots beside one", "before link file.2", "slots",
         "slot 3; slot 2; holder's, file.2 second's, file.3 first's"),
    ],
    "ignoring theirs": [
        ("slots beside one", "before link file.2", "slots",
         "slot 3; slot 2; holder's, file.2 second's, file.3 first's"),
    ],
}


@pytest.mark.parametrize("variant", BROKEN)
def test_a_broken_copy_is_told_from_the_sound_one(tmp_path, variant):
    (tmp_path / "pairs").mkdir()
    stage = Stage(write_variant(variant, tmp_path), tmp_path / "pairs")
    try:
        seen = [(*pair, stage.play(*pair)) for *pair, _ in BROKEN[variant]]
    finally:
        stage.end()
    assert seen == BROKEN[variant]
    assert [row for row in seen if PAIRS[row[0], row[2]][row[1]] == row[3]] == []

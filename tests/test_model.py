"""The protocol as a model (tests/model/pidlock.pml), checked by SPIN in every state that can be reached.

The head of the model says what is in it, what is not, and the counter-example of each variant that has to fail.
`make model` prints the numbers, and also checks the two largest state spaces.
"""
import os
import re
import shutil
import subprocess
import time

import pytest
from conftest import ROOT

MODEL = ROOT / "tests" / "model" / "pidlock.pml"
CC = shutil.which("gcc") or shutil.which("cc")
EVERYTHING = "PIDLOCK_MODEL" in os.environ
SAFETY = ["-O2", "-DSAFETY"]
SHORTEST = ["-O0", "-DSAFETY", "-DBFS"]
LIVENESS = ["-O2", "-DNFAIR=3"]  # room for the weak fairness of eight processes and more
DEEP = "-m2000000"

pytestmark = [
    pytest.mark.skipif(not shutil.which("spin"), reason="the model checker spin is not installed"),
    pytest.mark.skipif(not CC, reason="there is no C compiler for SPIN's checker"),
]
large = pytest.mark.skipif(not EVERYTHING, reason="takes long; `make model` runs it")


def read_variants():
    """Return [(flags, trail)] of the head's variants; the trail is empty where a cycle is the counter-example."""
    head = MODEL.read_text().partition("*/")[0]
    variants = []
    for line in head.splitlines():
        if line.startswith("  -D"):
            variants.append((line.strip(), []))
        elif line.startswith("    > "):
            variants[-1][1].append(line[len("    > "):])
    return [(flags, " ".join(trail)) for flags, trail in variants]


@pytest.fixture
def check(tmp_path):
    """Check the model: check(flags, compiler's options, checker's options) -> what the checker prints."""

    def run(*command):
        ended = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode:
            pytest.fail("%s: %s" % (command[0], ended.stdout))
        return ended.stdout

    def check(flags, compiling, *checking):
        run("spin", *flags.split(), "-a", MODEL)
        run(CC, "-w", "-DMEMLIM=3900", *compiling, "-o", "pan", "pan.c")
        started = time.monotonic()
        report = run("./pan", *checking)
        states, memory = re.search(r"(\d+) states, stored", report), re.search(r"(\S+)\ttotal actual memory", report)
        print("\n%10s states, %5.1f s, %4.0f MB: %s" % (states[1], time.monotonic() - started, float(memory[1]), flags))
        return report

    return check


def errors(report):
    """Return what the checker found; a search that was cut short proves nothing."""
    found = re.findall(r"^pan:1: (.*) \(at depth", report, re.MULTILINE)
    return found + re.findall(r"error: .*|.*truncated.*|.*not complete.*|.*out of memory.*", report)


def never_reached(report):
    """Return the steps that no contender ever came to: what was proved about them is empty."""
    lines = re.findall(r"pidlock\.pml:\d+, state .*", report)
    return [line for line in lines if '"-end-"' not in line and "assert(" not in line]


def read_trail(flags, directory):
    """Return the counter-example as told by the model, with the contenders renamed in the order of their coming."""
    command = ["spin", *flags.split(), "-T", "-t", "-k", "pidlock.pml.trail", MODEL]
    told = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = [line.strip() for line in told.partition("spin: ")[0].splitlines()]
    comers = list(dict.fromkeys(line[0] for line in lines if re.match("[ABC]\\b", line)))
    return "; ".join(re.sub("^[ABC]\\b", lambda name: "ABC"[comers.index(name[0])], line) for line in lines)


@pytest.mark.parametrize("flags", ["", "-DNO_HARD_LINKS"])
def test_there_are_never_two_holders_and_nobody_unlinks_a_file_that_they_did_not_judge(check, flags):
    assert errors(check(flags, SAFETY, DEEP)) == []


@pytest.mark.parametrize("flags", [
    "-DREMOVER -DWRITER", pytest.param("-DNO_HARD_LINKS -DREMOVER -DWRITER", marks=large),
])
def test_that_holds_where_others_remove_and_write_files_and_each_step_is_reached(check, flags):
    """As atomic sequences, for SPIN counts no steps within a d_step; without the others some checks are idle."""
    report = check(flags + " -Dd_step=atomic", SAFETY, DEEP)
    assert (errors(report), never_reached(report)) == ([], [])


@pytest.mark.parametrize("flags", ["-DLIVENESS", pytest.param("-DLIVENESS -DNO_HARD_LINKS", marks=large)])
def test_a_stale_file_is_always_eventually_taken_over(check, flags):
    assert errors(check(flags, LIVENESS, "-a", "-f", DEEP)) == []


@pytest.mark.parametrize("flags, trail", [
    pytest.param(*variant, id=variant[0]) for variant in read_variants() if "LIVENESS" not in variant[0]
])
def test_the_model_with_a_step_left_out_breaks_its_promise_in_the_way_that_its_head_says(check, tmp_path, flags, trail):
    report = check(flags, SHORTEST)
    assert ("assertion violated" in report, read_trail(flags, tmp_path)) == (True, trail)


@pytest.mark.parametrize("flags", [flags for flags, _ in read_variants() if "LIVENESS" in flags])
def test_the_model_with_a_step_left_out_leaves_a_stale_file_for_ever(check, flags):
    assert "acceptance cycle" in check(flags, ["-O0", *LIVENESS[1:]], "-a", "-f", DEEP)

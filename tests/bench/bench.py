#!/usr/bin/env python3
"""pidlock beside its peers, in one run: bench.py [--rounds N] [--only SECTIONS]; `make bench` does it.

In every round each contender has one go, in an order that changes, so that what disturbs the machine disturbs all of
them; a ratio is the median of the rounds' own ratios. The table goes to stdout, the same as JSON to build/bench.json.
A goal that is not met is said and is no failure. Needs Linux and a quiet machine.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import sys
import time

import contention
import growth
import handoff
import library
import peers
import runs
from measure import FULL, SMALL, directories, filesystem_of

OUTPUT = peers.ROOT / "build" / "bench.json"
SECTIONS = {"runs": runs, "library": library, "handoff": handoff, "contention": contention, "growth": growth}


def main():
    parser = argparse.ArgumentParser(description="Measure pidlock beside its peers.")
    parser.add_argument("--rounds", type=int, metavar="N", help="at most so many rounds of each measurement")
    parser.add_argument("--only", metavar="SECTIONS", help="of %s, with commas" % ", ".join(SECTIONS))
    parser.add_argument("--small", action="store_true", help="try it: two rounds, a few names, waiters, processes")
    parser.add_argument("--venv", metavar="DIR", help="take the Python peers from here, and install nothing")
    parser.add_argument("--output", metavar="FILE", default=str(OUTPUT), help="the JSON; %(default)s by default")
    options = parser.parse_args()
    sections = options.only.split(",") if options.only else list(SECTIONS)
    if not set(sections) <= set(SECTIONS):
        parser.error("--only: choose from %s" % ", ".join(SECTIONS))
    scale = SMALL if options.small else FULL
    if options.rounds:
        scale = scale._replace(rounds=options.rounds)
    if options.venv is None:
        peers.install()
    peers.use(options.venv or peers.VENV)

    began = time.monotonic()
    output = pathlib.Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    result = {"date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
              "machine": describe_machine(output.parent), "rounds": scale.rounds, "sections": {}}
    print_heading(result)
    figures = {}
    with directories(str(output.parent)) as make_directory:
        for section in sections:
            figures[section] = SECTIONS[section].run(scale, make_directory)
            result["sections"][section] = {key: figure.as_json() for key, figure in figures[section].items()}
            for figure in result["sections"][section].values():
                print_figure(**figure)
        if "library" in sections:
            result["bare_calls_are_pidlocks"] = library.compare_calls(make_directory)
            print("\nThe bare system calls are those that strace shows pidlock to make: %s." % {
                True: "yes", False: "NO, tests/bench/bare.py has to follow", None: "not checked, there is no strace",
            }[result["bare_calls_are_pidlocks"]])
    result["goals"] = judge_goals(figures)
    print_goals(result["goals"])
    result["seconds"] = round(time.monotonic() - began)
    print("\n%d s; %s" % (result["seconds"], output))
    output.write_text(json.dumps(result, indent=2) + "\n")


def describe_machine(directory):
    return {
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": "%s %s" % (platform.python_version(), sys.executable),
        "filesystem": filesystem_of(str(directory)),
        "load": round(os.getloadavg()[0], 2),
        "pidlock": peers.pidlock.__version__,
    }


# ---- Goals ----


def library_goals(place):
    """Return the goals of the library on disk or on tmpfs, as in GOALS."""
    limits = {library.BASELINE: 1.5, **dict.fromkeys(peers.TAKE_OVER, 1)}
    return {"library_%s_to_%s" % (place, name.replace(" ", "_")): (
        "library on %s / %s" % (place, name), limit, "x",
        lambda figures, name=name: figures["library"][place].ratio("pidlock", name),
    ) for name, limit in limits.items()}


def cpu_of_wait(name):
    """Return the function that tells the CPU of a waiter, alone or one of many, whichever is more."""
    return lambda figures: max(figures["handoff"][key].median(name) for key in ("cpu_of_one", "cpu_of_many"))


# key: (what, limit, unit, function from the figures to what has to stay within the limit)
GOALS = {
    "run_to_python": ("whole run / python3 -IS that imports argparse, signal, fcntl", 1.2, "x",
                      lambda figures: figures["runs"]["wall"].ratio("pidlock", runs.BASELINE)),
    "run_to_plain": ("whole run / plain wrapper", 0.7, "x",
                     lambda figures: figures["runs"]["wall"].ratio("pidlock", "plain wrapper")),
    "run_memory": ("whole run: peak memory", 10, "MiB", lambda figures: figures["runs"]["memory"].worst("pidlock")),
    **library_goals("disk"),
    **library_goals("tmpfs"),
    "handoff_threads": ("hand-off between threads / blocking flock", 2, "x",
                        lambda figures: figures["handoff"]["threads"].ratio("pidlock", handoff.FLOCK)),
    "handoff_processes": ("hand-off between processes / blocking flock", 2, "x",
                          lambda figures: figures["handoff"]["processes"].ratio("pidlock", handoff.FLOCK)),
    "handoff_commands": ("hand-off from command to command / flock(1)", 1.4, "x",
                         lambda figures: figures["handoff"]["commands"].ratio("pidlock", handoff.FLOCK_COMMAND)),
    "handoff_commands_worst": ("hand-off from command to command: worst", 10, "ms",
                               lambda figures: figures["handoff"]["commands"].worst("pidlock")),
    "wait_cpu": ("CPU of a command's wait of 10 s", 3, "ms", cpu_of_wait("pidlock")),
    "wait_cpu_library": ("CPU of the library's wait of 10 s", 3, "ms", cpu_of_wait("pidlock library")),
    "overlaps": ("overlaps and lost updates", 0, "",
                 lambda figures: figures["contention"]["overlaps"].worst("pidlock")),
    "queue": ("busy queue / ideal (1.0 s / 0.8 s)", 1.25, "x",
              lambda figures: figures["contention"]["queue_of_ideal"].median("pidlock")),
    "leave": ("300 waiters leave after TERM", 2, "s",
              lambda figures: figures["growth"]["leave_pidlock"].worst("300 waiters")),
}


def judge_goals(figures):
    """Return {key: {what, value, limit, unit, met}}; value and met are None where a section or a peer is missing."""
    judged = {}
    for key, (what, limit, unit, measure) in GOALS.items():
        try:
            value = measure(figures)
        except KeyError:
            value = None
        judged[key] = {"what": what, "value": value, "limit": limit, "unit": unit,
                       "met": None if value is None else value <= limit}
    return judged


# ---- The table ----


def print_heading(result):
    print(result["date"])
    print(", ".join("%s %s" % item for item in result["machine"].items()))
    print("%d rounds at most" % result["rounds"], flush=True)


def print_figure(title, unit, baseline, rows):
    print("\n%-58s %9s %9s  %s" % ("%s%s" % (title, ", " + unit if unit else ""), "median", "worst",
                                   "ratio to " + baseline if baseline else ""))
    for name, row in rows.items():
        if "missing" in row:
            print("  %-56s missing: %s" % (name, row["missing"]))
        else:
            ratio = "" if row["ratio"] is None else "%8.2f" % row["ratio"]
            print("  %-56s %9s %9s  %s" % (name, show(row["median"]), show(row["worst"]), ratio))
    sys.stdout.flush()


def show(value):
    return "%.4g" % value if value < 1000 else "%.0f" % value


def print_goals(goals):
    print("\n%-68s %9s %9s" % ("goals", "measured", "at most"))
    for goal in goals.values():
        value = "-" if goal["value"] is None else show(goal["value"])
        verdict = {True: "met", False: "NOT MET", None: "not measured"}[goal["met"]]
        print("  %-66s %9s %9g %-3s  %s" % (goal["what"], value, goal["limit"], goal["unit"], verdict))


if __name__ == "__main__":
    main()

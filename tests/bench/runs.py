"""Whole runs of `true` under a lock: what a crontab pays for each line, in time and in memory."""
from measure import ENVIRONMENT, Figure, Missing, bind, interleave, peak_memory, time_run
from peers import PYTHON, find, install_pidlock, lock_commands

MEMORY_ROUNDS = 3  # it hardly varies
BASELINE = "python3 -IS, 3 imports"


def run(scale, make_directory):
    directory = make_directory()
    ENVIRONMENT["HOME"] = directory  # run-one keeps its locks there
    commands = lock_commands(directory, install_pidlock(make_directory()))
    for words in commands.values():
        if not isinstance(words, Missing):
            words.append(find("true"))
    commands.update({
        "python3 -c pass": [PYTHON, "-c", "pass"],
        "python3 -IS -c pass": [PYTHON, "-IS", "-c", "pass"],
        BASELINE: [PYTHON, "-IS", "-c", "import argparse, signal, fcntl"],
        "true alone": [find("true")],
    })
    wall = Figure("whole runs of `true`: wall time", "ms", BASELINE)
    interleave(wall, bind(commands, time_run), scale.rounds)
    memory = Figure("whole runs of `true`: peak memory", "MiB", BASELINE)
    interleave(memory, bind(commands, peak_memory), min(MEMORY_ROUNDS, scale.rounds), warm=False)
    return {"wall": wall, "memory": memory}

"""Every console and Python block of the README does what it says, in a directory of its own.

test_cookbook.py runs the blocks of other kinds, and the one that needs a syslog.
"""
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import PIDLOCK, ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(console|python)\n(.*?)^```$", README, re.M | re.S)
CONSOLE = [text for kind, text in BLOCKS if kind == "console" and " logger " not in text]
PYTHON_BLOCKS = [text for kind, text in BLOCKS if kind == "python"]
TOOLS = ["pgrep", "pkill", "/sbin/start-stop-daemon"]  # that a machine may not have


def masked(text):
    """PIDs and times differ from run to run."""
    return re.sub(r"PID \d+|\b\d{3,}\b", "NUMBER", re.sub(r"for \d+s", "for TIME", text))


def as_script(block, directory):
    """What a console block types, as a script, and what it shows, masked; its /tmp is in that directory."""
    script, expected = [], []
    for line in re.sub(r"(?<![\\w.])/tmp\b", "%s/tmp" % directory, block).splitlines():
        (script if line.startswith("$ ") else expected).append(line[2:] if line.startswith("$ ") else line)
    script.append("kill $(jobs -p) 2>/dev/null; wait")
    return "\n".join(script), masked("".join(line + "\n" for line in expected))


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "pidlock"
    command.write_text("#!/bin/sh\nexec %s \"$@\"\n" % " ".join(PIDLOCK))
    command.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    return {**os.environ, "PATH": "%s:%s" % (command.parent, os.environ["PATH"]), "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("block", CONSOLE, ids=[text.split("\n")[0][:60] for text in CONSOLE])
def test_a_console_block_prints_what_the_readme_shows(block, tmp_path, environment):
    missing = [tool for tool in TOOLS if re.search(r"(?<!\S)%s " % tool, block) and not shutil.which(tool)]
    if missing:
        pytest.skip("needs " + ", ".join(missing))
    script, expected = as_script(block, tmp_path)
    done = subprocess.run(["bash", "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=60)
    assert masked(done.stdout.decode()) == expected


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=[str(number) for number, _ in enumerate(PYTHON_BLOCKS)])
def test_a_python_block_runs(block, tmp_path, environment):
    block = block.replace("/tmp/", "%s/tmp/" % tmp_path)
    done = subprocess.run([sys.executable, "-W", "error", "-c", block], env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_the_readme_names_every_option_and_no_other():
    text = subprocess.check_output([*PIDLOCK, "--help"]).decode()
    parser_options = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.M))
    table = README.split("## Options")[1].split("## Exit status")[0]
    assert set(re.findall(r"--[a-z][\w-]+", table)) - {"--conflict-exit-code"} == parser_options

"""The completions, in the shells themselves: options, values, files, and behind these the command's own."""
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import CHILDREN
from test_install import make

import pidlock

BASH_COMPLETION = "/usr/share/bash-completion/bash_completion"
SHELLS = [
    pytest.param(shell, marks=pytest.mark.skipif(not there, reason="%s is not installed" % what))
    for shell, what, there in [("bash", "bash-completion", os.path.exists(BASH_COMPLETION)),
                               ("zsh", "zsh", shutil.which("zsh")), ("fish", "fish", shutil.which("fish"))]
]
OPTIONS = {name for option in pidlock.COMMON_OPTIONS + pidlock.MORE_OPTIONS for name in option.names}
FILES = {"a directory", "a file.pid"}
COMPLETED = {
    "pidlock --": {word for word in OPTIONS if word.startswith("--")} - {"--conflict-exit-code"},
    "pidlock --st": {"--status", "--stale-after", "--stale-strategy"},
    "pidlock -q --fence --dr": {"--dry-run"},
    "pidlock --conf": set(),
    "pidlock --pidfile ": FILES,
    "pidlock -qp a": FILES,
    "pidlock --log=a": FILES,
    "pidlock -p x --metrics ": FILES,
    "pidlock --sweep ": {"a directory"},
    "pidlock --sweep=": {"a directory"},
    "pidlock --stale-strategy ": set(pidlock.STRATEGIES),
    "pidlock --stale-strategy=t": {pidlock.TIME_ONLY},
    "pidlock -p x --signal TE": {"TERM"},
    "pidlock -p x mycom": {"mycommand"},
    "pidlock -p x -q -- mycom": {"mycommand"},
    "pidlock --pidfile=x --fence mycom": {"mycommand"},
    "pidlock -p/tmp/xp mycom": {"mycommand"},
    "pidlock -p x mycommand a": FILES,
    "pidlock -p x -- --st": set(),
    "pidlock -p x -- mycommand --st": set(),
    "pidlock -p x mycommand --st": set(),
    "pidlock -p x timeout --kill": {"--kill-after"},
}


@pytest.mark.parametrize("shell", SHELLS)
def test_it_completes(tmp_path, shell):
    make("build", "BUILD=%s" % (tmp_path / "build"))
    (tmp_path / "there" / "a directory").mkdir(parents=True)
    (tmp_path / "there" / "a file.pid").write_text("")
    (tmp_path / "bin").mkdir()
    for name in ("pidlock", "mycommand"):  # fish completes nothing for a command that is not there
        (tmp_path / "bin" / name).symlink_to("/bin/true")
    shutil.copy(CHILDREN / "complete.zsh", tmp_path / ".zshrc")
    share, out = tmp_path / "build" / "share", tmp_path / "out"
    environment = {
        "PATH": "%s:%s" % (tmp_path / "bin", os.environ["PATH"]), "HOME": str(tmp_path), "TERM": "xterm",
        "LC_ALL": "C.UTF-8", "XDG_DATA_DIRS": "%s:/usr/share" % share, "SITE": str(share / "zsh" / "site-functions"),
        "OUT": str(out), "LINES_TO_COMPLETE": "\n".join(COMPLETED),
    }
    command = [shell, CHILDREN / ("complete." + shell), *COMPLETED]
    if shell == "zsh":
        command = [sys.executable, "-c", "import pty; pty.spawn(['zsh', '-i'])"]
    done = subprocess.run(command, cwd=tmp_path / "there", env=environment, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    text = out.read_text() if shell == "zsh" else done.stdout.decode()
    seen = {}
    for line in text.splitlines():
        if line.startswith(">"):
            words = seen.setdefault(line[1:], set())
        else:  # without --option=, quotes, the / of a directory, the = of an option, fish's descriptions
            words.add(re.sub(r"^--[\w-]+=(?=.)|\\|[/=]?(\t.*|\s*)$", "", line))
    assert {line: words - {""} for line, words in seen.items()} == COMPLETED, done.stderr

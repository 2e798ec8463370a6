"""Run pidlock under strace, and tell which of some system calls it made with which arguments."""
import collections
import os
import re
import subprocess

from conftest import PIDLOCK

Call = collections.namedtuple("Call", "name nth arguments")
SAME_CALLS = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}  # in each run of a test


def index_of_start(calls):
    """Return where the command's process is made: by posix_spawn's clone3, or by a fork's clone."""
    return next(index for index, call in enumerate(calls) if call.name in ("clone", "clone3", "vfork"))


class Traced:
    """strace traces pidlock itself and not its command. names: of the calls to trace."""

    def __init__(self, log, names):
        self._log = log
        self._names = names

    def run(self, *arguments, inject=()):
        trace = ["strace", "-qq", "-o", str(self._log), "-e", "trace=" + ",".join("?" + name for name in self._names)]
        faults = [word for fault in inject for word in ("-e", "inject=" + fault)]
        done = subprocess.run([*trace, *faults, "--", *PIDLOCK, *map(str, arguments)], timeout=60,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              env=dict(os.environ, **SAME_CALLS))
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    def calls(self, start):
        """Return each Call of the last run, with its ordinal, from the first on that has start in its arguments."""
        calls, counts = [], collections.Counter()
        for name, arguments in re.findall(r"^(\w+)\((.*)", self._log.read_text(), re.MULTILINE):
            counts[name] += 1
            if calls or str(start) in arguments:
                calls.append(Call(name, counts[name], arguments))
        return calls

"""Running pidlock under strace: what it calls, and faults at these calls."""
import collections
import os
import re
import subprocess

SAME_CALLS = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}  # in each run of a test

# name, nth: for strace's `when=`. text: the name, and the paths and flags in the arguments. phase: "start" up to the
# fork, "run" while the command runs, "end" from its end on, or once the holder was signalled. again: whether the same
# call was there before it.
Call = collections.namedtuple("Call", "name nth text phase again")
CALL = r"^(?:[0-9]+ +)?(\w+)\((.*)$"
SAYING_LITTLE = r"AT_FDCWD<[^>]*>|\{s[it]_[^{}]*\}|<unfinished .*$|\) += .*$"
TELLING = r'"[^"]+"|<[^>]+>(?:\(deleted\))?|\b(?:O|F|LOCK)_[A-Z_|]+|\bSIG[A-Z]+|tv_sec=0, tv_nsec=0'

OTHER_NAMES = {"linkat": "link", "unlinkat": "unlink", "mkdirat": "mkdir", "fstat": "newfstatat", "lstat": "newfstatat",
               "stat": "newfstatat", "readlinkat": "readlink",
               "renameat": "rename", "renameat2": "rename"}  # of other machines and C libraries
NEVER_OF_A_COMMAND = "flock link unlink mkdir fchmod fsync fstatfs pwrite64 pread64 getdents64 getrandom".split()


class Traced:
    """Runs a program under strace, which traces pidlock itself and not its command."""

    def __init__(self, log, program):
        self.log = log
        self._program = program

    def start(self, *arguments, inject=(), trace="all", environment=(), **options):
        """Start a run in which strace injects these faults; return its Popen."""
        faults = [word for fault in inject for word in ("-e", "inject=" + fault)]
        # With -f, a filter lets untraced calls run at full speed; but `when=` counts for each process, and an injected
        # signal comes to nothing.
        fast = trace in NEVER_OF_A_COMMAND and not any("signal=" in fault for fault in inject)
        command = ["strace", "-qq", "-y", "-s0", "-o", os.fspath(self.log), "-e", "trace=" + trace, *faults]
        command += ["-f", "--seccomp-bpf", "--"] if fast else ["-f", "--"] if trace == "execve" else ["--"]
        return subprocess.Popen(
            [*command, *self._program, *map(os.fspath, arguments)], env=dict(os.environ, **SAME_CALLS),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **dict({"stdin": subprocess.DEVNULL}, **options),
        )

    def run(self, *arguments, **options):
        """Return (status, stdout, stderr) of such a run."""
        process = self.start(*arguments, **options)
        stdout, stderr = process.communicate(timeout=60)
        return process.returncode, stdout.decode(), stderr.decode()

    def calls(self, directory):
        """Return what the last run called from its first call on this directory, or a file in it, on."""
        return parse_calls(self.log.read_text(), directory)


def parse_calls(log, directory):
    calls, seen, phase = [], collections.Counter(), "start"
    for name, arguments in re.findall(CALL, log, re.MULTILINE):
        seen[name] += 1
        if name == "wait4":
            phase = "end"
        if calls or (str(directory) in arguments and name != "execve"):
            text = normalise(name, arguments, directory)
            calls.append(Call(name, seen[name], text, phase, any((text, phase) == call[2:4] for call in calls)))
        if name in ("clone", "clone3", "fork", "vfork"):
            phase = "run"
        if name in ("kill", "pidfd_send_signal") and "SIGTERM" in arguments:
            phase = "end"
    return calls


def normalise(name, arguments, directory):
    """Return a call without what differs between runs."""
    words = ", ".join(re.findall(TELLING, re.sub(SAYING_LITTLE, "", arguments)))
    words = re.sub(r"\.pidlock-[0-9a-f]{16}", "PRIVATE", words.replace(str(directory), "DIR").replace("/a/b/", "/"))
    return "%s(%s)" % (OTHER_NAMES.get(name, name), re.sub(r"[0-9]+", "N", words))

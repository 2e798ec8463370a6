"""Say `ready`, then the name of each signal that comes; end with SIGRTMAX, or by itself after 30 quiet seconds."""
import os
import signal
import sys

STOPPING = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
SIGNALS = set(range(1, 32)) - STOPPING - {signal.SIGKILL, signal.SIGCHLD} | set(range(signal.SIGRTMIN, signal.NSIG))


def name_of(signum):
    names = {one.value: one.name for one in signal.Signals}
    return names.get(signum) or "SIGRTMIN+%d" % (signum - signal.SIGRTMIN)


def say(line):
    os.write(1, line.encode() + b"\n")


if sys.argv[1:] == ["--own-group"]:
    os.setpgid(0, 0)
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
say("ready")
while True:
    info = signal.sigtimedwait(SIGNALS, 30)
    say(name_of(info.si_signo) if info else "no signal for 30 s")
    if not info or info.si_signo == signal.SIGRTMAX:
        sys.exit(0 if info else 1)

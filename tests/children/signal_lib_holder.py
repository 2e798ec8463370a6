"""Hold the lock of argv[1] by the library: say `ready`; say the name of each TERM or USR1 that comes; 60 s at most."""
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import pidlock  # noqa: E402

taken = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, taken)
with pidlock.PidLock(sys.argv[1]):
    print("ready", flush=True)
    while True:
        info = signal.sigtimedwait(taken, 60)
        print(signal.Signals(info.si_signo).name if info else "no signal for 60 s", flush=True)
        if not info or info.si_signo == signal.SIGTERM:
            break

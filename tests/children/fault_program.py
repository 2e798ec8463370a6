"""pidlock as pip installs it, with its bytecode cached: fault_program.py DIRECTORY ARGUMENTS...

With FAULT_GATE="W R" each forked child writes its PID into descriptor W and reads a byte from R before it goes on.
"""
import os
import sys

sys.path.insert(0, sys.argv.pop(1))
if "FAULT_GATE" in os.environ:
    tell, wait = map(int, os.environ.pop("FAULT_GATE").split())

    def stop_at_gate():
        os.write(tell, b"%d\n" % os.getpid())
        os.read(wait, 1)

    os.register_at_fork(after_in_child=stop_at_gate)

from pidlock import run_as_process  # noqa: E402  # the directory comes first

run_as_process()

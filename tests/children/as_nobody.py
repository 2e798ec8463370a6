"""Print the value of an expression over pidlock as nobody sees it: as_nobody.py 'pidlock._process_state(1)'."""
import ctypes
import os
import shlex  # noqa: F401 (pidlock imports it late, and nobody may be unable to read it)
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import pidlock  # noqa: E402, F401 (the expression uses it; nobody may be unable to read the file)

NOBODY = 65534
os.setgroups([])
os.setresgid(NOBODY, NOBODY, NOBODY)
os.setresuid(NOBODY, NOBODY, NOBODY)
ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: as after an exec, so that /proc/self is ours
print(eval(sys.argv[1]))

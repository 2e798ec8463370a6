"""More copies of pidlock.py, for slots, fences and sweeps; see race_variants.py, whose bench they extend."""
import importlib.util

from children.race_variants import VARIANTS, write_variant

__all__ = ["load", "write_variant"]

SLOTS_TURN = "guard = _flock_directory(self.path, GUARD_PATIENCE)"
BREAKERS_TURN = "guard = None if guarded else _flock_directory(found.path, PATIENCE)"
BREAKERS_CHECK = "if not os.path.samestat(now, found.status) or now.st_mtime_ns != found.status.st_mtime_ns:"
ROOM = "_has_room(self._max_concurrent, living)"
COUNT_AFTER = "if found.path != self._slot_path]\n                if %s:" % ROOM
COUNT_BEFORE = "if not %s:\n                    return living" % ROOM
LIMITS = "min([limit] + [_limit_of(found.record) for found in living])"
SWEEP_JUDGES = "    found = _examine(path, operation, (None, PID_FIRST))\n    if found.state == STALE and"
COUNTER_FLOCK = "granted = _flock_patiently(descriptor, COUNTER_PATIENCE, pause)"
COUNTER_WRITE = "                if os.pwrite(descriptor, COUNTER % token, 0) != len(COUNTER % token):\n"
REPLACE_COUNTER = """                with open(path + ".new%d" % os.getpid(), "w") as file:
                    file.write("%020d\\n" % token)
                time.sleep(0.001)  # others come meanwhile, also on a busy machine
                os.rename(file.name, path)
                return token
""" + COUNTER_WRITE

VARIANTS.update({
    "break without turns": [(BREAKERS_TURN, "guard = os.open('/', os.O_RDONLY)")],
    "break without the re-check": [(BREAKERS_CHECK, "if False:")],
    "slots without turns": [(SLOTS_TURN, "guard = None")],
    "no count after the take": [(COUNT_AFTER, COUNT_AFTER.replace(ROOM, "True"))],
    "no count before the take": [(COUNT_BEFORE, COUNT_BEFORE.replace("not " + ROOM, "False"))],
    "ignoring theirs": [(LIMITS, "limit")],
    "no flock of the counter": [
        (COUNTER_FLOCK, "granted = True\n"),
        ("last = _read_counter(path, descriptor)", "last = _read_counter(path, descriptor); time.sleep(0.001)"),
    ],
    "a stopped creator's clock": [("descriptor, COUNTER % 0", "descriptor, COUNTER % int(time.time() * 1000000)")],
    "a counter that is replaced": [(COUNTER_WRITE, REPLACE_COUNTER)],
    "sweep without flock": [(SWEEP_JUDGES, "    os.unlink(path)\n    return True\n" + SWEEP_JUDGES)],
    "sweep of flocked private files": [("if granted is False or young:", "if young:")],
})


def load(path):
    """Return the module in this file."""
    spec = importlib.util.spec_from_file_location("pidlock_variant", str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

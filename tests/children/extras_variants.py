"""More copies of pidlock.py, for slots, fences and sweeps; see race_variants.py, whose bench they extend."""
import importlib.util

from children.race_variants import VARIANTS, write_variant

IMPATIENT = [("GUARD_PATIENCE = 1.0", "GUARD_PATIENCE = 0.0")]
ROOM = "_has_room(self._max_concurrent, living)"
COUNT_AFTER = "if found.path != self._slot_path]\n                if %s:" % ROOM
COUNT_BEFORE = "if not %s:\n                    return living" % ROOM
LIMITS = "min([limit] + [_limit_of(found.record) for found in living])"
SWEEP_JUDGES = "    found = _examine(path, operation, (None, PID_FIRST))\n    if found.state == STALE and"
COUNTER_FLOCK = "granted = _flock_patiently(descriptor, COUNTER_PATIENCE)"
COUNTER_WRITE = "                if os.pwrite(descriptor, b\"%020d\\n\" % token, 0) != 21:\n"
REPLACE_COUNTER = """                with open(path + ".new%d" % os.getpid(), "w") as file:
                    file.write("%020d\\n" % token)
                os.rename(file.name, path)
                return token
""" + COUNTER_WRITE

VARIANTS.update({
    "impatient": IMPATIENT,
    "impatient, no count after the take": IMPATIENT + [(COUNT_AFTER, COUNT_AFTER.replace(ROOM, "True"))],
    "impatient, ignoring theirs": IMPATIENT + [(LIMITS, "limit")],
    "no count before the take": [(COUNT_BEFORE, COUNT_BEFORE.replace("not " + ROOM, "False"))],
    "ignoring theirs": [(LIMITS, "limit")],
    "no flock of the counter": [
        (COUNTER_FLOCK, "granted = True\n"),
        ("body = os.pread(descriptor, 64, 0)", "body = os.pread(descriptor, 64, 0); time.sleep(0.001)"),
    ],
    "a stopped creator's clock": [("b\"%020d\\n\" % 0", "b\"%020d\\n\" % int(time.time() * 1000000)")],
    "a counter that is replaced": [(COUNTER_WRITE, REPLACE_COUNTER)],
    "sweep without flock": [(SWEEP_JUDGES, "    os.unlink(path)\n    return True\n" + SWEEP_JUDGES)],
    "sweep of flocked private files": [("if granted is False or young:", "if young:")],
})


def write_limited(name, directory, limit):
    """Write this variant with another default of max_concurrent, for children that know of none; return its path."""
    path = write_variant(name, directory)
    text = path.read_text()
    assert text.count("max_concurrent=1,") == 1
    path.write_text(text.replace("max_concurrent=1,", "max_concurrent=%d," % limit))
    return path


def write_sweeping(name, directory):
    """Write this variant with an inspect() that sweeps the path's directory, for race_stop_at.py; return its path."""
    path = write_variant(name, directory)
    path.write_text(path.read_text().replace('\nif __name__ == "__main__":', """
def inspect(path):
    names = " ".join(map(os.path.basename, sweep(os.path.dirname(path))))
    return namedtuple("Swept", "state")("swept " + names)


if __name__ == "__main__":"""))
    return path


def load(path):
    """Return the module in this file."""
    spec = importlib.util.spec_from_file_location("pidlock_variant", str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

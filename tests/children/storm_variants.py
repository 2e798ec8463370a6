"""Copies of pidlock.py for the storms of everything at once; see race_variants.py, whose bench they extend."""
from children.extras_variants import COUNT_AFTER, COUNT_BEFORE, ROOM, VARIANTS, write_variant
from children.race_variants import RELEASE

FLOCK_OPENED = "return descriptor, _flock(descriptor, operation)"
REMOVE_IF_SAME = "    if not _is_same_file(path, descriptor):\n        return False\n    try:\n"

FILL_IN_PLACE = "        _fill_file(descriptor, encode_record(record._replace(marked=flocked is True)), lock._mode)\n"
SLOW = [  # between a look and what follows from it, so that a storm need not be long
    (FLOCK_OPENED, "time.sleep(0.001); " + FLOCK_OPENED),
    ("os.unlink(found.path)", "time.sleep(0.001); os.unlink(found.path)"),
]

VARIANTS.update({
    "slow": SLOW,
    "slow, blind unlink": VARIANTS["blind unlink"] + SLOW,
    "slow, unlink without the flock": VARIANTS["unlink without the flock"] + SLOW,
    "slow, release unlocks first": [
        (RELEASE, "            fcntl.flock(descriptor, fcntl.LOCK_UN); time.sleep(0.002)\n" + RELEASE),
    ],
    "slow, in place": [
        ("in_place = _names_are_inodes(descriptor) or not _link(private, path)", "in_place = True"),
        (FILL_IN_PLACE, "        time.sleep(0.002)\n" + FILL_IN_PLACE),
    ],
    "release without a look": [
        (REMOVE_IF_SAME, REMOVE_IF_SAME.replace("not _is_same_file(path, descriptor)", "False")),
    ],
    "no descriptor for the command": [("os.set_inheritable(lock._descriptor, True)", "pass")],
    "no count": [
        (COUNT_BEFORE, COUNT_BEFORE.replace("not " + ROOM, "False")),
        (COUNT_AFTER, COUNT_AFTER.replace(ROOM, "True")),
    ],
})

__all__ = ["VARIANTS", "write_variant"]

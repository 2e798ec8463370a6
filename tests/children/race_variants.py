"""Copies of pidlock.py with a changed protocol, most of them broken: a bench that cannot fail proves nothing."""
import pathlib

EXAMINE = "    descriptor, granted = _open_and_flock(path, operation)\n"
SAME_MTIME = "now.st_mtime_ns != found.status.st_mtime_ns"
SAME_BODY = "os.pread(found.descriptor, BODY_MAX + 1, 0) != found.body"
SAME_CONTENT = "%s or %s" % (SAME_MTIME, SAME_BODY)
RELEASE = "            return None if _remove_if_same(path, descriptor) else \"the file was removed or replaced\"\n"
FLOCK_REFUSED = "if flocked is False:\n            return  # we were stopped"
LINK_CHECK = "if not in_place and _is_same_file(path, descriptor):"
IN_PLACE_CHECK = "        if not _is_same_file(path, descriptor):\n            return  # evicted as old"

VARIANTS = {
    "pidlock.py": [],
    "blind unlink": [("if not _is_same_file(found.path, found.descriptor):", "if False:")],
    "unlink without the flock": [
        ("os.unlink(found.path)", "fcntl.flock(found.descriptor, fcntl.LOCK_UN); os.unlink(found.path)"),
    ],
    "judging before the flock": [
        (EXAMINE, "    early = open(path, 'rb').read() if os.path.exists(path) else b''\n" + EXAMINE),
        ("body = os.pread(descriptor, BODY_MAX + 1, 0)", "body = early"),
        (SAME_CONTENT, "False"),
    ],
    "only the mtime compared": [(SAME_CONTENT, SAME_MTIME)],
    "only the body compared": [(SAME_CONTENT, SAME_BODY)],
    "an empty file is dead": [("WRITING = 2.0", "WRITING = 0.0")],
    "rename instead of link": [("os.link(private, path)", "os.rename(private, path)"), ("os.unlink(private)", "pass")],
    "flock after the link": [
        ("        flocked = _flock(descriptor, fcntl.LOCK_EX)\n", "        flocked = True\n"),
        (LINK_CHECK, "if not in_place and _flock(descriptor, fcntl.LOCK_EX):"),
    ],
    "no check after the link": [(LINK_CHECK, "if not in_place:")],
    "an unflocked file published": [(FLOCK_REFUSED, FLOCK_REFUSED.replace("flocked is False", "False"))],
    "a swept private name is fatal": [("except (FileExistsError, FileNotFoundError):", "except FileExistsError:")],
    "no check in place": [(IN_PLACE_CHECK, IN_PLACE_CHECK.replace("not _is_same_file(path, descriptor)", "False"))],
    "no patience in place": [("\nPATIENCE = 2.0", "\nPATIENCE = -1.0")],
    "release unlocks first": [(RELEASE, "            fcntl.flock(descriptor, fcntl.LOCK_UN)\n" + RELEASE)],
    "release by PID alone": [
        (RELEASE, "            return None if parse_record(open(path, 'rb').read()).pid == self.pid "
                  "and not os.unlink(path) else 'lost'\n"),
    ],
    "probers exclude each other": [("= _examine(path, fcntl.LOCK_SH", "= _examine(path, fcntl.LOCK_EX")],
    "patient": [  # so that a slow machine does not end the wait before the test does
        ("LOOK_AGAIN = 0.050", "LOOK_AGAIN = 60.0"),
        ("LOOK_LONG = 1.0", "LOOK_LONG = 60.0"),
        ("\nPATIENCE = 2.0", "\nPATIENCE = 60.0"),
    ],
    "no second look": [("LOOK_AGAIN = 0.050", "LOOK_AGAIN = 0.0"), ("LOOK_LONG = 1.0", "LOOK_LONG = 0.0")],
}


def write_variant(name, directory):
    """Write this variant of pidlock.py into the directory; return its path."""
    text = (pathlib.Path(__file__).resolve().parents[2] / "pidlock.py").read_text()
    for old, new in VARIANTS[name]:
        if old not in text:
            raise LookupError("variant %r: %r is not in pidlock.py any more; adapt the variant" % (name, old))
        text = text.replace(old, new)
    path = directory / "pidlock.py"
    path.write_text(text)
    return path

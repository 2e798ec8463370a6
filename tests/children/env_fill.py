"""Fill the filesystem of a directory: env_fill.py DIRECTORY bytes|files [PREFIX]"""
import errno
import itertools
import os
import sys

directory, what = sys.argv[1:3]
prefix = "".join(sys.argv[3:]) + "filler"


def take(name, size):
    """Create a file of this size; return whether there was room. What there was no room for stays away."""
    path = os.path.join(directory, name)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)  # where there is no fallocate(2), the C library writes
        return True
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.unlink(path)
        return False
    finally:
        os.close(descriptor)


numbers = itertools.count()
for power in range(28, 8, -1) if what == "bytes" else []:
    while take("%s-%d" % (prefix, next(numbers)), 1 << power):
        pass
while what == "files" and take("%s-%d" % (prefix, next(numbers)), 0):
    pass

"""A FUSE filesystem that passes everything on to a directory: env_fuse.py DIRECTORY MOUNTPOINT [OPTION...]

nolink: it has no hard links. noflock=NAME: flock(2) fails with this errno. noino: the inode numbers are libfuse's own,
one for each name, as where a filesystem does not say `use_ino`. subtype=NAME: it is a fuse.NAME.
It says `ready` when it is mounted, and ends when it is unmounted.
"""
import errno
import os
import sys

import mfusepy

root, mountpoint = sys.argv[1:3]
options = dict(word.partition("=")[::2] for word in sys.argv[3:])
STAT_KEYS = "st_mode st_ino st_nlink st_uid st_gid st_size".split()


def under(path):
    return root + path


class Passthrough(mfusepy.Operations):
    use_ns = True

    def init(self, path):
        print("ready", flush=True)

    def getattr(self, path, fh=None):
        status = os.lstat(under(path)) if fh is None else os.fstat(fh)
        times = {"st_%stime" % kind: getattr(status, "st_%stime_ns" % kind) for kind in "amc"}
        return dict({key: getattr(status, key) for key in STAT_KEYS}, **times)

    def readdir(self, path, fh):
        entries = [(entry.name, {"st_ino": entry.inode()}, 0) for entry in os.scandir(under(path))]
        return [(".", {"st_ino": 1}, 0), ("..", {"st_ino": 1}, 0), *entries]  # ls(1) leaves out what has no number

    def open(self, path, flags):
        return os.open(under(path), flags)

    def create(self, path, mode, flags=None):
        return os.open(under(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path, size, offset, fh):
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        os.truncate(under(path), length)
        return 0

    def chmod(self, path, mode):
        os.chmod(under(path), mode)
        return 0

    def unlink(self, path):
        os.unlink(under(path))
        return 0

    def rename(self, old, new):
        os.rename(under(old), under(new))
        return 0

    def mkdir(self, path, mode):
        os.mkdir(under(path), mode)
        return 0

    def rmdir(self, path):
        os.rmdir(under(path))
        return 0

    def utimens(self, path, times=None):
        os.utime(under(path), ns=times)
        return 0

    def release(self, path, fh):
        os.close(fh)
        return 0


if "nolink" not in options:
    def link(self, target, source):
        os.link(under(source), under(target))
        return 0

    Passthrough.link = link
if "noflock" in options:
    def flock(self, path, fh, operation):
        raise OSError(getattr(errno, options["noflock"]), "no flock here")

    Passthrough.flock = flock
more = {"subtype": options["subtype"]} if "subtype" in options else {}
mfusepy.FUSE(Passthrough(), mountpoint, foreground=True, nothreads=True, allow_other=True, fsname="passthrough",
             use_ino="noino" not in options, **more)

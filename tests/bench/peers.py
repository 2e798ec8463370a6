"""Whom pidlock is measured against: commands from Debian, libraries from PyPI; and pidlock itself."""
import fcntl
import functools
import importlib
import os
import pathlib
import shutil
import site
import subprocess
import sys

from measure import ENVIRONMENT, Missing

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VENV = ROOT / "build" / "bench-venv"
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable  # on PATH it may be a shim
PACKAGES = {"flock": "util-linux", "setlock": "daemontools", "chpst": "runit", "run-one": "run-one",
            "with-lock-ex": "chiark-utils-bin", "dotlockfile": "liblockfile-bin", "lckdo": "moreutils"}
WAIT = 120  # seconds; longer than any wait here that goes well

sys.path.insert(0, str(ROOT))
pidlock = importlib.import_module("pidlock")


# ---- Installing ----


def site_packages(venv):
    return pathlib.Path(venv) / "lib" / ("python%d.%d" % sys.version_info[:2]) / "site-packages"


def install():
    """Install what is missing and can be had: by apt-get as root, from PyPI into a venv of the bench's own."""
    missing = [package for program, package in PACKAGES.items() if find(program) is None]
    if missing and os.geteuid() == 0 and find("apt-get"):
        attempt("apt-get", "update", "-qq")
        for package in missing:
            attempt("apt-get", "install", "-y", "-qq", "--no-install-recommends", package)
    ready = VENV / "ready"
    wanted = (ROOT / "pyproject.toml").stat().st_mtime
    if not site_packages(VENV).exists() or not ready.exists() or ready.stat().st_mtime < wanted:
        pip = str(VENV / "bin" / "pip")
        if (attempt(sys.executable, "-m", "venv", str(VENV)) and attempt(pip, "install", "-q", "--upgrade", "pip")
                and attempt(pip, "install", "-q", "--group", "bench")):
            ready.touch()


def attempt(*command):
    """Run it and return whether it went well; what then is missing is named in the table."""
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    done = subprocess.run(command, cwd=str(ROOT), env=environment, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        print("bench: %s: %s" % (" ".join(command), done.stdout.decode(errors="replace").strip()), file=sys.stderr)
    return done.returncode == 0


def use(venv):
    """Let the Python peers be imported from this venv."""
    site.addsitedir(str(site_packages(venv)))


def find(program):
    return shutil.which(program, path=ENVIRONMENT["PATH"] + ":/usr/sbin:/sbin")


# ---- Commands ----


def install_pidlock(prefix):
    """Install as users do; return the command. PREFIX and not DESTDIR: the command names the place it was made for."""
    command = ["make", "-s", "-C", str(ROOT), "install-command", "DESTDIR=", "PREFIX=" + prefix, "PYTHON=" + PYTHON]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return prefix + "/bin/pidlock"


def or_missing(program, *arguments):
    path = find(program)
    return [path, *arguments] if path else Missing("no %s (apt-get install %s)" % (program, PACKAGES[program]))


def lock_commands(directory, installed):
    """Return {name: the words that stand before a command to run it under a lock without waiting, or Missing}."""
    def lock(name):
        return os.path.join(directory, name)

    return {
        "pidlock": [installed, "--pidfile", lock("installed.pid"), "--"],
        "pidlock.py as a file": [PYTHON, str(ROOT / "pidlock.py"), "--pidfile", lock("file.pid"), "--"],
        "flock -n": or_missing("flock", "-n", lock("flock")),
        "setlock -n": or_missing("setlock", "-n", lock("setlock")),
        "chpst -L": or_missing("chpst", "-L", lock("chpst")),
        "run-one": or_missing("run-one"),
        "with-lock-ex -q": or_missing("with-lock-ex", "-q", lock("with-lock-ex")),
        "dotlockfile -p": or_missing("dotlockfile", "-r", "0", "-p", lock("dotlockfile")),
        "lckdo": or_missing("lckdo", lock("lckdo")),
        "plain wrapper": [PYTHON, str(HERE / "plain_wrapper.py"), "--pidfile", lock("plain.pid"), "--"],
    }


def waiting_commands(installed):
    """Return {name: function from a path to the words that run a command once it is free, or Missing}."""
    flock = or_missing("flock")
    return {
        "pidlock": lambda path: [installed, "--pidfile", path, "--wait", "inf", "--"],
        "flock(1)": flock if isinstance(flock, Missing) else lambda path: [*flock, path],
    }


# ---- Libraries ----


class BlockingFlock:
    """flock(2), waiting in the kernel: the fastest hand-over there is, and a lock that nobody can read."""

    def __init__(self, path):
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def acquire(self):
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def release(self):
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class Cycle:
    """acquire() and release() of a library that names them otherwise."""

    def __init__(self, acquire, release):
        self.acquire = acquire
        self.release = release


class ZcLockFile:
    """zc.lockfile takes the lock where it makes the object."""

    def __init__(self, module, path):
        self._make = module.LockFile
        self._path = path

    def acquire(self):
        self._lock = self._make(self._path)

    def release(self):
        self._lock.close()


def pidfile_of_pid(module, path):
    directory, name = os.path.split(path)
    lock = module.PidFile(name, directory, register_term_signal_handler=False, register_atexit=False)
    return Cycle(lock.create, lock.close)


LIBRARIES = {
    "filelock FileLock": ("filelock", lambda module, path, **options: module.FileLock(path, **options)),
    "filelock SoftFileLock": ("filelock", lambda module, path: module.SoftFileLock(path)),
    "fasteners": ("fasteners", lambda module, path: module.InterProcessLock(path)),
    "portalocker Lock": ("portalocker", lambda module, path: module.Lock(path)),
    "portalocker PidFileLock": ("portalocker", lambda module, path: module.PidFileLock(path)),
    "pid PidFile": ("pid", pidfile_of_pid),
    "zc.lockfile": ("zc.lockfile", ZcLockFile),
}
TAKE_OVER = ["filelock FileLock", "filelock SoftFileLock", "pid PidFile", "portalocker PidFileLock"]


def library(name):
    """Return the function from a path to a lock of this library, or Missing."""
    module_name, make = LIBRARIES[name]
    try:
        return functools.partial(make, importlib.import_module(module_name))
    except ImportError:
        return Missing("no %s (pip install --group bench)" % module_name)


def waiting_locks():
    """Return {name: function from a path to a lock whose acquire() waits, or Missing}."""
    return {
        "pidlock": lambda path: pidlock.PidLock(path, wait=WAIT),
        "blocking flock": BlockingFlock,
        "filelock FileLock": library("filelock FileLock"),
    }

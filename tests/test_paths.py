"""What --pidfile may name, what it gets when it may not, and where the lock's descriptor goes."""
import itertools
import os
import pathlib
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile

import pytest
from conftest import PIDLOCK, ROOT

import pidlock

blackbox = pytest.mark.blackbox

IS_ROOT = os.geteuid() == 0
CAN_MOUNT = bool(IS_ROOT and shutil.which("unshare") and not subprocess.run(["unshare", "-m", "true"]).returncode)

DATA = "a line of somebody's data\n" * 5
SCRIPT = "#!/bin/sh\nexit 0\n"
RUN_AND_CHECK = pytest.mark.parametrize("probe", [["--", "echo", "ran"], ["--check"]], ids=["run", "check"])


def snapshot(directory):
    """Everything about the directory and its entries that a program may change, but times of access."""
    paths = [directory, *sorted(directory.iterdir())]
    states = [path.lstat() for path in paths]
    return [
        (path.name, state.st_ino, state.st_mode, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        for path, state in zip(paths, states)
    ]


# ---- What is no pidfile ----


def make_socket(path):
    # by a relative name: an address has room for 108 bytes only
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def make_sparse(path, text=""):
    path.write_text(text)
    os.truncate(path, 1 << 30)


def make_old(path, text, mode=0o644, links=1):
    path.write_text(text)
    path.chmod(mode)
    os.utime(path, (1e9, 1e9))
    if links > 1:
        os.link(path, path.with_name("another name"))


def link_to_stale(path):
    make_old(path.with_name("stale"), "garbage\n")
    path.symlink_to("stale")


SOMEBODYS = "is somebody's file, not a pidfile; name another file, or remove this one if nobody needs it"

NO_PIDFILES = [
    ("a directory", lambda path: path.mkdir(), "is a directory, not a pidfile; name another file"),
    ("a FIFO", os.mkfifo, "is a FIFO, not a pidfile; name another file"),
    ("a socket", make_socket, "is a socket, not a pidfile; name another file"),
    ("a link to a stale file", link_to_stale, "is a symbolic link, not a pidfile; name another file"),
    ("a dangling link", lambda path: path.symlink_to("none"), "is a symbolic link, not a pidfile; name another file"),
    ("a link to itself", lambda path: path.symlink_to(path), "is a symbolic link, not a pidfile; name another file"),
    ("1 GB of nothing", make_sparse, SOMEBODYS),
    ("1 GB behind a PID", lambda path: make_sparse(path, "1\n"),
     "is too long for a pidfile; name another file, or remove this one if nobody needs it"),
    ("a data file", lambda path: make_old(path, DATA), SOMEBODYS),
    ("a fresh data file", lambda path: path.write_text(DATA), SOMEBODYS),
    ("a script", lambda path: make_old(path, SCRIPT, 0o755), SOMEBODYS),
    ("a long script that is not executable", lambda path: make_old(path, SCRIPT + "# and why\n" * 9), SOMEBODYS),
    ("an empty executable", lambda path: make_old(path, "", 0o755), SOMEBODYS),
    ("a small file of two names", lambda path: make_old(path, "short\n", links=2), SOMEBODYS),
]


@blackbox
@RUN_AND_CHECK
@pytest.mark.parametrize("make, problem", [row[1:] for row in NO_PIDFILES], ids=[row[0] for row in NO_PIDFILES])
def test_what_is_no_pidfile_is_said_and_left_alone(run, tmp_path, probe, make, problem):
    path = tmp_path / "test.pid"
    make(path)
    before = snapshot(tmp_path)
    outcome = run("-p", path, *(["--wait", "inf"] if probe[0] == "--" else []), *probe, timeout=30)
    assert (outcome, snapshot(tmp_path)) == ((125, "", "pidlock: %s: %s\n" % (path, problem)), before)


@blackbox
@RUN_AND_CHECK
@pytest.mark.parametrize("path", ["/dev/null", "/dev/full", "/dev/ptmx"])
def test_a_device_is_no_pidfile(run, probe, path):
    line = "pidlock: %s: is a device, not a pidfile; name another file\n" % path
    assert run("-p", path, *probe, timeout=30) == (125, "", line)


WITHOUT_A_TERMINAL = """
import pidlock, sys
try:
    pidlock.inspect(sys.argv[1])
except pidlock.PidLockError as error:
    print(error)
try:
    open("/dev/tty")
except OSError:
    print("none")
"""


def test_a_terminal_that_is_named_by_mistake_does_not_become_the_callers():
    """A leader of a session that has none, as a daemon is, gets the first that it opens. Red without O_NOCTTY."""
    master, terminal = os.openpty()
    try:
        name = os.ttyname(terminal)
        told = subprocess.check_output([sys.executable, "-c", WITHOUT_A_TERMINAL, name], cwd=ROOT, timeout=60,
                                       start_new_session=True, universal_newlines=True)
    finally:
        os.close(master)
        os.close(terminal)
    assert told == "%s: is a device, not a pidfile; name another file\nnone\n" % name


@blackbox
@RUN_AND_CHECK
@pytest.mark.parametrize("name, problem", [
    ("x" * 300, "cannot open it: File name too long; choose a shorter name"),
    ("x/" * 3000 + "y", "cannot open it: File name too long; choose a shorter name"),
    ("file/test.pid", "cannot open it: Not a directory; one of its parents is a file"),
    ("file/sub/test.pid", "cannot open it: Not a directory; one of its parents is a file"),
], ids=["300 characters", "a path of 6000 characters", "a file as parent", "a file as grandparent"])
def test_a_path_that_cannot_be_is_said_at_once(run, tmp_path, probe, name, problem):
    (tmp_path / "file").write_text(DATA)
    before = snapshot(tmp_path)
    path = os.path.join(tmp_path, name)
    outcome = run("-p", path, *(["--wait", "inf"] if probe[0] == "--" else []), *probe, timeout=30)
    assert (outcome, snapshot(tmp_path)) == ((125, "", "pidlock: %s: %s\n" % (path, problem)), before)


@blackbox
@pytest.mark.parametrize("name", ["link/test.pid", "link/sub/test.pid", "link/sub/sub/test.pid"])
def test_a_dangling_link_as_parent_is_said_at_once(run, tmp_path, name):
    (tmp_path / "link").symlink_to("nowhere")
    before = snapshot(tmp_path)
    problem = "cannot take it: No such file or directory; one of its parents is missing or a dangling link"
    outcome = run("-p", tmp_path / name, "--", "echo", "ran", timeout=30)
    assert (outcome, snapshot(tmp_path)) == ((125, "", "pidlock: %s/%s: %s\n" % (tmp_path, name, problem)), before)


@blackbox
def test_a_name_that_ends_in_a_slash_makes_no_directory_of_it(run, tmp_path):
    status, stdout, stderr = run("-p", "%s/new/" % tmp_path, "--", "echo", "ran", timeout=30)
    assert (status, stdout, stderr.count("\n"), os.listdir(tmp_path)) == (125, "", 1, [])


@blackbox
def test_an_empty_name_is_wrong_usage(run, tmp_path):
    outcome = run("-p", "", "--", "echo", "ran", cwd=tmp_path)
    assert (outcome.status, outcome.stdout, os.listdir(tmp_path)) == (2, "", [])


# ---- Other users, other filesystems ----


@blackbox
def test_a_stale_file_in_a_sticky_directory_is_said_with_its_owner(run_as_nobody, public_directory, dead_pid):
    public_directory.chmod(0o1777)
    path = public_directory / "test.pid"
    path.write_text("%d\n" % dead_pid)
    before = snapshot(public_directory)
    what = "stale (PID %d does not exist), but it is root's and cannot be removed: Operation not permitted" % dead_pid
    line = "pidlock: %s: %s; remove it as that user or as root\n" % (path, what)
    assert run_as_nobody("-p", path, "--wait", "inf", "--", "echo", "ran") == (125, "", line)
    assert snapshot(public_directory) == before


@blackbox
def test_a_stale_file_in_a_sticky_directory_is_free_to_a_probe(run_as_nobody, public_directory, dead_pid):
    public_directory.chmod(0o1777)
    path = public_directory / "test.pid"
    path.write_text("%d\n" % dead_pid)
    assert run_as_nobody("-p", path, "--check") == (0, "", "")


@blackbox
def test_anothers_living_holder_is_held_to_everybody(holder, run_as_nobody, public_directory):
    public_directory.chmod(0o1777)
    path = public_directory / "test.pid"
    holder("-p", path)
    assert run_as_nobody("-q", "-p", path, "--", "echo", "ran") == (75, "", "")
    assert run_as_nobody("-p", path, "--check") == (1, "", "")


@blackbox
@RUN_AND_CHECK
@pytest.mark.parametrize("body", ["garbage\n", "1\n\n\n"])
def test_an_unreadable_file_is_said_with_its_owner_and_mode(run_as_nobody, public_directory, probe, body):
    public_directory.chmod(0o777)
    path = public_directory / "test.pid"
    make_old(path, body, 0o600)
    before = snapshot(public_directory)
    problem = "cannot open it, root's with mode 0600: Permission denied; "
    line = "pidlock: %s: %scheck the permissions of it and of its directory\n" % (path, problem)
    assert run_as_nobody("-p", path, *(["--wait", "inf"] if probe[0] == "--" else []), *probe) == (125, "", line)
    assert snapshot(public_directory) == before


@blackbox
@pytest.mark.parametrize("name", ["test.pid", "sub/test.pid"])
def test_a_directory_that_one_may_not_write_is_said(run_as_nobody, public_directory, name):
    path = public_directory / name
    line = "cannot take it: Permission denied; check the permissions of it and of its directory"
    assert run_as_nobody("-p", path, "--", "echo", "ran") == (125, "", "pidlock: %s: %s\n" % (path, line))
    assert list(public_directory.iterdir()) == []


@blackbox
@pytest.mark.skipif(not CAN_MOUNT, reason="needs root and unshare to mount filesystems of its own")
@pytest.mark.parametrize("options, prepare, problem, left", [
    ("size=4k", "head -c 4096 /dev/zero > filler", "No space left on device; make room on that filesystem", "filler"),
    ("nr_inodes=1", ":", "No space left on device; make room on that filesystem", ""),
    ("ro", ":", "Read-only file system; name a file on a writable filesystem", ""),
    ("size=4k", "echo garbage > test.pid; touch -d @1 test.pid; mount -o remount,ro .",
     "Read-only file system; name a file on a writable filesystem", "test.pid"),
], ids=["full", "no inodes", "read-only", "stale on read-only"])
def test_a_filesystem_that_takes_no_file_is_said_and_left_clean(tmp_path, options, prepare, problem, left):
    script = 'mount -t tmpfs -o "$0" none . && cd "$PWD" && { %s; } && { "$@"; echo $?; ls -A; }' % prepare
    command = ["unshare", "-m", "sh", "-c", script, options, *PIDLOCK, "-p", "test.pid", "-w", "inf", "echo", "ran"]
    done = subprocess.run(
        command, cwd=tmp_path, timeout=30, universal_newlines=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    line = "pidlock: %s/test.pid: cannot take it: %s\n" % (tmp_path, problem)
    assert (done.stderr, done.stdout.split()) == (line, ["125", *left.split()])


# ---- What is one ----


@blackbox
@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, " ", "-x", "a b", "*", "...", "a\nb", ".pidlock-x", "%s"])
def test_every_name_that_a_file_can_have_works(run, tmp_path, name):
    outcome = run("--pidfile=%s" % name, "--", "sh", "-c", 'cat "$PIDLOCK_PIDFILE" | wc -l; ls -A', cwd=tmp_path)
    assert (outcome.status, outcome.stdout.split("\n", 1)[0].strip(), outcome.stderr) == (0, "3", "")
    assert os.listdir(tmp_path) == []


@blackbox
def test_missing_parents_are_made(run, tmp_path):
    path = tmp_path / "a" / "b" / "test.pid"
    command = ["sh", "-c", 'umask 022; exec "$@"', "sh", *PIDLOCK, "-p", path, "--", "true"]
    assert subprocess.run(command, timeout=60).returncode == 0
    modes = [stat.S_IMODE(directory.stat().st_mode) for directory in (tmp_path / "a", tmp_path / "a" / "b")]
    assert modes == [0o755, 0o755] and os.listdir(path.parent) == []


@blackbox
def test_a_probe_makes_no_parents(run, tmp_path):
    assert run("-p", tmp_path / "a" / "b" / "test.pid", "--check") == (0, "", "")
    assert os.listdir(tmp_path) == []


@blackbox
def test_a_parent_may_be_a_link(run, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert run("-p", tmp_path / "link" / "test.pid", "--", "ls", tmp_path / "real") == (0, "test.pid\n", "")
    assert os.listdir(tmp_path / "real") == []


@blackbox
def test_a_run_and_a_probe_mean_the_same_file_behind_a_link(run, tmp_path):
    """Catches os.path.abspath(), which takes link/.. for the directory of the link."""
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/sub")
    path = "%s/link/../test.pid" % tmp_path
    assert run("-p", path, "--", *PIDLOCK, "-p", path, "--check") == (1, "", "")
    assert run("-p", path, "--", *PIDLOCK, "-p", tmp_path / "real" / "test.pid", "--check") == (1, "", "")


@blackbox
def test_a_relative_path_is_the_one_where_pidlock_started(run, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "test.pid").write_text("another's\n")
    assert run("-p", "test.pid", "--", "sh", "-c", "cd sub; ls ..", cwd=tmp_path) == (0, "sub\ntest.pid\n", "")
    assert [path.name for path in tmp_path.rglob("*.pid")] == ["test.pid"] and not (tmp_path / "test.pid").exists()


def test_a_later_chdir_does_not_move_the_lock(tmp_path, monkeypatch):
    """Catches a release that looks at the relative path."""
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    lock = pidlock.PidLock("test.pid").acquire()
    monkeypatch.chdir(tmp_path / "sub")
    (tmp_path / "sub" / "test.pid").write_text("another's\n")
    assert (lock.path, lock.release()) == (str(tmp_path / "test.pid"), True)
    assert [path.name for path in sorted(tmp_path.rglob("*.pid"))] == ["test.pid"]
    assert (tmp_path / "sub" / "test.pid").read_text() == "another's\n"


# ---- Who does not get it changes nothing; who loses it says so ----


@blackbox
@pytest.mark.parametrize("who", ["a pidlock", "another program", "somebody who writes it just now"])
@RUN_AND_CHECK
def test_a_contender_that_finds_it_held_has_written_nothing(run, holder, pidfile, who, probe):
    if who == "a pidlock":
        holder("-p", pidfile)
    else:
        pidfile.write_text("%d\n" % os.getpid() if who == "another program" else "")
    before = snapshot(pidfile.parent), pidfile.read_bytes()
    status = run("-q", "-p", pidfile, *probe).status
    assert (status, (snapshot(pidfile.parent), pidfile.read_bytes())) == (1 if probe == ["--check"] else 75, before)


@blackbox
def test_a_probe_of_a_stale_file_has_written_nothing(run, pidfile, dead_pid):
    pidfile.write_text("%d\n" % dead_pid)
    before = snapshot(pidfile.parent)
    assert (run("-p", pidfile, "--check").status, snapshot(pidfile.parent)) == (0, before)


@blackbox
@pytest.mark.parametrize("script, left", [
    ('rm "$0"', []),
    ('rm "$0"; rmdir ../sub', None),
    ('echo other > new; mv new "$0"', ["test.pid"]),
    ('rm "$0"; echo other > "$0"', ["test.pid"]),
    ('mv "$0" moved; ln -s moved "$0"', ["moved", "test.pid"]),
    ('rm "$0"; mkdir "$0"', ["test.pid"]),
], ids=["removed", "directory removed", "renamed over", "made anew", "moved and linked", "a directory now"])
def test_a_lost_lock_is_one_line_and_the_status_stays_the_commands(run, tmp_path, script, left):
    """Catches a release without the ownership check, and one that looks through links."""
    directory = tmp_path / "sub"
    directory.mkdir()
    path = directory / "test.pid"
    what = "lost: the file was removed or replaced while the command ran; find out who did that"
    outcome = run("-p", path, "--", "sh", "-c", script + "; exit 7", path, cwd=directory)
    assert outcome == (7, "", "pidlock: %s: %s\n" % (path, what))
    assert (sorted(os.listdir(directory)) if directory.exists() else None) == left
    if path.is_file() and not path.is_symlink():
        assert path.read_text() == "other\n"


@blackbox
def test_another_holders_file_survives_the_loser(run, pidfile):
    script = 'rm "$0"; exec "$@"'
    inner = [*PIDLOCK, "-p", pidfile, "--", "sh", "-c", "kill -KILL $PPID"]  # leaves its file behind
    status, _, stderr = run("-p", pidfile, "--", "sh", "-c", script, pidfile, *inner)
    assert (status, "lost" in stderr, pidfile.read_bytes()[-3:]) == (137, True, b"\n\n\n")


# ---- The lock's descriptor ----

# Tells by shell built-ins alone, which open nothing, what is open and which of it is the pidfile.
REPORT = """
seen=
for n in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31; do
    if [ /proc/$$/fd/$n -ef "$PIDLOCK_PIDFILE" ]; then seen="$seen lock:$n"
    elif [ -e /proc/$$/fd/$n ]; then seen="$seen $n"
    fi
done
echo $seen"""
ON_PROC = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="looks into /proc")


def report_descriptors(tmp_path, prefix, *options):
    """Run the reporter under pidlock, both started through this line of shell; return what it saw."""
    report = tmp_path / "report"
    command = ["sh", "-c", prefix + '; exec "$@"', "sh", *PIDLOCK, "-p", tmp_path / "test.pid", *options]
    status = subprocess.run(command + ["--", "sh", "-c", REPORT + ' > "$0"', report], timeout=60).returncode
    return status, report.read_text().split(), (tmp_path / "test.pid").exists()


@blackbox
@ON_PROC
@pytest.mark.parametrize("closed", [
    closed for count in range(4) for closed in itertools.combinations((0, 1, 2), count)
], ids=lambda closed: "closed %s" % (closed,))
def test_the_command_gets_the_descriptors_of_the_start_and_the_locks_above_them(tmp_path, closed):
    """Catches a lock, or anything else, that slips into a closed 0, 1 or 2."""
    prefix = "exec " + " ".join("%d>&-" % number for number in closed)
    expected = [str(number) for number in (0, 1, 2) if number not in closed] + ["lock:10"]
    assert report_descriptors(tmp_path, prefix) == (0, expected, False)


@blackbox
@ON_PROC
@pytest.mark.parametrize("option", ["-o", "--close"])
def test_close_keeps_the_locks_descriptor_from_the_command(tmp_path, option):
    assert report_descriptors(tmp_path, "exec 2>&-", option) == (0, ["0", "1"], False)


@blackbox
@ON_PROC
def test_descriptors_from_the_caller_pass_through(tmp_path):
    prefix = "exec 3</dev/null 7</dev/null"
    assert report_descriptors(tmp_path, prefix) == (0, ["0", "1", "2", "3", "7", "lock:10"], False)


@blackbox
@ON_PROC
@pytest.mark.parametrize("redirection, standard", [("", b"0 1 2"), ("<&-", b"1 2"), ("<&- 2>&-", b"1")])
@pytest.mark.parametrize("limit", [6, 10])
def test_under_a_tiny_descriptor_limit_the_lock_is_at_3_or_above(pidfile, limit, redirection, standard):
    """Catches a lock that stays in a closed 0 or 2 where there is no descriptor 10."""
    prefix = 'exec %s; ulimit -n "$0"; exec "$@"' % redirection
    command = ["sh", "-c", prefix, str(limit), *PIDLOCK, "-p", pidfile, "--", "sh", "-c", REPORT]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout, pidfile.exists()) == (0, standard + b" lock:3\n", False)


def test_no_descriptor_left_is_a_pidlock_error_and_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    before = os.listdir("/proc/self/fd")
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        with pytest.raises(pidlock.PidLockError, match="Too many open files; raise the limit of open files"):
            pidlock.PidLock(tmp_path / "test.pid").acquire()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (os.listdir(tmp_path), os.listdir("/proc/self/fd")) == ([], before)


def test_each_failed_step_gives_its_descriptors_back(tmp_path):
    for _, make, _ in NO_PIDFILES:
        directory = pathlib.Path(tempfile.mkdtemp(dir=tmp_path))
        make(directory / "test.pid")
        before = os.listdir("/proc/self/fd")
        with pytest.raises(pidlock.PidLockError):
            pidlock.PidLock(directory / "test.pid").acquire()
        assert os.listdir("/proc/self/fd") == before

"""--sweep and sweep(): what a crash left goes, and nothing else, whatever else goes on in the directory."""
import json
import os
import re
import stat
import subprocess
import sys
import time

import pytest
from children.extras_variants import load, write_variant
from conftest import CHILDREN, ROOT
from test_paths import IS_ROOT, make_socket, make_sparse, snapshot
from test_races import Contender

import pidlock
from pidlock import PidLockError

blackbox = pytest.mark.blackbox
needs_hooks = pytest.mark.skipif(sys.version_info < (3, 8), reason="contenders stop at audit events (Python 3.8)")


PRIVATE = ".pidlock-0123456789abcdef"
OLD = time.time() - 60


def put(path, body=b"", when=OLD):
    path.write_bytes(body)
    os.utime(path, (when, when))
    return path


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


# ---- What goes ----


STALE = [b"%d\n\n\n", b"%d\n\n\nlimit=3\n", b"0%d\n\n\n", b"%d\n\n\nhost=elsewhere\nboot=another\n"]
LEFT = {  # what kill -9 leaves under a private name
    "nothing yet": b"", "a partial record": b"42", "a PID": b"4231\n", "a record": b"4231\n\n\n",
    "a record with details": b"4231\n\n\nhost=here\ncommand=backup\n", "a counter": b"%020d\n" % 0,
    "metrics": b"# HELP pidlock_runs_total Runs that got the lock.\n" * 9,
}


@blackbox
@pytest.mark.parametrize("body", STALE)
def test_stale_files_with_the_mark_are_removed_and_named(run, tmp_path, dead_pid, body):
    for name in ("b.pid", "a b", "b.pid.2", ".hidden"):
        put(tmp_path / name, body % dead_pid)
    lines = "".join("%s/%s\n" % (tmp_path, name) for name in (".hidden", "a b", "b.pid", "b.pid.2"))
    assert run("--sweep", tmp_path) == (0, lines, "")
    assert names_in(tmp_path) == []


@blackbox
def test_a_stale_file_goes_whatever_its_age_and_though_its_pid_lives_again(run, tmp_path):
    put(tmp_path / "new", b"%d\n\n\n" % os.getpid(), time.time())
    put(tmp_path / "old", b"%d\n\n\n" % os.getpid(), 0)
    assert run("--sweep", tmp_path).stdout.split() == ["%s/new" % tmp_path, "%s/old" % tmp_path]


@blackbox
@pytest.mark.parametrize("body", LEFT.values(), ids=LEFT)
def test_private_files_older_than_2_s_are_removed(run, tmp_path, body):
    path = put(tmp_path / PRIVATE, body)
    assert (run("--sweep", tmp_path), names_in(tmp_path)) == ((0, "%s\n" % path, ""), [])


@blackbox
def test_what_a_killed_pidlock_leaves_is_swept(run, holder, tmp_path):
    """Both names of it, when it was killed between link and unlink."""
    killed = holder("-p", tmp_path / "test.pid")
    killed.kill_wrapper()
    os.link(tmp_path / "test.pid", tmp_path / PRIVATE)
    os.utime(tmp_path / PRIVATE, (OLD, OLD))
    spared = run("--sweep", tmp_path)
    killed.finish()
    assert spared == (0, "", "")
    assert run("--sweep", tmp_path).stdout.split() == ["%s/%s" % (tmp_path, PRIVATE), "%s/test.pid" % tmp_path]


@blackbox
def test_a_dry_run_tells_the_same_and_removes_nothing(run, tmp_path, dead_pid):
    for name in ("b.pid", "a.pid"):
        put(tmp_path / name, b"%d\n\n\n" % dead_pid)
    put(tmp_path / PRIVATE)
    put(tmp_path / "data", b"%d\n" % dead_pid)
    before = snapshot(tmp_path)
    dry = run("--sweep", tmp_path, "--dry-run")
    assert (snapshot(tmp_path), run("--sweep", tmp_path)) == (before, dry)
    assert (len(dry.stdout.splitlines()), names_in(tmp_path)) == (3, ["data"])


@blackbox
def test_a_name_cannot_drive_the_terminal(run, tmp_path, dead_pid):
    put(tmp_path / "a\n\x1b[2J", b"%d\n\n\n" % dead_pid)
    assert run("--sweep", tmp_path).stdout == "%s/a\\n\\x1b[2J\n" % tmp_path


def test_the_library_returns_the_paths_sorted(tmp_path, dead_pid):
    for name in ("b", "c", "a"):
        put(tmp_path / name, b"%d\n\n\n" % dead_pid)
    put(tmp_path / "data", b"no pidfile\n")
    assert pidlock.sweep(os.fsencode(tmp_path)) == [str(tmp_path / name) for name in "abc"]
    assert pidlock.sweep(tmp_path) == []


# ---- What stays ----

SOMEBODYS = {
    "an unmarked PID": lambda path, dead: put(path, b"%d\n" % dead),
    "an unmarked PID with one blank line": lambda path, dead: put(path, b"%d\n\n" % dead),
    "a text below two blank lines": lambda path, dead: put(path, b"%d\n\n\nIt was a dark and stormy night.\n" % dead),
    "a third blank line": lambda path, dead: put(path, b"%d\n\n\n\nx\n" % dead),
    "an unmarked PID with a line behind it": lambda path, dead: put(path, b"%d\n\nx\n" % dead),
    "another tool's marker": lambda path, dead: put(path, b"pid=%d\n\n\n" % dead),
    "a mark behind no PID": lambda path, dead: put(path, b"\n\n\n"),
    "a mark behind 0": lambda path, dead: put(path, b"0\n\n\n"),
    "a mark behind blanks": lambda path, dead: put(path, b" %d\n\n\n" % dead),
    "an empty file": lambda path, dead: put(path),
    "NULs": lambda path, dead: put(path, b"\0" * 4096),
    "garbage": lambda path, dead: put(path, b"garbage\n"),
    "data": lambda path, dead: put(path, b"a line of data\n" * 9),
    "1 GB of nothing": lambda path, dead: make_sparse(path),
    "1 GB behind a mark": lambda path, dead: make_sparse(path, "%d\n\n\n" % dead),
    "a script": lambda path, dead: path.write_text("#!/bin/sh\n") and path.chmod(0o755),
    "a counter": lambda path, dead: put(path, b"%020d\n" % 7),
    "a directory": lambda path, dead: path.mkdir(),
    "a FIFO": lambda path, dead: os.mkfifo(path),
    "a socket": lambda path, dead: make_socket(path),
    "a dangling link": lambda path, dead: path.symlink_to("nowhere"),
    "a link to itself": lambda path, dead: path.symlink_to(path),
}


@blackbox
@pytest.mark.parametrize("make", SOMEBODYS.values(), ids=SOMEBODYS)
def test_somebody_elses_file_is_left_alone(run, tmp_path, dead_pid, make):
    """Red when any file whose PID is dead goes, when all that a dead FILE.fence may be goes, when a FIFO is opened."""
    make(tmp_path / "test.pid", dead_pid)
    before = snapshot(tmp_path)
    assert (run("--sweep", tmp_path, timeout=30), snapshot(tmp_path)) == ((0, "", ""), before)


@blackbox
@pytest.mark.skipif(not IS_ROOT, reason="needs root to make a device")
def test_a_device_is_left_alone(run, tmp_path):
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.mknod(tmp_path / PRIVATE, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    before = snapshot(tmp_path)
    assert (run("--sweep", tmp_path), snapshot(tmp_path)) == ((0, "", ""), before)


@blackbox
@pytest.mark.parametrize("make", [
    lambda path: path.mkdir(), os.mkfifo, make_socket, lambda path: path.symlink_to("stale"),
], ids=["a directory", "a FIFO", "a socket", "a link"])
def test_only_a_regular_file_is_a_private_one(run, tmp_path, make):
    make(tmp_path / PRIVATE)
    os.utime(tmp_path / PRIVATE, (OLD, OLD), follow_symlinks=False)
    before = snapshot(tmp_path)
    assert (run("--sweep", tmp_path, timeout=30), snapshot(tmp_path)) == ((0, "", ""), before)


@blackbox
def test_a_link_to_a_stale_file_elsewhere_is_left_alone_and_so_is_that(run, tmp_path, dead_pid):
    (tmp_path / "here").mkdir()
    put(tmp_path / "stale", b"%d\n\n\n" % dead_pid)
    (tmp_path / "here" / "test.pid").symlink_to("../stale")
    before = snapshot(tmp_path), snapshot(tmp_path / "here")
    assert run("--sweep", tmp_path / "here") == (0, "", "")
    assert (snapshot(tmp_path), snapshot(tmp_path / "here")) == before


@blackbox
def test_directories_below_are_not_swept(run, tmp_path, dead_pid):
    (tmp_path / "below").mkdir()
    put(tmp_path / "below" / "test.pid", b"%d\n\n\n" % dead_pid)
    assert (run("--sweep", tmp_path), names_in(tmp_path / "below")) == ((0, "", ""), ["test.pid"])


@blackbox
@pytest.mark.parametrize("name", [
    ".pidlock-", ".pidlock-0123456789abcde", ".pidlock-0123456789abcdeff", ".pidlock-0123456789ABCDEF",
    ".pidlock-0123456789abcdeg", "pidlock-0123456789abcdef", ".pidlock-0123456789abcdef.bak",
])
def test_a_name_that_only_looks_private_is_somebodys(run, tmp_path, name):
    put(tmp_path / name, b"data\n")
    assert (run("--sweep", tmp_path), names_in(tmp_path)) == ((0, "", ""), [name])


@pytest.mark.parametrize("age, swept", [(60, True), (2.2, True), (1, False), (0, False), (-1, False), (-60, True)])
def test_a_private_file_younger_than_2_s_is_spared(tmp_path, age, swept):
    put(tmp_path / PRIVATE, when=time.time() - age)
    assert pidlock.sweep(tmp_path) == [str(tmp_path / PRIVATE)] * swept


@blackbox
@pytest.mark.parametrize("options", [(), ("--max-concurrent", "2"), ("--details",)])
def test_a_living_lock_is_spared_whatever_its_age(run, holder, tmp_path, options):
    for _ in range(2 if "2" in options else 1):
        holder("-p", tmp_path / "test.pid", *options)
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    before = snapshot(tmp_path)
    assert (run("--sweep", tmp_path), snapshot(tmp_path)) == ((0, "", ""), before)


# ---- Races ----


@needs_hooks
def test_a_sweeper_does_not_open_a_fifo_that_replaced_a_file(tmp_path):
    """Red with a plain open(), which waits there for a writer."""
    path = put(tmp_path / "test.pid", b"data\n")
    arguments = [str(ROOT / "pidlock.py"), str(path), "sweep", "open:test.pid"]
    sweeper = Contender([sys.executable, "-S", str(CHILDREN / "race_stop_at.py"), *arguments])
    try:
        path.unlink()
        os.mkfifo(path)
        assert (sweeper.said, sweeper.go().split(":")[0], names_in(tmp_path)) == ("at open", "error", ["test.pid"])
    finally:
        sweeper.end()


def storm_under_sweeps(sweep, directory):
    """Return the figures of a storm from stale files, while the directory is swept all the time."""
    arguments = [ROOT / "pidlock.py", directory, "marked", "30", "1", "0"]
    process = subprocess.Popen([sys.executable, CHILDREN / "stress_storm.py", *arguments], stdout=subprocess.PIPE)
    sweeps = 0
    while process.poll() is None:
        sweep(directory)
        sweeps += 1
        time.sleep(0.0005)
    assert sweeps > 20
    return json.loads(process.communicate(timeout=60)[0].decode())


def test_sweeping_all_the_time_through_a_storm_takes_no_living_lock(tmp_path):
    figures = storm_under_sweeps(pidlock.sweep, tmp_path)
    assert [figures[name] for name in ("overlaps", "lost_updates", "released_lost", "errors", "left")] == \
        [0, 0, 0, [], []]


def test_the_storm_notices_a_sweep_without_flock(tmp_path, tmp_path_factory):
    broken = load(write_variant("sweep without flock", tmp_path_factory.mktemp("variant")))

    def sweep(directory):
        try:
            broken.sweep(directory)
        except broken.PidLockError:
            pass  # it was gone already

    assert storm_under_sweeps(sweep, tmp_path)["released_lost"] > 0


# ---- What cannot be swept ----


@blackbox
@pytest.mark.parametrize("name, problem", [
    ("missing", "No such file or directory"), ("file", "Not a directory"),
    ("loop", "Too many levels of symbolic links"), ("x" * 300, "File name too long"),
])
def test_what_is_no_directory_is_125_with_a_line(run, tmp_path, name, problem):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    before = snapshot(tmp_path)
    status, stdout, stderr = run("--sweep", tmp_path / name)
    assert (status, stdout, snapshot(tmp_path)) == (125, "", before)
    assert re.fullmatch("pidlock: %s: cannot sweep it: %s; .+\n" % (re.escape(str(tmp_path / name)), problem), stderr)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_the_library_raises_for_what_is_no_directory(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(PidLockError, match="cannot sweep it"):
        pidlock.sweep(tmp_path / name)


@blackbox
@pytest.mark.parametrize("arguments", [
    ("--sweep", ""), ("--sweep",), ("--sweep", ".", "true"), ("--sweep", ".", "--", "true"),
    ("--sweep", ".", "--check"), ("--sweep", ".", "-p", "x"), ("--sweep", ".", "--wait", "1"),
    ("--dry-run", "-p", "x", "true"), ("--dry-run",),
])
def test_options_that_do_not_belong_to_a_sweep_are_wrong_usage(run, tmp_path, arguments):
    put(tmp_path / PRIVATE)
    status, stdout, stderr = run(*arguments, cwd=tmp_path)
    assert (status, stdout, "pidlock: error: " in stderr, names_in(tmp_path)) == (2, "", True, [PRIVATE])


@blackbox
def test_a_directory_that_one_may_not_list_is_125(run_as_nobody, public_directory):
    public_directory.chmod(0o711)
    line = "pidlock: %s: cannot sweep it: Permission denied; " % public_directory
    status, stdout, stderr = run_as_nobody("--sweep", public_directory)
    assert (status, stdout, stderr.startswith(line), stderr.count("\n")) == (125, "", True, 1)


@blackbox
def test_files_that_one_may_not_remove_are_said_after_the_others_were_swept(run_as_nobody, public_directory, dead_pid):
    public_directory.chmod(0o1777)
    for name, owner in (("a.pid", 0), ("b.pid", 65534), ("c.pid", 0), (PRIVATE, 0), (PRIVATE[:-1] + "0", 65534)):
        os.chown(put(public_directory / name, b"%d\n\n\n" % dead_pid), owner, owner)
    status, stdout, stderr = run_as_nobody("--sweep", public_directory)
    mine = [str(public_directory / name) for name in (PRIVATE[:-1] + "0", "b.pid")]
    assert (status, stdout.split()) == (125, mine)
    line = r"^pidlock: %s/([^/:\n]*): .*: Operation not permitted; .+$" % public_directory
    assert re.findall(line, stderr, re.MULTILINE) == [PRIVATE, "a.pid", "c.pid"]
    assert names_in(public_directory) == [PRIVATE, "a.pid", "c.pid"]


@blackbox
def test_files_that_one_may_not_read_are_somebodys(run_as_nobody, public_directory, dead_pid):
    public_directory.chmod(0o777)
    put(public_directory / "test.pid", b"%d\n\n\n" % dead_pid).chmod(0o600)
    assert run_as_nobody("--sweep", public_directory) == (0, "", "")
    assert names_in(public_directory) == ["test.pid"]


def test_a_library_sweep_raises_the_first_failure_after_the_rest(tmp_path, dead_pid, monkeypatch):
    """A directory's file flags would do as well, but not on every filesystem: unlink(2) itself fails here."""
    for name in "abc":
        put(tmp_path / name, b"%d\n\n\n" % dead_pid)
    unlink = os.unlink

    def fail_for_a(path):
        if os.path.basename(path) == "a":
            raise OSError(30, "Read-only file system")
        unlink(path)

    monkeypatch.setattr(os, "unlink", fail_for_a)
    with pytest.raises(PidLockError, match="/a: cannot sweep it: Read-only"):
        pidlock.sweep(tmp_path)
    assert names_in(tmp_path) == ["a"]

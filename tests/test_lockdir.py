"""LockDir: a directory of locks, one for each name, with defaults of its own."""
import os
import subprocess
import sys

import pytest
from conftest import ROOT

import pidlock
from pidlock import LockDir, LockHeld, PidLock, PidLockError


def test_a_lock_is_the_file_of_its_name(tmp_path):
    with LockDir(tmp_path).lock("backup") as lock:
        assert isinstance(lock, PidLock) and lock.path == str(tmp_path / "backup.lock")
        assert os.listdir(tmp_path) == ["backup.lock"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("directory", [str, os.fsencode, lambda path: path], ids=["str", "bytes", "path"])
def test_a_directory_is_whatever_names_one(tmp_path, directory):
    assert LockDir(directory(tmp_path)).lock("a").path == str(tmp_path / "a.lock")


def test_two_of_one_name_exclude_each_other_and_two_names_do_not(tmp_path):
    one, other = LockDir(tmp_path), LockDir(tmp_path)
    with one.lock("a"), other.lock("b"), pytest.raises(LockHeld):
        other.lock("a").acquire()


def test_a_missing_directory_is_made_by_the_first_lock_and_not_before(tmp_path):
    locks = LockDir(tmp_path / "run" / "locks")
    lock = locks.lock("a")
    assert os.listdir(tmp_path) == []
    with lock:
        assert os.listdir(tmp_path / "run" / "locks") == ["a.lock"]


# ---- Defaults: the library's, then the directory's, then the call's ----

LIMITS = [  # the directory's default, the call's override, how many may hold it
    ({}, {}, 1), ({"max_concurrent": 2}, {}, 2), ({}, {"max_concurrent": 2}, 2),
    ({"max_concurrent": 3}, {"max_concurrent": 2}, 2), ({"max_concurrent": 3}, {"max_concurrent": 1}, 1),
    ({"wait": 0, "max_concurrent": 2}, {"wait": 0}, 2),
]


@pytest.mark.parametrize("defaults, overrides, limit", LIMITS)
def test_an_override_wins_over_the_directorys_default_and_that_over_the_librarys(tmp_path, defaults, overrides, limit):
    locks = LockDir(tmp_path, **defaults)
    held = [locks.lock("a", **overrides).acquire() for _ in range(limit)]
    with pytest.raises(LockHeld):
        locks.lock("a", **overrides).acquire()
    assert all(lock.release() for lock in held)


def test_an_override_is_one_locks_alone(tmp_path):
    locks = LockDir(tmp_path, mode=0o600)
    modes = []
    for overrides in ({"mode": 0o640}, {}):
        with locks.lock("a", **overrides) as lock:
            modes.append(os.stat(lock.path).st_mode & 0o777)
    assert modes == [0o640, 0o600]


def test_every_argument_of_a_lock_may_be_a_default(tmp_path):
    events = []
    defaults = {"wait": 1, "stale_after": 60, "stale_strategy": "pid-only", "max_concurrent": 2, "details": True,
                "fence": True, "trace_id": "abc", "mode": 0o600, "on_event": events.append, "span": None}
    with LockDir(tmp_path, **defaults).lock("a") as lock:
        assert lock.token and os.path.exists(tmp_path / "a.lock.fence")
    assert [(event["event"], event["trace_id"]) for event in events] == [("acquired", "abc"), ("released", "abc")]


@pytest.mark.parametrize("wrong, error", [({"wait": -1}, ValueError), ({"max_concurrent": 0}, ValueError),
                                          ({"stale_strategy": "never"}, ValueError), ({"patience": 1}, TypeError)])
def test_a_default_that_cannot_be_meant_is_said_no_later_than_by_the_first_lock(tmp_path, wrong, error):
    with pytest.raises(error):
        LockDir(tmp_path, **wrong).lock("a")
    with pytest.raises(error):
        LockDir(tmp_path).lock("a", **wrong)


# ---- Names ----


@pytest.mark.parametrize("name", ["", ".", "..", "/", "/etc/passwd", "../a", "a/b", "a/", "./a", "a/../b", "a\0b"])
def test_a_name_that_leaves_the_directory_is_a_value_error(tmp_path, name):
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="name: "):
        LockDir(tmp_path).lock(name)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["a", "...", ".a", "..a", "a..", "a b", "-x", "é", "a\n", "*", "%s", "x" * 250])
def test_every_other_name_works(tmp_path, name):
    with LockDir(tmp_path).lock(name):
        assert os.listdir(tmp_path) == [name + ".lock"]


def test_a_name_longer_than_names_get_is_an_error_that_says_so(tmp_path):
    with pytest.raises(PidLockError, match="File name too long"):
        LockDir(tmp_path).lock("x" * 251).acquire()


# ---- Many in one directory ----


CRON = """
import sys
sys.path.insert(0, sys.argv[1])
import pidlock
try:
    with pidlock.LockDir(sys.argv[2]).lock(sys.argv[3]) as lock:
        print("ran", flush=True)
        sys.stdin.readline()
        print("lost" if not lock.release() else "released")
except pidlock.LockHeld as held:
    print("held by", held.pid)
"""


def test_28_singletons_share_a_directory_and_none_runs_twice(tmp_path):
    def start(number):
        command = [sys.executable, "-S", "-c", CRON, str(ROOT), str(tmp_path / "locks"), "job%d" % number]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, universal_newlines=True)

    jobs = [start(number) for number in range(28)]
    assert [job.stdout.readline() for job in jobs] == ["ran\n"] * 28
    assert sorted(os.listdir(tmp_path / "locks")) == sorted("job%d.lock" % number for number in range(28))
    for number, job in enumerate(jobs):
        with pytest.raises(LockHeld) as held:
            LockDir(tmp_path / "locks").lock("job%d" % number).acquire()
        assert held.value.pid == job.pid
    assert LockDir(tmp_path / "locks").sweep() == []
    for job in jobs[::2]:
        job.kill()
        job.wait()
    swept = LockDir(tmp_path / "locks").sweep()
    assert swept == sorted(str(tmp_path / "locks" / ("job%d.lock" % number)) for number in range(0, 28, 2))
    assert [job.communicate("\n", timeout=60)[0] for job in jobs[1::2]] == ["released\n"] * 14
    for job in jobs[::2]:
        job.communicate()
    assert os.listdir(tmp_path / "locks") == []


def test_its_sweep_is_pidlocks_sweep_of_that_directory(tmp_path, dead_pid):
    for name in ("a.lock", "b.pid"):
        (tmp_path / name).write_text("%d\n\n\n" % dead_pid)
    (tmp_path / "c.lock").write_text("%d\n" % dead_pid)
    locks = LockDir(tmp_path)
    with locks.lock("d"):
        assert locks.sweep() == [str(tmp_path / "a.lock"), str(tmp_path / "b.pid")]
        assert sorted(os.listdir(tmp_path)) == ["c.lock", "d.lock"]
    with pytest.raises(PidLockError, match="cannot sweep it"):
        LockDir(tmp_path / "missing").sweep()


def test_a_relative_directory_is_the_one_where_the_lock_is_taken(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    lock = LockDir("locks").lock("a").acquire()
    monkeypatch.chdir(tmp_path / "sub")
    assert (lock.path, lock.release(), os.listdir(tmp_path / "locks")) == (str(tmp_path / "locks" / "a.lock"), True, [])


def test_lockdir_and_sweep_are_public():
    assert {"LockDir", "sweep"} <= set(pidlock.__all__)

"""Installed by make, pidlock is the one file, what starts it, its man page and its completions."""
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

INSTALLED = {
    "bin/pidlock": 0o755,
    "lib/pidlock/pidlock.py": 0o644,
    "lib/pidlock/__pycache__/pidlock.%s.pyc" % sys.implementation.cache_tag: 0o644,
    "share/bash-completion/completions/pidlock": 0o644,
    "share/fish/vendor_completions.d/pidlock.fish": 0o644,
    "share/man/man1/pidlock.1": 0o644,
    "share/zsh/site-functions/_pidlock": 0o644,
}
READY = "%s/ready" % sys.prefix  # the tests have their venv, whatever make would think of it


def make(*arguments, root=ROOT, **options):
    """Make a target with the venv that runs the tests; give a BUILD where it generates anything."""
    command = ["make", "-s", "-C", root, "VENV=%s" % sys.prefix, "-o", READY, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def installed_in(directory):
    """Return {path: mode} of the files there, and the modes of all directories."""
    paths = sorted(directory.rglob("*"))
    modes = {str(path.relative_to(directory)): path.stat().st_mode & 0o7777 for path in paths if path.is_file()}
    return modes, {path.stat().st_mode & 0o7777 for path in paths if path.is_dir()}


def snapshot(directory):
    return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
            for path in directory.rglob("*")}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("install") / "a prefix"
    make("install", "PREFIX=%s" % prefix, "PYTHON=%s" % sys.executable, "BUILD=%s" % (prefix.parent / "build"))
    return prefix


def test_make_install_makes_a_command_that_runs(prefix, tmp_path):
    command = [prefix / "bin" / "pidlock", "--pidfile", tmp_path / "a.pid", "--", "echo", "hello"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"hello\n", b"")


def test_the_installed_command_passes_its_self_test(prefix):
    done = subprocess.run([prefix / "bin" / "pidlock", "--self-test"], stdout=subprocess.PIPE, cwd="/")
    assert done.returncode == 0 and done.stdout.endswith(b" passed, 0 failed\n")


def test_the_installed_command_imports_nothing_from_pythonpath(prefix, tmp_path):
    """Red where it is started without -I: root's cron would run whatever select.py lies there."""
    (tmp_path / "select.py").write_text("print('mine')")
    done = subprocess.run([prefix / "bin" / "pidlock", "--version"], stdout=subprocess.PIPE, cwd=str(tmp_path),
                          env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout.startswith(b"pidlock ")


def test_the_installed_command_is_compiled_already(prefix):
    """Red without compileall: python -v tells which compiled file it found to match its source."""
    command = [sys.executable, "-v", "-IS", prefix / "bin" / "pidlock", "--version"]
    told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE).stderr.decode()
    assert re.search(r"pidlock\.cpython-\w+\.pyc matches %s" % re.escape(str(prefix)), told)


@pytest.mark.parametrize("at_the_start, outcome", [
    ("", (-signal.SIGINT, b"", b"")), ("trap '' INT; ", (0, b"started\n", b"")),
], ids=["default", "ignored"])
def test_a_ctrl_c_while_the_command_starts_ends_it_without_a_traceback(tmp_path, at_the_start, outcome):
    """Red without the launcher's lines on SIGINT, and where they are not for default_int_handler alone."""
    make("install-command", "PREFIX=%s" % tmp_path, "PYTHON=%s" % sys.executable)
    slow_start = "import os\nos.kill(os.getpid(), %d)\ndef run_as_process(): print('started')\n" % signal.SIGINT
    (tmp_path / "lib" / "pidlock" / "pidlock.py").write_text(slow_start)
    command = ["sh", "-c", at_the_start + 'exec "$0"', tmp_path / "bin" / "pidlock"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == outcome


def test_a_staged_install_is_complete_and_readable_and_knows_nothing_of_the_stage(tmp_path):
    """Red where compileall runs under root's umask 077: everybody's start would compile anew."""
    stage = tmp_path / "stage"
    make("install", "DESTDIR=%s" % stage, "PREFIX=/opt/with blank", "PYTHON=%s" % sys.executable,
         "BUILD=%s" % (tmp_path / "build"), umask=0o077)
    stage.chmod(0o755)
    there = stage / "opt" / "with blank"
    assert installed_in(there) == (INSTALLED, {0o755})
    assert sorted(path.name for path in stage.rglob("*") if not path.is_relative_to(there)) == ["opt"]
    assert [path for path in there.rglob("*") if path.is_file() and bytes(stage) in path.read_bytes()] == []
    assert b'"/opt/with blank/lib/pidlock"' in (there / "bin" / "pidlock").read_bytes()


def test_installed_twice_is_installed_once_and_uninstall_takes_away_that_alone(tmp_path):
    prefix = tmp_path / "usr"
    others = prefix / "bin" / "pidlock-of-others"
    others.parent.mkdir(parents=True)
    others.write_text("")
    options = "PREFIX=%s" % prefix, "PYTHON=%s" % sys.executable, "BUILD=%s" % (tmp_path / "build")
    make("install", *options)
    make("install", *options)
    assert installed_in(prefix)[0] == {**INSTALLED, "bin/pidlock-of-others": 0o644}
    make("uninstall", *options)
    make("uninstall", *options)
    assert [path for path in prefix.rglob("*") if path.is_file()] == [others]


def test_a_relative_prefix_is_refused(tmp_path):
    """The command would import pidlock from wherever it is started."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        make("install-command", "PREFIX=usr", "DESTDIR=%s/" % tmp_path)
    assert b"PREFIX is no absolute path: usr." in refused.value.stderr and os.listdir(tmp_path) == []


def test_install_behind_make_build_writes_nothing_into_the_checkout(tmp_path):
    """So that nothing there is root's behind `sudo make install`."""
    checkout = tmp_path / "checkout"
    ignore = shutil.ignore_patterns(".git", ".venv", "build", "dist", "tests", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, checkout, ignore=ignore)
    make("build", root=checkout)
    before = snapshot(checkout)
    make("install", "DESTDIR=%s" % (tmp_path / "stage"), "PYTHON=%s" % sys.executable, root=checkout)
    assert snapshot(checkout) == before
    assert installed_in(tmp_path / "stage" / "usr" / "local")[0] == INSTALLED


def test_the_command_alone_is_installed_without_a_venv(tmp_path):
    """Where no registry can be reached, or Python is too old for what the man page is made with."""
    command = ["make", "-s", "-C", ROOT, "VENV=%s" % (tmp_path / "venv"), "PREFIX=%s" % (tmp_path / "usr"),
               "PYTHON=%s" % sys.executable, "install-command"]
    subprocess.run(command, check=True)
    assert sorted(installed_in(tmp_path)[0]) == sorted("usr/" + path for path in INSTALLED if "share" not in path)

"""Installed by make and by pip, pidlock is the one file and what starts it."""
import re
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT


def make(*arguments):
    subprocess.run(["make", "-s", "-C", ROOT, *arguments], check=True, stdout=subprocess.PIPE)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("install") / "usr"
    make("install", "PREFIX=%s" % prefix, "PYTHON=%s" % sys.executable)
    return prefix


def test_make_install_makes_a_command_that_runs(prefix, tmp_path):
    command = [prefix / "bin" / "pidlock", "--pidfile", tmp_path / "a.pid", "--", "echo", "hello"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"hello\n", b"")


def test_the_installed_command_passes_its_self_test(prefix):
    done = subprocess.run([prefix / "bin" / "pidlock", "--self-test"], stdout=subprocess.PIPE, cwd="/")
    assert done.returncode == 0 and done.stdout.endswith(b" passed, 0 failed\n")


def test_the_installed_command_imports_nothing_from_pythonpath(prefix, tmp_path):
    """Red where it is started without -I: root's cron would run whatever argparse.py lies there."""
    (tmp_path / "argparse.py").write_text("print('mine')")
    done = subprocess.run([prefix / "bin" / "pidlock", "--version"], stdout=subprocess.PIPE, cwd=str(tmp_path),
                          env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout.startswith(b"pidlock ")


def test_the_installed_command_is_compiled_already(prefix):
    """Red without compileall: python -v tells which compiled file it found to match its source."""
    command = [sys.executable, "-v", "-IS", prefix / "bin" / "pidlock", "--version"]
    told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE).stderr.decode()
    assert re.search(r"pidlock\.cpython-\w+\.pyc matches %s" % re.escape(str(prefix)), told)


def test_uninstall_takes_all_of_it_away(tmp_path):
    make("install", "DESTDIR=%s" % tmp_path, "PYTHON=%s" % sys.executable)
    installed = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    make("uninstall", "DESTDIR=%s" % tmp_path)
    assert len(installed) == 3 and not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_pip_installs_one_module_and_its_metadata(tmp_path):
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT], check=True, timeout=110)
    (wheel,) = tmp_path.glob("pidlock-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if ".dist-info/" not in name] == ["pidlock.py"]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip[0] = tmp_path / "venv" / "bin" / "python"
    subprocess.run([*pip, "install", "-q", "--no-index", wheel], check=True, timeout=60)
    command = [tmp_path / "venv" / "bin" / "pidlock", "-p", tmp_path / "a.pid", "--", "echo", "hello"]
    assert subprocess.run(command, stdout=subprocess.PIPE).stdout == b"hello\n"

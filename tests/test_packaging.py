"""Built and installed by Python's tools: one module, its metadata and its command; the sdist is all of the project."""
import os
import pathlib
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes

import pytest
from conftest import ROOT

import pidlock

TOOLS = pathlib.Path(sys.prefix) / "bin"


def succeed(*command, **options):
    """Return what a command that succeeds prints on stdout."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=110, **options)
    assert done.returncode == 0, (command, done.stdout.decode(), done.stderr.decode())
    return done.stdout.decode()


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """Builds fetch flit_core, into an environment of their own; pip and uv are told on their own where from."""
    directory = tmp_path_factory.mktemp("flit")
    (directory / "wanted").write_text("flit_core")
    pip = [sys.executable, "-m", "pip", "--timeout", "5", "--retries", "0"]
    for command in (
        [*pip, "download", "-q", "--no-deps", "-r", "wanted"],
        [TOOLS / "uv", "pip", "compile", "-q", "wanted"],
    ):
        asked = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env={**os.environ, "UV_HTTP_TIMEOUT": "5"})
        if asked.returncode:
            pytest.skip("no flit_core from the registry: %s" % asked.stdout.decode().strip().splitlines()[-1])


@pytest.fixture(scope="module")
def built(registry, tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    directory = tmp_path_factory.mktemp("dist")
    succeed(sys.executable, "-m", "build", "--installer", "uv", "--outdir", directory, ROOT)
    return sorted(directory.iterdir(), key=lambda path: path.suffix)


def test_twine_and_check_wheel_contents_find_nothing_wrong(built):
    sdist, wheel = built
    succeed(TOOLS / "twine", "check", "--strict", sdist, wheel)
    assert succeed(TOOLS / "check-wheel-contents", wheel) == "%s: OK\n" % wheel


def test_the_wheel_is_one_module_its_metadata_and_its_command(built):
    with zipfile.ZipFile(built[1]) as wheel:
        info = "pidlock-%s.dist-info/" % pidlock.__version__
        names = [name.replace(info, "") for name in wheel.namelist()]
        assert sorted(names) == ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "pidlock.py"]
        assert wheel.read("pidlock.py") == (ROOT / "pidlock.py").read_bytes()
        assert wheel.read(info + "entry_points.txt").split() == [
            b"[console_scripts]", b"pidlock=pidlock:run_as_process"]
        metadata = message_from_bytes(wheel.read(info + "METADATA"))
    assert (metadata["Version"], metadata["Requires-Python"], metadata.get_all("Requires-Dist")) == (
        pidlock.__version__, ">=3.6", None)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: there is no list to compare with")
def test_the_sdist_has_all_that_git_has_but_its_ignores_and_ci(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
    listed = succeed("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    files = {name for name in listed if (ROOT / name).exists()}
    assert names == files - {".gitignore", ".ci/run"} | {"PKG-INFO"}


def test_the_sdist_makes_an_install(built, tmp_path):
    with tarfile.open(built[0]) as sdist:
        sdist.extractall(tmp_path)
    (root,) = tmp_path.iterdir()
    succeed("make", "-s", "-C", root, "VENV=%s" % sys.prefix, "-o", "%s/ready" % sys.prefix,
            "PREFIX=%s" % (root / "usr"), "PYTHON=%s" % sys.executable, "install")
    assert succeed(root / "usr" / "bin" / "pidlock", "--version") == "pidlock %s\n" % pidlock.__version__


def install_with_pip(directory, environment):
    python = directory / "venv" / "bin" / "python"
    succeed(sys.executable, "-m", "venv", "--without-pip", directory / "venv")
    succeed(sys.executable, "-m", "pip", "--python", python, "install", "-q", ROOT, env=environment)
    return python.with_name("pidlock")


def install_with_pipx(directory, environment):
    places = {"PIPX_HOME": directory / "home", "PIPX_BIN_DIR": directory / "bin", "PIPX_MAN_DIR": directory / "man"}
    succeed(TOOLS / "pipx", "install", "-q", "--python", sys.executable, ROOT,
            env={**environment, **{name: str(path) for name, path in places.items()}})
    return directory / "bin" / "pidlock"


def install_with_uv(directory, environment):
    places = {"UV_TOOL_DIR": directory / "tools", "UV_TOOL_BIN_DIR": directory / "bin"}
    succeed(TOOLS / "uv", "tool", "install", "-q", "--python", sys.executable, "--cache-dir", directory / "cache", ROOT,
            env={**environment, **{name: str(path) for name, path in places.items()}})
    return directory / "bin" / "pidlock"


@pytest.mark.parametrize("install", [install_with_pip, install_with_pipx, install_with_uv],
                         ids=["pip", "pipx", "uv"])
def test_what_is_installed_from_the_checkout_runs_a_command_under_a_lock(registry, tmp_path, install):
    command, path = install(tmp_path, os.environ), tmp_path / "a.pid"
    assert succeed(command, "--version", cwd=tmp_path) == "pidlock %s\n" % pidlock.__version__
    holder, recorded = succeed(command, "-p", path, "--", "sh", "-c", "echo $PPID; head -n 1 %s" % path).split()
    assert holder == recorded and not path.exists()

"""--self-test passes, leaves nothing, and can fail: each broken copy of pidlock.py makes its own line fail."""
import os
import re
import subprocess
import time

import pytest
from conftest import PYTHON, ROOT

pytestmark = pytest.mark.blackbox

SOURCE = (ROOT / "pidlock.py").read_text(encoding="utf-8")


def self_test(script, temporary, *python_options, **environment):
    """Run it with nothing in the environment but TMPDIR and these, from / , in a session of its own."""
    process = subprocess.Popen(
        [PYTHON, *python_options, str(script), "--self-test"], cwd="/",
        env={"TMPDIR": str(temporary), **environment},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True,
        start_new_session=True,
    )
    stdout, stderr = process.communicate(timeout=100)
    return process, stdout.splitlines(), stderr


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    temporary = tmp_path_factory.mktemp("temporary")
    return (*self_test(ROOT / "pidlock.py", temporary, "-W", "error", "-X", "dev"), temporary)


def test_it_passes_anywhere_with_an_empty_environment_and_without_a_warning(good_run):
    process, lines, stderr, _ = good_run
    passed = len(lines) - 1
    assert (process.returncode, lines[-1], stderr) == (0, "%d passed, 0 failed" % passed, "")
    assert passed >= 12 and all(line.startswith("ok ") for line in lines[:-1])


def test_it_leaves_no_file(good_run):
    assert os.listdir(good_run[-1]) == []


def test_it_leaves_no_process(good_run):
    deadline = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):  # init may take a moment to reap an orphan
        while time.monotonic() < deadline:
            os.killpg(good_run[0].pid, 0)
            time.sleep(0.01)


def test_it_works_without_any_variable():
    done = subprocess.run([PYTHON, str(ROOT / "pidlock.py"), "--self-test"], cwd="/", env={}, stdout=subprocess.PIPE)
    assert done.returncode == 0


INTERPRETERS = {
    "without asserts and docstrings": {"PYTHONOPTIMIZE": "2"},
    "warnings are errors": {"PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"},
    "a C locale": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
}


@pytest.mark.parametrize("environment", INTERPRETERS.values(), ids=INTERPRETERS)
def test_it_passes_however_the_interpreter_is_set_up(tmp_path, environment):
    """By variables, not options, so that the pidlocks that it starts are set up so too. Red where a check of the
    lock is an `assert`, or a file is left open."""
    process, lines, stderr = self_test(ROOT / "pidlock.py", tmp_path, **environment)
    assert (process.returncode, lines[-1], stderr) == (0, "%d passed, 0 failed" % (len(lines) - 1), "")


BROKEN = [
    (
        "a blind unlink in an eviction",
        "if not _is_same_file(found.path, found.descriptor):",
        "if False:",
        "an evictor removes only the file that it judged",
    ),
    (
        "a body without the mark",
        'MARK if record.marked else b""',
        'b""',
        "the file holds the PID and the mark, and goes with its holder",
    ),
    (
        "a release without the ownership check",
        "return None if _remove_if_same(path, descriptor) else",
        "return None if os.unlink(path) is None else",
        "release leaves another's lock alone",
    ),
    (
        "an empty young file read as stale",
        "if -WRITING <= facts.age < WRITING:",
        "if False:",
        "a young empty file is not",
    ),
    (
        "no inheritance of the descriptor",
        "os.set_inheritable(lock._descriptor, True)",
        "pass",
        "a killed holder's command keeps the lock until it ends",
    ),
]


@pytest.mark.parametrize("old, new, promise", [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_it_fails_when_the_protocol_is_broken(tmp_path, old, new, promise):
    assert SOURCE.count(old) == 1
    script = tmp_path / "pidlock.py"
    script.write_text(SOURCE.replace(old, new), encoding="utf-8")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process, lines, _ = self_test(script, temporary)
    failed = [line for line in lines if line.startswith("FAIL")]
    assert [line[:len("FAIL " + promise + ":")] for line in failed] == ["FAIL " + promise + ":"]
    assert (process.returncode, bool(re.fullmatch(r"\d+ passed, 1 failed", lines[-1]))) == (1, True)
    assert os.listdir(temporary) == []

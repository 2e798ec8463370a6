"""The command line: what is usage and what is not, what it says and to whom, what the command sees of it."""
import os
import re
import shutil
import subprocess

import pytest
from conftest import OF_THE_TESTS, PIDLOCK

import pidlock

blackbox = pytest.mark.blackbox

HELP = """\
usage: pidlock --pidfile FILE [options] [--] COMMAND [ARG...]
       pidlock --pidfile FILE --check | --status [--json] | --signal SIG
       pidlock --sweep DIR [--dry-run] | --self-test | --version | --help

Run COMMAND under a lock that people can read: a pidfile.

options:
  -p, --pidfile FILE      the lock; missing parent directories are made
  -w, --wait TIME         wait so long: 90, 0.5, 30s, 1h30m, inf
  -E, --held-exit-code N  exit with N, not 75, when it is held
  -q, --quiet             say nothing of held, waiting, taking over
  -v, --verbose           also say acquired and released
  --check                 tell by the exit status whether it is held
  --status                tell who holds it
  --signal SIG            signal the holder, never a stranger
  -h, --help              print this

exit status: the command's own; 128+N when signal N ended it; else 75 held,
  125 pidlock failed, 126 not executable, 127 not found, 2 wrong usage
  --check: 0 free, 1 held, 125 cannot tell; --signal: 0 sent, 3 not held
  --status: 0 held, 1 stale, 3 free, 4 cannot tell

more options:
  -o, --close             keep the lock's descriptor from the command
  -g, --group             run the command in a process group of its own
  --mode MODE             the pidfile's permissions; default 0644
  --stale-after TIME      doubtful holders count as gone after that long
  --stale-strategy S      pid-first, pid-only, time-only
  --max-concurrent N      let N hold it at once
  --details               record who, where, since when and why
  --trace-id ID           recorded; default: the trace of TRACEPARENT
  --fence[=FILE]          take a token; default: FILE.fence
  --log FILE              append events as JSON lines; - is stderr
  --metrics FILE          keep a Prometheus textfile
  --json                  tell it as JSON
  --sweep DIR             remove pidlock's stale files there
  --dry-run               only print what it would remove
  --self-test             test this pidlock on this machine
  --version               print the version

examples:
  pidlock --pidfile /run/backup.pid -- /home/me/backup.sh
  pidlock --pidfile /run/backup.pid --wait 60 -- ./backup.sh
  pidlock --pidfile /run/backup.pid --status
"""

NO_TIME = "argument -w/--wait: %r is no time; try 90, 0.5, 30s, 5m, 1h30m, 2d or inf"
NO_STATUS = "argument -E/--held-exit-code: %r is no exit status; try a number from 0 to 255"
NO_VALUE = "argument %s: its value is missing; one that starts with - is written %s=-..."
NO_MODE = "argument --mode: %r is no mode for a pidfile; try 0644 or 0600"


# ---- Help, version, usage ----


@blackbox
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_the_same_under_every_python(run, option):
    assert run(option, env={**os.environ, "COLUMNS": "40", "FORCE_COLOR": "1"}) == (0, HELP, "")


def test_the_common_part_of_help_fits_on_a_screen_and_all_of_it_on_a_page():
    lines = HELP.splitlines()
    assert lines.index("more options:") <= 24 and len(lines) < 45 and max(map(len, lines)) < 80


@blackbox
def test_version_is_one_line(run):
    assert run("--version") == (0, "pidlock %s\n" % pidlock.__version__, "")


@blackbox
@pytest.mark.parametrize("arguments, problem", [
    ([], "--pidfile FILE is required"),
    (["true", "-p", "FILE"], "--pidfile FILE is required"),
    (["--check"], "--pidfile FILE is required"),
    (["-p"], NO_VALUE % ("-p/--pidfile", "--pidfile")),
    (["-p", "--", "true"], NO_VALUE % ("-p/--pidfile", "--pidfile")),
    (["-p", "-n", "true"], NO_VALUE % ("-p/--pidfile", "--pidfile")),
    (["--trace-id", "-abc", "-p", "FILE", "true"], NO_VALUE % ("--trace-id", "--trace-id")),
    (["-p", "", "true"], "--pidfile: an empty name"),
    (["-p", "FILE"], "no command given"),
    (["-p", "FILE", "--"], "no command given"),
    (["-p", "FILE", "--check", "true"], "--check runs no command"),
    (["--self-test", "true"], "--self-test runs no command"),
    (["-p", "FILE", "--json", "true"], "--json does not go with a command"),
    (["-p", "FILE", "--dry-run", "true"], "--dry-run does not go with a command"),
    (["-p", "FILE", "--check", "--json"], "--json does not go with --check"),
    (["-p", "FILE", "--status", "--held-exit-code", "1"], "--held-exit-code does not go with --status"),
    (["-p", "FILE", "--signal", "TERM", "--stale-after", "5"], "--stale-after does not go with --signal"),
    (["-p", "FILE", "--self-test"], "--pidfile does not go with --self-test"),
    (["-p", "FILE", "--sweep", "."], "--pidfile does not go with --sweep"),
    (["-p", "FILE", "--check", "--sweep", "."], "--sweep does not go with --check"),
    (["--sweep", ""], "--sweep: an empty name"),
    (["-p", "FILE", "--log", "", "true"], "--log: an empty name"),
    (["-p", "FILE", "--metrics=", "true"], "--metrics: an empty name"),
    (["-p", "FILE", "--stale-strategy", "time-only", "true"], "--stale-strategy time-only needs --stale-after"),
    (["-p", "FILE", "--nonsense", "true"], "unknown option: --nonsense; pidlock --help lists them"),
    (["-p", "FILE", "--wai", "5", "true"], "unknown option: --wai; pidlock --help lists them"),
    (["-p", "FILE", "-x", "true"], "unknown option: -x; pidlock --help lists them"),
    (["-p", "FILE", "--quiet=1", "true"], "argument -q/--quiet: it takes no value, and was given '1'"),
    (["-p", "FILE", "-q-check"], "argument -q/--quiet: it takes no value, and was given '-check'"),
    (["-p", "FILE", "-q-", "true"], "argument -q/--quiet: it takes no value, and was given '-'"),
    (["-p", "FILE", "-w"], NO_VALUE % ("-w/--wait", "--wait")),
    (["-p", "FILE", "-w", "soon", "true"], NO_TIME % "soon"),
    (["-p", "FILE", "-w", "-5", "true"], NO_TIME % "-5"),
    (["-p", "FILE", "-E", "256", "true"], NO_STATUS % "256"),
    (["-p", "FILE", "-E", "²", "true"], NO_STATUS % "²"),
    (["-p", "FILE", "-E", "٣", "true"], NO_STATUS % "٣"),
    (["-p", "FILE", "--mode", "0777", "true"], NO_MODE % "0777"),
], ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "")
def test_wrong_usage_is_2_and_the_last_line_says_what_is_wrong(run, tmp_path, arguments, problem):
    status, stdout, stderr = run(*arguments, cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    first, last = stderr.splitlines()[0], stderr.splitlines()[-1]
    assert (status, stdout, first, last) == (2, "", HELP.splitlines()[0], "pidlock: error: " + problem)
    assert os.listdir(tmp_path) == []


@blackbox
@pytest.mark.parametrize("words, status, stdout", [
    (["echo", "a"], 0, "a\n"),
    (["--", "echo", "a"], 0, "a\n"),
    (["echo", "--", "a"], 0, "-- a\n"),
    (["--", "echo", "--", "a"], 0, "-- a\n"),
    (["--", "echo", "a", "--"], 0, "a --\n"),
    (["echo", "--", "--", "a"], 0, "-- -- a\n"),
    (["--", "--", "echo"], 127, ""),
    (["echo", "-p", "other", "--help"], 0, "-p other --help\n"),
    (["echo", "-w", "nonsense", "-q"], 0, "-w nonsense -q\n"),
    (["--", "echo", "a", "--version"], 0, "a --version\n"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_options_behind_the_first_word_are_the_commands_and_one_dash_dash_is_ours(run, pidfile, words, status, stdout):
    assert run("-p", pidfile, *words)[:2] == (status, stdout)


# ---- Values ----


@pytest.mark.parametrize("text, seconds", [
    ("0", 0), ("90", 90), ("0.5", 0.5), ("007", 7), ("30s", 30), ("5m", 300), ("1h30m", 5400), ("2d", 172800),
    ("1d2h3m4s", 93784), ("1.5h", 5400), ("0s", 0), ("90m", 5400), ("inf", float("inf")),
])
def test_a_time_is_seconds_or_has_suffixes(text, seconds):
    assert pidlock._parse(["-p", "FILE", "-w", text, "true"]).wait == seconds


@pytest.mark.parametrize("text", [
    "", " ", "soon", "nan", "infinity", "INF", "-1", "-inf", "+5", "1e3", "1_0", "0x10", ".5", "5.", "1,5", "5 s", " 5",
    "5\n", "30S", "5x", "1m1h", "1h1h", "1h30", "s", "1.2.3", "٣", "²", "１", "5s\0",
], ids=repr)
def test_nonsense_is_no_time(pidfile, capfd, text):
    status = pidlock.main(["-p", str(pidfile), "--wait=" + text, "true"])
    assert (status, capfd.readouterr().err.splitlines()[-1]) == (2, "pidlock: error: " + NO_TIME % text)


@blackbox
@pytest.mark.parametrize("option", [[], ["--mode", "0644"]], ids=["default", "0644"])
@pytest.mark.parametrize("umask", ["000", "077"])
def test_the_umask_does_not_change_the_mode(pidfile, option, umask):
    command = [*PIDLOCK, "-p", pidfile, *option, "stat", "-c", "%a", pidfile]
    under_umask = ["sh", "-c", 'umask "$0"; exec "$@"', umask, *command]
    assert subprocess.run(under_umask, stdout=subprocess.PIPE, timeout=60).stdout == b"644\n"


@blackbox
@pytest.mark.parametrize("text, mode", [("0600", "600"), ("600", "600"), ("0640", "640"), ("0660", "660")])
def test_the_file_gets_the_mode_asked_for(run, pidfile, text, mode):
    assert run("-p", pidfile, "--mode", text, "stat", "-c", "%a", pidfile) == (0, mode + "\n", "")


@pytest.mark.parametrize("text", [
    "0666", "0622", "0646", "0602", "0777", "0755", "0645", "0654", "0744",
    "0400", "0200", "0044", "0", "4644", "1644", "-600", "888", "rw",
    "", "0644x", "0x1a4",
], ids=repr)
def test_a_mode_that_lets_others_write_or_its_owner_not_is_wrong_usage(pidfile, capfd, text):
    status = pidlock.main(["-p", str(pidfile), "--mode=" + text, "true"])
    assert (status, capfd.readouterr().err.splitlines()[-1]) == (2, "pidlock: error: " + NO_MODE % text)


@blackbox
@pytest.mark.parametrize("option", ["-E", "--held-exit-code", "--conflict-exit-code"])
@pytest.mark.parametrize("status", [0, 1, 255])
def test_the_status_for_held_can_be_chosen(run, pidfile, option, status):
    with pidlock.PidLock(pidfile):
        assert run("-p", pidfile, "-q", option, str(status), "echo", "ran") == (status, "", "")


@pytest.mark.parametrize("text", [
    "", "256", "-1", "1.0", "0x1", "1_0", "+1", " 1", "1\n", "held", "٣", "²", "９", "9" * 5000,
], ids=lambda text: repr(text[:9]))
def test_nonsense_is_no_exit_status(pidfile, capfd, text):
    status = pidlock.main(["-p", str(pidfile), "--held-exit-code=" + text, "true"])
    assert (status, capfd.readouterr().err.splitlines()[-1]) == (2, "pidlock: error: " + NO_STATUS % text)


# ---- What it says ----


@blackbox
def test_a_run_that_succeeds_is_silent(run, pidfile):
    assert run("-p", pidfile, "--", "true") == (0, "", "")


@blackbox
def test_the_three_streams_are_the_commands(run, pidfile):
    assert run("-p", pidfile, "--", "sh", "-c", "cat; echo err >&2", stdin=b"in") == (0, "in", "err\n")


@blackbox
def test_held_is_one_line_that_names_the_holder(run, holder, pidfile):
    pid = holder("-p", pidfile).pid
    status, stdout, stderr = run("-p", pidfile, "--", "echo", "ran")
    line = r"pidlock: %s: held by PID %d \(sh\) for \d+s; wait for it or stop it\n" % (re.escape(str(pidfile)), pid)
    assert (status, stdout) == (75, "") and re.fullmatch(line, stderr), stderr


@blackbox
def test_a_takeover_is_one_line(run, pidfile, dead_pid):
    pidfile.write_text("%d\n" % dead_pid)
    line = "pidlock: %s: took over a stale file: PID %d does not exist\n" % (pidfile, dead_pid)
    assert run("-p", pidfile, "--", "true") == (0, "", line)


@blackbox
def test_quiet_says_nothing_of_held_and_takeover(run, pidfile, dead_pid):
    pidfile.write_text("%d\n" % dead_pid)
    assert run("-q", "-p", pidfile, "--", "true") == (0, "", "")
    with pidlock.PidLock(pidfile):
        assert run("-q", "-p", pidfile, "--", "true") == (75, "", "")


@blackbox
@pytest.mark.parametrize("quiet", [["-q"], ["--quiet", "-q"], ["-qq"]], ids=" ".join)
def test_quiet_does_not_hide_a_failure(run, tmp_path, quiet):
    line = "pidlock: %s: is a directory, not a pidfile; name another file\n" % tmp_path
    assert run(*quiet, "-p", tmp_path, "--", "true") == (125, "", line)


@blackbox
@pytest.mark.parametrize("option", ["-v", "--verbose"])
def test_verbose_also_says_acquired_and_released(run, pidfile, option):
    status, pid, stderr = run(option, "-p", pidfile, "--", "sh", "-c", "echo $PPID")
    name = "pidlock: %s: " % re.escape(str(pidfile))
    lines = r"{0}acquired by PID {1}\n{0}released after \d+s\n".format(name, pid.strip())
    assert status == 0 and re.fullmatch(lines, stderr), stderr


@blackbox
def test_control_characters_in_a_name_are_made_visible(run, tmp_path):
    path = tmp_path / "a\x1b[31m\nb\x07"
    path.mkdir()
    line = "pidlock: %s/a\\x1b[31m\\nb\\x07: is a directory, not a pidfile; name another file\n" % tmp_path
    assert run("-p", path, "--", "true") == (125, "", line)


@blackbox
def test_control_characters_in_a_commands_name_are_made_visible(run, pidfile):
    line = "pidlock: no\\x1b[2Jsuch: not found; check the name and PATH\n"
    assert run("-p", pidfile, "--", "no\x1b[2Jsuch") == (127, "", line)


@blackbox
def test_control_characters_in_a_holders_name_are_made_visible(run, pidfile, tmp_path):
    script = tmp_path / "a\x1b[1m\nb"
    script.write_text("#!/bin/sh\necho ready; read line\n")
    script.chmod(0o755)
    command = [*PIDLOCK, "-p", str(pidfile), "--", str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            stderr = run("-p", pidfile, "--", "true").stderr
        finally:
            process.stdin.close()
    assert (stderr.count("\n"), "(a\\x1b[1m\\nb)" in stderr) == (1, True), stderr


# ---- What the command sees ----

ENV = shutil.which("env")


@blackbox
@pytest.mark.parametrize("name", ["test.pid", "./sub/../test.pid"])
def test_the_command_sees_the_locks_path_pid_and_slot_and_no_outer_ones(run, tmp_path, name):
    (tmp_path / "sub").mkdir()
    outer = {"PIDLOCK_PIDFILE": "/outer", "PIDLOCK_PID": "1", "PIDLOCK_SLOT": "7", "PIDLOCK_TOKEN": "8"}
    stdout = run("-p", name, "--", "sh", "-c", "echo $PPID; env", cwd=tmp_path, env={**os.environ, **outer}).stdout
    pid, *variables = stdout.splitlines()
    seen = dict(line.split("=", 1) for line in variables if line.startswith("PIDLOCK_"))
    for name in OF_THE_TESTS:
        seen.pop(name, None)
    path = seen.pop("PIDLOCK_PIDFILE")
    assert (os.path.isabs(path), os.path.normpath(path)) == (True, str(tmp_path / "test.pid"))
    assert seen == {"PIDLOCK_PID": pid, "PIDLOCK_SLOT": "1"}


@blackbox
@pytest.mark.parametrize("environment", [
    {}, {"LC_CTYPE": "C"}, {"LC_CTYPE": ""}, {"LC_CTYPE": "C.UTF-8"}, {"LC_CTYPE": "POSIX"}, {"LANG": "C"},
    {"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}, {"LC_CTYPE": "no_SUCH"}, {"LC_CTYPE": "C", "PYTHONCOERCECLOCALE": "0"},
], ids=str)
def test_nothing_of_python_shows_in_the_commands_environment(run, pidfile, environment):
    """Python puts LC_CTYPE=C.UTF-8 there in a C locale (PEP 538)."""
    status, stdout, stderr = run("-p", pidfile, "--", ENV, env=environment)
    seen = dict(line.split("=", 1) for line in stdout.splitlines() if not line.startswith("PIDLOCK_"))
    assert (status, seen, stderr) == (0, environment, "")


@blackbox
@pytest.mark.parametrize("environment", [{}, {"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}], ids=str)
def test_bytes_that_are_no_utf8_pass_through_any_locale(run, tmp_path, environment):
    path = os.fsencode(tmp_path) + b"/caf\xe9\xff.pid"
    script = 'printf "%s\\n" "$1"; [ "$PIDLOCK_PIDFILE" = "$2" ] && [ -e "$2" ]'
    outcome = run("-p", path, "--", "sh", "-c", script, "sh", b"\xff\xe9\xc3\xa9", path, env=environment)
    assert outcome == (0, "\udcff\udce9é\n", "")
    assert os.listdir(tmp_path) == []


@blackbox
@pytest.mark.parametrize("environment", [{}, {"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}], ids=str)
def test_bytes_that_are_no_utf8_are_made_visible_in_any_locale(run, tmp_path, environment):
    path = os.fsencode(tmp_path) + b"/caf\xe9.pid"
    os.mkdir(path)
    line = "pidlock: %s/caf\\xe9.pid: is a directory, not a pidfile; name another file\n" % tmp_path
    assert run("-p", path, "--", "true", env=environment) == (125, "", line)

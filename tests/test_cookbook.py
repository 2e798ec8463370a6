"""The README's cookbook, each recipe taken from there and run against the real thing.

Its console blocks are run by test_readme.py, but for the one that needs a syslog.
"""
import asyncio
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import textwrap
import threading
import time

import pytest
from conftest import PIDLOCK, ROOT
from test_readme import as_script, masked

import pidlock

README = (ROOT / "README.md").read_text()
COOKBOOK = README.split("\n## Cookbook\n")[1].split("\n## ")[0]
FAKETIME = [*pathlib.Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None][0]
SBIN = os.environ["PATH"] + ":/usr/sbin:/sbin"


def recipe(name, fenced=False):
    """The indented or the fenced block of the recipe that begins with this name in bold."""
    [text] = [part for part in re.split(r"^(?=\*\*)", COOKBOOK, flags=re.M) if part.startswith("**" + name)]
    if fenced:
        return re.search(r"^```\w+\n(.*?)^```$", text, re.M | re.S).group(1)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return textwrap.dedent("".join(re.findall(r"^    .*\n", text, re.M)))


def needs(*tools):
    missing = [tool for tool in tools if not shutil.which(tool, path=SBIN)]
    return pytest.mark.skipif(bool(missing), reason="needs " + ", ".join(missing))


def may_unshare():
    command = ["unshare", "-mpf", "--mount-proc", "true"]
    return shutil.which("unshare") and subprocess.call(command, stderr=subprocess.DEVNULL) == 0


needs_box = pytest.mark.skipif(not may_unshare(), reason="needs unshare(1) and root, for mounts and PIDs of its own")


def call(*command, **options):
    """Run a command to its end: (status, stdout, stderr)."""
    done = subprocess.run(list(map(os.fspath, command)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True, timeout=60, **options)
    return done.returncode, done.stdout, done.stderr


def scripts(directory, **texts):
    """Write pidlock and these shell scripts into the directory; return a PATH that begins there."""
    directory.mkdir(exist_ok=True)
    for name, text in {"pidlock": 'exec %s "$@"' % " ".join(PIDLOCK), **texts}.items():
        (directory / name).write_text("#!/bin/sh\n%s\n" % text)
        (directory / name).chmod(0o755)
    return "%s:%s" % (directory, os.environ["PATH"])


def wait_until(true, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain until " + what
        time.sleep(0.02)


# ---- A machine for itself ----

BOX = """
cd "$0"
mount --bind bin /usr/local/bin
mount --bind run /run
mount -t tmpfs none /srv
mkdir /srv/locks
mount --bind locks /srv/locks
mount -t tmpfs none dev
touch dev/null dev/urandom
mount --bind /dev/null dev/null
mount --bind /dev/urandom dev/urandom
mkdir dev/shm
ln -s /proc/self/fd dev/fd
ln -s "$PWD/log" dev/log
mount --rbind dev /dev
exec "$@"
"""


class Box:
    """PIDs and mounts of its own: bin is /usr/local/bin there, run /run, locks /srv/locks; logged() is its syslog."""

    def __init__(self, directory):
        self.directory = directory
        self.processes, self.lines = [], []
        for name in ("run", "locks", "dev"):
            (directory / name).mkdir()
        scripts(directory / "bin")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        here = os.open(directory, os.O_RDONLY)
        self.socket.bind("/proc/self/fd/%d/log" % here)  # the whole path may be too long for a socket
        os.close(here)
        self.socket.setblocking(False)

    def script(self, name, text):
        scripts(self.directory / "bin", **{name: text})

    def command(self, *command):
        unshare = ["unshare", "-mpf", "--mount-proc", "--kill-child", "sh", "-ec", BOX, str(self.directory)]
        return [*unshare, *map(os.fspath, command)]

    def start(self, *command):
        self.processes.append(subprocess.Popen(self.command(*command), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                               stderr=subprocess.PIPE, universal_newlines=True))
        return self.processes[-1]

    def logged(self):
        while True:
            try:
                self.lines.append(self.socket.recv(8192).decode())
            except BlockingIOError:
                return self.lines

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()  # and unshare's --kill-child all that is in the box
            process.communicate(timeout=60)
        self.socket.close()


@pytest.fixture
def box(tmp_path):
    one = Box(tmp_path)
    yield one
    one.close()


# ---- cron, systemd, monit ----

CRON = """
mount --bind tabs /var/spool/cron/crontabs
mount -t tmpfs none /etc/cron.d
: >crontab
mount --bind crontab /etc/crontab
mount -t overlay -o "lowerdir=$PWD/sbin:/usr/sbin" none /usr/sbin
LD_PRELOAD=$1 FAKETIME='+0 x60' NO_FAKE_STAT=1 exec cron -f -L 5
"""


@needs_box
@needs("cron")
@pytest.mark.skipif(not FAKETIME, reason="needs libfaketime, for minutes of a second")
def test_cron_runs_a_job_once_and_mails_and_logs_the_refusals(box, tmp_path):
    mails = tmp_path / "mails"
    for directory in (mails, tmp_path / "tabs", tmp_path / "sbin"):
        directory.mkdir()
    for job in ("backup", "report"):
        os.mkfifo(tmp_path / (job + ".end"))
        box.script(job, "echo begun >>{0}/{1}.begun; read -r line <{0}/{1}.end".format(tmp_path, job))
    sendmail = tmp_path / "sbin" / "sendmail"
    sendmail.write_text("#!/bin/sh\ncat >{0}/new.$$; mv {0}/new.$$ {0}/mails/$$\n".format(tmp_path))
    sendmail.chmod(0o755)
    (tmp_path / "tabs" / "root").write_text(recipe("cron"))
    (tmp_path / "tabs" / "root").chmod(0o600)

    def begun(job):
        file = tmp_path / (job + ".begun")
        return len(file.read_text().splitlines()) if file.exists() else 0

    def refused():
        return sum("failed with exit status 75" in line for line in box.logged())

    process = box.start("sh", "-ec", CRON, "sh", FAKETIME)
    wait_until(lambda: process.poll() is not None or (refused() > 3 and len([*mails.iterdir()]) > 1),
               "two minutes of refusals were logged and mailed")
    told = {(re.search("^Subject: Cron <.*> (.*)", text, re.M).group(1), masked(text.partition("\n\n")[2]))
            for text in [file.read_text() for file in mails.iterdir()]}
    assert (process.poll(), begun("backup"), begun("report"), told) == (None, 1, 1, {
        ("pidlock --pidfile /run/report.pid -- report (failed)",
         "pidlock: /run/report.pid: held by NUMBER (report) for TIME; wait for it or stop it\n")})
    os.close(os.open(tmp_path / "backup.end", os.O_WRONLY))
    wait_until(lambda: begun("backup") == 2, "the job that had ended ran again")


@needs_box
@needs("systemd-analyze")
def test_systemd_finds_no_fault_in_the_units(box, tmp_path):
    box.script("backup", "")
    units = re.findall(r"^# (\S+)\n(.*?)(?=^# |\Z)", recipe("systemd"), re.M | re.S)
    for name, text in units:
        (tmp_path / name).write_text(text)
    told = call(*box.command("systemd-analyze", "verify", *[tmp_path / name for name, _ in units]))
    assert ([name for name, _ in units], told) == (["backup.service", "backup.timer"], (0, "", ""))


MONIT = """
monit() { command monit -c monitrc "$@"; }
tell() {  # how often the worker has begun, once monit says this of it; in less than its 30 s of patience with a start
    i=0
    until monit summary 2>&1 | grep -q "worker  *$1 "; do
        i=$((i + 1)); [ $i -lt 150 ] || { echo "never: $1"; monit summary; cat run/monit.log; exit 1; }
        sleep 0.1
    done
    echo "$1: $(wc -l <begun)"
}
monit -t
pidlock -p /run/worker.pid -- worker & hand=$!
until [ -s begun ]; do sleep 0.02; done
monit -I >/dev/null &
tell OK
monit stop worker
tell "Not monitored"
wait $hand || echo "by hand: $?"
pidlock -p /run/worker.pid --status || :
monit start worker
tell OK
pidlock -p /run/worker.pid -- true || echo "held: $?"
"""
MONITRC = """
set daemon 1
set log /run/monit.log
set pidfile /run/monit.pid
set idfile /run/monit.id
set statefile /run/monit.state
set httpd unixsocket /run/monit.sock
    allow user:pw
"""


@needs_box
@needs("monit")
def test_monit_starts_and_stops_the_worker_and_not_twice(box, tmp_path):
    box.script("worker", "echo begun >>%s/begun; exec sleep 1000" % tmp_path)
    (tmp_path / "monitrc").write_text(MONITRC + recipe("pgrep, pkill, start-stop-daemon, monit"))
    (tmp_path / "monitrc").chmod(0o600)
    status, stdout, _ = call(*box.command("bash", "-ec", MONIT))
    assert (status, stdout.partition("Control file ")[2].splitlines()) == (0, [
        "syntax OK", "OK: 1", "Not monitored: 1", "by hand: 143", "/run/worker.pid: there is no file", "OK: 2",
        "held: 75"])


@needs("pgrep", "start-stop-daemon")
def test_tools_that_read_the_pid_see_a_stranger_and_do_not_see_the_command_of_a_killed_pidlock(holder, pidfile):
    one = holder("-p", pidfile)
    tools = {
        "pgrep": ["pgrep", "-F", pidfile],
        "pgrep -L": ["pgrep", "-L", "-F", pidfile],
        "start-stop-daemon": [shutil.which("start-stop-daemon", path=SBIN), "--status", "--pidfile", pidfile],
        "--check": [*PIDLOCK, "-p", pidfile, "--check"],
    }

    def told():
        return {name: call(*command)[0] for name, command in tools.items()}

    held = told()
    one.kill_wrapper()
    orphaned = told()
    one.finish()
    pidfile.write_text("%d\n\n\n" % os.getpid())
    assert (held, orphaned, told()) == (
        {"pgrep": 0, "pgrep -L": 0, "start-stop-daemon": 0, "--check": 1},
        {"pgrep": 1, "pgrep -L": 1, "start-stop-daemon": 1, "--check": 1},
        {"pgrep": 0, "pgrep -L": 1, "start-stop-daemon": 0, "--check": 0},
    )


# ---- When it is held, in front and behind ----


def test_who_stops_and_replaces_waits_for_a_command_that_takes_its_time(pidfile):
    line = recipe("When it is held", fenced=True).splitlines()[-2]
    assert line.startswith("$ pidlock -p /tmp/job.pid --signal TERM")
    path = scripts(pidfile.parent / "bin", slow="trap 'sleep 1; exit' TERM; echo ready; while :; do sleep 0.1; done")
    environment = {**os.environ, "PATH": path}
    with subprocess.Popen([*PIDLOCK, "-p", pidfile, "slow"], env=environment, stdout=subprocess.PIPE) as slow:
        assert slow.stdout.readline() == b"ready\n"
        told = call("sh", "-c", line[2:].replace("/tmp/job.pid", str(pidfile)), env=environment)
    assert (told, slow.returncode) == ((0, "stopped and replaced\n", ""), 0)


@needs_box
@needs("chronic", "logger")
def test_what_goes_in_front_and_behind_passes_the_status_on(box, tmp_path):
    script, expected = as_script(recipe("timeout, nice", fenced=True), tmp_path)
    (tmp_path / "tmp").mkdir()
    status, stdout, stderr = call(*box.command("bash", "-c", script))
    logged = [line.partition("backup: ")[2] for line in box.logged()]
    assert (status, masked(stdout + stderr), logged) == (0, expected, ["to syslog"])


@needs("chronic")
def test_in_front_timeout_counts_the_wait_and_chronic_shows_the_refusal(holder, pidfile):
    one = holder("-p", pidfile)
    waited = call("timeout", "1", *PIDLOCK, "-w", "5m", "-p", pidfile, "--", "true")
    status, stdout, stderr = call("chronic", *PIDLOCK, "-p", pidfile, "--", "true")
    assert (waited, status, masked(stdout + stderr)) == (
        (124, "", ""), 75,
        masked("pidlock: %s: held by PID %d (sh) for 0s; wait for it or stop it\n" % (pidfile, one.pid)))


# ---- Prometheus ----

SERIES = """
rule_files: [rules.yml]
tests:
- interval: 1h
  input_series:
  - {series: 'pidlock_runs_total{pidfile="stuck"}', values: 9x30}
  - {series: 'pidlock_last_success_timestamp_seconds{pidfile="stuck"}', values: 0x30}
  - {series: 'pidlock_runs_total{pidfile="never"}', values: 9x30}
  - {series: 'pidlock_runs_total{pidfile="well"}', values: 0+1x30}
  - {series: 'pidlock_last_success_timestamp_seconds{pidfile="well"}', values: 0+3600x30}
  alert_rule_test:
  - eval_time: 23h
    alertname: NoSuccessForADay
    exp_alerts: [{exp_labels: {pidfile: never}}]
  - eval_time: 25h
    alertname: NoSuccessForADay
    exp_alerts: [{exp_labels: {pidfile: never}}, {exp_labels: {pidfile: stuck}}]
"""


@needs("promtool")
def test_prometheus_reads_the_metrics_and_the_rule_finds_what_has_not_succeeded(run, holder, pidfile, tmp_path):
    metrics, rules = tmp_path / "job.prom", tmp_path / "rules.yml"
    for command in ("true", "false"):
        run("-p", pidfile, "--metrics", metrics, "--", command)
    holder("-p", pidfile)
    run("-q", "-p", pidfile, "--metrics", metrics, "--", "true")
    rule = recipe("Prometheus")
    rules.write_text("groups:\n- name: pidlock\n  rules:\n" + textwrap.indent(rule, "  "))
    (tmp_path / "series.yml").write_text(SERIES)
    with open(metrics) as text:
        checked = subprocess.run(["promtool", "check", "metrics"], stdin=text, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, timeout=60)
    known = set(re.findall(r"^pidlock_\w+", metrics.read_text(), re.M))
    assert (checked.returncode, checked.stdout, set(re.findall(r"pidlock_\w+", rule)) - known) == (0, b"", set())
    assert call("promtool", "check", "rules", rules)[0] == 0
    status, stdout, stderr = call("promtool", "test", "rules", tmp_path / "series.yml")
    assert status == 0, stdout + stderr


# ---- From Python ----


def run_python(block, tmp_path, **names):
    """Run this block with its lock in tmp_path and `body` as what its function does; return its names."""
    names["__name__"] = "recipe"
    block = re.sub(r"return number \* 2|\.\.\.", "return body(number)", block.replace("/tmp/", "%s/" % tmp_path))
    exec(compile(block, "README.md", "exec"), names)
    return names


def test_threads_and_asyncio_take_turns_and_a_cancelled_thread_keeps_the_lock(tmp_path):
    inside, overlaps, begun, end = [], [], threading.Event(), threading.Event()

    def body(number):
        inside.append(number)
        overlaps.extend(inside[1:])
        if number < 0:
            begun.set()
            assert end.wait(60)
        time.sleep(0.02)  # for others to come in
        inside.remove(number)
        return number * 2

    names = run_python(recipe("Threads, asyncio, Celery", fenced=True), tmp_path, body=body)

    async def together():
        return await asyncio.gather(*[asyncio.to_thread(names["report"], number) for number in range(4)])

    async def cancelled():
        task = asyncio.ensure_future(asyncio.to_thread(names["report"], -1))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        ended = await asyncio.gather(task, return_exceptions=True)
        held = pidlock.active_pid(str(tmp_path / "report.pid"))
        end.set()
        return type(ended[0]), held

    assert (asyncio.run(together()), overlaps) == ([0, 2, 4, 6], [])
    assert (asyncio.run(cancelled()), pidlock.active_pid(str(tmp_path / "report.pid"))) == (
        (asyncio.CancelledError, (os.getpid(), True)), (0, False))


def test_a_celery_task_that_finds_the_lock_held_comes_back(tmp_path):
    celery = pytest.importorskip("celery")
    from celery.contrib.testing.worker import start_worker

    tried_again, done = threading.Event(), []
    app = celery.Celery(broker="memory://", backend="cache+memory://")
    block = recipe("Threads, asyncio, Celery").replace("default_retry_delay=60", "default_retry_delay=0.1")

    def body(number):
        done.append(number)
        return number * 2

    def retried(**event):
        tried_again.set()

    celery.signals.task_retry.connect(retried)
    report = run_python(block, tmp_path, app=app, pidlock=pidlock, body=body)["report"]
    with pidlock.PidLock(str(tmp_path / "report.pid")) as lock, start_worker(
            app, perform_ping_check=False, pool="solo", loglevel="ERROR"):
        result = report.delay(21)
        assert (tried_again.wait(60), done) == (True, [])
        lock.release()
        assert (result.get(timeout=60), done) == (42, [21])


# ---- Containers ----


@needs_box
def test_containers_that_share_a_volume_exclude_each_other_and_pass_signals_on(box, tmp_path):
    """A killed container's file names PID 1, which lives in each: the next one has to take over all the same."""
    box.script("backup", "trap 'echo stopped; exit 3' TERM; echo child of $PPID; while :; do sleep 0.1; done")
    command = json.loads(recipe("Containers").partition("ENTRYPOINT ")[2])
    first = box.start(*command)
    assert first.stdout.readline() == "child of 1\n"
    assert (call(*box.command(*command))[0],
            call(*PIDLOCK, "-p", tmp_path / "locks" / "backup.pid", "--signal", "TERM")[0]) == (75, 125)
    first.kill()
    first.communicate(timeout=60)
    second = box.start(*command)
    assert second.stdout.readline() == "child of 1\n"
    os.kill(int(call("pgrep", "-P", str(second.pid))[1]), signal.SIGTERM)
    stdout, _ = second.communicate(timeout=60)
    assert (second.returncode, stdout, os.listdir(str(tmp_path / "locks"))) == (3, "stopped\n", [])


# ---- More than one host ----


def free_ports(number):
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def hosts(tmp_path):
    """Start the recipe on a host, which is a directory: hosts(name) -> process; hosts.queue() -> who is in etcd's."""
    client, peer = ["http://127.0.0.1:%d" % port for port in free_ports(2)]
    etcd = subprocess.Popen(
        ["etcd", "--data-dir", str(tmp_path / "etcd"), "--initial-cluster", "default=" + peer,
         "--listen-client-urls", client, "--advertise-client-urls", client,
         "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path = scripts(tmp_path / "bin", backup="echo begun; while [ ! -e end ]; do sleep 0.05; done; exit 7")
    environment = {**os.environ, "PATH": path, "ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": client}
    processes = []

    def start(name):
        (tmp_path / name).mkdir(exist_ok=True)
        line = recipe("More than one host").replace("/tmp/", "%s/%s/" % (tmp_path, name)).replace("ttl 10", "ttl 2")
        processes.append(subprocess.Popen(line.split(), cwd=str(tmp_path / name), env=environment,
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True))
        return processes[-1]

    def queue():
        return call("etcdctl", "get", "--keys-only", "--prefix", "backup/", env=environment)[1].split()

    start.queue = queue
    wait_until(lambda: call("etcdctl", "endpoint", "health", env=environment)[0] == 0, "etcd was up")
    start.version = call("etcdctl", "version", env=environment)[1].split()[2]
    yield start
    for host in {tmp_path / "one", tmp_path / "two"}:
        if host.exists():
            (host / "end").touch()
    for process in processes:
        process.communicate(timeout=60)
    etcd.kill()
    etcd.wait()


def failed_as(hosts, status):
    return 1 if hosts.version.startswith("3.4") else status


@needs("etcd", "etcdctl")
def test_under_etcdctl_one_host_at_a_time_runs_and_a_term_is_ignored(hosts, tmp_path):
    one = hosts("one")
    assert one.stdout.readline() == "begun\n"
    two = hosts("two")
    wait_until(lambda: len(hosts.queue()) == 2, "the second host was waiting")
    one.send_signal(signal.SIGTERM)
    wait_until(lambda: re.search(r"^ShdPnd:\s+0+\n", pathlib.Path("/proc/%d/status" % one.pid).read_text(), re.M),
               "the signal had arrived")
    assert (len(hosts.queue()), one.poll(), os.listdir(str(tmp_path / "two"))) == (2, None, [])
    stop = call(*PIDLOCK, "-p", tmp_path / "one" / "backup.pid", "--signal", "TERM")
    assert (stop[0], one.wait(60), two.stdout.readline()) == (0, failed_as(hosts, 143), "begun\n")
    (tmp_path / "two" / "end").touch()
    two.communicate(timeout=60)
    assert two.returncode == failed_as(hosts, 7)


@needs("etcd", "etcdctl")
def test_when_etcdctl_is_killed_its_host_refuses_but_another_runs(hosts, tmp_path):
    one = hosts("one")
    assert one.stdout.readline() == "begun\n"
    one.kill()
    again = hosts("one")
    assert (again.communicate(timeout=60)[0], again.returncode) == ("", failed_as(hosts, 75))
    assert hosts("two").stdout.readline() == "begun\n"
    assert call(*PIDLOCK, "-p", tmp_path / "one" / "backup.pid", "--check") == (1, "", "")


# ---- Coming from ----

ROWS = re.findall(r"^\| [^|]*\| (`.*`) \| (`.*`) \| (.*) \|$", README.split("| coming from |")[1], re.M)
LINES = [(line, held) for theirs, ours, held in ROWS if "etcdctl" not in ours  # the hosts above are that one
         for line in re.findall("`(.*?)`", theirs + ours)]


@pytest.mark.parametrize("line, held", LINES, ids=[line for line, _ in LINES])
def test_a_line_of_theirs_does_what_ours_does(line, held, tmp_path):
    if not (line.startswith("pidlock") or shutil.which(line.split()[0])):
        pytest.skip("needs %s, which Debian 12 may not have" % line.split()[0])
    path = scripts(tmp_path / "bin", job="echo begun; read line; exit 7")
    environment = {**os.environ, "PATH": path, "HOME": str(tmp_path)}
    words = line.replace("/tmp/", "%s/" % tmp_path).split()
    first = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, universal_newlines=True)
    assert first.stdout.readline() == "begun\n"
    if held == "waits":
        assert call("timeout", "1", *words, env=environment) == (124, "", "")
    else:
        status, stdout, stderr = call(*words, env=environment)
        told = "silent" if stderr == "" else "a line" if stderr.count("\n") == 1 else stderr
        assert ("%d, %s" % (status, told), stdout) == (held, "")
    assert (*first.communicate(timeout=60), first.returncode) == ("", "", 7)
    assert call(*words, env=environment) == (7, "begun\n", "")

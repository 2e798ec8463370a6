"""Real environments: filesystems, containers, recycled PIDs, other boots and users, strange processes, clocks.

With PIDLOCK_STRESS there are storms on each filesystem, and 300 waiters; -s shows their figures.
"""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import CHILDREN, PIDLOCK, PYTHON, ROOT, nobodys_pidlock

import pidlock

blackbox = pytest.mark.blackbox
STRESS = "PIDLOCK_STRESS" in os.environ


def may_unshare(*options):
    try:
        return subprocess.call(["unshare", *options, "true"], stderr=subprocess.DEVNULL) == 0
    except FileNotFoundError:
        return False


needs_mounts = pytest.mark.skipif(not may_unshare("-m"), reason="needs unshare(1) and root, to mount")
needs_pids = pytest.mark.skipif(not may_unshare("-pf", "--mount-proc"), reason="needs unshare(1) and root, for PIDs")


# ---- Filesystems ----

LOOP = 'truncate -s %s image; %s image >/dev/null; mount -o loop image mnt; rmdir mnt/lost+found 2>&- || :'
FUSE = 'mkfifo ready; "$0" "$1" "$PWD/base" "$PWD/mnt" %s >ready & read -r word <ready'
MOUNTS = {  # by name: what they need, and a script that mounts them on mnt
    "tmpfs": ([], "mount -t tmpfs -o size=1m,nr_inodes=40 none mnt"),
    "ext4": (["mkfs.ext4"], LOOP % ("4M", "mkfs.ext4 -q -N 40")),
    "xfs": (["mkfs.xfs"], LOOP % ("300M", "mkfs.xfs -q")),
    "btrfs": (["mkfs.btrfs"], LOOP % ("16M", "mkfs.btrfs -q --mixed")),
    "overlay": ([], "mount -t tmpfs -o size=1m,nr_inodes=40 none base; mkdir base/lower base/upper base/work;"
                    " cd base; mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work none ../mnt; cd .."),
    # vfat and exfat of the kernel are like it: no hard links, no permissions
    "exfat by FUSE": (["mkfs.exfat", "mount.exfat-fuse"],
                      "truncate -s 8M image; mkfs.exfat image >/dev/null; device=$(losetup -f --show image);"
                      " mount.exfat-fuse $device mnt 2>&-; losetup -d $device"),
    "FUSE": (["fusermount3"], "mount -t tmpfs -o size=1m,nr_inodes=40 none base; " + FUSE % ""),
    "FUSE without links": (["fusermount3"], FUSE % "nolink"),
    "FUSE without flock": (["fusermount3"], FUSE % "noflock=EOPNOTSUPP"),
    "FUSE without links and flock": (["fusermount3"], FUSE % "nolink noflock=ENOSYS"),
    "FUSE, numbers by name": (["fusermount3"], FUSE % "noino"),
    "fuse-overlayfs": (["fuse-overlayfs"],  # of containers without root
                       "mkdir base/lower base/upper base/work; fuse-overlayfs -o"
                       " lowerdir=base/lower,upperdir=base/upper,workdir=base/work mnt 2>&-"),
    "overlay of an image": ([], "mount -t tmpfs none base; mkdir base/upper base/work;"
                                " mount -t overlay -o lowerdir=lower,upperdir=base/upper,workdir=base/work none mnt"),
    "FUSE of a network": (["fusermount3"], FUSE % "subtype=sshfs"),
}


def call(*command, **options):
    """Run a command to its end: (status, stdout, stderr)."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True, timeout=300, **options)
    return done.returncode, done.stdout, done.stderr


class Mount:
    """A filesystem in a mount namespace of its own. `inside` is the command that runs another in there."""

    def __init__(self, name, directory):
        needed, script = MOUNTS[name]
        missing = [tool for tool in needed if not shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin")]
        if missing:
            pytest.skip("needs " + ", ".join(missing))
        if name.startswith("FUSE"):
            pytest.importorskip("mfusepy")
        for part in ("mnt", "base"):
            (directory / part).mkdir()
        script = "PATH=$PATH:/usr/sbin:/sbin; %s; echo mounted; read -r line || umount -l mnt" % script
        command = ["unshare", "-m", "sh", "-ec", script, sys.executable, CHILDREN / "env_fuse.py"]
        self.process = subprocess.Popen(command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.path = directory / "mnt"
        self.inside = ["nsenter", "-t", str(self.process.pid), "-m"]
        assert self.process.stdout.readline() == b"mounted\n", "%s cannot be mounted" % name

    def run(self, *command):
        return call(*self.inside, *command)

    def run_pidlock(self, *arguments):
        return self.run(*PIDLOCK, "-p", self.path / "test.pid", *arguments)

    def list(self):
        return sorted(self.run("ls", "-A", self.path)[1].split())


@pytest.fixture
def mount(tmp_path):
    """Mount a filesystem: mount(name) -> Mount."""
    mounts = []

    def start(name):
        mounts.append(Mount(name, tmp_path))
        return mounts[-1]

    yield start
    for one in mounts:
        one.process.communicate(timeout=60)


EVERYWHERE = {
    "the file is": "marked",
    "a second one in the process": "held",
    "another process": "held",
    "free again": "acquired released",
    "a killed holder's": "evicted acquired released",
    "a killed holder's, while its child lives": "held",
    "when the child has ended": "acquired",
    "another program's, dead": "evicted acquired released",
    "another program's, alive": "held",
    "garbage, being written": "held",
    "garbage, old": "evicted acquired released",
    "removed meanwhile": "lost",
    "replaced meanwhile": "lost",
    "the other's file": "another's\n",
    "left": [],
}
# The kernel cannot tell there that a dead PID's child lives.
WITHOUT_FLOCK = {"the file is": "unmarked", "a killed holder's, while its child lives": "evicted acquired released"}


@blackbox
@needs_mounts
@pytest.mark.parametrize("name", [name for name in MOUNTS if " of " not in name])
def test_the_lock_keeps_its_promises_on_every_filesystem(mount, name):
    """Each answers link(2), flock(2), unlink(2) of an open file and inode numbers in its own way.

    FUSE catches a publication by link(2) where the two names do not share the flock: a second holder gets in.
    """
    there = mount(name)
    status, stdout, stderr = there.run(PYTHON, CHILDREN / "env_battery.py", there.path)
    assert (status, stderr) == (0, "")
    assert json.loads(stdout) == dict(EVERYWHERE, **WITHOUT_FLOCK if "flock" in name else {})


WITH_FLOCK = [name for name in MOUNTS if "flock" not in name and " of " not in name]


@needs_mounts
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", ["nothing", "marked", "unmarked"] if STRESS else ["marked"])
@pytest.mark.parametrize("name", WITH_FLOCK if STRESS else ["FUSE without links"])
def test_no_two_processes_hold_the_lock_at_once_on_any_filesystem(mount, name, scenario):
    there = mount(name)
    storm = [sys.executable, CHILDREN / "stress_storm.py", ROOT / "pidlock.py", there.path, scenario]
    figures = json.loads(there.run(*storm, "100" if STRESS else "8", "2", "0")[1])
    print(name, scenario, figures)
    counts = ("overlaps", "lost_updates", "released_lost", "barren_rounds", "errors", "left")
    assert [figures[count] for count in counts] == [0, 0, 0, 0, [], []]


FULL = [("ext4", "bytes"), ("ext4", "files"), ("overlay", "files"), ("FUSE", "bytes"), ("xfs", "bytes"),
        ("btrfs", "bytes")]


@blackbox
@needs_mounts
@pytest.mark.parametrize("name, what", FULL)
def test_a_full_filesystem_is_one_line_and_leaves_nothing(mount, name, what):
    """No room for a block, or for an inode. The first run finds a stale file, whose place it may get, or may not.

    Catches a file that is left behind half-written, and a stale one that is judged free and not removed.
    """
    there = mount(name)
    no_room = "cannot take it: No space left on device; make room on that filesystem"
    failed = (125, "", "pidlock: %s/test.pid: %s\n" % (there.path, no_room))
    fill = [PYTHON, CHILDREN / "env_fill.py", there.path, what]
    there.run("sh", "-c", "echo garbage >'%s/test.pid'; touch -d @1 '%s/test.pid'" % (there.path, there.path))
    assert there.run(*fill)[0] == 0
    before = there.list()
    assert there.run_pidlock("-q", "-w", "inf", "--", "echo", "ran") in [(0, "ran\n", ""), failed]
    assert there.list() == [file for file in before if file != "test.pid"]
    assert there.run(*fill, "again")[0] == 0
    before = there.list()
    assert (there.run_pidlock("-w", "inf", "--", "echo", "ran"), there.list()) == (failed, before)


@blackbox
@needs_mounts
def test_on_a_network_filesystem_nobody_is_judged_who_may_be_elsewhere(mount, dead_pid):
    """A real mount whose type says so, as sshfs has it: its PIDs may be another machine's."""
    there = mount("FUSE of a network")
    there.run("sh", "-c", "echo %d >'%s/test.pid'" % (dead_pid, there.path))
    status, stdout, stderr = there.run_pidlock("--", "echo", "ran")
    assert (status, stdout, "this is a network filesystem; if it is gone: rm " in stderr) == (75, "", True)
    there.run("sh", "-c", "echo host=%s >>'%s/test.pid'" % (os.uname().nodename, there.path))
    assert there.run_pidlock("-q", "--", "echo", "ran") == (0, "ran\n", "")


# ---- Recycled PIDs ----

TAKEN_OVER = "pidlock: %s: took over a stale file: PID 4231 %s\n"
RECYCLED = {  # (filesystem, record): what --check, --signal and a run say
    (None, "marked"): (0, 3, [0, "ran\n", TAKEN_OVER % ("{path}", "is no longer behind it")]),
    (None, "unmarked"): (1, 125, "if it is a stranger: rm "),
    (None, "job"): (1, 125, "its holder, PID 4231, was killed, but its command lives on"),
    ("FUSE", "marked"): (1, 125, "if it is a stranger: rm "),
    ("FUSE", "details"): (0, 3, [0, "ran\n", TAKEN_OVER % ("{path}", "was given to another process since")]),
}
NEW_PIDS = ["unshare", "-pf", "--mount-proc", "--kill-child"]


@blackbox
@needs_pids
@pytest.mark.parametrize("filesystem, record", RECYCLED, ids=lambda value: value or "local")
def test_a_recycled_pid_is_never_signalled_and_no_holder_where_that_can_be_known(mount, tmp_path, filesystem, record):
    """Catches a mark that is not believed, a kill(2) of the recorded PID, and a job of a killed pidlock not seen.

    On a filesystem that may be a network's, the mark proves nothing and only the recorded start tells.
    """
    there = mount(filesystem) if filesystem else None
    path = (there.path if there else tmp_path) / "test.pid"
    command = [*(there.inside if there else []), *NEW_PIDS, PYTHON, CHILDREN / "env_recycle.py", path, record, *PIDLOCK]
    told = json.loads(subprocess.check_output(command, timeout=60))
    check, signal, run = RECYCLED[filesystem, record]
    assert (told["check"], told["signal"], told["stranger"]) == ([check, "", ""], signal, "alive")
    if check:
        assert (told["run"][:2], run in told["run"][2]) == ([75, ""], True)
    else:
        assert told["run"] == run[:2] + [run[2].format(path=path)]


# ---- Containers ----


@blackbox
@needs_pids
@pytest.mark.parametrize("contender", [[], ["sh", "-c", '"$@"; exit $?', "sh"]], ids=["as PID 1", "child of PID 1"])
def test_two_containers_that_share_a_directory_exclude_each_other(pidfile, contender):
    """Both holders are PID 1 of their own. Catches `our own PID, so stale`, and an ancestor of the same number."""
    holder = [*NEW_PIDS, *PIDLOCK, "-p", pidfile, "--details", "--", "sh", "-c", "echo ready; read line"]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"ready\n"
        status, stdout, stderr = call(*NEW_PIDS, *contender, *PIDLOCK, "-p", pidfile, "-w", "0.1", "--", "echo", "ran")
        first.stdin.close()
    assert (status, stdout, "waits for this very process" in stderr) == (75, "", False)


ORPHANED = 'kill -9 $PPID; while kill -0 $PPID 2>&-; do :; done; "$@" 2>&-; echo $?'


@blackbox
@needs_pids
def test_the_job_of_a_killed_pidlock_in_a_container_does_not_wait_for_itself(pidfile):
    """There the kernel says of a dead process that took a flock that it was 0."""
    lock = [*PIDLOCK, "-p", pidfile]
    command = [*lock, "--", "sh", "-c", ORPHANED, "sh", *lock, "--wait", "600", "--", "true"]
    with subprocess.Popen([*NEW_PIDS, "sh", "-c", '"$@" & wait; read line', "sh", *command], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as first:
        assert first.stdout.readline() == b"75\n"
        first.stdin.close()


@blackbox
@needs_pids
@pytest.mark.parametrize("options", [[], ["--details"]], ids=["plain", "details"])
def test_a_restarted_container_takes_over_from_itself(pidfile, options):
    """It was killed, and has the same PIDs again: each PID file of its last life names a living process, itself."""
    command = [*NEW_PIDS, *PIDLOCK, "-p", pidfile, *options, "--"]
    with subprocess.Popen([*command, "sh", "-c", "echo ready; read line"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"ready\n"
        first.kill()
        assert first.stdout.read() == b""  # all of it is dead
    line = "pidlock: %s: took over a stale file: PID 1 is no longer behind it\n" % pidfile
    assert (pidfile.read_bytes()[:4], call(*command, "echo", "ran")) == (b"1\n\n\n", (0, "ran\n", line))


IMAGES = {"marked": "1\n\n\n", "another program's": "1\n", "garbage": "?\n",
          "with details": "1\n\n\nboot=x\nhost=elsewhere\n"}


@blackbox
@needs_mounts
@needs_pids
@pytest.mark.parametrize("body", IMAGES.values(), ids=IMAGES)
def test_a_pidfile_that_was_left_in_an_image_is_taken_over(mount, tmp_path, body):
    """On overlayfs it is in the lower layer, which stays as it is: what is removed is only seen from above."""
    lower = tmp_path / "lower"
    lower.mkdir()
    (lower / "test.pid").write_text(body)
    os.utime(lower / "test.pid", (10 ** 9, 10 ** 9))
    there = mount("overlay of an image")
    command = [*NEW_PIDS, *PIDLOCK, "-q", "-p", there.path / "test.pid", "--"]
    assert there.run(*command, "sh", "-c", 'cat "$PIDLOCK_PIDFILE"') == (0, "1\n\n\n", "")
    assert (there.list(), (lower / "test.pid").read_text()) == ([], body)
    assert there.run(*command, "echo", "again") == (0, "again\n", "")


WRITTEN_MEANWHILE = """
import fcntl, os, pidlock, sys
path = sys.argv[1]
found = pidlock._examine(path, fcntl.LOCK_EX, (None, "pid-first"))
with open(path, "w") as file:
    file.write("%d\\n" % os.getppid())
print(found.state, pidlock._evict(found), pidlock.inspect(path).state)
"""


@needs_mounts
def test_a_file_of_an_image_that_is_written_while_it_is_judged_is_judged_anew(mount, tmp_path):
    """The write copies it up to another inode. Catches an evictor that looks at the one that it opened."""
    (tmp_path / "lower").mkdir()
    (tmp_path / "lower" / "test.pid").write_text("1\n\n\n")
    there = mount("overlay of an image")
    code = "import sys; sys.path.insert(0, %r)%s" % (str(ROOT), WRITTEN_MEANWHILE)
    assert there.run(sys.executable, "-c", code, there.path / "test.pid") == (0, "stale False held\n", "")


@blackbox
@pytest.mark.skipif(not may_unshare("-T"), reason="needs unshare(1), root and time namespaces")
def test_a_holder_in_another_time_namespace_holds_it_here_until_it_ends(pidfile, run):
    """Its recorded start is by another clock. Catches a start that is compared before the kernel is asked."""
    command = ["unshare", "-T", "-f", "--boottime", "100000", "--kill-child", *PIDLOCK, "-p", pidfile, "--details"]
    with subprocess.Popen([*command, "--", "sh", "-c", "echo ready; read line"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"ready\n"
        pid = int(pidfile.read_text().split()[0])
        status, stdout, stderr = run("-p", pidfile, "--", "echo", "ran")
        assert (status, stdout, "held by PID %d (sh) for " % pid in stderr) == (75, "", True)
        os.kill(pid, signal.SIGKILL)
        first.stdin.close()
        assert first.stdout.read() == b""
    line = "pidlock: %s: took over a stale file: PID %d is no longer behind it\n" % (pidfile, pid)
    assert run("-p", pidfile, "-w", "60", "--", "echo", "ran") == (0, "ran\n", line)


# ---- Another boot, and a /proc that tells less ----

OTHER_BOOT = ["unshare", "-m", "sh", "-ec", """
    echo 6d6ee3c1-4a4b-4ba6-9d3c-0123456789ab >"$0"; mount --bind "$0" /proc/sys/kernel/random/boot_id; exec "$@" """]


def read_boot():
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@blackbox
@needs_mounts
@pytest.mark.parametrize("details, here, there", [
    ("boot={boot}\n", 1, 0), ("", 1, 1), ("boot={boot}\nhost=x\n", 125, 125),
], ids=["recorded", "not recorded", "of another host"])
def test_a_living_pid_that_was_recorded_before_the_last_boot_is_another_process(
        run, pidfile, tmp_path, details, here, there):
    """Another program's file, on a disk that outlives the boot. Catches a boot that is compared across hosts."""
    pidfile.write_text("%d\n%s" % (os.getpid(), details.format(boot=read_boot())))
    probe = [*PIDLOCK, "-p", pidfile, "--check"]
    assert (call(*probe)[0], call(*OTHER_BOOT, tmp_path / "boot", *probe)[0]) == (here, there)


@blackbox
@needs_mounts
def test_a_holder_is_one_whatever_boot_the_reader_believes_in(holder, pidfile, tmp_path):
    """As in a container that hides the boot ID. Catches a record that is judged before the kernel is asked."""
    holder("-p", pidfile, "--details")
    assert call(*OTHER_BOOT, tmp_path / "boot", *PIDLOCK, "-p", pidfile, "--check") == (1, "", "")


needs_nobody = pytest.mark.skipif(not nobodys_pidlock(), reason="another user cannot run this Python")
STATES = """
import os, sys
sys.path.insert(0, sys.argv[1])
import pidlock
os.chdir(sys.argv[2])
print(*[pidlock.inspect(name).state for name in sorted(os.listdir("."))])
"""
FILES = ["dead, unmarked", "held", "killed", "living, unmarked", "thread, unmarked", "zombie, unmarked"]
PROCS = {  # what is mounted on /proc, who asks, and what is not seen then, and so is held to be on the safe side
    "as it is": (":", False, []),
    "of another user": (":", True, []),
    "hidepid=1": ("mount -t proc -o hidepid=1 proc /proc", True, ["thread, unmarked", "zombie, unmarked"]),
    "hidepid=2": ("mount -t proc -o hidepid=2 proc /proc", True, ["thread, unmarked", "zombie, unmarked"]),
    "hidepid=4": ("mount -t proc -o hidepid=4 proc /proc", True, ["thread, unmarked", "zombie, unmarked"]),
    "subset=pid": ("mount -t proc -o subset=pid proc /proc", False, []),
    "none": ("mount -t tmpfs none /proc", False, ["thread, unmarked", "zombie, unmarked"]),
    "none, another user": ("mount -t tmpfs none /proc", True, ["thread, unmarked", "zombie, unmarked"]),
}


@pytest.fixture
def public(public_directory):
    """A directory of root's that everybody may write into."""
    public_directory.chmod(0o1777)
    return public_directory


@pytest.fixture
def files(public, holder, dead_pid):
    """A pidfile of each kind in FILES."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    pids = {"dead": dead_pid, "living": os.getpid(), "thread": thread.native_id, "zombie": zombie.pid}
    for kind, pid in pids.items():
        (public / (kind + ", unmarked")).write_text("%d\n" % pid)
    (public / "killed").write_text("%d\n\n\n" % os.getpid())
    holder("-p", public / "held")
    yield public
    done.set()
    thread.join()
    zombie.wait()


@blackbox
@needs_mounts
@needs_nobody
@pytest.mark.parametrize("mount, by_nobody, unseen", PROCS.values(), ids=PROCS)
def test_whatever_proc_shows_the_living_are_held_and_the_dead_are_not(files, mount, by_nobody, unseen):
    """Catches a missing /proc entry that is taken for an end, and EPERM of kill(2); a zombie nobody sees is held."""
    script = '%s; exec "$@"' % mount
    *python, program = nobodys_pidlock() if by_nobody else PIDLOCK
    told = call("unshare", "-m", "sh", "-ec", script, "sh", *python, "-c", STATES, os.path.dirname(program), files)
    states = ["held" if file in ["held", "living, unmarked", *unseen] else "stale" for file in FILES]
    assert told == (0, " ".join(states) + "\n", "")


@blackbox
@needs_mounts
def test_without_proc_a_run_takes_over_and_passes_signals_on(pidfile, dead_pid):
    """What is asked of /proc is asked for a better message, or in doubt; never for the lock itself."""
    pidfile.write_text("%d\n\n\n" % dead_pid)
    command = [*PIDLOCK, "-p", pidfile, "--", "sh", "-c", "trap 'echo got it; exit 7' TERM; kill $PPID; read line"]
    with subprocess.Popen(["unshare", "-m", "sh", "-ec", 'mount -t tmpfs none /proc; exec "$@"', "sh", *command],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        stdout, stderr = process.stdout.read(), process.stderr.read()
    line = "pidlock: %s: took over a stale file: PID %d is no longer behind it\n" % (pidfile, dead_pid)
    assert (process.wait(60), stdout, stderr.decode(), pidfile.exists()) == (7, b"got it\n", line, False)


@blackbox
@needs_mounts
def test_without_proc_nobody_is_signalled(holder, pidfile):
    """There the kernel cannot say who has it. Catches a kill(2) of whom the file names."""
    one = holder("-p", pidfile)
    status, stdout, stderr = call("unshare", "-m", "sh", "-ec", 'mount -t tmpfs none /proc; exec "$@"', "sh", *PIDLOCK,
                                  "-p", pidfile, "--signal", "TERM")
    assert (status, stdout, "not signalled" in stderr, one.finish()) == (125, "", True, 1)


# ---- Strange processes ----

@pytest.mark.parametrize("mark", ["", "\n\n"], ids=["unmarked", "marked"])
def test_the_pid_of_a_zombie_leader_is_held_as_long_as_a_thread_lives(pidfile, mark):
    """Without the mark. Its state in /proc is Z, like that of one that has ended."""
    code = """
import ctypes, os, sys, threading
def outlive():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        pass
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=outlive).start()
ctypes.CDLL(None).pthread_exit(None)"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        pidfile.write_text("%d\n%s" % (process.pid, mark))
        assert pidlock.inspect(pidfile).state == ("stale" if mark else "held")
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert pidlock.inspect(pidfile).state == "stale"


@blackbox
def test_a_waiter_gets_it_when_another_programs_holder_becomes_a_zombie(pidfile):
    """Nobody reaps it, so kill(2) answers on and on. Catches a waiter that waits for ESRCH."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        pidfile.write_text("%d\n" % process.pid)
        command = [*PIDLOCK, "-q", "-p", pidfile, "-w", "60", "--", "echo", "ran"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as waiter:
            process.stdin.close()
            assert (waiter.stdout.read(), waiter.wait(60)) == (b"ran\n", 0)


NAMES = {"blanks and parentheses": "a) R (b) 1", "a zombie's": ") Z 1 1 1 1",
         "a newline": "x\nTgid:\t1\n)", "an escape": "x\x1b[31m"}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_process_of_any_name_is_told_alive_by_its_start_and_named_in_one_line(pidfile, tmp_path, name):
    """Names stand between parentheses in /proc/PID/stat. Catches a split at the first blank or `)`."""
    program = tmp_path / name
    shutil.copy(shutil.which("cat"), program)
    with subprocess.Popen([program], stdin=subprocess.PIPE) as process:
        comm = pathlib.Path("/proc/%d/comm" % process.pid)
        deadline = time.monotonic() + 30
        while comm.read_bytes() != os.fsencode(name)[:15] + b"\n":  # its execve(2)
            assert time.monotonic() < deadline, comm.read_bytes()
        states = []
        start = int(pathlib.Path("/proc/%d/stat" % process.pid).read_bytes().rpartition(b")")[2].split()[19])
        for recorded in (start, start + 1):
            pidfile.write_text("%d\nstart=%d\n" % (process.pid, recorded))
            states.append(pidlock.inspect(pidfile).state)
        pidfile.write_text("%d\n" % process.pid)
        with pytest.raises(pidlock.LockHeld) as held:
            pidlock.PidLock(pidfile).acquire()
        assert (states, str(held.value).isprintable()) == (["held", "stale"], True)
        assert name[:15].encode("unicode_escape").decode() in str(held.value)


@blackbox
def test_a_stopped_holder_holds_it_until_it_goes_on(run, holder, pidfile):
    """Its command ends meanwhile, and it is old. Catches a holder that is judged by its command, or by its age."""
    one = holder("-p", pidfile)
    one.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, one.pid, os.WSTOPPED | os.WNOWAIT)
    one.process.stdin.close()
    os.utime(pidfile, (10 ** 9, 10 ** 9))
    assert run("-q", "-p", pidfile, "-w", "0.1", "--stale-after", "1", "--", "echo", "ran") == (75, "", "")
    command = [*PIDLOCK, "-q", "-p", pidfile, "-w", "60", "--", "echo", "ran"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as waiter:
        one.process.send_signal(signal.SIGCONT)
        assert (waiter.stdout.read(), waiter.wait(60), one.process.wait(60)) == (b"ran\n", 0, 1)


# ---- Other users ----


@blackbox
@needs_nobody
@pytest.mark.parametrize("owner, asks, status", [
    ("nobody", "nobody", 0), ("nobody", "root", 0), ("root", "nobody", 125),
])
def test_in_a_sticky_directory_a_stale_file_goes_if_it_may_be_unlinked(public, dead_pid, owner, asks, status):
    path = public / "test.pid"
    path.write_text("%d\n\n\n" % dead_pid)
    if owner == "nobody":
        os.chown(path, 65534, 65534)
    words = nobodys_pidlock() if asks == "nobody" else PIDLOCK
    assert call(*words, "-q", "-p", path, "--", "echo", "ran")[:2] == (status, "" if status else "ran\n")
    assert os.listdir(public) == (["test.pid"] if status else [])


@blackbox
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("strace"), reason="needs root and strace(1)")
def test_what_is_there_is_never_opened_with_o_creat(public):
    """fs.protected_regular=1 and 2 refuse that with EACCES in a sticky directory, to root too, for another's file.

    This machine has whatever value it has (0 as a rule in containers); that the flag is never given shows it for all.
    """
    path = public / "test.pid"
    path.write_text("%d\n" % os.getpid())
    os.chown(path, 65534, 65534)
    trace = public / "trace"
    assert call("strace", "-f", "-e", "trace=openat,open", "-o", trace, *PIDLOCK, "-p", path, "--", "true")[0] == 75
    opens = [line for line in trace.read_text().splitlines() if '"%s"' % path in line]
    assert opens and not [line for line in opens if "O_CREAT" in line]


@blackbox
@needs_nobody
@pytest.mark.parametrize("mode, run, check", [("0644", 75, 1), ("0600", 125, 125)])
def test_a_user_who_asks_for_roots_lock_gets_one_line(holder, public, mode, run, check):
    one = holder("-p", public / "test.pid", "--mode", mode)
    status, stdout, stderr = call(*nobodys_pidlock(), "-p", public / "test.pid", "--", "echo", "ran")
    what = r"held by PID %d \(sh\) for \d+s; wait for it or stop it" % one.pid if run == 75 else \
        "cannot open it, root's with mode 0600: Permission denied; check the permissions of it and of its directory"
    assert (status, stdout) == (run, "") and re.match("pidlock: %s/test.pid: %s\n$" % (public, what), stderr)
    assert call(*nobodys_pidlock(), "-p", public / "test.pid", "--check")[0] == check


# ---- Many waiters ----

WAITERS, TURNS = (300, 20) if STRESS else (40, 5)


@pytest.mark.timeout(600)
def test_of_many_waiters_one_at_a_time_gets_it_and_all_leave_on_term(pidfile):
    """Each runs pidlock's main(), forked from one process. -s shows what they cost. Catches two at once: `++`."""
    command = [sys.executable, CHILDREN / "env_waiters.py", pidfile, str(WAITERS), str(TURNS), "3" if STRESS else "0.5"]
    figures = json.loads(subprocess.check_output(command, timeout=300))
    print(figures)
    assert (figures["story"], figures["statuses"]) == ("+-" * TURNS + "+", {"143": WAITERS - TURNS, "0": TURNS})
    assert figures["seconds until all had left"] < 10 and not pidfile.exists()


# ---- Clocks that are set ----

FAKETIME = sorted(pathlib.Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
needs_faketime = pytest.mark.skipif(not FAKETIME, reason="needs libfaketime")


@pytest.fixture
def clock(tmp_path):
    """clock(offset) sets the wall clock of processes with the environment clock.environment, also while they run."""
    file = tmp_path / "clock"

    def set_clock(offset):
        new = tmp_path / "clock.new"
        new.write_text("%+d\n" % offset)
        new.rename(file)

    set_clock.environment = dict(
        os.environ, LD_PRELOAD=str(FAKETIME[0]), FAKETIME_TIMESTAMP_FILE=str(file), FAKETIME_NO_CACHE="1",
        NO_FAKE_STAT="1", FAKETIME_DONT_FAKE_MONOTONIC="1", DONT_FAKE_MONOTONIC="1", FAKETIME_DONT_RESET="1",
    )
    set_clock(0)
    yield set_clock
    for left in pathlib.Path("/dev/shm").glob("*faketime_*"):  # its destructor has not run where os._exit ended it
        if not os.path.exists("/proc/" + left.name.rpartition("_")[2]):
            left.unlink()


HOUR = 3600


@blackbox
@needs_faketime
@pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["forth", "back"])
def test_a_clock_that_is_set_during_a_wait_neither_ends_nor_prolongs_it(holder, pidfile, clock, jump):
    """Catches a deadline by the wall clock: over at once, or an hour late."""
    one = holder("-p", pidfile)
    command = [*PIDLOCK, "-q", "-p", pidfile, "--", "sh", "-c", "date +%s"]
    command[-4:-4] = ["-w", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=clock.environment) as long_wait:
        assert call(*PIDLOCK, "-q", "-p", pidfile, "-w", "0.2", "--", "true", env=clock.environment)[0] == 75
        short = subprocess.Popen([*PIDLOCK, "-q", "-p", pidfile, "-w", "1", "--", "true"], env=clock.environment)
        clock(jump)
        assert short.wait(30) == 75
        assert long_wait.poll() is None
        one.finish()
        now = int(long_wait.stdout.read())
    assert (long_wait.returncode, abs(now - time.time() - jump) < 60) == (0, True)


DOUBTFUL, ALIVE, DEAD = "{alive}\nhost=x\n", "{alive}\n", "{dead}\n"
OLDER = ["--stale-after", "1h"]
CLOCKS = {  # body, its age, what is asked, and the outcome under a clock that was set by so much
    "doubtful, half an hour old": (DOUBTFUL, HOUR // 2, OLDER, {0: 125, HOUR: 0, -HOUR: 125}),
    "so recorded": (DOUBTFUL + "acquired={then}\n", HOUR // 2, OLDER, {0: 125, HOUR: 0, -HOUR: 125}),
    "time-only": (ALIVE, HOUR // 2, [*OLDER, "--stale-strategy", "time-only"], {HOUR: 0, -HOUR: 1}),
    "empty, half an hour old": ("", HOUR // 2, [], {0: 0, HOUR: 0, -HOUR: 0}),
    "empty, new": ("", 0, [], {0: 1, HOUR: 0, -HOUR: 0}),
    "alive": (ALIVE, 0, [], {HOUR: 1, -HOUR: 1}),
    "dead": (DEAD, 0, [], {HOUR: 0, -HOUR: 0}),
}


@blackbox
@needs_faketime
@pytest.mark.parametrize("body, age, options, statuses", CLOCKS.values(), ids=CLOCKS)
def test_only_ages_depend_on_the_clock_and_the_future_is_never_old_enough(
        pidfile, clock, dead_pid, body, age, options, statuses):
    """An empty file of the future is no longer being written, whichever clock is wrong: it would be held for long."""
    told = {}
    for offset in statuses:
        clock(offset)
        then = time.time() - age
        acquired = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(then))
        pidfile.write_text(body.format(alive=os.getpid(), dead=dead_pid, then=acquired))
        os.utime(pidfile, (then, then))
        told[offset] = call(*PIDLOCK, "-p", pidfile, *options, "--check", env=clock.environment)[0]
    assert told == statuses


@blackbox
@needs_faketime
@pytest.mark.parametrize("offset", [10 * 365 * 24 * HOUR, -10 * 365 * 24 * HOUR], ids=["forth", "back"])
def test_a_living_holder_holds_it_whatever_the_clock_says(holder, pidfile, clock, offset):
    """Not even stale_after makes a holder old that the kernel vouches for; its time is told as 0s at least."""
    one = holder("-p", pidfile, "--details")
    clock(offset)
    status, stdout, stderr = call(*PIDLOCK, "-p", pidfile, "--stale-after", "1d", "--", "echo", "ran",
                                  env=clock.environment)
    since = "3650d" if offset > 0 else "0s"
    line = "held by PID %d (sh) for %s; wait for it or stop it\n" % (one.pid, since)
    assert (status, stdout, stderr) == (75, "", "pidlock: %s: %s" % (pidfile, line))

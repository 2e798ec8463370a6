"""What a pidfile says, and what the system says about its PID: tables of bytes, text and processes."""
import os
import string
import subprocess
import sys
import threading

import pytest
from conftest import CHILDREN
from hypothesis import given
from hypothesis import strategies as st

import pidlock

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/mountinfo"), reason="needs Linux's /proc")

PIDS = {
    "as pidlock writes it": b"4231\n\n\n",
    "with a newline": b"4231\n",
    "without a newline": b"4231",
    "one blank line": b"4231\n\n",
    "blanks around it": b" \t4231 \t\n",
    "ten columns, as UUCP's HDB": b"      4231\n",
    "CR LF": b"4231\r\n",
    "CR alone": b"4231\r",
    "a BOM": b"\xef\xbb\xbf4231\n",
    "leading zeros": b"0000004231\n",
    "many leading zeros": b"0" * 5000 + b"4231\n",
    "trailing NULs": b"4231\0\0\0\0",
    "a newline and NULs": b"4231\n\0\0\0\0",
    "several lines": b"4231\nhost\nsome more\n",
    "bytes that are not UTF-8 below": b"4231\n\xff\xfe\n",
    "as PostgreSQL's postmaster.pid": b"4231\n/var/lib/postgresql/data\n1700000000\n5432\n/tmp\nlocalhost\n",
}


@pytest.mark.parametrize("body", PIDS.values(), ids=PIDS)
def test_a_pid_line_is_read_however_it_was_written(body):
    assert pidlock.parse_record(body).pid == 4231


NO_PIDS = {
    "empty": b"",
    "a newline": b"\n",
    "an empty first line": b"\n4231\n",
    "blanks": b" \t \n",
    "only a BOM": b"\xef\xbb\xbf",
    "NULs": b"\0" * 4096,
    "NULs before it": b"\0\0004231\n",
    "zero": b"0\n",
    "zeros": b"0000\n",
    "negative": b"-4231\n",
    "minus one": b"-1\n",
    "a plus sign": b"+5\n",
    "an underscore": b"1_0\n",
    "hexadecimal": b"0x1\n",
    "an exponent": b"1e3\n",
    "a fraction": b"4231.0\n",
    "full-width digits": "４２３１\n".encode(),
    "Arabic digits": "٤٢٣١\n".encode(),
    "superscript two": "²\n".encode(),
    "superscript two in Latin-1": b"\xb2\n",
    "two numbers": b"42 31\n",
    "a PID and a host": b"4231 host\n",
    "one beyond any pid_t": b"%d\n" % (pidlock.PID_MAX + 1),
    "beyond 64 bits": b"18446744073709551617\n",
    "5 MB of digits": b"9" * 5_000_000,
    "UTF-16": "4231\n".encode("utf-16"),
    "not UTF-8": b"\xff\xfe\xfd\n",
    "a word": b"garbage\n",
    "a script": b"#!/bin/sh\necho 4231\n",
    "a binary PID, as old UUCP": (4231).to_bytes(4, "little"),
    "Mercurial's lock": b"host:4231",
    "Emacs' lock": b"me@host.4231:1700000000",
    "JSON": b'{"pid": 4231}\n',
}


@pytest.mark.parametrize("body", NO_PIDS.values(), ids=NO_PIDS)
def test_what_is_no_pid_in_ascii_digits_is_none(body):
    """Catches int(body), which takes nine of these."""
    assert pidlock.parse_record(body) is None


def test_the_greatest_pid_is_one():
    assert pidlock.parse_record(b"2147483647\n").pid == 2147483647 == pidlock.PID_MAX


MARKS = {
    "as pidlock writes it": (b"4231\n\n\n", True),
    "lines below it": (b"4231\n\n\nhost=here\n", True),
    "no blank line": (b"4231\n", False),
    "one blank line": (b"4231\n\n", False),
    "one blank line and a third line": (b"4231\n\nmore\n\n\n", False),
    "a blank between": (b"4231\n \n\n", False),
    "CR LF": (b"4231\r\n\r\n\r\n", False),
    "CR LF in the first line": (b"4231\r\n\n\n", False),
    "NULs for newlines": (b"4231\0\0\0", False),
    "two blank lines further down": (b"4231\nmore\n\n\n", False),
}


@pytest.mark.parametrize("body, marked", MARKS.values(), ids=MARKS)
def test_the_mark_is_two_empty_lines_right_below_the_pid(body, marked):
    assert pidlock.parse_record(body) == pidlock.parse_record(body)._replace(pid=4231, marked=marked)


records = st.builds(pidlock.Record, pid=st.integers(1, pidlock.PID_MAX), marked=st.booleans(), details=st.just({}))


@given(records)
def test_what_is_encoded_is_parsed_again(record):
    assert pidlock.parse_record(pidlock.encode_record(record)) == record


@given(records)
def test_what_is_encoded_is_a_number_for_everybody_else(record):
    body = pidlock.encode_record(record)
    assert (int(body), body.splitlines()[0]) == (record.pid, b"%d" % record.pid)


PIECES = [b"\n", b"\r", b"\0", b" ", b"0", b"7", b"-", b"+", b"_", b"\xef\xbb\xbf", b"\xff", b"2147483647"]


@given(st.binary(max_size=200) | st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join))
def test_any_bytes_are_a_pid_or_none_and_never_an_error(body):
    record = pidlock.parse_record(body)
    assert record is None or 1 <= record.pid <= pidlock.PID_MAX


DURATIONS = [
    (-5, "0s"), (0, "0s"), (0.9, "0s"), (1, "1s"), (59.9, "59s"), (60, "1m"), (61, "1m1s"), (3599, "59m59s"),
    (3600, "1h"), (3659, "1h"), (7980, "2h13m"), (86399, "23h59m"), (86400, "1d"), (90000, "1d1h"), (8640000, "100d"),
]


@pytest.mark.parametrize("seconds, text", DURATIONS)
def test_a_duration_has_its_two_greatest_units(seconds, text):
    assert pidlock._duration(seconds) == text


PRINTED = {
    "plain": ("backup.sh", "backup.sh"),
    "blanks": ("my backup", "my backup"),
    "letters of the world": ("größe 備份", "größe 備份"),
    "newline and CR": ("a\r\nb", "a\\r\\nb"),
    "escape": ("\x1b[31mred", "\\x1b[31mred"),
    "C1 control": ("\x9b31m", "\\x9b31m"),
    "right-to-left override": ("\u202egpj.sh", "\\u202egpj.sh"),
    "bytes that are not UTF-8": (os.fsdecode(b"a\xff"), "a\\xff"),
}


@pytest.mark.parametrize("text, printed", PRINTED.values(), ids=PRINTED)
def test_control_characters_are_made_visible(text, printed):
    assert os.fsencode(pidlock._printable(text)) == printed.encode()


@given(st.text(string.printable) | st.text() | st.binary().map(os.fsdecode))
def test_whatever_is_printed_is_one_line_for_any_terminal(text):
    printed = pidlock._printable(text)
    assert printed.isprintable()
    printed.encode("utf-8")


def filesystem_of(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return pidlock._filesystem_class(pidlock._filesystem_type(descriptor))
    finally:
        os.close(descriptor)


@needs_proc
@pytest.mark.parametrize("path, kind", [("/dev/shm", "local"), ("/proc/version", "other"), ("/sys", "other")])
def test_the_filesystem_is_the_one_that_the_descriptor_is_on(path, kind):
    if not os.path.ismount("/" + path.strip("/").split("/")[0]) or (path == "/dev/shm" and not os.path.ismount(path)):
        pytest.skip("%s is no filesystem of its own here" % path)
    assert filesystem_of(path) == kind


MOUNTINFO = """\
0 25 0:32 / / rw,relatime - ext4 /dev/vda rw
%s 0 0:40 / /mnt/a\\040b rw,relatime shared:7 master:1 - %s x:/y rw
"""
KINDS = {
    "local": "ext4 xfs btrfs zfs f2fs tmpfs ramfs overlay vfat".split(),
    "network": "nfs nfs4 cifs 9p ceph lustre fuse.sshfs virtiofs".split(),
    "other": "proc fuse.unheard-of".split(),
}


@needs_proc
@pytest.mark.parametrize("kind, name", [(kind, name) for kind in KINDS for name in KINDS[kind]])
def test_a_filesystem_is_known_by_its_name(kind, name, tmp_path, monkeypatch):
    mountinfo = tmp_path / "mountinfo"
    with mountinfo.open("w+") as file:
        mount_id = next(line.split()[1] for line in open("/proc/self/fdinfo/%d" % file.fileno()) if "mnt_id" in line)
        file.write(MOUNTINFO % (mount_id, name))
        file.flush()
        fakes = {"/proc/self/mountinfo": mountinfo}
        real = open
        monkeypatch.setattr("builtins.open", lambda path, *rest, **named: real(fakes.get(path, path), *rest, **named))
        assert pidlock._filesystem_class(pidlock._filesystem_type(file.fileno())) == kind


def test_our_own_process_is_ours():
    assert pidlock._process_state(os.getpid()) == "ours"


def test_a_reaped_process_is_none(dead_pid):
    assert pidlock._process_state(dead_pid) == "none"


def test_no_pid_is_none_and_not_our_process_group():
    assert pidlock._process_state(0) == "none"


def test_a_pid_beyond_the_kernels_greatest_is_none():
    assert pidlock._process_state(pidlock.PID_MAX) == "none"


def test_a_living_process_is_alive():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert pidlock._process_state(process.pid) == "alive"


@needs_proc
def test_a_process_that_nobody_reaps_is_a_zombie():
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert pidlock._process_state(process.pid) == "zombie"


@needs_proc
def test_a_zombie_with_a_name_full_of_parentheses_is_a_zombie(tmp_path):
    """Catches a /proc/PID/stat that is split at the first `)`."""
    program = tmp_path / "a) S (b) 1"
    program.symlink_to("/bin/true")
    with subprocess.Popen([program]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert pidlock._process_state(process.pid) == "zombie"


LEADER_ENDS = """
import ctypes, sys, threading
main = threading.main_thread()
def outlive():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        pass
    print("ready", flush=True)
    sys.stdin.read()
    import os; os._exit(0)
threading.Thread(target=outlive).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@needs_proc
def test_a_zombie_leader_with_a_living_thread_is_alive():
    """Catches a judge that looks at the state alone."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", LEADER_ENDS], **pipes) as process:
        assert process.stdout.readline() == b"ready\n"
        assert pidlock._process_state(process.pid) == "alive"


@needs_proc
def test_the_id_of_a_thread_is_no_process():
    """kill(2) answers for it. Catches a judge that asks only kill(2)."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert pidlock._process_state(thread.native_id) == "thread"
    finally:
        done.set()
        thread.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root may")
def test_another_users_process_is_alive():
    """Catches EPERM taken for an end."""
    expression = "pidlock._process_state(%d)" % os.getpid()
    printed = subprocess.check_output([sys.executable, CHILDREN / "as_nobody.py", expression])
    assert printed == b"alive\n"

"""Races, made deterministic: a contender is stopped at a named audit event while others act.

test_pairs.py has the pairs of pidlock's own operations; here are other programs, young files, probers and patience.
Each test also runs against copies of pidlock.py with a broken protocol (tests/children/race_variants.py), where its
assertion has to fail: the bench itself is tested. A handshake that fails is no assertion, so it fails everywhere.
"""
import fcntl
import functools
import os
import select
import shutil
import subprocess
import sys

import pytest
from children.race_variants import write_variant
from conftest import CHILDREN

pytestmark = pytest.mark.skipif(sys.version_info < (3, 8), reason="contenders stop at audit events (Python 3.8)")

NO_HARD_LINKS = ["strace", "-f", "--seccomp-bpf", "-o", os.devnull, "-e", "inject=/^link(at)?$:error=EPERM"]
needs_strace = pytest.mark.skipif(not shutil.which("strace"), reason="strace takes the hard links away")


def holds_unless(*broken, against="pidlock.py"):
    """Let the test pass with pidlock.py (or the variant named), and its assertion fail with each broken variant."""

    def decorate(test):
        @pytest.mark.parametrize("contend", [against, *broken], indirect=True)
        @functools.wraps(test)
        def checked(contend, **fixtures):
            if contend.variant == against:
                test(contend, **fixtures)
            else:
                with pytest.raises(AssertionError):
                    test(contend, **fixtures)

        return checked

    return decorate


class Contender:
    def __init__(self, command):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.pid = self._process.pid
        self.said = self._read_line()

    def go(self):
        """Let it go on; return what it says next."""
        self._process.stdin.write(b"\n")
        return self._read_line()

    def go_to(self, said):
        """Let it go on, and be sure where it comes to."""
        self.require(said, self.go())

    def require(self, said, seen):
        if seen != said:
            pytest.fail("the handshake expected %r, and heard %r" % (said, seen))

    def end(self):
        self._process.communicate(timeout=60)

    def _read_line(self):
        if not select.select([self._process.stdout], [], [], 60)[0]:
            pytest.fail("the contender says nothing")
        return self._process.stdout.readline().decode().rstrip("\n")


class Contend:
    """Starts contenders of one variant; each has said its first word (where it is, or how it ended) on return."""

    def __init__(self, variant, source, pidfile):
        self.variant = variant
        self._command = [sys.executable, "-S", str(CHILDREN / "race_stop_at.py"), str(source), str(pidfile)]
        self._contenders = []

    def freely(self, action="acquire", prefix=()):
        return self._start(prefix, action)

    def stopped(self, *stops, action="acquire", prefix=()):
        contender = self._start(prefix, action, *stops)
        contender.require("at", contender.said.split()[0])
        return contender

    def holding(self, *stops):
        contender = self._start((), "acquire", *stops)
        contender.require("acquired", contender.said)
        return contender

    def _start(self, prefix, *arguments):
        self._contenders.append(Contender([*prefix, *self._command, *arguments]))
        return self._contenders[-1]

    def end(self):
        for contender in self._contenders:
            contender.end()


@pytest.fixture
def contend(request, pidfile, tmp_path_factory):
    source = write_variant(request.param, tmp_path_factory.mktemp("variant"))
    contend = Contend(request.param, source, pidfile)
    yield contend
    contend.end()


@pytest.fixture
def stale(pidfile, dead_pid):
    pidfile.write_text("%d\n" % dead_pid)
    return pidfile


def names_beside(pidfile):
    return sorted(path.name for path in pidfile.parent.iterdir())


# ---- Evicting ----


@holds_unless("judging before the flock")
def test_a_pid_written_in_place_before_the_flock_is_judged(contend, stale):
    evictor = contend.stopped("fcntl.flock")
    stale.write_text("%d\n" % os.getpid())  # as `echo $$ > FILE` does it: the same file
    assert (evictor.go(), stale.exists()) == ("held", True)


@holds_unless("judging before the flock", "only the mtime compared")
def test_a_pid_written_in_place_between_judging_and_unlink_is_judged_anew(contend, stale):
    before = stale.stat()
    evictor = contend.stopped("os.kill")
    stale.write_text("%d\n" % os.getpid())
    os.utime(stale, ns=(before.st_atime_ns, before.st_mtime_ns))  # within one tick of the filesystem's clock
    assert (evictor.go(), stale.exists()) == ("held", True)


@holds_unless("only the body compared")
def test_an_empty_file_emptied_anew_between_judging_and_unlink_is_spared(contend, pidfile):
    pidfile.touch()
    os.utime(pidfile, (0, 0))
    evictor = contend.stopped("open:test.pid fcntl.flock open:mountinfo")
    os.utime(pidfile)  # the first half of `echo $$ > FILE`
    assert (evictor.go(), pidfile.exists()) == ("held", True)


@holds_unless("an empty file is dead")
def test_a_pidfile_that_another_program_is_writing_is_never_taken_for_dead(contend, pidfile):
    pidfile.touch()
    while_empty = contend.freely()
    pidfile.write_text("%d\n" % os.getpid())
    assert (while_empty.said, contend.freely().said, pidfile.exists()) == ("held", "held", True)


# ---- Releasing ----


@holds_unless("release by PID alone")
def test_release_leaves_a_file_alone_that_replaced_the_holders_own(contend, pidfile):
    holder = contend.holding()
    pidfile.unlink()
    pidfile.write_text("%d\n" % holder.pid)  # the same PID, as from another PID namespace
    assert (holder.go(), pidfile.exists()) == ("lost", True)


# ---- Creating ----


@pytest.mark.parametrize("stop", ["os.link", "os.remove:.pidlock-"])
@holds_unless("a swept private name is fatal")
def test_a_creator_whose_private_name_was_swept_starts_over(contend, pidfile, stop):
    creator = contend.stopped(stop)
    next(pidfile.parent.glob(".pidlock-*")).unlink()
    assert (creator.go(), names_beside(pidfile)) == ("acquired", ["test.pid"])


@holds_unless("an unflocked file published")
def test_a_creator_whose_private_file_is_being_judged_starts_over(contend, pidfile):
    creator = contend.stopped("open:.pidlock- fcntl.flock")
    with open(next(pidfile.parent.glob(".pidlock-*"))) as private:
        fcntl.flock(private, fcntl.LOCK_EX)
        said = creator.go()
    assert (said, contend.freely().said, pidfile.read_text()) == ("acquired", "held", "%d\n\n\n" % creator.pid)


# ---- Creating in place, where there are no hard links ----

UNFLOCKED = "os.link open:test.pid fcntl.flock"  # it has created the path, empty, and is about to flock it


@needs_strace
@holds_unless("an empty file is dead")
def test_an_empty_file_created_in_place_is_spared(contend, pidfile):
    creator = contend.stopped(UNFLOCKED, prefix=NO_HARD_LINKS)
    assert (contend.freely().said, creator.go()) == ("held", "acquired")


@needs_strace
@holds_unless("no check in place", "no patience in place", against="patient")
def test_a_creator_in_place_waits_for_an_evictor_and_then_starts_over(contend, pidfile):
    creator = contend.stopped(UNFLOCKED, "fcntl.flock", prefix=NO_HARD_LINKS)
    os.utime(pidfile, (0, 0))
    evictor = contend.stopped("os.remove:test.pid")
    refused = creator.go()
    assert (refused, evictor.go(), creator.go()) == ("at fcntl.flock", "acquired", "held")


@needs_strace
@holds_unless("no patience in place", against="patient")
def test_a_creator_in_place_waits_for_a_prober(contend, pidfile):
    creator = contend.stopped(UNFLOCKED, "fcntl.flock", prefix=NO_HARD_LINKS)
    prober = contend.stopped("open:test.pid fcntl.flock open:mountinfo", action="inspect")
    refused = creator.go()
    prober.go_to("held")
    assert (refused, creator.go(), names_beside(pidfile)) == ("at fcntl.flock", "acquired", ["test.pid"])


# ---- Probing ----


@holds_unless("no second look", against="patient")
def test_a_prober_of_a_stale_file_is_not_taken_for_its_holder(contend, stale):
    prober = contend.stopped("os.kill", action="inspect")
    contender = contend.stopped("open:test.pid", "open:test.pid")
    assert contender.go() == "at open"  # it was refused, and looks again
    prober.go_to("stale")
    assert contender.go() == "acquired"


@holds_unless("probers exclude each other")
def test_two_probers_do_not_take_each_other_for_a_holder(contend, stale):
    first = contend.stopped("os.kill", action="inspect")
    second = contend.freely(action="inspect")
    assert (second.said, first.go()) == ("stale", "stale")

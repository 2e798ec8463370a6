"""Events and spans of the library: each comes in its order, says all, and cannot make a lock leak."""
import json
import logging
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_trace_id

from pidlock import LockHeld, PidLock

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = "00-%s-00f067aa0ba902b7-01" % TRACE_ID


def make_stale(pidfile, pid, age=60):
    pidfile.write_text("%d\n\n\n" % pid)
    os.utime(pidfile, (pidfile.stat().st_mtime - age,) * 2)


# ---- on_event ----


def test_every_event_has_all_keys_and_their_values(pidfile, dead_pid):
    """Red where an event keeps the token or slot of the lock's last time."""
    events, ours = [], os.getpid()
    make_stale(pidfile, dead_pid)
    lock = PidLock(pidfile, on_event=events.append, fence=True, trace_id="trace", max_concurrent=2)
    with PidLock(pidfile, max_concurrent=2):  # evicts slot 1
        make_stale(pidfile.with_name("test.pid.2"), dead_pid)
        with lock:
            token = lock.token
    with lock:
        second = lock.token
        pidfile.unlink()
    with PidLock(pidfile, max_concurrent=2), PidLock(pidfile, max_concurrent=2), pytest.raises(LockHeld) as refusal:
        lock.acquire()
    seconds = [event.pop("seconds") for event in events]
    said = [(event["event"], event["pid"], event["slot"], event["token"], event["reason"]) for event in events]
    dead = next(event["reason"] for event in events if event["event"] == "evicted")
    assert said == [
        ("evicted", dead_pid, 2, None, dead), ("acquired", ours, 2, token, None), ("released", ours, 2, token, None),
        ("acquired", ours, 1, second, None), ("lost", ours, 1, second, "the file was removed or replaced"),
        ("held", ours, 1, None, refusal.value.reason),
    ]
    assert dead and refusal.value.reason and second > token
    assert [(event["path"], event["trace_id"], len(event)) for event in events] == [(str(pidfile), "trace", 7)] * 6
    assert 59 < seconds[0] < 3600 and all(0 <= one < 60 for one in seconds[1:])


@pytest.mark.parametrize("traceparent, trace_id", [
    (TRACEPARENT, TRACE_ID), ("", None), ("garbage", None), ("00-short-00f067aa0ba902b7-01", None),
])
@pytest.mark.parametrize("given", [None, "mine"])
def test_the_trace_is_that_of_the_environment_unless_one_is_given(pidfile, monkeypatch, traceparent, trace_id, given):
    events = []
    monkeypatch.setenv("TRACEPARENT", traceparent)
    with PidLock(pidfile, on_event=events.append, trace_id=given):
        pass
    assert [event["trace_id"] for event in events] == [given or trace_id] * 2


def test_seconds_are_those_waited_and_held(pidfile):
    events = []
    with PidLock(pidfile), pytest.raises(LockHeld):
        PidLock(pidfile, wait=0.3, on_event=events.append).acquire()
    assert [event["event"] for event in events] == ["held"] and events[0]["seconds"] >= 0.3


@pytest.mark.parametrize("body, events", [("", ["evicted", "acquired"]), (None, ["acquired"])], ids=["stale", "free"])
def test_on_event_is_called_with_the_lock_taken_and_released_is_told_afterwards(pidfile, body, events):
    """So that whoever is told can rely on it. `released` before the release would be a promise."""
    told = []
    if body is not None:
        pidfile.write_text(body)
        os.utime(pidfile, (0, 0))
    with PidLock(pidfile, on_event=lambda event: told.append((event["event"], pidfile.exists()))):
        pass
    assert told == [(event, True) for event in events] + [("released", False)]


def test_logging_is_fed_from_on_event(pidfile, caplog):
    log = logging.getLogger("jobs")
    with caplog.at_level(logging.INFO), PidLock(pidfile, on_event=lambda event: log.info("%(event)s %(path)s", event)):
        pass
    assert caplog.messages == ["acquired %s" % pidfile, "released %s" % pidfile]


# ---- span ----


class Spans:
    """A `span` that notes what happens to its context managers, and fails where it is told to."""

    def __init__(self, failing=None):
        self.seen, self.failing = [], failing

    def __call__(self, name):
        self._note("call", name)
        return Span(self, name)

    def _note(self, what, name, *more):
        self.seen.append((what, name.replace("pidlock.", ""), *more))
        if self.failing == self.seen[-1][:2]:
            raise KeyError("span")


class Span:
    def __init__(self, spans, name):
        self.spans, self.name = spans, name

    def __enter__(self):
        self.spans._note("enter", self.name)

    def __exit__(self, kind, error, traceback):
        self.spans._note("exit", self.name, kind)


def test_a_span_is_around_each_acquire_and_another_while_it_is_held(pidfile):
    spans = Spans()
    with PidLock(pidfile, span=spans, on_event=lambda event: spans.seen.append(event["event"])):
        spans.seen.append("body")
    assert spans.seen == [
        ("call", "acquire"), ("enter", "acquire"), "acquired", ("exit", "acquire", None),
        ("call", "held"), ("enter", "held"), "body", ("exit", "held", None), "released",
    ]


def test_a_failing_acquire_leaves_its_span_with_the_error_and_begins_no_other(pidfile):
    spans = Spans()
    with PidLock(pidfile), pytest.raises(LockHeld):
        PidLock(pidfile, span=spans).acquire()
    assert spans.seen == [("call", "acquire"), ("enter", "acquire"), ("exit", "acquire", LockHeld)]


def test_the_held_span_is_left_with_the_error_of_the_body_and_only_once(pidfile):
    spans = Spans()
    lock = PidLock(pidfile, span=spans)
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    lock.release()
    assert [seen for seen in spans.seen if seen[0] == "exit"] == [
        ("exit", "acquire", None), ("exit", "held", ZeroDivisionError)]


SPAN_STEPS = [(what, name) for name in ("acquire", "held") for what in ("call", "enter", "exit")]


@pytest.mark.parametrize("failing", SPAN_STEPS, ids=" ".join)
def test_a_span_that_raises_leaves_no_lock(pidfile, failing):
    """Red where the lock is not given back when a span's end fails."""
    with pytest.raises(KeyError), PidLock(pidfile, span=Spans(failing)):
        pass
    assert list(pidfile.parent.iterdir()) == []


def test_a_span_that_swallows_the_refusal_does_not_let_the_body_run(pidfile):
    class Swallowing(Span):
        def __exit__(self, *exc_info):
            return True

    with PidLock(pidfile), pytest.raises(RuntimeError, match="swallowed"), \
            PidLock(pidfile, span=lambda name: Swallowing(Spans(), name)):
        pytest.fail("two hold it")


@pytest.fixture
def tracing():
    """Return (tracer, exporter of the spans that have ended)."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("tests"), exporter
    provider.shutdown()


def test_opentelemetrys_tracer_is_a_span_as_it_is(pidfile, tracing):
    tracer, exporter = tracing
    events = []
    with tracer.start_as_current_span("job") as job:
        trace_id = format_trace_id(job.get_span_context().trace_id)
        lock = PidLock(pidfile, span=tracer.start_as_current_span, trace_id=trace_id, on_event=events.append)
        with lock, tracer.start_as_current_span("work"):
            pass
    spans = {span.name: span for span in exporter.get_finished_spans()}
    parents = {name: next((other for other in spans if span.parent and spans[other].context.span_id
                           == span.parent.span_id), None) for name, span in spans.items()}
    assert parents == {"pidlock.acquire": "job", "pidlock.held": "job", "work": "pidlock.held", "job": None}
    assert {format_trace_id(span.context.trace_id) for span in spans.values()} == {trace_id}
    assert [event["trace_id"] for event in events] == [trace_id] * 2


def test_opentelemetrys_span_of_a_refusal_has_the_error(pidfile, tracing):
    tracer, exporter = tracing
    with PidLock(pidfile), pytest.raises(LockHeld):
        PidLock(pidfile, span=tracer.start_as_current_span).acquire()
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.status.status_code, [event.attributes["exception.type"] for event in span.events]) == (
        "pidlock.acquire", StatusCode.ERROR, ["pidlock.LockHeld"])


def test_a_decorated_function_has_spans_and_events_at_each_call(pidfile):
    spans, events = Spans(), []
    work = PidLock(pidfile, span=spans, on_event=events.append)(lambda: None)
    work()
    work()
    entered = [name for what, name, *_ in spans.seen if what == "enter"]
    assert entered == ["acquire", "held"] * 2
    assert [event["event"] for event in events] == ["acquired", "released"] * 2


def test_a_forked_child_tells_nothing(pidfile):
    """The lock is its parent's: neither the child's release nor its end is an event or the end of a span."""
    code = (
        "import json, os, sys, pidlock, contextlib\n"
        "say = lambda *words: os.write(1, (json.dumps([*words, os.getpid() == parent]) + chr(10)).encode())\n"
        "@contextlib.contextmanager\n"
        "def span(name):\n"
        "    yield\n"
        "    say(name)\n"
        "parent = os.getpid()\n"
        "with pidlock.PidLock(sys.argv[1], span=span, on_event=lambda event: say(event['event'])):\n"
        "    if os.fork():\n"
        "        os.wait()\n"
    )
    output = subprocess.check_output([sys.executable, "-c", code, str(pidfile)], cwd=str(ROOT), timeout=60)
    said = [json.loads(line) for line in output.splitlines()]
    assert said == [["acquired", True], ["pidlock.acquire", True], ["pidlock.held", True], ["released", True]]

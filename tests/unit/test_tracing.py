"""Spans: free and without OpenTelemetry while nobody records them, nested and ended whatever happens otherwise."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from atoll import tracing
from atoll.errors import SandboxNotFoundError
from atoll.tracing import carried, continuing, exporting, span

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)
    provider.shutdown()


def named(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    return next(each for each in spans.get_finished_spans() if each.name == name)


def names(spans: Sequence[ReadableSpan]) -> list[str]:
    return [each.name for each in spans]


def run(program: str, **variables: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **variables}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADED = "import sys; print([name for name in sys.modules if name.startswith('opentelemetry')])"


def test_off_imports_nothing() -> None:
    program = """
import atoll.cli, atoll.openmanus, atoll.service, atoll.engines.remote.engine
from atoll import tracing
with tracing.continuing({"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}):
    with tracing.apart(), tracing.span("nothing", sandbox_id="a") as current:
        assert not current.is_recorded and tracing.headers() == {}
"""
    assert run(program + LOADED) == "[]\n"


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
)
def test_the_command_line_records_only_what_the_variables_ask_for(variables: dict[str, str]) -> None:
    program = "from atoll.cli.traces import traced_command\nfrom atoll import tracing\n"
    program += "with traced_command(['ls']), tracing.span('x') as it: assert not it.is_recorded\n"
    assert run(program + LOADED, **variables) == "[]\n"


def test_the_variables_of_the_standard_choose_exporter_sampler_and_name() -> None:
    program = "from atoll.cli.traces import traced_command\nwith traced_command(['serve', '--port', '1']):\n"
    program += "    from atoll.tracing import span\n    with span('mine'): pass\n"
    console = {"OTEL_TRACES_EXPORTER": "console"}
    source = f"import sys; sys.stderr = sys.stdout\n{program}"
    said = run(source, **console)
    assert '"name": "mine"' in said
    assert '"service.name": "atoll"' in said
    assert '"service.name": "ours"' in run(source, OTEL_SERVICE_NAME="ours", **console)
    assert run(source, OTEL_TRACES_SAMPLER="always_off", **console) == ""


def test_a_command_continues_the_trace_of_its_caller() -> None:
    program = "import sys; sys.stderr = sys.stdout\nfrom atoll.cli.traces import traced_command\n"
    program += "with traced_command(['ls', '/secret']): pass\n"
    said = run(program, OTEL_TRACES_EXPORTER="console", TRACEPARENT=PARENT)
    assert '"name": "atoll ls"' in said
    assert '"parent_id": "0x00f067aa0ba902b7"' in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (PARENT, PARENT),
        (f" {PARENT}\t", PARENT),
        (PARENT.replace("00-", "cc-", 1) + "-later", PARENT),
        (PARENT[:-2] + "ff", PARENT[:-2] + "03"),
        (f"{PARENT}-more", None),
        (PARENT[:-1], None),
        (PARENT.replace("00-", "ff-", 1), None),
        (PARENT.upper(), None),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01", None),
        (f"{PARENT}\n", None),
        ("é" * 55, None),
        (PARENT.replace("00-", "cc-", 1) + "-" + "x" * 100_000, None),
        ("", None),
    ],
)
def test_only_a_well_formed_parent_is_continued(value: str, kept: str | None) -> None:
    found = carried([(b"traceparent", value.encode()), (b"tracestate", b"a=1")])
    assert found.get("traceparent") == kept
    assert ("tracestate" in found) == (kept is not None)


def test_states_and_baggage_are_bounded_and_well_formed_or_left_out() -> None:
    def of(name: bytes, *values: bytes) -> str | None:
        return carried([(b"traceparent", PARENT.encode()), *((name, value) for value in values)]).get(name.decode())

    assert of(b"tracestate", b"a=1 , b@c=2", b"", b"d=3") == "a=1,b@c=2,d=3"
    assert of(b"baggage", b"user = ann;p=1;q , b=%20") == "user = ann;p=1;q,b=%20"
    for wrong in (b"a", b"=1", b"A=1", b"a=\x01", b"a=1\nb", b"a=" + b"x" * 600, b",".join([b"a=1"] * 33)):
        assert of(b"tracestate", b"ok=1", wrong) is None, wrong
    for wrong in (b"a", b"=1", b"a b=1", b'a="', b"a=1;=", b"a=" + b"x" * 9000, b",".join([b"a=1"] * 65)):
        assert of(b"baggage", b"ok=1", wrong) is None, wrong
    assert carried([(b"traceparent", PARENT.encode())] * 2) == {}


def test_headers_go_through_even_where_nothing_is_recorded() -> None:
    found = {"traceparent": PARENT, "tracestate": "a=1", "baggage": "user=ann"}
    with continuing(found):
        assert tracing.headers() == found
        assert tracing.variables() == {"TRACEPARENT": PARENT, "TRACESTATE": "a=1"}
        with tracing.apart():
            assert tracing.headers() == {}
    assert (tracing.headers(), tracing.variables()) == ({}, {})


def test_baggage_is_passed_on_by_a_span(spans: InMemorySpanExporter) -> None:
    with continuing({"traceparent": PARENT, "baggage": "user=ann"}), span("a"):
        assert tracing.headers()["baggage"] == "user=ann"
        assert tracing.headers()["traceparent"] != PARENT
    parent = named(spans, "a").parent
    assert parent is not None
    assert parent.span_id == 0x00F067AA0BA902B7


async def test_tasks_are_children_and_what_outlives_its_parent_begins_anew(spans: InMemorySpanExporter) -> None:
    go_on = asyncio.Event()

    async def later() -> None:
        await go_on.wait()
        with span("late"), span("inner"):
            pass

    async def at_once() -> None:
        with span("child"):
            pass

    with span("request"):
        await asyncio.create_task(at_once())
        outliving = asyncio.create_task(later())
        with tracing.apart():
            unrelated = asyncio.create_task(at_once())
        await unrelated
    go_on.set()
    await outliving
    request, late = named(spans, "request").context, named(spans, "late")
    first, second = (each for each in spans.get_finished_spans() if each.name == "child")
    assert first.parent is not None
    assert first.parent.span_id == request.span_id
    assert second.parent is None
    assert (late.parent, [link.context.span_id for link in late.links]) == (None, [request.span_id])
    assert named(spans, "inner").context.trace_id == late.context.trace_id != request.trace_id


async def test_a_cancelled_task_ends_its_spans(spans: InMemorySpanExporter) -> None:
    async def work() -> None:
        with span("outer"), span("inner"):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert names(spans.get_finished_spans()) == ["inner", "outer"]
    assert all((each.attributes or {})["error.type"] == "cancelled" for each in spans.get_finished_spans())


def test_an_error_is_recorded_without_its_text(spans: InMemorySpanExporter) -> None:
    for error in (SandboxNotFoundError("the secret", hint="the secret"), ValueError("the secret")):
        with pytest.raises(type(error)), span("failed"):
            raise error
    ours, other = spans.get_finished_spans()
    assert (ours.attributes, other.attributes) == (
        {"error.type": "sandbox_not_found"},
        {"error.type": "builtins.ValueError"},
    )
    assert not any("secret" in each.to_json() for each in (ours, other))
    with pytest.raises(SystemExit), span("ended"):
        raise SystemExit(3)
    assert named(spans, "ended").attributes == {"atoll.command.exit_code": 3}


def test_what_is_not_sampled_is_not_sampled_further_down() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    try:
        with span("request"), span("inner"):
            assert tracing.variables()["TRACEPARENT"].endswith(("-00", "-02"))
    finally:
        tracing.use(None)
    assert exporter.get_finished_spans() == ()


def test_long_values_are_cut(spans: InMemorySpanExporter) -> None:
    with span("x", user_id="u" * 10_000):
        pass
    assert len(str((named(spans, "x").attributes or {})["atoll.user.id"])) == 256


def test_wanted_as_the_standard_says() -> None:
    assert exporting.is_wanted({"OTEL_TRACES_EXPORTER": "otlp"})
    assert exporting.is_wanted({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"})
    assert not exporting.is_wanted({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"})
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert exporting.is_wanted(endpoint)
    assert not exporting.is_wanted({**endpoint, "OTEL_SDK_DISABLED": "true"})
    assert not exporting.is_wanted({**endpoint, "OTEL_TRACES_EXPORTER": "none"})


def test_the_synchronous_classes_and_a_program_with_a_provider_are_recorded_by_themselves() -> None:
    program = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from atoll.sandbox.portal import portal
from atoll.tracing import span
async def work():
    with span("inside"): pass
portal().call(work())  # nobody records this one
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
with trace.get_tracer("mine").start_as_current_span("outside") as outer:
    portal().call(work())
inner, outer = exporter.get_finished_spans()
print(inner.name, inner.parent.span_id == outer.context.span_id)
"""
    assert run(program) == "inside True\n"

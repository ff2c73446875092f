"""What a client's request causes is one trace, from the request to the answer of the agent in the sandbox."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from atoll import SandboxManager, tracing
from atoll.errors import SandboxGoneError
from atoll.model import State
from atoll.settings import Settings
from server.collector import CLIENT, ERROR, SERVER, Collector, collector, one, parents, tree
from server.running import RunningServer, new_folder, running_server
from server.waiting import run, start, until

CREATE, EXEC = "POST /api/v1/sandboxes", "POST /api/v1/sandboxes/{sandbox_id}/exec"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TOLD = f"00-{TRACE}-{PARENT}-01"
SECRET = "do-not-show-this"


def variables(seen: Collector) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": seen.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}


@pytest.fixture(scope="module")
def seen() -> Iterator[Collector]:
    with collector() as made:
        yield made


@pytest.fixture(scope="module")
def traced_server(
    session_folder: Path,
    session_settings: Settings,
    need_engine: Callable[[str, Settings], None],
    seen: Collector,
) -> Iterator[RunningServer]:
    need_engine("native", session_settings)
    with running_server(new_folder(session_folder, "traced"), "native", **variables(seen)) as running:
        yield running


@pytest.fixture
def api(traced_server: RunningServer) -> Iterator[httpx.Client]:
    with traced_server.client() as client:
        yield client
        for info in client.get("/sandboxes/search").json()["items"]:
            client.delete(f"/sandboxes/{info['id']}")


def header(number: int) -> dict[str, str]:
    """A client's trace of its own."""
    return {"traceparent": f"00-{number:032x}-{PARENT}-01"}


def of(seen: Collector, number: int, last: str) -> list[Any]:
    """All spans of a client's trace, when the last one has arrived."""
    trace_id = f"{number:032x}"
    until(lambda: any(span.name == last for span in seen.trace(trace_id)))
    return seen.trace(trace_id)


def test_a_request_is_one_trace_down_to_the_agents_answer(api: httpx.Client, seen: Collector) -> None:
    made = api.post("/sandboxes", json={"env": {"TOKEN": SECRET}}, headers=header(1)).json()
    command = {"command": f"echo {SECRET}; exit 3", "env": {"OTHER": SECRET}}
    path = f"/sandboxes/{made['id']}"
    assert api.post(f"{path}/exec", json=command, headers=header(2)).json()["exit_code"] == 3
    creation, command_run = of(seen, 1, CREATE), of(seen, 2, EXEC)

    outer = [CREATE, "service.create_sandbox", "manager.create_sandbox"]
    assert parents(creation, one(creation, "engine.create")) == outer
    assert parents(creation, one(creation, "agent.connect")) == outer
    assert parents(creation, one(creation, "engine.connect")) == [*outer, "agent.connect"]
    around = [EXEC, "service.exec", "manager.exec", "sandbox.exec"]
    agent = one(command_run, "agent.exec")
    assert parents(command_run, agent) == around

    request = one(command_run, EXEC)
    assert (request.kind, request.parent_id, request.status) == (SERVER, PARENT, 0)
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": EXEC.removeprefix("POST "),
        "http.response.status_code": 200,
        "atoll.sandbox.id": made["id"],
        "atoll.user.id": made["created_by_user_id"],
    }
    assert agent.attributes["atoll.command.exit_code"] == 3
    assert agent.attributes["atoll.cause"] == "exit"
    assert one(creation, "engine.create").attributes == {"atoll.engine": "native", "atoll.sandbox.id": made["id"]}
    assert request.resource["service.name"] == "atoll"
    for span in creation + command_run:
        assert span.start <= span.end
    assert not any(SECRET.encode() in body for _, body in seen.requests), "no command and no variable is ever shown"


def test_errors_are_recorded_by_their_type_and_code_and_paths_only_as_templates(
    api: httpx.Client, seen: Collector
) -> None:
    headers = {"traceparent": TOLD}
    assert api.post(f"/sandboxes/{SECRET}/exec", json={"command": "true"}, headers=headers).status_code == 404
    assert api.get(f"/{SECRET}?key={SECRET}", headers=header(3)).status_code == 404
    until(lambda: any(span.name == EXEC for span in seen.trace(TRACE)))
    failed = one(seen.trace(TRACE), "service.exec")
    assert (failed.status, failed.attributes["error.type"]) == (ERROR, "sandbox_not_found")
    assert failed.events == [
        {"exception.type": "atoll.errors.SandboxNotFoundError", "atoll.error.code": "sandbox_not_found"}
    ]
    unknown = of(seen, 3, "GET")[0]
    assert unknown.attributes["http.response.status_code"] == 404
    assert not any(SECRET.encode() in body for _, body in seen.requests)


def test_malformed_headers_begin_a_new_trace(api: httpx.Client, seen: Collector) -> None:
    wrong = [
        f"00-{TRACE}-{PARENT}", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01", f"{TOLD}-more", "x" * 4000, "",
    ]  # fmt: skip
    before = len(seen.trace(TRACE))
    for value in wrong:
        assert api.get("/health", headers={"traceparent": value, "tracestate": "a=b"}).status_code == 200
    assert api.get("/health", headers=[("traceparent", TOLD), ("traceparent", TOLD)]).status_code == 200
    bad = {"traceparent": header(4)["traceparent"], "tracestate": "=;,", "baggage": "a" * 9000}
    assert api.get("/health", headers=bad).status_code == 200
    assert of(seen, 4, "GET /api/v1/health")[0].parent_id == PARENT, "a state that is malformed does not matter"
    assert len(seen.trace(TRACE)) == before


def test_a_command_continues_the_trace(api: httpx.Client, seen: Collector) -> None:
    info = start(api)
    shown = "printf '%s %s' $TRACEPARENT $TRACESTATE"
    headers = {**header(5), "tracestate": "vendor=1"}
    answer = api.post(f"/sandboxes/{info['id']}/exec", json={"command": shown}, headers=headers).json()["stdout"]
    agent = one(of(seen, 5, EXEC), "agent.exec")
    assert answer == f"00-{5:032x}-{agent.id}-01 vendor=1"
    own = {"command": shown, "env": {"TRACEPARENT": "mine"}}
    assert api.post(f"/sandboxes/{info['id']}/exec", json=own, headers=header(6)).json()["stdout"].split() == ["mine"]


def test_what_ends_a_sandbox_later_is_a_trace_of_its_own(api: httpx.Client, seen: Collector) -> None:
    info = api.post("/sandboxes", json={"lifetime_s": 0.5}, headers=header(7)).json()

    def deletion() -> Any:
        found = [span for span in seen.spans() if span.name == "manager.delete_sandbox"]
        return [span for span in found if span.attributes["atoll.sandbox.id"] == info["id"]]

    found = until(deletion)[0]
    assert (found.parent_id, found.links) == ("", [])
    assert found.trace_id != f"{7:032x}"


async def test_what_a_manager_does_by_itself_is_not_part_of_its_programs_trace(
    session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> None:
    need_engine("native", session_settings)
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    try:
        with tracing.span("program"):
            async with SandboxManager(engine="native", settings=session_settings) as manager:
                sandbox_id = await manager.create_sandbox(lifetime=0.3)
                with contextlib.suppress(SandboxGoneError):
                    await manager.wait_until(sandbox_id, State.MISSING, 20)
        spans = exporter.get_finished_spans()
        program = next(span for span in spans if span.name == "program").context
        deleted = next(span for span in spans if span.name == "manager.delete_sandbox")
        created = next(span for span in spans if span.name == "manager.create_sandbox")
        assert deleted.parent is None
        assert created.parent is not None
        assert created.parent.span_id == program.span_id
    finally:
        tracing.use(None)


def test_a_cancelled_request_ends_its_spans(api: httpx.Client, traced_server: RunningServer, seen: Collector) -> None:
    info = start(api)
    with traced_server.client(**header(8)) as leaving, pytest.raises(httpx.ReadTimeout):
        leaving.post(f"/sandboxes/{info['id']}/exec", json={"command": "sleep 60"}, timeout=0.5)
    spans = of(seen, 8, EXEC)
    for name in ("manager.exec", "sandbox.exec", "agent.exec"):
        assert one(spans, name).attributes["error.type"] == "cancelled"
        assert one(spans, name).status == ERROR


PROGRAM = """
import asyncio, sys
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from atoll import Sandbox
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(sys.argv[1] + "/v1/traces")))
trace.set_tracer_provider(provider)
with trace.get_tracer("program").start_as_current_span("agent program"):
    with Sandbox(server=sys.argv[2], api_key=sys.argv[3]) as sandbox:
        sandbox.exec("true")
"""


def test_a_program_and_its_server_are_one_trace(traced_server: RunningServer, seen: Collector) -> None:
    program = [sys.executable, "-c", PROGRAM, seen.url, traced_server.url, traced_server.key or ""]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "OTEL_"))}
    subprocess.run(program, env=environment, check=True, timeout=50)
    root = one(until(lambda: [span for span in seen.spans() if span.name == "agent program"]), "agent program")
    until(
        lambda: any(
            span.name == "engine.delete" and span.attributes["atoll.engine"] == "native"
            for span in seen.trace(root.trace_id)
        )
    )
    spans = seen.trace(root.trace_id)
    made = next(span for span in spans if span.name == "engine.create" and span.attributes["atoll.engine"] == "native")
    assert parents(spans, made) == [
        *("agent program", "sandbox.create", "engine.create", "POST"),
        *(CREATE, "service.create_sandbox", "manager.create_sandbox"),
    ], tree(spans)
    assert next(span for span in spans if span.name == "POST").kind == CLIENT
    tunnel = one(spans, "manager.connect_agent")
    assert parents(spans, tunnel)[:4] == ["agent program", "sandbox.create", "agent.connect", "engine.connect"]
    commands = [parents(spans, span)[:2] for span in spans if span.name == "agent.exec"]
    assert ["agent program", "sandbox.exec"] in commands


@pytest.mark.slow
def test_a_collector_that_never_answers_holds_up_neither_requests_nor_the_end(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> None:
    need_engine("native", session_settings)
    with collector() as dead:
        dead.holds.clear()
        with running_server(new_folder(session_folder, "dead"), "native", **variables(dead)) as server:
            with server.client() as client:
                info = start(client)
                until(lambda: dead.requests)
                assert run(client, info["id"], "echo works") == "works\n"
                assert client.delete(f"/sandboxes/{info['id']}").is_success
            began = time.monotonic()
            assert server.stop(signal.SIGTERM) == 0
            assert time.monotonic() - began < 15


def test_what_is_left_is_exported_at_the_end(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> None:
    need_engine("native", session_settings)
    folder, late = new_folder(session_folder, "late"), {"OTEL_BSP_SCHEDULE_DELAY": "60000", "OTEL_SERVICE_NAME": "ours"}
    with collector() as seen, running_server(folder, "native", **variables(seen) | late) as server:
        with server.client() as client:
            client.get("/health")
        assert seen.spans() == []
        server.stop()
        assert one(seen.spans(), "GET /api/v1/health").resource["service.name"] == "ours"

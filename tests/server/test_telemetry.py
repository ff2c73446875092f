"""Telemetry of programs in sandboxes: passed on with whose it is, and bounded whatever they send."""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from atoll.server.telemetry.stamping import MAX_BYTES, TooLargeError, decompressed, stamped, stamped_json
from atoll.settings import Settings
from server.collector import Collector, collector, parents, values
from server.conftest import new_user
from server.running import RunningServer, new_folder, running_server
from server.waiting import run, start, until

PROTOBUF = "application/x-protobuf"
OURS = {"atoll.sandbox.id": "s", "atoll.user.id": "u"}
_NAMES = ("EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_HEADERS", "EXPORTER_OTLP_PROTOCOL", "RESOURCE_ATTRIBUTES")
SHOWN = " ".join(("printf '%s\\n'", *(f"$OTEL_{name}" for name in _NAMES)))


@pytest.fixture(scope="module")
def seen() -> Iterator[Collector]:
    with collector() as made:
        yield made


@pytest.fixture(scope="module")
def relaying(
    session_folder: Any, session_settings: Settings, need_engine: Callable[[str, Settings], None], seen: Collector
) -> Iterator[RunningServer]:
    need_engine("native", session_settings)
    with running_server(new_folder(session_folder, "relaying"), "native", ATOLL_OTLP_ENDPOINT=seen.url) as running:
        yield running


@pytest.fixture
def api(relaying: RunningServer) -> Iterator[httpx.Client]:
    with relaying.client() as client:
        yield client
        for info in client.get("/sandboxes/search").json()["items"]:
            client.delete(f"/sandboxes/{info['id']}")


class Program:
    """A program in a sandbox, with what its variables tell it."""

    def __init__(self, api: httpx.Client, **wanted: Any) -> None:
        self.info = start(api, telemetry=True, **wanted)
        self.endpoint, headers, self.protocol, self.resource = run(api, self.info["id"], SHOWN).splitlines()
        self.headers = dict([headers.split("=", 1)])

    def send(self, body: bytes, signal: str = "traces", **headers: str) -> httpx.Response:
        sent = {"Content-Type": PROTOBUF, **self.headers, **headers}
        return httpx.post(f"{self.endpoint}/v1/{signal}", content=body, headers=sent, trust_env=False, timeout=30)


def attribute(name: str, value: str) -> KeyValue:
    return KeyValue(key=name, value=AnyValue(string_value=value))


def traces(name: str = "inside", **attributes: str) -> bytes:
    resource = Resource(attributes=[attribute(key.replace("__", "."), value) for key, value in attributes.items()])
    spans = [ScopeSpans(spans=[Span(name=name, trace_id=b"t" * 16, span_id=b"s" * 8)])]
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(resource=resource, scope_spans=spans)])
    return bytes(request.SerializeToString())


def metric(api: httpx.Client, outcome: str) -> int:
    lines = api.get("/metrics").text.splitlines()
    name = f'atoll_telemetry_exports_total{{outcome="{outcome}"}} '
    return int(float(next(line.removeprefix(name) for line in lines if line.startswith(name))))


def test_what_a_program_sends_arrives_with_its_sandbox_user_and_task(api: httpx.Client, seen: Collector) -> None:
    program = Program(api, task_id="task-7")
    info = program.info
    assert program.protocol == "http/protobuf"
    owners = {
        "atoll.sandbox.id": info["id"],
        "atoll.user.id": info["created_by_user_id"],
        "atoll.task.id": "task-7",
    }
    assert program.resource == ",".join(f"{name}={value}" for name, value in owners.items())
    forged = traces("first", service__name="mine", atoll__sandbox__id="another", atoll__user__id="root", atoll__x="y")
    answer = program.send(forged)
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, b"", PROTOBUF)
    assert program.send(gzip.compress(traces("second")), **{"Content-Encoding": "gzip"}).status_code == 200
    first = until(lambda: [span for span in seen.spans() if span.name == "first"])[0]
    assert first.resource == {"service.name": "mine", **owners}
    second = until(lambda: [span for span in seen.spans() if span.name == "second"])[0]
    assert second.resource == owners
    found = {"resourceLogs": [{"resource": {"attributes": []}, "scopeLogs": []}], "more": 1}
    answer = program.send(json.dumps(found).encode(), "logs", **{"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()) == (200, {})
    _, body = until(lambda: [each for each in seen.requests if each[0] == "/v1/logs"])[0]
    sent = json.loads(body)["resourceLogs"][0]["resource"]["attributes"]
    assert {each["key"]: each["value"]["stringValue"] for each in sent} == owners
    assert metric(api, "forwarded") >= 3


def test_a_fork_sends_as_itself(api: httpx.Client, seen: Collector) -> None:
    program = Program(api)
    answer = api.post(f"/sandboxes/{program.info['id']}/fork", json={})
    assert answer.status_code == 201, answer.text
    fork = answer.json()[0]["id"]
    assert run(api, fork, SHOWN).splitlines()[0] == program.endpoint.replace(program.info["id"], fork)
    assert "sandbox_telemetry" not in json.dumps(answer.json()), "the label is the service's own"


def test_only_its_own_key_and_only_if_it_was_asked_for(
    api: httpx.Client, relaying: RunningServer, seen: Collector
) -> None:
    program, other = Program(api), Program(api)
    before = len(seen.requests)
    silent = start(api, callback=True)
    key = run(api, silent["id"], "printf %s $OH_SESSION_API_KEYS_0")
    name = next(iter(program.headers))
    for wrong in ("", "nonsense", other.headers[name], program.headers[name][:-1], relaying.key or "", "x" * 400):
        assert program.send(traces(), **{name: wrong}).status_code == 401, wrong
    without = {"Content-Type": PROTOBUF, "Authorization": f"Bearer {relaying.key}"}
    assert httpx.post(f"{program.endpoint}/v1/traces", content=traces(), headers=without).status_code == 401
    elsewhere = program.endpoint.replace(program.info["id"], silent["id"])
    headers = {"Content-Type": PROTOBUF, name: key}
    assert httpx.post(f"{elsewhere}/v1/traces", content=traces(), headers=headers).status_code == 404
    assert run(api, silent["id"], "printf '%s' $OTEL_EXPORTER_OTLP_ENDPOINT") == ""
    api.delete(f"/sandboxes/{program.info['id']}").raise_for_status()
    assert program.send(traces()).status_code == 401
    assert len(seen.requests) == before


def test_hostile_exports_are_refused(api: httpx.Client, seen: Collector) -> None:
    program = Program(api, env={"OTEL_RESOURCE_ATTRIBUTES": "mine=1"})
    assert program.resource == "mine=1", "what the user sets stays, and is overwritten on the way"
    before = len(seen.requests)
    zipped = {"Content-Encoding": "gzip"}
    assert program.send(gzip.compress(bytes(MAX_BYTES + 1)), **zipped).status_code == 413
    assert program.send(bytes(1 << 21)).status_code == 413
    for body in (b"nonsense", gzip.compress(traces())[:-9], gzip.compress(b"") * 2):
        assert program.send(body, **zipped).status_code in (400, 422), body
    for body in (b"\xff" * 20, b"\x0a\xff\xff\xff\x7f", b"\x0b\x0c", b"\x0a\x02\x0a\x00" * 6000, b"\x00\x00"):
        assert program.send(body).status_code in (400, 422), body[:9]
    as_json = {"Content-Type": "application/json"}
    for body in (b"[" * 100_000, b'{"resourceSpans": 1}', b'{"resourceSpans": [1]}', b"NaN", b"\xff"):
        assert program.send(body, **as_json).status_code in (400, 422), body[:9]
    assert program.send(traces(), **{"Content-Type": "text/plain"}).status_code == 415
    assert program.send(traces(), **{"Content-Encoding": "br"}).status_code == 415
    assert program.send(traces(), signal="secrets").status_code in (404, 422)
    assert len(seen.requests) == before


def test_a_sandbox_has_a_rate(api: httpx.Client) -> None:
    program = Program(api)
    with httpx.Client(headers={"Content-Type": PROTOBUF, **program.headers}, trust_env=False) as client:
        answers = [client.post(f"{program.endpoint}/v1/traces", content=b"") for _ in range(150)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert 10 <= len(refused) < 100
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)


def test_a_collector_that_hangs_holds_up_nobody_and_has_room_for_other_users(
    api: httpx.Client, relaying: RunningServer, seen: Collector
) -> None:
    mallory = new_user(api, "mallory-who-exports")
    seen.holds.clear()
    try:
        with relaying.client(mallory.key) as hers:
            flooding = [Program(hers) for _ in range(2)]
        body = traces("x" * (900 << 10))
        answers = [flooding[number % 2].send(body) for number in range(14)]
        codes = {answer.status_code for answer in answers}
        assert 503 in codes
        assert codes <= {200, 429, 503}
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert int(refused.headers["Retry-After"]) >= 1
        assert "the collector's own" not in refused.text
        assert metric(api, "dropped") >= 1
        other = Program(api)
        assert other.send(traces("of somebody else")).status_code == 200
    finally:
        seen.holds.set()
    until(lambda: any(span.name == "of somebody else" for span in seen.spans()))


def test_what_the_collector_refuses_is_counted_and_not_shown(api: httpx.Client, seen: Collector) -> None:
    program, before = Program(api), metric(api, "failed")
    seen.answer = 500
    try:
        assert program.send(traces()).status_code == 200
        until(lambda: metric(api, "failed") > before)
    finally:
        seen.answer = 200


def test_a_server_without_a_collector_refuses_the_wish_and_has_no_route(native_server: RunningServer) -> None:
    with native_server.client() as client:
        refused = client.post("/sandboxes", json={"telemetry": True})
        assert refused.status_code in (400, 422)
        assert "otlp_endpoint" in refused.json()["hint"]
        assert client.post("/otlp/anything/v1/traces", content=b"").status_code == 404


INSIDE = """
import os
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
parent = TraceContextTextMapPropagator().extract({"traceparent": os.environ["TRACEPARENT"]})
with provider.get_tracer("program").start_as_current_span("work inside", parent):
    pass
provider.shutdown()
"""


def test_a_program_with_an_sdk_of_its_own_continues_the_trace_of_its_request(
    session_folder: Any, session_settings: Settings, need_engine: Callable[[str, Settings], None], seen: Collector
) -> None:
    engine = "unsafe-none"  # only its sandboxes reach the loopback interface, where this server listens
    need_engine(engine, session_settings)
    both = {"ATOLL_OTLP_ENDPOINT": seen.url, "OTEL_EXPORTER_OTLP_ENDPOINT": seen.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with running_server(new_folder(session_folder, "inside"), engine, **both) as server, server.client() as client:
        info = start(client, telemetry=True)
        path = f"/sandboxes/{info['id']}"
        client.put(f"{path}/files/content", params={"path": "program.py"}, content=INSIDE).raise_for_status()
        run(client, info["id"], f"{sys.executable} program.py")
        inside = until(lambda: [span for span in seen.spans() if span.name == "work inside"])[0]
        assert inside.resource["atoll.sandbox.id"] == info["id"]
        route = "POST /api/v1/sandboxes/{sandbox_id}/exec"
        until(lambda: any(span.name == route for span in seen.trace(inside.trace_id)))
        around = parents(seen.trace(inside.trace_id), inside)
        assert around == [route, "service.exec", "manager.exec", "sandbox.exec", "agent.exec"]


# --- what is read of an export ----------------------------------------------------------------------------------------


def test_the_three_signals_are_stamped_alike_and_the_rest_stays_as_it_was() -> None:
    sent = ExportTraceServiceRequest.FromString(traces("kept", service__name="a", atoll__user__id="b"))
    sent.resource_spans[0].schema_url = "https://example.test/schema"
    sent.resource_spans[0].resource.dropped_attributes_count = 3
    sent.resource_spans.add()
    found = ExportTraceServiceRequest.FromString(stamped(sent.SerializeToString(), OURS))
    assert [values(each.resource.attributes) for each in found.resource_spans] == [{"service.name": "a", **OURS}, OURS]
    assert found.resource_spans[0].scope_spans == sent.resource_spans[0].scope_spans
    assert found.resource_spans[0].schema_url == "https://example.test/schema"
    assert found.resource_spans[0].resource.dropped_attributes_count == 3
    metrics, logs = ExportMetricsServiceRequest(), ExportLogsServiceRequest()
    metrics.resource_metrics.add().scope_metrics.add().metrics.add(name="m")
    logs.resource_logs.add().scope_logs.add().log_records.add(severity_text="s")
    found_metrics = ExportMetricsServiceRequest.FromString(stamped(metrics.SerializeToString(), OURS))
    found_logs = ExportLogsServiceRequest.FromString(stamped(logs.SerializeToString(), OURS))
    assert values(found_metrics.resource_metrics[0].resource.attributes) == OURS
    assert found_metrics.resource_metrics[0].scope_metrics == metrics.resource_metrics[0].scope_metrics
    assert values(found_logs.resource_logs[0].resource.attributes) == OURS
    assert found_logs.resource_logs[0].scope_logs == logs.resource_logs[0].scope_logs


def encoded(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def test_no_way_to_write_an_attribute_hides_a_forged_one() -> None:
    def resources(*parts: bytes) -> bytes:
        return encoded(1, b"".join(encoded(1, part) for part in parts))

    forged = attribute("atoll.user.id", "root").SerializeToString()
    in_two = resources(encoded(1, attribute("a", "b").SerializeToString()), encoded(1, forged))
    twice = resources(encoded(1, encoded(1, b"harmless") + encoded(1, b"atoll.user.id") + encoded(2, encoded(1, b"x"))))
    back = resources(encoded(1, encoded(1, b"atoll.user.id") + encoded(1, b"harmless")))
    for body, kept in ((in_two, {"a": "b"}), (twice, {}), (back, {})):
        resource = ExportTraceServiceRequest.FromString(stamped(body, OURS)).resource_spans[0].resource
        assert values(resource.attributes) == {**kept, **OURS}
    overlong = bytes([0x8A, 0x80, 0x80, 0x80, 0x10, 13]) + b"atoll.user.id"  # field 1, for those who cut it to 32 bits
    with pytest.raises(ValueError, match="not a valid export"):
        stamped(resources(encoded(1, overlong)), OURS)


def test_whatever_is_sent_the_result_has_our_attributes_or_there_is_none() -> None:
    rng, good = random.Random(1), traces("x", service__name="a", atoll__user__id="b")
    for _ in range(2000):
        body = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            found = ExportTraceServiceRequest.FromString(stamped(bytes(body), OURS))
        except Exception:
            continue  # refused here, or by the collector
        for each in found.resource_spans:
            ours = [item for item in each.resource.attributes if item.key.startswith("atoll.")]
            assert values(ours) == OURS


def test_json_is_stamped_as_well() -> None:
    forged = {"key": "atoll.user.id", "value": {"stringValue": "root"}}
    kept = {"key": "service.name", "value": {"stringValue": "a"}}
    body = {
        "resourceSpans": [{"resource": {"attributes": [kept, forged]}, "scopeSpans": [{"spans": []}], "resource_": 1}],
        "resource_spans": [{"resource": {"attributes": [forged]}}],
    }
    found = json.loads(stamped_json(json.dumps(body).encode(), "traces", {"atoll.user.id": "u"}))
    ours = {"key": "atoll.user.id", "value": {"stringValue": "u"}}
    assert found == {"resourceSpans": [{"resource": {"attributes": [kept, ours]}, "scopeSpans": [{"spans": []}]}]}


def test_a_bomb_is_noticed_before_it_is_unpacked() -> None:
    with pytest.raises(TooLargeError):
        decompressed(gzip.compress(bytes(64 << 20)))
    assert decompressed(gzip.compress(os.urandom(1000))) != b""

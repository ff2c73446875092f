"""The metrics of a server: what Prometheus's own parsers read, for names and labels that stay."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from atoll.manager import SandboxManager
from atoll.manager.metrics import Histogram, gauge
from atoll.server.request_metrics import Exposition, RequestMetrics
from server.running import RunningServer
from server.test_hostile import answer, dial

KEPT = {
    "atoll_sandboxes": {"state"},
    "atoll_sandboxes_max": set(),
    "atoll_active_operations": set(),
    "atoll_sandboxes_not_deleted": set(),
    "atoll_create_seconds": {"le"},
    "atoll_exec_seconds": {"le"},
    "atoll_quota_refusals": set(),
    "atoll_http_requests": {"method", "route", "status"},
    "atoll_http_request_seconds": {"route"},
    "atoll_tasks": set(),
    "process_open_fds": set(),
}
"""Families that dashboards use, and their labels."""


def families(client: httpx.Client, accept: str = "") -> dict[str, Metric]:
    answer = client.get("/metrics", headers={"Accept": accept})
    if answer.headers["content-type"].startswith("application/openmetrics-text"):
        return {each.name: each for each in openmetrics.text_string_to_metric_families(answer.text)}  # type: ignore[no-untyped-call]
    return {each.name: each for each in text_string_to_metric_families(answer.text)}


def test_both_formats_have_the_names_and_labels_that_dashboards_use(admin: httpx.Client, sandbox: str) -> None:
    assert admin.post(f"{sandbox}/exec", json={"command": "true"}).status_code == 200
    for accept in ("", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"):
        found = families(admin, accept)
        for name, labels in KEPT.items():
            assert {label for sample in found[name].samples for label in sample.labels} == labels, name
        assert all(each.documentation for each in found.values())
        assert {"atoll_http_request_duration_seconds", "process_cpu_seconds", "process_resident_memory_bytes"} <= set(
            found
        )
        [count] = [
            each.value
            for each in found["atoll_http_request_duration_seconds"].samples
            if each.name.endswith("_count") and each.labels["route"] == "/sandboxes/{sandbox_id}/exec"
        ]
        assert count >= 1


def test_nobody_makes_up_a_series(server: RunningServer, admin: httpx.Client) -> None:
    """Paths, methods, ids and headers of a client are in no label."""
    with dial(server) as sock:
        for method in ("PROPFIND", "SUBSCRIBE"):
            sock.sendall(f"{method} /api/v1/made-up-path HTTP/1.1\r\nHost: made-up-host\r\n\r\n".encode())
        sock.sendall(b"GET /api/v1/sandboxes/made-up-id HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer(sock).count(b"HTTP/1.1 4") == 3
    text = admin.get("/metrics").text
    assert "made-up" not in text
    assert "PROPFIND" not in text
    assert 'atoll_http_requests_total{method="other",route="none",status="404"}' in text


async def test_the_event_loop_goes_on_while_a_scrape_is_written() -> None:
    loop_went_on = threading.Event()

    def slow() -> Iterator[Metric]:
        assert loop_went_on.wait(30)
        yield gauge("slow", "Slow.", {"": 1})

    writing = asyncio.create_task(Exposition(slow).write(""))
    await asyncio.sleep(0)
    loop_went_on.set()
    text, media_type = await writing
    assert b"slow 1.0" in text
    assert media_type.startswith("text/plain; version=0.0.4")


async def test_two_applications_in_one_process_count_for_themselves() -> None:
    one, other = RequestMetrics(), RequestMetrics()
    one.count("GET", "/a", 200, 0.5)
    text, _ = await Exposition(one.metric_families).write("")
    nothing, _ = await Exposition(other.metric_families).write("")
    assert b'atoll_http_requests_total{method="GET",route="/a",status="200"} 1.0' in text
    assert b"/a" not in nothing


def test_a_value_falls_into_the_bucket_of_its_bound() -> None:
    found = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        found.add(seconds)
    assert dict(found.cumulative()) == {"1": 2, "2": 3, "+Inf": 4}


def test_a_manager_that_was_never_used_has_no_figures() -> None:
    assert SandboxManager().metrics() == ""
    assert SandboxManager().metric_families() == []

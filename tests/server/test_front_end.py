"""What OpenHands's own front end calls, in the shapes that its client sends, with the answers that its types expect."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import httpx

STATUSES = {"MISSING", "STARTING", "RUNNING", "STOPPED", "PAUSED"}
"""Of its type V1SandboxStatus."""


def is_sandbox(value: dict[str, Any]) -> bool:
    """Whether it is a V1SandboxInfo."""
    urls = value["exposed_urls"]
    return (
        isinstance(value["id"], str)
        and isinstance(value["created_by_user_id"], str | None)
        and isinstance(value["sandbox_spec_id"], str)
        and value["status"] in STATUSES
        and isinstance(value["session_api_key"], str | None)
        and (urls is None or all(isinstance(each["name"], str) and isinstance(each["url"], str) for each in urls))
        and datetime.fromisoformat(value["created_at"]).tzinfo is not None
    )


def batch(client: httpx.Client, ids: list[str]) -> httpx.Response:
    """As URLSearchParams writes it: the same name for each."""
    return client.get(f"/sandboxes?{urlencode([('id', id) for id in ids])}")


def test_pause_resume_and_batch(client: httpx.Client) -> None:
    client.delete("/sandbox-specs/front-end")
    ports = [{"name": "AGENT_SERVER", "port": 8000}]
    client.post("/sandbox-specs", json={"id": "front-end", "exposed_ports": ports}).raise_for_status()
    id = client.post("/sandboxes", params={"sandbox_spec_id": "front-end"}).json()["id"]
    found = batch(client, [id, "none", id]).json()
    assert [each and each["id"] for each in found] == [id, None, id]
    assert is_sandbox(found[0])
    assert (found[0]["status"], [each["name"] for each in found[0]["exposed_urls"]]) == ("RUNNING", ["AGENT_SERVER"])
    assert client.post(f"/sandboxes/{id}/pause", json={}).json() == {"success": True}
    paused = batch(client, [id]).json()[0]
    assert is_sandbox(paused)
    assert (paused["status"], paused["session_api_key"], paused["exposed_urls"]) == ("PAUSED", None, None)
    assert client.post(f"/sandboxes/{id}/resume", json={}).json() == {"success": True}
    assert batch(client, [id]).json()[0] == found[0]
    for act in ("pause", "resume"):
        assert client.post(f"/sandboxes/none/{act}", json={}).status_code == 404


def test_as_many_as_the_front_end_may_ask_for(client: httpx.Client, sandbox: str) -> None:
    id = sandbox.rpartition("/")[2]
    found = batch(client, [id] * 100)
    assert (found.status_code, len(found.json())) == (200, 100)
    assert batch(client, [id] * 101).status_code == 422
    assert client.get("/sandboxes").status_code == 422

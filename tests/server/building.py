"""Builds through REST: requests, and waiting for what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from server.running import RunningServer
from server.tiny_root import context, tiny_root

BASE = "base"


def with_base(client: httpx.Client) -> None:
    """Let the user have an image to build on."""
    made = client.put("/images/content", params={"name": BASE}, content=tiny_root())
    assert made.status_code == 201, made.text
    assert made.json()["name"] == f"docker.io/library/{BASE}:latest"


def request(client: httpx.Client, archive: bytes | None, *, key: str | None = None, **options: Any) -> httpx.Response:
    parts: dict[str, Any] = {"options": (None, json.dumps(options).encode(), "application/json")}
    if archive is not None:
        parts["context"] = ("context.tar", archive, "application/x-tar")
    headers = {"Idempotency-Key": key} if key is not None else {}
    return client.post("/images/builds", files=parts, headers=headers)


def begin(
    client: httpx.Client, dockerfile: str, /, *, files: dict[str, str | bytes] | None = None, **options: Any
) -> str:
    """Request a build. Returns its path."""
    answer = request(client, context(Dockerfile=dockerfile, **(files or {})), **options)
    assert answer.status_code == 202, answer.text
    path = f"/images/builds/{answer.json()['id']}"
    assert answer.headers["location"] == f"/api/v1{path}"
    return path


def events(client: httpx.Client, path: str, **params: Any) -> list[dict[str, Any]]:
    """Everything that happens in the build, until it has ended."""
    with client.stream("GET", f"{path}/logs", params=params) as answer:
        return [event for line in answer.iter_lines() if (event := json.loads(line))["type"] != "heartbeat"]


def ended(client: httpx.Client, path: str) -> dict[str, Any]:
    """The build, when it has ended."""
    last = events(client, path)[-1]
    assert last["type"] == "end", last
    return dict(client.get(path).json())


def built(client: httpx.Client, dockerfile: str, /, **options: Any) -> dict[str, Any]:
    """The build, which has to succeed."""
    build = ended(client, begin(client, dockerfile, **options))
    assert build["state"] == "done", build
    return build


def until(client: httpx.Client, path: str, kind: str, text: str = "") -> None:
    """Return when such an event has happened."""
    with client.stream("GET", f"{path}/logs") as answer:
        for line in answer.iter_lines():
            event = json.loads(line)
            if event["type"] == kind and text in event.get("text", ""):
                return
    raise AssertionError(f"there was no {kind} {text!r}: {client.get(path).text}")


def contexts(server: RunningServer) -> list[Path]:
    """What is left of uploads."""
    return list((server.folder / "state/transfers").iterdir())

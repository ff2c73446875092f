"""The REST API has one manner: names, codes, times, pages and refusals are the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from atoll.server.app import bare_app
from atoll.server.routes.paging import page
from atoll.service.models.sandbox_request import SandboxRequest

DOCUMENT = bare_app().openapi()
OPTIONS = (
    *("image", "memory", "cpus", "pids", "disk", "env", "volumes", "work_dir", "network", "isolation", "labels"),
    *("name", "lifetime", "idle_timeout", "undo", "setup", "setup_timeout", "task_id", "ports"),
)
FOR_OPENHANDS = re.compile(r"^/runtime|/pause$|/resume$|^/api/v1/webhooks/|^/api/v1/sandboxes/\{sandbox_id\}$")
MADE_BUT_NOT_ALONE = {"create_key", "create_token", "expose_sandbox_port", "fork_sandbox"}
"""What they make has no URL of its own that can be read, or is more than one thing."""


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def answers(operation: dict[str, Any]) -> dict[str, Any]:
    return {status: answer for status, answer in operation["responses"].items() if status.startswith("2")}


def schema_of(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content.get("content", {}).get("application/json", {}).get("schema", {})
    reference = found.get("$ref", "") or next((each["$ref"] for each in found.get("anyOf", []) if "$ref" in each), "")
    named: dict[str, Any] = DOCUMENT["components"]["schemas"].get(reference.rpartition("/")[2], {})
    return named or found


def test_bodies_are_named_requests() -> None:
    for path, _, operation in operations():
        body = schema_of(operation.get("requestBody", {}))
        if body.get("title") and not path.startswith("/runtime"):
            assert body["title"].endswith("Request"), (operation["operationId"], body["title"])


def test_what_returns_nothing_says_so_by_its_status() -> None:
    for path, _, operation in operations():
        for status, answer in answers(operation).items():
            if schema_of(answer).get("title") == "Success":
                assert FOR_OPENHANDS.search(path), operation["operationId"]
            assert (status == "204") == ("content" not in answer), operation["operationId"]
            if "application/json" in answer.get("content", {}) and not FOR_OPENHANDS.search(path):
                assert schema_of(answer).get("type", "null") != "null", operation["operationId"]


def test_what_is_made_says_where_it_is() -> None:
    for _, _, operation in operations():
        if "201" in operation["responses"] and operation["operationId"] not in MADE_BUT_NOT_ALONE:
            assert "Location" in operation["responses"]["201"]["headers"], operation["operationId"]


def test_no_answer_has_a_time_that_is_a_number() -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        for field, described in schema.get("properties", {}).items():
            assert "since 1970" not in described.get("description", ""), f"{name}.{field}"
            if field.endswith("_at"):
                kinds = [described, *described.get("anyOf", [])]
                assert any(kind.get("format") == "date-time" for kind in kinds), f"{name}.{field}"


def test_every_page_is_of_the_same_kind() -> None:
    pages = 0
    for _, _, operation in operations():
        for answer in answers(operation).values():
            schema = schema_of(answer)
            if "items" in schema.get("properties", {}):
                pages += 1
                assert "next_page_id" in schema["properties"], operation["operationId"]
                given = {each["name"]: each for each in operation["parameters"]}
                assert {"page_id", "limit"} <= given.keys(), operation["operationId"]
                assert given["limit"]["schema"]["maximum"] <= 10_000
    assert pages >= 10


def test_every_option_is_inspectable_and_documented() -> None:
    fields = SandboxRequest.model_fields
    documented = DOCUMENT["components"]["schemas"]["SandboxRequest"]["properties"]
    assert [name for name in OPTIONS if name not in fields or name not in documented] == []


def test_pages_neither_repeat_nor_leave_out() -> None:
    found = [(float(number % 3), f"näme/~{number}\udcff") for number in range(20)]
    seen, page_id = [], None
    while True:
        items, page_id = page(found, lambda each: each, page_id, 3)
        seen += items
        if page_id is None:
            break
        assert page_id.isascii()
        found = [each for each in found if each != items[0]]  # what was seen may be gone
    assert seen == sorted(seen)
    assert len(seen) == len(set(seen)) == 20
    for bad in ("", "~", "x~y", "nan~x"):
        with pytest.raises(ValueError, match="invalid page_id"):
            page(found, lambda each: each, bad, 3)


def test_the_options_are_those_of_the_sdk_in_either_place(client: httpx.Client) -> None:
    given: dict[str, Any] = {
        "image": "host",
        "env": {"A": "b"},
        "work_dir": "/workspace",
        "network": "none",
        "labels": {"x": "y"},
        "name": "both",
        "lifetime": 3600,
        "idle_timeout": 60,
        "setup": ["true"],
        "setup_timeout": 30,
        "task_id": "t",
        "ports": {"WEB": 8000},
    }
    above = client.post("/sandboxes", json=given)
    assert above.status_code == 201, above.text
    assert above.headers["Location"] == f"/api/v1/sandboxes/{above.json()['id']}"
    client.delete(f"/sandboxes/{above.json()['id']}")
    inside = client.post("/sandboxes", json={"settings": given})
    assert inside.status_code == 201, inside.text
    for info in (above.json(), inside.json()):
        assert (info["name"], info["labels"]) == ("both", {"x": "y", "task_id": "t"})
        assert [each["name"] for each in info["exposed_urls"]] == ["WEB"]
        assert info["isolation"] == "namespaces"  # what it has: none was requested
        left = datetime.fromisoformat(info["expires_at"]) - datetime.now(UTC)
        assert 3000 < left.total_seconds() <= 3600
        assert info["expires_at"].endswith("Z")
    said = client.get(f"/sandboxes/{inside.json()['id']}/settings").json()
    assert (said["isolation"], said["setup_timeout_s"]) == (None, 30)
    refused = client.post("/sandboxes", json={"memory": "512m"})  # understood, and this engine cannot
    assert "cannot enforce memory" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"sandbox_spec_id": "default", "memory": "1g"}, "'sandbox_spec_id' and 'memory' both describe"),
        ({"sandbox_spec_id": "default", "settings": {}}, "either sandbox_spec_id or settings"),
        ({"settings": {"image": "host"}, "workDir": "/a"}, "'settings' and 'workDir' both describe"),
        ({"name": "a", "settings": {"name": "b"}}, "'name' is given twice"),
        ({"ports": 8000}, "ports are an object"),
        ({"idle_timeot": 5}, "Did you mean 'idle_timeout'?"),
    ],
)
def test_what_excludes_one_another_is_named(client: httpx.Client, body: dict[str, Any], words: str) -> None:
    answer = client.post("/sandboxes", json=body)
    assert (answer.status_code, words in answer.text) == (422, True), answer.text


@pytest.mark.parametrize(
    ("method", "path", "body", "words"),
    [
        ("GET", "/sandboxes/search?lable=a=b", None, "Did you mean 'label'?"),
        ("GET", "/health?x=1", None, "It has none."),
        ("POST", "/sandboxes/none/pause", {"memry": "ram"}, "Did you mean 'memory'?"),
        ("PUT", "/sandboxes/none/expiry", {"lifetme": 5}, "Did you mean 'lifetime'?"),
        ("POST", "/keys", {"nam": "x"}, "Did you mean 'name'?"),
        ("GET", "/events?after=1&page_id=1", None, "either page_id or after"),
    ],
)
def test_unknown_names_are_answered_with_the_right_one(
    client: httpx.Client, method: str, path: str, body: dict[str, Any] | None, words: str
) -> None:
    answer = client.request(method, path, json=body)
    assert (answer.status_code, words in answer.text) == (422, True), answer.text
    assert answer.headers["content-type"] == "application/problem+json"


def test_what_earlier_clients_send_is_still_understood(client: httpx.Client, sandbox: str) -> None:
    assert client.put(f"{sandbox}/expiry", json={"lifetime_s": 1000}).status_code == 200
    ran = client.post(f"{sandbox}/exec", json={"command": "echo ok", "timeout_s": 5})
    assert ran.json()["stdout"] == "ok\n"
    made = client.post("/sandboxes", json={"settings": {"setup_timeout_s": 5}, "lifetime_s": 60, "idle_timeout_s": 9})
    assert made.status_code == 201, made.text
    assert client.post("/tokens", json={"lifetime_s": 60}).status_code == 201


def test_files_are_listed_in_pages_with_times_and_sizes(client: httpx.Client, sandbox: str) -> None:
    line = "mkdir d && cd d && touch -d 2001-02-03T04:05:06Z a && touch -d '@-99999999999999' b; echo hi >c"
    client.post(f"{sandbox}/exec", json={"command": line})
    first = client.get(f"{sandbox}/files", params={"path": "d", "limit": 2}).json()
    assert [entry["path"] for entry in first["items"]] == ["a", "b"]
    assert first["items"][0]["modified_at"] == "2001-02-03T04:05:06Z"
    rest = client.get(f"{sandbox}/files", params={"path": "d", "page_id": first["next_page_id"]}).json()
    assert [(entry["path"], entry["size_bytes"]) for entry in rest["items"]] == [("c", 3)]
    assert rest["next_page_id"] is None

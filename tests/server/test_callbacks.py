"""Messages that programs in a sandbox post: kept as its events, bounded, and only with its own key."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from atoll.server.ports.port_request import PortRequest
from server.conftest import new_user
from server.running import RunningServer
from server.waiting import WEB, events, launch, run, start, until

HEADER = "X-Session-API-Key"


@pytest.fixture
def made(api: httpx.Client) -> dict[str, Any]:
    """A sandbox that knows where to post, and with which key."""
    info = start(api, callback=True, exposed_ports=[{"name": "AGENT_SERVER", "port": 8000, "public": True}])
    said = run(api, info["id"], "printf '%s %s' $OH_WEBHOOKS_0_BASE_URL $OH_SESSION_API_KEYS_0").split()
    return {**info, "base": said[0], "inside_key": said[1]}


def post(info: dict[str, Any], path: str, body: object, key: str | None = None, **options: Any) -> httpx.Response:
    headers = {} if key == "" else {HEADER: key or info["inside_key"]}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{info['base']}{path}", content=content, headers=headers, trust_env=False, timeout=30, **options)


def test_what_is_posted_is_shown_as_events(
    api: httpx.Client, native_server: RunningServer, made: dict[str, Any]
) -> None:
    assert made["base"] == f"{native_server.url}/api/v1/webhooks/{made['id']}"
    answer = post(made, "/conversations", {"id": "c-1", "title": "hello"})
    assert (answer.status_code, answer.json()) == (200, {"success": True})
    messages = [{"kind": "MessageEvent", "text": "ä"}, {"kind": "ActionEvent"}]
    assert post(made, "/events/c-1", messages).status_code == 200
    assert post(made, "/events/c-1", [{"kind": "Outer"}], made["session_api_key"]).status_code == 200
    found = events(api, made["id"], "callback")
    assert [each["data"]["conversation_id"] for each in found] == ["c-1"] * 4
    assert [each["data"]["message"] for each in found[:2]] == [{"id": "c-1", "title": "hello"}, messages[0]]
    assert found[1]["reason"] == "conversation c-1: MessageEvent"
    assert httpx.get(f"{native_server.url}/api/v1/webhooks/secrets", trust_env=False).status_code == 404


def test_a_sandbox_that_did_not_ask_knows_no_key(api: httpx.Client) -> None:
    info = start(api)
    assert run(api, info["id"], "printf '%s%s' $OH_WEBHOOKS_0_BASE_URL $OH_SESSION_API_KEYS_0") == ""
    api.delete("/sandbox-specs/calling")
    assert api.post("/sandbox-specs", json={"id": "calling", "callback": True}).json()["callback"] is True
    told = start(api, sandbox_spec_id="calling")
    assert told["id"] in run(api, told["id"], "echo $OH_WEBHOOKS_0_BASE_URL")


def test_only_its_own_key_and_only_while_it_runs(
    api: httpx.Client, native_server: RunningServer, made: dict[str, Any]
) -> None:
    other = start(api, callback=True)
    theirs = run(api, other["id"], "printf %s $OH_SESSION_API_KEYS_0")
    wrong = ["", "nonsense", theirs, other["session_api_key"], made["inside_key"][:-1], native_server.key or ""]
    wrong += [made["inside_key"].replace(made["id"], other["id"]), made["inside_key"] + "x", "x" * 400]
    for key in wrong:
        assert post(made, "/conversations", {"id": "c"}, key).status_code == 401, key
    bearer = {"Authorization": f"Bearer {native_server.key}"}
    assert httpx.post(f"{made['base']}/conversations", json={}, headers=bearer, trust_env=False).status_code == 401
    assert post({**made, "base": made["base"].replace(made["id"], "nosuch")}, "/conversations", {}).status_code == 401
    path = f"/sandboxes/{made['id']}"
    assert post(made, "/events/c", []).status_code == 200
    api.post(f"{path}/pause").raise_for_status()
    for key in (made["inside_key"], made["session_api_key"], ""):
        assert post(made, "/conversations", {"id": "c"}, key).status_code == 401
    assert api.get(path).json()["state"] == "PAUSED", "a message wakes nobody"
    api.post(f"{path}/resume").raise_for_status()
    assert post(made, "/conversations", {"id": "c"}).status_code == 200
    api.delete(path).raise_for_status()
    assert post(made, "/conversations", {"id": "c"}).status_code == 401
    assert len(events(api, made["id"], "callback")) == 1


def test_the_key_inside_is_good_for_messages_only(native_server: RunningServer, made: dict[str, Any]) -> None:
    path = f"/sandboxes/{made['id']}"
    with native_server.client("", **{HEADER: made["inside_key"]}) as inside:
        assert inside.get(path).status_code == 401
        assert inside.post(f"{path}/exec", json={"command": "true"}).status_code == 401
        assert inside.post(f"{path}/port-links", json={"port": 8000}).status_code == 401
        assert inside.get("/sandboxes/by-session-key").status_code == 401


def test_a_locked_out_users_sandbox_posts_nothing(api: httpx.Client, native_server: RunningServer) -> None:
    eve = new_user(api, "eve-who-posts")
    with native_server.client(eve.key) as hers:
        info = start(hers, callback=True)
        said = run(hers, info["id"], "printf '%s %s' $OH_WEBHOOKS_0_BASE_URL $OH_SESSION_API_KEYS_0").split()
    made = {**info, "base": said[0], "inside_key": said[1]}
    assert post(made, "/conversations", {"id": "c"}).status_code == 200
    assert api.patch(f"/users/{eve.id}", json={"disabled": True}).status_code == 200
    assert post(made, "/conversations", {"id": "c"}).status_code == 401


def test_messages_are_bounded_in_size_number_and_rate(api: httpx.Client, made: dict[str, Any]) -> None:
    assert post(made, "/events/c", b"[" + b" " * (1 << 20) + b"]").status_code == 413
    assert post(made, "/events/c", [{}] * 201).status_code in (400, 422)
    for wrong in (b"", b"nonsense", b"[1]", b"{}", b"[" * 100_000, b'"x"'):
        assert post(made, "/events/c", wrong).status_code in (400, 422), wrong[:20]
    assert post(made, "/conversations", []).status_code in (400, 422)
    assert post(made, "/events/c%0d", []).status_code in (400, 404, 422)
    assert events(api, made["id"], "callback") == []
    hostile = (
        b'[{"a": "'
        + b"x" * 50_000
        + b'"}, {"a": "\\ud800", "\\udfff": 1e400, "b": NaN}, '
        + (b'{"a":' * 900 + b"1" + b"}" * 900 + b"]")
    )
    assert post(made, "/events/c", hostile).status_code == 200
    long, odd, deep = events(api, made["id"], "callback")
    assert long["data"]["truncated"]
    assert len(long["data"]["text"]) == 16 << 10
    assert odd["data"]["message"] == {"a": "?", "?": None, "b": None}
    assert "…" in json.dumps(deep["data"], ensure_ascii=False)
    answers = [post(made, "/events/c", [{"kind": "x"}] * 200) for _ in range(4)]
    assert [each.status_code for each in answers].count(200) <= 2
    refused = [each for each in answers if each.status_code == 429]
    assert len(refused) >= 2
    assert all(int(each.headers["Retry-After"]) >= 1 for each in refused)
    assert any(event["after"] == "RUNNING" for event in events(api, made["id"], "state")), "they displace no changes"


def test_all_sandboxes_of_one_user_have_a_rate_together(api: httpx.Client, native_server: RunningServer) -> None:
    mallory = new_user(api, "mallory-who-posts")
    with native_server.client(mallory.key) as hers:
        crowd = [start(hers, callback=True) for _ in range(4)]
    many = [{"kind": "x"}] * 200
    base = f"{native_server.url}/api/v1/webhooks"
    answers = [
        post({**info, "base": f"{base}/{info['id']}"}, "/events/c", many, info["session_api_key"])
        for info in crowd
        for _ in range(2)
    ]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) >= 2, "each of them alone would be within its own rate"
    assert "one user" in refused[-1].json()["detail"]


def test_our_session_key_stays_outside_and_the_one_inside_goes_in_its_place(
    api: httpx.Client, native_server: RunningServer, made: dict[str, Any]
) -> None:
    launch(api, made["id"], WEB, "8000")
    url = f"{native_server.url}/api/v1/sandboxes/{made['id']}/ports/8000/x"
    until(lambda: httpx.get(url, trust_env=False).status_code == 200)

    def seen(key: str, query: str) -> tuple[str | None, str]:
        answer = httpx.get(f"{url}{query}", headers={HEADER: key} if key else {}, trust_env=False).json()
        headers = {name.lower(): value for name, value in answer["headers"].items()}
        return headers.get(HEADER.lower()), answer["path"]

    outer, inner = made["session_api_key"], made["inside_key"]
    assert seen(outer, "") == (inner, "/x")
    assert seen("", f"?a=b&session_api_key={outer}&c=d") == (None, f"/x?a=b&session_api_key={inner}&c=d")
    assert seen("theirs", "?session_api_key=theirs") == ("theirs", "/x?session_api_key=theirs"), "it is none of ours"
    assert seen(f"{outer}x", "") == (None, "/x"), "one that looks like ours stays outside, whatever it is"
    assert seen("", "") == (None, "/x")


def test_a_key_goes_inside_once() -> None:
    sent = [(b"X-Session-API-Key", b"one"), (b"x-session-api-key", b"two"), (b"accept", b"*/*")]
    found = PortRequest("id", 8000, b"/", session_key="three").inwards(sent)
    assert [value for name, value in found if name.lower() == HEADER.lower().encode()] == [b"three"]


def test_which_sandbox_a_session_key_belongs_to(
    api: httpx.Client, native_server: RunningServer, made: dict[str, Any]
) -> None:
    def asked(key: str) -> httpx.Response:
        with native_server.client("", **{HEADER: key}) as client:
            return client.get("/sandboxes/by-session-key")

    found = asked(made["session_api_key"])
    assert (found.status_code, found.json()["id"]) == (200, made["id"])
    assert found.json()["created_by_user_id"] == made["created_by_user_id"]
    assert asked(made["session_api_key"][:-1]).status_code == 401
    assert asked("").status_code == 401
    api.post(f"/sandboxes/{made['id']}/pause").raise_for_status()
    assert asked(made["session_api_key"]).status_code == 401

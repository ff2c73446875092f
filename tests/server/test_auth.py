"""Who may do what: keys, tokens, roles, and a matrix over every route that there is."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from starlette.routing import WebSocketRoute
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from atoll.server.app import bare_app
from server.conftest import Person, new_user
from server.running import SCHEMA, RunningServer

PUBLIC = {("GET", "/api/v1/health")}
SECRET = "state/secret"


def filled(path: str, sandbox_id: str) -> str:
    """A path with parameters that exist where that matters: the refusal must come from who asks, not from a typo."""
    values = {
        "sandbox_id": sandbox_id,
        "spec_id": "default",
        "key_id": "0000",
        "user_id": "ann",
        "command_id": "c",
        "checkpoint_id": "c",
        "name": "s",
        "port": "1",
        "path": "",
    }
    return re.sub(r"\{(\w+)(?::path)?\}", lambda match: values[match[1]], path)


def operations() -> list[tuple[str, str]]:
    return sorted((method.upper(), path) for path, found in SCHEMA["paths"].items() for method in found)


def sockets() -> list[str]:
    found: list[str] = []

    def collect(routes: list[Any], prefix: str) -> None:
        for route in routes:
            if isinstance(route, WebSocketRoute) or type(route).__name__ == "APIWebSocketRoute":
                found.append(prefix + route.path)
            elif hasattr(route, "original_router"):
                collect(route.original_router.routes, prefix + route.include_context.prefix)

    collect(list(bare_app().routes), "")
    return sorted(found)


BODIES: dict[str, Any] = {
    "exec": {"command": "true"},
    "stream": {"command": "true"},
    "commands": {"command": "true"},
    "shell": {"command": "true"},
    "kill": {},
    "move": {"path": "a", "target": "b"},
    "mkdir": {"path": "a"},
    "chmod": {"path": "a", "mode": "644"},
    "expiry": {"lifetime_s": 1000},
    "network": {"policy": "none"},
    "port-links": {"port": 8000},
    "pause-old": {"max_num_sandboxes": 1000},
    "sandbox-specs": {"id": "matrix"},
    "keys": {"user_id": "ann"},
    "tokens": {},
    "users": {"id": "ann"},
    "snapshots": {"name": "s"},
}


def ask(client: httpx.Client, method: str, path: str, sandbox_id: str) -> httpx.Response:
    name = path.rstrip("/").rpartition("/")[2]
    options: dict[str, Any] = {}
    if method in ("POST", "PUT", "PATCH") and name in BODIES:
        options["json"] = BODIES[name]
    elif method == "PATCH":
        options["json"] = {}
    query = {"path": "f", "id": sandbox_id, "timeout": "1"}
    url = filled(path, sandbox_id).removeprefix("/api/v1")
    with client.stream(method, url, params=query, **options) as response:
        return response


def expired(server: RunningServer) -> str:
    secret = hashlib.sha256(b"atoll tokens\0" + (Path(server.folder) / SECRET).read_bytes()).digest()
    claims = {"sub": "ann", "aud": "atoll", "exp": datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)}
    return jwt.encode(claims, secret, "HS256")


@pytest.mark.parametrize(("method", "path"), operations())
def test_no_route_is_open_to_those_it_is_not_for(
    server: RunningServer, bob: Person, matrix_sandbox: dict[str, Any], other_session: str, method: str, path: str
) -> None:
    """No credential, a wrong one, an expired one: 401. Another user: never into somebody else's sandbox. A session
    key: never beyond its own. An administrator's routes: only for administrators."""
    id = matrix_sandbox["id"]
    if (method, path) in PUBLIC:
        with server.client("") as nobody:
            assert ask(nobody, method, path, id).status_code == 200
        return
    for credential in ("", "atoll_000000_wrong", "nonsense", expired(server)):
        with server.client(credential) as client:
            assert ask(client, method, path, id).status_code == 401, credential
    with server.client(bob.key) as client:
        answer = ask(client, method, path, id)
        if "{sandbox_id}" in path:
            assert answer.status_code == 404
        elif path.startswith(("/api/v1/users", "/api/v1/metrics")):
            assert answer.status_code == 403
    with server.client("", **{"X-Session-API-Key": other_session}) as client:
        answer = ask(client, method, path, id)
        assert answer.status_code in ((403, 404) if "{sandbox_id}" in path else (403,))


@pytest.fixture(scope="session")
def matrix_sandbox(server: RunningServer, ann: Person) -> Iterator[dict[str, Any]]:
    with server.client(ann.key) as client:
        info = client.post("/sandboxes").json()
        yield info
        client.delete(f"/sandboxes/{info['id']}")


@pytest.fixture(scope="session")
def other_session(admin: httpx.Client) -> Iterator[str]:
    """The session key of another sandbox, which runs."""
    info = admin.post("/sandboxes").json()
    yield info["session_api_key"]
    admin.delete(f"/sandboxes/{info['id']}")


def test_no_socket_is_open_to_those_it_is_not_for(
    server: RunningServer, bob: Person, matrix_sandbox: dict[str, Any]
) -> None:
    assert len(sockets()) >= 2
    for path in sockets():
        url = f"ws{server.url.removeprefix('http')}{filled(path, matrix_sandbox['id'])}"
        for credential, status in (("", 401), ("wrong", 401), (expired(server), 401), (bob.key, 404)):
            headers = {"Authorization": f"Bearer {credential}"} if credential else {}
            with pytest.raises(InvalidStatus) as refused:
                connect(url, additional_headers=headers, proxy=None)
            assert refused.value.response.status_code == status, path


def test_a_key_is_shown_once_scoped_and_revoked_at_once(
    server: RunningServer, client: httpx.Client, ann: Person
) -> None:
    made = client.post("/keys", json={"name": "reader", "scopes": ["read"]}).json()
    assert made["key"].startswith(f"atoll_{made['id']}_")
    assert "key" not in next(key for key in client.get("/keys").json() if key["id"] == made["id"])
    with server.client(made["key"]) as reader:
        assert reader.get("/sandboxes/search").status_code == 200
        assert reader.post("/sandboxes").status_code == 403
        assert reader.post("/keys", json={}).status_code == 403
        assert client.delete(f"/keys/{made['id']}").status_code == 200
        assert reader.get("/sandboxes/search").status_code == 401
    assert client.delete(f"/keys/{made['id']}").status_code == 404


def test_a_key_can_do_no_more_than_its_maker(client: httpx.Client, others: httpx.Client) -> None:
    assert client.post("/keys", json={"scopes": ["admin"]}).status_code == 403
    assert client.post("/keys", json={"user_id": "bob"}).status_code == 403
    theirs = others.get("/keys").json()[0]["id"]
    assert client.delete(f"/keys/{theirs}").status_code == 404


def test_keys_expire(server: RunningServer, client: httpx.Client) -> None:
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(milliseconds=300)
    made = client.post("/keys", json={"expires_at": soon.isoformat()}).json()
    with server.client(made["key"]) as short:
        while short.get("/sandboxes/search").status_code == 200:
            assert datetime.datetime.now(datetime.UTC) < soon + datetime.timedelta(seconds=10)
        assert short.get("/sandboxes/search").status_code == 401
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=1)
    assert client.post("/keys", json={"expires_at": past.isoformat()}).status_code == 422


def test_a_token_ends_with_its_key(server: RunningServer, client: httpx.Client) -> None:
    key = client.post("/keys", json={"scopes": ["read", "keys"]}).json()
    with server.client(key["key"]) as owner:
        token = owner.post("/tokens", json={"scopes": ["read"]}).json()["token"]
        assert owner.post("/tokens", json={"scopes": ["manage"]}).status_code == 403
    with server.client(token) as holder:
        assert holder.get("/info").json()["scopes"] == ["read"]
        assert holder.post("/tokens", json={}).status_code == 403
        client.delete(f"/keys/{key['id']}")
        assert holder.get("/info").status_code == 401


def test_forged_tokens_are_refused(server: RunningServer, client: httpx.Client, ann: Person) -> None:
    token = client.post("/tokens", json={}).json()["token"]
    claims = jwt.decode(token, options={"verify_signature": False})
    head, body, mark = token.split(".")
    unsigned = jwt.encode(claims, "", "none")
    other_key = jwt.encode(claims, "x" * 32, "HS256")
    with server.client(token) as holder:
        assert holder.get("/info").status_code == 200
    for forged in (unsigned, other_key, f"{head}.{body}.", f"{head}.{body}.{mark[::-1]}", f"{body}.{head}.{mark}"):
        with server.client(forged) as client_:
            assert client_.get("/info").status_code == 401, forged


def test_a_user_who_is_locked_out_is_out_at_once(server: RunningServer, admin: httpx.Client) -> None:
    eve = new_user(admin, "eve")
    with server.client(eve.key) as client:
        assert client.get("/info").status_code == 200
        assert admin.patch("/users/eve", json={"disabled": True}).json()["disabled_at"] is not None
        assert client.get("/info").status_code == 401
        admin.patch("/users/eve", json={"disabled": False})
        assert client.get("/info").status_code == 200
    assert admin.patch("/users/nobody", json={}).status_code == 404
    assert admin.post("/users", json={"id": "eve"}).status_code == 409
    assert "eve" in [user["id"] for user in admin.get("/users").json()["items"]]


def test_an_administrator_sees_all(admin: httpx.Client, client: httpx.Client, sandbox: str) -> None:
    assert admin.get(sandbox).json()["created_by_user_id"] == "ann"
    assert sandbox.rpartition("/")[2] in [item["id"] for item in admin.get("/sandboxes/search").json()["items"]]


def test_the_secret_and_the_database_are_for_the_server_alone(server: RunningServer, ann: Person) -> None:
    state = Path(server.folder) / "state"
    assert state.stat().st_mode & 0o077 == 0
    assert (state / "secret").stat().st_mode & 0o077 == 0
    stored = b"".join(path.read_bytes() for path in state.rglob("*") if path.is_file())
    assert ann.key.rpartition("_")[2].encode() not in stored

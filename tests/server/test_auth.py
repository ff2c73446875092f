"""Keys, tokens and roles. Who may use which route is in the matrix."""

from __future__ import annotations

import datetime
from pathlib import Path

import httpx
import jwt

from server.conftest import Person, new_user
from server.running import RunningServer


def test_a_key_is_shown_once_scoped_and_revoked_at_once(
    server: RunningServer, client: httpx.Client, ann: Person
) -> None:
    made = client.post("/keys", json={"name": "reader", "scopes": ["read"]}).json()
    assert made["key"].startswith(f"atoll_{made['id']}_")
    assert "key" not in next(key for key in client.get("/keys").json()["items"] if key["id"] == made["id"])
    with server.client(made["key"]) as reader:
        assert reader.get("/sandboxes/search").status_code == 200
        assert reader.post("/sandboxes").status_code == 403
        assert reader.post("/keys", json={}).status_code == 403
        assert client.delete(f"/keys/{made['id']}").status_code == 204
        assert reader.get("/sandboxes/search").status_code == 401
    assert client.delete(f"/keys/{made['id']}").status_code == 404


def test_a_key_can_do_no_more_than_its_maker(client: httpx.Client, others: httpx.Client) -> None:
    assert client.post("/keys", json={"scopes": ["admin"]}).status_code == 403
    assert client.post("/keys", json={"user_id": "bob"}).status_code == 403
    theirs = others.get("/keys").json()["items"][0]["id"]
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

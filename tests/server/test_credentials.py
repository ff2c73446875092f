"""What was derived from a credential is no stronger than it, and ends with it."""

from __future__ import annotations

import concurrent.futures
import datetime
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from server.conftest import Person, new_user
from server.running import RunningServer

SPEC = {
    "id": "credentials",
    "exposed_ports": [{"name": "WEB", "port": 8000}, {"name": "OPEN", "port": 9000, "public": True}],
}
HEADER = "X-Session-API-Key"


def in_seconds(seconds: float) -> str:
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).isoformat()


@pytest.fixture
def exposed(client: httpx.Client) -> Iterator[str]:
    """The path of a sandbox of Ann's with ports."""
    assert client.post("/sandbox-specs", json=SPEC).status_code == 201
    yield f"/sandboxes/{client.post('/sandboxes', json={'sandbox_spec_id': SPEC['id']}).json()['id']}"
    client.delete(f"/sandbox-specs/{SPEC['id']}")


@pytest.mark.parametrize("scopes", [["read"], ["read", "manage", "keys"]], ids=str)
def test_who_may_not_use_a_sandbox_sees_no_session_key(
    server: RunningServer, client: httpx.Client, sandbox: str, scopes: list[str]
) -> None:
    id = sandbox.rpartition("/")[2]
    key = client.post("/keys", json={"scopes": scopes}).json()["key"]
    with server.client(key) as reader:
        seen = [
            reader.get(sandbox).json(),
            reader.get(f"{sandbox}/wait").json(),
            *reader.get("/sandboxes", params={"id": id}).json(),
            *reader.get("/sandboxes/search").json()["items"],
        ]
        if "manage" in scopes:
            seen.append(reader.put(f"{sandbox}/expiry", json={"lifetime_s": 1000}).json())
            seen.append(reader.post("/sandboxes").json())
    assert [info["session_api_key"] for info in seen] == [None] * len(seen)
    assert client.get(sandbox).json()["session_api_key"] is not None


def test_a_session_key_shows_itself_and_nothing_stronger(
    server: RunningServer, client: httpx.Client, sandbox: str
) -> None:
    session = client.get(sandbox).json()["session_api_key"]
    with server.client("", **{HEADER: session}) as holder:
        assert holder.get(sandbox).json()["session_api_key"] == session


def test_session_keys_and_links_end_with_the_key_they_were_shown_to(
    server: RunningServer, client: httpx.Client, exposed: str
) -> None:
    made = client.post("/keys", json={"scopes": ["read", "use"]}).json()
    with server.client(made["key"]) as user:
        session = user.get(exposed).json()["session_api_key"]
        link = urlsplit(user.post(f"{exposed}/port-links", json={"port": 8000}).json()["url"]).path
    with server.client("", **{HEADER: session}) as holder:
        second = urlsplit(holder.post(f"{exposed}/port-links", json={"port": 8000}).json()["url"]).path
    with server.client("") as stranger:
        for path in (link, second):
            assert stranger.get(f"{server.url}{path}").status_code == 502
        assert stranger.get(exposed, headers={HEADER: session}).status_code == 200
        client.delete(f"/keys/{made['id']}")
        assert stranger.get(exposed, headers={HEADER: session}).status_code == 401
        for path in (link, second):
            assert stranger.get(f"{server.url}{path}").status_code == 401


def test_what_an_expiring_credential_makes_expires_with_it(
    server: RunningServer, client: httpx.Client, exposed: str
) -> None:
    key = client.post("/keys", json={"expires_at": in_seconds(300)}).json()
    end = datetime.datetime.fromisoformat(key["expires_at"])
    with server.client(key["key"]) as short:
        token = short.post("/tokens", json={"lifetime_s": 86400}).json()
        ends = [
            short.post("/keys", json={}).json()["expires_at"],
            short.post("/keys", json={"expires_at": in_seconds(86400)}).json()["expires_at"],
            token["expires_at"],
            short.post(f"{exposed}/port-links", json={"port": 8000, "lifetime_s": 86400}).json()["expires_at"],
        ]
        assert short.post("/keys", json={"expires_at": in_seconds(60)}).json()["expires_at"] < key["expires_at"]
        until = short.get(exposed).json()["session_api_key"].rpartition("_")[0].rpartition(".")[2]
        ends.append(datetime.datetime.fromtimestamp(int(until), datetime.UTC).isoformat())
    with server.client(token["token"]) as holder:
        ends += [holder.post(path, json={}).json()["expires_at"] for path in ("/keys", "/tokens")]
    assert [each for each in ends if datetime.datetime.fromisoformat(each) > end] == []


def test_a_session_key_expires(server: RunningServer, client: httpx.Client, sandbox: str) -> None:
    with server.client(client.post("/keys", json={"expires_at": in_seconds(1.5)}).json()["key"]) as short:
        session = short.get(sandbox).json()["session_api_key"]
    limit = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=10)
    with server.client("", **{HEADER: session}) as holder:
        while holder.get(sandbox).status_code == 200:
            assert datetime.datetime.now(datetime.UTC) < limit


def test_keys_made_with_a_key_are_revoked_with_it(server: RunningServer, client: httpx.Client) -> None:
    first = client.post("/keys", json={"scopes": ["read", "keys"]}).json()
    with server.client(first["key"]) as holder:
        second = holder.post("/keys", json={}).json()
        token = holder.post("/tokens", json={}).json()["token"]
    with server.client(token) as holder:
        third = holder.post("/keys", json={"scopes": ["read"]}).json()
    assert (second["parent_id"], third["parent_id"]) == (first["id"], first["id"])
    client.delete(f"/keys/{first['id']}")
    for key in (first, second, third):
        with server.client(key["key"]) as holder:
            assert holder.get("/info").status_code == 401


def test_a_time_with_an_offset_is_that_moment(client: httpx.Client) -> None:
    """It was once stored without its offset, and the key lived hours longer."""
    zone = datetime.timezone(datetime.timedelta(hours=-5))
    moment = datetime.datetime.now(zone) + datetime.timedelta(minutes=5)
    made = client.post("/keys", json={"expires_at": moment.isoformat()}).json()
    listed = next(key for key in client.get("/keys").json()["items"] if key["id"] == made["id"])
    assert datetime.datetime.fromisoformat(listed["expires_at"]) == moment


def test_nothing_of_a_user_who_is_locked_out_works(server: RunningServer, admin: httpx.Client, ann: Person) -> None:
    dan = new_user(admin, "dan")
    with server.client(dan.key) as hers:
        assert hers.post("/sandbox-specs", json=SPEC).status_code == 201
        info = hers.post("/sandboxes", json={"sandbox_spec_id": SPEC["id"]}).json()
        path = f"/sandboxes/{info['id']}"
        link = urlsplit(hers.post(f"{path}/port-links", json={"port": 8000}).json()["url"]).path
    public = f"{path}/ports/9000/"
    with server.client("") as stranger:

        def answers() -> list[int]:
            session = {HEADER: info["session_api_key"]}
            return [
                stranger.get(path, headers=session).status_code,
                stranger.post(f"{path}/exec", json={"command": "true"}, headers=session).status_code,
                stranger.get(f"{server.url}{link}").status_code,
                stranger.get(public).status_code,
            ]

        assert answers() == [200, 200, 502, 502]
        assert admin.patch("/users/dan", json={"disabled": True}).status_code == 200
        assert answers() == [401, 401, 401, 401]
        assert admin.get(path).status_code == 200
        admin.patch("/users/dan", json={"disabled": False})
        assert answers() == [200, 200, 502, 502]
    assert admin.delete(path).status_code == 200


def test_an_administrator_makes_lasting_keys_for_others(server: RunningServer, admin: httpx.Client) -> None:
    """Users keep their keys when the key of the administrator who made them is replaced."""
    scopes = ["read", "admin", "keys"]
    own = admin.post("/keys", json={"scopes": scopes}).json()
    with server.client(own["key"]) as other:
        eva = new_user_by(other, "eva")
    admin.delete(f"/keys/{own['id']}")
    with server.client(eva) as hers:
        assert hers.get("/info").status_code == 200


def new_user_by(admin: httpx.Client, name: str) -> str:
    assert admin.post("/users", json={"id": name}).status_code == 201
    return str(admin.post("/keys", json={"user_id": name, "scopes": ["read"]}).json()["key"])


def test_what_is_open_ends_when_the_right_to_it_does(server: RunningServer, client: httpx.Client, sandbox: str) -> None:
    """A terminal, a stream of events, and a command that somebody waits for."""
    made = client.post("/keys", json={"scopes": ["read", "use"]}).json()
    url = f"ws{server.url.removeprefix('http')}/api/v1{sandbox}/terminal"
    authorization = {"Authorization": f"Bearer {made['key']}"}
    with (
        server.client(made["key"]) as user,
        connect(url, additional_headers=authorization, proxy=None) as terminal,
        user.stream("GET", "/events/stream") as events,
        concurrent.futures.ThreadPoolExecutor() as threads,
    ):
        with server.client(made["key"]) as other:
            wanted = {"command": "touch begun; sleep 50", "timeout_s": 60}
            waiting = threads.submit(other.post, f"{sandbox}/exec", json=wanted)
            while client.get(f"{sandbox}/files/stat", params={"path": "begun"}).status_code != 200:
                assert not waiting.done()
            client.delete(f"/keys/{made['id']}")
            with pytest.raises(httpx.TransportError):
                waiting.result(timeout=20)
        with pytest.raises(httpx.TransportError):
            list(events.iter_lines())
        with pytest.raises(ConnectionClosed):
            list(terminal)

"""What one user can pile up, what they can learn of others by it, and what an error tells about the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from atoll.settings import Settings
from server.conftest import new_user
from server.running import RunningServer, new_folder, running_server

LONG = "u" * 230


@pytest.fixture(scope="module")
def small(
    session_folder: Path,
    session_settings: Settings,
    need_engine: Callable[[str, Settings], None],
) -> Iterator[RunningServer]:
    """A server that remembers little."""
    need_engine("bubblewrap", session_settings)
    variables = {"ATOLL_MAX_SPECS": "3", "ATOLL_MAX_KEYS": "4", "ATOLL_MAX_ENDED_RECORDS": "5"}
    with running_server(new_folder(session_folder, "small"), "bubblewrap", **variables) as server:
        yield server


def test_specs_and_keys_are_counted(small: RunningServer) -> None:
    with small.client() as admin:
        with small.client(new_user(admin, "eve").key) as eve:
            made = [eve.post("/sandbox-specs", json={"id": f"s{number}"}) for number in range(5)]
            assert [answer.status_code for answer in made] == [201, 201, 201, 429, 429]
            assert made[-1].json()["code"] == "limit_reached"
            assert eve.delete("/sandbox-specs/s0").status_code == 204
            assert eve.post("/sandbox-specs", json={"id": "s9"}).status_code == 201
            keys = [eve.post("/keys", json={}) for number in range(5)]
            assert [answer.status_code for answer in keys] == [201, 201, 201, 429, 429]
            assert eve.delete(f"/keys/{keys[0].json()['id']}").status_code == 204
            assert eve.post("/keys", json={}).status_code == 201
        with small.client(new_user(admin, "rich", max_specs=4, max_keys=9).key) as rich:
            made = [rich.post("/sandbox-specs", json={"id": f"s{number}"}) for number in range(5)]
            assert [answer.status_code for answer in made] == [201, 201, 201, 201, 429]
            assert [rich.post("/keys", json={}).status_code for _ in range(9)] == [201] * 8 + [429]


def test_what_has_ended_is_kept_for_each_user_and_found_in_pages(small: RunningServer) -> None:
    with small.client() as admin:
        people = [new_user(admin, name) for name in ("gil", "hal")]
    with small.client(people[0].key) as gil, small.client(people[1].key) as hal:
        for client, count in ((hal, 2), (gil, 7)):
            for number in range(count):
                wanted = {"name": f"n{number}", "labels": {"odd": str(number % 2)}}
                answer = client.post("/sandboxes", json=wanted)
                assert answer.status_code == 201, answer.text
                assert client.delete(f"/sandboxes/{answer.json()['id']}").status_code == 200
        found: list[str] = []
        page: dict[str, str] = {"ended": "true", "limit": "2"}
        while True:
            answer = gil.get("/sandboxes/search", params=page).json()
            assert len(answer["items"]) <= 2
            found += [item["name"] for item in answer["items"]]
            if answer["next_page_id"] is None:
                break
            page["page_id"] = answer["next_page_id"]
        assert found == ["n6", "n5", "n4", "n3", "n2"]
        odd = gil.get("/sandboxes/search", params={"ended": "true", "label": "odd=1"}).json()["items"]
        assert [item["name"] for item in odd] == ["n5", "n3"]
        none = gil.get("/sandboxes/search", params={"ended": "true", "status": "RUNNING"}).json()["items"]
        assert none == []
        assert len(hal.get("/sandboxes/search", params={"ended": "true"}).json()["items"]) == 2
        ids = {event["sandbox_id"] for event in hal.get("/events").json()["items"]}
        assert len(ids) == 2


def test_what_a_user_says_of_a_sandbox_is_bounded(client: httpx.Client) -> None:
    """It is written down with every change of the sandbox."""
    env = {f"V{number}": "x" * 100_000 for number in range(10)}
    assert client.post("/sandboxes", json={"env": env}).status_code == 422
    assert client.post("/sandboxes", json={"settings": {"env": env}}).status_code == 422
    assert client.post("/sandbox-specs", json={"id": "large", "settings": {"env": env}}).status_code == 422
    assert client.post("/sandboxes", json={"labels": {"a": "x" * 20_000}}).status_code == 422


def test_nobody_learns_the_names_of_anothers_specs(client: httpx.Client, others: httpx.Client) -> None:
    assert client.post("/sandbox-specs", json={"id": "mine", "settings": {"env": {"A": "ann"}}}).status_code == 201
    assert others.get("/sandbox-specs/mine").status_code == 404
    assert others.post("/sandbox-specs", json={"id": "mine", "settings": {"env": {"A": "bob"}}}).status_code == 201
    assert others.post("/sandbox-specs", json={"id": "mine"}).status_code == 409
    assert others.post("/sandbox-specs", json={"id": "default"}).status_code == 409
    for each, name in ((client, "ann"), (others, "bob")):
        assert each.get("/sandbox-specs/mine").json()["initial_env"] == {"A": name}
        listed = [spec["id"] for spec in each.get("/sandbox-specs/search").json()["items"]]
        assert listed.count("mine") == 1
        assert each.delete("/sandbox-specs/mine").status_code == 204
        assert each.get("/sandbox-specs/mine").status_code == 404


@pytest.mark.parametrize("port", ["08080", "+8080", "8_080", "%208080", "8080.0", "٨٠٨٠", "-8080"])
def test_a_port_in_a_path_is_written_in_one_way(client: httpx.Client, sandbox: str, port: str) -> None:
    answer = client.get(f"{sandbox}/ports/{port}/")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert client.get(f"{sandbox}/ports/8080/").status_code == 403


def test_an_import_that_fails_tells_nothing_of_the_server(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> None:
    need_engine("native", session_settings)
    with running_server(session_folder / "imports", "native") as server, server.client() as admin:
        assert admin.post("/users", json={"id": LONG, "quotas": {"max_snapshots": 1}}).status_code == 201
        key = admin.post("/keys", json={"user_id": LONG, "scopes": ["read", "use", "manage"]}).json()["key"]
        with server.client(key) as user:
            head = json.dumps({"format": "atoll-snapshot", "version": 1, "size_bytes": float("inf")}).encode()
            for content in (b"", b"no\n", head + b"\n" + b"x" * 100, b'{"format": "atoll-snapshot", "version": 7}\n'):
                answer = user.put("/snapshots/x/content", content=content)
                assert answer.status_code == 422
                assert str(session_folder) not in answer.text
            _long_ids_are_counted(user, admin)


def _long_ids_are_counted(user: httpx.Client, admin: httpx.Client) -> None:
    """Of a user whose id is too long to be part of a name."""
    created = user.post("/sandboxes")
    assert created.status_code == 201, created.text
    sandbox = f"/sandboxes/{created.json()['id']}"
    made = user.post(f"{sandbox}/snapshots", json={"name": "one"})
    assert (made.status_code, made.json()["owner_id"]) == (201, LONG)
    assert user.post(f"{sandbox}/snapshots", json={"name": "two"}).status_code == 429
    assert [each["name"] for each in user.get("/snapshots").json()["items"]] == ["one"]
    owner = admin.get("/snapshots").json()["items"][0]["owner_id"]
    for name in (LONG, owner):
        assert admin.get("/snapshots/one", params={"owner": name}).status_code == 200
        assert [each["name"] for each in admin.get("/snapshots", params={"owner": name}).json()["items"]] == ["one"]
    assert user.get("/snapshots", params={"owner": owner}).json()["items"] == []
    assert user.delete("/snapshots/one").status_code == 204

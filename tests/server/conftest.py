"""One server for all tests of a run, with two ordinary users, and sandboxes of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from atoll.settings import Settings
from server.running import RunningServer, running_server

ENGINE = "bubblewrap"


@dataclass(frozen=True)
class Person:
    id: str
    key: str


@pytest.fixture(scope="session")
def server(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> Iterator[RunningServer]:
    need_engine(ENGINE, session_settings)
    with running_server(session_folder / "server", ENGINE, ATOLL_RUNTIME_NETWORK="none") as running:
        yield running


@pytest.fixture(scope="session")
def native_server(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> Iterator[RunningServer]:
    """One whose sandboxes can be paused."""
    need_engine("native", session_settings)
    with running_server(session_folder / "native-server", "native") as running:
        yield running


@pytest.fixture
def api(native_server: RunningServer) -> Iterator[httpx.Client]:
    """Its administrator's. What is started in a test is deleted after it."""
    with native_server.client() as client:
        yield client
        for info in client.get("/sandboxes/search").json()["items"]:
            client.delete(f"/sandboxes/{info['id']}")


@pytest.fixture(scope="session")
def admin(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def new_user(admin: httpx.Client, name: str, **quotas: float) -> Person:
    assert admin.post("/users", json={"id": name, "quotas": quotas}).status_code == 201
    scopes = ["read", "use", "manage", "keys"]
    made = admin.post("/keys", json={"user_id": name, "name": "test", "scopes": scopes})
    assert made.status_code == 201
    return Person(name, made.json()["key"])


@pytest.fixture(scope="session")
def ann(admin: httpx.Client) -> Person:
    return new_user(admin, "ann")


@pytest.fixture(scope="session")
def bob(admin: httpx.Client) -> Person:
    return new_user(admin, "bob")


@pytest.fixture
def client(server: RunningServer, ann: Person) -> Iterator[httpx.Client]:
    """Ann's. What she starts in a test is deleted after it."""
    with server.client(ann.key) as client:
        yield client
        for info in client.get("/sandboxes/search").json()["items"]:
            client.delete(f"/sandboxes/{info['id']}")


@pytest.fixture
def others(server: RunningServer, bob: Person) -> Iterator[httpx.Client]:
    with server.client(bob.key) as client:
        yield client


@pytest.fixture
def sandbox(client: httpx.Client) -> str:
    """The path of a sandbox of Ann's."""
    answer = client.post("/sandboxes")
    assert answer.status_code == 201, answer.text
    return f"/sandboxes/{answer.json()['id']}"


@pytest.fixture(scope="session")
def schema_user(admin: httpx.Client) -> Person:
    """Who may start only a few, as random requests start many."""
    return new_user(admin, "random", max_sandboxes=3)


@pytest.fixture(scope="session")
def schema_sandbox(server: RunningServer, schema_user: Person) -> str:
    with server.client(schema_user.key) as client:
        return str(client.post("/sandboxes").json()["id"])

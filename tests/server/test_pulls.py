"""Images that a server's users name: from public registries with their own logins, or as an administrator allows."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from atoll.settings import Settings
from needs import needs
from server.conftest import Person, new_user
from server.running import RunningServer, running_server
from unit.images.archives import file, small_root
from unit.images.registries import PASSWORD, USER, Front, Pusher, registry

pytestmark = needs("docker-registry")
LOGIN = {"username": USER, "password": PASSWORD}


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry") / "closed", password=True) as address:
        Pusher(address, "a/b", password=True).image("1", [small_root(file("data", b"closed"))])
        yield address


@pytest.fixture(scope="module")
def pulling(
    tmp_path_factory: pytest.TempPathFactory,
    closed: str,
    session_settings: Settings,
    need_engine: Callable[[str, Settings], None],
) -> Iterator[RunningServer]:
    """Its operator has logged in at a registry, which users may reach, too."""
    need_engine("native", session_settings)
    folder = tmp_path_factory.mktemp("pulling")
    secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {closed: {"auth": secret}}}))
    variables = {"DOCKER_CONFIG": str(folder), "ATOLL_REGISTRIES": closed}
    with running_server(folder / "s", "native", **variables) as server:
        yield server


@pytest.fixture(scope="module")
def user(pulling: RunningServer) -> Iterator[httpx.Client]:
    with pulling.client() as admin:
        person: Person = new_user(admin, "ann")
    with pulling.client(person.key) as client:
        yield client


@pytest.fixture(scope="module")
def administrator(pulling: RunningServer) -> Iterator[httpx.Client]:
    with pulling.client() as admin:
        yield admin


def fetched(client: httpx.Client, spec: dict[str, Any]) -> dict[str, Any]:
    """A spec, when its image is there or is known not to come."""
    assert client.post("/sandbox-specs", json=spec).status_code == 201
    while True:
        info = dict(client.get(f"/sandbox-specs/{spec['id']}").json())
        if info["image_status"] in ("ready", "failed"):
            return info


def test_a_user_reaches_nothing_of_the_servers_network(user: httpx.Client, administrator: httpx.Client) -> None:
    with Front("nowhere", "secret page") as inner:
        image = f"{inner.address}/a/b:1"
        answer = user.post("/sandboxes", json={"settings": {"image": image}})
        assert (answer.status_code, "secret" in answer.text) == (422, False)
        info = fetched(user, {"id": "inner", "settings": {"image": image}})
        assert (info["image_status"], "secret" in info["image_detail"]) == ("failed", False)
        assert inner.seen == []
        administrator.post("/sandboxes", json={"settings": {"image": image}})
        assert inner.seen != []


def test_the_operators_login_is_for_administrators_and_what_they_share(
    user: httpx.Client, administrator: httpx.Client, closed: str
) -> None:
    image = {"settings": {"image": f"{closed}/a/b:1"}}
    assert user.post("/sandboxes", json=image).status_code == 422
    assert fetched(user, {"id": "closed", **image})["image_status"] == "failed"
    assert fetched(administrator, {"id": "closed", **image, "shared": True})["image_status"] == "ready"
    assert user.post("/sandboxes", json=image).status_code == 422  # that it is here now changes nothing
    assert user.post("/sandboxes", json={"sandbox_spec_id": "closed"}).status_code == 422  # her own
    assert user.delete("/sandbox-specs/closed").status_code == 204
    made = user.post("/sandboxes", json={"sandbox_spec_id": "closed"})
    assert made.status_code == 201
    again = user.post(f"/sandboxes/{made.json()['id']}/restart")
    assert again.status_code == 204, again.text


def test_a_user_brings_a_login(user: httpx.Client, administrator: httpx.Client, closed: str) -> None:
    image = {"settings": {"image": f"{closed}/a/b:1"}}
    wrong = {**image, "registry_login": {**LOGIN, "password": "another"}}
    assert user.post("/sandboxes", json=wrong).status_code == 422
    made = user.post("/sandboxes", json={**image, "registry_login": LOGIN})
    assert made.status_code == 201, made.text
    assert PASSWORD not in made.text
    info = fetched(user, {"id": "mine", **image, "registry_login": LOGIN})
    assert info["image_status"] == "ready"
    assert PASSWORD not in user.get("/sandbox-specs/search").text
    assert user.post("/sandboxes", json={"sandbox_spec_id": "mine"}).status_code == 422  # it was not kept
    assert user.post("/sandboxes", json={"sandbox_spec_id": "mine", "registry_login": LOGIN}).status_code == 201
    assert user.post("/sandbox-specs/mine/pull", json={"registry_login": LOGIN}).status_code == 202

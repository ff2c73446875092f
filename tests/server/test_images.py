"""Images on a server: whose they are, how much they may take, and what stays of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll.settings import Settings
from needs import needs
from server.conftest import new_user
from server.running import RunningServer, running_server
from unit.images.archives import file, small_root
from unit.images.registries import Front, Pusher, registry

pytestmark = needs("docker-registry")
MIB = 1 << 20
_names = iter(range(1000))


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry") / "public") as address:
        for tag, size in {"small": 1, "large": 3 * MIB, "other": 2}.items():
            Pusher(address, "a/b").image(tag, [small_root(file("data", bytes([size % 251]) * size))])
        yield address


@pytest.fixture(scope="module")
def kept(
    tmp_path_factory: pytest.TempPathFactory,
    public: str,
    session_settings: Settings,
    need_engine: Callable[[str, Settings], None],
) -> Iterator[RunningServer]:
    need_engine("native", session_settings)
    folder = tmp_path_factory.mktemp("kept")
    with running_server(folder / "s", "native", ATOLL_REGISTRIES="127.0.0.0/8") as server:
        yield server


@pytest.fixture
def admin(kept: RunningServer) -> Iterator[httpx.Client]:
    with kept.client() as client:
        yield client


@pytest.fixture
def people(kept: RunningServer, admin: httpx.Client) -> Iterator[Callable[..., httpx.Client]]:
    """Makes users, each with a client."""
    clients: list[httpx.Client] = []

    def make(**quotas: float) -> httpx.Client:
        clients.append(kept.client(new_user(admin, f"user{next(_names)}", **quotas).key))
        return clients[-1]

    yield make
    for client in clients:
        client.post("/images/prune", json={"all": True})
        client.close()


def settled(client: httpx.Client, name: str) -> dict[str, Any]:
    """What became of a pull."""
    answer = client.post("/images/pull", json={"name": name})
    assert answer.status_code == 202, answer.text
    while True:
        found = dict(client.get("/images/inspect", params={"name": name}).json())
        if found["status"] != "pulling":
            return found


def names(client: httpx.Client) -> list[str]:
    return [image["name"] for image in client.get("/images").json()["items"]]


def test_an_image_belongs_to_who_pulled_it(people: Callable[..., httpx.Client], public: str) -> None:
    ann, bob, image = people(), people(), f"{public}/a/b:small"
    found = settled(ann, image)
    assert (found["status"], found["name"], found["layers"] != []) == ("ready", image, True)
    assert names(ann) == [image]
    assert names(bob) == []
    assert bob.get("/images/inspect", params={"name": image}).status_code == 404
    assert bob.get("/images/inspect", params={"name": image, "owner": found["owner_id"]}).status_code == 404
    assert bob.delete("/images", params={"name": image}).status_code == 404
    assert bob.delete("/images", params={"name": image, "owner": found["owner_id"]}).status_code == 404
    assert bob.post("/images/prune", json={"all": True}).json()["names"] == []
    assert names(ann) == [image]
    assert ann.delete("/images", params={"name": image}).status_code == 204
    assert ann.delete("/images", params={"name": image}).status_code == 404


def test_an_image_that_two_pull_is_stored_once_and_counts_for_both(
    people: Callable[..., httpx.Client], public: str
) -> None:
    ann, bob = people(), people()
    with Front(public, "") as front:
        image = f"{front.address}/a/b:large"
        mine = settled(ann, image)
        blobs = [path for method, path, _ in front.asked if method == "GET" and "/blobs/" in path]
        his = settled(bob, image)
        assert [path for method, path, _ in front.asked if method == "GET" and "/blobs/" in path] == blobs
    assert mine["digest"] == his["digest"]
    assert (his["own_bytes"], his["shared_bytes"] >= 3 * MIB) == (0, True)
    assert ann.delete("/images", params={"name": image}).status_code == 204
    his = bob.get("/images/inspect", params={"name": image}).json()
    assert (his["status"], his["own_bytes"] >= 3 * MIB) == ("ready", True)


def test_a_quota_of_bytes_is_kept(people: Callable[..., httpx.Client], public: str) -> None:
    poor = people(max_image_bytes=2 * MIB)
    found = settled(poor, f"{public}/a/b:large")
    assert (found["status"], "would have more than" in found["detail"]) == ("failed", True)
    made = poor.post("/sandboxes", json={"settings": {"image": f"{public}/a/b:large"}})
    assert (made.status_code, "would have more than" in made.text) == (429, True)
    assert settled(poor, f"{public}/a/b:small")["status"] == "ready"
    assert names(poor).count(f"{public}/a/b:small") == 1


def test_what_unpacks_to_more_than_the_quota_is_refused_meanwhile(
    people: Callable[..., httpx.Client], public: str, kept: RunningServer
) -> None:
    """The registry says that it is small, as compressed images are."""
    import gzip

    poor = people(max_image_bytes=MIB)
    Pusher(public, "a/packed").image("1", [small_root(file("zeros", bytes(8 * MIB)))], gzip.compress, "+gzip")
    found = settled(poor, f"{public}/a/packed:1")
    assert (found["status"], "would have more than" in found["detail"]) == ("failed", True)
    assert names(poor) == [f"{public}/a/packed:1"]  # its failure is shown
    assert poor.delete("/images", params={"name": f"{public}/a/packed:1"}).status_code == 204
    assert names(poor) == []


def test_a_quota_of_images_is_kept(people: Callable[..., httpx.Client], public: str) -> None:
    poor = people(max_images=1)
    assert settled(poor, f"{public}/a/b:small")["status"] == "ready"
    assert settled(poor, f"{public}/a/b:small")["status"] == "ready"
    found = settled(poor, f"{public}/a/b:other")
    assert (found["status"], "which is the limit" in found["detail"]) == ("failed", True)


def test_an_image_in_use_stays(people: Callable[..., httpx.Client], admin: httpx.Client, public: str) -> None:
    ann, image = people(), f"{public}/a/b:small"
    made = ann.post("/sandboxes", json={"settings": {"image": image}})
    assert made.status_code == 201, made.text
    assert ann.get("/images/inspect", params={"name": image}).json()["users"] == [made.json()["id"]]
    for client in (ann, admin):
        assert client.post("/images/prune", json={"all": True}).json()["names"].count(image) == 0
    assert ann.delete("/images", params={"name": image}).status_code == 422
    assert ann.delete(f"/sandboxes/{made.json()['id']}").status_code == 200
    pruned = ann.post("/images/prune", json={"all": True, "older_days": 1}).json()
    assert pruned["names"] == []
    pruned = ann.post("/images/prune", json={"all": True}).json()
    assert pruned["names"] == [image]
    assert pruned["freed_bytes"] > 0


def test_an_administrator_shares_an_image(
    people: Callable[..., httpx.Client], admin: httpx.Client, public: str
) -> None:
    ann, bob, image = people(), people(max_image_bytes=0), f"{public}/a/b:large"
    owner = settled(ann, image)["owner_id"]
    change = {"name": image, "owner": owner, "shared": True}
    assert ann.put("/images/sharing", json=change).status_code == 403
    assert admin.put("/images/sharing", json=change).json()["owner_id"] is None
    assert admin.put("/images/sharing", json=change).status_code == 404
    for client in (ann, bob):
        assert names(client) == [image]
        assert client.delete("/images", params={"name": image}).status_code == 403
    made = bob.post("/sandboxes", json={"settings": {"image": image}})
    assert made.status_code == 201, made.text  # it counts for nobody
    assert bob.delete(f"/sandboxes/{made.json()['id']}").status_code == 200
    assert admin.put("/images/sharing", json={**change, "shared": False}).json()["owner_id"] == owner
    assert names(bob) == []
    assert names(ann) == [image]


def test_a_pull_that_is_deleted_ends(people: Callable[..., httpx.Client], public: str) -> None:
    ann = people()
    with Front(public, "stalled") as front:
        image = f"{front.address}/a/b:large"
        assert ann.post("/images/pull", json={"name": image}).json()["status"] == "pulling"
        front.stalled.wait(20)
        assert ann.get("/images/inspect", params={"name": image}).json()["status"] == "pulling"
        assert ann.delete("/images", params={"name": image}).status_code == 204
        while image in names(ann):
            threading.Event().wait(0.01)


def test_pulls_at_once_are_bounded(people: Callable[..., httpx.Client], public: str) -> None:
    ann, bob = people(), people()
    for number in range(9):
        Pusher(public, "a/many").image(str(number), [small_root(file("data", b"x" * MIB))])
    with Front(public, "stalled") as front:
        wanted = [f"{front.address}/a/many:{number}" for number in range(9)]
        answers = [ann.post("/images/pull", json={"name": name}).status_code for name in wanted]
        assert answers == [202] * 8 + [429]
        assert settled(bob, f"{public}/a/b:small")["status"] == "ready"  # others go on
        for name in wanted[:8]:
            assert ann.delete("/images", params={"name": name}).status_code == 204


@pytest.mark.parametrize("name", ["tar:/etc/passwd", "docker:x", "debian:bookworm", "host", "snapshot:x"])
def test_only_what_a_registry_has_is_pulled(people: Callable[..., httpx.Client], name: str) -> None:
    assert people().post("/images/pull", json={"name": name}).status_code == 422


def test_lists_have_pages(people: Callable[..., httpx.Client], public: str) -> None:
    ann = people()
    for tag in ("small", "other"):
        settled(ann, f"{public}/a/b:{tag}")
    first = ann.get("/images", params={"limit": 1}).json()
    second = ann.get("/images", params={"limit": 1, "page_id": first["next_page_id"]}).json()
    found = [page["items"][0]["name"] for page in (first, second)]
    assert found == [f"{public}/a/b:other", f"{public}/a/b:small"]
    assert second["next_page_id"] is None


def test_the_command_line_manages_images_of_a_server(
    people: Callable[..., httpx.Client], kept: RunningServer, public: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from atoll.cli.image import app

    ann, image = people(), f"{public}/a/b:small"
    monkeypatch.setenv("ATOLL_URL", kept.url)
    monkeypatch.setenv("ATOLL_API_KEY", ann.headers["Authorization"].removeprefix("Bearer "))
    runner = CliRunner()

    def run(*words: str) -> str:
        done = runner.invoke(app, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert image in run("pull", image)
    assert [each["name"] for each in json.loads(run("ls", "--json"))] == [image]
    assert image in run("ls")
    assert json.loads(run("inspect", image))["digest"].startswith("sha256:")
    assert image in run("rm", image)
    run("pull", image)
    assert f"removed {image}" in run("prune", "--all")
    assert json.loads(run("ls", "--json")) == []


def test_nothing_is_left_in_the_store(kept: RunningServer, admin: httpx.Client) -> None:
    """What the tests before this one pulled and gave up."""
    admin.post("/images/prune", json={"all": True})
    store: Path = kept.folder / "data" / "images"
    assert [path.name for part in ("names", "tmp", "roots") for path in (store / part).iterdir()] == []
    assert [path for path in (store / "blobs").glob("*/*") if path.parent.name == "sha256"] == []

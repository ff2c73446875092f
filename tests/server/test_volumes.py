"""Named volumes over REST: private to each user, within quotas, mounted by name, uploaded and downloaded."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll import ConflictError, LimitReachedError, Sandbox, VolumeNotFoundError, Volumes
from needs import need
from server.conftest import Person, new_user
from server.running import RunningServer

MIB = 1 << 20


@pytest.fixture(scope="session")
def people(native_server: RunningServer) -> tuple[Person, Person]:
    need("root", "mkfs.btrfs")
    with native_server.client() as admin:
        quotas = {"max_volumes": 4, "max_volume_bytes": 256 * MIB}
        return new_user(admin, "vera", **quotas), new_user(admin, "viktor", **quotas)


def cleared(server: RunningServer, person: Person) -> Iterator[httpx.Client]:
    with server.client(person.key) as client:
        yield client
        for info in client.get("/sandboxes/search").json()["items"]:
            assert client.delete(f"/sandboxes/{info['id']}").status_code == 200
        for volume in client.get("/volumes").json()["items"]:
            assert client.delete(f"/volumes/{volume['name']}").status_code == 204


@pytest.fixture
def vera(native_server: RunningServer, people: tuple[Person, Person]) -> Iterator[httpx.Client]:
    yield from cleared(native_server, people[0])


@pytest.fixture
def viktor(native_server: RunningServer, people: tuple[Person, Person]) -> Iterator[httpx.Client]:
    yield from cleared(native_server, people[1])


def make(client: httpx.Client, name: str, size: str | int = "32m") -> httpx.Response:
    return client.post("/volumes", json={"name": name, "size": size})


def start(client: httpx.Client, *volumes: str) -> httpx.Response:
    return client.post("/sandboxes", json={"volumes": list(volumes)})


def run(client: httpx.Client, sandbox: httpx.Response, command: str) -> str:
    assert sandbox.status_code == 201, sandbox.text
    answer = client.post(f"/sandboxes/{sandbox.json()['id']}/exec", json={"command": command})
    return str(answer.json()["stdout"])


def tar(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        return sorted(member.name for member in found)


def test_the_life_of_a_volume(vera: httpx.Client) -> None:
    made = make(vera, "data")
    assert (made.status_code, made.headers["Location"]) == (201, "/api/v1/volumes/data")
    assert make(vera, "data").status_code == 409
    info = vera.get("/volumes/data").json()
    assert (info["name"], info["owner_id"], info["size_bytes"], info["users"]) == ("data", "vera", 32 * MIB, [])
    sandbox = start(vera, "data:/data")
    run(vera, sandbox, "echo kept > /data/file")
    assert vera.get("/volumes/data").json()["users"] == [sandbox.json()["id"]]
    refused = vera.delete("/volumes/data")
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    assert sandbox.json()["id"] in refused.text
    vera.delete(f"/sandboxes/{sandbox.json()['id']}")
    again = start(vera, "data:/d:ro")
    assert run(vera, again, "cat /d/file; touch /d/x || echo no") == "kept\nno\n"
    assert vera.get(f"/sandboxes/{again.json()['id']}/settings").json()["volumes"][0]["name"] == "data"
    vera.delete(f"/sandboxes/{again.json()['id']}")
    assert vera.delete("/volumes/data").status_code == 204
    assert vera.get("/volumes/data").status_code == 404
    assert vera.delete("/volumes/data").json()["code"] == "volume_not_found"


def test_another_user_sees_nothing_of_a_volume(
    vera: httpx.Client, viktor: httpx.Client, native_server: RunningServer
) -> None:
    make(vera, "data")
    run(vera, start(vera, "data:/data"), "echo secret > /data/file")
    for attempt in (
        viktor.get("/volumes/data"),
        viktor.get("/volumes/data", params={"owner": "vera"}),
        viktor.delete("/volumes/data", params={"owner": "vera"}),
        viktor.get("/volumes/data/tree"),
        viktor.post("/volumes/data/copies", json={"name": "stolen"}),
        viktor.post("/volumes/data/restore", json={"source": "data"}),
    ):
        assert (attempt.status_code, attempt.json()["code"]) == (404, "volume_not_found"), attempt.text
    assert viktor.get("/volumes").json()["items"] == []
    assert viktor.get("/volumes", params={"owner": "vera"}).json()["items"] == []
    make(viktor, "data")
    assert run(viktor, start(viktor, "data:/data"), "ls /data") == ""
    with native_server.client() as admin:
        seen = {(each["owner_id"], each["name"]) for each in admin.get("/volumes").json()["items"]}
        assert {("vera", "data"), ("viktor", "data")} <= seen
        assert admin.get("/volumes/data", params={"owner": "vera"}).json()["owner_id"] == "vera"


@pytest.mark.parametrize("source", ["/etc", "./data", "a/b", "@" + "0" * 40, "../viktor"])
def test_only_names_without_a_slash_are_for_users(vera: httpx.Client, source: str) -> None:
    answer = start(vera, f"{source}:/data")
    assert answer.status_code in (403, 422), answer.text
    for body in (
        {"name": source, "path": "/data"},
        {"name": "data", "host": "/etc", "path": "/data"},
        {"path": "/data"},
    ):
        assert vera.post("/sandboxes", json={"volumes": [body]}).status_code == 422
    assert vera.get("/volumes").json()["items"] == []


def test_quotas_hold_for_each_way_to_make_a_volume(vera: httpx.Client) -> None:
    assert make(vera, "a", 200 * MIB).status_code == 201
    too_large = make(vera, "b", 100 * MIB)
    assert (too_large.status_code, too_large.json()["code"]) == (429, "limit_reached")
    assert vera.post("/volumes/a/copies", json={"name": "b"}).status_code == 429
    assert start(vera, "b:/data").status_code == 429  # the default size is more than what is left
    assert vera.put("/volumes/b/tree", content=tar(f=b"")).status_code == 429
    assert [each["name"] for each in vera.get("/volumes").json()["items"]] == ["a"]
    for name in "bcd":
        assert make(vera, name, MIB).status_code == 201
    assert "limit" in make(vera, "e", MIB).json()["detail"]
    assert make(vera, "e", 1).status_code == 422


def test_what_a_failed_request_made_is_gone(native_server: RunningServer) -> None:
    with native_server.client() as admin:
        answer = admin.post("/sandboxes", json={"image": "no/such:image", "volumes": ["fresh:/data"]})
        assert answer.status_code == 422
        assert admin.get("/volumes/fresh").status_code == 404


def test_lists_come_in_pages(vera: httpx.Client) -> None:
    for name in "abc":
        make(vera, name, MIB)
    first = vera.get("/volumes", params={"limit": 2}).json()
    second = vera.get("/volumes", params={"limit": 2, "page_id": first["next_page_id"]}).json()
    assert [each["name"] for each in first["items"] + second["items"]] == ["a", "b", "c"]
    assert second["next_page_id"] is None


def test_a_snapshot_is_kept_and_restored(vera: httpx.Client) -> None:
    make(vera, "data")
    sandbox = start(vera, "data:/data")
    run(vera, sandbox, "echo old > /data/file")
    made = vera.post("/volumes/data/copies", json={"name": "before", "read_only": True})
    assert (made.status_code, made.headers["Location"]) == (201, "/api/v1/volumes/before")
    assert (made.json()["read_only"], made.json()["source"]) == (True, "data")
    run(vera, sandbox, "echo new > /data/file")
    assert vera.post("/volumes/data/restore", json={"source": "before"}).status_code == 409
    assert start(vera, "before:/data").status_code == 422
    vera.delete(f"/sandboxes/{sandbox.json()['id']}")
    assert vera.post("/volumes/data/restore", json={"source": "before"}).status_code == 200
    assert run(vera, start(vera, "data:/data"), "cat /data/file") == "old\n"


def test_trees_go_in_and_out(vera: httpx.Client) -> None:
    assert vera.put("/volumes/data/tree", content=tar(one=b"1")).status_code == 429  # no room for the default size
    make(vera, "data")
    assert vera.put("/volumes/data/tree", content=tar(one=b"1", two=b"22")).status_code == 204
    assert vera.get("/volumes/data/tree").status_code == 200
    assert names(vera.get("/volumes/data/tree").content) == [".", "./one", "./two"]
    assert vera.get("/volumes/none/tree").status_code == 404
    evil = vera.put("/volumes/data/tree", content=tar(**{"../../escape": b"x"}))
    assert evil.status_code == 422
    assert vera.put("/volumes/data/tree", content=tar(big=os.urandom(40 * MIB))).status_code == 507
    assert vera.get("/sandboxes/search").json()["items"] == []  # those of the transfers are gone
    assert vera.delete("/volumes/data").status_code == 204


def test_what_a_sandbox_leaves_in_a_volume_does_not_hurt_its_download(vera: httpx.Client) -> None:
    make(vera, "data")
    sandbox = start(vera, "data:/data")
    run(vera, sandbox, "cd /data; ln -s /etc/passwd link; mkfifo pipe; echo ok > file; ln -s . loop; chmod 0 file")
    vera.delete(f"/sandboxes/{sandbox.json()['id']}")
    answer = vera.get("/volumes/data/tree")
    assert (answer.status_code, answer.json()["code"]) == (409, "partial_copy")  # a pipe cannot be copied
    assert "/volume/pipe" in answer.json()["detail"]
    sandbox = start(vera, "data:/data")
    run(vera, sandbox, "rm /data/pipe")
    vera.delete(f"/sandboxes/{sandbox.json()['id']}")
    answer = vera.get("/volumes/data/tree")
    assert names(answer.content) == [".", "./file", "./link", "./loop"]
    assert b"root:" not in answer.content


def test_the_sdk_uses_the_volumes_of_a_server(
    native_server: RunningServer, people: tuple[Person, Person], vera: httpx.Client, tmp_path: Path
) -> None:
    where: dict[str, Any] = {"server": native_server.url, "api_key": people[0].key}
    Volumes.create("data", size="32m", **where)
    with pytest.raises(ConflictError):
        Volumes.create("data", **where)
    with pytest.raises(LimitReachedError):
        Volumes.create("more", size="1g", **where)
    with Sandbox(volumes={"data": "/data"}, **where) as sandbox:
        sandbox.write_file("/data/file", "kept")
        assert len(Volumes.inspect("data", **where).users) == 1
    Volumes.snapshot("data", "before", **where)
    Volumes.download("data", "", tmp_path / "out", **where)
    assert os.listdir(tmp_path / "out") == ["file"]
    (tmp_path / "out/more").write_text("more")
    Volumes.upload("data", tmp_path / "out", "deeper", **where)
    Volumes.download("data", "deeper/more", tmp_path / "more", **where)
    assert (tmp_path / "more").read_text() == "more"
    Volumes.restore("data", "before", **where)
    assert [(each.name, each.read_only) for each in Volumes.list(**where)] == [("data", False), ("before", True)]
    assert sorted(Volumes.prune(**where)) == ["before", "data"]
    with pytest.raises(VolumeNotFoundError):
        Volumes.inspect("data", **where)

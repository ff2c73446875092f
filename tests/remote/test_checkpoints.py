"""Undo, forks and snapshots of sandboxes on a server: through the client, over REST, and by hand."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll import AsyncSandbox, CheckpointNotFoundError, Undo
from atoll.engines.remote.engine import RemoteEngine
from atoll.errors import ConflictError, ImageError, SnapshotNotFoundError, UnsupportedError
from atoll.model import UndoRule
from atoll.settings import Settings
from server.conftest import Person, new_user
from server.running import RunningServer, new_folder, running_server


@pytest.fixture(scope="module")
def native_server(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> Iterator[RunningServer]:
    need_engine("native", session_settings)
    with running_server(new_folder(session_folder, "undo"), "native") as running:
        yield running
        with running.client() as admin:
            for found in admin.get("/snapshots").json()["items"]:
                admin.delete(f"/snapshots/{found['name']}", params={"owner": found["owner_id"]})


@pytest.fixture(scope="module")
def people(native_server: RunningServer) -> Callable[..., Person]:
    known: dict[str, Person] = {}

    def person(name: str, **quotas: float) -> Person:
        if name not in known:
            with native_server.client() as admin:
                known[name] = new_user(admin, name, **quotas)
        return known[name]

    return person


@pytest.fixture
def ann(native_server: RunningServer, people: Callable[..., Person]) -> Iterator[httpx.Client]:
    with native_server.client(people("ann").key) as client:
        yield client
        for info in client.get("/sandboxes/search").json()["items"]:
            client.delete(f"/sandboxes/{info['id']}")
        for found in client.get("/snapshots").json()["items"]:
            client.delete(f"/snapshots/{found['name']}")


@pytest.fixture
def bob(native_server: RunningServer, people: Callable[..., Person]) -> Iterator[httpx.Client]:
    with native_server.client(people("bob").key) as client:
        yield client
        for found in client.get("/snapshots").json()["items"]:
            client.delete(f"/snapshots/{found['name']}")


def started(client: httpx.Client, **wanted: Any) -> str:
    answer = client.post("/sandboxes", json=wanted)
    assert answer.status_code == 201, answer.text
    return f"/sandboxes/{answer.json()['id']}"


def ran(client: httpx.Client, sandbox: str, command: str) -> str:
    answer = client.post(f"{sandbox}/exec", json={"command": command}).json()
    assert answer["exit_code"] == 0, answer
    return str(answer["stdout"])


async def test_going_back_on_a_server(native_server: RunningServer, session_settings: Settings) -> None:
    async with AsyncSandbox(
        server=native_server.url, api_key=native_server.key, settings=session_settings, undo=True
    ) as sandbox:
        await sandbox.write_file("file", "one")
        checkpoint = await sandbox.checkpoint("base")
        await sandbox.write_file("file", "two")
        assert [str(change) for change in await sandbox.diff(checkpoint)] == ["C /workspace/file"]
        (change,) = await sandbox.diff("base", text=True)
        assert change.text is not None
        assert "-one" in change.text
        await sandbox.rollback("base")
        assert await sandbox.read_file("file") == "one"
        with pytest.raises(CheckpointNotFoundError):
            await sandbox.rollback("never")
        await sandbox.exec("rm file")
        await sandbox.undo()
        assert await sandbox.read_file("file") == "one"
        await sandbox.restart()
        assert not await sandbox.exists("file")
        await sandbox.delete_checkpoint(checkpoint)
        assert [each.id for each in await sandbox.checkpoints() if each.name == "base"] == []


async def test_forks_and_snapshots_through_the_client(
    native_server: RunningServer, people: Callable[..., Person], session_settings: Settings, tmp_path: Path
) -> None:
    where: dict[str, Any] = {"server": native_server.url, "api_key": people("carl").key, "settings": session_settings}
    async with AsyncSandbox(**where, labels={"a": "b"}) as sandbox:
        await sandbox.write_file("file", "one")
        await sandbox.checkpoint("first")
        await sandbox.write_file("file", "two")
        forks = [*await sandbox.fork(2), *await sandbox.fork(1, "first")]
        try:
            assert [await each.read_file("file") for each in forks] == ["two", "two", "one"]
            await forks[0].write_file("file", "three")
            await forks[0].restart()
            assert await forks[0].read_file("file") == "two"
            assert forks[0].spec.labels == {"a": "b"}
            again = await AsyncSandbox.attach(forks[1].id, **where)
            assert await again.read_file("file") == "two"
            await again.detach()
        finally:
            for fork in forks:
                await fork.cleanup()
        assert await sandbox.read_file("file") == "two"
        with pytest.raises(UnsupportedError, match="gvisor"):
            await sandbox.checkpoint(memory=True)
        made = await sandbox.snapshot("mine", "first")
        assert (made.name, made.image) == ("mine", "host")
        with pytest.raises(ConflictError):
            await sandbox.snapshot("mine")
    engine = RemoteEngine(session_settings, url=native_server.url, api_key=people("carl").key)
    assert [each.name for each in await engine.snapshots()] == ["mine"]
    await engine.export_snapshot("mine", tmp_path / "file")
    await engine.delete_snapshot("mine")
    await engine.delete_snapshot("mine")
    with pytest.raises(SnapshotNotFoundError):
        await engine.export_snapshot("mine", tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["file"]
    await engine.import_snapshot(tmp_path / "file", "again")
    async with AsyncSandbox(**where, image="snapshot:again") as copy:
        assert await copy.read_file("file") == "one"
        found = await AsyncSandbox.attach(copy.id, **where)
        assert found.spec.image == "snapshot:again"
        await found.detach()
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-100])
    with pytest.raises(ImageError, match="damaged"):
        await engine.import_snapshot(tmp_path / "file", "broken")
    assert [each.name for each in await engine.snapshots()] == ["again"]
    await engine.delete_snapshot("again")
    await engine.aclose()


def test_a_name_is_each_users_own(native_server: RunningServer, ann: httpx.Client, bob: httpx.Client) -> None:
    for client, text in ((ann, "ann's"), (bob, "bob's")):
        sandbox = started(client)
        ran(client, sandbox, f'echo "{text}" >file')
        made = client.post(f"{sandbox}/snapshots", json={"name": "same"})
        assert made.json()["owner_id"] == text.partition("'")[0]
        assert client.post(f"{sandbox}/snapshots", json={"name": "same"}).status_code == 409
        client.delete(sandbox)
    assert ran(ann, started(ann, settings={"image": "snapshot:same"}), "cat file") == "ann's\n"
    theirs = started(bob, settings={"image": "snapshot:same"})
    assert ran(bob, theirs, "cat file") == "bob's\n"
    assert bob.get(theirs).json()["image"] == "snapshot:same"
    bob.delete(theirs)
    assert bob.delete("/snapshots/same").status_code == 204
    assert ran(ann, started(ann, settings={"image": "snapshot:same"}), "cat file") == "ann's\n"
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        for query in ({}, {"owner": "ann"}):
            assert bob.request(method, f"/snapshots/same{path}", params=query).status_code == 404
    assert bob.get("/snapshots", params={"owner": "ann"}).json()["items"] == []
    for image in ("snapshot:same", "snapshot:ann/same", "snapshot:bob/../ann/same"):
        assert bob.post("/sandboxes", json={"settings": {"image": image}}).status_code == 404
    with native_server.client() as admin:
        assert [found["name"] for found in admin.get("/snapshots", params={"owner": "ann"}).json()["items"]] == ["same"]
        assert admin.post("/sandboxes", json={"settings": {"image": "snapshot:same"}}).status_code == 404


def test_quotas_count_forks_and_snapshots(native_server: RunningServer, people: Callable[..., Person]) -> None:
    poor = people("poor", max_sandboxes=3, max_snapshots=2, max_snapshot_bytes=3_000_000)
    with native_server.client(poor.key) as client:
        sandbox = started(client)
        assert client.post(f"{sandbox}/fork", json={"count": 3}).status_code == 429
        assert len(client.get("/sandboxes/search").json()["items"]) == 1
        forks = client.post(f"{sandbox}/fork", json={"count": 2}, headers={"Idempotency-Key": "once"}).json()
        assert len(forks) == 2
        again = client.post(f"{sandbox}/fork", json={"count": 2}, headers={"Idempotency-Key": "once"}).json()
        assert [each["id"] for each in again] == [each["id"] for each in forks]
        other = client.post(f"{sandbox}/fork", json={"count": 2, "memory": True}, headers={"Idempotency-Key": "once"})
        assert other.status_code == 409
        assert len({each["session_api_key"] for each in forks}) == 2
        assert client.post(f"{sandbox}/fork").status_code == 429
        for each in forks:
            client.delete(f"/sandboxes/{each['id']}")
        assert client.post(f"{sandbox}/snapshots", json={"name": "small"}).status_code == 201
        ran(client, sandbox, "head -c 2000000 /dev/urandom >file; sync")
        assert client.post(f"{sandbox}/snapshots", json={"name": "large"}).status_code == 201
        assert client.post(f"{sandbox}/snapshots", json={"name": "third"}).status_code == 429
        client.delete("/snapshots/small")
        assert client.post(f"{sandbox}/snapshots", json={"name": "too-much"}).status_code == 429
        content = client.get("/snapshots/large/content").content
        assert client.put("/snapshots/copy/content", content=content).status_code in (422, 429)
        assert [found["name"] for found in client.get("/snapshots").json()["items"]] == ["large"]
        client.delete("/snapshots/large")
        assert client.put("/snapshots/copy/content", content=content).status_code == 201
        assert client.delete("/snapshots/copy").status_code == 204
        client.delete(sandbox)


def test_an_upload_is_a_strangers(native_server: RunningServer, ann: httpx.Client) -> None:
    header = {"format": "atoll-snapshot", "version": 1, "size_bytes": 1, "inner": "rootfs", "opaque": []}
    header |= {"base": {"image": "host"}, "removed": ["../../../../etc/passwd"]}
    body = json.dumps(header).encode() + b"\n"
    escape = body + hashlib.sha256(body).hexdigest().encode() + b"\n"
    for content in (b"", b"nonsense", escape, escape[:-1] + b"x"):
        assert ann.put("/snapshots/evil/content", content=content).status_code == 422, content
    for name in ("..", "a%2Fb", "-x", "a" * 64):
        assert ann.put(f"/snapshots/{name}/content", content=b"").status_code in (404, 405, 422)
    assert ann.get("/snapshots").json()["items"] == []
    assert list((native_server.folder / "state" / "transfers").iterdir()) == []


def test_a_spec_can_ask_for_undo(ann: httpx.Client) -> None:
    sandbox = started(ann, settings={"undo": {"keep": 2, "only": ["*rm *"]}})
    ran(ann, sandbox, "echo one >file")
    assert ann.get(f"{sandbox}/checkpoints").json()["items"] == []
    assert ann.post(f"{sandbox}/undo").status_code == 404
    ran(ann, sandbox, "rm file")
    (kept,) = ann.get(f"{sandbox}/checkpoints").json()["items"]
    assert kept["made_by"] == "before: rm file"
    assert ann.post(f"{sandbox}/undo", json={"steps": 1}).json()["id"] == kept["id"]
    assert ran(ann, sandbox, "cat file") == "one\n"
    for _ in range(3):
        ran(ann, sandbox, "rm -f file")
    assert len(ann.get(f"{sandbox}/checkpoints").json()["items"]) == 2


def test_what_is_of_the_servers_machine_is_for_administrators(bob: httpx.Client) -> None:
    for image in ("tar:/etc/passwd", "docker:x"):
        assert bob.post("/sandboxes", json={"settings": {"image": image}}).status_code == 403


@pytest.mark.timeout(240)
def test_by_hand(native_server: RunningServer, people: Callable[..., Person], tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    environment = {**kept, "ATOLL_URL": native_server.url, "ATOLL_API_KEY": people("dora").key}

    def atoll(*words: str, code: int = 0) -> str:
        command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    sandbox = atoll("create").strip()
    atoll("exec", sandbox, "--", "sh", "-c", "echo one >file")
    checkpoint = atoll("checkpoint", sandbox, "--name", "base").strip()
    atoll("exec", sandbox, "--", "rm", "file")
    assert checkpoint in atoll("checkpoints", sandbox)
    assert atoll("diff", sandbox, "base") == "R /workspace/file\n"
    atoll("rollback", sandbox, "base")
    (fork,) = atoll("fork", sandbox).split()
    assert atoll("exec", fork, "--", "cat", "file") == "one\n"
    assert atoll("snapshot", "create", sandbox, "mine") == "snapshot:mine\n"
    atoll("snapshot", "export", "mine", str(tmp_path / "file"))
    atoll("snapshot", "import", str(tmp_path / "file"), "again")
    assert "again" in atoll("snapshot", "ls")
    atoll("snapshot", "rm", "mine", "again")
    assert "gvisor" in atoll("checkpoint", sandbox, "--memory", code=125)
    assert "only 0 commands" in atoll("undo", sandbox, code=125)
    atoll("rm", sandbox, fork)


def test_undo_of_a_spec_is_a_rule_of_commands() -> None:
    undo = Undo.of(UndoRule(only=("*rm *",)))
    assert undo.covers("sudo rm -r x")
    assert not undo.covers("ls")
    assert Undo.of(UndoRule()).covers("ls")

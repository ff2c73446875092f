"""Files over HTTP."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.running import RunningServer
from unit.images.archives import deep, tar


def content(path: str) -> dict[str, str]:
    return {"path": path}


def test_a_file_goes_in_and_comes_out(client: httpx.Client, sandbox: str) -> None:
    files = f"{sandbox}/files"
    data = bytes(range(256)) * 8192
    written = client.put(f"{files}/content", params={"path": "deep/er/a.bin", "mode": "600"}, content=data)
    assert (written.json()["size_bytes"], written.json()["mode"]) == (len(data), "0600")
    assert client.get(f"{files}/content", params=content("deep/er/a.bin")).content == data
    assert (
        client.post(f"{files}/append", params=content("deep/er/a.bin"), content=b"end").json()["size_bytes"]
        == len(data) + 3
    )
    assert [entry["path"] for entry in client.get(files, params=content("deep/er")).json()["items"]] == ["a.bin"]
    assert client.post(f"{files}/move", json={"path": "deep/er/a.bin", "target": "b.bin"}).status_code == 204
    assert client.post(f"{files}/chmod", json={"path": "b.bin", "mode": "644"}).status_code == 204
    assert client.get(f"{files}/stat", params=content("b.bin")).json()["mode"] == "0644"
    assert client.post(f"{files}/mkdir", json={"path": "x/y"}).status_code == 204
    assert client.get(f"{files}/stat", params=content("x/y")).json()["kind"] == "directory"
    assert client.delete(files, params=content("x")).status_code == 204
    assert client.get(f"{files}/stat", params=content("x")).status_code == 404


def test_parts_of_a_file(client: httpx.Client, sandbox: str) -> None:
    path, where = f"{sandbox}/files/content", content("f")
    client.put(path, params=where, content=b"0123456789")
    for wanted, part, shown in (
        ("bytes=2-4", b"234", "bytes 2-4/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=-3", b"789", "bytes 7-9/10"),
        ("bytes=5-100", b"56789", "bytes 5-9/10"),
    ):
        answer = client.get(path, params=where, headers={"Range": wanted})
        assert (answer.status_code, answer.content, answer.headers["content-range"]) == (206, part, shown)
    beyond = client.get(path, params=where, headers={"Range": "bytes=10-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, "bytes */10")
    assert client.get(path, params=where, headers={"Range": "lines=1-2"}).content == b"0123456789"


def test_refusals_have_the_right_codes(client: httpx.Client, sandbox: str) -> None:
    files = f"{sandbox}/files"
    client.put(f"{files}/content", params=content("f"), content=b"x")
    for answer, status, code in (
        (client.get(f"{files}/content", params=content("none")), 404, "file_not_found"),
        (client.get(f"{files}/content", params=content(".")), 409, "is_a_directory"),
        (client.get(files, params=content("f")), 409, "not_a_directory"),
        (client.put(f"{files}/content", params=content("f/g"), content=b""), 409, "not_a_directory"),
        (client.put(f"{files}/content", params=content("/usr/x"), content=b""), 403, "permission_denied"),
        (client.get(f"{files}/content", params=content("../../etc/passwd")), 422, "invalid_request"),
        (client.get(f"{files}/content", params=content("a\0b")), 422, "invalid_request"),
        (client.get(f"{files}/content"), 422, "invalid_request"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.request.url


def test_a_broken_upload_changes_nothing(client: httpx.Client, sandbox: str) -> None:
    where = content("f")
    client.put(f"{sandbox}/files/content", params=where, content=b"old")

    def breaking() -> Iterator[bytes]:
        yield b"new" * 100_000
        raise ConnectionError("the client dies")

    with pytest.raises(ConnectionError):
        client.put(f"{sandbox}/files/content", params=where, content=breaking())
    assert client.get(f"{sandbox}/files/content", params=where).content == b"old"


def test_trees_as_archives(client: httpx.Client, sandbox: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in (("a.txt", b"A"), ("sub/b.txt", b"B")):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text), 0o640
            tar.addfile(member, io.BytesIO(text))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    answer = client.put(f"{sandbox}/files/tree", params=content("tree"), content=packed.getvalue())
    assert answer.status_code == 204, answer.text
    listed = client.post(f"{sandbox}/exec", json={"command": "cd tree && cat a.txt sub/b.txt && readlink link"}).json()
    assert listed["stdout"] == "AB/etc/hostname\n"
    back = client.get(f"{sandbox}/files/tree", params=content("tree")).content
    with tarfile.open(fileobj=io.BytesIO(back)) as tar:
        found = {member.name.removeprefix("./"): member for member in tar}
        assert {"a.txt", "sub/b.txt", "link"} <= set(found)
        assert found["link"].linkname == "/etc/hostname"
        assert found["a.txt"].mode == 0o640


@pytest.mark.parametrize("name", ["../up", "a/../../b"])
def test_an_archive_that_leaves_its_tree_is_refused(client: httpx.Client, sandbox: str, name: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = tarfile.SYMTYPE, "x"
        tar.addfile(member)
    assert client.put(f"{sandbox}/files/tree", params=content("t"), content=packed.getvalue()).status_code == 422
    assert client.put(f"{sandbox}/files/tree", params=content("t"), content=b"no archive").status_code == 422


def test_an_archive_cannot_write_through_its_own_link(client: httpx.Client, sandbox: str, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        link = tarfile.TarInfo("out")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)
        member = tarfile.TarInfo("out/evil")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    answer = client.put(f"{sandbox}/files/tree", params=content("t"), content=packed.getvalue())
    assert answer.status_code == 422
    assert list(tmp_path.iterdir()) == []


def test_an_archive_of_long_links_leads_nowhere(client: httpx.Client, sandbox: str, tmp_path: Path) -> None:
    """A chain of links whose real path is too long for the standard library to look at."""
    packed = io.BytesIO()
    step = "d" * 250
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        path = ""
        for letter in "abcdefghijklmnop":
            directory = tarfile.TarInfo(f"{path}{step}")
            directory.type = tarfile.DIRTYPE
            tar.addfile(directory)
            link = tarfile.TarInfo(f"{path}{letter}")
            link.type, link.linkname = tarfile.SYMTYPE, step
            tar.addfile(link)
            path += f"{step}/"
        up = tarfile.TarInfo("a/b/c/d/e/f/g/h/i/j/k/l/m/n/o/p/up")
        up.type, up.linkname = tarfile.SYMTYPE, "../" * 64 + str(tmp_path)[1:]
        tar.addfile(up)
        out = tarfile.TarInfo("out")
        out.type, out.linkname = tarfile.SYMTYPE, "a/b/c/d/e/f/g/h/i/j/k/l/m/n/o/p/up"
        tar.addfile(out)
        evil = tarfile.TarInfo("out/evil")
        evil.size = 1
        tar.addfile(evil, io.BytesIO(b"x"))
    answer = client.put(f"{sandbox}/files/tree", params=content("t"), content=packed.getvalue())
    assert answer.status_code < 500
    assert list(tmp_path.iterdir()) == []


def test_an_archive_deeper_than_a_call_stack_is_refused_and_leaves_nothing(
    client: httpx.Client, sandbox: str, server: RunningServer
) -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    answer = client.put(f"{sandbox}/files/tree", params=content("t"), content=tar(deep(1100)))
    assert 400 <= answer.status_code < 500, answer.text
    assert os.listdir(server.folder / "state/transfers") == []
    assert [name for name in set(os.listdir(tempfile.gettempdir())) - before if "tree" in name] == []


def test_changes_are_seen_as_they_happen(client: httpx.Client, sandbox: str) -> None:
    kinds: list[str] = []
    with client.stream("GET", f"{sandbox}/files/watch") as stream:
        for line in stream.iter_lines():
            event = json.loads(line)
            kinds.append(event["type"])
            if event["type"] == "ready":
                client.post(f"{sandbox}/exec", json={"command": "echo x > new.txt"})
            elif event["path"] == "new.txt":
                break
    assert kinds[0] == "ready"
    assert set(kinds[1:]) <= {"created", "modified", "moved_to"}

"""Builds of images through a real server: who may build what, what becomes of it, and what is left behind."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from atoll.settings import Settings
from needs import needs
from server.building import BASE, begin, built, contexts, ended, events, request, until, with_base
from server.conftest import Person, new_user
from server.running import RunningServer, new_folder, start_server
from server.tiny_root import context
from server.vanishing import ask
from unit.images.archives import block, deep, directory, file, hard_link, pax, special, symlink, tar

pytestmark = needs("root", "busybox")
SECRET = "a-secret-of-hers"


@pytest.fixture(scope="session")
def carol(native_server: RunningServer) -> Iterator[httpx.Client]:
    with native_server.client() as admin:
        person: Person = new_user(admin, "carol")
    with native_server.client(person.key) as client:
        with_base(client)
        yield client


@pytest.fixture(scope="session")
def dave(native_server: RunningServer) -> Iterator[httpx.Client]:
    with native_server.client() as admin:
        person: Person = new_user(admin, "dave")
    with native_server.client(person.key) as client:
        yield client


def test_a_build_makes_an_image_for_sandboxes(carol: httpx.Client, native_server: RunningServer) -> None:
    dockerfile = f"FROM {BASE}\nCOPY f.txt /f\nARG WHO\nENV NAME=$WHO\nRUN cat /f && echo made by $NAME > /made\n"
    path = begin(carol, dockerfile, name="mine", args={"WHO": "carol"}, files={"f_txt": "copied\n"})
    build = ended(carol, path)
    assert build["state"] == "done", build
    assert (build["name"], build["args"], build["step"], build["steps"]) == ("mine", ["WHO"], 2, 2)
    assert build["owner_id"] == "carol"
    assert build["image"]["env"]["NAME"] == "carol"
    happened = events(carol, path)
    assert "copied\n" in "".join(event["text"] for event in happened if event["type"] == "output")
    rest = events(carol, path, offset=happened[1]["offset"])
    assert rest == happened[2:]
    made = carol.post("/sandboxes", json={"settings": {"image": "mine"}})
    assert made.status_code == 201, made.text
    sandbox = f"/sandboxes/{made.json()['id']}"
    ran = carol.post(f"{sandbox}/exec", json={"command": "cat /f /made"}).json()
    assert ran["stdout"] == "copied\nmade by carol\n"
    assert carol.delete(sandbox).is_success
    assert contexts(native_server) == []
    listed = carol.get("/images").json()["items"]
    assert any(image["name"] == build["image"]["name"] for image in listed)


def test_a_failure_says_what_a_failure_here_says(carol: httpx.Client) -> None:
    path = begin(carol, f"FROM {BASE}\nRUN echo so far\nRUN echo not further >&2; exit 7\n")
    build = ended(carol, path)
    assert build["state"] == "failed"
    error = build["error"]
    assert (error["code"], error["place"], error["exit_code"]) == ("build_failed", "Dockerfile:3", 7)
    assert "not further" in error["output"]
    assert ended(carol, begin(carol, f"FROM {BASE}\nONBUILD RUN x\n"))["error"]["detail"].startswith("Dockerfile:2:")


def test_a_build_is_cancelled(carol: httpx.Client, native_server: RunningServer) -> None:
    path = begin(carol, f"FROM {BASE}\nRUN echo begun; sleep 1000\n", name="never")
    until(carol, path, "output", "begun")
    assert carol.delete(path).status_code == 204
    assert carol.get(path).json()["state"] == "cancelled"
    assert carol.delete(path).status_code == 204
    assert contexts(native_server) == []
    assert carol.get("/images/inspect", params={"name": "never"}).status_code == 404


def test_builds_and_images_are_their_users(carol: httpx.Client, dave: httpx.Client) -> None:
    build = built(carol, f"FROM {BASE}\nRUN echo x\n", name="hers")
    path = f"/images/builds/{build['id']}"
    for asked in (dave.get(path), dave.get(f"{path}/logs"), dave.delete(path)):
        assert (asked.status_code, asked.json()["code"]) == (404, "image_build_not_found")
    assert all(each["owner_id"] == "dave" for each in dave.get("/images/builds").json()["items"])
    assert dave.get("/images/inspect", params={"name": "hers"}).status_code == 404
    assert dave.delete("/images", params={"name": "hers"}).status_code == 404
    made = carol.post("/sandboxes", json={"settings": {"image": BASE}}).json()
    assert carol.post(f"/sandboxes/{made['id']}/snapshots", json={"name": "state"}).status_code == 201
    assert carol.delete(f"/sandboxes/{made['id']}").is_success
    built(carol, "FROM snapshot:state\nRUN true\n")
    for base in (BASE, "hers", "tar:/etc/passwd", "docker:x", "snapshot:state", "snapshot:carol/state", "host"):
        build = ended(dave, begin(dave, f"FROM {base}\nRUN true\n"))
        assert build["state"] == "failed", base
    assert carol.delete("/images", params={"name": "hers"}).status_code == 204


def test_what_only_administrators_may_ask_for(dave: httpx.Client) -> None:
    private = {"rules": [{"action": "allow", "cidr": "10.0.0.0/8"}]}
    assert request(dave, context(Dockerfile="FROM x"), network=private).status_code == 403
    assert request(dave, context(Dockerfile="FROM x"), limits={"memory_bytes": 1 << 60}).status_code == 403


def test_secrets_are_neither_kept_nor_shown(carol: httpx.Client, native_server: RunningServer) -> None:
    import base64

    encoded = base64.b64encode(SECRET.encode()).decode()
    dockerfile = f"FROM {BASE}\nARG TOKEN\nRUN --mount=type=secret,id=key test -s /run/secrets/key\n"
    path = begin(carol, dockerfile, secrets={"key": encoded}, args={"TOKEN": f"{SECRET}-token"})
    build = ended(carol, path)
    assert (build["state"], build["secrets"], build["args"]) == ("done", ["key"], ["TOKEN"])
    assert SECRET not in json.dumps(build) + json.dumps(events(carol, path))
    assert request(carol, None, secrets={"key": SECRET * 9}).status_code == 422
    assert SECRET not in request(carol, None, secrets={"key": f"{SECRET}%"}, args={"1": SECRET}).text
    kept = [each for each in native_server.folder.rglob("state/**/*") if each.is_file()]
    assert kept
    for each in [*kept, native_server.folder / "log"]:
        content = each.read_bytes()
        assert SECRET.encode() not in content, each
        assert encoded.encode() not in content, each


def test_a_repeated_request_builds_once(carol: httpx.Client) -> None:
    archive = context(Dockerfile=f"FROM {BASE}\nRUN true\n")
    first, again = (request(carol, archive, key="once", name="once") for _ in range(2))
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["id"] == again.json()["id"]
    assert request(carol, archive, key="once", name="other").status_code == 409
    ended(carol, f"/images/builds/{first.json()['id']}")


def test_an_image_counts_for_the_quotas_of_its_user(native_server: RunningServer) -> None:
    with native_server.client() as admin:
        person = new_user(admin, "frank", max_image_bytes=4 << 20, max_images=2)
    with native_server.client(person.key) as frank:
        with_base(frank)
        large = f"FROM {BASE}\nRUN dd if=/dev/urandom of=/large bs=1M count=6\n"
        build = ended(frank, begin(frank, large, name="large"))
        assert (build["state"], build["error"]["code"]) == ("failed", "limit_reached")
        assert frank.get("/images/inspect", params={"name": "large"}).status_code == 404
        built(frank, f"FROM {BASE}\nRUN true\n", name="small")
        assert ended(frank, begin(frank, f"FROM {BASE}\nRUN true\n", name="third"))["error"]["code"] == "limit_reached"
        built(frank, f"FROM {BASE}\nRUN echo again\n", name="small")


def test_an_engine_that_cannot_build_says_so(client: httpx.Client) -> None:
    answer = request(client, context(Dockerfile="FROM scratch"))
    assert (answer.status_code, answer.json()["code"]) == (422, "unsupported")


HOSTILE = {
    "out of the context": tar(file("../x", b"x")),
    "out of it later": tar(directory("a"), file("a/../../x", b"x")),
    "through a link": tar(symlink("l", "/etc"), file("l/x", b"x")),
    "a hard link out": tar(hard_link("x", "/etc/passwd")),
    "a block device": tar(special("d", b"4", (254, 0))),
    "a character device": tar(special("d", b"3", (1, 1))),
    "a pipe": tar(special("p", b"6")),
    "an overlay's whiteout": tar(special("w", b"3", (0, 0))),
    "cut off": tar(file("f", b"x" * 10_000))[:5000],
    "without an end": file("f", b"x"),
    "a wrong checksum": bytearray(tar(file("f", b"x"))).replace(b"ustar", b"Ustar"),
    "no archive": b"no archive at all" * 100,
    "compressed and cut off": gzip.compress(tar(file("f", b"x" * 100_000)))[:60],
    "compressed and damaged": gzip.compress(tar(file("f", b"x")))[:-6] + b"\0\0\0\0\0\0",
    "a bomb": gzip.compress(bytes(128 << 20)),
    "a size of 8 EiB": block(b"f", size_field=b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7) + bytes(1024),
    "a name that is too long": tar(file("x" * 5000, b"x")),
    "names of any length": pax({"path": "x" * (2 << 20)}) + file("x") + bytes(1024),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_contexts_are_refused(case: str, carol: httpx.Client, native_server: RunningServer) -> None:
    before = len(carol.get("/images/builds").json()["items"])
    answer = request(carol, bytes(HOSTILE[case]))
    assert answer.status_code in (413, 422), answer.text
    assert answer.json()["code"] in ("invalid_request", "too_large")
    assert contexts(native_server) == []
    assert len(carol.get("/images/builds").json()["items"]) == before


def test_what_is_odd_in_a_context_does_no_harm(carol: httpx.Client, native_server: RunningServer) -> None:
    dockerfile = (
        f"FROM {BASE}\nCOPY . /in/\nRUN cat /in/abs /in/.wh.gone; ls -ln /in/suid; ls /in; cat /in/out\n".encode()
    )
    marks = {"SCHILY.xattr.trusted.overlay.opaque": "y", "SCHILY.xattr.security.capability": "x"}
    archive = tar(
        file("Dockerfile", dockerfile),
        file("/abs", b"absolute\n"),
        file(".wh.gone", b"a name\n"),
        file("suid", b"", mode=0o6755),
        pax(marks) + directory("marked"),
        symlink("out", "/etc/shadow"),
    )
    answer = request(carol, gzip.compress(archive))
    assert answer.status_code == 202
    path = f"/images/builds/{answer.json()['id']}"
    build = ended(carol, path)
    text = "".join(event["text"] for event in events(carol, path) if event["type"] == "output")
    assert build["state"] == "failed"  # inside, too, the link leads to nothing
    assert "absolute\na name\n-rwxr-xr-x" in text
    assert "root:" not in text + json.dumps(build)
    assert contexts(native_server) == []


@pytest.mark.parametrize(
    "archive",
    [
        tar(symlink("l", "../.."), file("l/x/y", b"x"), symlink("z", "/"), file("z/etc/x", b"x")),
        pytest.param(tar(deep(1100)), marks=pytest.mark.again),
        tar(*(file(f"f{number}", b"") for number in range(300))),
    ],
    ids=["links up", "depth", "many files"],
)
def test_a_context_that_is_hard_to_read_ends_with_words(
    archive: bytes, carol: httpx.Client, native_server: RunningServer
) -> None:
    path = request(carol, archive, dockerfile_text=f"FROM {BASE}\nCOPY . /in/\nRUN find /in | wc -l\n")
    build = ended(carol, f"/images/builds/{path.json()['id']}")
    assert build["state"] in ("done", "failed")
    assert build["error"] is None or build["error"]["code"] not in ("server_error", ""), build
    assert contexts(native_server) == []


@pytest.mark.parametrize("length", [200, 100_000, 3_000_000])
def test_an_upload_that_breaks_off_leaves_nothing(
    length: int, carol: httpx.Client, native_server: RunningServer
) -> None:
    made = httpx.Request("POST", "http://x", files={"context": ("c", tar(file("f", b"x" * 4_000_000)))})
    body = made.read()
    before = len(carol.get("/images/builds").json()["items"])
    key = carol.headers["authorization"].removeprefix("Bearer ")
    kind = f"Content-Type: {made.headers['content-type']}"
    sock = ask(native_server.url, key, "POST /images/builds", body[:length], kind, length=len(body))
    wait_for(lambda: bool(contexts(native_server)))
    sock.close()
    wait_for(lambda: not contexts(native_server))
    assert len(carol.get("/images/builds").json()["items"]) == before


def test_forms_that_are_no_builds(carol: httpx.Client, native_server: RunningServer) -> None:
    assert carol.post("/images/builds", content=b"x").status_code == 415
    assert carol.post("/images/builds", files={"other": b"x"}).status_code == 422
    assert carol.post("/images/builds", files={"options": (None, b"{")}).status_code == 400
    assert request(carol, None, dockerfil="x").status_code == 422
    assert request(carol, None, timeout_s=-1).status_code == 422
    assert ended(carol, f"/images/builds/{request(carol, None).json()['id']}")["state"] == "failed"  # no Dockerfile
    text = built_text(carol, dockerfile_text=f"FROM {BASE}\nRUN echo without a context\n")
    assert "without a context" in text
    assert contexts(native_server) == []


def built_text(client: httpx.Client, **options: str) -> str:
    path = f"/images/builds/{request(client, None, **options).json()['id']}"
    return "".join(event.get("text", "") for event in events(client, path))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_server_has_failed_builds_and_goes_on_from_the_cache(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> None:
    need_engine("native", session_settings)
    folder = new_folder(session_folder, "builds")
    server = start_server(folder, "native", ATOLL_MAX_CONTEXT_BYTES=str(3 << 20))
    with server.client() as admin:
        with_base(admin)
        too_large = request(admin, context(Dockerfile="FROM x", f=os.urandom(2 << 20)))
        assert (too_large.status_code, contexts(server)) == (507, [])
        steps = f"FROM {BASE}\nRUN echo one > /one\n"
        path = begin(admin, f"{steps}RUN echo begun; sleep 1000\n", name="x")
        until(admin, path, "output", "begun")
        waiting = [begin(admin, f"{steps}RUN sleep 1000\n") for _ in range(5)]
    server.stop(signal.SIGKILL)
    server.close()
    assert contexts(server) != []
    server = start_server(folder, "native")
    try:
        with server.client() as admin:
            for each in (path, *waiting):
                build = admin.get(each).json()
                assert (build["state"], build["error"]["detail"]) == ("failed", "the server was restarted")
            assert contexts(server) == []
            assert "begun\n" in [event.get("text") for event in events(admin, path)]
            assert not list((folder / "data/oci/sandboxes").glob("*.json")), "sandboxes of builds are left"
            again = built(admin, f"{steps}RUN echo two\n")
            assert again["cached_steps"] == 1
    finally:
        assert server.stop() == 0
        server.close()


def test_a_client_that_goes_away_after_its_upload_changes_nothing(carol: httpx.Client) -> None:
    path = begin(carol, f"FROM {BASE}\nRUN echo begun; sleep 0.2; echo over\n")
    host, port = carol.base_url.host, carol.base_url.port
    assert port is not None
    with socket.create_connection((host, port)) as reader:
        head = f"GET /api/v1{path}/logs HTTP/1.1\r\nHost: x\r\nAuthorization: {carol.headers['authorization']}\r\n\r\n"
        reader.sendall(head.encode())
        assert reader.recv(100).startswith(b"HTTP/1.1 200")
    assert ended(carol, path)["state"] == "done"

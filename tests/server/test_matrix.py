"""Every route against everybody: nobody, the wrong, the expired, owners, others, administrators, session keys."""

from __future__ import annotations

import datetime
import hashlib
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from atoll.server.app import bare_app
from server.conftest import Person, new_user
from server.matrix import LINKS, MATRIX, SOCKET, Line, routes
from server.running import RunningServer

SESSION = "X-Session-API-Key"
SCOPES = ["read", "use", "manage", "keys"]


PARAMETERS = {
    f"{method.upper()} {path.removeprefix('/api/v1')}": {each["name"] for each in operation.get("parameters", ())}
    for path, operations in bare_app().openapi()["paths"].items()
    for method, operation in operations.items()
}
"""The parameters of each route. Others would be refused before anything else."""


@dataclass(frozen=True)
class Scene:
    """Ann has a sandbox, a spec and keys; Bob has nothing of hers."""

    server: RunningServer
    ann: Person
    bob: Person
    admin: httpx.Client
    sandbox_id: str
    session: str
    other_session: str
    spec_id: str
    key_id: str
    lacking: dict[str, str]
    """Keys of Ann's, by the scope that they do not have."""
    expired_key: str

    def fill(self, path: str, sandbox_id: str) -> str:
        """Parameters that exist where that matters: the refusal must come from who asks, not from a typo."""
        values = {
            "sandbox_id": sandbox_id,
            "spec_id": self.spec_id,
            "key_id": self.key_id,
            "user_id": "ann",
            "port": "8000",
            "path": "",
            "webhook_id": "00",
            "signal": "traces",
        }
        return re.sub(r"\{(\w+)(?::path)?\}", lambda match: values.get(match[1], "c"), path)

    def ask(self, line: Line, key: str = "", session: str | None = None, sandbox_id: str | None = None) -> Answer:
        id = sandbox_id or self.sandbox_id
        path = self.fill(line.path, id)
        headers = {SESSION: session} if session is not None else {}
        if line.method == SOCKET:
            return self._dial(path, {**headers, **({"Authorization": f"Bearer {key}"} if key else {})})
        url = f"{self.server.url}{path}" if path.startswith("/runtime/") else path
        options = {"json": line.body} if line.body is not None else {}
        known = PARAMETERS.get(f"{line.method} {line.path}", ())
        query = {"path": "f", "id": id, "ids": "none", "timeout": "1"}
        query = {name: value for name, value in query.items() if name in known or line.path.startswith("/runtime")}
        with self.server.client(key, **headers) as client:
            with client.stream(line.method, url, params=query, **options) as response:
                is_json = response.headers.get("content-type", "").endswith("json") and "ndjson" not in str(
                    response.headers
                )
                text = response.read().decode() if is_json else ""
                return Answer(response.status_code, text)

    def _dial(self, path: str, headers: dict[str, str]) -> Answer:
        try:
            url = f"ws{self.server.url.removeprefix('http')}/api/v1{path}"
            with connect(url, additional_headers=headers, proxy=None):
                return Answer(101, "")
        except InvalidStatus as refused:
            return Answer(refused.response.status_code, bytes(refused.response.body or b"").decode())


@dataclass(frozen=True)
class Answer:
    status: int
    text: str

    @property
    def lets_in(self) -> bool:
        """Whether who asks is known and may: it may still have failed for another reason."""
        return self.status not in (401, 403) and "sandbox_not_found" not in self.text


def key_of(admin: httpx.Client, user: str, scopes: list[str], **more: object) -> dict[str, Any]:
    made = admin.post("/keys", json={"user_id": user, "scopes": scopes, **more})
    assert made.status_code == 201
    return dict(made.json())


def expired_key(server: RunningServer, admin: httpx.Client) -> str:
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)
    key = str(key_of(admin, "ann", SCOPES, expires_at=soon.isoformat())["key"])
    with server.client(key) as client:
        while client.get("/info").status_code == 200:
            time.sleep(0.05)
    return key


@pytest.fixture(scope="module")
def scene(server: RunningServer, admin: httpx.Client, ann: Person) -> Iterator[Scene]:
    bob = new_user(admin, f"bob-of-the-matrix-{uuid.uuid4().hex}")
    with server.client(ann.key) as hers:
        spec = {"id": "matrix-of-ann", "exposed_ports": [{"name": "WEB", "port": 8000}]}
        assert hers.post("/sandbox-specs", json=spec).status_code == 201
        mine = hers.post("/sandboxes", json={"sandbox_spec_id": spec["id"]}).json()
        other = admin.post("/sandboxes").json()
        listed = key_of(admin, "ann", ["read"])
        lacking = {scope: key_of(admin, "ann", [each for each in SCOPES if each != scope]) for scope in SCOPES}
        yield Scene(
            server,
            ann,
            bob,
            admin,
            mine["id"],
            mine["session_api_key"],
            other["session_api_key"],
            "matrix-of-ann",
            listed["id"],
            {scope: made["key"] for scope, made in lacking.items()},
            expired_key(server, admin),
        )
        for path in (f"/sandboxes/{mine['id']}", f"/sandboxes/{other['id']}", f"/sandbox-specs/{spec['id']}"):
            assert admin.delete(path).is_success
        for made in (listed, *lacking.values()):
            assert admin.delete(f"/keys/{made['id']}").status_code == 204


@pytest.fixture(scope="module")
def expired_token(server: RunningServer) -> str:
    secret = hashlib.sha256(b"atoll tokens\0" + (Path(server.folder) / "state/secret").read_bytes()).digest()
    claims = {"sub": "ann", "aud": "atoll", "exp": datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)}
    return jwt.encode(claims, secret, "HS256")


def test_every_route_has_its_line() -> None:
    there = sorted((method, path.removeprefix("/api/v1")) for method, path in routes())
    assert sorted((line.method, line.path) for line in MATRIX) == there


BEHIND = [line for line in MATRIX if line.scope not in ("public", "mark", "session", "nobody")]


@pytest.mark.parametrize("line", [line for line in MATRIX if line.scope == "public"], ids=str)
def test_what_is_public(scene: Scene, line: Line) -> None:
    assert scene.ask(line).status == 200


@pytest.mark.parametrize("line", [*(line for line in MATRIX if line.scope == "mark"), *LINKS], ids=str)
def test_no_other_credential_stands_for_the_one_in_the_request(scene: Scene, line: Line) -> None:
    assert scene.server.key is not None
    for key in ("", "nonsense", scene.ann.key, scene.bob.key, scene.server.key):
        assert scene.ask(line, key).status == 401
    assert scene.ask(line, session=scene.session).status == 401


@pytest.mark.parametrize("line", [line for line in MATRIX if line.scope == "session"], ids=str)
def test_only_the_session_key_of_the_sandbox_will_do(scene: Scene, line: Line) -> None:
    for key in ("", "nonsense", scene.ann.key, scene.bob.key, scene.server.key or ""):
        assert scene.ask(line, key).status == 401
    wrong = ["", "nonsense", f"atolls_{scene.sandbox_id}_wrong", scene.session[:-1], f"atollc_{scene.sandbox_id}_"]
    for session in (*wrong, *([scene.other_session] if "{sandbox_id}" in line.path else [])):
        assert scene.ask(line, session=session).status == 401, session
    assert scene.ask(line, session=scene.session).status == 200


@pytest.mark.parametrize("line", [line for line in MATRIX if line.scope == "nobody"], ids=str)
def test_what_is_not_there_for_anybody(scene: Scene, line: Line) -> None:
    for key in ("", scene.ann.key, scene.server.key or ""):
        assert scene.ask(line, key).status == 404


@pytest.mark.parametrize("line", BEHIND, ids=str)
def test_without_a_good_credential_nobody_gets_in(scene: Scene, expired_token: str, line: Line) -> None:
    id, _, secret = scene.ann.key.removeprefix("atoll_").partition("_")
    wrong = ["", "nonsense", "atoll_000000_wrong", f"atoll_{id}_{secret[::-1]}", f"atoll_{id}_", "atolls_x"]
    for key in (*wrong, expired_token, scene.expired_key):
        assert scene.ask(line, key).status == 401, key
    for session in ("", "nonsense", f"atolls_{scene.sandbox_id}_wrong", scene.session[:-1]):
        assert scene.ask(line, session=session).status == 401, session


@pytest.mark.parametrize("line", BEHIND, ids=str)
def test_another_user_gets_nothing_of_it(scene: Scene, line: Line) -> None:
    answer = scene.ask(line, scene.bob.key)
    if line.scope == "admin":
        assert answer.status == 403
    elif "_id}" in line.path:
        assert answer.status == 404
    else:
        about_ann = (scene.sandbox_id, scene.spec_id, scene.key_id, "ann")
        assert answer.status >= 400 or not any(f'"{each}"' in answer.text for each in about_ann), answer.text


@pytest.mark.parametrize("line", BEHIND, ids=str)
def test_a_key_needs_the_scope(scene: Scene, line: Line) -> None:
    if line.scope == "admin":
        assert scene.ask(line, scene.ann.key).status == 403
    else:
        assert scene.ask(line, scene.lacking[line.scope]).status == 403


@pytest.mark.parametrize("line", BEHIND, ids=str)
def test_a_session_key_is_good_for_its_own_sandbox_alone(scene: Scene, line: Line) -> None:
    mine, others = scene.ask(line, session=scene.session), scene.ask(line, session=scene.other_session)
    if not line.session:
        assert (mine.status, others.status) == (403, 403)
    else:
        assert mine.lets_in, mine
        assert others.status == 404


@pytest.mark.parametrize("line", BEHIND, ids=str)
def test_the_owner_and_administrators_get_in(scene: Scene, line: Line) -> None:
    assert scene.server.key is not None
    for key in (scene.ann.key, scene.server.key):
        if key == scene.ann.key and line.scope == "admin":
            continue
        id = scene.sandbox_id
        if line.ends:
            with scene.server.client(scene.ann.key) as hers:
                id = hers.post("/sandboxes").json()["id"]
        if line.path in ("/keys/{key_id}", "/sandbox-specs/{spec_id}") and line.method == "DELETE":
            continue  # the others still need them; that they can be deleted is tested elsewhere
        answer = scene.ask(line, key, sandbox_id=id)
        assert answer.lets_in, answer
        scene.admin.delete(f"/sandboxes/{id}") if line.ends else None

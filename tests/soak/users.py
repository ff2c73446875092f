"""Users of a server who do everything that one can do with sandboxes, in a random order, until they are stopped."""

from __future__ import annotations

import io
import random
import tarfile
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import httpx
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from server.killing import GIVE_UP_S, Client
from server.vanishing import ask, until, upgrade

PORT = 8000
_AT_ONCE = 2
"""Sandboxes of one user; a fork is one more for a moment."""
_SERVE = (
    f"cd /; python3 -m http.server --bind 127.0.0.1 {PORT} >/dev/null 2>&1 & "
    f"until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {PORT}))' 2>/dev/null;"
    " do sleep 0.1; done"
)


class AnswerError(Exception):
    """An answer that no user should get."""


class RefusedError(Exception):
    """An answer that is right where the server was killed in the middle of something."""


class User(Client):
    """`done` counts answers, `problems` what must not happen. Where the server is killed, calls are repeated."""

    def __init__(self, number: int, url: str, key: str, seed: int, kills: bool) -> None:
        super().__init__(number, url, key)
        self.client.timeout = httpx.Timeout(120)
        self._random = random.Random(f"{seed}/{number}")
        self._kills = kills
        self._sandboxes: list[str] = []
        self._names = 0
        self.acts: Counter[str] = Counter()

    def run(self) -> None:
        while not self.over.is_set():
            self.act(self._random.choice(ACTS))

    def each_once(self) -> None:
        for name in ACTS:
            self.act(name)

    def act(self, name: str) -> None:
        """One kind of work."""
        self.acts[name] += 1
        path = ""
        try:
            path = f"/sandboxes/{self._some_sandbox()}"
            getattr(self, f"_{name}")(path)
        except RefusedError:
            # The server died between two steps of this: the sandbox may be paused, or gone, or at another state.
            if path:
                self._delete(path)
        except AnswerError as error:
            self.problems.append(f"{name} of user {self.number}: {error}")
        except (httpx.HTTPError, OSError, WebSocketException, AssertionError) as error:
            if not self._kills:
                self.problems.append(f"{name} of user {self.number}: {error!r}")

    def delete_all(self) -> None:
        """Also snapshots that were made for an answer which a killed server did not send."""
        while self._sandboxes:
            self._delete(f"/sandboxes/{self._sandboxes[0]}")
        for snapshot in self._ask("GET", "/snapshots").json()["items"]:
            self._ask("DELETE", f"/snapshots/{snapshot['name']}", missing_ok=True)

    def _ask(self, method: str, path: str, *, missing_ok: bool = False, **options: Any) -> httpx.Response:
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            try:
                answer = self.client.request(method, path, **options)
            except httpx.HTTPError:
                if not self._kills or time.monotonic() > deadline:
                    raise
            else:
                if answer.is_success or (missing_ok and answer.status_code in (404, 410)):
                    self.done += 1
                    return answer
                said = f"{method} {path}: {answer.status_code} {answer.text}"
                if not self._kills or time.monotonic() > deadline or answer.status_code in (500, 504):
                    raise AnswerError(said)
                if answer.status_code not in (429, 503):
                    raise RefusedError(said)
            self.retried += 1
            time.sleep(0.05)

    def _new_name(self) -> str:
        self._names += 1
        return f"soak-{self.number}-{self._names}"

    def _some_sandbox(self) -> str:
        if not self._sandboxes or (len(self._sandboxes) < _AT_ONCE and self._random.random() < 0.5):
            name = self._new_name()
            wanted = {"name": name, "sandbox_spec_id": spec_of(self.number)}
            made = self._ask("POST", "/sandboxes", json=wanted, headers={"Idempotency-Key": name})
            self._sandboxes.append(made.json()["id"])
        return self._random.choice(self._sandboxes)

    # --- what they do ----------------------------------------------------------------------------------------------

    def _exec(self, path: str) -> None:
        count = self._random.randrange(200_000)
        done = self._ask("POST", f"{path}/exec", json={"command": f"head -c {count} /dev/zero | wc -c"}).json()
        assert done["stdout"].strip() == str(count), done

    def _background(self, path: str) -> None:
        started = self._ask("POST", f"{path}/commands", json={"command": "sleep 1000 & exec sleep 1000"}).json()
        self._ask("POST", f"{path}/commands/{started['id']}/kill", json={})

    def _files(self, path: str) -> None:
        data, where = self._random.randbytes(self._random.randrange(300_000)), {"path": "some/file"}
        self._ask("PUT", f"{path}/files/content", params=where, content=data)
        assert self._ask("GET", f"{path}/files/content", params=where).content == data
        self._ask("DELETE", f"{path}/files", params={"path": "some"}, missing_ok=True)

    def _tree(self, path: str) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for number in range(50):
                member = tarfile.TarInfo(f"{number % 5}/{number}")
                member.size = 1000
                tar.addfile(member, io.BytesIO(bytes(1000)))
        self._ask("PUT", f"{path}/files/tree", params={"path": "tree"}, content=packed.getvalue())
        with tarfile.open(fileobj=io.BytesIO(self._ask("GET", f"{path}/files/tree?path=tree").content)) as tar:
            assert len([name for name in tar.getnames() if name.count("/") == 2]) >= 50

    def _terminal(self, path: str) -> None:
        where = f"{self.url.replace('http', 'ws', 1)}/api/v1{path}/terminal?command=cat"
        headers = {"Authorization": f"Bearer {self.key}"}
        with connect(where, additional_headers=headers, proxy=None, open_timeout=30) as line:
            line.send(b"typed\n")
            seen = b""
            while seen.count(b"typed") < 2:
                piece = line.recv(timeout=30)
                seen += piece if isinstance(piece, bytes) else b""

    def _checkpoint(self, path: str) -> None:
        made = self._ask("POST", f"{path}/checkpoints", json={}).json()
        self._ask("PUT", f"{path}/files/content", params={"path": "later"}, content=self._random.randbytes(10_000))
        changes = self._ask("GET", f"{path}/checkpoints/{made['id']}/diff").json()
        assert any(change["path"].endswith("/later") for change in changes), changes
        if self._random.random() < 0.5:
            self._ask("POST", f"{path}/checkpoints/{made['id']}/rollback")
        self._ask("DELETE", f"{path}/checkpoints/{made['id']}", missing_ok=True)

    def _restart(self, path: str) -> None:
        self._ask("POST", f"{path}/restart")

    def _fork(self, path: str) -> None:
        made = self._ask("POST", f"{path}/fork", json={}, headers={"Idempotency-Key": self._new_name()}).json()
        for each in made:
            self._ask("DELETE", f"/sandboxes/{each['id']}", missing_ok=True)

    def _pause(self, path: str) -> None:
        self._ask("POST", f"{path}/pause", json={})
        self._ask("POST", f"{path}/resume")
        assert self._ask("POST", f"{path}/exec", json={"command": "true"}).json()["success"]

    def _port(self, path: str) -> None:
        self._ask("POST", f"{path}/exec", json={"command": _SERVE, "timeout_s": 60})
        assert "bin" in self._ask("GET", f"{path}/ports/{PORT}/").text
        self._ask("POST", f"{path}/exec", json={"command": "pkill -f http.server"})

    def _snapshot(self, path: str) -> None:
        name = self._new_name()
        self._ask("POST", f"{path}/snapshots", json={"name": name})
        if self._random.random() < 0.3:
            assert self._ask("GET", f"/snapshots/{name}/content").content
        self._ask("DELETE", f"/snapshots/{name}", missing_ok=True)

    def _vanish(self, path: str) -> None:
        """Streams of several kinds, and then nobody is there any more."""
        run, kind = b'{"command": "yes"}', "Content-Type: application/json"
        held = []
        try:
            held.append(ask(self.url, self.key, f"POST {path}/exec", b'{"command": "sleep 1000"}', kind))
            held.append(until(ask(self.url, self.key, f"POST {path}/exec/stream", run, kind), b"y"))
            held.append(ask(self.url, self.key, f"PUT {path}/files/content?path=half", bytes(65536), length=1 << 20))
            held.append(ask(self.url, self.key, f"PUT {path}/files/tree?path=half", bytes(65536), length=1 << 20))
            held.append(ask(self.url, self.key, f"GET {path}/files/watch?path=."))
            held.append(upgrade(self.url, self.key, f"{path}/terminal?command=yes"))
            time.sleep(self._random.random() / 4)
        finally:
            for sock in held:
                sock.close()

    def _delete(self, path: str) -> None:
        id = path.rpartition("/")[2]
        self._ask("DELETE", path, missing_ok=True)
        with suppress(ValueError):
            self._sandboxes.remove(id)


def spec_of(number: int) -> str:
    return f"soak-{number}"


ACTS = (
    *("exec", "background", "files", "tree", "terminal", "checkpoint", "restart", "fork", "pause", "port", "snapshot"),
    *("vanish", "delete", "delete"),
)

"""Clients that go on through the deaths of their server, and remember what they were promised."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx

from atoll import AsyncSandbox
from atoll.errors import SandboxError

GIVE_UP_S = 180.0
COUNT = "i=0; while sleep 0.2; do echo $i; i=$((i+1)); done"
"""What a stream is read from: no number may be missing or come twice."""


class Client:
    """Asks again whatever failed, until it is answered or `GIVE_UP_S` are over."""

    def __init__(self, number: int, url: str, key: str) -> None:
        self.number = number
        self.url, self.key = url, key
        self.client = httpx.Client(
            base_url=f"{url}/api/v1", headers={"Authorization": f"Bearer {key}"}, timeout=30, trust_env=False
        )
        self.over = threading.Event()
        self.done = self.failed = self.retried = 0
        self.problems: list[str] = []
        self.thread = threading.Thread(target=self._run, name=f"{type(self).__name__} {number}")

    def run(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self.over.set()
        self.thread.join(2 * GIVE_UP_S)
        assert not self.thread.is_alive(), f"{self.thread.name} hangs"
        self.client.close()

    def call(self, method: str, path: str, *, missing_ok: bool = False, **options: object) -> httpx.Response | None:
        deadline = time.monotonic() + GIVE_UP_S
        said = "nothing"
        while time.monotonic() < deadline:
            try:
                answer = self.client.request(method, path, **options)  # type: ignore[arg-type]
            except httpx.HTTPError as error:
                said = repr(error)
            else:
                # A deletion whose answer was lost is repeated: then there is nothing to delete any more.
                if answer.is_success or (missing_ok and answer.status_code in (404, 410)):
                    self.done += 1
                    return answer
                said = answer.text
                if answer.status_code not in (429, 503):
                    break
            self.retried += 1
            time.sleep(0.05)
        self.failed += 1
        self.problems.append(f"{method} {path} failed for good: {said}")
        return None

    def start(self, name: str) -> str | None:
        made = self.call("POST", "/sandboxes", json={"name": name}, headers={"Idempotency-Key": name})
        return str(made.json()["id"]) if made is not None else None

    def _run(self) -> None:
        try:
            self.run()
        except Exception as error:
            self.problems.append(f"{self.thread.name}: {error!r}")


class Worker(Client):
    """Makes a sandbox, writes into it, reads back, deletes an older one, again and again."""

    def __init__(self, number: int, url: str, key: str) -> None:
        super().__init__(number, url, key)
        self.kept: dict[str, str] = {}
        """Sandboxes that were acknowledged and not deleted, with what was written to them."""
        self.deleted: set[str] = set()

    def run(self) -> None:
        round_ = 0
        while not self.over.is_set():
            round_ += 1
            name = f"load-{self.number}-{round_}"
            id = self.start(name)
            if id is None:
                continue
            text, where = f"text {name}", {"path": "f"}
            if self.call("PUT", f"/sandboxes/{id}/files/content", params=where, content=text.encode()) is not None:
                self.kept[id] = text
                read = self.call("GET", f"/sandboxes/{id}/files/content", params=where)
                if read is not None and read.text != text:
                    self.problems.append(f"{id} holds {read.text!r} instead of {text!r}")
            if len(self.kept) > 3:
                oldest = next(iter(self.kept))
                if self.call("DELETE", f"/sandboxes/{oldest}", missing_ok=True) is not None:
                    del self.kept[oldest]
                    self.deleted.add(oldest)


class Follower(Client):
    """Reads the output of a command that counts. `text` is all that came, in the order in which it came."""

    sandbox_id: str | None = None
    text = ""
    connections = 0

    def begin(self, name: str) -> str:
        """Start counting in a sandbox of this name; the path of the command."""
        self.sandbox_id = self.start(name)
        path = f"/sandboxes/{self.sandbox_id}/commands"
        started = self.call("POST", path, json={"command": COUNT}, headers={"Idempotency-Key": "count"})
        assert started is not None, "the command was not started"
        return f"{path}/{started.json()['id']}"

    @property
    def numbers(self) -> list[int]:
        return [int(line) for line in self.text.split("\n")[:-1]]


class RestFollower(Follower):
    """Over REST: goes on from the offset of the last event that it got."""

    def run(self) -> None:
        path = self.begin(f"rest-{self.number}")
        offset, deadline = 0, time.monotonic() + GIVE_UP_S
        while not self.over.is_set():
            assert time.monotonic() < deadline, "the stream does not go on"
            try:
                with self.client.stream("GET", path, params={"stdout": offset}) as stream:
                    self.connections += 1
                    for line in stream.iter_lines() if stream.is_success else ():
                        event = json.loads(line)
                        if event["type"] == "stdout":
                            offset, deadline = event["offset"], time.monotonic() + GIVE_UP_S
                            self.text += event["data"]
                        if event["type"] == "error" or self.over.is_set():
                            break
            except httpx.HTTPError:
                pass
            time.sleep(0.05)


class SdkFollower(Follower):
    """By the SDK. To find the command is tried until it works; from then on the SDK connects again by itself."""

    def run(self) -> None:
        command_id = self.begin(f"sdk-{self.number}").rpartition("/")[2]
        asyncio.run(self._follow(command_id))

    async def _follow(self, command_id: str) -> None:
        assert self.sandbox_id is not None
        deadline = time.monotonic() + GIVE_UP_S
        sandbox: AsyncSandbox | None = None
        while True:
            try:
                sandbox = sandbox or await AsyncSandbox.attach(self.sandbox_id, server=self.url, api_key=self.key)
                command = await sandbox.command(command_id)
                break
            except SandboxError:
                assert time.monotonic() < deadline, "the command cannot be found"
                await asyncio.sleep(0.05)
        self.connections += 1
        try:
            async for piece in command:
                self.text += piece.text
                if self.over.is_set():
                    break
        finally:
            await sandbox.detach()

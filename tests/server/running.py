"""A real server on loopback, in a process of its own, and clients that check every answer against openapi.json."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator

ROOT = Path(__file__).resolve().parents[2]
START_S = 60


@dataclass
class RunningServer:
    url: str
    key: str | None
    process: subprocess.Popen[str]
    folder: Path

    def client(self, key: str | None = None, **headers: str) -> httpx.Client:
        """With this key; None: the administrator's, "": none."""
        key = self.key if key is None else key
        authorization = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(
            base_url=f"{self.url}/api/v1",
            headers={**authorization, **headers},
            timeout=30,
            event_hooks={"response": [validate]},
            trust_env=False,
            verify=False,  # it is never TLS, and loading certificates takes longer than a request
        )

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(30)

    def close(self) -> None:
        """Close the pipe that it wrote its URL and key to. For after its end."""
        assert self.process.stdout is not None
        self.process.stdout.close()


def launch(
    folder: Path,
    engine: str = "bubblewrap",
    port: int = 0,
    /,
    *,
    module: str = "atoll.cli",
    log: str = "",
    **variables: str,
) -> subprocess.Popen[str]:
    """Returns at once. Its messages go to the file `log`, by default one in its folder. `module` is what is run instead
    of the command line."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")},
        "ATOLL_DATA_DIR": str(folder / "data"),
        "ATOLL_RUN_DIR": str(folder / "run"),
        "ATOLL_STATE_DIR": str(folder / "state"),
        **variables,
    }
    command = [sys.executable, "-W", "ignore", "-m", module, "serve", "--engine", engine, "--port", str(port)]
    with open(log or folder / "log", "a") as file:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=file, text=True, cwd="/")


def start_server(
    folder: Path,
    engine: str = "bubblewrap",
    port: int = 0,
    /,
    *,
    module: str = "atoll.cli",
    log: str = "",
    **variables: str,
) -> RunningServer:
    """Returns when it listens."""
    process = launch(folder, engine, port, module=module, log=log, **variables)
    assert process.stdout is not None
    url = key = None
    deadline = time.monotonic() + START_S
    while url is None or (key is None and not (folder / "key").exists()):
        line = process.stdout.readline()
        if not line or time.monotonic() > deadline:
            process.kill()
            process.stdout.close()
            raise AssertionError(f"the server did not start: {(folder / 'log').read_text()[-2000:]}")
        if match := re.search(r"listens on (http://\S+)", line):
            url = match[1]
        if match := re.match(r"\s+(atoll_\S+)$", line):
            key = match[1]
            (folder / "key").write_text(key)
    return RunningServer(url, key or (folder / "key").read_text(), process, folder)


def everything(client: httpx.Client, limit: int = 100) -> list[dict[str, Any]]:
    """All sandboxes of the caller, page by page."""
    found: list[dict[str, Any]] = []
    page: dict[str, Any] = {"next_page_id": ""}
    while page["next_page_id"] is not None:
        query = {"limit": str(limit)} | ({"page_id": page["next_page_id"]} if page["next_page_id"] else {})
        page = client.get("/sandboxes/search", params=query).json()
        found += page["items"]
    return found


def new_folder(session_folder: Path, name: str) -> Path:
    """Return a folder for a server of one module, whose tests may run in several pieces, each with its own server."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=session_folder))


@contextmanager
def running_server(
    folder: Path,
    engine: str = "bubblewrap",
    port: int = 0,
    /,
    *,
    module: str = "atoll.cli",
    log: str = "",
    **variables: str,
) -> Iterator[RunningServer]:
    server = start_server(folder, engine, port, module=module, log=log, **variables)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            with server.client() as client:
                for info in everything(client):
                    client.delete(f"/sandboxes/{info['id']}")
            server.stop()
        server.close()


# --- every answer is checked --------------------------------------------------------------------------------------

SCHEMA: dict[str, Any] = json.loads((ROOT / "openapi.json").read_text()) if (ROOT / "openapi.json").exists() else {}


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(
        "^" + re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(path)).replace("/ports/[^/]+/[^/]+", "/ports/[^/]+/.*") + "$"
    )


PATHS = [(_pattern(path), "{" in path, operations) for path, operations in SCHEMA.get("paths", {}).items()]


def operation(method: str, path: str) -> Mapping[str, Any] | None:
    """The one that openapi.json has for it: paths without parameters come first."""
    for pattern, _, operations in sorted(PATHS, key=lambda known: known[1]):
        if pattern.match(path) and method.lower() in operations:
            return operations[method.lower()]  # type: ignore[no-any-return]
    return None


def validate(response: httpx.Response) -> None:
    """Status, media type and JSON of an answer must be what openapi.json promises."""
    request = response.request
    if "/ports/" in request.url.path:
        return  # what it answers is up to the sandbox
    found = operation(request.method, request.url.path)
    if found is None:
        assert response.status_code in (404, 405, 200), (request.method, request.url.path, response.status_code)
        return
    status = str(response.status_code)
    if "default" in found["responses"]:
        return
    assert status in found["responses"], f"{request.method} {request.url.path} answered {status}: not in openapi.json"
    kind = response.headers.get("content-type", "").partition(";")[0]
    promised = found["responses"][status].get("content", {})
    if not promised:
        return
    assert kind in promised, f"{request.method} {request.url.path} answered {kind}, not one of {list(promised)}"
    if kind.endswith("json") and kind != "application/x-ndjson":
        response.read()
        schema = {**promised[kind].get("schema", {}), "components": SCHEMA["components"]}
        Draft202012Validator(schema).validate(response.json())

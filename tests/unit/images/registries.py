"""A real registry on loopback, and a front before it that demands tokens, redirects, lies, stalls and breaks off."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from unit.images.archives import digest, oci_config

USER, PASSWORD = "atoll", "secret"
HTPASSWD = "atoll:$2y$04$euiVl1H6ict58/aN9IOkhe3mKD50NG3MiI6PO2TgBD5zvafLp2.6y"
TOKEN = "a-token-of-the-front"
LAYER = "application/vnd.oci.image.layer.v1.tar"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"


@contextlib.contextmanager
def registry(directory: Path, *, password: bool = False) -> Iterator[str]:
    """Debian's docker-registry with files in a directory. Gives its address."""
    directory.mkdir(parents=True)
    log = directory / "log"
    config = directory / "config.yml"
    text = f"version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {directory}/blobs\nhttp:\n  addr: 127.0.0.1:0\n"
    if password:
        (directory / "htpasswd").write_text(HTPASSWD + "\n")
        text += f"auth:\n  htpasswd:\n    realm: test\n    path: {directory}/htpasswd\n"
    config.write_text(text)
    with log.open("wb") as output:
        process = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=output, stderr=output, env=_env())
    try:
        yield _address(process, log)
    finally:
        process.kill()
        process.wait()


def _env() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "OTEL_TRACES_EXPORTER": "none"}


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """The registry says which port the kernel gave it."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            _, found, rest = line.partition("listening on ")
            if found:
                return rest.split('"')[0].split(",")[0].strip()
        time.sleep(0.02)
    raise AssertionError(f"the registry did not start: {log.read_text()}")


class Pusher:
    """The writing half of the protocol, for tests."""

    def __init__(self, address: str, repository: str, *, password: bool = False) -> None:
        self._address, self._repository = address, repository
        secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        self._headers = {"Authorization": f"Basic {secret}"} if password else {}

    def _send(self, method: str, path: str, body: bytes = b"", kind: str = "application/octet-stream") -> str:
        connection = http.client.HTTPConnection(self._address, timeout=20)
        try:
            connection.request(method, path, body, self._headers | {"Content-Type": kind})
            response = connection.getresponse()
            text = response.read()
            assert response.status in (201, 202), (response.status, text)
            return response.headers.get("Location", "")
        finally:
            connection.close()

    def blob(self, data: bytes) -> str:
        parts = urllib.parse.urlsplit(self._send("POST", f"/v2/{self._repository}/blobs/uploads/"))
        query = urllib.parse.urlencode([*urllib.parse.parse_qsl(parts.query), ("digest", digest(data))])
        self._send("PUT", f"{parts.path}?{query}", data)
        return digest(data)

    def manifest(self, tag: str, value: object, kind: str = MANIFEST) -> bytes:
        data = json.dumps(value).encode()
        self._send("PUT", f"/v2/{self._repository}/manifests/{tag or digest(data)}", data, kind)
        return data

    def image(
        self,
        tag: str,
        layers: Sequence[bytes],
        pack: Callable[[bytes], bytes] = bytes,
        packing: str = "",
        config: bytes | None = None,
    ) -> bytes:
        """Push layers given as plain tar streams. Returns the manifest."""
        packed = [pack(layer) for layer in layers]
        config = config or oci_config(layers)
        for data in (*packed, config):
            self.blob(data)
        value = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": digest(config), "size": len(config)},
            "layers": [{"mediaType": LAYER + packing, "digest": digest(data), "size": len(data)} for data in packed],
        }
        return self.manifest(tag, value)

    def index(self, tag: str, entries: Sequence[tuple[bytes, str, str]]) -> bytes:
        manifests = [
            {
                "mediaType": MANIFEST,
                "digest": digest(data),
                "size": len(data),
                "platform": {"os": os_name, "architecture": architecture},
            }
            for data, os_name, architecture in entries
        ]
        return self.manifest(tag, {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}, INDEX)


class Front:
    """Stands before a registry. `mode` says how it misbehaves; `seen` is what clients sent."""

    def __init__(self, behind: str, mode: str) -> None:
        self.mode, self.behind = mode, behind
        self.seen: list[tuple[str, str]] = []
        """The GET requests: paths and credentials."""
        self.asked: list[tuple[str, str, str]] = []
        """All requests: methods, paths and ranges."""
        self.own: dict[str, bytes] = {}
        """What it says at these paths, whatever is behind it."""
        self.together = threading.Barrier(2)
        self.blobs = 0
        self.stalled = threading.Event()
        self.over = threading.Event()
        self.storage = ""
        front = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    front.answer(self)

            do_HEAD = do_PUT = do_POST = do_PATCH = do_GET  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        authorization = request.headers.get("Authorization", "")
        self.asked.append((request.command, request.path, request.headers.get("Range", "")))
        if request.command == "GET":
            self.seen.append((request.path, authorization))
        if (own := self.own.get(request.path)) is not None:
            _send(request, 200, own, {"Content-Type": MANIFEST})
        elif request.path.startswith("/token"):
            self._token(request, authorization)
        elif self.mode in ("token", "redirect") and authorization != f"Bearer {TOKEN}":
            realm = f'Bearer realm="http://{self.address}/token",service="front",scope="repository:a/b:pull"'
            _send(request, 401, b"{}", {"WWW-Authenticate": realm})
        elif self.mode == "token elsewhere":
            realm = f'Bearer realm="http://{self.storage}/token",service="front"'
            _send(request, 401, b"{}", {"WWW-Authenticate": realm})
        elif self.mode == "secret page":
            _send(request, 200, b'{"schemaVersion": "the secret of an inner service"}', {})
        elif self.mode == "secret status":
            request.send_response(418, "the secret of an inner service")
            request.end_headers()
        elif self.mode == "evil realm":
            _send(request, 401, b"{}", {"WWW-Authenticate": 'Bearer realm="file:///etc/passwd",service="x"'})
        else:
            self._forward(request)

    def _token(self, request: BaseHTTPRequestHandler, authorization: str) -> None:
        secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if authorization != f"Basic {secret}":
            _send(request, 401, b"{}", {})
        else:
            _send(request, 200, json.dumps({"token": TOKEN}).encode(), {})

    def _forward(self, request: BaseHTTPRequestHandler) -> None:
        connection = http.client.HTTPConnection(self.behind, timeout=20)
        passed = ("Accept", "Range", "Content-Type", "Content-Length", "Content-Range")
        body = request.rfile.read(int(request.headers.get("Content-Length", "0")))
        if self.misbehaves_on_upload(request, body):
            return
        try:
            given = {name: request.headers[name] for name in passed if name in request.headers}
            if self.mode == "ignores ranges":
                given.pop("Range", None)
            connection.request(request.command, request.path, body or None, headers=given)
            response = connection.getresponse()
            data, status = response.read(), response.status
            names = ("Content-Type", "Docker-Content-Digest", "Content-Range", "Location", "Range", "WWW-Authenticate")
            headers = {name: response.headers[name] for name in names if name in response.headers}
        finally:
            connection.close()
        if "Location" in headers:
            headers["Location"] = headers["Location"].replace(self.behind, self.address)
        if request.command != "GET":
            _send(request, status, data, headers)
        elif "/blobs/" in request.path:
            self.blobs += 1
            self._misbehave(request, status, data, headers)
        elif self.mode == "wrong manifest":
            _send(request, status, data + b" ", headers)
        elif self.mode == "endless manifest":
            _send(request, status, b" " * (5 << 20) + data, {})
        else:
            _send(request, status, data, headers)

    def misbehaves_on_upload(self, request: BaseHTTPRequestHandler, body: bytes) -> bool:
        """Break off an upload at first, or lead it elsewhere."""
        if self.mode == "upload broken off at first" and request.command == "PATCH" and not self.stalled.is_set():
            self.stalled.set()
            request.close_connection = True
            return True
        if self.mode == "upload elsewhere" and request.command == "POST":
            _send(request, 202, b"", {"Location": f"http://{self.storage}/v2/x/blobs/uploads/1"})
            return True
        if self.mode == "upload to a file" and request.command == "POST":
            _send(request, 202, b"", {"Location": "file:///etc/passwd"})
            return True
        return False

    def _misbehave(self, request: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str]) -> None:
        if self.mode == "wrong layer" and self.blobs > 1:
            _send(request, status, data[:-1] + b"?", headers)
        elif self.mode == "longer layer" and self.blobs > 1:
            _send(request, status, data + b"?", headers)
        elif self.mode == "busy at first" and self.blobs <= 2:
            _send(request, 503, b"", {})
        elif (self.mode == "broken off at first" and self.blobs <= 2) or (
            self.mode == "half of each" and len(data) > 100_000
        ):
            _send(request, status, data[: len(data) // 2], headers, length=len(data))
        elif self.mode == "other range" and status == 206:
            _send(request, 206, data, headers | {"Content-Range": f"bytes 7-{6 + len(data)}/{7 + len(data)}"})
        elif self.mode == "wrong range" and status == 206:
            _send(request, 206, bytes(len(data)), headers)
        elif self.mode == "no such range" and status == 206:
            _send(request, 416, b"", {})
        elif self.mode == "together" and self.blobs > 1:
            self.together.wait(20)
            _send(request, status, data, headers)
        elif self.mode == "drips" and self.blobs > 1:
            _send(request, status, data[:9000], headers, length=len(data), close=False)
            while not self.over.wait(0.02):
                request.wfile.write(b"x")
        elif self.mode == "broken":
            _send(request, 500, b"", {})
        elif self.mode == "stalled" and self.blobs > 1:
            _send(request, status, data[: len(data) // 2], headers, length=len(data), close=False)
            self.stalled.set()
            if self.over.wait(60) and not self.mode:
                request.wfile.write(data[len(data) // 2 :])
        elif self.mode == "redirect":
            _send(request, 307, b"", {"Location": f"http://{self.storage}{request.path}"})
        elif self.mode == "redirect to a file":
            _send(request, 307, b"", {"Location": "file:///etc/passwd"})
        elif self.mode == "redirect in a circle":
            _send(request, 307, b"", {"Location": request.path})
        else:
            _send(request, status, data, headers)


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    data: bytes,
    headers: dict[str, str],
    length: int | None = None,
    close: bool = True,
) -> None:
    request.send_response(status)
    for name, value in (headers | {"Content-Length": str(len(data) if length is None else length)}).items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(data)
    request.wfile.flush()
    request.close_connection = close

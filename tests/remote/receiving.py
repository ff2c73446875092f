"""Somebody who receives messages: answers challenges, remembers everything, fails when told to, and may pass it on."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import httpx

from atoll.signature import HEADER


class Receiver:
    def __init__(self, passes_on_to: str | None = None) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.failures = 0
        """How many more are refused."""
        self.refused = 0
        self.redirects_to: str | None = None
        self._target = passes_on_to
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = receiver.take(self.headers[HEADER], body)
                self.send_response(status if receiver.redirects_to is None else 307)
                if receiver.redirects_to is not None:
                    self.send_header("Location", receiver.redirects_to)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, signature: str, body: bytes) -> tuple[int, bytes]:
        if self.failures > 0:
            self.failures -= 1
            self.refused += 1
            return 500, b""
        self.messages.append((signature, body))
        if self._target is not None:
            headers = {HEADER: signature, "Content-Type": "application/json"}
            answer = httpx.post(self._target, content=body, headers=headers, trust_env=False, timeout=20)
            return answer.status_code, answer.content
        return 200, json.dumps({"challenge": json.loads(body).get("challenge")}).encode()

    def events(self) -> list[dict[str, Any]]:
        return [event for _, body in self.messages for event in json.loads(body).get("events", [])]

    def close(self) -> None:
        """Nobody answers any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            self.close()

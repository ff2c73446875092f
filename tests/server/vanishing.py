"""A client that holds a stream of every kind open. Run with: idle|reading URL KEY SANDBOX COMMAND COMMAND COMMAND."""

from __future__ import annotations

import json
import selectors
import socket
import struct
import sys
import time
from urllib.parse import urlsplit

CHUNK = 64 << 10
TYPED = 512 << 10


def dial(url: str) -> socket.socket:
    address = urlsplit(url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK)  # so that what is not read is soon in the way
    sock.settimeout(20)
    sock.connect((address.hostname, address.port))
    return sock


def ask(url: str, key: str, line: str, body: bytes = b"", *headers: str, length: int | None = None) -> socket.socket:
    sock = dial(url)
    method, _, path = line.partition(" ")
    head = f"{method} /api/v1{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    head += "".join(f"{header}\r\n" for header in headers)
    if body:
        head += f"Content-Length: {len(body) if length is None else length}\r\n"
    sock.sendall(f"{head}\r\n".encode() + body)
    return sock


def until(sock: socket.socket, mark: bytes) -> socket.socket:
    seen = b""
    while mark not in seen:
        piece = sock.recv(4096)
        assert piece, seen
        seen += piece
    return sock


def upgrade(url: str, key: str, path: str) -> socket.socket:
    headers = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    sock = ask(url, key, f"GET {path}", b"", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", *headers)
    return until(sock, b" 101 ")


def fill(sock: socket.socket, most: int) -> None:
    """As much as the other side takes."""
    frame = struct.pack("!BBQI", 0x82, 0x80 | 127, CHUNK, 0) + bytes(CHUNK)
    sock.settimeout(1)
    try:
        for _ in range(most // CHUNK):
            sock.sendall(frame)
    except TimeoutError:
        return


def hold(url: str, key: str, sandbox: str, *commands: str) -> list[socket.socket]:
    def run(text: str) -> bytes:
        return json.dumps({"command": text}).encode()

    of_json, as_events = "Content-Type: application/json", "Accept: text/event-stream"
    held = [
        ask(url, key, f"POST {sandbox}/exec", run("exec sleep 31415"), of_json),
        until(ask(url, key, f"POST {sandbox}/exec/stream", run("echo go; exec sleep 31416"), of_json), b"go"),
        until(ask(url, key, f"POST {sandbox}/exec/stream", run("yes 31417"), of_json), b"31417"),
        until(ask(url, key, f"GET {sandbox}/commands/{commands[0]}"), b"started"),
        until(ask(url, key, f"GET {sandbox}/commands/{commands[1]}", b"", as_events), b"started"),
        ask(url, key, f"GET {sandbox}/commands/{commands[2]}/result?timeout=600"),
        until(ask(url, key, "GET /events/stream", b"", as_events), b" 200 "),
        until(ask(url, key, f"GET {sandbox}/files/watch?path=."), b"ready"),
        until(ask(url, key, f"GET {sandbox}/files/content?path=large"), b" 200 "),
        until(ask(url, key, f"GET {sandbox}/files/tree?path=folder"), b" 200 "),
        ask(url, key, f"PUT {sandbox}/files/content?path=half", bytes(CHUNK), length=8 * CHUNK),
        ask(url, key, f"PUT {sandbox}/files/tree?path=half-a-tree", bytes(CHUNK), length=8 * CHUNK),
        upgrade(url, key, f"{sandbox}/terminal?command=sleep%2031418"),
        upgrade(url, key, f"{sandbox}/terminal?command=yes%2031419"),
        upgrade(url, key, f"{sandbox}/terminal?command=stty%20raw%20-echo;%20exec%20sleep%2031420"),
        upgrade(url, key, f"{sandbox}/agent"),
    ]
    fill(held[-2], TYPED)
    return held


def read(held: list[socket.socket]) -> None:
    """Whatever comes, for as long as we live."""
    with selectors.DefaultSelector() as selector:
        for sock in held:
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if not key.fileobj.recv(CHUNK):  # type: ignore[union-attr]
                    selector.unregister(key.fileobj)


if __name__ == "__main__":
    kept = hold(*sys.argv[2:])
    print(len(kept), flush=True)
    if sys.argv[1] == "reading":
        read(kept)
    time.sleep(3600)

"""What runs inside a sandbox: connections that say exactly what they are told to. Each prints a line of JSON."""

from __future__ import annotations

import json
from typing import Any

from atoll import Sandbox

PRELUDE = r'''
import json, socket, struct, sys, time
def connect(host, port, data=b"", wait=15.0, pieces=1, pause=0.0, answers=1, enough=200000):
    """What came back, or the error. Reads to the end, or to that many answers or bytes, or until nothing comes for so
    long: `wait` is short only where nothing is to come."""
    found = b""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.settimeout(wait)
            s.connect((host, port))
            size = max(1, -(-len(data) // pieces))
            for i in range(0, len(data), size):
                s.sendall(data[i:i + size])
                if pause: time.sleep(pause)
            while len(found) < enough:
                piece = s.recv(65536)
                if not piece: break
                found += piece
                if found.count(b'"body"') >= answers or found.endswith(b"world\r\n"): break
            return found.decode("latin-1")
    except OSError as error:
        return found.decode("latin-1") or "error: %s" % (error,)
def eventually(host, port, data=b""):
    """When something listens there."""
    while (found := connect(host, port, data)).startswith("error"): time.sleep(0.02)
    return found
def datagram(host, port, data, wait=0.5):
    """What came back, or the error. Without a `wait` of its own nothing is to come."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(wait)
            s.sendto(data, (host, port))
            return s.recv(65536).decode("latin-1")
    except OSError as error:
        return "error: %s" % (error,)
def question(name, kind=1):
    labels = b"".join(bytes((len(l),)) + l.encode("latin-1") for l in name.split("."))
    return struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)
def get(host, path="/", extra=""):
    return ("GET %s HTTP/1.1\r\nHost: %s\r\n%sConnection: close\r\n\r\n" % (path, host, extra)).encode("latin-1")
def hello(name, ech=False, version=b"\x03\x01", names=None):
    def ext(kind, value): return struct.pack("!HH", kind, len(value)) + value
    exts = b""
    if name is not None:
        raw = name.encode("latin-1")
        exts += ext(0, struct.pack("!HBH", len(raw) + 3, 0, len(raw)) + raw)
    exts += ext(10, b"\0\2\0\x1d") + ext(43, b"\2\3\4") + ext(13, b"\0\2\4\3")
    if ech: exts += ext(0xFE0D, b"\0" * 40)
    body = b"\3\3" + b"r" * 32 + b"\0" + b"\0\2\x13\x01" + b"\1\0" + struct.pack("!H", len(exts)) + exts
    message = b"\1" + len(body).to_bytes(3, "big") + body
    return b"\x16" + version + struct.pack("!H", len(message)) + message
def real_hello(name):
    import ssl
    there = ssl.MemoryBIO()
    made = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), there, server_hostname=name)
    try: made.do_handshake()
    except ssl.SSLWantReadError: return there.read()
'''


def run(sandbox: Sandbox, expression: str, timeout: float = 40) -> Any:
    """The value of a Python expression inside."""
    program = f"{PRELUDE}\nprint(json.dumps({expression}))\n"
    found = sandbox.exec(["python3", "-c", program], timeout=timeout)
    assert found.exit_code == 0, found.stderr
    return json.loads(found.stdout)

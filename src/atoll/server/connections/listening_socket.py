"""The socket of the server. Light, so that it is there before everything else is loaded: who comes meanwhile waits."""

from __future__ import annotations

import socket

from atoll.errors import SandboxError
from atoll.server.connections.vanished_clients import probe_idle


def listen(host: str, port: int) -> socket.socket:
    """Raises SandboxError if the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe_idle(sock)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise SandboxError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="Choose another with --port."
        ) from error
    return sock

"""Run the server: report where it listens, and shut down cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn

from atoll import workers
from atoll.errors import SandboxError
from atoll.server.app import make_app
from atoll.server.connections.bounded_protocol import BoundedProtocol, BoundedSocket
from atoll.server.logs.log import Log, open_log
from atoll.server.middleware.turns import take_turns
from atoll.server.settings import ServerSettings

_log = logging.getLogger(__name__)
_MAX_MESSAGE_BYTES = 4 << 20
_SWITCH_S = 0.001
"""A thread that computes lets the event loop continue after this time."""


def serve(settings: ServerSettings, sock: socket.socket, on_ready: Callable[[str, str | None], None]) -> None:
    """Run until SIGTERM or SIGINT. Then nothing new is accepted, and requests in progress have `drain_s` to end.

    `sock` listens already. `on_ready` gets the URL and, on the first run, the administrator's key.
    """
    with open_log(settings.log_level, settings.log_format) as log:
        for warning in settings.warnings:
            _log.warning(warning)
        _serve(settings, sock, on_ready, log)


def _serve(
    settings: ServerSettings, sock: socket.socket, on_ready: Callable[[str, str | None], None], log: Log
) -> None:
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    app = make_app(settings, listens_on=url, log=log)
    config = _Config(
        app,
        http=BoundedProtocol,
        ws=BoundedSocket,
        ws_max_size=_MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=None,
        log_level="warning",  # below that, headers are logged
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing depends on the address that a client claims to have
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
    )
    config.slow_s = settings.slow_s
    server = _Server(config)
    server.on_ready = lambda: on_ready(url, app.state.services.first_key)
    # uvicorn raises the signal that ended it again, but this is a clean end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    # A failure to start is reported once, as a sentence, and not by uvicorn.
    logging.getLogger("uvicorn.error").addFilter(lambda _: app.state.failure is None)
    with contextlib.closing(sock), contextlib.suppress(SystemExit):
        server.run(sockets=[sock])
    if not server.started:
        raise app.state.failure or SandboxError("the server did not start", hint="Its log says why.")


class _Config(uvicorn.Config):
    slow_s: float
    """The setting that connections need."""


class _Server(uvicorn.Server):
    on_ready: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        workers.others_are_active = take_turns(asyncio.get_running_loop()).is_active_besides
        await super().startup(sockets)
        if self.started:
            gc.collect()
            gc.freeze()  # these objects stay: scanning them again and again would delay every request
            sys.setswitchinterval(_SWITCH_S)
            self.on_ready()

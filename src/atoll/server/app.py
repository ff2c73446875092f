"""The ASGI application: routes under /api/v1, limits around them, problems out of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.errors import SandboxError
from atoll.server import problems
from atoll.server.admission import Leaving
from atoll.server.auth import RUNTIME, SCHEMES
from atoll.server.exposed.hosts import Hosts
from atoll.server.exposed.paths import Paths
from atoll.server.limits import BodyLimits
from atoll.server.routes import ROUTERS, runtime
from atoll.server.services import Services, services
from atoll.server.settings import ServerSettings
from atoll.server.standing import Standing
from atoll.server.turns import Weighing
from atoll.settings import Settings

PREFIX = "/api/v1"
PUBLIC = frozenset({f"{PREFIX}/health", f"{PREFIX}/engine-events", f"{PREFIX}/webhooks/secrets"})
"""What needs no credential of a user."""
_OF_A_SANDBOX = (f"{PREFIX}/sandboxes/by-session-key", f"{PREFIX}/webhooks/{{sandbox_id}}/")
"""What only the session key of a sandbox is good for."""


def make_app(settings: ServerSettings, installation: Settings | None = None, *, listens_on: str = "") -> FastAPI:
    """Everything is opened when the application starts and closed when it ends. What keeps it from starting is in
    `app.state.failure`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as held:
            try:
                made = await held.enter_async_context(services(settings, installation, listens_on=listens_on))
            except SandboxError as error:
                app.state.failure = error
                raise
            app.state.services = made
            await run_in_threadpool(bool)  # what streaming needs is imported now, not in the middle of a request
            yield

    app = bare_app(lifespan)
    app.state.failure = None
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key", "X-Session-API-Key", "Range"],
            expose_headers=["Content-Range", "ETag", "Retry-After"],
        )
    app.add_middleware(
        BodyLimits,
        max_body_bytes=settings.max_body_bytes,
        max_upload_bytes=settings.max_upload_bytes,
        slow_s=settings.slow_s,
    )
    app.add_middleware(Paths, max_upload_bytes=settings.max_upload_bytes, slow_s=settings.slow_s)
    app.add_middleware(
        Hosts, domain=settings.ports_domain, max_upload_bytes=settings.max_upload_bytes, slow_s=settings.slow_s
    )
    app.add_middleware(Weighing)
    app.add_middleware(Leaving)
    app.add_middleware(Standing)
    app.add_middleware(Counting)
    return app


def bare_app(lifespan: object = None) -> FastAPI:
    """The routes alone: enough to write openapi.json."""
    app = FastAPI(
        title="Atoll",
        version=version("atoll"),
        description="Isolated Linux sandboxes for AI agents.",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,  # type: ignore[arg-type]
        redirect_slashes=False,
    )
    for router in ROUTERS:
        app.include_router(router, prefix=PREFIX, responses=problems.RESPONSES)
    app.include_router(runtime.router, responses=problems.RESPONSES)
    problems.install(app)
    app.openapi = lambda: _described(app)  # type: ignore[method-assign]
    app.add_exception_handler(ClientDisconnect, _nobody)
    return app


def _described(app: FastAPI) -> dict[str, Any]:
    """What FastAPI finds out, and how callers say who they are."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        document["components"]["securitySchemes"] = SCHEMES
        for path, operations in document["paths"].items():
            for operation in operations.values():
                if path not in PUBLIC:
                    bearer = [] if path.startswith(_OF_A_SANDBOX) else [{"bearer": list[str]()}]
                    other = "key" if path.startswith(RUNTIME) else "session"
                    operation["security"] = [*bearer, {other: []}]
                for status, answer in operation["responses"].items():
                    content = answer.get("content", {})
                    if status[0] in "45" and "application/json" in content:  # errors are problem+json and nothing else
                        answer["content"] = {problems.MEDIA_TYPE: content["application/json"]}
        app.openapi_schema = document
    return app.openapi_schema


async def _nobody(_: Request, __: Exception) -> Response:
    """The client went away in the middle of its request: nobody reads this."""
    return Response(status_code=400)


class Counting:
    """Counts requests by the template of their route, never by what a client made up."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = scope.get("route")
            made: Services | None = getattr(scope["app"].state, "services", None)
            if made is not None:
                path = getattr(route, "path", "none")
                made.figures.count(scope["method"], path, status, time.perf_counter() - started)

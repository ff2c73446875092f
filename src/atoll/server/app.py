"""The ASGI application: routes under /api/v1, limits around them, and errors as problem documents."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import Depends, FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from atoll.errors import SandboxError
from atoll.server import problems
from atoll.server.admission import AdmissionEnd
from atoll.server.logs.log import Log
from atoll.server.middleware.body_limits import BodyLimits
from atoll.server.middleware.request_record import RequestRecord
from atoll.server.middleware.request_traces import RequestTraces
from atoll.server.middleware.revocation import RevocationWatch
from atoll.server.middleware.turns import BodyWeight
from atoll.server.openapi import describe
from atoll.server.ports.by_host import PortsByHost
from atoll.server.ports.by_path import PortsByPath
from atoll.server.routes import ROUTERS, runtime
from atoll.server.routes.openapi_parts import PREFIX
from atoll.server.routes.query_names import refuse_unknown_parameters
from atoll.server.services import services
from atoll.server.settings import ServerSettings
from atoll.settings import Settings


def make_app(
    settings: ServerSettings,
    installation: Settings | None = None,
    *,
    listens_on: str = "",
    log: Log | None = None,
) -> FastAPI:
    """Return the application, which opens everything when it starts and closes it when it ends. If it cannot start,
    `app.state.failure` is the error. With a log, it writes a line about each request."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as held:
            try:
                made = await held.enter_async_context(services(settings, installation, listens_on=listens_on))
            except SandboxError as error:
                app.state.failure = error
                raise
            if log is not None:
                made.metrics.lines_dropped = lambda: log.writer.dropped
            app.state.services = made
            await run_in_threadpool(bool)  # imports what streaming needs now, not in the middle of a request
            yield

    app = bare_app(lifespan)
    app.state.failure = None
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=[
                "Authorization",
                "Content-Type",
                "Idempotency-Key",
                "X-Session-API-Key",
                "X-Request-ID",
                "Range",
            ],
            expose_headers=["Content-Range", "ETag", "Retry-After", "X-Request-ID"],
        )
    app.add_middleware(
        BodyLimits,
        max_body_bytes=settings.max_body_bytes,
        max_upload_bytes=settings.max_upload_bytes,
        slow_s=settings.slow_s,
    )
    app.add_middleware(PortsByPath, max_upload_bytes=settings.max_upload_bytes, slow_s=settings.slow_s)
    app.add_middleware(
        PortsByHost, domain=settings.ports_domain, max_upload_bytes=settings.max_upload_bytes, slow_s=settings.slow_s
    )
    app.add_middleware(BodyWeight)
    app.add_middleware(AdmissionEnd)
    app.add_middleware(RevocationWatch)
    app.add_middleware(RequestRecord, log=log.requests if log is not None else None)
    # Around the record, so that a line of the log has the trace of its request.
    app.add_middleware(RequestTraces, prefix=PREFIX)
    return app


def bare_app(lifespan: object = None) -> FastAPI:
    """Return an application with the routes alone, which is enough to write openapi.json."""
    app = FastAPI(
        title="Atoll",
        version=version("atoll"),
        description="Isolated Linux sandboxes for AI agents.",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,  # type: ignore[arg-type]
        redirect_slashes=False,
        # FastAPI's own spans and records contain paths and the texts of errors; those of `RequestTraces` do not.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    for router in ROUTERS:
        known_only = [Depends(refuse_unknown_parameters)]
        app.include_router(router, prefix=PREFIX, responses=problems.RESPONSES, dependencies=known_only)
    app.include_router(runtime.router, responses=problems.RESPONSES)
    problems.install(app)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    app.add_exception_handler(ClientDisconnect, _nobody)
    return app


async def _nobody(_: Request, __: Exception) -> Response:
    """Answer a client that disconnected in the middle of its request. The answer is never read."""
    return Response(status_code=400)

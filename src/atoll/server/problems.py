"""Errors as application/problem+json: the status gives the kind of error, `code` is stable, `hint` says what to do."""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from atoll.errors import (
    AgentError,
    BuildError,
    CheckpointNotFoundError,
    ConflictError,
    EngineError,
    ForbiddenError,
    ImageBuildNotFoundError,
    ImageError,
    KeyNotFoundError,
    LimitReachedError,
    ManagerClosedError,
    NotAuthenticatedError,
    RateLimitedError,
    SandboxError,
    SandboxGoneError,
    SandboxNotFoundError,
    SandboxPausedError,
    SandboxResourceError,
    SandboxSpecNotFoundError,
    SandboxTimeoutError,
    SessionNotFoundError,
    SetupError,
    SignatureError,
    SnapshotNotFoundError,
    SpecError,
    StartError,
    StateError,
    StoredImageNotFoundError,
    StoreError,
    UserNotFoundError,
    VolumeNotFoundError,
    WebhookNotFoundError,
)
from atoll.guest.sandbox_paths import PartialCopyError
from atoll.server.logs import request_context
from atoll.service.failures import without_paths

_log = logging.getLogger(__name__)
MEDIA_TYPE = "application/problem+json"

_STATUS: tuple[tuple[type[SandboxError], int], ...] = (
    (NotAuthenticatedError, 401),
    (SignatureError, 401),
    (ForbiddenError, 403),
    (SandboxNotFoundError, 404),
    (CheckpointNotFoundError, 404),
    (SnapshotNotFoundError, 404),
    (VolumeNotFoundError, 404),
    (StoredImageNotFoundError, 404),
    (SandboxSpecNotFoundError, 404),
    (ImageBuildNotFoundError, 404),
    (UserNotFoundError, 404),
    (KeyNotFoundError, 404),
    (SessionNotFoundError, 404),
    (WebhookNotFoundError, 404),
    (ConflictError, 409),
    (SandboxPausedError, 409),
    (SandboxGoneError, 410),
    (SpecError, 422),
    (SetupError, 422),
    (BuildError, 422),
    (StartError, 422),
    (ImageError, 422),
    (LimitReachedError, 429),
    (RateLimitedError, 429),
    (ManagerClosedError, 503),
    (StateError, 503),
    (StoreError, 503),
    (AgentError, 503),
    (EngineError, 503),
    (SandboxTimeoutError, 504),
    (SandboxResourceError, 507),
)
_OF_FILES = {
    errno.ENOENT: (404, "file_not_found"),
    errno.ESRCH: (404, "not_running"),
    errno.EACCES: (403, "permission_denied"),
    errno.EPERM: (403, "permission_denied"),
    errno.EROFS: (403, "permission_denied"),
    errno.EEXIST: (409, "file_exists"),
    errno.ENOTDIR: (409, "not_a_directory"),
    errno.EISDIR: (409, "is_a_directory"),
    errno.ENOTEMPTY: (409, "not_empty"),
    errno.EBUSY: (409, "busy"),
    errno.ESTALE: (409, "taken_over"),
    errno.EPIPE: (409, "input_closed"),
    errno.EXDEV: (409, "other_file_system"),
    errno.ECONNREFUSED: (409, "connection_refused"),
    errno.ENOSPC: (507, "disk_full"),
    errno.EDQUOT: (507, "disk_full"),
}
_TITLES = {
    400: "Bad request",
    401: "Not authenticated",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    408: "Too slow",
    409: "Conflict",
    410: "Gone",
    413: "Too large",
    415: "Unsupported media type",
    416: "Range not satisfiable",
    422: "Unprocessable",
    429: "Too many",
    500: "Server error",
    503: "Unavailable",
    504: "Timeout",
    507: "No room",
}


class Problem(BaseModel):
    """What went wrong. `code` is stable; `detail` and `hint` are for people."""

    type: str
    """A URN made from `code`."""
    title: str
    """The meaning of the status in words."""
    status: int
    """The HTTP status."""
    code: str
    """A stable name of the error, for programs."""
    detail: str
    """What went wrong."""
    hint: str | None = None
    """What to do about it."""
    cause: str | None = None
    """Why the sandbox, or the command of a failed build step, ended."""
    output: str | None = None
    """The end of the output of the setup command, the start commands or the build step that failed."""
    step: int | None = None
    """The number of the build step that failed."""
    place: str | None = None
    """FILE:LINE of the instruction that failed."""
    instruction: str | None = None
    """The instruction that failed."""
    exit_code: int | None = None
    """The exit code of the build step that failed."""
    request_id: str | None = None
    """The id of the request, by which the server's log can be searched."""
    errors: list[dict[str, Any]] | None = None
    """Each invalid part of the request: where it is, and what is wrong with it."""


class Refusal(HTTPException):
    """A SandboxError that is raised while a body is read, where FastAPI lets only its own kind of exception pass."""

    def __init__(self, error: SandboxError) -> None:
        self.error = error
        super().__init__(of(error).status)


def problem(status: int, code: str, detail: str, **more: object) -> Problem:
    title = _TITLES.get(status, "Error")
    said = {"type": f"urn:atoll:{code}", "title": title, "status": status, "code": code, "detail": detail}
    return Problem.model_validate({**said, "request_id": request_context.request_id(), **more})


def _of_step(error: BuildError) -> dict[str, object]:
    named = {"place": error.place or None, "instruction": error.instruction or None}
    return {"step": error.step or None, "exit_code": error.exit_code, **named}


def of(error: BaseException) -> Problem:
    """Return the problem for an error that leaves a route or ends a stream that has begun."""
    if isinstance(error, Refusal):
        error = error.error
    if isinstance(error, SandboxError):
        error = _of_this_server(error)
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        cause = error.cause if isinstance(error, SandboxGoneError | BuildError) else None
        # What a user's own command wrote is not for the log.
        has_output = isinstance(error, SetupError | StartError | SandboxGoneError | BuildError)
        reason = without_paths(error.reason) if has_output else _discreet(error.reason)
        hint = error.hint and _discreet(error.hint)
        output = error.output if isinstance(error, SetupError | StartError | BuildError) else None
        said = {"hint": hint, "cause": str(cause) if cause else None, "output": output}
        return problem(status, error.code, reason, **said, **(_of_step(error) if isinstance(error, BuildError) else {}))
    if isinstance(error, PartialCopyError):
        return problem(409, "partial_copy", str(error))
    if isinstance(error, OSError):
        status, code = _OF_FILES.get(error.errno or 0, (422, "refused"))
        return problem(status, code, _discreet(_os_words(error)))
    if isinstance(error, HTTPException):
        codes = {404: "no_such_route", 405: "method_not_allowed", 413: "too_large", 408: "too_slow", 416: "bad_range"}
        codes |= {503: "unavailable", 504: "timeout"}
        return problem(error.status_code, codes.get(error.status_code, "bad_request"), str(error.detail))
    if isinstance(error, ValueError):
        return problem(422, "invalid_request", str(error) or "the request is invalid")
    _log.error("a request failed", exc_info=error)
    return problem(500, "server_error", "the server failed; its log says more")


_ABOUT_THE_CALLER = (NotAuthenticatedError, ForbiddenError, RateLimitedError)


def _of_this_server(error: SandboxError) -> SandboxError:
    """Return the error as callers of this server should see it.

    A server behind this one that refuses the credential of this one says nothing about the caller's.
    """
    if error.from_server and isinstance(error, _ABOUT_THE_CALLER):
        return EngineError(f"the server behind this one refused: {error.reason}")
    return error


def respond(error: BaseException) -> JSONResponse:
    if isinstance(error, Refusal):
        error = error.error
    body = of(error)
    headers: dict[str, str] = {}
    if body.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RateLimitedError):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    elif body.status in (429, 503):
        headers["Retry-After"] = "1"
    if isinstance(error, HTTPException) and error.headers:
        headers |= dict(error.headers)
    return JSONResponse(body.model_dump(exclude_none=True), body.status, headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return respond(error)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        found = [_plain(detail) for detail in error.errors()[:20]]
        malformed = any(detail["type"] == "json_invalid" for detail in found)
        first = f"{found[0]['where']}: {found[0]['message']}" if found else "the request is invalid"
        status, code = (400, "malformed_json") if malformed else (422, "invalid_request")
        body = problem(status, code, first, errors=found)
        return JSONResponse(body.model_dump(exclude_none=True), status, media_type=MEDIA_TYPE)

    for kind in (SandboxError, OSError, ValueError, HTTPException, Exception):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(RequestValidationError, invalid)


def _plain(detail: Mapping[str, Any]) -> dict[str, str]:
    where = ".".join(str(part) for part in detail["loc"])
    return {"type": str(detail["type"]), "where": where, "message": str(detail["msg"])}


def _discreet(text: str) -> str:
    """Return a text as users may read it. The log gets the rest."""
    shown = without_paths(text)
    if shown != text:
        _log.warning("a request failed: %s", text)
    return shown


def _os_words(error: OSError) -> str:
    words = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
    return f"{words}: {error.filename}" if error.filename else words


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": _TITLES[status], "model": Problem, "content": {MEDIA_TYPE: {}}}
    for status in (400, 401, 403, 404, 408, 409, 410, 413, 422, 429, 500, 503, 504, 507)
}
"""Error responses that any route may return."""

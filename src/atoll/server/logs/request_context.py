"""What every line of the log says while a request is served: the ids of the request, of its user and its sandbox."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from structlog.contextvars import bind_contextvars, clear_contextvars, get_contextvars

from atoll.server.logs.contents import redacted

HEADER = b"x-request-id"
_SANE = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def begin(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Forget what is known of an earlier request, and return the id of this one: the client's own, or a new one if that
    could be misread in a log or is a credential."""
    clear_contextvars()
    given = [value.decode("latin-1") for name, value in headers if name == HEADER]
    sane = len(given) == 1 and _SANE.fullmatch(given[0]) and redacted(given[0]) == given[0]
    request_id = given[0] if sane else secrets.token_hex(16)
    bind_contextvars(request_id=request_id)
    return request_id


def know_user(user_id: str) -> None:
    bind_contextvars(user_id=user_id)


def know_sandbox(sandbox_id: str) -> None:
    bind_contextvars(sandbox_id=sandbox_id)


def request_id() -> str | None:
    """Return the id of the request that is being served."""
    return get_contextvars().get("request_id")

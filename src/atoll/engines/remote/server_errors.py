"""What a server says went wrong, as the errors that an engine on this machine would raise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from atoll import errors
from atoll.errors import EngineError, EngineUnavailableError, SandboxError, SandboxGoneError, SetupError, SpecError


def _tree(kind: type[SandboxError]) -> Iterator[type[SandboxError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _tree(child)


_BY_CODE = {kind.code: kind for kind in _tree(SandboxError)}
"""A fixed list: what a server sends never decides which class is looked up elsewhere."""
_LONGEST = 2000
_MAX_OUTPUT = 64 << 10


def error_of(status: int, body: bytes) -> SandboxError:
    """The server's refusal. What is not understood is an EngineError that shows it."""
    told = _problem(body)
    code, reason = str(told.get("code", "")), str(told.get("detail", ""))[:_LONGEST]
    hint = str(told["hint"])[:_LONGEST] if isinstance(told.get("hint"), str) else None
    if status == 401:
        hint = "Set ATOLL_API_KEY to a key that is good: an administrator makes one by 'atoll key create'."
        return EngineUnavailableError(f"the server refused the credential: {reason}", hint=hint)
    kind = _BY_CODE.get(code)
    if kind is SandboxGoneError:
        return SandboxGoneError(reason, cause=str(told.get("cause", "unknown"))[:40], hint=hint)
    if kind is SetupError:
        return SetupError(reason, hint=hint, output=str(told.get("output") or "")[:_MAX_OUTPUT])
    if kind is not None:
        return kind(reason, hint=hint)
    if status == 422:
        return SpecError(reason, hint=hint)
    return EngineError(reason or f"the server answered {status}", hint=hint)


def _problem(body: bytes) -> dict[str, Any]:
    try:
        told = json.loads(body)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}

"""Spans for what engines do: each call that makes, changes, reaches or deletes something is one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from atoll.model import Handle
from atoll.tracing import span

_CALLS = (
    *("create", "connect", "delete", "pause", "resume", "set_network", "set_limits", "ensure_image", "pull"),
    *("checkpoint", "delete_checkpoint", "rollback", "fork", "hibernate", "diff"),
    *("snapshot", "delete_snapshot", "export_snapshot", "import_snapshot", "expose_port", "port_link"),
    *("create_volume", "copy_volume", "restore_volume", "remove_volume"),
)
"""What is asked all the time, such as `inspect` and `limit_events`, would only hide these."""

EngineClass = TypeVar("EngineClass", bound=type[Any])
Method = Callable[..., Coroutine[Any, Any, Any]]


def traced_engine(engine: EngineClass) -> EngineClass:
    """Make each call of an engine of this class a span, `engine.create` and so on."""
    for name in _CALLS:
        method = getattr(engine, name, None)
        if method is not None:
            setattr(engine, name, _traced(name, method))
    return engine


def _traced(name: str, method: Method) -> Method:
    title = f"engine.{name}"

    @functools.wraps(method)
    async def call(self: Any, *args: Any, **options: Any) -> Any:
        with span(title, engine=self.name) as current:
            first = args[0] if args else None
            if isinstance(first, Handle):
                current.set(sandbox_id=first.sandbox_id)
            elif name == "create" and isinstance(first, str):
                current.set(sandbox_id=first)
            return await method(self, *args, **options)

    return call

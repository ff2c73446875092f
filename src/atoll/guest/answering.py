"""Waiting for an agent that may never answer: whoever waits learns the reason as soon as it is known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from atoll.errors import AgentUnreachableError

T = TypeVar("T")
Diagnose = Callable[[], Awaitable[None]]
"""Raises the reason why a sandbox cannot answer, if there is one."""
_PATIENCE_S = (0.5, 1.5, 3.0, 5.0, 10.0, 20.0, 20.0)
"""After each of these the reason is looked for. An agent that removes a large tree answers nobody for a while."""


async def answered(work: Coroutine[Any, Any, T], diagnose: Diagnose) -> T:
    """Its result. Raises what `diagnose` does, or AgentUnreachableError after a minute."""
    task = asyncio.ensure_future(work)
    try:
        for seconds in _PATIENCE_S:
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if done:
                return task.result()
            await diagnose()
        raise AgentUnreachableError(f"the sandbox did not answer within {sum(_PATIENCE_S):g} s")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})

"""What a caller may write instead of the id of a sandbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from atoll.manager import SandboxManager
from atoll.service.identity import Caller


async def resolve(
    manager: SandboxManager, caller: Caller, text: str, is_mine: Callable[[Caller, str], Awaitable[bool]]
) -> str:
    """The id of the caller's sandbox of that id, name or task, in this order. What is none of them stays as it is, and
    is not found. Names are the caller's own, an administrator's too: what others call theirs leads nowhere."""
    if await is_mine(caller, text):
        return text
    found = await manager.find_sandbox(text, owner=caller.user_id)
    return text if found is None else found.id

"""The end of a manager: nothing is forgotten silently."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from atoll.manager.parts import Parts
from atoll.model import Cause


@dataclass(slots=True)
class Shutdown:
    """What became of the sandboxes. Those not deleted in time are deleted at the next start."""

    deleted: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stuck: list[str] = field(default_factory=list)
    """Work that did not heed being cancelled."""


async def shut_down(parts: Parts, *, keep: bool, timeout: float, drain: float) -> Shutdown:
    core, report = parts.core, Shutdown()
    core.closing = True
    await _drain(parts, drain)
    members = list(core.members)
    # Nobody will ever claim a spare of ours, and nobody waits any more for one that is just being made.
    leaving = [member for member in members if not keep or member.waits_in_pool or member.making or member.doomed]
    report.kept = [member.id for member in members if member not in leaving]
    tasks = {core.ending.begin(member, Cause.USER, "the manager was shut down"): member.id for member in leaving}
    if tasks:
        await asyncio.wait(tasks, timeout=timeout)
    for task, id in tasks.items():
        if not task.done():
            report.failed[id] = f"not deleted within {timeout:g} s"
        elif task.cancelled() or task.exception() is not None:
            report.failed[id] = "cancelled" if task.cancelled() else str(task.exception())
        else:
            report.deleted.append(id)
    report.stuck = await parts.aclose()
    return report


async def _drain(parts: Parts, seconds: float) -> None:
    making = [member.making.task for member in parts.core.members if member.making is not None]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            if making:
                await asyncio.wait(making)
            for member in parts.core.members:
                await member.usage.quiet()

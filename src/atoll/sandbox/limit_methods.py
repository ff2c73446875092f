"""The limits of a sandbox that exists."""

from __future__ import annotations

from atoll.engines.contract import Resizable, supporting
from atoll.engines.enforcement import refuse_unchangeable
from atoll.model import Limits, SandboxDetails, SandboxSpec
from atoll.sandbox.sandbox_access import SandboxAccess


class LimitMethods:
    """The methods of `AsyncSandbox` that change its limits."""

    access: SandboxAccess

    async def set_limits(
        self,
        *,
        memory: str | int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        disk: str | int | None = None,
    ) -> SandboxDetails:
        """Change limits while the sandbox runs, and return the limits that are then in effect.

        Only those that are given change: all of them, or none if this raises. `memory="512m"` is written as for a new
        sandbox. Raises UnsupportedError for a limit that the engine cannot change, and SandboxResourceError for one
        below what the sandbox uses now. The change lasts for the life of the sandbox, and its forks have it too.
        """
        limits = asked_limits(memory, cpus, pids, disk)
        handle, engine = self.access.handle(), await self.access.engine()
        resizable = await supporting(engine, Resizable)
        if resizable is None:
            refuse_unchangeable(engine.name, frozenset(), limits)
            raise AssertionError("an engine that changes no limit refuses all of them")
        changed = await resizable.set_limits(handle, limits)
        self.access.adopt(changed)
        return SandboxDetails.of(changed)


def asked_limits(
    memory: str | int | None = None,
    cpus: float | None = None,
    pids: int | None = None,
    disk: str | int | None = None,
) -> Limits:
    """Return the limits that are given. Raises SpecError for invalid ones."""
    wanted = {"memory": memory, "cpus": cpus, "pids": pids, "disk": disk}
    return SandboxSpec.of(**{name: value for name, value in wanted.items() if value is not None}).limits

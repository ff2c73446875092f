"""Connections to agents: a thousand idle sandboxes must not need a thousand descriptors."""

from __future__ import annotations

import resource

from atoll.manager.sandbox import ManagedSandbox

_MOST = 1024
_TRIES = 8


def affordable() -> int:
    """A quarter of the descriptors that this process may have: the rest is for engines, transfers and the program."""
    return max(16, min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


class Lines:
    """Those that are open, the one that was opened first in front. Beyond the limit the first idle ones are closed."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = affordable() if limit is None else limit
        self._open: dict[str, ManagedSandbox] = {}

    def opened(self, sandbox: ManagedSandbox) -> list[ManagedSandbox]:
        """Remember it. Those to let rest now; a later use connects again."""
        self._open.pop(sandbox.id, None)
        self._open[sandbox.id] = sandbox
        chosen: list[ManagedSandbox] = []
        for _ in range(_TRIES):
            if len(self._open) <= self.limit:
                break
            id, first = next(iter(self._open.items()))
            del self._open[id]
            if first is sandbox or first.keeper.is_wanted():
                self._open[id] = first
            else:
                chosen.append(first)
        return chosen

    def closed(self, sandbox: ManagedSandbox) -> None:
        """Forget it. May be repeated."""
        self._open.pop(sandbox.id, None)

"""The most that users who are not administrators may ask for, for one sandbox."""

from __future__ import annotations

from atoll.model import Limits
from atoll.service.identity import Caller
from atoll.service.refusals import ForbiddenError

_NAMES = {
    "memory_bytes": "bytes of memory",
    "cpus": "CPUs",
    "pids": "processes",
    "disk_bytes": "bytes of disk",
    "open_files": "open files",
}


class LimitCeilings:
    def __init__(self, most: Limits) -> None:
        self._most = most

    def check(self, caller: Caller, asked: Limits) -> None:
        """Raises ForbiddenError for a limit above the ceiling."""
        if caller.is_admin:
            return
        for name, words in _NAMES.items():
            value, most = getattr(asked, name), getattr(self._most, name)
            if value is not None and most is not None and value > most:
                raise ForbiddenError(
                    f"only administrators may give a sandbox {value:g} {words}: this server's ceiling is {most:g}",
                    hint="Ask for less, or leave it out to get the default.",
                )

    def applied(self, caller: Caller, asked: Limits, defaults: Limits) -> Limits:
        """What was asked for, and the ceiling in place of a default that is above it."""
        if caller.is_admin:
            return asked
        lower = {
            name: most
            for name in _NAMES
            if getattr(asked, name) is None
            and (most := getattr(self._most, name)) is not None
            and (getattr(defaults, name) or 0) > most
        }
        return asked.model_copy(update=lower) if lower else asked

"""What a check is, and how it is entered into the list of all."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from atoll.conformance.bench import Bench
from atoll.model import Capability

CheckFunction = Callable[[Bench], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One promise that an engine has to keep. It fails by an AssertionError that says what was seen instead."""

    name: str
    """Where it is and what it promises: `commands.exit_codes_are_reported`."""
    promise: str
    function: CheckFunction
    needs: frozenset[Capability]
    """It is asked only of engines that declare all of these."""
    without: frozenset[Capability]
    """It is asked only of engines that declare none of these."""
    slow: bool

    def unfit(self, capabilities: frozenset[Capability]) -> str | None:
        """Why it is not asked of an engine with these capabilities; None if it is."""
        if missing := self.needs - capabilities:
            return f"the engine does not declare {', '.join(sorted(missing))}"
        if present := self.without & capabilities:
            return f"the engine declares {', '.join(sorted(present))}"
        return None


CHECKS: list[Check] = []
"""All of them, in the order in which they are best read."""


def check(
    *, needs: Collection[Capability] = (), without: Collection[Capability] = (), slow: bool = False
) -> Callable[[CheckFunction], CheckFunction]:
    """Enter a function into the list. Its name and its docstring are the promise."""

    def enter(function: CheckFunction) -> CheckFunction:
        module = function.__module__.rpartition(".")[2]
        CHECKS.append(
            Check(
                name=f"{module}.{getattr(function, '__name__', 'unnamed')}",
                promise=inspect.getdoc(function) or "",
                function=function,
                needs=frozenset(needs),
                without=frozenset(without),
                slow=slow,
            )
        )
        return function

    return enter

"""Which changes of a sandbox's state are legal. Pure; whoever changes a state asks here first.

MISSING ──► STARTING ──► RUNNING ◄──► PAUSED
                            └────┬───────┘
                                 ▼
                              STOPPED

every state ──► MISSING             it was deleted, or nothing is left of it
every state but MISSING ──► ERROR   the engine cannot say or do what it should
ERROR ──► what the engine sees      once it can say again

A sandbox that has STOPPED stays so until it is deleted: its cause and its files are still there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from atoll.model.state import State

LEGAL: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.MISSING: frozenset({State.STARTING}),
        State.STARTING: frozenset({State.RUNNING, State.ERROR, State.MISSING}),
        State.RUNNING: frozenset({State.PAUSED, State.STOPPED, State.ERROR, State.MISSING}),
        State.PAUSED: frozenset({State.RUNNING, State.STOPPED, State.ERROR, State.MISSING}),
        State.STOPPED: frozenset({State.ERROR, State.MISSING}),
        State.ERROR: frozenset({State.RUNNING, State.PAUSED, State.STOPPED, State.MISSING}),
    }
)
ALIVE = frozenset({State.STARTING, State.RUNNING, State.PAUSED})
"""The states in which a sandbox has processes, or soon will."""


class IllegalTransitionError(ValueError):
    """A mistake in the program that asked for it, never of a user."""


def is_legal(before: State, after: State) -> bool:
    return after in LEGAL[before]


def change(before: State, after: State) -> State:
    """The state afterwards. Raises IllegalTransitionError if there is no way from one to the other."""
    if not is_legal(before, after):
        raise IllegalTransitionError(f"a sandbox cannot go from {before} to {after}")
    return after

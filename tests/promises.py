"""Groups of checks of the conformance suite."""

from __future__ import annotations

from atoll.conformance import CHECKS, Check


def group_of(check: Check) -> str:
    return check.name.partition(".")[0]


def groups(*names: str) -> frozenset[str]:
    """These groups, which there must be: a check of a group that was renamed would silently not be run."""
    unknown = set(names) - {group_of(check) for check in CHECKS}
    assert unknown == set(), f"there is no group {sorted(unknown)}"
    return frozenset(names)


OF_THE_ENGINE = groups(
    "adoption",
    "changed_limits",
    "controls",
    "isolation",
    "life_cycle",
    "process_trees",
    "saved_states",
    "special_files",
)
"""What an engine, its runtime and the user who runs it decide. The rest is the agent's, whatever is around it."""

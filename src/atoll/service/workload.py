"""What runs in a sandbox from its start on, when neither a spec of the catalogue nor its caller says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from atoll.service.models import ExposedPort


def _none(_: str) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Workload:
    command: list[str] | str | None = None
    user: str | None = None
    """`UID:GID` of the command, to whom the work directory is given. Without effect where there is but one user."""
    variables: Callable[[str], Mapping[str, str]] = _none
    """The variables of the command alone, for the id of its sandbox."""
    ports: list[ExposedPort] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    """The service's own, which users can neither set nor see."""

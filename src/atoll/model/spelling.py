"""Names in input: they may be in snake case or camel case, and the error for an unknown name suggests the right one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from atoll.errors import SpecError

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SHOWN = 80
NONE: Mapping[str, str] = MappingProxyType({})


def snake_case(name: str) -> str:
    """Convert `allowedDomains` to `allowed_domains`."""
    return _HUMP.sub("_", name).lower()


def renamed(
    values: Mapping[Any, Any],
    known: Collection[str],
    aliases: Mapping[str, str] = NONE,
    *,
    of: str,
    others: Collection[str] = (),
) -> dict[str, Any]:
    """Return the same values under the names in `known`. `aliases` maps other names, in snake case, to these. Raises
    SpecError for an unknown name, and for one that is given in two spellings.

    `of` says in error messages what the names belong to. `others` are names that are only used for hints.
    """
    found: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise SpecError(f"{str(name)[:_SHOWN]!r} is not a name: the names of {of} must be strings")
        plain = name if name in known else snake_case(name)
        plain = plain if plain in known else aliases.get(plain, plain)
        if plain not in known:
            raise SpecError(
                f"{name[:_SHOWN]!r} is not an option of {of}", hint=_hint(name, {*known, *aliases, *others})
            )
        if plain in found:
            spelled = f"{written[plain][:_SHOWN]!r} and {name[:_SHOWN]!r}"
            raise SpecError(f"{plain} is given twice, as {spelled}", hint=f"Give only {plain!r}.")
        found[plain], written[plain] = value, name
    return found


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that was probably meant."""
    found = difflib.get_close_matches(snake_case(name[:_SHOWN]), sorted(known), 1, 0.6)
    return found[0] if found else None


def one_line(error: SpecError) -> str:
    """Return reason and hint on one line, for a pydantic validator, whose errors have no hint."""
    return f"{error.reason}: {error.hint}" if error.hint else error.reason


def before(work: Callable[[Mapping[str, Any]], dict[str, Any]], value: Any) -> Any:
    """Apply `work` to the input of a pydantic validator. Input that is not a mapping is left to the validator."""
    if not isinstance(value, Mapping):
        return value
    try:
        return work(value)
    except SpecError as error:
        raise ValueError(one_line(error)) from None


def _hint(name: str, known: Collection[str]) -> str:
    meant = nearest(name, known)
    return f"Did you mean {meant!r}?" if meant else f"There are {', '.join(sorted(known))}."

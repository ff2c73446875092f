"""Patterns in substitutions: `${NAME#PATTERN}`, `${NAME%PATTERN}`, `${NAME/PATTERN/REPLACEMENT}`.

`*` stands for any characters and `?` for one. Between two stars the first place that fits is as good as any other,
so nothing is tried twice, however a pattern is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_PATTERN_CHARS = 1024


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What stands between two stars: a text of known length, in which `None` stands for any character."""

    chars: tuple[str | None, ...]

    def find(self, value: str, start: int) -> int:
        """Return where it first occurs from there on, or -1."""
        if None not in self.chars:
            return value.find("".join(char or "" for char in self.chars), start)
        found = self._expression(self.chars).search(value, start)
        return found.start() if found else -1

    def find_last(self, value: str, start: int) -> int:
        if None not in self.chars:
            return value.rfind("".join(char or "" for char in self.chars), start)
        found = self._expression(self.chars[::-1]).search(value[start:][::-1])
        return len(value) - found.end() if found else -1

    @staticmethod
    def _expression(chars: tuple[str | None, ...]) -> re.Pattern[str]:
        return re.compile("".join("." if char is None else re.escape(char) for char in chars), re.DOTALL)


class PatternError(ValueError):
    """The pattern cannot be used."""


def trim_start(pattern: str, value: str, *, longest: bool) -> str:
    """Remove what the pattern matches at the start of the value."""
    found = _match(_parts(pattern), value, 0, anchored=True, longest=longest)
    return value if found is None else value[found[1] :]


def trim_end(pattern: str, value: str, *, longest: bool) -> str:
    parts = [_Fixed(part.chars[::-1]) for part in reversed(_parts(pattern))]
    backwards = value[::-1]
    found = _match(parts, backwards, 0, anchored=True, longest=longest)
    return value if found is None else backwards[found[1] :][::-1]


def replace(pattern: str, replacement: str, value: str, *, everywhere: bool, max_chars: int) -> str:
    """Replace the first text that the pattern matches, or each; a star takes as much as it can."""
    parts = _parts(pattern)
    pieces: list[str] = []
    at = chars = 0
    while at <= len(value):
        found = _match(parts, value, at, anchored=False, longest=True)
        if found is None or (found[0] == found[1] and at):
            break
        chars += found[0] - at + len(replacement)
        if chars > max_chars:
            raise PatternError(f"there are more than {max_chars} characters after the substitution")
        pieces += [value[at : found[0]], replacement]
        at = found[1]
        if not everywhere or found[0] == found[1]:
            break
    return "".join([*pieces, value[at:]])


def _parts(pattern: str) -> list[_Fixed]:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(f"a pattern has more than {MAX_PATTERN_CHARS} characters")
    parts: list[list[str | None]] = [[]]
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "*":
            parts.append([])
        elif char == "?":
            parts[-1].append(None)
        elif char == "\\":
            escaped = pattern[at : at + 1]
            if not escaped or escaped not in "*?\\/}":
                raise PatternError(f"\\{escaped} has no meaning in a pattern")
            parts[-1].append(escaped)
            at += 1
        else:
            parts[-1].append(char)
    return [_Fixed(tuple(part)) for part in parts]


def _match(parts: list[_Fixed], value: str, start: int, *, anchored: bool, longest: bool) -> tuple[int, int] | None:
    """Return where the first match begins and ends."""
    first = parts[0].find(value, start)
    if first < 0 or (anchored and first != start):
        return None
    at = first + len(parts[0].chars)
    for index, part in enumerate(parts[1:], 1):
        is_last = index == len(parts) - 1
        found = part.find_last(value, at) if is_last and longest else part.find(value, at)
        if found < 0:
            return None
        at = found + len(part.chars)
    return first, at

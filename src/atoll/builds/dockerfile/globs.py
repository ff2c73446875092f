"""Patterns of file names, as Go's filepath.Match reads them: `*`, `?`, `[a-z]`, `[^x]` and `\\` before a character.

No wildcard matches a slash. A star is tried again only in the name that it stands in, and only the last star of a
name is tried again, so the time is bounded however a pattern is written.
"""

from __future__ import annotations

from dataclasses import dataclass


class GlobError(ValueError):
    """The pattern is not complete: a bracket or a character is missing."""


@dataclass(frozen=True, slots=True)
class CharacterSet:
    ranges: tuple[tuple[str, str], ...]
    negated: bool

    def has(self, char: str) -> bool:
        return any(low <= char <= high for low, high in self.ranges) != self.negated


@dataclass(frozen=True, slots=True)
class AnyCharacter:
    """`?`"""


@dataclass(frozen=True, slots=True)
class AnyText:
    """`*`"""


Part = str | CharacterSet | AnyCharacter | AnyText


def has_wildcards(pattern: str) -> bool:
    """Return whether the pattern is more than a name."""
    return any(char in pattern for char in "*?[\\")


def matches(pattern: str, path: str) -> bool:
    """Return whether the whole path matches. Raises GlobError for a pattern that is not complete."""
    patterns, names = split_parts(pattern), path.split("/")
    return len(patterns) == len(names) and all(map(matches_name, patterns, names))


def split_parts(pattern: str) -> list[list[Part]]:
    """Return the parts of the pattern for each name between slashes."""
    names: list[list[Part]] = [[]]
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "/":
            names.append([])
        elif char == "*":
            if not (names[-1] and isinstance(names[-1][-1], AnyText)):
                names[-1].append(AnyText())
        elif char == "?":
            names[-1].append(AnyCharacter())
        elif char == "[":
            characters, at = read_set(pattern, at)
            names[-1].append(characters)
        elif char == "\\":
            if at == len(pattern):
                raise GlobError("a character is missing after the last '\\'")
            if pattern[at] == "/":
                names.append([])
            else:
                names[-1].append(pattern[at])
            at += 1
        else:
            names[-1].append(char)
    return names


def read_set(pattern: str, at: int) -> tuple[CharacterSet, int]:
    """Read `[…]` from after its bracket on. Returns where it ends."""
    negated = pattern.startswith("^", at)
    at += negated
    ranges: list[tuple[str, str]] = []
    while not (ranges and pattern.startswith("]", at)):
        low, at = _set_character(pattern, at)
        high = low
        if pattern.startswith("-", at):
            high, at = _set_character(pattern, at + 1)
        ranges.append((low, high))
    return CharacterSet(tuple(ranges), negated), at + 1


def _set_character(pattern: str, at: int) -> tuple[str, int]:
    is_escaped = pattern.startswith("\\", at)
    at += is_escaped
    char = pattern[at : at + 1]
    if not char or (char in "-]" and not is_escaped):
        raise GlobError("']' is missing, or a character before it")
    return char, at + 1


def matches_name(parts: list[Part], name: str) -> bool:
    """Return whether the parts match the name, in which is no slash."""
    at = part = 0
    last_star = started_at = -1
    while at < len(name):
        if part < len(parts) and isinstance(parts[part], AnyText):
            last_star, started_at = part, at
            part += 1
        elif part < len(parts) and _fits(parts[part], name[at]):
            at += 1
            part += 1
        elif last_star >= 0:
            started_at += 1
            at, part = started_at, last_star + 1
        else:
            return False
    return all(isinstance(rest, AnyText) for rest in parts[part:])


def _fits(part: Part, char: str) -> bool:
    match part:
        case str():
            return part == char
        case CharacterSet():
            return part.has(char)
    return isinstance(part, AnyCharacter)

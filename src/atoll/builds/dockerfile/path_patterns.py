"""The patterns of a `.dockerignore`: those of file names, and `**` for any number of directories.

A pattern with few wildcards becomes a regular expression. With more of them a regular expression could try the same
again and again, so all possibilities are followed at once, as the bits of a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from atoll.builds.dockerfile.globs import CharacterSet, read_set

_WILDCARDS_OF_EXPRESSIONS = 2


class _Wild(Enum):
    CHARACTER = auto()
    """`?`: one character that is no slash."""
    NAME = auto()
    """`*`: any characters but slashes."""
    DIRECTORIES = auto()
    """`**/`: any directories, or none."""
    ANYTHING = auto()
    """`**` at the end."""


_Part = str | CharacterSet | _Wild
_EXPRESSIONS = {
    _Wild.CHARACTER: "[^/]",
    _Wild.NAME: "[^/]*",
    _Wild.DIRECTORIES: "(?:.*/)?",
    _Wild.ANYTHING: ".*",
}


def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether a path matches. Raises GlobError."""
    parts = _parts(pattern)
    if all(isinstance(part, str) for part in parts):
        plain = "".join(part for part in parts if isinstance(part, str))
        return lambda path: path == plain
    wildcards = sum(part in (_Wild.NAME, _Wild.DIRECTORIES, _Wild.ANYTHING) for part in parts)
    if wildcards > _WILDCARDS_OF_EXPRESSIONS:
        return _Automaton.of(parts).matches
    expression = re.compile("".join(map(_expression, parts)), re.DOTALL)
    return lambda path: expression.fullmatch(path) is not None


def literal_start(pattern: str) -> str:
    """Return what is before the first wildcard of the pattern."""
    return re.split(r"[*?\[\\]", pattern, maxsplit=1)[0]


def _parts(pattern: str) -> list[_Part]:
    parts: list[_Part] = []
    at = 0
    while at < len(pattern):
        part, at = _part(pattern, at)
        if not (isinstance(part, _Wild) and part is not _Wild.CHARACTER and parts[-1:] == [part]):
            parts.append(part)
    is_suffix = pattern.startswith("**") and not pattern.startswith("**/")
    if is_suffix and all(isinstance(part, str) for part in parts[1:]):
        parts[0] = _Wild.ANYTHING
    return parts


def _part(pattern: str, at: int) -> tuple[_Part, int]:
    if pattern.startswith("**", at):
        at += 2 + pattern.startswith("/", at + 2)
        return (_Wild.DIRECTORIES if at < len(pattern) else _Wild.ANYTHING), at
    match pattern[at]:
        case "*":
            return _Wild.NAME, at + 1
        case "?":
            return _Wild.CHARACTER, at + 1
        case "[":
            return read_set(pattern, at + 1)
        case "\\":
            return pattern[at + 1 : at + 2], at + 2
    return pattern[at], at + 1


def _expression(part: _Part) -> str:
    if isinstance(part, str):
        return re.escape(part)
    if isinstance(part, CharacterSet):
        ranges = "".join(f"{re.escape(low)}-{re.escape(high)}" for low, high in part.ranges if low <= high)
        if not ranges:
            return "." if part.negated else "(?!)"
        return f"[{'^' if part.negated else ''}{ranges}]"
    return _EXPRESSIONS[part]


def _fits(part: _Part, char: str) -> bool:
    if isinstance(part, CharacterSet):
        return part.has(char)
    return char != "/" if part is _Wild.CHARACTER else part == char


@dataclass(frozen=True, slots=True)
class _Automaton:
    """State N means that N steps are done; a path matches if the last state is reached at its end."""

    steps: tuple[_Part, ...]
    """What has to come next in each state; a state that only waits has an empty text."""
    loops_in_names: int
    """The states that stay for every character but a slash, as bits; and so on."""
    loops: int
    skips: int
    """The states from which the next one is reached for nothing."""
    jumps: int
    """The states from which the one after the next is reached for nothing."""

    @classmethod
    def of(cls, parts: list[_Part]) -> _Automaton:
        steps: list[_Part] = []
        in_names = loops = skips = jumps = 0
        for part in parts:
            bit = 1 << len(steps)
            match part:
                case _Wild.NAME:
                    in_names, skips = in_names | bit, skips | bit
                    steps.append("")
                case _Wild.ANYTHING:
                    loops, skips = loops | bit, skips | bit
                    steps.append("")
                case _Wild.DIRECTORIES:
                    skips, jumps, loops = skips | bit, jumps | bit, loops | bit << 1
                    steps += ["", "/"]
                case _:
                    steps.append(part)
        return cls(tuple(steps), in_names, loops, skips, jumps)

    def matches(self, path: str) -> bool:
        advances: dict[str, int] = {}
        states = self._closed(1)
        for char in path:
            if char not in advances:
                fitting = (1 << index for index, part in enumerate(self.steps) if part != "" and _fits(part, char))
                advances[char] = sum(fitting)
            stays = self.loops if char == "/" else self.loops | self.loops_in_names
            states = self._closed((states & advances[char]) << 1 | states & stays)
            if not states:
                return False
        return bool(states >> len(self.steps) & 1)

    def _closed(self, states: int) -> int:
        """Add what is reached for nothing."""
        while (more := states | (states & self.skips) << 1 | (states & self.jumps) << 2) != states:
            states = more
        return states

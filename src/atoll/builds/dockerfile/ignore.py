"""What a `.dockerignore` leaves out of a context, as BuildKit decides it."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.builds.dockerfile.globs import GlobError, split_parts
from atoll.builds.dockerfile.instructions import Place
from atoll.builds.dockerfile.path_patterns import compile_pattern, literal_start
from atoll.builds.dockerfile.refusals import refusal, shown
from atoll.builds.dockerfile.words import SPACES

MAX_FILE_BYTES = 1 << 20
MAX_RULES = 1000
_MAX_RULE_CHARS = 1024
_MOST_REMEMBERED = 4096
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Rule:
    pattern: str
    is_exception: bool
    """It began with `!`: what it matches stays in."""
    matches: Callable[[str], bool]

    def may_match_below(self, directory: str) -> bool:
        """Return whether the start of the pattern, which has no wildcard, leads into the directory."""
        start = literal_start(self.pattern)
        return f"{directory}/".startswith(start) or start.startswith(f"{directory}/")


@dataclass(frozen=True, slots=True)
class _Decision:
    is_excluded: bool
    matched: tuple[bool, ...]
    """Which rules matched the path or a directory above it."""


@dataclass(slots=True)
class IgnoreRules:
    """The rules of one file. The last one that matches a path, or a directory above it, decides."""

    rules: tuple[Rule, ...] = ()
    _directories: dict[str, _Decision] = field(default_factory=dict)

    @classmethod
    def parse(cls, content: bytes, name: str = ".dockerignore") -> IgnoreRules:
        """Read the file. Raises DockerfileError with the line of a rule that cannot be used."""
        if len(content) > MAX_FILE_BYTES:
            reason = f"the file has {len(content)} bytes; at most {MAX_FILE_BYTES} are read"
            raise refusal(Place(name, 1), reason, "Use patterns in place of single files.")
        rules: list[Rule] = []
        for number, raw in enumerate(content.removeprefix(_BYTE_ORDER_MARK).split(b"\n"), 1):
            line = raw.decode(errors="surrogateescape")
            if line.startswith("#") or not line.strip(SPACES):
                continue
            if len(rules) == MAX_RULES:
                raise refusal(Place(name, number), f"there are more than {MAX_RULES} rules", "Use patterns.")
            rules.append(_rule(line.strip(SPACES), Place(name, number)))
        return cls(tuple(rules))

    def excludes(self, path: str, is_directory: bool) -> bool:
        """Return whether the path, which is relative to the context, is left out. Something below a directory that is
        left out may stay in nevertheless: see `may_enter`."""
        decision = self._decide(path)
        if is_directory:
            self._remember(path, decision)
        return decision.is_excluded

    def may_enter(self, directory: str) -> bool:
        """Return whether something below the directory may stay in, so that it has to be looked at."""
        if not self.excludes(directory, is_directory=True):
            return True
        return any(rule.is_exception and rule.may_match_below(directory) for rule in self.rules)

    def _decide(self, path: str) -> _Decision:
        above = posixpath.dirname(path)
        before: tuple[bool, ...] = ()
        if above:
            known = self._directories.get(above)
            if known is None:
                known = self._decide(above)
                self._remember(above, known)
            before = known.matched
        is_excluded = False
        matched = []
        for index, rule in enumerate(self.rules):
            matches = bool(before) and before[index]
            # A rule that would change nothing is not asked, not even for what is below the path.
            if not matches and rule.is_exception == is_excluded:
                matches = rule.matches(path)
            matched.append(matches)
            if matches:
                is_excluded = not rule.is_exception
        return _Decision(is_excluded, tuple(matched))

    def _remember(self, directory: str, decision: _Decision) -> None:
        if len(self._directories) >= _MOST_REMEMBERED:
            self._directories.clear()
        self._directories[directory] = decision


def _rule(line: str, place: Place) -> Rule:
    is_exception = line.startswith("!")
    pattern = line[1:].strip(SPACES) if is_exception else line
    if not pattern:
        raise refusal(place, "there is nothing after '!'", "Write !PATTERN.")
    if len(pattern) > _MAX_RULE_CHARS:
        raise refusal(place, f"the rule has more than {_MAX_RULE_CHARS} characters", "Write a shorter pattern.")
    pattern = posixpath.normpath(pattern).lstrip("/") or "."
    try:
        split_parts(pattern)
        return Rule(pattern, is_exception, compile_pattern(pattern))
    except GlobError as error:
        hint = "Write '\\[' for a bracket, and '\\\\' for a backslash."
        raise refusal(place, f"the pattern {shown(pattern)} cannot be read: {error}", hint) from None

"""Substituting variables in words, and removing quotes and escapes, as BuildKit does.

The output is bounded: a few lines of `ENV A=$A$A` would otherwise fill the memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.builds.dockerfile import shell_patterns
from atoll.builds.dockerfile.words import SPACES

MAX_WORD_CHARS = 128 << 10
"""The longest that a variable or an argument of a program can be in Linux."""
MAX_TEXT_CHARS = 4 << 20
_MAX_DEPTH = 32
_SPECIAL = "@*#?-$!"
_PLAIN = re.compile(r"[^$<'\"\\`}/]+")
_SPACES_AFTER_HEREDOC = "\t\r "


class SubstitutionError(ValueError):
    """A word is not written as it has to be, or what comes out of it is too long."""


class MissingVariableError(SubstitutionError):
    """A variable that has to have a value, as `${NAME:?MESSAGE}` says, has none."""


def expand(word: str, variables: Mapping[str, str], escape: str = "\\") -> str:
    """Return the word with its variables substituted and without quotes and escapes. A variable that does not exist
    is empty."""
    return _Reader(word, variables, escape).read()[0]


def expand_words(word: str, variables: Mapping[str, str], escape: str = "\\") -> list[str]:
    """Return the words that it consists of after the substitution."""
    return _Reader(word, variables, escape).read()[1]


def expand_text(text: str, variables: Mapping[str, str]) -> str:
    """Return the content of a here-document with its variables substituted. Quotes have no meaning in it."""
    return _Reader(text, variables, "\\", max_chars=MAX_TEXT_CHARS, reads_quotes=False).read()[0]


def split_raw(text: str, *, keep_quotes: bool, keep_escapes: bool) -> list[str]:
    """Return the words of a text in which no variable is known, so that all of them stay as they are written."""
    reader = _Reader(
        text, {}, "\\", max_chars=MAX_TEXT_CHARS, keep_quotes=keep_quotes, keep_escapes=keep_escapes, keep_unset=True
    )
    return reader.read()[1]


@dataclass(slots=True)
class _Output:
    """What was read, as one text and as words."""

    pieces: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    word: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Add text whose white space separates words."""
        self.pieces.append(text)
        start = 0
        for at, char in enumerate(text):
            if char in SPACES:
                self.word.append(text[start:at])
                self.end_word()
                start = at + 1
        self.word.append(text[start:])

    def add_whole(self, text: str) -> None:
        self.pieces.append(text)
        self.word.append(text)

    def end_word(self) -> None:
        if word := "".join(self.word):
            self.words.append(word)
        self.word = []


@dataclass(slots=True)
class _Reader:
    source: str
    variables: Mapping[str, str]
    escape: str
    max_chars: int = MAX_WORD_CHARS
    reads_quotes: bool = True
    keep_quotes: bool = False
    keep_escapes: bool = False
    keep_unset: bool = False
    at: int = 0
    produced_chars: int = 0
    depth: int = 0

    def read(self) -> tuple[str, list[str]]:
        return self._read_until("", self.keep_escapes)

    def _peek(self) -> str:
        return self.source[self.at : self.at + 1]

    def _next(self) -> str:
        char = self._peek()
        self.at += 1
        return char

    def _counted(self, text: str) -> str:
        self.produced_chars += len(text)
        if self.produced_chars > self.max_chars:
            raise SubstitutionError(f"there are more than {self.max_chars} characters after the substitution")
        return text

    def _read_until(self, stop: str, keep_escapes: bool) -> tuple[str, list[str]]:
        """Read up to the character, or to the end."""
        outer, self.keep_escapes = self.keep_escapes, keep_escapes
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise SubstitutionError(f"substitutions are nested more than {_MAX_DEPTH} deep")
        output = _Output()
        while char := self._peek():
            if char == stop:
                self.at += 1
                break
            self._read_one(char, output)
        else:
            if stop:
                raise SubstitutionError(f"'{stop}' is missing")
        self.keep_escapes = outer
        self.depth -= 1
        output.end_word()
        return "".join(output.pieces), output.words

    def _read_one(self, char: str, output: _Output) -> None:
        if char == "$":
            output.add(self._counted(self._variable()))
        elif char == "<":
            output.add_whole(self._counted(self._redirection()))
        elif char == "'" and self.reads_quotes:
            output.add_whole(self._counted(self._single_quoted()))
        elif char == '"' and self.reads_quotes:
            output.add_whole(self._counted(self._double_quoted()))
        elif char == self.escape:
            self.at += 1
            escaped = self._next()
            output.add_whole(self._counted((self.escape if self.keep_escapes else "") + escaped))
        else:
            plain = _PLAIN.match(self.source, self.at)
            text = plain.group() if plain else char
            self.at += len(text)
            output.add(self._counted(text))

    def _redirection(self) -> str:
        """White space after `<<` does not separate words."""
        self.at += 1
        if self._peek() != "<":
            return "<"
        start = self.at
        self.at += 1
        while (space := self._peek()) and space in _SPACES_AFTER_HEREDOC:
            self.at += 1
        return "<" + self.source[start : self.at]

    def _single_quoted(self) -> str:
        end = self.source.find("'", self.at + 1)
        if end < 0:
            raise SubstitutionError("the second of two single quotes is missing")
        quoted = self.source[self.at : end + 1]
        self.at = end + 1
        return quoted if self.keep_quotes else quoted[1:-1]

    def _double_quoted(self) -> str:
        self.at += 1
        pieces = ['"'] if self.keep_quotes else []
        while char := self._peek():
            if char == '"':
                self.at += 1
                return "".join([*pieces, '"'] if self.keep_quotes else pieces)
            if char == "$":
                pieces.append(self._counted(self._variable()))
                continue
            self.at += 1
            if char == self.escape:
                if self.keep_escapes:
                    pieces.append(char)
                following = self._peek()
                if not following:
                    break
                if following in ('"', "$", self.escape):
                    char = self._next()
            pieces.append(char)
        raise SubstitutionError("the second of two double quotes is missing")

    def _variable(self) -> str:
        self.at += 1
        if self._peek() != "{":
            name = self._name()
            if not name:
                return "$"
            return "$" + name if self.keep_unset and name not in self.variables else self.variables.get(name, "")
        self.at += 1
        if not self._peek():
            raise SubstitutionError("'}' is missing")
        if self._peek() in "{}:":
            raise SubstitutionError("the name of a variable is missing after '${'")
        name = self._name()
        value = self.variables.get(name)
        operator = self._next()
        if operator == "}":
            return "${" + name + "}" if self.keep_unset and value is None else value or ""
        if operator == "/":
            return self._replaced(name, value)
        also_empty = operator == ":"
        kind = self._next() if also_empty else operator
        if not kind or kind not in "+-?#%" or (also_empty and kind in "#%"):
            raise SubstitutionError(f"'{operator}{kind if also_empty else ''}' has no meaning in a substitution")
        word = self._read_until("}", kind in "#%")[0]
        if self.keep_unset and value is None:
            return "${" + name + (":" if also_empty else "") + kind + word + "}"
        return self._modified(name, value, kind, word, also_empty)

    def _modified(self, name: str, value: str | None, kind: str, word: str, also_empty: bool) -> str:
        has_value = bool(value) if also_empty else value is not None
        match kind:
            case "-":
                return (value or "") if has_value else word
            case "+":
                return word if has_value else ""
            case "?":
                if not has_value:
                    raise MissingVariableError(f"{name}: {word or 'it has to have a value'}")
                return value or ""
        longest = word.startswith(kind)
        trim = shell_patterns.trim_end if kind == "%" else shell_patterns.trim_start
        try:
            return trim(word[1:] if longest else word, value or "", longest=longest)
        except shell_patterns.PatternError as error:
            raise SubstitutionError(str(error)) from None

    def _replaced(self, name: str, value: str | None) -> str:
        everywhere = self._peek() == "/"
        self.at += everywhere
        pattern = self._read_until("/", True)[0]
        replacement = self._read_until("}", True)[0]
        if self.keep_unset and value is None:
            return "${" + f"{name}/{pattern}/{replacement}" + "}"
        try:
            return shell_patterns.replace(
                pattern, replacement, value or "", everywhere=everywhere, max_chars=self.max_chars
            )
        except shell_patterns.PatternError as error:
            raise SubstitutionError(str(error)) from None

    def _name(self) -> str:
        start = self.at
        first = self._peek()
        if first.isdecimal():
            while self._peek().isdecimal():
                self.at += 1
        elif first and first in _SPECIAL:
            self.at += 1
        else:
            while (char := self._peek()) and (char.isalpha() or char.isdecimal() or char == "_"):
                self.at += 1
        return self.source[start : self.at]

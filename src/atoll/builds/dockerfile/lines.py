"""The lines of a Dockerfile: directives, comments, continuation lines. Each line is read once."""

from __future__ import annotations

import re
from collections.abc import Iterator

from atoll.builds.dockerfile.instructions import Place
from atoll.builds.dockerfile.refusals import refusal, shown
from atoll.builds.dockerfile.words import SPACES

MAX_FILE_BYTES = 4 << 20
MAX_LINES = 100_000
MAX_LINE_BYTES = (64 << 10) - 1
"""As in BuildKit."""
MAX_INSTRUCTION_CHARS = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DIRECTIVES = ("syntax", "escape", "check")
_DIRECTIVE_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9]*")
_ESCAPES = ("\\", "`")


class Lines:
    """The lines of one file, and what its directives say as soon as they were read."""

    def __init__(self, content: bytes, name: str) -> None:
        self.name = name
        self.escape = "\\"
        self.syntax = ""
        self.warnings: list[str] = []
        self._reads_directives = True
        self._directives: set[str] = set()
        self._line = 0
        if len(content) > MAX_FILE_BYTES:
            raise refusal(
                self.place(1),
                f"the file has {len(content)} bytes; at most {MAX_FILE_BYTES} are read",
                "Put what it contains into files of the context, and COPY them.",
            )
        self._raw = self._split(content.removeprefix(_BYTE_ORDER_MARK))

    @property
    def line(self) -> int:
        """The number of the line that was read last."""
        return self._line

    def place(self, line: int) -> Place:
        return Place(self.name, line, max(line, self._line))

    def instructions(self) -> Iterator[tuple[int, str]]:
        """Return the instructions, each on one line, with the numbers of their first lines."""
        for raw in self._raw:
            start = self._line
            stripped = raw.rstrip(b"\r\n")
            if self._is_comment(stripped):
                continue
            text, continues = self._without_continuation(self._decoded(stripped).lstrip(SPACES))
            if text.startswith("#") or (not text and not continues):
                continue
            yield start, self._joined(text, start) if continues else text

    def heredoc_lines(self) -> Iterator[str]:
        """Return the lines that follow, with their ends."""
        for raw in self._raw:
            yield self._decoded(raw)

    def _joined(self, text: str, start: int) -> str:
        pieces = [text]
        chars = len(text)
        for raw in self._raw:
            stripped = raw.rstrip(b"\r\n")
            if self._is_comment(stripped):
                continue
            line = self._decoded(stripped)
            if line.lstrip(SPACES).startswith("#"):
                continue
            if not line.strip(SPACES):
                self.warnings.append(
                    f"{self.name}:{self._line}: an empty line in an instruction: Docker may refuse it one day"
                )
                continue
            line, continues = self._without_continuation(line)
            pieces.append(line)
            chars += len(line)
            if chars > MAX_INSTRUCTION_CHARS:
                raise refusal(
                    self.place(start),
                    f"the instruction has more than {MAX_INSTRUCTION_CHARS} characters",
                    "Put what it does into a script of the context, COPY it, and RUN it.",
                )
            if not continues:
                break
        return "".join(pieces)

    def _without_continuation(self, line: str) -> tuple[str, bool]:
        """Return the line without the escape at its end, and whether there was one."""
        text = line.rstrip(" \t")
        if text.endswith(self.escape) and not text.endswith(2 * self.escape):
            return text[:-1], True
        return line, False

    def _is_comment(self, line: bytes) -> bool:
        """Tell comments, which may be in any encoding, from other lines. Directives are comments at the top."""
        text = line.lstrip(b" \t\v\f\r")
        is_comment = text.startswith(b"#")
        if self._reads_directives:
            self._reads_directives = is_comment and self._directive(text[1:].decode(errors="replace"))
        return is_comment

    def _directive(self, comment: str) -> bool:
        """Note what a directive says. Returns whether it was one."""
        key, equals, value = comment.partition("=")
        key, value = key.strip(SPACES).lower(), value.strip(SPACES)
        if not equals or not value or key not in _DIRECTIVES or not _DIRECTIVE_NAME.fullmatch(key):
            return False
        here = self.place(self._line)
        if key in self._directives:
            raise refusal(here, f"there is a second '# {key}=' line", "Keep one of them.")
        self._directives.add(key)
        if key == "syntax":
            self.syntax = value
        elif key == "escape":
            if value not in _ESCAPES:
                raise refusal(
                    here, f"{shown(value)} cannot be the escape character", "Write '# escape=`', or no such line."
                )
            self.escape = value
        return True

    def _decoded(self, line: bytes) -> str:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            reason, hint = f"byte {error.start + 1} of the line is not UTF-8", "Store the file as UTF-8."
            raise refusal(self.place(self._line), reason, hint) from None
        if "\0" in text:
            raise refusal(self.place(self._line), "there is a NUL character", "Remove it.")
        return text

    def _split(self, content: bytes) -> Iterator[bytes]:
        """Return the lines with their ends, and count them."""
        start = 0
        while start < len(content):
            end = content.find(b"\n", start, start + MAX_LINE_BYTES + 1) + 1
            if not end:
                end = len(content)
            self._line += 1
            if end - start > MAX_LINE_BYTES:
                raise refusal(
                    self.place(self._line),
                    f"the line has more than {MAX_LINE_BYTES} bytes",
                    "Continue it on more lines, or put what it contains into a file of the context.",
                )
            if self._line > MAX_LINES:
                raise refusal(
                    self.place(self._line),
                    f"the file has more than {MAX_LINES} lines",
                    "Put what it contains into files of the context, and COPY them.",
                )
            yield content[start:end]
            start = end

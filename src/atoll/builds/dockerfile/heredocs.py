"""Here-documents of RUN, COPY and ADD: finding them in a line, and what a RUN with them carries out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from atoll.builds.dockerfile.instructions import Heredoc, Run
from atoll.builds.dockerfile.variables import SubstitutionError, split_raw

_START = re.compile(r"(?P<descriptor>[0-9]*+)<<(?P<chomp>-?)[\t\n\f\r ]*+(?P<name>[^<]++)")
_LEADING_TABS = re.compile(r"^\t+", re.MULTILINE)
_MAX_DESCRIPTOR = 1 << 16


@dataclass(frozen=True, slots=True)
class Start:
    """The words that announce a here-document, such as `<<EOF`."""

    name: str
    expand: bool
    chomp: bool
    """Tabs at the beginning of lines do not count: it was written `<<-`."""
    file_descriptor: int

    def of(self, content: str) -> Heredoc:
        content = _LEADING_TABS.sub("", content) if self.chomp else content
        return Heredoc(self.name, content, self.expand, self.file_descriptor)

    def ends_at(self, line: str) -> bool:
        line = line.rstrip("\r\n")
        return (line.lstrip("\t") if self.chomp else line) == self.name


def starts(line: str) -> list[Start]:
    """Return the here-documents that an instruction announces."""
    if "<<" not in line:
        return []
    try:
        words = split_raw(line, keep_quotes=True, keep_escapes=True)
    except SubstitutionError:
        return []
    return [start for word in words if (start := start_of(word)) is not None]


def start_of(word: str) -> Start | None:
    """Return the here-document that this word announces, if it is one. Raises SubstitutionError for quotes without
    end."""
    match = _START.fullmatch(word)
    if match is None:
        return None
    names = split_raw(match["name"], keep_quotes=False, keep_escapes=False)
    if len(names) != 1:
        return None
    written = split_raw(match["name"], keep_quotes=True, keep_escapes=False)
    is_quoted = [_quotes(name) for name in written] != [_quotes(names[0])]
    descriptor = int(match["descriptor"][:9] or 0)
    return Start(names[0], not is_quoted, bool(match["chomp"]), min(descriptor, _MAX_DESCRIPTOR))


def _quotes(text: str) -> int:
    return text.count("'") + text.count('"')


def shell_text(run: Run) -> str:
    """Return what a RUN in its shell form gives to the shell: its here-document if it consists of nothing else."""
    text = run.command.words[0]
    if not run.heredocs:
        return text
    if _is_one_heredoc(text):
        return run.heredocs[0].content
    return "\n".join([text, *(f"{each.content}{each.name}" for each in run.heredocs)])


def script(run: Run) -> Heredoc | None:
    """Return the here-document that is a program with a `#!` line of its own. It is run as a file of that name."""
    if not run.heredocs or not run.command.is_shell or not _is_one_heredoc(run.command.words[0]):
        return None
    return run.heredocs[0] if run.heredocs[0].content.startswith("#!") else None


def _is_one_heredoc(text: str) -> bool:
    try:
        return start_of(text) is not None
    except SubstitutionError:
        return False

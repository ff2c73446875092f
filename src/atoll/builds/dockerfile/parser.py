"""From the text of a Dockerfile to its stages and instructions, as BuildKit's parser reads it.

Whatever the text is, reading it takes time and memory in proportion to its length, which is bounded.
"""

from __future__ import annotations

import dataclasses
import re

from atoll.builds.dockerfile import heredocs
from atoll.builds.dockerfile.flags import Flags
from atoll.builds.dockerfile.forms import READERS, Source, is_json
from atoll.builds.dockerfile.instructions import Arg, Dockerfile, Heredoc, Instruction, Place, Stage
from atoll.builds.dockerfile.lines import Lines
from atoll.builds.dockerfile.refusals import USAGE, misuse, nearest, refusal, shown
from atoll.builds.dockerfile.words import SPACES, split_flags, split_keyword, split_plain

MAX_STAGES = 500
MAX_INSTRUCTIONS = 10_000
_WITH_HEREDOCS = ("ADD", "COPY", "RUN")
_MAX_HEREDOCS = 100
_STAGE_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,127}")


def parse(text: bytes, name: str = "Dockerfile") -> Dockerfile:
    """Read a Dockerfile. Raises DockerfileError, whose reason begins with the file and the line."""
    return _Parser(Lines(text, name)).parse()


class _Parser:
    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._arguments: list[Arg] = []
        self._stages: list[Stage] = []
        self._instructions: list[Instruction] = []
        """Those of the last stage."""
        self._count = 0

    def parse(self) -> Dockerfile:
        for line, text in self._lines.instructions():
            self._read(line, text.strip(SPACES))
        self._end_stage()
        if not self._stages:
            raise refusal(
                self._lines.place(max(1, self._lines.line)),
                "there is no FROM",
                "Begin with FROM IMAGE, or FROM scratch.",
            )
        return Dockerfile(
            self._lines.name,
            tuple(self._stages),
            tuple(self._arguments),
            self._lines.escape,
            self._lines.syntax,
            tuple(self._lines.warnings),
        )

    def _read(self, line: int, text: str) -> None:
        place = self._lines.place(line)
        self._count += 1
        if self._count > MAX_INSTRUCTIONS:
            raise refusal(place, f"there are more than {MAX_INSTRUCTIONS} instructions", "Join some of them.")
        keyword, rest = split_keyword(text)
        keyword = self._known(keyword, place)
        flags, rest = split_flags(rest, self._lines.escape)
        rest = rest.strip(SPACES)
        documents: tuple[Heredoc, ...] = ()
        if keyword in _WITH_HEREDOCS and not is_json(rest):
            documents = self._heredocs(text, place)
            place = dataclasses.replace(place, last_line=self._lines.line)
        source = Source(place, text, keyword, Flags(place, keyword, flags), rest, documents, self._lines.escape)
        if keyword == "FROM":
            self._end_stage()
            self._stages.append(_stage(source))
            if len(self._stages) > MAX_STAGES:
                raise refusal(place, f"there are more than {MAX_STAGES} stages", "Build them one by one.")
            return
        self._keep(READERS[keyword](source))

    def _known(self, written: str, place: Place) -> str:
        keyword = written.upper()
        if keyword == "ONBUILD":
            raise refusal(place, "ONBUILD is not supported", f"Write {USAGE['ONBUILD']}.")
        if keyword != "FROM" and keyword not in READERS:
            meant = nearest(keyword, [*READERS, "FROM"])
            hint = f"Did you mean {meant}?" if meant else f"There are FROM, {', '.join(sorted(READERS))}."
            raise refusal(place, f"there is no instruction {shown(written)}", hint)
        return keyword

    def _keep(self, instruction: Instruction) -> None:
        if self._stages:
            self._instructions.append(instruction)
        elif isinstance(instruction, Arg):
            self._arguments.append(instruction)
        else:
            raise refusal(instruction.place, "there is no FROM before this instruction", "Begin with ARG or FROM.")

    def _end_stage(self) -> None:
        if self._stages:
            self._stages[-1] = dataclasses.replace(self._stages[-1], instructions=tuple(self._instructions))
            self._instructions = []

    def _heredocs(self, text: str, place: Place) -> tuple[Heredoc, ...]:
        try:
            starts = heredocs.starts(text)
        except ValueError as error:
            raise refusal(place, f"a here-document: {error}", "Write <<NAME, with a line NAME at its end.") from None
        if len(starts) > _MAX_HEREDOCS:
            raise refusal(place, f"there are {len(starts)} here-documents", f"Use at most {_MAX_HEREDOCS}.")
        documents = []
        for start in starts:
            content = []
            for line in self._lines.heredoc_lines():
                if start.ends_at(line):
                    break
                content.append(line)
            else:
                raise refusal(
                    place,
                    f"the here-document {shown(start.name)} does not end",
                    f"Write a line with {shown(start.name)} and nothing else at its end.",
                )
            documents.append(start.of("".join(content)))
        return tuple(documents)


def _stage(source: Source) -> Stage:
    words = split_plain(source.rest)
    name = ""
    if len(words) == 3 and words[1].lower() == "as":
        name = words[2].lower()
        if not _STAGE_NAME.fullmatch(name):
            raise refusal(
                source.place,
                f"{shown(words[2])} cannot be the name of a stage",
                "Begin with a letter; letters, digits, '_', '-' and '.' may follow.",
            )
    elif len(words) != 1:
        raise misuse(source.place, "FROM", "has one word, or three with AS and a name")
    return Stage(source.place, source.text, words[0], name, source.flags.text("platform"))

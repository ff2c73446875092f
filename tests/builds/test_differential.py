"""Our parser beside BuildKit's own, which PyPI's `dockerfile` contains."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from atoll.builds.dockerfile.instructions import (
    Arg,
    Cmd,
    Command,
    Copy,
    DeclaredVolumes,
    Entrypoint,
    Env,
    Expose,
    Healthcheck,
    Instruction,
    Label,
    Maintainer,
    Run,
    Shell,
    Stage,
    StopSignal,
    User,
    WorkDir,
)
from atoll.builds.dockerfile.parser import parse
from atoll.errors import DockerfileError
from builds.corpus import Case, cases
from needs import not_applicable

dockerfile: Any = importlib.import_module("dockerfile") if importlib.util.find_spec("dockerfile") else None


@pytest.fixture(autouse=True)
def package() -> None:
    if dockerfile is None:
        not_applicable("PyPI has the package for x86-64 only")


Plain = tuple[str, int, int, tuple[str, ...], tuple[str, ...]]
"""Keyword, first and last line, words, and the contents of here-documents."""
_MEANING = re.compile(
    "there is no instruction|there is no FROM|ONBUILD|has no flag|has no value|has no target|has no command|has no name"
    "|has an empty value|has one word|cannot be the name of a stage|not a JSON array|begins with CMD|NONE has nothing"
    "|a duration|is there twice|the mount|--network=|--retries|is not supported|cannot have a here-document|NUL"
    "|only strings|something else in it|--[a-z-]+ is '"
)
"""Refusals that BuildKit has as well, but in a later step than its parser, or that are only ours."""


_KNOWN = re.compile(r"--[^\n]*é|<<-?[ \t]|\][ \t]*[^\s]")
"""What is read differently on purpose. BuildKit takes characters of flags apart into bytes. The version in the package
knows no white space between `<<` and a name, and ignores whatever follows a JSON array; later versions do not."""


def theirs(text: str) -> list[Plain] | None:
    try:
        commands = dockerfile.parse_string(text)
    except dockerfile.GoParseError:
        return None
    return [
        (
            (each.cmd or "").upper(),
            each.start_line,
            each.end_line,
            _words(each),
            tuple(re.sub(r"^\t+", "", document.content, flags=re.MULTILINE) for document in each.heredocs),
        )
        for each in commands
    ]


def _words(command: Any) -> tuple[str, ...]:
    words = tuple(command.value)
    match (command.cmd or "").upper():
        case "EXPOSE":
            return tuple(sorted(words))
        case "FROM" if len(words) == 3:
            return (words[0], words[2].lower())
        case "HEALTHCHECK" if words[0].upper() == "NONE":
            return ()
        case "HEALTHCHECK":
            return words[1:]
        case "COPY" | "ADD":
            # Their here-documents are words, ours are not.
            return tuple(word for word in words if "<<" not in word)
        case "CMD" | "ENTRYPOINT" | "RUN" | "SHELL":
            return words
    return words


def ours(text: str) -> list[Plain]:
    read = parse(text.encode())
    found: list[Plain] = [_plain("ARG", argument) for argument in read.arguments]
    for stage in read.stages:
        found.append(("FROM", stage.place.line, stage.place.last_line, _of_stage(stage), ()))
        found += [_plain(_keyword(instruction), instruction) for instruction in stage.instructions]
    return found


def _keyword(instruction: Instruction) -> str:
    return re.split(r"[\t\v\f\r ]", instruction.text, maxsplit=1)[0].upper()


def _of_stage(stage: Stage) -> tuple[str, ...]:
    return (stage.base, stage.name) if stage.name else (stage.base,)


def _plain(keyword: str, instruction: Instruction) -> Plain:
    contents = tuple(each.content for each in instruction.heredocs) if isinstance(instruction, (Run, Copy)) else ()
    return keyword, instruction.place.line, instruction.place.last_line, _of(instruction), contents


def _of(instruction: Instruction) -> tuple[str, ...]:
    match instruction:
        case Run() | Cmd() | Entrypoint():
            return instruction.command.words
        case Healthcheck(command=Command() as command):
            return command.words
        case Copy():
            return tuple(word for word in (*instruction.sources, instruction.target) if "<<" not in word)
        case Env():
            return tuple(word for pair in instruction.variables for word in pair)
        case Label():
            return tuple(word for pair in instruction.labels for word in pair)
        case Arg():
            return tuple(name if default is None else f"{name}={default}" for name, default in instruction.names)
        case WorkDir():
            return (instruction.path,)
        case User():
            return (instruction.user,)
        case Shell():
            return instruction.words
        case Expose():
            return instruction.ports
        case StopSignal():
            return (instruction.signal,)
        case DeclaredVolumes():
            return instruction.paths
        case Maintainer():
            return (instruction.name,)
    return ()


def compare(text: str) -> None:
    expected = theirs(text)
    try:
        found = ours(text)
    except DockerfileError as error:
        if expected is not None and not _MEANING.search(error.reason):
            pytest.fail(f"BuildKit reads it: {error.reason}")
        return
    assert found == expected


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_dockerfile_of_the_corpus_is_read_as_buildkit_reads_it(case: Case) -> None:
    text = (case.folder / case.file).read_bytes().decode()
    assert ours(text) == theirs(text)


_PIECES = [*"ab=$\\`'\"<-# \t[]{},:1", "\\\n", "<<E", "é"]
_CHARS = st.lists(st.sampled_from(_PIECES), max_size=24).map("".join)
_LINES = st.one_of(
    st.builds("RUN {}".format, _CHARS),
    st.builds("run {}".format, _CHARS),
    st.builds('RUN ["{}", "b"]'.format, _CHARS),
    st.builds("ENV {}".format, _CHARS),
    st.builds("ENV a={} b={}".format, _CHARS, _CHARS),
    st.builds("LABEL k={}".format, _CHARS),
    st.builds("ARG a={}".format, _CHARS),
    st.builds("COPY {} {} /x".format, st.sampled_from(["a", "<<E", '<<"E"', "<<-E", "<<E <<F", "--from=x y"]), _CHARS),
    st.builds("CMD {}".format, _CHARS),
    st.builds("EXPOSE {}".format, st.sampled_from(["1 2", "3", " 4 \t5"])),
    st.builds("WORKDIR {}".format, _CHARS),
    st.builds("HEALTHCHECK --interval=1s CMD {}".format, _CHARS),
    st.builds("RUN --mount=type=cache,target=/x {}".format, _CHARS),
    st.sampled_from(["", "E", "F", "\tE", "# comment", "  # comment", "\\", "FROM a AS b", "  continued \\", " "]),
    _CHARS,
)
_FILES = st.builds(
    lambda start, lines, end: "\n".join([*start, "FROM a", *lines]) + end,
    st.sampled_from([[], ["# escape=`"], ["# escape=\\"], ["# comment", "# escape=`"], ["ARG A=1"], [""]]),
    st.lists(_LINES, max_size=8),
    st.sampled_from(["", "\n", "\\", "\n\n"]),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_FILES)
@example('FROM a\nRUN <<E <<"F" cat\n1\nE\n2\nF\n')
@example("FROM a\nRUN echo \\\n\n# c\n b\\\n")
def test_any_dockerfile_is_read_as_buildkit_reads_it(text: str) -> None:
    assume(not _KNOWN.search(text))
    compare(text)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_FILES)
def test_ten_thousand_dockerfiles_are_read_as_buildkit_reads_them(text: str) -> None:
    assume(not _KNOWN.search(text))
    compare(text)

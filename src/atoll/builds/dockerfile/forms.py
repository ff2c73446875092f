"""How each instruction is written: one function for each, which reads what follows its keyword and flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from atoll.builds.dockerfile import heredocs
from atoll.builds.dockerfile.durations import seconds
from atoll.builds.dockerfile.flags import Flags
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
    Heredoc,
    Instruction,
    Label,
    Maintainer,
    Place,
    Run,
    Shell,
    StopSignal,
    User,
    WorkDir,
)
from atoll.builds.dockerfile.mounts import parse_mount
from atoll.builds.dockerfile.refusals import misuse, refusal, shown
from atoll.builds.dockerfile.variables import SubstitutionError
from atoll.builds.dockerfile.words import SPACES, split_first, split_plain, split_words


@dataclass(frozen=True, slots=True)
class Source:
    """An instruction as it is written, taken apart as far as all of them have the same parts."""

    place: Place
    text: str
    keyword: str
    flags: Flags
    rest: str
    heredocs: tuple[Heredoc, ...]
    escape: str

    def wrong(self, reason: str) -> NoReturn:
        raise misuse(self.place, self.keyword, reason)

    def one(self) -> str:
        """Return the rest, which is one value."""
        if not self.rest:
            self.wrong("has no value")
        return self.rest

    def array(self) -> list[str] | None:
        """Return the strings of the rest if it is a JSON array."""
        try:
            return _array(self.rest)
        except TypeError:
            raise refusal(
                self.place,
                f"the array of {self.keyword} has something else in it than strings",
                'Put each word into double quotes: ["PROGRAM", "ARGUMENT"].',
            ) from None

    def command(self) -> Command:
        array = self.array()
        return Command((self.rest,), is_shell=True) if array is None else Command(tuple(array), is_shell=False)


def is_json(text: str) -> bool:
    """Return whether this is the exec form."""
    try:
        return _array(text) is not None
    except TypeError:
        return True


def _array(text: str) -> list[str] | None:
    """Return the strings of a JSON array, or None if it is no JSON array. Raises TypeError for other values in it."""
    text = text.lstrip(SPACES)
    if not text.startswith("["):
        return None
    try:
        values = json.loads(text, parse_int=float, parse_constant=_no_json)
    except ValueError:
        return None
    except RecursionError:
        raise TypeError("arrays in arrays") from None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("not only strings")
    # Half of a surrogate pair is no character.
    return [value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for value in values]


def _no_json(_constant: str) -> Any:
    raise ValueError("JSON has no such number")


def _run(source: Source) -> Run:
    command = source.command()
    if not any(command.words):
        source.wrong("has no command")
    network = source.flags.text("network") or "default"
    if network not in ("default", "none"):
        hint = "Write --network=none, or nothing; what RUN may reach is the policy of the build."
        raise refusal(source.place, f"--network={shown(network)} is not supported", hint)
    return Run(
        source.place,
        source.text,
        command,
        source.heredocs,
        tuple(parse_mount(mount, source.place) for mount in source.flags.texts("mount")),
        cast(Literal["default", "none"], network),
    )


def _copy(source: Source) -> Copy:
    words = source.array()
    if words is None:
        words = split_plain(source.rest)
    if len(words) < 2:
        source.wrong("has no target")
    *written, target = words
    if _heredoc(target):
        source.wrong("cannot have a here-document as its target")
    by_name = {document.name: document for document in source.heredocs}
    sources: list[str] = []
    documents: list[Heredoc] = []
    for word in written:
        start = _heredoc(word) if source.heredocs else None
        if start is None:
            sources.append(word)
        elif start.name in by_name:
            documents.append(by_name[start.name])
    return Copy(
        source.place,
        source.text,
        tuple(sources),
        target,
        tuple(documents),
        is_add=source.keyword == "ADD",
        source_stage=source.flags.text("from"),
        owner=source.flags.text("chown"),
        mode=source.flags.text("chmod"),
        exclude=source.flags.texts("exclude"),
        link=source.flags.is_on("link"),
        parents=source.flags.is_on("parents"),
        checksum=source.flags.text("checksum"),
        keep_git_dir=source.flags.is_on("keep-git-dir"),
    )


def _heredoc(word: str) -> heredocs.Start | None:
    try:
        return heredocs.start_of(word)
    except SubstitutionError:
        return None


def _pairs(source: Source) -> tuple[tuple[str, str], ...]:
    """Read `NAME=VALUE…`, or one name and a value of several words."""
    words = split_words(source.rest, source.escape)
    if not words:
        source.wrong("has no name")
    if "=" not in words[0]:
        name, value = split_first(source.rest)
        if value is None:
            source.wrong(f"has no value for {shown(name)}")
        return ((name, value),)
    pairs = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            source.wrong(f"has a word without '=': {shown(word)}")
        if not name:
            source.wrong(f"has no name before {shown(word)}")
        pairs.append((name, value))
    return tuple(pairs)


def _arg(source: Source) -> Arg:
    words = split_words(source.rest, source.escape)
    if not words:
        source.wrong("has no name")
    names: list[tuple[str, str | None]] = []
    for word in words:
        name, equals, default = word.partition("=")
        if not name:
            source.wrong(f"has no name before {shown(word)}")
        names.append((name, default if equals else None))
    return Arg(source.place, source.text, tuple(names))


def _list(source: Source) -> tuple[str, ...]:
    words = source.array()
    if words is None:
        words = split_plain(source.rest)
    if not words:
        source.wrong("has no value")
    if not all(word.strip(SPACES) for word in words):
        source.wrong("has an empty value")
    return tuple(words)


def _shell(source: Source) -> Shell:
    words = source.array()
    if not words:
        source.wrong("is not a JSON array with a program in it")
    return Shell(source.place, source.text, tuple(words))


def _healthcheck(source: Source) -> Healthcheck:
    kind, rest = split_first(source.rest)
    options = source.flags.all()
    for name, value in options.items():
        if name != "retries" and seconds(value) is None:
            raise refusal(
                source.place, f"--{name} is {shown(value)}", f"Write a duration: --{name}=30s, 500ms or 1m30s."
            )
        if name == "retries" and not (value.isascii() and value.isdecimal() and len(value) < 10):
            raise refusal(source.place, f"--retries is {shown(value)}", "Write a number: --retries=3.")
    if kind.upper() == "NONE":
        if rest:
            source.wrong("NONE has nothing after it")
        return Healthcheck(source.place, source.text, None, options)
    if kind.upper() != "CMD":
        source.wrong("begins with CMD or NONE")
    command = Source(
        source.place, source.text, source.keyword, source.flags, (rest or "").strip(SPACES), (), source.escape
    ).command()
    if not any(command.words):
        source.wrong("has no command")
    return Healthcheck(source.place, source.text, command, options)


def _with_command(kind: type[Cmd] | type[Entrypoint]) -> Callable[[Source], Instruction]:
    def read(source: Source) -> Instruction:
        source.one()
        return kind(source.place, source.text, source.command())

    return read


READERS: Mapping[str, Callable[[Source], Instruction]] = {
    "ADD": _copy,
    "ARG": _arg,
    "CMD": _with_command(Cmd),
    "COPY": _copy,
    "ENTRYPOINT": _with_command(Entrypoint),
    "ENV": lambda source: Env(source.place, source.text, _pairs(source)),
    "EXPOSE": lambda source: Expose(source.place, source.text, tuple(sorted(split_plain(source.one())))),
    "HEALTHCHECK": _healthcheck,
    "LABEL": lambda source: Label(source.place, source.text, _pairs(source)),
    "MAINTAINER": lambda source: Maintainer(source.place, source.text, source.one()),
    "RUN": _run,
    "SHELL": _shell,
    "STOPSIGNAL": lambda source: StopSignal(source.place, source.text, source.one()),
    "USER": lambda source: User(source.place, source.text, source.one()),
    "VOLUME": lambda source: DeclaredVolumes(source.place, source.text, _list(source)),
    "WORKDIR": lambda source: WorkDir(source.place, source.text, source.one()),
}

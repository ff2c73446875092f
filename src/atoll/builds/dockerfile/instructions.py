"""What a Dockerfile consists of, as plain data.

Variables are not substituted yet in texts of type `Word`: their values are known only while the instructions are
carried out, one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Word = str
"""A text in which `$NAME` and `${NAME...}` still stand for variables, and quotes and escapes are still there."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an instruction stands."""

    file: str
    line: int
    """The number of its first line, from 1 on."""
    last_line: int = 0


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A here-document of an instruction."""

    name: str
    content: str
    expand: bool
    """Whether variables in it are substituted: its name was not quoted."""
    file_descriptor: int = 0


@dataclass(frozen=True, slots=True)
class Instruction:
    place: Place
    text: str
    """The instruction as it was written, with continuation lines joined and without comments."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, in one of its two forms."""

    words: tuple[str, ...]
    """The exec form: a program and its arguments, which is a JSON array in the file. In the shell form, one text."""
    is_shell: bool


@dataclass(frozen=True, slots=True)
class Mount:
    """A `--mount` of RUN."""

    type: Literal["bind", "cache", "secret", "tmpfs"]
    target: Word = ""
    source: Word = ""
    source_stage: Word = ""
    """The `from` of the mount: a stage or an image. Empty: the context, or an empty cache."""
    id: Word = ""
    writable: bool = False
    sharing: Literal["shared", "private", "locked"] = "shared"
    required: bool = False
    mode: int | None = None
    uid: int = 0
    gid: int = 0
    size_bytes: int | None = None
    env: str = ""
    """The variable that a secret is given in, in place of or beside a file."""


@dataclass(frozen=True, slots=True)
class Run(Instruction):
    command: Command
    heredocs: tuple[Heredoc, ...] = ()
    mounts: tuple[Mount, ...] = ()
    network: Literal["default", "none"] = "default"


@dataclass(frozen=True, slots=True)
class Copy(Instruction):
    """COPY, or ADD if `is_add`."""

    sources: tuple[Word, ...]
    """Without those that are here-documents."""
    target: Word
    heredocs: tuple[Heredoc, ...] = ()
    """Each is a file of that name below the target, or the target itself."""
    is_add: bool = False
    source_stage: Word = ""
    """The `--from`: a stage by name or number, or an image. Empty: the context."""
    owner: Word = ""
    """The `--chown`: USER, UID, USER:GROUP or UID:GID."""
    mode: Word = ""
    """The `--chmod`, in octal digits."""
    exclude: tuple[Word, ...] = ()
    link: bool = False
    parents: bool = False
    checksum: Word = ""
    keep_git_dir: bool = False


@dataclass(frozen=True, slots=True)
class Env(Instruction):
    variables: tuple[tuple[str, Word], ...]


@dataclass(frozen=True, slots=True)
class Arg(Instruction):
    names: tuple[tuple[str, Word | None], ...]
    """Names and defaults."""


@dataclass(frozen=True, slots=True)
class Label(Instruction):
    labels: tuple[tuple[Word, Word], ...]


@dataclass(frozen=True, slots=True)
class WorkDir(Instruction):
    path: Word


@dataclass(frozen=True, slots=True)
class User(Instruction):
    user: Word


@dataclass(frozen=True, slots=True)
class Shell(Instruction):
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cmd(Instruction):
    command: Command


@dataclass(frozen=True, slots=True)
class Entrypoint(Instruction):
    command: Command


@dataclass(frozen=True, slots=True)
class Expose(Instruction):
    ports: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Healthcheck(Instruction):
    command: Command | None
    """None: `HEALTHCHECK NONE`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """`interval`, `timeout`, `start-period`, `start-interval`, `retries`, as written."""


@dataclass(frozen=True, slots=True)
class StopSignal(Instruction):
    signal: Word


@dataclass(frozen=True, slots=True)
class DeclaredVolumes(Instruction):
    """VOLUME, which is only noted."""

    paths: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Maintainer(Instruction):
    name: str


@dataclass(frozen=True, slots=True)
class Stage:
    """What FROM begins."""

    place: Place
    text: str
    base: Word
    name: str = ""
    """The name given by AS, in lower case."""
    platform: Word = ""
    instructions: tuple[Instruction, ...] = ()


@dataclass(frozen=True, slots=True)
class Dockerfile:
    name: str
    """The name of the file, for messages."""
    stages: tuple[Stage, ...]
    arguments: tuple[Arg, ...] = ()
    """The ARGs before the first FROM."""
    escape: str = "\\"
    syntax: str = ""
    """What a `# syntax=` line says. Nothing is fetched for it."""
    warnings: tuple[str, ...] = ()

"""What runs in a sandbox from its creation on, and what has to hold before anybody gets it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_COMMAND = 131_072
MAX_START = 16
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_PORT_AND_PATH = re.compile(r"([1-9][0-9]{0,4})(/[\x21-\x7e]*)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ENV_NAME = re.compile(r"[^=\0\s]+")
Argument = Annotated[str, Field(max_length=MAX_COMMAND)]
Port = Annotated[int, Field(ge=1, le=65535)]


def _command(value: object) -> object:
    """Accept a command line, or a program and its arguments."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not words or not all(isinstance(word, str) for word in words):
        raise ValueError(f"a command is a command line or a list of arguments, not {str(value)[:80]!r}")
    if not words[0].strip() or any("\0" in word for word in words):
        raise ValueError(f"{str(value)[:80]!r} is not a command")
    return value if isinstance(value, str) else tuple(words)


CommandText = Annotated[
    Argument | Annotated[tuple[Argument, ...], Field(max_length=1024)],
    BeforeValidator(_command),
]


class StartCommand(BaseModel):
    """A command that runs from the creation of a sandbox on. The agent inside starts it again when it ends."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Annotated[str, Field(max_length=63)] = ""
    """The id of the command. Without one it is called `start-1`, `start-2` and so on."""
    command: CommandText
    """A command line, or a program and its arguments."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """The user inside who runs it."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of this command alone."""
    work_dir: Annotated[str, Field(max_length=4095)] | None = None
    """The directory where it starts."""
    restart: Literal["always", "on-failure", "never"] = "always"
    """When it is started again: whenever it ends, only after a failure, or never."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"command": value} if isinstance(value, str | list | tuple) else value

    @model_validator(mode="after")
    def _checked(self) -> StartCommand:
        if self.name and not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a name: use up to 63 letters, digits, '.', '_' and '-'")
        for name, text in self.env.items():
            if not _ENV_NAME.fullmatch(name) or "\0" in text or len(text) > MAX_COMMAND:
                raise ValueError(f"environment variable {name[:80]!r} has an invalid name or value")
        if any("\0" in text for text in (self.user or "", self.work_dir or "")):
            raise ValueError("a zero byte is part of no user and no directory")
        return self

    @classmethod
    def once(cls, name: str, command: str | Sequence[str], **options: Any) -> StartCommand:
        """Return a command that is not started again."""
        return cls.model_validate({"name": name, "command": command, "restart": "never", **options})

    @property
    def line(self) -> str | list[str]:
        return self.command if isinstance(self.command, str) else list(self.command)


def _named(commands: tuple[StartCommand, ...]) -> tuple[StartCommand, ...]:
    named = tuple(
        each if each.name else each.model_copy(update={"name": f"start-{number}"})
        for number, each in enumerate(commands, 1)
    )
    names = [each.name for each in named]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two start commands are called {sorted(doubled)[0]!r}")
    return named


def _list(value: object) -> object:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, list | tuple):
        raise ValueError(f"a list of commands, such as ['python3 -m http.server'], not {str(value)[:80]!r}")
    return value


StartCommands = Annotated[
    tuple[StartCommand, ...],
    BeforeValidator(_list),
    Field(max_length=MAX_START),
    AfterValidator(_named),
]


class ReadyCheck(BaseModel):
    """What has to hold before a new sandbox is handed out: a command succeeds, a port listens, or a path answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    command: CommandText | None = None
    """A command that has to succeed. It is repeated until it does."""
    port: Port | None = None
    """A TCP port inside that has to accept connections."""
    path: Annotated[str, Field(pattern=r"^/[\x21-\x7e]{0,399}$")] | None = None
    """A path that has to answer an HTTP request to this port with a status of 2xx."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """How many seconds that may take."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        """Accept `8080`, `8080/health` and a command line as well, and `timeout` as a name."""
        if isinstance(value, bool):
            raise ValueError("give a port, a port and a path such as '8080/health', or a command")
        if isinstance(value, int):
            return {"port": value}
        if isinstance(value, str):
            found = _PORT_AND_PATH.fullmatch(value)
            if found:
                return {"port": int(found[1]), "path": found[2]}
            return {"port": int(value)} if _PORT.fullmatch(value) else {"command": value}
        if isinstance(value, list | tuple):
            return {"command": value}
        if isinstance(value, Mapping) and "timeout" in value and "timeout_s" not in value:
            return {"timeout_s" if name == "timeout" else name: each for name, each in value.items()}
        return value

    @model_validator(mode="after")
    def _one(self) -> ReadyCheck:
        if (self.command is None) == (self.port is None):
            raise ValueError("give either a command or a port")
        if self.path is not None and self.port is None:
            raise ValueError("a path needs a port")
        return self

    @property
    def line(self) -> str | list[str]:
        return self.command if isinstance(self.command, str) else list(self.command or ())

    def __str__(self) -> str:
        if self.port is None:
            text = self.command if isinstance(self.command, str) else " ".join(self.command or ())
            return f"the command {text[:80]!r}"
        return f"port {self.port}" if self.path is None else f"{self.path} on port {self.port}"

"""Which variables an instruction sees: of ENV and ARG the later one wins. The ARGs before the first FROM count only in
FROM, unless they are declared again; those of a stage also count in stages that begin with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from atoll.builds.dockerfile.instructions import Arg, Env
from atoll.builds.dockerfile.variables import expand

PROXY_ARGS = frozenset(
    name
    for each in ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
    for name in (each, each.upper())
)
"""What may be given without being declared. RUN steps get them, and the keys of steps do not contain them."""


@dataclass(slots=True)
class Scope:
    """The variables of a stage, as its instructions change them."""

    env: dict[str, str]
    given: Mapping[str, str]
    """The build arguments of the request."""
    outer: Mapping[str, str]
    """The values of the ARGs before the first FROM."""
    escape: str = "\\"
    known: dict[str, str] = field(default_factory=dict)
    """The variables of the stage that this one begins with; then those of both."""

    def __post_init__(self) -> None:
        self.known = {**self.known, **self.env}

    def expand(self, word: str) -> str:
        return expand(word, self.known, self.escape)

    def variables(self) -> dict[str, str]:
        return dict(self.known)

    def declare(self, arg: Arg) -> None:
        before = self.variables()
        for name, default in arg.names:
            if name in self.given:
                self.known[name] = self.given[name]
            elif default is not None:
                self.known[name] = expand(default, before, self.escape)
            elif name in self.outer:
                self.known[name] = self.outer[name]

    def set(self, env: Env) -> None:
        before = self.variables()
        values = {
            expand(name, before, self.escape): expand(value, before, self.escape) for name, value in env.variables
        }
        self.env |= values
        self.known |= values

    def of_commands(self, default_path: str) -> dict[str, str]:
        """Return the environment of RUN steps."""
        return {"PATH": default_path, **self.variables()}

    def proxies(self) -> dict[str, str]:
        """Return the proxies that were given, which are not part of a step's key."""
        return {name: value for name, value in self.given.items() if name in PROXY_ARGS and name not in self.env}


Expand = Callable[[str], str]

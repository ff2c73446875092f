"""The network log of each sandbox: what was refused, when, to which destination and name, and by which rule.

A sandbox decides how often it is refused, so the rate of entries is limited, and so is the size of the file.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.printable import printable
from atoll.token_bucket import TokenBucket

_MAX_FILE = 256 * 1024
_BURST, _RATE = 200.0, 20.0
_MAX_NAME = 300


@dataclass(frozen=True, slots=True)
class Refusal:
    """One connection, datagram or DNS question that was refused. Identical ones right after it are not recorded."""

    time: float
    protocol: str
    """`tcp`, `udp`, `web` or `dns`."""
    destination: str
    """The address and port. Empty for a DNS question."""
    name: str
    """The host name, if one was given."""
    rule: str
    """The rule that refused it, as text for people."""
    dropped: int = 0
    """How many refusals before this one were not recorded because they came too fast."""
    process: str = ""
    """The process in the sandbox, as `name[pid]`. Empty if it is not known."""

    def __str__(self) -> str:
        """Return the refusal as one line for people."""
        where = " at ".join(part for part in (self.name, self.destination) if part)
        by = f" for {self.process}" if self.process else ""
        return f"{self.protocol} to {where or 'nowhere'} was refused{by}: {self.rule}"


class RefusedError(Exception):
    """A connection or request is refused. The text is the rule that refused it."""

    def __init__(self, rule: str, name: str = "", protocol: str = "tcp") -> None:
        super().__init__(rule)
        self.rule, self.name, self.protocol = rule, name, protocol
        self.said = b""
        """The bytes to answer with, if the protocol of the connection is known."""


class RefusalLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._bucket = TokenBucket(_RATE, _BURST)
        self._dropped = 0
        self._last: tuple[float, tuple[str, ...]] | None = None

    def add(self, protocol: str, destination: str, name: str, rule: str, process: str = "") -> None:
        now = time.monotonic()
        what = (protocol, destination, name, rule)
        if self._last is not None and self._last[1] == what and now - self._last[0] < 1:
            return  # programs often retry at once
        self._last = (now, what)
        if not self._bucket.take():
            self._dropped += 1
            return
        shown = printable(name, _MAX_NAME, instead="?")
        entry = Refusal(time.time(), protocol, destination, shown, rule, self._dropped, process)
        self._dropped = 0
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, json.dumps(asdict(entry), separators=(",", ":")).encode() + b"\n")
            full = os.fstat(fd).st_size > _MAX_FILE
        finally:
            os.close(fd)
        if full:
            self._path.replace(f"{self._path}.old")


def read_refusals(path: Path) -> list[Refusal]:
    """Return the refusals in a log, oldest first."""
    found = []
    for part in (Path(f"{path}.old"), path):
        try:
            lines = part.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            try:
                found.append(Refusal(**json.loads(line)))
            except (ValueError, TypeError):  # cut short by a crash
                continue
    return found


def forget_refusals(path: Path) -> None:
    for part in (path, Path(f"{path}.old")):
        part.unlink(missing_ok=True)

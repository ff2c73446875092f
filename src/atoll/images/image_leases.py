"""Who uses an image: a file for each user, with the digest in it, which prevents the removal of the image.

Users are sandboxes, by their ids, and saved states. The store does not know which of them exist, so whoever makes them
must release their leases.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from atoll import durable
from atoll.errors import SpecError

_SANDBOX_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z")


@dataclass(frozen=True, slots=True)
class ImageLeases:
    directory: Path

    def take(self, user: str, digest: str, *, sync: bool) -> None:
        durable.write(self._path(user), digest, sync=sync)

    def of(self, user: str) -> str:
        """Return the digest that a user leases, or "" if there is no lease."""
        try:
            return self._path(user).read_text().strip()
        except FileNotFoundError:
            return ""

    def release(self, user: str) -> None:
        self._path(user).unlink(missing_ok=True)

    def all(self) -> dict[str, str]:
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for path in self.directory.iterdir():
                if not path.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):
                        found[path.name] = path.read_text().strip()
        return found

    def _path(self, user: str) -> Path:
        if not _SANDBOX_ID.match(user):
            raise SpecError(f"{user[:80]!r} is not the id of a sandbox")
        return self.directory / user

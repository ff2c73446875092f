"""Where a path inside leads to, through links: also where the place that a link names does not exist yet.

The agent resolves links itself, but it makes no directory at the end of one that leads nowhere, and it replaces a link
in the place of a file. A build writes to what the link names in both cases.
"""

from __future__ import annotations

import posixpath

from atoll.errors import BuildError
from atoll.guest.files import Files

_MOST_LINKS = 40


async def resolved(files: Files, path: str) -> str:
    """Return the path without links. What comes out may have changed when it is used, which is the affair of the
    sandbox: every path is resolved inside."""
    done = "/"
    parts = path.strip("/").split("/")[::-1]
    links = 0
    exists = True
    while parts:
        part = parts.pop()
        if part in ("", "."):
            continue
        if part == "..":
            done = posixpath.dirname(done)
            continue
        here = posixpath.join(done, part)
        target = await _target(files, here) if exists else None
        if target is None or not target:
            done, exists = here, exists and target is not None
            continue
        links += 1
        if links > _MOST_LINKS:
            raise BuildError(f"{path[:200]!r} leads through too many links")
        done = "/" if target.startswith("/") else done
        parts += target.strip("/").split("/")[::-1]
    return done


async def _target(files: Files, path: str) -> str | None:
    """Return what a link names; "" for anything else, and None for what does not exist."""
    try:
        return (await files.stat(path, follow=False)).target or ""
    except OSError:
        return None

"""Changes what two sandboxes with a common past must not share: machine id, random seed and SSH host keys.

The kernel's random numbers and clock need no such care.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from atoll.archive.overlay import is_opaque, is_whiteout
from atoll.archive.root import Root

_SEEDS = ("var/lib/systemd/random-seed", "var/lib/urandom/random-seed")
_MACHINE_IDS = ("etc/machine-id", "var/lib/dbus/machine-id")
_KEYS = "etc/ssh"


def freshen(root: Path, below: Sequence[Path], sandbox_id: str, *, own: bool) -> None:
    """Change the identity in a writable layer that came from a saved state, whether the files are in the layer or in
    the image's roots `below`, topmost first. All are hostile, so no link is followed out of them.

    The machine id is derived from the sandbox id, so a rollback does not change it. Host keys and seeds are removed,
    and can be made again inside (`ssh-keygen -A`). With `own`, the state is one of the same sandbox, which keeps its
    identity; only the seed is removed, because it must not be used twice.
    """
    if not root.is_dir():
        root.mkdir(mode=0o755)
    machine_id = hashlib.sha256(f"machine-id of {sandbox_id}".encode()).hexdigest()[:32]
    with contextlib.ExitStack() as opened:
        both = _Both(opened.enter_context(Root(root)), [opened.enter_context(Root(each)) for each in below])
        for path in _SEEDS:
            both.hide(path)
        if own:
            return
        for path in _MACHINE_IDS:
            both.write(path, f"{machine_id}\n".encode())
        for path in both.host_keys():
            both.hide(path)


class _Both:
    """A layer over the root of an image, as a sandbox sees them. Only regular files in real directories count."""

    def __init__(self, layer: Root, lowers: Sequence[Root]) -> None:
        self._layer, self._lowers = layer, lowers

    def write(self, path: str, data: bytes) -> None:
        """Replace a file, if it exists."""
        if self._is_file(self._layer, path) or self._shines_through(path):
            self._make_parents(path)
            self._layer.write(path, data, 0o444)

    def hide(self, path: str) -> None:
        if self._is_file(self._layer, path):
            self._layer.remove(_parts(path))
        if self._shines_through(path):
            self._make_parents(path)
            parts = _parts(path)
            os.mknod(parts[-1], stat.S_IFCHR, 0, dir_fd=self._layer.directory(parts[:-1]))

    def host_keys(self) -> list[str]:
        names: set[str] = set()
        for root in (self._layer, *self._lowers):
            with contextlib.suppress(OSError):
                names |= set(os.listdir(root.directory(_parts(_KEYS))))
        return [f"{_KEYS}/{name}" for name in sorted(names) if name.startswith("ssh_host_") and "key" in name]

    def _shines_through(self, path: str) -> bool:
        """Return whether the sandbox sees the file of the image, because nothing in the layer hides it."""
        parts = _parts(path)
        for end in range(1, len(parts)):
            info = self._layer.lstat(parts[:end])
            if info is not None and (not stat.S_ISDIR(info.st_mode) or _hides(self._layer, parts[:end])):
                return False
        below = self._below(parts)
        return self._layer.lstat(parts) is None and below is not None and stat.S_ISREG(below.st_mode)

    def _below(self, parts: tuple[bytes, ...]) -> os.stat_result | None:
        """Return the status of what the image has at this path, in real directories only."""
        for lower in self._lowers:
            for end in range(1, len(parts)):
                info = lower.lstat(parts[:end])
                if info is None:
                    break
                if not stat.S_ISDIR(info.st_mode):
                    return None  # it hides everything below
            else:
                if (info := lower.lstat(parts)) is not None:
                    return None if is_whiteout(info) else info
            if any(_hides(lower, parts[:end]) for end in range(1, len(parts))):
                return None
        return None

    def _make_parents(self, path: str) -> None:
        parts = _parts(path)
        for end in range(1, len(parts)):
            if self._layer.lstat(parts[:end]) is None:
                like = self._below(parts[:end])
                assert like is not None
                parent = self._layer.directory(parts[: end - 1])
                os.mkdir(parts[end - 1], 0o700, dir_fd=parent)
                os.chown(parts[end - 1], like.st_uid, like.st_gid, dir_fd=parent, follow_symlinks=False)
                os.chmod(parts[end - 1], stat.S_IMODE(like.st_mode), dir_fd=parent)

    @staticmethod
    def _is_file(root: Root, path: str) -> bool:
        parts = _parts(path)
        try:
            found = [root.lstat(parts[:end]) for end in range(1, len(parts) + 1)]
        except OSError:
            return False
        *parents, last = found
        return (
            all(info is not None and stat.S_ISDIR(info.st_mode) for info in parents)
            and last is not None
            and stat.S_ISREG(last.st_mode)
        )


def _hides(root: Root, parts: tuple[bytes, ...]) -> bool:
    """Return whether this is a directory that hides the ones of its name further below."""
    try:
        return is_opaque(root.directory(parts[:-1]), parts[-1])
    except OSError:
        return False


def _parts(path: str) -> tuple[bytes, ...]:
    return tuple(os.fsencode(part) for part in path.split("/"))

"""What must not be the same in two sandboxes that have a common past: machine id, random seed, keys of a host."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from atoll.images.root import Root

_SEEDS = ("var/lib/systemd/random-seed", "var/lib/urandom/random-seed")
_MACHINE_IDS = ("etc/machine-id", "var/lib/dbus/machine-id")
_KEYS = "etc/ssh"


def freshen(root: Path, sandbox_id: str) -> None:
    """Change it in a writable layer that came from a saved state. The layer is hostile: nothing leads out of it.

    A machine id is derived from the sandbox's own, so going back leaves it as it was. Host keys and seeds are removed;
    whoever needs them makes new ones (`ssh-keygen -A`).
    """
    if not root.is_dir():
        return
    machine_id = hashlib.sha256(f"machine-id of {sandbox_id}".encode()).hexdigest()[:32]
    with Root(root) as layer:
        for path in _MACHINE_IDS:
            if _is_file(layer, path):
                layer.write(path, f"{machine_id}\n".encode(), 0o444)
        for path in (*_SEEDS, *_host_keys(layer)):
            if _is_file(layer, path):
                layer.remove(_parts(path))


def _host_keys(layer: Root) -> list[str]:
    with contextlib.suppress(OSError):
        names = os.listdir(layer.directory(_parts(_KEYS)))
        return [f"{_KEYS}/{name}" for name in names if name.startswith("ssh_host_") and "key" in name]
    return []


def _is_file(layer: Root, path: str) -> bool:
    try:
        info = layer.lstat(_parts(path))
    except OSError:
        return False
    return info is not None and stat.S_ISREG(info.st_mode)


def _parts(path: str) -> tuple[bytes, ...]:
    return tuple(os.fsencode(part) for part in path.split("/"))

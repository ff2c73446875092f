"""A new identity for a container that is made from a saved state: machine id, random seed, SSH host keys.

The Docker API copies the files into the container before it runs. The API cannot remove files, so those that must not
be used again are emptied.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import PurePosixPath

from atoll.engines.docker.api.http import SLOW_S, Http, RefusedError

_MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_SEEDS = ("/var/lib/systemd/random-seed", "/var/lib/urandom/random-seed")
_KEYS = tuple(
    f"/etc/ssh/ssh_host_{kind}_key{end}" for kind in ("rsa", "dsa", "ecdsa", "ed25519") for end in ("", ".pub")
)


async def freshen(http: Http, container: str, sandbox_id: str) -> None:
    machine_id = hashlib.sha256(f"machine-id of {sandbox_id}".encode()).hexdigest()[:32]
    for path in _MACHINE_IDS:
        await _write(http, container, path, f"{machine_id}\n".encode(), 0o444)
    for path in (*_SEEDS, *_KEYS):
        await _write(http, container, path, b"", 0o600)


async def _write(http: Http, container: str, path: str, content: bytes, mode: int) -> None:
    """Replace the content of the file, if the container has it."""
    try:
        await http.call("HEAD", f"/containers/{container}/archive", query={"path": path})
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            entry = tarfile.TarInfo(PurePosixPath(path).name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
        query = {"path": str(PurePosixPath(path).parent)}
        await http.call("PUT", f"/containers/{container}/archive", query=query, tar=buffer.getvalue(), timeout_s=SLOW_S)
    except RefusedError as error:
        if error.status != 404:
            raise

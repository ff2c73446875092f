"""The directories of an installation, and the limits of its sandboxes.

The data directory holds everything that must survive a restart, such as records and the sandboxes' files. The run
directory holds sockets. Both belong to one installation; another one on the same machine uses other directories.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from atoll import durable
from atoll.errors import EngineUnavailableError, SpecError
from atoll.model import parse_size
from atoll.resources import Resources

_MAX_SOCKET_PATH = 99
"""The maximum length of a socket path without its suffix. The kernel allows 107 bytes in total."""


_DOCKER_IMAGE = "python:3.12-slim"
_BLOB_CACHE_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    data_dir: Path
    run_dir: Path
    resources: Resources = field(default_factory=Resources.of_machine)
    docker_image: str = _DOCKER_IMAGE
    """The default image of engine `docker`, which has no image `host`."""
    registry_mirrors: tuple[str, ...] = ()
    """Mirrors that are asked before a registry."""
    blob_cache_bytes: int = _BLOB_CACHE_BYTES
    """How much the layers may take that are kept for later pulls."""
    step_cache_bytes: int = 20 << 30
    """How much the steps of builds may take that are kept for later builds, and never more than a quarter of the disk.
    """

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, uid: int | None = None) -> Settings:
        """Read the settings from environment variables.

        `ATOLL_DATA_DIR`, `ATOLL_RUN_DIR`, `ATOLL_DOCKER_IMAGE`, `ATOLL_STEP_CACHE`, `ATOLL_REGISTRY_MIRRORS` (with
        commas, or as JSON) and `ATOLL_BLOB_CACHE` override the defaults for this user.
        `ATOLL_SANDBOX_…`, `ATOLL_USER_…` and `ATOLL_TOTAL_…` override the limits and ceilings for this machine.
        """
        environ = os.environ if environ is None else environ
        uid = os.geteuid() if uid is None else uid
        data, run = _customary(environ, uid)
        data = _absolute(environ, "ATOLL_DATA_DIR") or data
        return cls(
            data_dir=data,
            run_dir=_absolute(environ, "ATOLL_RUN_DIR") or run,
            resources=Resources.load(environ, data),
            docker_image=environ.get("ATOLL_DOCKER_IMAGE") or _DOCKER_IMAGE,
            registry_mirrors=_texts(environ, "ATOLL_REGISTRY_MIRRORS"),
            blob_cache_bytes=_size(environ, "ATOLL_BLOB_CACHE", _BLOB_CACHE_BYTES),
            step_cache_bytes=_size(environ, "ATOLL_STEP_CACHE", 20 << 30),
        )

    def engine_data_dir(self, engine: str) -> Path:
        """Return the engine's part of the data directory, created if missing.

        As root, others can traverse it but not list it: sandboxes run with other user ids and must reach their files.
        """
        mode = 0o711 if os.geteuid() == 0 else 0o700
        owned_directory(self.data_dir, mode)
        return owned_directory(self.data_dir / engine, mode)

    def socket_path(self, engine: str, sandbox_id: str) -> Path:
        path = self.run_dir / engine / sandbox_id
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise EngineUnavailableError(
                f"the socket path '{path}' is longer than {_MAX_SOCKET_PATH} bytes",
                hint="Set ATOLL_RUN_DIR to a shorter directory.",
            )
        return path

    def engine_run_dir(self, engine: str) -> Path:
        """Return the engine's part of the run directory, created if missing. Other users cannot access it."""
        owned_directory(self.run_dir, 0o700)
        return owned_directory(self.run_dir / engine, 0o700)

    def installation_id(self) -> str:
        """Return the random id of this installation, chosen once. Engines mark their resources with it."""
        path = owned_directory(self.data_dir, 0o711 if os.geteuid() == 0 else 0o700) / "installation-id"
        if not path.exists():
            durable.create(path, uuid4().hex, 0o644)
        return path.read_text()


def owned_directory(path: Path, mode: int) -> Path:
    """Create a directory, or check that an existing one belongs to this user and that others cannot write to it."""
    try:
        path.mkdir(mode=mode, parents=True)
        path.chmod(mode)  # restores the bits that the umask cleared
        return path
    except FileExistsError:
        pass
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise _unusable(path, "it is not a directory")
    if found.st_uid != os.geteuid():
        raise _unusable(path, f"it belongs to user {found.st_uid}")
    if found.st_mode & 0o022:
        raise _unusable(path, "others can write to it")
    return path


def _unusable(path: Path, reason: str) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"'{path}' cannot be used: {reason}",
        hint="Set ATOLL_DATA_DIR and ATOLL_RUN_DIR to directories of your own.",
    )


def _customary(environ: Mapping[str, str], uid: int) -> tuple[Path, Path]:
    if uid == 0:
        return Path("/var/lib/atoll"), Path("/run/atoll")
    data_home = _absolute(environ, "XDG_DATA_HOME") or Path(environ.get("HOME") or Path.home(), ".local/share")
    runtime = _absolute(environ, "XDG_RUNTIME_DIR")
    return data_home / "atoll", runtime / "atoll" if runtime else Path(f"/tmp/atoll-{uid}")  # noqa: S108


def _size(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    value = environ.get(name)
    if not value:
        return otherwise
    try:
        return parse_size(value)
    except ValueError as error:
        raise EngineUnavailableError(f"{name}: {error}") from error


def _absolute(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(name)
    if not value:
        return None
    # The XDG specification requires that relative paths are ignored. In Atoll's own variables they are an error.
    if not value.startswith("/"):
        if name.startswith("XDG_"):
            return None
        raise EngineUnavailableError(f"{name} is '{value}'", hint="Make it an absolute path.")
    return Path(os.path.normpath(value))


def _texts(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return a list, written with commas or as JSON."""
    value = environ.get(name, "").strip()
    if not value.startswith("["):
        return tuple(text.strip() for text in value.split(",") if text.strip())
    try:
        found = json.loads(value)
        if not all(isinstance(text, str) for text in found):
            raise ValueError("not texts")
    except (ValueError, TypeError, RecursionError) as error:
        raise SpecError(f"{name} is no list", hint="Write texts with commas between them.") from error
    return tuple(found)

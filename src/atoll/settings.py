"""Where Atoll keeps things on this machine, and how much of it sandboxes may take.

The data directory holds what must survive a restart: records, the sandboxes' files. The run directory holds sockets.
Both belong to one installation; another one beside it uses others and never sees these.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from atoll import durable
from atoll.errors import EngineUnavailableError
from atoll.resources import Resources

_MAX_SOCKET_PATH = 99
"""The kernel allows 107 bytes; the rest is left for a suffix."""


_DOCKER_IMAGE = "python:3.12-slim"


@dataclass(frozen=True, slots=True)
class Settings:
    data_dir: Path
    run_dir: Path
    resources: Resources = field(default_factory=Resources.of_machine)
    docker_image: str = _DOCKER_IMAGE
    """The default image of engine `docker`, which has no image `host`."""

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, uid: int | None = None) -> Settings:
        """From `ATOLL_DATA_DIR`, `ATOLL_RUN_DIR` and `ATOLL_DOCKER_IMAGE`, else what is customary for this user; the
        ceilings from `ATOLL_SANDBOX_…`, `ATOLL_USER_…` and `ATOLL_TOTAL_…`, else what suits this machine."""
        environ = os.environ if environ is None else environ
        uid = os.geteuid() if uid is None else uid
        data, run = _customary(environ, uid)
        data = _absolute(environ, "ATOLL_DATA_DIR") or data
        return cls(
            data_dir=data,
            run_dir=_absolute(environ, "ATOLL_RUN_DIR") or run,
            resources=Resources.load(environ, data),
            docker_image=environ.get("ATOLL_DOCKER_IMAGE") or _DOCKER_IMAGE,
        )

    def engine_data_dir(self, engine: str) -> Path:
        """The engine's part of the data directory, made if missing.

        For root it can be passed through, not listed: sandboxes run as users of their own and must reach their files.
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
        """The engine's part of the run directory, made if missing. Nobody else can look into it."""
        owned_directory(self.run_dir, 0o700)
        return owned_directory(self.run_dir / engine, 0o700)

    def installation_id(self) -> str:
        """A random name of this installation, chosen once. Engines mark what they own with it."""
        path = owned_directory(self.data_dir, 0o711 if os.geteuid() == 0 else 0o700) / "installation-id"
        if not path.exists():
            durable.create(path, uuid4().hex, 0o644)
        return path.read_text()


def owned_directory(path: Path, mode: int) -> Path:
    """Make the directory, or check that it is one of ours that others cannot write to."""
    try:
        path.mkdir(mode=mode, parents=True)
        path.chmod(mode)  # whatever the umask took away
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


def _absolute(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(name)
    if not value:
        return None
    # As the XDG convention says, a relative path is ignored; ours is an error that the user can see.
    if not value.startswith("/"):
        if name.startswith("XDG_"):
            return None
        raise EngineUnavailableError(f"{name} is '{value}'", hint="Make it an absolute path.")
    return Path(os.path.normpath(value))

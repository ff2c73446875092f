"""The server's secret: made once, readable by nobody else."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from atoll.errors import EngineUnavailableError

_BYTES = 32


def load_secret(path: Path) -> bytes:
    """Nobody ever sees a half written one, also when two servers start at once."""
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(_BYTES))
            os.fsync(descriptor)
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            os.close(descriptor)
            draft.unlink()
    secret = path.read_bytes()
    if len(secret) != _BYTES:
        raise EngineUnavailableError(f"'{path}' is not a secret of {_BYTES} bytes", hint="Remove it to get a new one.")
    return secret

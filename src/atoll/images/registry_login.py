"""Registry logins stored by `docker login`.

They are read from `config.json` in `$DOCKER_CONFIG` or `~/.docker`, only when a registry requests authentication. They
are not cached and not stored elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.errors import ImageError
from atoll.images.reference import DEFAULT_REGISTRY

_HELPER = re.compile(r"^[a-zA-Z0-9_-]{1,64}\Z")
_MAX_FILE = 4 << 20
_HELPER_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class Credentials:
    username: str
    password: str = field(repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


def credentials_for(registry: str) -> Credentials | None:
    """Return the stored login for a registry, or None. Raises ImageError if the file cannot be read."""
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        if path.stat().st_size > _MAX_FILE:
            raise ValueError("too large")
        value = json.loads(path.read_bytes())
        for name in _spellings(registry):
            found = _from_helper(value, name) or _from_entry(value.get("auths", {}).get(name))
            if found is not None:
                return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ImageError(
            f"the credentials in {path} cannot be read", hint="Repair the file, or log in again."
        ) from error
    return None


def _spellings(registry: str) -> tuple[str, ...]:
    if registry == DEFAULT_REGISTRY:
        return (f"https://index.{DEFAULT_REGISTRY}/v1/", f"index.{DEFAULT_REGISTRY}", DEFAULT_REGISTRY)
    return (registry, f"https://{registry}", f"https://{registry}/v2/", f"http://{registry}")


def _from_entry(entry: Any) -> Credentials | None:
    if not entry:
        return None
    username, password = entry.get("username", ""), entry.get("password", "")
    if entry.get("auth"):
        try:
            username, _, password = base64.b64decode(entry["auth"], validate=True).decode().rstrip("\0").partition(":")
        except binascii.Error as error:
            raise ValueError("auth") from error
    token = entry.get("identitytoken", "")
    return Credentials(username, password, token) if username or token else None


def _from_helper(value: dict[str, Any], name: str) -> Credentials | None:
    """Get a login from a credential helper, a program that stores secrets. Its failure means that it has no login."""
    helper = value.get("credHelpers", {}).get(name) or value.get("credsStore")
    if not helper or not _HELPER.match(helper):
        return None
    program = shutil.which(f"docker-credential-{helper}")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "get"], input=name.encode(), capture_output=True, timeout=_HELPER_TIMEOUT_S, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return None
    answer = json.loads(done.stdout)
    if answer["Username"] == "<token>":
        return Credentials("", "", answer["Secret"])
    return Credentials(answer["Username"], answer["Secret"])

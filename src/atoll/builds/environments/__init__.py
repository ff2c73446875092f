"""The ready-made environments: Dockerfiles of Atoll, which make images named `code`, `computer` and `browser`.

Their context is the directory `recipes`, where each environment has a file `NAME.Dockerfile`.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from atoll.errors import ImageNotFoundError
from atoll.images.recipes import suite_recipe
from atoll.images.reference import ENVIRONMENTS

NAMES = ENVIRONMENTS
SUITE = "trixie"
"""The Debian suite of all of them."""
CONTEXT = Path(__file__).parent / "recipes"
_DEBIAN = "debian:"
_COPIED = re.compile(r"^COPY\s+(\S+)\s+\S+$", re.MULTILINE)
_BASE = re.compile(r"^FROM\s+(\S+)$", re.MULTILINE)


def dockerfile(name: str) -> bytes:
    """Return the Dockerfile of an environment. Raises ImageNotFoundError."""
    if name not in NAMES:
        raise ImageNotFoundError(
            f"there is no environment {name[:80]!r}", hint=f"Environments are: {', '.join(NAMES)}."
        )
    return (CONTEXT / f"{name}.Dockerfile").read_bytes()


def base(name: str) -> str:
    """Return the image that an environment starts from."""
    found = _BASE.findall(dockerfile(name).decode())
    return str(found[0])


def digest(name: str) -> str:
    """Return a digest of everything of ours that an environment is made from: its Dockerfile, the files that it copies,
    and the same of its base. It changes when another image would be built."""
    text, below = dockerfile(name), base(name)
    hashed = hashlib.sha256(text)
    for copied in _COPIED.findall(text.decode()):
        content = (CONTEXT / copied).read_bytes()
        hashed.update(f"\0{copied} {len(content)}\0".encode() + content)
    hashed.update(_version(below).encode())
    return f"sha256:{hashed.hexdigest()}"


def _version(image: str) -> str:
    """Return the version of what an environment starts from: another one, a suite of Debian, or any other image."""
    if image in NAMES:
        return digest(image)
    return suite_recipe(image.removeprefix(_DEBIAN)).digest if image.startswith(_DEBIAN) else image

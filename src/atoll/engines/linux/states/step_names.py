"""How the steps of builds are named."""

from __future__ import annotations

import re

from atoll.errors import SpecError

STEP = "step:"
"""The prefix of an image name that stands for a step. Users cannot name it, see `images.reference`."""
_KEY = re.compile(r"[0-9a-f]{64}")


def is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def checked_key(text: str) -> str:
    if not is_key(text):
        raise SpecError(f"{text[:80]!r} is not the key of a step")
    return text

"""Writing a generated file, or checking that it is up to date: what every generator does at the end."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(target: Path, text: str) -> int:
    """Write the text, or with --check only compare it. Return the exit status."""
    if "--check" not in sys.argv:
        target.write_text(text)
        return 0
    if target.exists() and target.read_text() == text:
        return 0
    print(f"{target.name} is not what its sources say: run `make generate`", file=sys.stderr)
    return 1

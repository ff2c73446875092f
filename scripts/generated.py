"""Formatting and writing a generated file, or checking that it is up to date: what generators do at the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def formatted(target: Path, text: str, rules: str) -> str:
    """Return the text of a Python file as ruff writes it, after mending what the rules find."""
    ruff = str(Path(sys.executable).with_name("ruff"))
    for step in (["check", "--fix", f"--select={rules}"], ["format"]):
        command = [ruff, *step, "--quiet", "--stdin-filename", str(target), "-"]
        text = subprocess.run(command, input=text, text=True, capture_output=True, check=True).stdout
    return text


def write_or_check(target: Path, text: str) -> int:
    """Write the text, or with --check only compare it. Return the exit status."""
    if "--check" not in sys.argv:
        target.write_text(text)
        return 0
    if target.exists() and target.read_text() == text:
        return 0
    print(f"{target.name} is not what its sources say: run `make generate`", file=sys.stderr)
    return 1

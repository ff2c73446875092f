"""Writes src/atoll/__init__.pyi: the public names for type checkers, which cannot follow an import on first use.

With --check nothing is written, and a difference is an error.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import atoll
from generated import write_or_check

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src/atoll/__init__.pyi"
HEADER = '"""The public names for type checkers. Generated from __init__.py by scripts/generate_exports.py."""\n'


def generate() -> str:
    imports = [f"from {module} import {name}" for name, module in atoll.EXPORTS.items()]
    names = ", ".join(f'"{name}"' for name in atoll.EXPORTS)
    text = "\n".join(
        [HEADER, *imports, "", "EXPORTS: dict[str, str]", "RETIRED: dict[str, str]", f"__all__ = [{names}]"]
    )
    ruff = str(Path(sys.executable).with_name("ruff"))
    for step in (["check", "--fix", "--select=I,RUF022"], ["format"]):
        command = [ruff, *step, "--quiet", "--stdin-filename", str(TARGET), "-"]
        text = subprocess.run(command, input=text, text=True, capture_output=True, check=True, cwd=ROOT).stdout
    return text


def main() -> int:
    return write_or_check(TARGET, generate())


if __name__ == "__main__":
    raise SystemExit(main())

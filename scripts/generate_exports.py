"""Writes src/atoll/__init__.pyi: the public names for type checkers, which cannot follow an import on first use.

With --check nothing is written, and a difference is an error.
"""

from __future__ import annotations

from pathlib import Path

import atoll
from generated import formatted, write_or_check

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src/atoll/__init__.pyi"
HEADER = '"""The public names for type checkers. Generated from __init__.py by scripts/generate_exports.py."""\n'


def generate() -> str:
    imports = [f"from {module} import {name}" for name, module in atoll.EXPORTS.items()]
    names = ", ".join(f'"{name}"' for name in atoll.EXPORTS)
    text = "\n".join(
        [HEADER, *imports, "", "EXPORTS: dict[str, str]", "RETIRED: dict[str, str]", f"__all__ = [{names}]"]
    )
    return formatted(TARGET, text, "I,RUF022")


def main() -> int:
    return write_or_check(TARGET, generate())


if __name__ == "__main__":
    raise SystemExit(main())

"""Writes openapi.json from the server's routes. With --check nothing is written and a difference is an error."""

from __future__ import annotations

import json
from pathlib import Path

from atoll.server.app import bare_app
from generated import write_or_check

TARGET = Path(__file__).resolve().parent.parent / "openapi.json"


def generate() -> str:
    return json.dumps(bare_app().openapi(), indent=1, sort_keys=True) + "\n"


def main() -> int:
    return write_or_check(TARGET, generate())


if __name__ == "__main__":
    raise SystemExit(main())

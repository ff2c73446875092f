"""Writes openapi.json from the server's routes. With --check nothing is written and a difference is an error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from atoll.server.app import bare_app

TARGET = Path(__file__).resolve().parent.parent / "openapi.json"


def generate() -> str:
    return json.dumps(bare_app().openapi(), indent=1, sort_keys=True) + "\n"


def main() -> int:
    text = generate()
    if "--check" not in sys.argv:
        TARGET.write_text(text)
        return 0
    if TARGET.exists() and TARGET.read_text() == text:
        return 0
    print("openapi.json is not what the routes say: run `make generate`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())

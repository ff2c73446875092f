"""Write what a real `docker build` makes of each case of the corpus into its `expected.json`. Needs root.

PYTHONPATH=tests .venv/bin/python -m builds.record [CASE]…
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from builds import corpus, reference, trees


def _written(expected: dict[str, dict[str, Any]]) -> str:
    """Return it as JSON with one line for each file."""
    parts = []
    for part, entries in expected.items():
        lines = [f"  {_json(name)}: {_json(entry)}" for name, entry in sorted(entries.items())]
        parts.append(f" {_json(part)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def main(names: list[str]) -> int:
    failed = []
    with reference.docker() as docker:
        bases = {name: docker.tree(name) for name in (corpus.BUSYBOX, corpus.DEBIAN)} | {corpus.SCRATCH: {}}
        for case in corpus.cases():
            if names and case.name not in names:
                continue
            begun = time.monotonic()
            try:
                built = docker.build(case)
            except reference.ReferenceError as error:
                failed.append(case.name)
                print(f"{case.name}: {error}", file=sys.stderr)
                continue
            base = bases[case.base]
            expected = {"config": built.config, "files": trees.relative_changes(base, built.tree)}
            if case.base != corpus.DEBIAN:
                (case.folder / "expected.json").write_text(_written(expected))
            print(f"{case.name}: {len(expected['files'])} changes, {time.monotonic() - begun:.1f} s")
    print(f"failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

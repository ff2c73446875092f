"""List the tests that failed in one run of pytest and were tried again in another, and why they failed first.

    list_retried.py FIRST.xml SECOND.xml

Both are what `pytest --junit-xml` writes, in the family `xunit1`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

_MAX_LINES = 12


def failures(results: Path) -> dict[str, str]:
    """Why each test failed, by its name."""
    # We wrote the file ourselves, a moment ago.
    cases = ElementTree.parse(results).iter("testcase") if results.exists() else ()  # noqa: S314
    return {
        f"{case.get('file')}::{case.get('name')}": _reason(problem)
        for case in cases
        if (problem := case.find("failure") if case.find("failure") is not None else case.find("error")) is not None
    }


def _reason(problem: ElementTree.Element) -> str:
    """What pytest marks as the error, and where it was; the message alone if nothing is marked."""
    lines = (problem.text or "").splitlines()
    marked = [line for line in lines if line.startswith("E  ")][:_MAX_LINES]
    place = next((line for line in reversed(lines) if line and not line.startswith(("E  ", " "))), "")
    return "\n".join([*marked, place] if marked else [problem.get("message") or "no reason was recorded"])


def main() -> None:
    first, second = (failures(Path(argument)) for argument in sys.argv[1:3])
    print("\nrun-tests: tried twice, and why the first time failed:")
    for test, reason in first.items():
        print(f"\n{test}: {'failed again' if test in second else 'passed the second time'}")
        print("\n".join(f"    {line}" for line in reason.splitlines()))


if __name__ == "__main__":
    main()

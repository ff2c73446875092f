"""The tests that the documentation names exist, and every promise of SECURITY.md names some."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from atoll.conformance import CHECKS
from docs.blocks import ROOT, pages

TESTS = ROOT / "tests"
_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"(?:tests/)?(?P<path>(?:\w+/)*test_\w+\.py)(?:::(?P<name>\w+))?")
_FUNCTION = re.compile(r"test_\w+")
_GROUPS = {check.name.partition(".")[0] for check in CHECKS}
_CHECK = re.compile(rf"(?:{'|'.join(sorted(_GROUPS))})\.\w+")


@functools.lru_cache
def functions(path: Path) -> frozenset[str]:
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


@functools.lru_cache
def all_functions() -> frozenset[str]:
    return frozenset(name for path in TESTS.rglob("test_*.py") for name in functions(path))


def is_reference(code: str) -> bool:
    return any(kind.fullmatch(code) for kind in (_FILE, _FUNCTION, _CHECK))


def problem(code: str) -> str | None:
    """Why this piece of code names no test, if it should. A name without a folder is that of a file in any folder."""
    if found := _FILE.fullmatch(code):
        pattern = found["path"] if "/" in found["path"] else f"**/{found['path']}"
        files = list(TESTS.glob(pattern))
        if not files:
            return f"there is no {found['path']}"
        if found["name"] and not any(found["name"] in functions(file) for file in files):
            return f"{found['path']} has no {found['name']}"
    elif _CHECK.fullmatch(code) and code not in {check.name for check in CHECKS}:
        return f"the conformance suite has no {code}"
    elif _FUNCTION.fullmatch(code) and code not in all_functions():
        return f"no test is called {code}"
    return None


def named(page: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        for code in _CODE.findall(line):
            if is_reference(code):
                yield number, code


def test_every_test_that_a_page_names_exists() -> None:
    found = [(page, *reference) for page in pages() if page != "CHANGELOG.md" for reference in named(page)]
    assert len(found) > 100
    wrong = ((page, number, problem(code)) for page, number, code in found)
    assert [f"{page}:{number}: {why}" for page, number, why in wrong if why] == []


def test_every_promise_of_the_security_page_names_a_test() -> None:
    rows = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.endswith("tests |")]
    assert len(promises) > 25
    bare = [row for row in promises if not any(map(is_reference, _CODE.findall(row.rstrip(" |").rpartition("|")[2])))]
    assert bare == []

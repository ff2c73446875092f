"""What the text of the guides calls by name exists: routes, variables, settings, calls and their arguments."""

from __future__ import annotations

import builtins
import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import atoll
from atoll import openhands, openmanus
from atoll.server.settings import ServerSettings
from docs import static_checks
from docs.blocks import ROOT, pages

_ROUTE = re.compile(r"(GET|POST|PUT|PATCH|DELETE) (…?/\S+)")
_VARIABLE = re.compile(r"ATOLL_[A-Z][A-Z_]*[A-Z]")
_GUIDES = [page for page in pages() if page.startswith(("README", "SECURITY", "docs/guides", "docs/concepts"))]
_OF_OTHERS = frozenset({"spawnVM", "exportFiles", "Error", "session_id"})
"""Calls of other systems, in the tables that compare them with Atoll's."""
_CALL = re.compile(r"(?:(?:await|async with|sandbox|manager|Sandbox|AsyncSandbox|SandboxManager)[. ])?(\w+)\((.*)\)")


def codes() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every piece of code in the text of the guides."""
    for page in _GUIDES:
        for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
            for code in re.findall(r"`([^`\n]+)`", line):
                yield f"{page}:{number}", code


@functools.lru_cache
def routes() -> set[tuple[str, str]]:
    """Methods and paths with `*` for every parameter."""
    paths = json.loads((ROOT / "openapi.json").read_text())["paths"]
    return {
        (method.upper(), re.sub(r"\{[^}]*\}", "*", path.removeprefix("/api/v1")))
        for path, operations in paths.items()
        for method in operations
    }


def is_route(method: str, path: str) -> bool:
    path = path.partition("?")[0].rstrip("/")
    path = re.sub(r"\{[^}]*\}|\bID\b|…$", "*", path.replace("…/", "/sandboxes/*/", 1) if path.startswith("…") else path)
    wanted = path.split("/")
    return any(method == known and _leads_to(wanted, route.split("/")) for known, route in routes())


def _leads_to(path: list[str], route: list[str]) -> bool:
    """A parameter of a route stands for any one part of a path, such as the number of a port."""
    parts = list(zip(path, route, strict=False))
    return len(path) == len(route) and all(part in (own, "*") for own, part in parts)


def test_routes_exist() -> None:
    found = [(place, match) for place, code in codes() if (match := _ROUTE.fullmatch(code))]
    assert len(found) > 30
    assert [f"{place}: {match[0]}" for place, match in found if not is_route(match[1], match[2])] == []


def test_variables_are_read_somewhere() -> None:
    """Those of settings by the names of the settings, and ceilings by their prefix."""
    read = {f"ATOLL_{name.upper()}" for name in ServerSettings.model_fields}
    files = (*(ROOT / "src" / "atoll").rglob("*.py"), *(ROOT / "tests").rglob("*.py"))
    read |= {name for path in files if path.parent.name != "docs" for name in _VARIABLE.findall(path.read_text())}
    read |= {
        f"{prefix}_{what}" for prefix in ("ATOLL_USER", "ATOLL_TOTAL") for what in ("MEMORY", "PIDS", "CPU_WEIGHT")
    }
    found = {(place, name) for place, code in codes() for name in _VARIABLE.findall(code)}
    assert len(found) > 15
    assert [f"{place}: {name}" for place, name in sorted(found) if name not in read] == []


def test_settings_exist() -> None:
    page = (ROOT / "docs/guides/server.md").read_text()
    table = page.partition("| setting | default | meaning |")[2].partition("\n\n")[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert len(names) > 12
    assert [name for name in names if name not in ServerSettings.model_fields] == []


def test_calls_and_their_arguments_exist() -> None:
    found = [(place, match) for place, code in codes() if (match := _CALL.fullmatch(code))]
    assert len(found) > 40
    assert [f"{place}: {match[0]}: {why}" for place, match in found if (why := _wrong(match[1], match[2]))] == []


def _wrong(name: str, arguments: str) -> str | None:
    if name in _OF_OTHERS:
        return None
    candidates = _called(name)
    if not candidates:
        return f"nothing is called {name}"
    accepted = [static_checks.keywords_of(candidate) for candidate in candidates]
    if any(keywords is None for keywords in accepted):
        return None
    used = re.findall(r"(\w+)=", _outside_of_brackets(arguments))
    known: set[str] = set().union(*(keywords for keywords in accepted if keywords is not None))
    unknown = [word for word in used if word not in known]
    return f"it has no {', '.join(unknown)}" if unknown else None


def _called(name: str) -> list[Any]:
    found = [getattr(kind, name) for kind in static_checks.public_classes() if hasattr(kind, name)]
    modules = (atoll, openhands, openmanus, builtins)
    return found + [getattr(module, name) for module in modules if hasattr(module, name)]


def _outside_of_brackets(text: str) -> str:
    """Leave out what is in brackets or quotes."""
    text = re.sub(r"\"[^\"]*\"", "", text)
    while text != (shorter := re.sub(r"[\[({][^\[\](){}]*[\])}]", "", text)):
        text = shorter
    return text

from __future__ import annotations

import sys
from subprocess import run

import pytest

from atoll.engines import registry
from atoll.engines.base import Engine
from atoll.errors import EngineNotFoundError, EngineUnavailableError
from atoll.model import Capability
from atoll.settings import Settings
from needs import missing


@pytest.mark.parametrize("name", registry.names())
def test_every_known_engine_keeps_the_contract(name: str, settings: Settings) -> None:
    engine = registry.get(name, settings)
    assert isinstance(engine, Engine)
    assert engine.name == name
    assert registry.probe(name, settings).name == name


def test_an_unknown_engine_is_refused_with_the_known_names(settings: Settings) -> None:
    with pytest.raises(EngineNotFoundError, match="process, docker, unsafe-none") as caught:
        registry.get("teapot", settings)
    assert caught.value.code == "engine_not_found"


def test_only_the_engine_that_says_so_lacks_isolation(settings: Settings) -> None:
    without = [n for n in registry.names() if Capability.ISOLATION not in registry.get(n, settings).capabilities]
    assert without == ["unsafe-none"]


@pytest.fixture
def only_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_STRONGEST_FIRST", {"process": "atoll.engines.process:ProcessEngine"})


@pytest.mark.usefixtures("only_process")
def test_auto_never_picks_an_engine_without_isolation(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(EngineUnavailableError, match="'bwrap' is not installed") as caught:
        registry.auto(settings)
    assert "apt-get install bubblewrap" in (caught.value.hint or "")


def test_auto_picks_the_first_that_works_and_says_why_not_those_before(settings: Settings) -> None:
    works = {name: registry.probe(name, settings).available for name in registry._STRONGEST_FIRST}
    if not any(works.values()):
        missing("no engine with isolation works here")
    expected = next(name for name, available in works.items() if available)
    engine, reasons = registry.auto(settings)
    assert engine.name == expected
    assert reasons[-1] == f"{expected}: the strongest isolation that works here"
    for name in list(works)[: list(works).index(expected)]:
        assert any(reason.startswith(f"{name}: ") for reason in reasons)


def test_engines_are_imported_only_when_asked_for() -> None:
    code = (
        "import atoll.engines.registry, sys; print([n for n in sys.modules if n.startswith('atoll.engines.process')])"
    )
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

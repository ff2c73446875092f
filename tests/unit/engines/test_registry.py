from __future__ import annotations

import sys
from subprocess import run

import pytest

from atoll.engines import registry
from atoll.engines.checkpointing import Checkpointing
from atoll.engines.contract import Engine, NetworkPolicies, Pausable, supporting
from atoll.errors import EngineNotFoundError, EngineUnavailableError
from atoll.manager.engine_set import EngineSet
from atoll.model import Capability, SandboxSpec
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from needs import missing


@pytest.mark.parametrize("name", registry.names())
def test_every_known_engine_keeps_the_contract(name: str, settings: Settings) -> None:
    engine = registry.get(name, settings)
    assert isinstance(engine, Engine)
    assert engine.name == name
    assert registry.probe(name, settings).name == name


def test_an_unknown_engine_is_refused_with_the_known_names(settings: Settings) -> None:
    with pytest.raises(EngineNotFoundError, match="bubblewrap, docker, unsafe-none") as caught:
        registry.get("teapot", settings)
    assert caught.value.code == "engine_not_found"


async def test_only_the_engine_that_says_so_lacks_isolation(settings: Settings) -> None:
    described = {name: await registry.get(name, settings).describe() for name in registry.names()}
    without = [name for name, found in described.items() if Capability.ISOLATION not in found.capabilities]
    assert without == ["unsafe-none"]
    assert [name for name, found in described.items() if found.isolation is None] == without


async def test_a_declared_capability_is_supported(settings: Settings) -> None:
    for name in registry.names():
        engine = registry.get(name, settings)
        for protocol, capability in (
            (Pausable, Capability.PAUSE),
            (NetworkPolicies, Capability.NETWORK),
            (Checkpointing, Capability.CHECKPOINTS),
        ):
            declared = capability in (await engine.describe()).capabilities
            assert (await supporting(engine, protocol) is not None) == declared, f"{name}: {capability}"


@pytest.fixture
def only_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry, "_STRONGEST_FIRST", {"bubblewrap": "atoll.engines.bubblewrap.engine:BubblewrapEngine"}
    )


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


def test_auto_is_the_server_that_the_environment_names_unless_an_engine_is_named(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a sandbox. A manager is on this machine: its sandboxes are kept in its journal."""
    monkeypatch.setenv("ATOLL_URL", "http://127.0.0.1:9")
    assert AsyncSandbox(settings=settings).access.choice.name == "remote"
    assert AsyncSandbox(engine="bubblewrap", settings=settings).engine_name == "bubblewrap"
    assert EngineSet("auto", settings).default.name == registry.auto(settings)[0].name


@pytest.mark.parametrize(("isolation", "engine"), [("gvisor", "oci"), ("vm", "oci"), ("namespaces", None)])
def test_auto_takes_the_engine_that_has_the_isolation(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, isolation: str, engine: str | None
) -> None:
    monkeypatch.delenv("ATOLL_URL", raising=False)
    expected = engine or registry.auto(settings)[0].name
    assert AsyncSandbox(isolation=isolation, settings=settings).engine_name == expected
    assert EngineSet("auto", settings).name_for(SandboxSpec.of(isolation=isolation)) == expected


def test_engines_are_imported_only_when_asked_for() -> None:
    modules = "[n for n in sys.modules if n.startswith('atoll.engines.bubblewrap')]"
    code = f"import atoll.engines.registry, sys; print({modules})"
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_process_is_another_name_of_bubblewrap(settings: Settings, recwarn: pytest.WarningsRecorder) -> None:
    engine = registry.get("process", settings)
    assert engine.name == registry.canonical("process") == "bubblewrap"
    assert registry.canonical("native") == "native"
    assert not recwarn.list

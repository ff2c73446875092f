"""A manager takes the options of a sandbox as `Sandbox` does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from atoll import SandboxManager, SandboxSpec, SpecError, Undo, UndoRule
from atoll.manager.request import Request


async def test_a_sandbox_is_described_by_options_alone(manager: SandboxManager) -> None:
    id = await manager.create_sandbox(
        memory="256m", pids=64, env={"STAGE": "test"}, work_dir="/srv/w", hostname="box", name="web", labels={"a": "b"}
    )
    async with manager.sandbox_operation(id) as sandbox:
        result = await sandbox.exec("echo $STAGE $(hostname) $(pwd)")
        assert result.stdout == "test box /srv/w\n"
        limits = (await sandbox.info()).limits
        assert (limits.memory_bytes, limits.pids) == (256 << 20, 64)
    assert (await manager.get_sandbox("web")).id == id
    await manager.delete_sandbox(id)


async def test_undo_of_a_manager_is_kept(make_manager: Callable[..., SandboxManager]) -> None:
    first = make_manager(at_exit="keep")
    id = await first.create_sandbox(undo=True)
    await first.cleanup()
    async with make_manager() as second, second.sandbox_operation(id) as sandbox:
        await sandbox.exec("echo 1 > f")
        await sandbox.undo()
        assert not await sandbox.exists("f")


def test_options_beside_a_config_add_to_it() -> None:
    config = SandboxSpec(env={"A": "1", "B": "1"}, labels={"x": "1"})
    request = Request.of(config, env={"B": "2"}, labels={"y": "2"}, name="web", lifetime=5, ports={"WEB": 80})
    assert request.spec.env == {"A": "1", "B": "2", "WEB": "80"}
    assert request.spec.labels == {"x": "1", "y": "2"}
    assert (request.name, request.lifetime_s, request.services) == ("web", 5, (80,))


def test_a_config_may_be_written_as_the_options_are() -> None:
    request = Request.of({"name": "web", "memory": "1g", "volumes": ["/srv:/data:ro"], "undo": True})
    assert request.name == "web"
    assert request.spec == Request.of(memory="1g", volumes=["/srv:/data:ro"], undo=True).spec
    assert not request.spec.labels


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": "1g"}, "'config' and 'memory' both describe"),
        ({"image": "x", "network": "all"}, "'config' and 'image', 'network' both describe"),
    ],
)
def test_options_that_a_config_excludes_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Request.of(SandboxSpec(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "meant"), [("idle_timout", "idle_timeout"), ("ownr", "owner"), ("memry", "memory"), ("cpu_s", "cpus")]
)
def test_a_misspelt_option_is_answered_with_the_right_one(option: str, meant: str) -> None:
    with pytest.raises(SpecError) as raised:
        Request.of(**{option: 1})  # type: ignore[arg-type]
    assert raised.value.hint == f"Did you mean {meant!r}?"


def test_a_function_cannot_be_kept_with_a_sandbox() -> None:
    with pytest.raises(SpecError, match="function") as raised:
        Request.of(undo=Undo(risky=lambda line: True))
    assert "UndoRule" in str(raised.value.hint)
    assert Request.of(undo=UndoRule(only=("rm *",))).spec.undo == UndoRule(only=("rm *",))


async def test_auto_is_the_choice_of_the_manager(manager: SandboxManager) -> None:
    id = await manager.create_sandbox(engine="auto")
    assert (await manager.get_sandbox(id)).engine_name == (await manager.describe(id)).engine == "native"
    await manager.delete_sandbox(id)

"""What is asked of the class: one call each to make, to find and to list sandboxes; and names."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from atoll import (
    AsyncSandbox,
    ConflictError,
    ListedSandbox,
    Sandbox,
    SandboxError,
    SandboxGoneError,
    SandboxNotFoundError,
    SpecError,
    State,
)
from atoll.settings import Settings

ENGINE = "bubblewrap"


async def test_one_call_makes_a_sandbox(settings: Settings) -> None:
    sandbox = await AsyncSandbox.create(engine=ENGINE, settings=settings, env={"STAGE": "test"})
    async with sandbox:
        assert (await sandbox.exec("echo $STAGE")).stdout == "test\n"


def test_one_call_makes_a_sandbox_without_await_too(settings: Settings) -> None:
    with Sandbox.create(engine=ENGINE, settings=settings) as sandbox:
        assert sandbox.exec("echo here").stdout == "here\n"
    made = Sandbox(engine=ENGINE, settings=settings)
    assert made.create() is made
    made.cleanup()


async def test_what_a_subclass_creates_is_of_that_class(settings: Settings) -> None:
    class Special(AsyncSandbox):
        pass

    async with await Special.create(engine=ENGINE, settings=settings) as sandbox:
        assert type(sandbox) is Special


async def test_sandboxes_are_listed_with_what_finds_them(settings: Settings) -> None:
    async with (
        AsyncSandbox(engine=ENGINE, settings=settings, labels={"run": "list"}, name="first", task_id="t-9") as first,
        AsyncSandbox(engine=ENGINE, settings=settings, labels={"run": "other"}) as second,
    ):
        found = {each.id: each for each in await AsyncSandbox.list(engine=ENGINE, settings=settings)}
        assert {first.id, second.id} <= found.keys()
        listed = found[first.id]
        assert isinstance(listed, ListedSandbox)
        assert (listed.name, listed.engine, listed.state) == ("first", ENGINE, State.RUNNING)
        assert listed.labels == {"run": "list", "task_id": "t-9"}
        only = await AsyncSandbox.list(engine=ENGINE, settings=settings, labels={"run": "list"})
        assert [each.id for each in only] == [first.id]
        everywhere = await AsyncSandbox.list(settings=settings, labels={"run": "list"})
        assert [each.id for each in everywhere] == [first.id]
    assert first.id not in {each.id for each in await AsyncSandbox.list(engine=ENGINE, settings=settings)}


async def test_what_is_listed_can_be_attached_to_whichever_engine_it_is_on(settings: Settings) -> None:
    async with AsyncSandbox(engine=ENGINE, settings=settings, name="known") as sandbox:
        await sandbox.write_file("f", "content")
        for known in (sandbox.id, "known"):
            found = await AsyncSandbox.attach(known, settings=settings)
            assert (found.id, found.engine_name) == (sandbox.id, ENGINE)
            assert await found.read_file("f") == "content"
            await found.detach()
    with pytest.raises(SandboxNotFoundError, match="known") as raised:
        await AsyncSandbox.attach("known", settings=settings)
    assert "Sandbox.list()" in str(raised.value.hint)


async def test_a_name_is_given_once(settings: Settings) -> None:
    async with AsyncSandbox(engine=ENGINE, settings=settings, name="taken") as sandbox:
        with pytest.raises(ConflictError, match="taken") as raised:
            await AsyncSandbox.create(engine=ENGINE, settings=settings, name="taken")
        assert sandbox.id in raised.value.reason
    async with AsyncSandbox(engine=ENGINE, settings=settings, name="taken"):
        pass


async def test_of_many_who_want_a_name_at_once_one_gets_it(settings: Settings) -> None:
    wanted = [AsyncSandbox(engine=ENGINE, settings=settings, name="wanted") for _ in range(6)]
    done = await asyncio.gather(*(each.create() for each in wanted), return_exceptions=True)
    made = [each for each in done if isinstance(each, AsyncSandbox)]
    assert len(made) == 1
    assert all(isinstance(each, ConflictError) for each in done if each not in made)
    await made[0].cleanup()
    left = await AsyncSandbox.list(engine=ENGINE, settings=settings)
    assert not [each for each in left if each.name == "wanted"]


_HOLDER = """
import asyncio, sys
from atoll.engines import registry
from atoll.model import NAME_LABEL, SandboxSpec
from atoll.sandbox import naming
from atoll.settings import Settings

async def hold():
    settings = Settings.load()
    engine = registry.get("bubblewrap", settings)
    async with naming.reserved(SandboxSpec(labels={NAME_LABEL: "held"}), engine, settings):
        print("held", flush=True)
        sys.stdin.read()

asyncio.run(hold())
"""


async def test_a_program_that_is_killed_while_it_takes_a_name_keeps_nobody_from_it(
    settings: Settings, other_python: dict[str, str]
) -> None:
    command = [sys.executable, "-c", _HOLDER]
    with subprocess.Popen(command, env=other_python, stdin=-1, stdout=-1) as holder:  # noqa: ASYNC220
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        waiting = asyncio.create_task(AsyncSandbox.create(engine=ENGINE, settings=settings, name="held"))
        await asyncio.sleep(0)
        assert not waiting.done()
        holder.kill()
        async with await waiting as sandbox:
            assert (await sandbox.exec("true")).success


@pytest.mark.parametrize("name", ["", "a/b", "../x", "x" * 129, "-x", "a b", "a\n"])
def test_a_name_that_could_be_mistaken_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="not a valid name"):
        AsyncSandbox(name=name)


def test_labels_of_ours_cannot_be_set() -> None:
    with pytest.raises(SpecError, match="reserved"):
        AsyncSandbox(labels={"atoll.name": "x"})


# --- a sandbox used at the wrong moment -----------------------------------------------------------------------------


async def test_before_its_creation_a_sandbox_says_how_to_create_it(settings: Settings) -> None:
    with pytest.raises(SandboxError, match=r"^Sandbox not initialized\b") as raised:
        await AsyncSandbox(engine=ENGINE, settings=settings).exec("true")
    assert "create()" in str(raised.value.hint)


async def test_after_its_cleanup_a_sandbox_says_that_it_is_gone(settings: Settings) -> None:
    sandbox = await AsyncSandbox.create(engine=ENGINE, settings=settings)
    with pytest.raises(SandboxError, match="already created"):
        await sandbox.create()
    await sandbox.cleanup()
    with pytest.raises(SandboxGoneError, match=r"was cleaned up\b"):
        await sandbox.exec("true")
    with pytest.raises(SandboxGoneError, match="cleaned up and cannot be created again"):
        await sandbox.create()


async def test_after_being_detached_an_object_says_how_to_get_another(settings: Settings) -> None:
    sandbox = await AsyncSandbox.create(engine=ENGINE, settings=settings)
    await sandbox.detach()
    with pytest.raises(SandboxError, match=f"detached from sandbox {sandbox.id}, which goes on") as raised:
        await sandbox.exec("true")
    assert not isinstance(raised.value, SandboxGoneError)
    assert f"attach('{sandbox.id}')" in str(raised.value.hint)
    await sandbox.cleanup()  # does not delete what it has let go
    found = await AsyncSandbox.attach(sandbox.id, engine=ENGINE, settings=settings)
    assert (await found.exec("echo on")).stdout == "on\n"
    await found.cleanup()


# --- wrong options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"memry": "1g"}, "memory"),
        ({"lifetme": 3}, "lifetime"),
        ({"netwrok": "all"}, "network"),
        ({"workdir": "/srv"}, "work_dir"),
        ({"label": {"a": "b"}}, "labels"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_right_one(options: dict[str, object], meant: str) -> None:
    with pytest.raises(SpecError) as raised:
        AsyncSandbox(**options)  # type: ignore[arg-type]
    assert raised.value.hint == f"Did you mean {meant!r}?"


def test_a_misspelt_engine_is_answered_with_the_right_one(settings: Settings) -> None:
    with pytest.raises(SandboxError) as raised:
        Sandbox.create(engine="nativ", settings=settings)
    assert str(raised.value.hint).startswith("Did you mean 'native'?")


def test_a_function_that_chooses_commands_to_undo_stays_with_the_program() -> None:
    from atoll import Undo, UndoRule

    sandbox = AsyncSandbox(undo=Undo(keep=3, risky=lambda line: True))
    assert sandbox.spec.undo is None
    assert AsyncSandbox(undo=Undo(keep=3)).spec.undo == UndoRule(keep=3)
    assert AsyncSandbox(undo=UndoRule(only=("rm *",))).spec.undo == UndoRule(only=("rm *",))
    assert AsyncSandbox(undo=True).spec.undo == UndoRule()
    assert AsyncSandbox(undo=False).spec.undo is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"labels": "x"}, "'labels' must be an object"),
        ({"labels": 5}, "'labels' must be an object"),
        ({"ports": [80]}, "'ports' must be an object"),
        ({"ports": {"WEB": "http"}}, "the port 'WEB' must be a number"),
        ({"ports": {"WEB": 70000}}, "from 1 to 65535"),
        ({"ports": {"WEB": 80}, "env": "A=1"}, "'env' must be an object"),
    ],
)
def test_an_option_of_the_wrong_kind_is_said_also_where_it_comes_from_a_file(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        AsyncSandbox(**options)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=said):
        AsyncSandbox(options)

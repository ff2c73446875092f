"""Bad arguments are refused before anything is made, in words that help."""

from __future__ import annotations

import gc
import math
import re
from typing import Any

import pytest

import atoll
from atoll import AsyncSandbox, Sandbox, SandboxError, SandboxSpec, SpecError
from atoll.settings import Settings


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"memory": "lots"}, "'lots' is not a size"),
        ({"memory": "-5m"}, "is not a size"),
        ({"memory": True}, "a size is a number"),
        ({"memory": "1k"}, "memory_bytes"),
        ({"disk": "huge"}, "'huge' is not a size"),
        ({"cpus": 0}, "cpus"),
        ({"cpus": math.nan}, "cpus"),
        ({"cpus": -1}, "cpus"),
        ({"pids": 0}, "pids"),
        ({"pids": "many"}, "pids"),
        ({"volumes": ["/only-one"]}, "is not a volume"),
        ({"volumes": ["/a:/b:rx"]}, "is not a volume"),
        ({"volumes": ["/a:/b:ro:x"]}, "is not a volume"),
        ({"volumes": [":/b"]}, "is not a volume"),
        ({"volumes": ["./relative:/b"]}, "must be an absolute path"),
        ({"volumes": {"/a": "relative"}}, "must be an absolute path"),
        ({"volumes": {"/a/../b": "/c"}}, "must be an absolute path"),
        ({"work_dir": "relative"}, "must be an absolute path"),
        ({"work_dir": "/proc/x"}, "cannot be the work directory"),
        ({"env": {"A=B": "x"}}, "invalid name or value"),
        ({"env": {"A": "\0"}}, "invalid name or value"),
        ({"env": {"": "x"}}, "invalid name or value"),
        ({"isolation": "wishful"}, "isolation"),
        ({"spec": SandboxSpec(), "memory": "1g"}, "'spec' and 'memory' both"),
        ({"spec": SandboxSpec(), "env": {"A": "1"}}, "'spec' and 'env' both"),
    ],
)
def test_a_request_that_makes_no_sense_is_a_spec_error(arguments: dict[str, Any], says: str) -> None:
    for cls in (AsyncSandbox, Sandbox):
        with pytest.raises(SpecError, match=re.escape(says)) as caught:
            cls(engine="bubblewrap", **arguments)
        assert isinstance(caught.value, ValueError)
        assert caught.value.code == "invalid_spec"


@pytest.mark.parametrize("timeout", [0, -1, math.nan, -math.inf])
async def test_impossible_timeouts_are_refused(timeout: float, sandbox: AsyncSandbox) -> None:
    with pytest.raises(ValueError, match="more than 0 seconds"):
        AsyncSandbox(engine="bubblewrap", timeout=timeout)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        await sandbox.exec("true", timeout=timeout)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        await sandbox.start("true", timeout=timeout)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        await sandbox.run_command("true", timeout)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        await sandbox.shell().run("true", timeout)


async def test_an_unknown_engine_names_those_that_are_known(settings: Settings) -> None:
    with pytest.raises(atoll.EngineNotFoundError, match="no engine 'nothing'") as caught:
        await AsyncSandbox(engine="nothing", settings=settings).create()
    assert "bubblewrap" in (caught.value.hint or "")
    assert caught.value.code == "engine_not_found"


async def test_an_unknown_image_says_what_there_is(settings: Settings) -> None:
    with pytest.raises(atoll.ImageNotFoundError) as caught:
        await AsyncSandbox(engine="bubblewrap", image="nothing", settings=settings).create()
    assert caught.value.hint
    assert caught.value.code == "image_not_found"


async def test_a_missing_bubblewrap_is_told_with_the_remedy(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    before = {path.name for path in settings.data_dir.glob("process/*")}
    with pytest.raises(atoll.EngineUnavailableError, match="bwrap") as caught:
        await AsyncSandbox(engine="bubblewrap", settings=settings).create()
    assert "install bubblewrap" in (caught.value.hint or "")
    assert {path.name for path in settings.data_dir.glob("process/*")} <= before | {".base", ".users"}


async def test_a_limit_that_cannot_be_kept_is_refused(settings: Settings) -> None:
    with pytest.raises(atoll.UnsupportedError, match="memory"):
        await AsyncSandbox(engine="bubblewrap", memory="512m", settings=settings).create()


async def test_before_create_it_says_what_to_do(settings: Settings) -> None:
    sandbox = AsyncSandbox(engine="bubblewrap", settings=settings)
    for use in (sandbox.exec("true"), sandbox.run_command("true"), sandbox.read_file("x"), sandbox.inspect()):
        with pytest.raises(SandboxError, match="Sandbox not initialized") as caught:
            await use
        assert "create()" in (caught.value.hint or "")
    await sandbox.cleanup()


async def test_it_is_created_only_once(sandbox: AsyncSandbox) -> None:
    with pytest.raises(SandboxError, match="already created"):
        await sandbox.create()
    assert (await sandbox.exec("echo ok")).stdout == "ok\n"


def test_every_error_has_a_code_of_its_own() -> None:
    public = [getattr(atoll, name) for name in atoll.__all__]
    errors = [value for value in public if isinstance(value, type) and issubclass(value, SandboxError)]
    assert len(errors) > 20
    assert len({error.code for error in errors}) == len(errors)
    for error in errors:
        made = error("what happened", hint="What to do.")
        assert str(made) == "what happened"
        assert (made.reason, made.hint) == ("what happened", "What to do.")
    assert issubclass(atoll.SandboxTimeoutError, TimeoutError)
    assert issubclass(atoll.SpecError, ValueError)
    assert issubclass(atoll.SandboxNotFoundError, KeyError)


async def test_a_sandbox_that_is_forgotten_warns(settings: Settings) -> None:
    sandbox = await AsyncSandbox(engine="bubblewrap", settings=settings).create()
    sandbox_id = sandbox.id
    with pytest.warns(ResourceWarning, match=f"sandbox {sandbox_id} was not cleaned up"):  # noqa: PT031
        del sandbox
        gc.collect()
    await (await AsyncSandbox.attach(sandbox_id, engine="bubblewrap", settings=settings)).cleanup()


async def test_one_that_was_cleaned_up_or_let_go_does_not_warn(
    settings: Settings, recwarn: pytest.WarningsRecorder
) -> None:
    async with AsyncSandbox(engine="bubblewrap", settings=settings) as sandbox:
        other = await AsyncSandbox.attach(sandbox.id, engine="bubblewrap", settings=settings)
        await other.detach()
    del sandbox, other
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []

"""One sandbox as the Manus example uses it: described by its names, set up, run, exported and destroyed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll import AsyncSandbox, Sandbox, SetupError
from atoll.errors import SandboxGoneError, SandboxResourceError, SpecError
from atoll.sandbox.export import Export
from atoll.settings import Settings
from leftovers import leftovers

ENGINE = "bubblewrap"


async def test_results_have_both_spellings_and_an_error_on_failure(sandbox: AsyncSandbox) -> None:
    good = await sandbox.exec("echo out; echo err >&2", timeout=300, captureOutput=True)
    assert (good.success, good.stdout, good.stderr, good.exitCode, good.error) == (True, "out\n", "err\n", 0, None)
    bad = await sandbox.exec("echo broken >&2; exit 7")
    assert (bad.success, bad.exit_code, bad.exitCode) == (False, 7, 7)
    assert bad.error == "the command failed with exit code 7: broken"
    late = await sandbox.exec("sleep 60", timeout=0.2)
    assert late.error == "the command was killed at its timeout"


@pytest.mark.parametrize("spelled", ["captureOutput", "capture_output"])
async def test_output_that_is_not_wanted_is_not_kept(sandbox: AsyncSandbox, spelled: str) -> None:
    heard: list[str] = []
    done = await sandbox.exec("echo out; echo err >&2; exit 3", on_stdout=heard.append, **{spelled: False})  # type: ignore[arg-type]
    assert (done.stdout, done.stderr, done.exit_code, done.truncated) == ("", "", 3, False)
    assert heard == ["out\n"]


async def test_wrong_names_are_refused_with_a_hint(sandbox: AsyncSandbox, settings: Settings) -> None:
    with pytest.raises(SpecError) as refused:
        await sandbox.exec("true", captureOutptu=True)  # type: ignore[call-arg]
    assert refused.value.hint == "Did you mean 'capture_output'?"
    with pytest.raises(SpecError) as refused:
        AsyncSandbox(engine=ENGINE, settings=settings, memroy="1g")  # type: ignore[call-arg]
    assert refused.value.hint == "Did you mean 'memory'?"
    with pytest.raises(SpecError, match="cpus is given twice"):
        AsyncSandbox(engine=ENGINE, settings=settings, cpu=1, cpus=2)


def test_a_description_is_taken_as_an_object_or_as_keywords(settings: Settings) -> None:
    one = Sandbox({"resources": {"cpu": 2}, "timeout": 60, "allowOutbound": True}, engine=ENGINE, settings=settings)
    two = Sandbox(cpu=2, lifetime=60, allowOutbound=True, engine=ENGINE, settings=settings, timeout=5)
    assert one.spec == two.spec
    assert (one.timeout_s, two.timeout_s) == (300, 5)
    with pytest.raises(SpecError, match="'spec' and 'image' both describe"):
        Sandbox({"cpu": 2}, image="host", engine=ENGINE, settings=settings)


async def test_setup_commands_run_in_order_before_the_sandbox_is_given_out(settings: Settings) -> None:
    setup = ["echo one > log", "echo $STAGE >> log"]
    sandbox = AsyncSandbox(engine=ENGINE, settings=settings, setup=setup, env={"STAGE": "two"})
    async with sandbox:
        assert await sandbox.read_file("log") == "one\ntwo\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo why; exit 3", "setup command 2 of 3 ('echo why; exit 3') failed with exit code 3: why"),
        ("echo why; sleep 60", "setup command 2 of 3 ('echo why; sleep 60') was killed: setup took longer than 1 s"),
        ("echo why; kill -9 $$", "setup command 2 of 3 ('echo why; kill -9 $$') was ended by signal 9: why"),
    ],
)
async def test_a_setup_that_fails_says_why_and_leaves_nothing(settings: Settings, command: str, said: str) -> None:
    sandbox = AsyncSandbox(engine=ENGINE, settings=settings, setup=["true", command, "true"], setup_timeout=1)
    with pytest.raises(SetupError) as failed:
        await sandbox.create()
    assert failed.value.reason == said
    assert failed.value.output == "why\n"
    assert leftovers(settings) == []


async def test_the_output_of_a_failed_setup_is_bounded(settings: Settings) -> None:
    flood = "head -c 1000000 /dev/zero | tr '\\0' x; echo; echo end; exit 1"
    with pytest.raises(SetupError) as failed:
        await AsyncSandbox(engine=ENGINE, settings=settings, setup=[flood]).create()
    assert failed.value.output.endswith("x\nend\n")
    assert len(failed.value.output) <= 16 << 10
    assert len(failed.value.reason) < 1000


async def test_results_are_exported_before_a_sandbox_is_destroyed(settings: Settings, tmp_path: Path) -> None:
    sandbox = AsyncSandbox(engine=ENGINE, settings=settings)
    await sandbox.create()
    await sandbox.exec("mkdir /output 2>/dev/null; mkdir -p output/deep; echo 1 > output/a; echo 2 > output/deep/b")
    await sandbox.delete(export=Export(tmp_path / "results" / "task", source="output/*"))
    assert (tmp_path / "results/task/a").read_text() == "1\n"
    assert (tmp_path / "results/task/deep/b").read_text() == "2\n"
    with pytest.raises(SandboxGoneError):
        await sandbox.exec("true")
    assert leftovers(settings) == []


async def test_nothing_to_export_is_fine(settings: Settings, tmp_path: Path) -> None:
    sandbox = AsyncSandbox(engine=ENGINE, settings=settings)
    await sandbox.create()
    await sandbox.delete(export=tmp_path / "results")
    assert not (tmp_path / "results").exists()
    assert leftovers(settings) == []


async def test_a_hostile_tree_is_bounded_and_reaches_nothing(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    await sandbox.exec("mkdir o; ln -s /etc/passwd o/link; ln -s ../../../.. o/up; head -c 300000 /dev/zero > o/big")
    with pytest.raises(SandboxResourceError):
        await sandbox.delete(export=Export(tmp_path / "few", source="o", max_bytes=1000))
    with pytest.raises(SandboxResourceError):
        await sandbox.delete(export=Export(tmp_path / "few", source="o", max_items=2))
    assert (await sandbox.exec("true")).success  # it is still there
    await Export(tmp_path / "all", source="o").run(sandbox)
    assert os.readlink(tmp_path / "all/link") == "/etc/passwd"
    assert (tmp_path / "all/big").stat().st_size == 300_000

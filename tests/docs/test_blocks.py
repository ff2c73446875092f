"""Every block of code in the documentation does what the page says, on the engine `native` and a real server."""

from __future__ import annotations

import asyncio
import json
import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from atoll.engines import registry
from atoll.engines.contract import GarbageCollecting
from atoll.settings import Settings
from docs import python_blocks, shell_blocks, static_checks
from docs.blocks import CHECKED, REASONS, RUN, Block, blocks, indented, inline, stray_notes
from docs.given import Given, prelude
from needs import need
from server.running import RunningServer, new_folder, running_server


def run_with(*languages: str) -> list[object]:
    """The blocks that run here, as parameters."""
    found = [block for block in blocks() if block.language in languages and not block.reason and not block.needs_docker]
    return [pytest.param(block, id=block.place) for block in found]


@pytest.fixture(scope="module")
def settings(session_folder: Path, need_engine: Callable[[str, Settings], None]) -> Iterator[Settings]:
    """An installation of these tests, named by variables as a user would."""
    need("root", "mkfs.btrfs")
    patch, folder = pytest.MonkeyPatch(), new_folder(session_folder, "docs")
    folder.chmod(0o755)
    patch.setenv("ATOLL_DATA_DIR", str(folder / "data"))
    patch.setenv("ATOLL_RUN_DIR", str(folder / "run"))
    patch.delenv("ATOLL_URL", raising=False)
    settings = Settings.load()
    need_engine("native", settings)
    assert registry.auto(settings)[0].name == "native"
    yield settings
    asyncio.run(_sandboxes(settings))
    patch.undo()
    assert not (settings.run_dir / "network").exists(), "the gateway is still there"


@pytest.fixture
def given(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Given]:
    """After the block, no sandbox may be left."""
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    yield Given(tmp_path)
    assert asyncio.run(_sandboxes(settings)) == []


async def _sandboxes(settings: Settings) -> list[str]:
    """The ids of those that are left, which are then deleted, with what they shared."""
    found = []
    for name in ("native", "oci"):
        engine = registry.get(name, settings)
        for handle in await engine.list():
            found.append(handle.sandbox_id)
            await engine.delete(handle)
        if isinstance(engine, GarbageCollecting):
            await engine.gc()
        await engine.aclose()
    return found


@pytest.fixture(scope="module")
def server(settings: Settings, session_folder: Path) -> Iterator[RunningServer]:
    with running_server(new_folder(session_folder, "docs-server"), "native", ATOLL_RUNTIME_NETWORK="none") as running:
        yield running


@pytest.fixture
def of_the_server(server: RunningServer) -> Iterator[dict[str, str]]:
    """What stands for the address and the key that pages show. After the block, no sandbox may be left there."""
    yield {"http://127.0.0.1:8420": server.url, "http://HOST:8420": server.url, "atoll_…": str(server.key)}
    with server.client() as client:
        left = [info["id"] for info in client.get("/sandboxes/search").json()["items"]]
        for sandbox_id in left:
            client.delete(f"/sandboxes/{sandbox_id}")
    assert left == []


@pytest.mark.parametrize("block", run_with("python"))
def test_python(block: Block, given: Given, request: pytest.FixtureRequest) -> None:
    if "server=" in block.text:
        given.replaced |= request.getfixturevalue("of_the_server")
    with prelude(block)(block, given):
        python_blocks.run(block, given.names, given.replaced)


@pytest.fixture(scope="module")
def socket(settings: Settings, session_folder: Path) -> Iterator[Path]:
    path = new_folder(session_folder, "docs-command") / "socket"
    with shell_blocks.forking_atoll(path):
        yield path


@pytest.mark.parametrize("block", run_with("sh"))
def test_shell(block: Block, given: Given, socket: Path, request: pytest.FixtureRequest) -> None:
    if "ATOLL_URL" in block.text:
        given.replaced |= request.getfixturevalue("of_the_server")
    with prelude(block)(block, given):
        shell_blocks.run_shell(block, given.folder, given.variables, given.replaced, socket)


@pytest.mark.parametrize("block", run_with("http"))
def test_requests(block: Block, server: RunningServer) -> None:
    with server.client() as client:
        shell_blocks.run_requests(block, client)
        for info in client.get("/sandboxes/search").json()["items"]:
            client.delete(f"/sandboxes/{info['id']}")


@pytest.mark.parametrize("block", run_with("dotenv"))
def test_variables_of_openhands(block: Block, of_the_server: dict[str, str]) -> None:
    """OpenHands appends its paths to this URL, and sends this key."""
    variables = shell_blocks.variables_of(block, of_the_server)
    url, headers = variables["SANDBOX_REMOTE_RUNTIME_API_URL"], {"X-API-Key": variables["SANDBOX_API_KEY"]}
    assert variables["RUNTIME"] == "remote"
    assert httpx.get(f"{url}/list", headers=headers).json() == {"runtimes": []}
    assert httpx.get(f"{url}/list", headers={"X-API-Key": "wrong"}).status_code == 401


def none(problems: list[str]) -> None:
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


# --- what is checked without running anything -------------------------------------------------------------------------


def test_every_block_names_its_language() -> None:
    none([block.shown() for block in blocks() if block.language not in RUN | CHECKED])
    none(indented())


def test_every_block_of_json_or_toml_is_valid() -> None:
    parsers = {"json": json.loads, "toml": tomllib.loads}
    for block in blocks():
        if block.language in parsers:
            parsers[block.language](block.text)


def test_every_block_that_does_not_run_says_why() -> None:
    """A reason is one of a few, and it has to apply to what is in the block."""
    none(stray_notes())
    declared = [block for block in blocks() if block.note]
    none([block.place for block in declared if not block.needs_docker and block.reason not in REASONS])
    stale = [block for block in declared if block.reason and not block.is_excused()]
    none([f"{block.place}: nothing in it '{block.reason}'" for block in stale])
    assert REASONS.keys() == {block.reason for block in declared if block.reason}


def test_what_does_not_run_names_what_exists() -> None:
    """Imports, arguments, commands, options, targets of `make`, extras of the package."""
    checks = {"python": static_checks.python_problems, "sh": static_checks.shell_problems}
    unrun = [block for block in blocks() if block.reason]
    assert unrun
    none([problem for block in unrun for problem in checks[block.language](block)])


def test_commands_in_the_prose_exist() -> None:
    found = list(inline("atoll"))
    assert len(found) > 20
    problems = ((place, static_checks.command_problem(code, strict=False)) for place, code in found)
    none([f"{place}: {problem}" for place, problem in problems if problem])


def test_make_targets_in_the_prose_exist() -> None:
    found = list(inline("make"))
    assert len(found) > 10
    problems = ((place, static_checks.make_problem(code)) for place, code in found)
    none([f"{place}: {problem}" for place, problem in problems if problem])


def test_every_example_is_run_by_a_test() -> None:
    tests = Path(__file__).parents[1]
    root = tests.parent
    texts = [path.read_text() for path in tests.rglob("test_*.py")]
    assert os.listdir(root / "examples")
    none([path.name for path in (root / "examples").iterdir() if not any(path.name in text for text in texts)])

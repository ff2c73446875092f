"""Sandboxes with policies, before an internet of our own."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from atoll import Sandbox
from atoll.engines import registry
from atoll.engines.contract import GarbageCollecting
from atoll.engines.docker.engine import DockerEngine
from atoll.engines.linux.runtimes import oci_runtimes
from atoll.network import client
from atoll.settings import Settings
from docker import private_engine
from needs import missing, need
from network.internet import Internet, offline_internet

Kind = dict[str, Any]
Make = Callable[..., Sandbox]
NAMES = {"allowed_domains": ["allowed.test", "*.w.test"]}


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="aw-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def internet(folder: Path) -> Iterator[Internet]:
    if (reason := client.problem()) is not None:
        missing(reason)
    need("ip", "tcpdump", "openssl", "curl", "git")
    with offline_internet(folder / "net") as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment().items():
            patch.setenv(name, value)
        yield made
        assert made.unexpected() == (set(), set()), "left over the whole of the tests"


@pytest.fixture(scope="session")
def settings(folder: Path, internet: Internet) -> Iterator[Settings]:
    made = Settings(folder / "data", folder / "run")
    yield made
    asyncio.run(remove_all(made))
    assert not (made.run_dir / "network").exists(), "the gateway is still there"
    assert str(made.run_dir) not in Path("/proc/self/mounts").read_text()


async def remove_all(settings: Settings) -> None:
    docker = [DockerEngine(settings, private_engine.where())] if private_engine.is_running() else []
    for engine in (*docker, *(registry.get(name, settings) for name in ("native", "oci"))):
        for handle in await engine.list():
            await engine.delete(handle)
        if isinstance(engine, GarbageCollecting):
            await engine.gc()
        await engine.aclose()


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", private_engine.host())
        yield private_engine.host()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("docker"):
            item.add_marker(pytest.mark.timeout(private_engine.START_S))  # the first one starts the engine
        if not isinstance(item, pytest.Function):
            continue
        if (item.path.name in _OF_THE_GATEWAY and _kind(item) != "native") or _kind(item) == "docker":
            item.add_marker(pytest.mark.again)


_OF_THE_GATEWAY = ("test_proxy.py", "test_secrets.py")
"""What happens after a sandbox's packets have left it is the same on every engine. Containers have the same link and
the same gateway as other sandboxes, so all that they repeat is left to `make test-all`."""


def _kind(item: pytest.Function) -> str:
    return str(item.callspec.params.get("kind", "native")) if hasattr(item, "callspec") else "native"


def pytest_sessionfinish() -> None:
    private_engine.stop()


@pytest.fixture(scope="session", params=["native", "gvisor", pytest.param("docker", marks=pytest.mark.docker)])
def kind(request: pytest.FixtureRequest, settings: Settings) -> Kind:
    if request.param == "native":
        return {"engine": "native"}
    if request.param == "docker":
        request.getfixturevalue("docker_host")
        # The machine's own programs, as on the other engines.
        return {"engine": "docker", "image": private_engine.DEBIAN, "volumes": ["/usr:/usr:ro"]}
    if oci_runtimes.locate("runsc", settings.data_dir) is None:
        missing("runsc is not installed")
    return {"engine": "oci", "isolation": "gvisor"}


@pytest.fixture(scope="session")
def make(settings: Settings) -> Iterator[Make]:
    """Sandboxes that are gone at the end."""
    with ExitStack() as made:

        def new(kind: Kind, network: Any, **more: Any) -> Sandbox:
            return made.enter_context(Sandbox(settings=settings, network=network, timeout=40, **kind, **more))

        yield new


@pytest.fixture(scope="session")
def named(make: Make, kind: Kind) -> Sandbox:
    """One that may reach allowed.test and what is below w.test. No test changes its policy."""
    return make(kind, NAMES)


@pytest.fixture(scope="session")
def opened(make: Make, kind: Kind) -> Sandbox:
    """One that may reach the internet."""
    return make(kind, "all")

"""The services of OpenHands over real sandboxes of this machine, each bound to one user."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from atoll.errors import ConflictError, SandboxError, SpecError
from atoll.manager import Record, SandboxManager
from atoll.openhands import (
    DockerSandboxService,
    ExposedPort,
    PresetSandboxSpecService,
    ProcessSandboxService,
    RemoteSandboxService,
    SandboxConfig,
    SandboxInfo,
    SandboxService,
    SandboxSpecInfo,
    SandboxStatus,
    VolumeMount,
    sandbox_service,
)
from atoll.settings import Settings

SERVER = "import http.server as s; s.ThreadingHTTPServer(('127.0.0.1', {}), s.SimpleHTTPRequestHandler).serve_forever()"
SPECS = PresetSandboxSpecService(
    [
        SandboxSpecInfo(id="host", command=None, working_dir="/workspace"),
        SandboxSpecInfo(id="no-such:image", command=None),
    ]
)
Make = Callable[..., ProcessSandboxService]


@pytest_asyncio.fixture
async def manager(
    session_settings: Settings, session_folder: Path, need_engine: Callable[[str, Settings], None]
) -> AsyncIterator[SandboxManager]:
    need_engine("bubblewrap", session_settings)
    state = session_folder / "openhands-services"
    async with SandboxManager(engine="bubblewrap", settings=session_settings, state_dir=state) as manager:
        yield manager


@pytest_asyncio.fixture
async def make(manager: SandboxManager) -> AsyncIterator[Make]:
    made: list[ProcessSandboxService] = []

    def make(user_id: str | None = "ann", **more: Any) -> ProcessSandboxService:
        values = {"sandbox_spec_service": SPECS, "manager": manager, **more}
        made.append(ProcessSandboxService(user_id=user_id, **values))
        return made[-1]

    yield make
    for service in made:
        await service.aclose()


def test_the_signatures_are_those_of_upstream() -> None:
    expected = {
        "search_sandboxes": ["page_id", "limit"],
        "get_sandbox": ["sandbox_id"],
        "get_sandbox_by_session_api_key": ["session_api_key"],
        "batch_get_sandboxes": ["sandbox_ids"],
        "start_sandbox": ["sandbox_spec_id", "sandbox_id", "extra_env"],
        "resume_sandbox": ["sandbox_id"],
        "pause_sandbox": ["sandbox_id"],
        "delete_sandbox": ["sandbox_id"],
        "pause_old_sandboxes": ["max_num_sandboxes"],
        "wait_for_sandbox_running": ["sandbox_id", "timeout", "poll_interval", "httpx_client"],
    }
    for kind in (SandboxService, DockerSandboxService, ProcessSandboxService, RemoteSandboxService):
        found = {name: list(inspect.signature(getattr(kind, name)).parameters)[1:] for name in expected}
        assert found == expected
    assert inspect.isabstract(SandboxService)


async def test_a_life_with_a_chosen_id(make: Make) -> None:
    service = make()
    info = await service.start_sandbox("host", "chosen.by-me")
    assert (info.id, info.created_by_user_id, info.sandbox_spec_id) == ("chosen.by-me", "ann", "host")
    assert info.status is SandboxStatus.RUNNING
    with pytest.raises(ConflictError):
        await service.start_sandbox("host", "chosen.by-me")
    assert (await service.get_sandbox("chosen.by-me")) == info
    assert await service.pause_sandbox(info.id)
    assert await service.pause_sandbox(info.id)
    paused = await service.get_sandbox(info.id)
    assert paused is not None
    assert (paused.status, paused.session_api_key, paused.exposed_urls) == (SandboxStatus.PAUSED, None, None)
    assert await service.resume_sandbox(info.id)
    again = await service.wait_for_sandbox_running(info.id, timeout=10)
    assert again.session_api_key == info.session_api_key
    assert await service.delete_sandbox(info.id)
    for act in (service.delete_sandbox, service.pause_sandbox, service.resume_sandbox):
        assert not await act(info.id)
    assert await service.get_sandbox(info.id) is None


async def test_nobody_sees_what_is_anothers(make: Make) -> None:
    ann, bob = make("ann"), make("bob")
    info, other = await ann.start_sandbox(sandbox_id="same"), await bob.start_sandbox(sandbox_id="same")
    assert info.session_api_key != other.session_api_key
    private = await ann.start_sandbox()
    assert await bob.get_sandbox(private.id) is None
    assert not await bob.delete_sandbox(private.id)
    assert [each.created_by_user_id for each in (await bob.search_sandboxes()).items] == ["bob"]
    assert info.session_api_key is not None
    assert await bob.get_sandbox_by_session_api_key(info.session_api_key) is None
    assert await ann.get_sandbox_by_session_api_key(info.session_api_key) == await ann.get_sandbox("same")
    assert await ann.get_sandbox_by_session_api_key("") is None
    await ann.pause_sandbox("same")
    assert await ann.get_sandbox_by_session_api_key(info.session_api_key) is None, "never of one that is paused"


async def test_pages_and_batches(make: Make) -> None:
    service = make()
    ids = [(await service.start_sandbox()).id for _ in range(3)]
    page = await service.search_sandboxes(limit=2)
    rest = await service.search_sandboxes(page_id=page.next_page_id, limit=2)
    assert [each.id for each in (*page.items, *rest.items)] == ids[::-1], "the newest first"
    assert rest.next_page_id is None
    assert (await service.search_sandboxes(page_id="nonsense", limit=2)).items == page.items
    found = await service.batch_get_sandboxes([ids[2], "none", ids[0]])
    assert [each and each.id for each in found] == [ids[2], None, ids[0]]


@pytest.mark.parametrize("most", [1, 2])
async def test_at_the_cap_the_oldest_is_paused_and_resumes_again(make: Make, most: int) -> None:
    service = make(max_num_sandboxes=most)
    ids = [each.id for each in await asyncio.gather(*(service.start_sandbox() for _ in range(3)))]

    async def running() -> set[str]:
        found = (await service.search_sandboxes()).items
        return {each.id for each in found if each.status is SandboxStatus.RUNNING}

    oldest_first = [each.id for each in reversed((await service.search_sandboxes()).items)]
    assert sorted(ids) == sorted(oldest_first)
    assert await running() == set(oldest_first[-most:]), "exact, also for many at once"
    assert await service.resume_sandbox(oldest_first[0])
    assert oldest_first[0] in await running()
    assert len(await running()) == most
    assert await service.pause_old_sandboxes(most) == []
    with pytest.raises(ValueError, match="max_num_sandboxes must be greater than 0"):
        await service.pause_old_sandboxes(0)


async def test_exposed_urls_variables_and_health(make: Make, session_folder: Path) -> None:
    shared = session_folder / "shared"
    shared.mkdir(exist_ok=True)
    (shared / "health").write_text("well")
    (shared / "alive").write_text("well")
    shared.chmod(0o755)
    specs = PresetSandboxSpecService(
        [
            SandboxSpecInfo(
                id="host", command=["python3", "-c", SERVER.format(8000)], working_dir="/srv/it", initial_env={"A": "1"}
            )
        ]
    )
    service = make(
        sandbox_spec_service=specs,
        mounts=[VolumeMount(host_path=str(shared), container_path="/srv/it/shared", mode="ro")],
        exposed_ports=[
            ExposedPort(name="AGENT_SERVER", container_port=8000),
            ExposedPort(name="VSCODE", container_port=8001),
        ],
        health_check_path="/shared/health",
        startup_grace_seconds=60,
        web_url="https://openhands.example",
        config=SandboxConfig(runtime_startup_env_vars={"B": "2"}),
    )
    started = await service.start_sandbox(sandbox_id="it", extra_env={"C": "3"})
    assert started.status in (SandboxStatus.STARTING, SandboxStatus.RUNNING)
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        info = await service.wait_for_sandbox_running("it", 30, 0.05)
        urls = {each.name: each.url for each in info.exposed_urls or ()}
        assert urls["AGENT_SERVER"].startswith("http://localhost:")
        assert urls["VSCODE"].endswith(f"/?tkn={info.session_api_key}&folder=%2Fsrv%2Fit")
        assert (await client.get(f"{urls['AGENT_SERVER']}/shared/alive")).text == "well"
    record = (await service._manager().list_sandboxes(name="it"))[0]
    sandbox = await service._manager().get_sandbox(record.id)
    seen = (await sandbox.exec("echo $A $B $C $VSCODE $OH_SESSION_API_KEYS_0 $OH_WEBHOOKS_0_BASE_URL")).stdout.split()
    assert seen == ["1", "2", "3", "8001", info.session_api_key, "https://openhands.example/api/v1/webhooks/it"]
    await sandbox.exec("pkill python3")
    while (await service._manager().describe(record.id)).command_end is None:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    with pytest.raises(SandboxError, match="its command has ended"):
        await service.wait_for_sandbox_running("it")


async def _resumed(service: ProcessSandboxService) -> tuple[SandboxInfo, Record]:
    """Start a sandbox whose ports are closed, because it was paused, and not opened again yet."""
    started = await service.start_sandbox()
    await service.pause_sandbox(started.id)
    await service.resume_sandbox(started.id)
    record = await service._record(started.id)
    assert record is not None
    return started, record


async def test_closing_waits_for_ports_that_are_being_opened(make: Make) -> None:
    service = make()
    started, record = await _resumed(service)
    looking = asyncio.ensure_future(service.get_sandbox(started.id))
    while not service._ports._opening.locked():  # noqa: ASYNC110
        await asyncio.sleep(0)
    await service._ports.close(record.id)
    info = await looking
    assert info is not None
    for each in info.exposed_urls or ():
        address = httpx.URL(each.url)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(address.host, address.port)
    assert await service.delete_sandbox(started.id)


@pytest.mark.parametrize("end", ["pause_sandbox", "delete_sandbox"])
async def test_who_looked_before_the_end_opens_no_port_after_it(make: Make, end: str) -> None:
    service = make()
    started, record = await _resumed(service)
    assert await getattr(service, end)(started.id)
    info = await service._info(record)  # the rest of a `get_sandbox`
    assert not info.exposed_urls
    assert service._ports._open == {}
    await service.delete_sandbox(started.id)


async def test_settings_have_their_effect(make: Make, session_folder: Path) -> None:
    shared = session_folder / "by-config"
    shared.mkdir(exist_ok=True)
    (shared / "f").write_text("theirs")
    shared.chmod(0o755)
    with socket.create_server(("127.0.0.2", 0)) as taken:
        free = taken.getsockname()[1]
    config = SandboxConfig(
        local_runtime_url="http://127.0.0.2",
        runtime_binding_address="127.0.0.2",
        vscode_port=free,
        volumes=f"{shared}:/data:ro",
        timeout=7,
        runtime_extra_deps="cat /data/f > dependency",
        user_id=4321,
    )
    service = make(config=config)
    infos = [await service.start_sandbox(), await service.start_sandbox()]
    editors = [next(each.url for each in info.exposed_urls or () if each.name == "VSCODE") for info in infos]
    assert editors[0].startswith(f"http://127.0.0.2:{free}/?tkn=")
    assert not editors[1].startswith(f"http://127.0.0.2:{free}/"), "the first has the port"
    record = (await service._manager().list_sandboxes(name=infos[0].id))[0]
    assert record.timeout_s == 7
    sandbox = await service._manager().get_sandbox(record.id)
    assert (await sandbox.exec("cat dependency; touch /data/g")).stdout == "theirs"
    assert not (shared / "g").exists()


async def test_one_that_never_gets_well_is_an_error_after_its_grace(make: Make) -> None:
    service = make(health_check_path="/health", startup_grace_seconds=0)
    info = await service.start_sandbox()
    assert (info.status, info.session_api_key, info.exposed_urls) == (SandboxStatus.ERROR, None, None)
    assert info.status_detail == "its agent server does not answer"


async def test_bad_input_and_failures_leave_nothing(make: Make) -> None:
    service = make(config=SandboxConfig(runtime_extra_deps="echo sorry >&2; exit 3"))
    for wrong in ("../x", "a b", "-", "x" * 200):
        with pytest.raises(ValueError, match="cannot be the id"):
            await service.start_sandbox(sandbox_id=wrong)
    with pytest.raises(ValueError, match="Sandbox Spec not found"):
        await service.start_sandbox("unknown")
    with pytest.raises(SandboxError, match="no-such:image"):
        await service.start_sandbox("no-such:image")
    with pytest.raises(SandboxError, match="sorry"):
        await service.start_sandbox("host")
    assert (await service.search_sandboxes()).items == []
    with pytest.raises(SandboxError, match="Sandbox not found: none"):
        await service.wait_for_sandbox_running("none")


async def test_what_happens_to_sandboxes_when_the_service_ends(session_settings: Settings, make: Make) -> None:
    async def life(**config: Any) -> SandboxInfo | None:
        chosen: dict[str, Any] = {"settings": session_settings, "sandbox_spec_service": SPECS, "user_id": "ann"}
        async with ProcessSandboxService(**chosen, config=SandboxConfig(**config)) as service:
            await service.start_sandbox(sandbox_id="it")
        async with ProcessSandboxService(**chosen) as service:
            found = await service.get_sandbox("it")
            await service.delete_sandbox("it")
            return found

    assert await life() is None
    kept = await life(keep_runtime_alive=True)
    assert kept is not None
    assert kept.status is SandboxStatus.PAUSED
    awake = await life(keep_runtime_alive=True, pause_closed_runtimes=False)
    assert awake is not None
    assert awake.status is SandboxStatus.RUNNING
    assert await life(keep_runtime_alive=True, rm_all_containers=True) is None


def test_the_environment_chooses_the_service() -> None:
    remote = {"SANDBOX_API_KEY": "k", "SANDBOX_REMOTE_RUNTIME_API_URL": "http://h:8420/runtime"}
    assert type(sandbox_service({})) is DockerSandboxService
    assert type(sandbox_service({"RUNTIME": "process"})) is ProcessSandboxService
    assert type(sandbox_service({"RUNTIME": "local"})) is ProcessSandboxService
    found = sandbox_service({"RUNTIME": "remote", **remote})
    assert isinstance(found, RemoteSandboxService)
    assert (found.api_url, found.api_key, found.max_num_sandboxes) == ("http://h:8420/runtime", "k", 10)
    chosen = sandbox_service(
        {
            "OH_SANDBOX_KIND": "DockerSandboxServiceInjector",
            "OH_SANDBOX_MAX_NUM_SANDBOXES": "7",
            "OH_SANDBOX_CONTAINER_URL_PATTERN": "https://h:{port}",
            "OH_SANDBOX_MOUNTS_0_HOST_PATH": "/a",
            "OH_SANDBOX_MOUNTS_0_CONTAINER_PATH": "/b",
            "OH_SANDBOX_EXPOSED_PORTS": '[{"name": "WEB", "container_port": 80}]',
            "WEB_HOST": "openhands.example",
            "SANDBOX_VOLUMES": "/c:/d:ro",
            "SANDBOX_CLOSE_DELAY": "60",
        }
    )
    assert isinstance(chosen, DockerSandboxService)
    assert (chosen.max_num_sandboxes, chosen.container_url_pattern) == (7, "https://h:{port}")
    assert chosen.mounts == [VolumeMount(host_path="/a", container_path="/b")]
    assert chosen.exposed_ports == [ExposedPort(name="WEB", container_port=80)]
    assert chosen.web_url == "https://openhands.example"
    assert (chosen.config.mounts[0].mode, chosen.config.close_delay) == ("ro", 60)
    for wrong in (
        {"RUNTIME": "kubernetes"},
        {"RUNTIME": "remote"},
        {"OH_SANDBOX_KIND": "Other"},
        {"OH_SANDBOX_COLOUR": "red"},
        {"OH_SANDBOX_MAX_NUM_SANDBOXES": "many"},
    ):
        with pytest.raises(SpecError):
            sandbox_service(wrong)

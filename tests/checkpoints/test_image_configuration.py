"""The user, work directory, entry point and labels of an image apply to sandboxes made from it, unless the spec says
otherwise."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

import pytest

from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.native_engine import NativeEngine
from atoll.errors import SandboxError, SpecError
from atoll.images import ImageConfig
from atoll.manager import SandboxManager
from atoll.model import ImageDefaults, SandboxSpec, resolved
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from checkpoints.conftest import MakeSandbox
from checkpoints.images import make_image

CONFIG = ImageConfig(
    env={"GREETING": "hello"}, entrypoint=("/bin/echo", "entry"), cmd=("point",), work_dir="/srv/app", user="bob:staff",
    labels={"made": "here"}, exposed_ports=("8000/tcp",),
)  # fmt: skip
WHO = "id -u; id -g; /bin/busybox pwd; echo $GREETING $HOME"
BOB = ["1000", "50", "/srv/app", "hello", "/home/bob"]


async def test_an_image_decides_what_the_spec_leaves_open(any_engine: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    await asyncio.to_thread(make_image, any_engine.layout.images, "app", CONFIG)
    async with sandbox_on(any_engine, image="app") as sandbox:
        assert (await sandbox.exec(WHO)).stdout.split() == BOB
        assert (await sandbox.run_command(WHO)).split() == BOB
        terminal = await sandbox.open_terminal(["/bin/id", "-u"])
        assert b"1000" in b"".join([piece async for piece in terminal])
        assert (await sandbox.exec("touch mine && id -u", user="root")).stdout == "0\n"
        assert (await sandbox.exec("touch here")).success  # the work directory was missing in the image
        info = await sandbox.info()
        image = any_engine.layout.images.store.get("docker.io/library/app:latest")
        assert info.image_defaults == ImageDefaults(
            digest=image.digest, user="bob:staff", work_dir="/srv/app", entrypoint=("/bin/echo", "entry"),
            cmd=("point",), exposed_ports=("8000/tcp",), labels={"made": "here"},
        )  # fmt: skip
        assert (info.user, info.work_dir) == ("bob:staff", "/srv/app")
        assert sandbox.spec.labels == {}

        other = await AsyncSandbox.attach(sandbox.id, engine=any_engine)
        assert (await other.exec(WHO)).stdout.split() == BOB
        assert await other.info() == info
        await other.detach()

        (fork,) = await sandbox.fork()
        await sandbox.snapshot("app")
        async with fork, sandbox_on(any_engine, image="snapshot:app") as third:
            for each in (fork, third):
                assert (await each.exec(WHO)).stdout.split() == BOB
                assert (await each.info()).image_defaults == info.image_defaults
        await sandbox.restart()
        assert (await sandbox.exec(WHO)).stdout.split() == BOB


async def test_the_spec_decides_first(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    make_image(native.layout.images, "app", CONFIG)
    own = {"user": "root", "work_dir": "/opt/own", "env": {"GREETING": "bye"}, "setup": ["id -u >/opt/own/who"]}
    async with sandbox_on(native, image="app", **own) as sandbox:
        assert (await sandbox.exec(WHO)).stdout.split() == ["0", "0", "/opt/own", "bye", "/root"]
        assert (await sandbox.exec("cat who")).stdout == "0\n"
    async with sandbox_on(native, image="app", user="1000", setup=["id -u >/srv/app/who"]) as sandbox:
        assert (await sandbox.exec("cat who")).stdout == "1000\n"


async def test_where_nothing_is_said_root_works_in_workspace(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    make_image(native.layout.images, "plain", ImageConfig(work_dir="/", user="0:0"))
    async with sandbox_on(native, image="plain") as sandbox:
        assert (await sandbox.exec(WHO)).stdout.split() == ["0", "0", "/workspace", "/root"]
        assert (await sandbox.info()).user is None
    async with sandbox_on(native) as sandbox:
        info = await sandbox.info()
        assert (info.user, info.work_dir, info.image_defaults) == (None, "/workspace", ImageDefaults())


async def test_a_manager_keeps_what_the_image_decides(native: LinuxEngine, settings: Settings) -> None:
    make_image(native.layout.images, "app", CONFIG)
    for _ in range(2):
        async with SandboxManager(engine="native", settings=settings, at_exit="keep") as manager:
            found = await manager.list_sandboxes()
            sandbox_id = found[0].id if found else await manager.create_sandbox(image="app")
            sandbox = await manager.get_sandbox(sandbox_id)
            assert (await sandbox.exec(WHO)).stdout.split() == BOB
            assert (await sandbox.info()).image_defaults.command == ("/bin/echo", "entry", "point")
    await native.delete((await native.list())[0])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"user": "ghost"}, "there is no user 'ghost'"),
        ({"user": "bob:ghosts"}, "there is no user 'bob:ghosts'"),
        ({"user": "bob\nroot"}, "is not the name of one"),
        ({"user": "x" * 10_000}, "is not the name of one"),
        ({"user": "a:b:c"}, "is not the name of one"),
        ({"work_dir": "/proc/self"}, "work directory '/proc/self' cannot be used"),
        ({"work_dir": "//proc"}, "cannot be used"),
        ({"work_dir": "/srv/../proc"}, "cannot be used"),
        ({"work_dir": "relative"}, "cannot be used"),
        ({"work_dir": "/a\0b"}, "cannot be used"),
        ({"work_dir": "/" + "x" * 5000}, "cannot be used"),
        ({"env": {f"V{number}": "x" * 90_000 for number in range(12)}}, "environment variables take"),
        ({"env": {"LONG": "x" * 200_000}}, "environment variables take"),
    ],
)
async def test_a_hostile_configuration_is_refused_in_words(
    config: dict[str, object], says: str, native: LinuxEngine, sandbox_on: MakeSandbox
) -> None:
    make_image(native.layout.images, "evil", dataclasses.replace(ImageConfig(), **config))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=says):
        await sandbox_on(native, image="evil").create()
    assert await native.list() == []
    assert native.layout.images.store.leases() == {}


def test_what_is_kept_with_every_sandbox_is_short() -> None:
    long = {f"label{number}": "x" * 1000 for number in range(100)}
    kept = ImageDefaults(labels=long, cmd=("x" * 100_000,), exposed_ports=("80/tcp",)).shortened()
    assert (kept.labels, kept.cmd, kept.exposed_ports) == ({}, (), ("80/tcp",))


def test_an_engine_with_one_user_ignores_that_of_an_image() -> None:
    assert resolved(SandboxSpec(), ImageDefaults(user="bob"), has_users=False).user is None
    assert resolved(SandboxSpec(user="ada"), ImageDefaults(user="bob")).user == "ada"


async def test_a_sandbox_of_an_earlier_version_is_read(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    make_image(native.layout.images, "app", CONFIG)
    sandbox = await sandbox_on(native, image="app").create()
    record = native.layout.records.read(sandbox.id)
    assert record is not None
    old = record.spec.model_dump(exclude={"user"}) | {"work_dir": "/workspace"}
    native.layout.records.write(record.model_copy(update={"base": None, "spec": SandboxSpec(**old)}))
    handle = (await NativeEngine(native.layout.settings).list())[0]
    assert (handle.spec.user, handle.spec.directory, handle.image_defaults) == (None, "/workspace", ImageDefaults())
    other = await AsyncSandbox.attach(sandbox.id, engine=native)
    assert (await other.exec("id -u")).stdout == "0\n"
    await other.cleanup()
    await sandbox.detach()


async def test_run_without_a_command_runs_what_the_image_says(
    native: LinuxEngine, settings: Settings, tmp_path: Path
) -> None:
    make_image(native.layout.images, "app", CONFIG)
    make_image(native.layout.images, "plain")

    async def run(*words: str) -> tuple[int | None, bytes]:
        variables = {
            "ATOLL_DATA_DIR": str(settings.data_dir),
            "ATOLL_RUN_DIR": str(settings.run_dir),
            "PATH": "/usr/bin",
        }
        program = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).with_name("atoll")), "run", "--engine", "native", *words),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=variables,
        )  # fmt: skip
        return (await program.wait()), (await program.communicate())[0]

    assert await run("--image", "app") == (0, b"entry point\n")
    assert await run("--image", "app", "--user", "root", "--", "id", "-u") == (0, b"0\n")
    code, told = await run("--image", "plain")
    assert code != 0
    assert b"does not say what to run" in told


async def test_an_error_in_the_agent_is_not_taken_for_a_missing_user(
    native: LinuxEngine, sandbox_on: MakeSandbox
) -> None:
    make_image(native.layout.images, "app", CONFIG)
    sandbox = sandbox_on(native, image="app", setup=["exit 3"])
    with pytest.raises(SandboxError, match="setup command 1 of 1"):
        await sandbox.create()

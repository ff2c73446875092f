"""Steps of builds: sandboxes start from them, they become images, and nothing partial of them is ever used."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.archive.work import Work
from atoll.engines.contract import Building, building, supporting
from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.native_engine import NativeEngine
from atoll.errors import ImageNotFoundError, SpecError, UnsupportedError
from atoll.images import Image, ImageConfig, Images, tree_view
from atoll.images.reference import parse
from atoll.model import Handle, SandboxSpec
from atoll.sandbox.options import spec_of
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.service.models.sandbox_request import SandboxSettings
from atoll.settings import Settings
from atoll.storage import PlainLayers
from checkpoints.conftest import MakeSandbox, emptied, engine_named
from checkpoints.images import files, make_image

CHANGES = """
set -e
rm /gone/file; rm -rf /keep; mkdir /keep; echo new >/keep/three; ln /keep/three /keep/four
mkdir -m 700 /home/bob/private; chown 1000:50 /home/bob/private; ln -s /etc /home/bob/link
echo x >/bin/su; chmod 4755 /bin/su; mkfifo /keep/pipe
dd if=/dev/zero of=/sparse bs=1 count=1 seek=50000000 2>/dev/null
touch -d @1000000000 /keep/three
"""


def key(text: str = "") -> str:
    return hashlib.sha256(text.encode() or os.urandom(8)).hexdigest()


async def step(engine: LinuxEngine, make: MakeSandbox, image: str, command: str, **spec: object) -> str:
    """Run a command in a new sandbox, and keep its files as a step."""
    found = key()
    spec_of_step = make(engine, **spec).spec.model_copy(update={"image": image})
    handle = await engine.create(f"b{found[:8]}", spec_of_step)
    try:
        sandbox = AsyncSandbox(spec_of_step, engine=engine)
        sandbox.access.adopt(handle)
        done = await sandbox.exec(command, user="root")
        assert done.success, done
        await engine.save_step(handle, found)
        await sandbox.detach()
    finally:
        await engine.delete(handle)
    return found


@pytest.fixture
async def small(any_engine: LinuxEngine) -> Image:
    return await asyncio.to_thread(make_image, any_engine.layout.images)


async def test_a_step_becomes_an_image_with_everything_that_was_done(
    any_engine: LinuxEngine, sandbox_on: MakeSandbox, small: Image
) -> None:
    assert isinstance(any_engine, Building)
    first = await step(any_engine, sandbox_on, "small", CHANGES)
    assert await any_engine.has_step(first)
    second = await step(any_engine, sandbox_on, f"step:{first}", "cat /keep/four >/keep/five; mkdir /gone/more")
    config = ImageConfig(env={"A": "1"}, labels={"made": "here"})
    image = await any_engine.commit_step(second, "team/built:1", config)
    assert (image.reference, image.config) == ("docker.io/team/built:1", config)
    assert [*image.layers[1:]] == [*small.layers]
    pipe = () if any_engine.name == "oci" else ("skipped the special file 'keep/pipe'",)  # gVisor keeps it to itself
    assert set(image.notes) >= {"stripped the set-id bits of 'bin/su'", *pipe}

    async with sandbox_on(any_engine, image="team/built:1") as sandbox:
        told = await sandbox.exec("ls /keep /gone; cat /keep/five; ls -ln /home/bob /bin/su; echo $A")
    assert told.stdout.split()[:7] == ["/gone:", "more", "/keep:", "five", "four", "three", "new"], told
    with tree_view.view(image.layers) as fd:
        three, four = (os.stat(f"keep/{name}", dir_fd=fd) for name in ("three", "four"))
        assert (three.st_ino, three.st_nlink, int(three.st_mtime)) == (four.st_ino, 2, 1_000_000_000)
        sparse = os.stat("sparse", dir_fd=fd)
        assert (sparse.st_size, sparse.st_blocks < 1000) == (50_000_001, True)
        assert stat.S_IMODE(os.stat("bin/su", dir_fd=fd).st_mode) == 0o755
        private = os.stat("home/bob/private", dir_fd=fd)
        assert (private.st_uid, private.st_gid, stat.S_IMODE(private.st_mode)) == (1000, 50, 0o700)
    images = any_engine.layout.images.store
    assert (await asyncio.to_thread(images.verify, image.reference, Work())).digest == image.digest


async def test_the_view_of_a_step_is_what_its_image_contains(
    native: LinuxEngine, sandbox_on: MakeSandbox, settings: Settings
) -> None:
    make_image(native.layout.images)
    found = await step(native, sandbox_on, "small", CHANGES.replace("mkfifo /keep/pipe", ":"), work_dir="/")
    with native.step_view(found) as fd:
        before = files(Path(f"/proc/self/fd/{fd}/."))
    image = await native.commit_step(found, "built", ImageConfig())
    with tree_view.view(image.layers) as fd:
        after = files(Path(f"/proc/self/fd/{fd}/."))
    for path in ("root", "etc/resolv.conf"):  # made at the start of the sandbox, because the image has none
        assert before.pop(path)
        assert path not in after
    assert before["bin/su"][0] & 0o7777 == 0o4755
    assert {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)} == {"bin/su"}


async def test_a_step_that_changes_nothing_adds_no_layer(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    small = make_image(native.layout.images)
    found = await step(native, sandbox_on, "small", "true", work_dir="/")
    found = await step(native, sandbox_on, f"step:{found}", "touch /keep/x; rm /keep/x", work_dir="/")
    image = await native.commit_step(found, "same", ImageConfig(env={"B": "2"}), owner="ada")
    assert (image.digest, image.layers, image.owner) == (small.digest, small.layers, "ada")
    assert native.layout.images.store.find(image.reference) is None


async def test_what_a_build_mounts_leaves_no_trace_in_the_image(
    native: LinuxEngine, sandbox_on: MakeSandbox, tmp_path: Path
) -> None:
    small = make_image(native.layout.images)
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 1000, 1000)
    (tmp_path / "secret").write_text("secret")
    tmp_path.chmod(0o755)
    volumes = [f"{tmp_path}/cache:/root/.cache/pip", f"{tmp_path}/secret:/run/secrets/token:ro"]
    found = await step(native, sandbox_on, "small", "cat /run/secrets/token", work_dir="/", volumes=volumes)
    found = await step(native, sandbox_on, f"step:{found}", "true", work_dir="/")
    assert (await native.commit_step(found, "clean", ImageConfig())).digest == small.digest


async def test_an_identity_is_not_changed_between_steps(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    make_image(native.layout.images)
    found = await step(native, sandbox_on, "small", "mkdir -p /etc/ssh; echo key >/etc/ssh/ssh_host_rsa_key")
    found = await step(native, sandbox_on, f"step:{found}", "cat /etc/ssh/ssh_host_rsa_key")
    with native.step_view(found) as fd, tree_view.Root(fd) as root:
        assert root.read("etc/machine-id", 99) == b"0" * 32 + b"\n"


async def test_deep_stacks_run_can_be_saved_and_compared(
    any_engine: LinuxEngine, sandbox_on: MakeSandbox, small: Image
) -> None:
    image, expected = "small", {"/keep/one", "/keep/two"}
    for number in range(3):
        found = await step(any_engine, sandbox_on, image, f"rm -f /keep/one; echo {number} >/keep/n{number}")
        image, expected = f"built{number}", expected - {"/keep/one"} | {f"/keep/n{number}"}
        await any_engine.commit_step(found, image, ImageConfig())
    async with sandbox_on(any_engine, image=image) as sandbox:
        assert set((await sandbox.exec("echo /keep/*")).stdout.split()) == expected
        await sandbox.checkpoint("before")
        await sandbox.exec("rm /keep/n0; echo x >/keep/n1; mkdir /gone/more")
        changes = {(change.path, change.kind.value) for change in await sandbox.diff("before")}
        assert changes >= {("/keep/n0", "removed"), ("/keep/n1", "changed"), ("/gone/more", "added")}
        assert not [path for path, _ in changes if path == "/keep/one"]
        await sandbox.snapshot("deep")
        await sandbox.rollback("before")
        assert set((await sandbox.exec("echo /keep/*")).stdout.split()) == expected
    async with sandbox_on(any_engine, image="snapshot:deep") as sandbox:
        assert (await sandbox.exec("cat /keep/n1")).stdout == "x\n"


async def test_steps_are_no_checkpoints_and_outlive_their_sandbox(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    make_image(native.layout.images)
    async with sandbox_on(native, image="small") as sandbox:
        found = key()
        await native.save_step(sandbox.access.handle(), found)
        await sandbox.exec("echo later >/later")
        await native.save_step(sandbox.access.handle(), found)  # the first one stays
        assert await sandbox.checkpoints() == []
    assert await native.snapshots() == []
    await native.gc()
    with native.step_view(found) as fd:
        assert "later" not in os.listdir(fd)
    assert await native.prune_steps() > 0
    assert not await native.has_step(found)
    with pytest.raises(ImageNotFoundError, match="there is no step"):
        await native.create("x", SandboxSpec(image=f"step:{found}"))


async def test_a_step_keeps_its_image_and_a_sandbox_keeps_its_step(
    native: LinuxEngine, sandbox_on: MakeSandbox
) -> None:
    images = native.layout.images
    small = make_image(images)
    found = await step(native, sandbox_on, "small", "echo kept >/kept")
    with pytest.raises(Exception, match="is used by"):
        images.store.remove(small.reference, Work())
    handle = await native.create("user", SandboxSpec(image=f"step:{found}"))
    sandbox = AsyncSandbox(engine=native)
    sandbox.access.adopt(handle)
    assert await native.prune_steps() == 0
    assert await native.prune_steps(unused_s=3600.0) == 0
    await sandbox.exec("rm /kept")
    await sandbox.restart()
    assert (await sandbox.exec("cat /kept")).stdout == "kept\n"
    await sandbox.cleanup()
    assert await native.prune_steps(unused_s=3600.0) == 0
    assert await native.prune_steps(1 << 40) == 0
    assert await native.prune_steps() > 0
    await native.gc()
    images.store.remove(small.reference, Work())
    assert images.store.ls() == []


async def test_the_least_recently_used_steps_are_removed_first(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    make_image(native.layout.images)
    command = "dd if=/dev/zero of=/big bs=1000000 count=3 2>/dev/null; echo $RANDOM >>/big"
    steps = [await step(native, sandbox_on, "small", command) for _ in range(3)]
    directory = native.layout.data / "steps"
    for age, found in zip((300, 100, 200), steps, strict=True):
        os.utime(directory / f"{found}.step", (time.time() - age,) * 2, follow_symlinks=False)
    assert await native.prune_steps(7_000_000) > 0
    assert [await native.has_step(found) for found in steps] == [False, True, True]
    os.utime(directory / f"{steps[2]}.step", (time.time() - 500,) * 2, follow_symlinks=False)
    await native.prune_steps(4_000_000, unused_s=50.0)
    assert [await native.has_step(found) for found in steps] == [False, True, False]


async def test_a_flood_of_new_steps_is_removed_although_they_are_new(
    native: LinuxEngine, sandbox_on: MakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_image(native.layout.images)
    command = "dd if=/dev/zero of=/big bs=1000000 count=3 2>/dev/null; echo $RANDOM >>/big"
    steps = [await step(native, sandbox_on, "small", command) for _ in range(3)]
    allowed = replace(native.layout.settings, step_cache_bytes=3_500_000)
    monkeypatch.setattr(native.layout, "settings", allowed)
    assert await native.prune_steps(None, unused_s=3600.0) > 0  # beyond twice what is allowed, their age does not count
    assert [await native.has_step(found) for found in steps].count(True) == 2
    assert await native.prune_steps(None, unused_s=3600.0) == 0


@pytest.mark.parametrize("image", ["step:" + "0" * 64, "step:x"])
def test_users_cannot_name_a_step(image: str) -> None:
    for refused in (lambda: parse(image), lambda: spec_of({"image": image}), lambda: SandboxSettings(image=image)):
        with pytest.raises(ValueError, match="step of a build"):
            refused()


@pytest.mark.parametrize("bad", ["", "x", "A" * 64, "../" * 21 + "x", "0" * 63, "0" * 65, "0" * 64 + "\n"])
async def test_a_key_that_is_none_is_refused(native: LinuxEngine, bad: str) -> None:
    for call in (native.has_step(bad), native.commit_step(bad, "x", ImageConfig())):
        with pytest.raises(SpecError, match="is not the key of a step"):
            await call
    with pytest.raises(SpecError):
        await native.create("x", SandboxSpec(image=f"step:{bad}"))


async def test_a_sandbox_of_the_host_cannot_become_an_image(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(native) as sandbox:
        with pytest.raises(SpecError, match="host"):
            await native.save_step(sandbox.access.handle(), key())
    assert native.layout.layers.list_saved() == []


async def test_where_states_cannot_be_saved_the_error_says_what_is_needed(settings: Settings) -> None:
    engine = engine_named("native", settings)
    engine.layout.layers = PlainLayers(settings.data_dir / "plain")
    assert await supporting(engine, Building) is None
    with pytest.raises(UnsupportedError, match="cannot build images here"):
        await building(engine)
    with pytest.raises(UnsupportedError, match="cannot be saved") as caught:
        await engine.save_step(Handle("native", "x", SandboxSpec(), 0.0), key())
    assert "btrfs-progs" in (caught.value.hint or "")
    assert not await engine.has_step(key())
    await engine.aclose()


_KILLED = """
import asyncio, os, signal, sys
from dataclasses import replace
from pathlib import Path
from atoll.engines.linux.native_engine import NativeEngine
from atoll.engines.linux.states import saved_state, steps
from atoll.images import ImageConfig
from atoll.images.image_store import Store
from atoll.settings import Settings
from atoll.storage import BtrfsLayers

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

async def main(what, sandbox_id, key):
    engine = NativeEngine(Settings(Path(sys.argv[1]), Path(sys.argv[2])))
    handle = next(each for each in await engine.list() if each.sandbox_id == sandbox_id)
    if what == "save":
        await engine.save_step(handle, key)
    else:
        await engine.commit_step(key, "built", ImageConfig())

POINTS = {  # each is a function before which the process dies
    "save": [(BtrfsLayers, "_keep"), (Store, "lease"), (saved_state.SavedStates, "write"), (steps.Steps, "_link")],
    "commit": [(steps, "copy_layer"), (Store, "_prepared"), (Store, "_name")],
}
for place, name in POINTS[sys.argv[3]]:
    child = os.fork()
    if not child:
        setattr(place, name, die)
        asyncio.run(main(sys.argv[3], sys.argv[4], sys.argv[5]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, name
"""


async def test_killed_while_a_step_is_saved_or_becomes_an_image(settings: Settings, sandbox_on: MakeSandbox) -> None:
    engine = engine_named("native", settings)
    small = make_image(engine.layout.images)
    sandbox = await sandbox_on(engine, image="small").create()
    await sandbox.exec("echo kept >/kept; rm /gone/file")
    found, store = key(), engine.layout.images.store
    await sandbox.access.let_go()

    def killed(what: str) -> None:
        argv = [str(settings.data_dir), str(settings.run_dir), what, sandbox.id, found]
        subprocess.run([sys.executable, "-c", _KILLED, *argv], check=True, timeout=60)

    await asyncio.to_thread(killed, "save")
    assert not await engine.has_step(found)
    await engine.gc()
    assert engine.layout.layers.list_saved() == []
    assert list((engine.layout.data / "steps").iterdir()) == []
    assert set(store.leases()) == {sandbox.id}
    await engine.save_step(sandbox.access.handle(), found)
    await asyncio.to_thread(killed, "commit")
    assert store.ls() == [small]
    store.gc(Work())
    assert len(list((store.directory / "roots").iterdir())) == 1
    assert list((store.directory / "tmp").iterdir()) == []
    image = await engine.commit_step(found, "built", ImageConfig())
    with tree_view.view(image.layers) as fd:
        assert os.listdir(os.open("gone", os.O_RDONLY, dir_fd=fd)) == []
    await sandbox.cleanup()
    assert await engine.prune_steps() > 0
    await emptied(NativeEngine(settings))
    await engine.aclose()


async def test_the_engine_says_whether_it_can_build(native: LinuxEngine) -> None:
    assert await building(native) is native
    images = Images(native.layout.settings.data_dir)
    make_image(images)
    with images.view("small") as fd:
        assert "keep" in os.listdir(fd)

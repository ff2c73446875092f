"""Named volumes: they outlive sandboxes, are shared at once, belong to one owner, and are never removed in use."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from atoll.conformance.bench import Bench
from atoll.conformance.check import SkippedError, check, must, must_equal, refusal
from atoll.engines.named_volumes import NamedVolumes
from atoll.errors import ConflictError, UnsupportedError, VolumeNotFoundError
from atoll.model import Capability
from atoll.model.spec import OWNER_LABEL

_NEEDS = {Capability.NAMED_VOLUMES}


@asynccontextmanager
async def _named(bench: Bench) -> AsyncIterator[tuple[NamedVolumes, str]]:
    """Yield the engine and a name that no volume has. What has it at the end is removed."""
    engine = bench.engine
    if not isinstance(engine, NamedVolumes):
        raise AssertionError("the engine declares named volumes, but has no methods for them")
    name = f"conformance-{secrets.token_hex(4)}"
    try:
        yield engine, name
    finally:
        await engine.remove_volume(name)


@check(needs=_NEEDS)
async def a_named_volume_outlives_its_sandboxes(bench: Bench) -> None:
    """The next sandbox finds the files with their owners and modes; it is made on first use and goes when removed."""
    async with _named(bench) as (engine, name):
        wanted = [{"name": name, "path": "/named"}]
        async with bench.sandbox(volumes=wanted) as sandbox:
            made = await sandbox.exec("echo kept >/named/file && chmod 640 /named/file && mkdir /named/dir", timeout=20)
            must(made.success, f"a new volume cannot be written to: {made.stderr}")
        must_equal([each.name for each in await engine.volumes() if each.name == name], [name], "the list of volumes")
        async with bench.sandbox(volumes=wanted) as sandbox:
            shown = await sandbox.exec("cat /named/file; stat -c '%a %u' /named/file; ls /named", timeout=20)
            must_equal(shown.stdout, "kept\n640 0\ndir\nfile\n", "what the next sandbox finds")
        await engine.remove_volume(name)
        await refusal(engine.volume(name), VolumeNotFoundError, "a volume that was removed")
        async with bench.sandbox(volumes=wanted) as sandbox:
            must_equal((await sandbox.exec("ls /named", timeout=20)).stdout, "", "a volume made anew")


@check(needs={*_NEEDS, Capability.USERS})
async def ids_in_a_named_volume_are_those_inside(bench: Bench) -> None:
    """A file of user 1000 in one sandbox is a file of user 1000 in the next."""
    async with _named(bench) as (_, name):
        wanted = [{"name": name, "path": "/named"}]
        async with bench.sandbox(volumes=wanted) as sandbox:
            made = await sandbox.exec("touch /named/own && chown 1000:1001 /named/own", timeout=20)
            must(made.success, f"root inside cannot give a file away: {made.stderr}")
        async with bench.sandbox(volumes=wanted) as sandbox:
            found = await sandbox.exec("stat -c %u:%g /named/own", timeout=20)
            must_equal(found.stdout, "1000:1001\n", "its owner in the next sandbox")


@check(needs=_NEEDS)
async def sandboxes_share_a_named_volume_at_once(bench: Bench) -> None:
    """What one writes the others see; one that mounts it read-only cannot change it."""
    async with (
        _named(bench) as (_, name),
        bench.sandbox(volumes=[{"name": name, "path": "/named"}]) as one,
        bench.sandbox(volumes=[{"name": name, "path": "/other"}]) as other,
        bench.sandbox(volumes=[{"name": name, "path": "/named", "read_only": True}]) as reader,
    ):
        for writer, path in ((one, "/named/a"), (other, "/other/b")):
            must((await writer.exec(f"echo {path} >{path}", timeout=20)).success, f"{path} cannot be written")
        seen = await reader.exec("cat /named/a /named/b", timeout=20)
        must_equal(seen.stdout, "/named/a\n/other/b\n", "what the third one sees")
        for command in ("echo x >/named/c", "rm /named/a", "chmod 0 /named/a", "mkdir /named/d"):
            must(not (await reader.exec(command, timeout=20)).success, f"{command!r} works on a read-only volume")


@check(needs=_NEEDS)
async def a_named_volume_in_use_is_not_removed(bench: Bench) -> None:
    """ConflictError that names the sandboxes, as long as they exist; nothing of the volume is touched."""
    async with _named(bench) as (engine, name):
        async with bench.sandbox(volumes=[{"name": name, "path": "/named"}]) as sandbox:
            await sandbox.exec("echo kept >/named/file", timeout=20)
            error = await refusal(engine.remove_volume(name), ConflictError, "removing a volume in use")
            must(sandbox.id in error.reason and error.hint, f"the error does not name the sandbox: {error.reason}")
            must_equal((await engine.volume(name)).users, (sandbox.id,), "the users of the volume")
            must_equal((await sandbox.exec("cat /named/file", timeout=20)).stdout, "kept\n", "the file")
        must_equal((await engine.volume(name)).users, (), "the users of the volume afterwards")
        await engine.remove_volume(name)
        await engine.remove_volume(name)


@check(needs=_NEEDS)
async def volumes_of_another_owner_do_not_exist(bench: Bench) -> None:
    """The same name means another volume for each owner, and nobody's list has those of others."""
    async with _named(bench) as (engine, name):
        wanted = [{"name": name, "path": "/named"}]
        owners = ("", f"{name}-one", f"{name}-two")
        try:
            for owner in owners:
                labels = {OWNER_LABEL: owner} if owner else {}
                async with bench.sandbox(volumes=wanted, labels=labels) as sandbox:
                    must_equal((await sandbox.exec("ls /named", timeout=20)).stdout, "", f"the volume of {owner!r}")
                    await sandbox.exec("echo secret >/named/file", timeout=20)
            for owner in owners[1:]:
                found = [each.name for each in await engine.volumes(owner=owner)]
                must_equal(found, [name], f"the volumes of {owner!r}")
            await refusal(engine.volume(name, owner=f"{name}-three"), VolumeNotFoundError, "the volume of another")
        finally:
            for owner in owners:
                await engine.remove_volume(name, owner=owner)


@check(needs=_NEEDS)
async def a_name_is_taken_once(bench: Bench) -> None:
    """A volume that exists is not made again and not emptied."""
    async with _named(bench) as (engine, name):
        await engine.create_volume(name)
        async with bench.sandbox(volumes=[{"name": name, "path": "/named"}]) as sandbox:
            await sandbox.exec("echo kept >/named/file", timeout=20)
            await refusal(engine.create_volume(name), ConflictError, "a second volume of that name")
            must_equal((await sandbox.exec("cat /named/file", timeout=20)).stdout, "kept\n", "its file")


@check(needs=_NEEDS)
async def the_size_of_a_named_volume_is_enforced_or_refused(bench: Bench) -> None:
    """Writing more fails with "no space" in every sandbox that mounts it, and removing gives the space back."""
    async with _named(bench) as (engine, name):
        try:
            await engine.create_volume(name, size_bytes=32 << 20)
        except UnsupportedError as error:
            must("size" in error.reason and error.hint, f"the error does not say what is unsupported: {error.reason}")
            return
        async with bench.sandbox(volumes=[{"name": name, "path": "/named"}]) as sandbox:
            result = await sandbox.exec("head -c 64m /dev/zero >/named/big && sync /named/big", timeout=50)
            must(not result.success, "64 MiB were written where 32 MiB are allowed")
            must(
                (await sandbox.exec("head -c 8m /dev/zero >own && sync own", timeout=20)).success,
                "its own disk is full",
            )
            await sandbox.remove("/named/big")
            await sandbox.exec("sync", timeout=20)


@check(needs={*_NEEDS, Capability.CHECKPOINTS})
async def a_named_volume_is_not_part_of_saved_states(bench: Bench) -> None:
    """A rollback leaves it as it is, and a fork mounts the same one."""
    async with _named(bench) as (_, name), bench.sandbox(volumes=[{"name": name, "path": "/named"}]) as sandbox:
        await sandbox.exec("echo old >/named/file; echo old >own", timeout=20)
        saved = await sandbox.checkpoint()
        await sandbox.exec("echo new >/named/file; echo new >own", timeout=20)
        await sandbox.rollback(saved.id)
        found = await sandbox.exec("cat /named/file own", timeout=20)
        must_equal(found.stdout, "new\nold\n", "the files after a rollback")
        (fork,) = await sandbox.fork()
        async with fork:
            await fork.exec("echo fork >/named/file", timeout=20)
        must_equal((await sandbox.exec("cat /named/file", timeout=20)).stdout, "fork\n", "what its fork wrote")


@check(needs=_NEEDS)
async def a_copy_of_a_named_volume_is_of_one_moment(bench: Bench) -> None:
    """A snapshot does not change any more and is mounted read-only; a restored volume has its content."""
    async with _named(bench) as (engine, name):
        copy = f"{name}-copy"
        async with bench.sandbox(volumes=[{"name": name, "path": "/named"}]) as sandbox:
            await sandbox.exec("echo old >/named/file", timeout=20)
            try:
                await engine.copy_volume(name, copy, read_only=True)
            except UnsupportedError as error:
                raise SkippedError(error.reason) from error
            await sandbox.exec("echo new >/named/file; echo x >/named/more", timeout=20)
            await refusal(engine.restore_volume(name, copy), ConflictError, "restoring a volume in use")
        try:
            unmade = bench.unmade(volumes=[{"name": copy, "path": "/copy"}])
            await refusal(unmade.create(), ValueError, "a snapshot that is mounted to be written to")
            async with bench.sandbox(volumes=[{"name": copy, "path": "/copy", "read_only": True}]) as sandbox:
                must_equal((await sandbox.exec("cat /copy/*", timeout=20)).stdout, "old\n", "the snapshot")
            await engine.restore_volume(name, copy)
            async with bench.sandbox(volumes=[{"name": name, "path": "/named"}]) as sandbox:
                must_equal((await sandbox.exec("cat /named/*", timeout=20)).stdout, "old\n", "the restored volume")
                must((await sandbox.exec("echo y >/named/file", timeout=20)).success, "it cannot be written to")
        finally:
            await engine.remove_volume(copy)

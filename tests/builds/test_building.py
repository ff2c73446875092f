"""An image is built step by step; what failed or was killed leaves nothing, and what is known is not done again."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from atoll.builds import Builder, BuildRequest
from atoll.builds.bases import Bases
from atoll.errors import BuildError, DockerfileError, SandboxError, SpecError
from atoll.model import Limits
from atoll.model.network_policy import Rule
from atoll.sandbox.sandbox import AsyncSandbox
from builds import small_root
from builds.small_root import BASE, Workshop

FIVE_STEPS = """
ARG VERSION=1
WORKDIR /work
RUN echo $VERSION > version
COPY file /copied/
LABEL kept=yes
RUN cat version /copied/file > both
"""


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


async def sandboxes_made(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, dockerfile: str, **options: Any) -> int:
    made: list[str] = []
    create = workshop.engine.create

    async def counted(sandbox_id: str, spec: Any) -> Any:
        made.append(sandbox_id)
        return await create(sandbox_id, spec)

    monkeypatch.setattr(workshop.engine, "create", counted)
    await workshop.build(dockerfile, **options)
    monkeypatch.undo()
    return len(made)


async def test_what_is_known_is_not_done_again(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(workshop.context / "file", "content\n")
    first = await workshop.build(FIVE_STEPS, name="five")
    assert (first.steps, first.cached) == (4, 0)
    assert await workshop.look(first, "cat /work/both") == "1\ncontent\n"
    os.utime(file, (1, 1))
    assert await sandboxes_made(workshop, monkeypatch, FIVE_STEPS, name="five") == 0
    assert len(workshop.of_kind("cached")) == 4
    assert (await workshop.images.get("five")).digest == first.image.digest
    labelled = await workshop.build(FIVE_STEPS.replace("kept=yes", "kept=no"), name="five")
    assert (labelled.cached, labelled.image.config.labels) == (4, {"kept": "no"})
    file.chmod(0o600)
    assert (await workshop.build(FIVE_STEPS)).cached == 2
    write(file, "more\n")
    changed = await workshop.build(FIVE_STEPS, args={"VERSION": "2"})
    assert changed.cached == 1  # WORKDIR does not see the argument
    assert await workshop.look(changed, "cat /work/both") == "2\nmore\n"


async def test_a_build_without_the_cache_renews_it(workshop: Workshop) -> None:
    steps = "RUN cat /proc/sys/kernel/random/uuid > /random\nRUN true"
    old = await workshop.build(steps)
    new = await workshop.build(steps, no_cache=True)
    later = await workshop.build(steps)
    assert (new.cached, later.cached) == (0, 2)
    assert old.image.digest != new.image.digest == later.image.digest


async def test_owners_share_no_steps_and_no_caches(workshop: Workshop) -> None:
    """One of them could otherwise put something into what the other builds."""
    steps = "RUN --mount=type=cache,target=/cache mktemp -p /cache >/dev/null; ls /cache | wc -l"
    for owner in ("ann", "bob"):
        built = await workshop.build(steps, owner=owner, name="mine")
        assert (built.cached, workshop.output) == (0, "1\n")
    await workshop.build(steps, owner="ann", no_cache=True)
    assert workshop.output == "2\n"


async def test_stages_that_are_not_needed_are_not_made(workshop: Workshop) -> None:
    dockerfile = f"""FROM {BASE} AS one
RUN echo one > /one
FROM {BASE} AS unused
RUN false
FROM scratch
COPY --from=one /one /two/
CMD ["x"]
"""
    built = await workshop.build(dockerfile)
    assert built.image.config.cmd == ("x",)
    assert [path.name for path in built.image.layers[0].joinpath("two").iterdir()] == ["one"]
    target = await workshop.build(dockerfile, target="one")
    assert (target.cached, target.steps) == (1, 1)
    with pytest.raises(BuildError, match="exit code 1"):
        await workshop.build(dockerfile, target="unused")


async def test_a_build_that_changes_nothing_names_the_image_again(workshop: Workshop) -> None:
    built = await workshop.build('ENV A=b\nCMD ["x"]', name="same", labels={"given": "yes"})
    assert built.image.digest == (await workshop.images.get(BASE)).digest
    assert (built.image.config.env["A"], built.image.config.labels) == ("b", {"given": "yes"})


# --- RUN --------------------------------------------------------------------------------------------------------------


async def test_a_failure_says_which_step_and_why(workshop: Workshop) -> None:
    with pytest.raises(BuildError) as failed:
        await workshop.build("RUN true\nRUN echo last words >&2; exit 7", keep_failed=True)
    error = failed.value
    assert (error.step, error.place, error.exit_code, error.cause) == (2, "Dockerfile:3", 7, "exit")
    assert (error.instruction, error.output) == ("RUN echo last words >&2; exit 7", "last words\n")
    assert "Dockerfile:3: the command failed with exit code 7" in str(error)
    assert workshop.of_kind("failed") == [str(error)]
    kept = await AsyncSandbox.attach(error.sandbox_id, engine=workshop.engine)
    await kept.cleanup()


@pytest.mark.parametrize(
    ("command", "limits", "cause"),
    [
        ("dd if=/dev/zero of=/big bs=1M", Limits(disk_bytes=32 << 20), "disk_full"),
        ("b() { b | b & b; }; b", Limits(pids=32), "pids"),
        ("while :; do :; done", Limits(), "timeout"),
        ("tail /dev/zero", Limits(memory_bytes=32 << 20), "out_of_memory"),
    ],
)
async def test_a_bomb_ends_with_its_cause(workshop: Workshop, command: str, limits: Limits, cause: str) -> None:
    with pytest.raises(BuildError) as failed:
        await workshop.build(f"RUN {command}", limits=limits, step_timeout_s=1.0 if cause == "timeout" else None)
    assert failed.value.cause == cause
    assert failed.value.hint is not None


async def test_a_build_that_takes_too_long_names_its_step(workshop: Workshop) -> None:
    with pytest.raises(BuildError, match="Dockerfile:2") as failed:
        await workshop.build("RUN sleep 1000", timeout_s=0.5)
    assert failed.value.cause == "timeout"


async def test_endless_output_is_bounded(workshop: Workshop) -> None:
    await workshop.build("RUN yes | tr -d '\\n' | head -c 5000000")
    assert 2 << 20 <= len(workshop.output) <= (2 << 20) + 200
    assert "left out" in workshop.output


async def test_nothing_of_a_command_runs_on_in_the_next_step(workshop: Workshop) -> None:
    built = await workshop.build("RUN (while :; do echo x >> /log; done) & sleep 0.05\nRUN cp /log /at; sleep 0.05")
    assert await workshop.look(built, "cmp /log /at && echo same") == "same\n"


async def test_a_secret_stays_nowhere(workshop: Workshop) -> None:
    steps = """RUN --mount=type=secret,id=key,uid=1000 --mount=type=secret,id=key,env=KEY \
stat -c '%a %u' /run/secrets/key; cat /run/secrets/key; echo " $KEY"; ps | grep -c '[d]o-not' || true
RUN ls -A /run; echo "none: $KEY"
"""
    built = await workshop.build(steps, secrets={"key": b"do-not-tell"})
    assert workshop.output == "400 1000\n*** ***\n0\nnone: \n"
    assert "do-not-tell" not in repr(workshop.events)
    assert await workshop.look(built, "grep -r do-not-tell /run /etc /tmp | wc -l; ls -A /run") == "0\n"
    assert (await workshop.build(steps, secrets={"key": b"another"})).cached == 2
    with pytest.raises(BuildError, match="was not given"):
        await workshop.build("RUN --mount=type=secret,id=other,required=true true")


async def test_what_is_mounted_is_there_for_one_step(workshop: Workshop) -> None:
    write(workshop.context / "dir" / "file", "from the context\n")
    steps = """RUN mkdir /bin/data; echo kept > /etc/motd
RUN --mount=type=bind,source=dir,target=/bound --mount=type=tmpfs,target=/empty \
--mount=type=bind,source=dir/file,target=/etc/motd --mount=type=cache,target=/cache,mode=0700,uid=1000 \
cat /bound/file /etc/motd; touch /bound/new 2>&1; touch /empty/x; echo n >> /cache/n; stat -c '%a %u' /cache; \
wc -l </cache/n
RUN ls -A /bound /empty /cache; cat /etc/motd
"""
    built = await workshop.build(steps)
    read_only = "touch: /bound/new: Read-only file system\n"
    assert workshop.output.startswith(f"from the context\nfrom the context\n{read_only}700 1000\n1\n")
    assert workshop.output.endswith("kept\n")
    assert await workshop.look(built, "ls -d /bound /empty /cache 2>/dev/null") == ""
    await workshop.build(steps, no_cache=True)
    assert "700 1000\n2\n" in workshop.output


@dataclasses.dataclass(frozen=True)
class Mirrors:
    variables: Mapping[str, str]
    files: Mapping[str, bytes]
    secrets: tuple[str, ...] = ("password",)
    rules: tuple[Rule, ...] = (Rule(domain="mirror.test"),)
    notes: tuple[str, ...] = ()


async def test_configuration_of_mirrors_is_there_only_for_commands(workshop: Workshop) -> None:
    mirrors = Mirrors({"INDEX": "there:password@"}, {"/etc/new/list": b"new", "/etc/group": b"other"})
    steps = "RUN echo $INDEX; cat /etc/new/list /etc/group\nCOPY --chown=user:staff <<X /x\nX"
    built = await workshop.build(steps, mirrors=mirrors)
    assert workshop.output == "there:***@\nnewother"
    assert await workshop.look(built, "ls /etc/new 2>/dev/null; grep -c staff /etc/group; stat -c %g /x") == "1\n50\n"
    assert "INDEX" not in built.image.config.env


@pytest.mark.parametrize("setting", ["", "mirror.test"])
async def test_the_setting_decides_about_mirrors(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    asked: list[object] = []

    def of_machine(choice: object, *, suite: str) -> Mirrors:
        asked.append(choice)
        return Mirrors({"INDEX": "there"}, {})

    monkeypatch.setattr("atoll.builds.mirrors.Mirrors.of_machine", of_machine)
    monkeypatch.setenv("ATOLL_BUILD_MIRRORS", setting)
    await workshop.build("RUN echo index: $INDEX", no_cache=True)
    expected = {"true": [True], "mirror.test": [("mirror.test",)]}.get(setting, [])
    assert (asked, workshop.output) == (expected, "index: there\n" if expected else "index:\n")


# --- COPY and ADD -----------------------------------------------------------------------------------------------------


async def test_no_source_is_outside_of_the_context(workshop: Workshop, tmp_path: Path) -> None:
    write(tmp_path / "outside", "no\n")
    (workshop.context / "link").symlink_to("../outside")
    (workshop.context / "dir").symlink_to("/etc")
    for source in ("link", "dir", "dir/passwd", "../outside", "/etc/passwd"):
        with pytest.raises(BuildError, match="there is no"):
            await workshop.build(f"COPY {source} /there")
    built = await workshop.build("COPY . /all/")
    assert await workshop.look(built, "readlink /all/link; readlink /all/dir") == "../outside\n/etc\n"


async def test_devices_pipes_and_sockets_are_left_out(workshop: Workshop) -> None:
    import socket

    write(workshop.context / "file", "x")
    os.mkfifo(workshop.context / "pipe")
    os.mknod(workshop.context / "device", 0o666 | 0o020000, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(workshop.context / "socket"))
    built = await workshop.build("COPY . /all/")
    assert await workshop.look(built, "ls -A /all") == "file\n"
    assert len(workshop.of_kind("warning")) == 3
    with pytest.raises(BuildError, match="neither a file nor a directory"):
        await workshop.build("COPY pipe /pipe")


async def test_what_copies_too_much_is_refused_before_anything_runs(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.builds.source_tree.TreeLimits.__init__.__defaults__", (100, 1 << 20, 8))
    for number in range(101):
        write(workshop.context / "many" / str(number), "")
    write(workshop.context / "deep" / "/".join("123456789") / "file", "")
    with (workshop.context / "large").open("wb") as file:
        file.truncate(2 << 20)
    for source, reason in (("many", "100 files"), ("deep", "8 directories"), ("large", "bytes")):
        with pytest.raises(BuildError, match=reason) as failed:
            await workshop.build(f"RUN true\nCOPY {source} /there")
        assert failed.value.place == "Dockerfile:3"
        assert workshop.of_kind("step") == []


async def test_names_of_owners_are_not_trusted(workshop: Workshop) -> None:
    write(workshop.context / "file", "x")
    built = await workshop.build("COPY --chown=user file /a\nCOPY --chown=user:staff file /b\nCOPY --chown=7 file /c")
    assert await workshop.look(built, "stat -c '%u:%g' /a /b /c") == "1000:1001\n1000:50\n7:7\n"
    for hostile in ("ln -sf /proc/self/environ", "rm /etc/passwd; mkfifo", "dd if=/dev/zero bs=1M count=2 of="):
        target = "/etc/passwd" if not hostile.endswith("=") else ""
        command = f"{hostile} /etc/passwd" if target else f"{hostile}/etc/passwd"
        with pytest.raises(BuildError, match="no user 'user'"):
            await workshop.build(f"RUN {command} 2>/dev/null\nCOPY --chown=user file /a")


async def test_links_inside_lead_nowhere_else(workshop: Workshop, tmp_path: Path) -> None:
    """The target of COPY is resolved inside the sandbox, whatever links are there."""
    write(workshop.context / "file", "x\n")
    outside = tmp_path / "host"
    outside.mkdir()
    built = await workshop.build(f"RUN mkdir /d && ln -s /d /l && ln -s {outside} /out\nCOPY file /l/\nRUN ls /d")
    assert workshop.output == "file\n"
    await workshop.build(f"RUN ln -s {outside} /out\nCOPY file /out/\nRUN ls {outside}")
    assert workshop.output == "file\n"
    assert [*outside.iterdir()] == []
    assert built.steps == 3


def archive_of(*members: tuple[str, bytes, str]) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w:gz") as archive:
        for name, kind, content in members:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.uid = kind, 0o4755 if kind == tarfile.REGTYPE else 0o755, 1000
            if kind == tarfile.REGTYPE:
                entry.size = len(content)
            entry.linkname = content
            archive.addfile(entry, io.BytesIO(content.encode()))
    return found.getvalue()


async def test_archives_are_unpacked_inside(workshop: Workshop) -> None:
    plain = archive_of(("dir", tarfile.DIRTYPE, ""), ("dir/file", tarfile.REGTYPE, "x"), ("was", tarfile.REGTYPE, "y"))
    (workshop.context / "a.tar.gz").write_bytes(plain)
    built = await workshop.build(
        "RUN mkdir -p /t/was/full && echo > /t/was/full/f && echo > /t/dir\nADD a.tar.gz /t\nCOPY a.tar.gz /plain"
    )
    assert await workshop.look(built, "stat -c '%n %F %a %u' /t/dir /t/dir/file /t/was") == (
        "/t/dir directory 755 1000\n/t/dir/file regular file 755 1000\n/t/was regular file 755 1000\n"
    )
    for member in (("../out", tarfile.REGTYPE, "x"), ("dir/../../out", tarfile.REGTYPE, "x")):
        (workshop.context / "b.tar.gz").write_bytes(archive_of(("dir", tarfile.DIRTYPE, ""), member))
        with pytest.raises(BuildError, match="leads out of"):
            await workshop.build("ADD b.tar.gz /t")
    outside = archive_of(("link", tarfile.SYMTYPE, "/etc"), ("link/hacked", tarfile.REGTYPE, "x"))
    (workshop.context / "c.tar.gz").write_bytes(outside)
    with pytest.raises(BuildError):
        await workshop.build("ADD c.tar.gz /t")


async def test_a_file_that_changes_while_it_is_copied_is_noticed(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(workshop.context / "file", "before\n")
    create = workshop.engine.create

    async def late(sandbox_id: str, spec: Any) -> Any:
        write(file, "after!\n")
        return await create(sandbox_id, spec)

    monkeypatch.setattr(workshop.engine, "create", late)
    with pytest.raises(BuildError, match="was changed during the build"):
        await workshop.build("COPY file /there")


# --- names, bases, endings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["host", "debian:bookworm", "tar:/x", "scratch", "Upper", f"x@sha256:{'0' * 64}"])
async def test_a_name_that_means_something_else_is_refused(workshop: Workshop, name: str) -> None:
    with pytest.raises(SandboxError):
        await workshop.build("RUN true", name=name)
    assert workshop.events == []


async def test_what_cannot_be_built_is_refused_before_anything_runs(workshop: Workshop) -> None:
    for dockerfile, reason in (
        ("FROM host\nRUN true", "no image can be made from it"),
        ("FROM snapshot:none\nRUN true", "there is no 'snapshot:none'"),
        (f"FROM {BASE}\nRUN true\nADD https://x.test/y /z", "policy"),
        (f"FROM {BASE}\nRUN true\nONBUILD RUN true", "ONBUILD"),
        (f"FROM {BASE}\nRUN true\nCOPY missing /there", "there is no 'missing'"),
    ):
        with pytest.raises((BuildError, DockerfileError), match=reason):
            await workshop.build(dockerfile)
        assert workshop.of_kind("step") == []
    with pytest.raises(SpecError, match="there is no 'Dockerfile'"):
        await Builder(workshop.engine, workshop.images, workshop.settings).build(BuildRequest(workshop.context))


async def test_a_base_that_is_replaced_meanwhile_is_noticed(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await small_root.install(workshop.settings, tmp_path, "moving")
    find = Bases.find

    async def then_replaced(self: Bases, name: str) -> Any:
        found = await find(self, name)
        empty = tmp_path / "other.tar"
        empty.write_bytes(archive_of(("other", tarfile.DIRTYPE, "")))
        await workshop.images.import_tar(empty, "moving")
        return found

    monkeypatch.setattr(Bases, "find", then_replaced)
    with pytest.raises(BuildError, match="replaced during the build"):
        await workshop.build("FROM moving\nRUN echo moving")


async def test_two_builds_of_the_same_steps_do_not_mix(workshop: Workshop) -> None:
    steps = "RUN cat /proc/sys/kernel/random/uuid > /a; cp /a /b\nRUN cmp /a /b && cat /a /a > /c"
    built = await asyncio.gather(*(workshop.build(steps, name=f"race{number}") for number in range(3)))
    for image in built:
        assert await workshop.look(image, "cat /a /b | cmp - /c && echo same") == "same\n"


async def test_a_cancelled_build_leaves_its_finished_steps_and_nothing_else(workshop: Workshop) -> None:
    steps = "RUN echo one > /one\nRUN echo running; sleep 1000"
    building = asyncio.create_task(workshop.build(steps))
    while not any(event.kind == "output" for event in workshop.events):
        await asyncio.sleep(0.01)
        assert not building.done()
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert await workshop.remains() == []
    assert (await workshop.build(steps.replace("sleep 1000", "true"))).cached == 1

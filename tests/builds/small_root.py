"""A root file system of two megabytes to build on, and an engine to build with."""

from __future__ import annotations

import functools
import io
import re
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import leftovers
from atoll.builds import Builder, BuildEvent, BuildRequest, BuiltImage
from atoll.engines.linux.native_engine import NativeEngine
from atoll.images import Images
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from leftovers import left_behind

BASE = "small"
_BUSYBOX = "/bin/busybox"
_PASSWD = b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1001::/home/user:/bin/sh\n"
_GROUP = b"root:x:0:\nusers:x:1001:\nstaff:x:50:user\n"


@functools.cache
def small_root() -> bytes:
    """Return the archive. busybox may be linked to libraries, which come along."""
    linked = subprocess.run(["ldd", _BUSYBOX], capture_output=True, text=True, check=False).stdout
    programs = subprocess.run([_BUSYBOX, "--list"], capture_output=True, text=True, check=True).stdout.split()
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        for name in ("bin", "etc", "root", "lib", "lib64", "tmp"):
            _add(archive, name, b"", kind=tarfile.DIRTYPE, mode=0o1777 if name == "tmp" else 0o755)
        _add(archive, "bin/busybox", Path(_BUSYBOX).read_bytes(), mode=0o755)
        for program in sorted({*programs} - {"busybox"}):
            _add(archive, f"bin/{program}", b"", kind=tarfile.SYMTYPE, target="busybox")
        for path in re.findall(r"(/\S+) \(0x", linked):
            _add(archive, path.removeprefix("/"), Path(path).read_bytes(), mode=0o755)
        _add(archive, "etc/passwd", _PASSWD)
        _add(archive, "etc/group", _GROUP)
    return found.getvalue()


def _add(
    archive: tarfile.TarFile,
    name: str,
    data: bytes,
    *,
    kind: bytes = tarfile.REGTYPE,
    mode: int = 0o644,
    target: str = "",
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname, entry.size = kind, mode, target, len(data)
    archive.addfile(entry, io.BytesIO(data))


async def install(settings: Settings, folder: Path, name: str = BASE) -> None:
    """Import the small root as an image."""
    file = folder / "small.tar"
    file.write_bytes(small_root())
    await Images(settings.data_dir).import_tar(file, name)


@dataclass
class Workshop:
    """A builder, and a context to build from."""

    engine: NativeEngine
    images: Images
    settings: Settings
    context: Path
    events: list[BuildEvent] = field(default_factory=list)

    async def build(self, dockerfile: str, **options: Any) -> BuiltImage:
        """Build with the small root as the default FROM. The events of this build replace those of the one before."""
        text = dockerfile if "FROM " in dockerfile else f"FROM {BASE}\n{dockerfile}"
        request = BuildRequest(self.context, dockerfile=text.encode(), **options)
        self.events = []
        return await Builder(self.engine, self.images, self.settings).build(request, self.events.append)

    @property
    def output(self) -> str:
        return "".join(event.text for event in self.events if event.kind == "output")

    def of_kind(self, kind: str) -> list[str]:
        return [event.text for event in self.events if event.kind == kind]

    @asynccontextmanager
    async def sandbox(self, image: BuiltImage) -> AsyncIterator[AsyncSandbox]:
        async with AsyncSandbox(engine=self.engine, settings=self.settings, image=image.image.reference) as sandbox:
            yield sandbox

    async def look(self, image: BuiltImage, command: str) -> str:
        """Return what a command in a sandbox of the image writes."""
        async with self.sandbox(image) as sandbox:
            return (await sandbox.exec(command, user="0")).stdout

    async def remains(self) -> list[str]:
        """Return what builds left behind that they must not."""
        drafts = self.settings.data_dir / "builds" / "drafts"
        found = [handle.sandbox_id for handle in await self.engine.list()]
        return found + [str(path) for path in (drafts.iterdir() if drafts.is_dir() else ())]


@asynccontextmanager
async def workshop(settings: Settings, context: Path) -> AsyncIterator[Workshop]:
    """Open a workshop, and check at its end that nothing is left of its sandboxes."""
    made = Workshop(NativeEngine(settings), Images(settings.data_dir), settings, context)
    yield made
    remains = await made.remains()
    await leftovers.emptied(made.engine)
    assert remains == []
    assert left_behind(made.engine) == []

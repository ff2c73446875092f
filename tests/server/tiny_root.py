"""A root file system of this machine's busybox, to build on."""

from __future__ import annotations

import functools
import io
import re
import subprocess
import tarfile
from pathlib import Path

BUSYBOX = "/usr/bin/busybox"
PROGRAMS = (
    *("sh", "cat", "echo", "sleep", "ls", "true", "false", "mkdir", "touch", "rm", "head", "yes", "id", "env", "grep"),
    *("wc", "chmod", "ln", "dd", "sync", "find", "test", "sort", "stat", "tr", "seq"),
)


@functools.cache
def tiny_root() -> bytes:
    """The archive. busybox may be linked to libraries, which come along."""
    linked = subprocess.run(["ldd", BUSYBOX], capture_output=True, text=True, check=False).stdout
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        for name in ("bin", "etc", "tmp", "lib", "lib64", "dev", "proc", "sys", "run"):
            add(archive, name, tarfile.DIRTYPE, mode=0o1777 if name == "tmp" else 0o755)
        add(archive, "etc/passwd", data=b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")
        add(archive, "bin/busybox", data=Path(BUSYBOX).read_bytes(), mode=0o755)
        for program in PROGRAMS:
            add(archive, f"bin/{program}", tarfile.SYMTYPE, target="busybox")
        for path in re.findall(r"(/\S+) \(0x", linked):
            add(archive, path.removeprefix("/"), data=Path(path).read_bytes(), mode=0o755)
    return found.getvalue()


def add(
    archive: tarfile.TarFile,
    name: str,
    kind: bytes = tarfile.REGTYPE,
    *,
    data: bytes = b"",
    target: str = "",
    mode: int = 0o644,
) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.linkname, member.size = kind, mode, target, len(data)
    archive.addfile(member, io.BytesIO(data))


def context(**files: str | bytes) -> bytes:
    """An archive with these files. `_` stands for a dot in the names of arguments, `Dockerfile` for itself."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        for name, data in files.items():
            add(archive, name.replace("_", "."), data=data.encode() if isinstance(data, str) else data)
    return found.getvalue()

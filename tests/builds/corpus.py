"""The corpus: small Dockerfiles with their contexts, each in a directory of its own.

What a directory in Git cannot hold is described in `case.json`: modes, owners, hard links, archives, and what the build
is given.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
BUSYBOX, DEBIAN = "atoll-corpus/busybox:1", "atoll-corpus/debian:1"
SCRATCH = "scratch"
ARCHIVES = {BUSYBOX: "busybox.tar", DEBIAN: "debian.tar"}
"""The base images, and the archives of `scripts/test-docker images` that they are imported from."""
_DESCRIPTIONS = ("case.json", "expected.json")
_EPOCH = 1_600_000_000


@dataclass(frozen=True)
class Case:
    name: str

    @property
    def folder(self) -> Path:
        return CORPUS / self.name

    @cached_property
    def description(self) -> Mapping[str, Any]:
        path = self.folder / "case.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    @property
    def file(self) -> str:
        return str(self.description.get("file", "Dockerfile"))

    @property
    def args(self) -> dict[str, str]:
        return dict(self.description.get("args", {}))

    @property
    def secrets(self) -> dict[str, str]:
        return dict(self.description.get("secrets", {}))

    @property
    def target(self) -> str:
        return str(self.description.get("target", ""))

    @property
    def text(self) -> str:
        return (self.folder / self.file).read_text()

    @property
    def expected(self) -> dict[str, Any] | None:
        """What a real `docker build` made of it. None for what begins with Debian, which is not the same everywhere."""
        path = self.folder / "expected.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    @property
    def base(self) -> str:
        """The one of the two base images that its last stage begins with, or `scratch`."""
        text = self.text
        if DEBIAN in text:
            return DEBIAN
        last = [line for line in text.splitlines() if line.upper().startswith("FROM ")][-1]
        return SCRATCH if last.split()[1] == SCRATCH else BUSYBOX

    def make_context(self, folder: Path) -> None:
        """Fill an empty directory with the context. Needs root for owners."""
        for path in sorted(self.folder.rglob("*")):
            inside = path.relative_to(self.folder)
            if str(inside) in _DESCRIPTIONS:
                continue
            if path.is_dir():
                _directory(folder / inside)
            else:
                _directory((folder / inside).parent)
                shutil.copyfile(path, folder / inside)
                os.chmod(folder / inside, 0o644)
        for entry in self.description.get("context", ()):
            _make(folder, entry)
        # The modes of directories come last: some cannot be searched.
        for entry in self.description.get("context", ()):
            if entry.get("directory"):
                os.chmod(folder / entry["path"], int(entry.get("mode", "0755"), 8))


def cases() -> list[Case]:
    return [Case(path.name) for path in sorted(CORPUS.iterdir())]


def _directory(path: Path) -> None:
    if not path.is_dir():
        _directory(path.parent)
        path.mkdir()
        os.chmod(path, 0o755)


def _make(folder: Path, entry: Mapping[str, Any]) -> None:
    path = folder / entry["path"]
    _directory(path.parent)
    if "link" in entry:
        path.symlink_to(entry["link"])
    elif "hard_link" in entry:
        os.link(folder / entry["hard_link"], path)
    elif entry.get("directory"):
        _directory(path)
    elif "archive" in entry:
        path.write_bytes(_archive(entry["entries"], entry["archive"]))
    else:
        path.write_text(entry["text"])
    if "owner" in entry:
        os.chown(path, *entry["owner"], follow_symlinks=False)
    if not {"link", "hard_link", "directory"} & entry.keys():
        os.chmod(path, int(entry.get("mode", "0644"), 8))


def _archive(entries: Iterable[Mapping[str, Any]], compression: str) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode=f"w:{compression}") as archive:  # type: ignore[call-overload]
        for entry in entries:
            member = tarfile.TarInfo(entry["path"])
            member.mtime = _EPOCH
            member.uid, member.gid = entry.get("owner", (0, 0))
            content = entry.get("text", "").encode()
            default = "0644"
            if "link" in entry:
                member.type, member.linkname, default = tarfile.SYMTYPE, entry["link"], "0777"
            elif "hard_link" in entry:
                member.type, member.linkname = tarfile.LNKTYPE, entry["hard_link"]
            elif entry.get("directory"):
                member.type, default = tarfile.DIRTYPE, "0755"
            else:
                member.size = len(content)
            member.mode = int(entry.get("mode", default), 8)
            archive.addfile(member, io.BytesIO(content) if member.size else None)
    return written.getvalue()

"""What is installed in the tree of an image: packages of Debian, of PyPI and of npm, with their versions.

The tree is not trusted. It is read through descriptors, no link is followed, nothing but regular files is opened, and
every length and number is bounded. What is malformed is left out, because a list of versions must not fail because of
one package.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from atoll.archive import strict_json
from atoll.archive.root import open_in_root
from atoll.errors import ImageError

PackageKind = Literal["debian", "pypi", "npm"]
KINDS: tuple[PackageKind, ...] = ("debian", "pypi", "npm")

_STATUS = "var/lib/dpkg/status"
_RELEASES = ("usr/lib/os-release", "etc/os-release")
_NOT_SEARCHED = frozenset(("proc", "sys", "dev"))
_MAX_STATUS = 64 << 20
_MAX_FILE = 1 << 20
_MAX_HEAD = 1 << 16
_MAX_ENTRIES = 5_000_000
_MAX_DEPTH = 64
_MAX_PACKAGES = 200_000
_NAME = re.compile(r"[A-Za-z0-9@][A-Za-z0-9@/._+~:-]{0,255}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+~:_!-]{0,127}")


@dataclass(frozen=True, slots=True, order=True)
class Package:
    kind: PackageKind
    name: str
    version: str
    architecture: str = ""
    """Of a Debian package."""


@dataclass(frozen=True, slots=True)
class Contents:
    packages: tuple[Package, ...]
    """In order of kind, name and version."""
    system: str = ""
    """The id of the distribution, such as `debian`."""
    release: str = ""
    """Its version, such as `13`."""

    def of(self, kind: PackageKind) -> tuple[Package, ...]:
        return tuple(package for package in self.packages if package.kind == kind)


def read_contents(root: int) -> Contents:
    """Return what is installed in the tree of this directory's descriptor. Raises ImageError for a tree that has too
    much to be searched."""
    found = set(_debian(_read_in_root(root, _STATUS, _MAX_STATUS) or b""))
    for package in _Search(root).packages():
        found.add(package)
        if len(found) > _MAX_PACKAGES:
            raise ImageError(f"the image has more than {_MAX_PACKAGES:,} packages")
    release = _release(root)
    return Contents(tuple(sorted(found)), release.get("ID", ""), release.get("VERSION_ID", ""))


def _release(root: int) -> dict[str, str]:
    for path in _RELEASES:
        data = _read_in_root(root, path, _MAX_HEAD)
        if data:
            pairs = (line.partition("=") for line in data.decode("utf-8", "replace").splitlines())
            values = {name: value.strip("'\"") for name, _, value in pairs}
            return {name: value for name, value in values.items() if _VERSION.fullmatch(value)}
    return {}


def _debian(status: bytes) -> Iterator[Package]:
    for paragraph in status.decode("utf-8", "replace").split("\n\n"):
        fields = _head(paragraph, ("Package", "Status", "Version", "Architecture"))
        if fields.get("Status", "").split() == ["install", "ok", "installed"]:
            architecture = fields.get("Architecture", "")
            name, version = fields.get("Package", ""), fields.get("Version", "")
            yield from _package("debian", name, version, architecture if _NAME.fullmatch(architecture) else "")


def _python(text: bytes) -> Iterator[Package]:
    fields = _head(text.decode("utf-8", "replace").partition("\n\n")[0], ("Name", "Version"))
    yield from _package("pypi", fields.get("Name", ""), fields.get("Version", ""))


def _node(text: bytes) -> Iterator[Package]:
    try:
        value = strict_json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(value, dict):
        yield from _package("npm", value.get("name"), value.get("version"))


def _package(kind: PackageKind, name: object, version: object, architecture: str = "") -> Iterator[Package]:
    if isinstance(name, str) and isinstance(version, str) and _NAME.fullmatch(name) and _VERSION.fullmatch(version):
        yield Package(kind, name, version, architecture)


def _head(paragraph: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return the first field of each of these names."""
    found: dict[str, str] = {}
    for line in paragraph.splitlines():
        name, colon, value = line.partition(":")
        if colon and name in names:
            found.setdefault(name, value.strip())
    return found


def _read_in_root(root: int, path: str, limit: int) -> bytes | None:
    try:
        fd = open_in_root(root, os.fsencode(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    return _read(fd, limit)


def _read(fd: int, limit: int) -> bytes | None:
    """Read a regular file of at most `limit` bytes, and close it. Anything else is None."""
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        with contextlib.suppress(OSError):
            data = file.read(limit + 1)
            return data if len(data) <= limit else None
    return None


class _Search:
    """Walks through a tree once, and yields the packages of Python and Node that it comes across."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._left = _MAX_ENTRIES

    def packages(self) -> Iterator[Package]:
        yield from self._below(os.dup(self._root), "", 0)

    def _below(self, fd: int, folder: str, depth: int) -> Iterator[Package]:
        """Search a directory, whose descriptor is closed. `folder` is its name, with that of its parent."""
        try:
            with os.scandir(fd) as entries:
                names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in self._counted(entries)]
            parent, _, own = folder.rpartition("/")
            own_file = _own_file(parent, own)
            for name, is_directory in sorted(names):
                if is_directory and depth < _MAX_DEPTH and not (depth == 0 and name in _NOT_SEARCHED):
                    with contextlib.suppress(OSError):
                        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                        yield from self._below(inner, f"{own}/{name}", depth + 1)
                elif name == own_file or name.endswith(".egg-info"):
                    yield from self._file(fd, name)
        finally:
            os.close(fd)

    def _counted(self, entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
        for entry in entries:
            self._left -= 1
            if self._left < 0:
                raise ImageError(f"the image has more than {_MAX_ENTRIES:,} files, too many to be searched")
            yield entry

    def _file(self, directory: int, name: str) -> Iterator[Package]:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            data = _read(os.open(name, flags, dir_fd=directory), _MAX_FILE)
            if data is not None:
                yield from _node(data) if name == "package.json" else _python(data)


def _own_file(parent: str, folder: str) -> str | None:
    """Return the file that says what a directory is, if its name shows that it is a package."""
    if folder.endswith(".dist-info"):
        return "METADATA"
    if folder.endswith(".egg-info"):
        return "PKG-INFO"
    return "package.json" if parent == "node_modules" or parent.startswith("@") else None

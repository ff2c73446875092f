"""File trees as plain data: what a build made, beside what another one made."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

SET_ID_BITS = 0o6000
_OF_THE_RUNTIME = (".dockerenv", "dev", "proc", "sys", "etc/hosts", "etc/hostname", "etc/resolv.conf", "etc/mtab")
"""What `docker create` puts into a container, not `docker build` into an image, and where engines mount something."""
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}

_SHOWN_BYTES = 300

Entry = dict[str, Any]
"""`kind`, `mode`, `owner`; `target` of a link, `content` of a file, `same_as` of one with several names."""
Tree = dict[str, Entry]


def of_tar(archive: tarfile.TarFile) -> Tree:
    """Return the tree of a `docker export`. Nothing of it is written anywhere."""
    tree: Tree = {}
    names: dict[str, list[str]] = {}
    for member in archive:
        name = member.name.removeprefix("./").strip("/")
        if _is_left_out(name):
            continue
        entry: Entry = {"mode": _mode(member.mode), "owner": [member.uid, member.gid]}
        if member.islnk():
            first = member.linkname.removeprefix("./").strip("/")
            names.setdefault(first, [first]).append(name)
            entry = dict(tree[first])
        elif member.issym():
            entry |= {"kind": "link", "mode": "0777", "target": member.linkname}
        elif member.isdir():
            entry["kind"] = "directory"
        elif member.isfifo():
            entry["kind"] = "fifo"
        elif member.isreg():
            content = archive.extractfile(member)
            assert content is not None
            entry |= {"kind": "file", "content": _content(content)}
        else:
            continue
        tree[name] = entry
    _note_names(tree, names.values())
    return tree


def of_directory(descriptor: int) -> Tree:
    """Return the tree below a directory, in which no link is followed."""
    tree: Tree = {}
    names: dict[tuple[int, int], list[str]] = {}
    for name, at, status in _walk(descriptor, ""):
        entry: Entry = {
            "kind": _KINDS[stat.S_IFMT(status.st_mode)],
            "mode": _mode(stat.S_IMODE(status.st_mode)),
            "owner": [status.st_uid, status.st_gid],
        }
        if entry["kind"] == "device":
            continue
        base = os.path.basename(name)
        if entry["kind"] == "link":
            entry |= {"mode": "0777", "target": os.readlink(base, dir_fd=at)}
        elif entry["kind"] == "file":
            with open(os.open(base, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=at), "rb") as content:
                entry["content"] = _content(content)
        if status.st_nlink > 1 and entry["kind"] == "file":
            names.setdefault((status.st_dev, status.st_ino), []).append(name)
        tree[name] = entry
    _note_names(tree, names.values())
    return tree


def of_path(path: Path) -> Tree:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return of_directory(descriptor)
    finally:
        os.close(descriptor)


def _walk(descriptor: int, above: str) -> Iterator[tuple[str, int, os.stat_result]]:
    for base in sorted(os.listdir(descriptor)):
        name = f"{above}{base}"
        if _is_left_out(name):
            continue
        status = os.stat(base, dir_fd=descriptor, follow_symlinks=False)
        yield name, descriptor, status
        if stat.S_ISDIR(status.st_mode):
            below = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            try:
                yield from _walk(below, f"{name}/")
            finally:
                os.close(below)


def _is_left_out(name: str) -> bool:
    return not name or name in _OF_THE_RUNTIME or name.startswith(("dev/", "proc/", "sys/"))


def _mode(mode: int) -> str:
    return f"{mode & ~SET_ID_BITS:04o}"


def _content(file: IO[bytes]) -> str:
    """Return a short text itself, and the digest of anything else."""
    digest = hashlib.sha256()
    first = b""
    size = 0
    while chunk := file.read(1 << 20):
        digest.update(chunk)
        first = first or chunk
        size += len(chunk)
    with contextlib.suppress(UnicodeDecodeError):
        if size <= _SHOWN_BYTES:
            return first.decode()
    return f"sha256:{digest.hexdigest()[:16]}"


def _note_names(tree: Tree, groups: Any) -> None:
    for names in groups:
        first = min(names)
        for name in names:
            if name != first:
                tree[name]["same_as"] = first


def relative_changes(base: Tree, tree: Tree) -> dict[str, Entry | None]:
    """Return what differs from the base: new entries, and None for what is gone. Contents of files of the base are
    called by their names, since bases differ between machines."""
    return _relative(_changes(base, tree), base)


def _changes(base: Tree, tree: Tree) -> dict[str, Entry | None]:
    found: dict[str, Entry | None] = {name: None for name in base if name not in tree}
    found |= {name: entry for name, entry in tree.items() if base.get(name) != entry}
    return dict(sorted(found.items()))


def _relative(changed: Mapping[str, Entry | None], base: Tree) -> dict[str, Entry | None]:
    contents = sorted(((name, entry.get("content", "")) for name, entry in base.items()), reverse=True)
    known = {content: name for name, content in contents if content.startswith("sha256:")}
    return {
        name: entry
        if entry is None or entry.get("content") not in known
        else {**entry, "content": f"base:{known[entry['content']]}"}
        for name, entry in changed.items()
    }

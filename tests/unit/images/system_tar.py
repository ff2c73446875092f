"""GNU tar, which unpacks the same archives as Atoll, and what is then in a directory.

The program runs as a user without rights, in namespaces where it sees only itself and an empty directory.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from user_switch import UID

_WORK = """while read -r name; do
  mkdir "$name.d"
  tar -x -p --no-same-owner --warning=no-timestamp --warning=no-unknown-keyword --delay-directory-restore \\
    -f "$name" -C "$name.d" 2>"$name.err"
  echo $?
done"""
_HARMLESS = ("Cannot mknod: Operation not permitted", "Exiting with failure status due to previous errors")


@dataclass(frozen=True)
class Unpacked:
    folder: Path
    messages: list[str]
    """Everything that the program complained about, but for devices, which it may not make here."""


class SystemTar:
    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._folder, self._count = process, folder, 0

    def unpack(self, archive: bytes) -> Unpacked:
        """What the program makes of an archive. The directory is gone after the next call."""
        for old in self._folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        self._count += 1
        path = self._folder / f"{self._count}"
        path.write_bytes(archive)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{self._count}\n".encode())
        self._process.stdin.flush()
        status = self._process.stdout.readline()
        said = Path(f"{path}.err").read_text(errors="replace").splitlines()
        assert status == b"0\n" or said, "the program is gone"
        messages = [line for line in said if not any(text in line for text in _HARMLESS)]
        return Unpacked(Path(f"{path}.d"), messages)


@contextmanager
def running() -> Iterator[SystemTar]:
    """Start the program, as another user if this one is root."""
    folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))  # other users may be unable to reach a test's directory
    user: list[str] = []
    if os.geteuid() == 0:
        user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--"]
        os.chown(folder, UID, UID)
    walls = ["--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--die-with-parent", "--new-session"]
    seen = ["--ro-bind", "/usr", "/usr", "--bind", str(folder), "/work", "--chdir", "/work"]
    for name in ("bin", "lib", "lib64"):
        seen += ["--symlink", f"usr/{name}", f"/{name}"]
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    command = [*user, "bwrap", *walls, *seen, "--", "/bin/sh", "-c", _WORK]
    try:
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd="/") as process:
            yield SystemTar(process, folder)
    finally:
        shutil.rmtree(folder)


def contents(folder: Path) -> dict[bytes, tuple[object, ...]]:
    """What is in a directory: by path the kind, permission bits, time and content of files, targets of links, and by
    the first of their names which files are the same. Devices and pipes are left out."""
    found: dict[bytes, tuple[object, ...]] = {}
    first: dict[int, bytes] = {}
    root = os.fsencode(folder)
    for base, directories, files in os.walk(root):
        for name in sorted([*directories, *files]):
            path = os.path.join(base, name)
            shown, info = os.path.relpath(path, root), os.lstat(path)
            mode = info.st_mode
            if stat.S_ISLNK(mode):
                found[shown] = ("link", os.readlink(path))
            elif stat.S_ISDIR(mode):
                found[shown] = ("directory", mode & 0o1777, _time(info))
            elif stat.S_ISREG(mode):
                same = first.setdefault(info.st_ino, shown)
                with open(path, "rb") as file:
                    found[shown] = ("file", mode & 0o777, _time(info), file.read(), same)
    return found


def _time(info: os.stat_result) -> int:
    """The time in whole seconds. Atoll keeps those from 1970 to 2242, which every file system has."""
    return min(max(info.st_mtime_ns // 10**9, 0), 1 << 33)

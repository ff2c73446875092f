"""The few files of the host that every sandbox of this engine sees besides /usr: an /etc, and the agent.

They are copied into a directory named after their state. So one mount per sandbox is enough, only the files listed here
are visible, and a user who may not read the installed package can still run the agent. A sandbox keeps the directory
that it started with; directories of earlier boots are removed when a new one is created.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from atoll import durable
from atoll.engines.host.process_ref import boot_id
from atoll.removal import remove_tree
from atoll.settings import owned_directory

USER = "user"
UID = 1000
HOME = f"/home/{USER}"
DEFAULT_HOSTNAME = "sandbox"

_COPIED = (
    "alternatives",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "os-release",
    "protocols",
    "services",
    "ssl/certs/ca-certificates.crt",
    "pki/tls/certs/ca-bundle.crt",
    "ssl/openssl.cnf",
    "timezone",
)
"""Paths in /etc. Programs need them to start, for the time zone and for certificate authorities. None can hold a
secret."""

_WRITTEN = {
    "passwd": (
        "root:x:0:0:root:/root:/usr/sbin/nologin\n"
        f"{USER}:x:{UID}:{UID}:sandbox:{HOME}:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": f"root:x:0:\n{USER}:x:{UID}:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "resolv.conf": "",
    "shells": "/bin/sh\n/bin/bash\n",
}
_LAYOUT = 3
"""To be increased whenever other files are created."""
_LINKED = {"ssl/cert.pem": "certs/ca-certificates.crt"}
"""Where OpenSSL looks first. The directory of single certificates is left out, as it has hundreds of links."""


def hosts(hostname: str) -> str:
    return f"127.0.0.1 localhost {hostname}\n::1 localhost ip6-localhost {hostname}\n"


def base_files(engine_dir: Path, agent: Path, host_etc: Path = Path("/etc")) -> Path:
    """Return a directory with `etc` and `agent` as they are on this host now, which is created if needed. Its empty
    `usr` is where the agent's `--own-files` mounts the host's."""
    parent = engine_dir / ".base"
    path = parent / f"{boot_id()[:8]}-{_state(agent, host_etc)}"
    if not path.is_dir():
        owned_directory(parent, 0o711)
        durable.directory_once(path, lambda draft: _make(draft, agent, host_etc), remove_tree)
        _remove_those_of_earlier_boots(parent)
    return path / "files"


def sweep(engine_dir: Path) -> None:
    """Remove unfinished copies of processes that died."""
    durable.remove_abandoned(engine_dir / ".base", remove_tree)


def _state(agent: Path, host_etc: Path) -> str:
    """Return a digest that changes whenever one of the originals or this module changes."""
    digest = hashlib.blake2b(repr((_LAYOUT, _COPIED, _WRITTEN, _LINKED)).encode(), digest_size=8)
    for path in [agent, *(host_etc / name for name in _COPIED)]:
        with suppress(OSError):
            found = os.stat(path)
            digest.update(f"{path}:{found.st_ino}:{found.st_mtime_ns}:{found.st_size};".encode())
    return digest.hexdigest()


def _make(draft: Path, agent: Path, host_etc: Path) -> None:
    etc = draft / "files" / "etc"
    etc.mkdir(parents=True)
    for name in ("files/usr", "empty"):
        (draft / name).mkdir()
    shutil.copyfile(agent, draft / "files" / "agent")
    (draft / "files" / "nothing").touch()
    for name in _COPIED:
        with suppress(FileNotFoundError, PermissionError):
            _copy(host_etc / name, etc / name)
    for name, text in _WRITTEN.items():
        (etc / name).write_text(text)
    (etc / "hosts").write_text(hosts(DEFAULT_HOSTNAME))
    for name, target in _LINKED.items():
        if (etc / name).parent.is_dir():
            (etc / name).symlink_to(target)
    for folder, _, files in os.walk(draft):
        os.chmod(folder, 0o755)  # noqa: S103
        for file in files:
            if not os.path.islink(f"{folder}/{file}"):
                os.chmod(f"{folder}/{file}", 0o644)
    os.chmod(draft / "files" / "agent", 0o755)  # noqa: S103


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        target.mkdir()
        for child in os.scandir(source):
            # In /etc/alternatives the links are the content. They lead into /usr, which the sandbox has too.
            if child.is_symlink() and not child.name.endswith(".gz"):
                os.symlink(os.readlink(child), target / child.name)
            elif child.is_file(follow_symlinks=False):
                shutil.copyfile(child, target / child.name)
    elif stat.S_ISREG(source.stat().st_mode):
        shutil.copyfile(source, target)


def _remove_those_of_earlier_boots(parent: Path) -> None:
    """Remove directories of earlier boots, which no sandbox can be using."""
    for path in parent.iterdir():
        if not path.name.startswith((f"{boot_id()[:8]}-", ".")):
            remove_tree(path)

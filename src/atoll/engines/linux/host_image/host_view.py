"""The `host` image: this machine's own programs, in a root directory made for sandboxes.

`/usr` is the host's, read-only. Everything else is a skeleton that is made once and shared: a root directory with the
customary links, and an `/etc` with the few files that programs need. Sandboxes see nothing of the host that is not on
the lists below, and files that would reveal its users or its network (`passwd`, `hosts`, `resolv.conf`, `hostname`) are
replaced by invented ones.

A skeleton never changes. Its name is a digest of what it was made from, so a new one is made when that changes, while
running sandboxes keep theirs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from atoll import durable
from atoll.network.client import RESOLV_CONF


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


INNER = "rootfs"
USR = Path("/usr")
_DIRECTORIES = _words(
    """
    boot dev etc etc/pam.d home home/user media mnt opt proc root run srv sys usr
    var var/cache var/lib var/log var/spool workspace
    """
)
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")

# Files that may hold passwords or tokens of the host (environment, gitconfig, npmrc, profile.d, ssl/private) are left
# out.
_COPIED_FILES = _words(
    """
    bash.bashrc bindresvport.blacklist ca-certificates.conf debian_version ethertypes gai.conf inputrc ld.so.cache
    ld.so.conf locale.alias localtime lsb-release magic magic.mime mailcap mime.types networks os-release profile
    protocols rpc services shells timezone
    """
)
_COPIED_TREES = _words(
    """
    alternatives fonts java-11-openjdk java-17-openjdk java-21-openjdk ld.so.conf.d perl python3 python3.11 python3.12
    python3.13 skel ssl/certs terminfo
    """
)
_MAX_FILE = 16 << 20

_INVENTED = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\n"
    "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
    "www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\n"
    "_apt:x:100:65534::/nonexistent:/usr/sbin/nologin\n"
    "user:x:1000:1000:user:/home/user:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\ndaemon:x:1:\ntty:x:5:\nwww-data:x:33:\nstaff:x:50:\nusers:x:100:\n"
    "user:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n",
    "hostname": "sandbox\n",
    "resolv.conf": RESOLV_CONF,
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\n"
    "hosts: files dns\nservices: files\nprotocols: files\n",
    "login.defs": "UMASK 022\nENV_PATH PATH=/usr/local/bin:/usr/bin:/bin\n",
    # Root may become any user; no user has a password.
    "pam.d/su": "auth sufficient pam_rootok.so\nauth required pam_deny.so\n"
    "account required pam_permit.so\nsession required pam_permit.so\n",
    "pam.d/other": "auth required pam_deny.so\naccount required pam_deny.so\nsession required pam_deny.so\n",
    "fstab": "",
    "host.conf": "multi on\n",
}


def skeleton(directory: Path, etc: Path = Path("/etc")) -> Path:
    """Return the lower layer of the host image, which holds `rootfs`, `dev` and `proc`. It is made under `directory` if
    it is missing."""
    return made_once(directory / _digest(etc), lambda draft: _make(draft, etc))


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Return the directory `path`, made with `make` if it is missing. It appears complete or not at all, even if other
    processes make it at the same time."""
    if not path.is_dir():
        path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        durable.directory_once(path, make)
    return path


def _digest(etc: Path) -> str:
    found = hashlib.sha256(
        repr((_INVENTED, _DIRECTORIES, _MERGED, sorted(_COPIED_FILES), sorted(_COPIED_TREES))).encode()
    )
    for name in (*_COPIED_FILES, *_COPIED_TREES):
        with contextlib.suppress(OSError):
            info = (etc / name).stat()
            found.update(f"{name} {info.st_mtime_ns} {info.st_size}\n".encode())
    for name in _MERGED:
        found.update(f"{name} {Path('/', name).is_symlink()} {(USR / name).is_dir()}\n".encode())
    return found.hexdigest()[:24]


def _make(top: Path, etc: Path) -> None:
    top.mkdir(mode=0o755)
    (top / "dev").mkdir()
    (top / "proc").symlink_to(f"{INNER}/proc")
    root = top / INNER
    root.mkdir(mode=0o755)
    for name in _DIRECTORIES:
        (root / name).mkdir(mode=0o755)
    for name, mode in (("tmp", 0o1777), ("var/tmp", 0o1777), ("root", 0o700)):
        (root / name).mkdir(exist_ok=True)
        (root / name).chmod(mode)
    with contextlib.suppress(PermissionError):  # an ordinary user owns everything in its sandboxes
        os.chown(root / "home/user", 1000, 1000)
    (root / "var/run").symlink_to("/run")
    for name in _MERGED:
        if (USR / name).is_dir():
            (root / name).symlink_to(f"usr/{name}")
    for name in (*_COPIED_FILES, *_COPIED_TREES):
        _copy(etc / name, root / "etc" / name)
    for name, text in _INVENTED.items():
        (root / "etc" / name).unlink(missing_ok=True)
        (root / "etc" / name).write_text(text)
    (root / "etc/mtab").symlink_to("/proc/self/mounts")


def _copy(source: Path, target: Path) -> None:
    """Copy directories, links as links, and files that everybody may read, but nothing else. Copies belong to root and
    have no special mode bits."""
    try:
        info = source.lstat()
    except FileNotFoundError:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(info.st_mode):
        link = os.readlink(source)
        if link.startswith("/usr/") or not link.startswith("/"):
            target.symlink_to(link)
        elif source.is_file():
            _copy(source.resolve(), target)
    elif stat.S_ISDIR(info.st_mode):
        target.mkdir(mode=0o755, exist_ok=True)
        for entry in sorted(source.iterdir()):
            _copy(entry, target / entry.name)
    elif stat.S_ISREG(info.st_mode) and info.st_mode & 0o004 and info.st_size <= _MAX_FILE:
        shutil.copyfile(source, target)
        target.chmod(info.st_mode & 0o755)

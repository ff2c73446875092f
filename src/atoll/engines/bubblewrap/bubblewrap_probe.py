"""Whether bubblewrap works on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from atoll import agent_binary
from atoll.engines.availability import Availability
from atoll.engines.bubblewrap.users import FIRST
from atoll.errors import EngineUnavailableError

_INSTALL = (
    "Install bubblewrap 0.8 or newer: 'apt-get install bubblewrap', 'dnf install bubblewrap' or 'apk add bubblewrap'."
)
_OLDEST = (0, 8)
_SWITCHES = {
    "/proc/sys/user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=15000"),
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
}
"""Files, the value that disables user namespaces, and the remedy."""
_APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_TRIAL_S = 10


def find_bubblewrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise EngineUnavailableError("the program 'bwrap' is not installed", hint=_INSTALL)
    return found


def probe(name: str, *, thorough: bool) -> Availability:
    try:
        bubblewrap, agent = find_bubblewrap(), agent_binary.path()
    except EngineUnavailableError as error:
        return Availability(name, False, (error.reason,), (error.hint or "",))
    for path, (off, remedy) in _SWITCHES.items():
        if _read(Path(path)) == off:
            return Availability(
                name, False, (f"user namespaces are switched off in {path}",), (f"As root: '{remedy}'.",)
            )
    return _try(name, bubblewrap, agent) if thorough else Availability(name, True)


def _try(name: str, bubblewrap: str, agent: Path) -> Availability:
    """Check bubblewrap's version, and create a small sandbox with it."""
    try:
        said = subprocess.run([bubblewrap, "--version"], capture_output=True, text=True, timeout=_TRIAL_S)
        version = said.stdout.strip().removeprefix("bubblewrap ")
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
        if numbers < _OLDEST:
            return Availability(
                name, False, (f"bubblewrap {version or 'of unknown version'} is too old",), (_INSTALL,), version
            )
        trial = subprocess.run(_trial(bubblewrap, agent), capture_output=True, text=True, timeout=_TRIAL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Availability(name, False, (f"bubblewrap does not run: {error}",), (_INSTALL,))
    if trial.returncode == 0:
        return Availability(name, True, version=version)
    return Availability(
        name, False, (f"bubblewrap cannot make a sandbox: {trial.stderr.strip()[:500]}",), (_remedy(),), version
    )


def _trial(bubblewrap: str, agent: Path) -> list[str]:
    walls = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"]
    argv = [
        bubblewrap,
        *walls,
        "--disable-userns",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "/bin/true",
    ]
    return [str(agent), "--as", f"{FIRST}:{FIRST}", "--", *argv] if os.geteuid() == 0 else argv


def _remedy() -> str:
    if _read(_APPARMOR) == "1":
        return f"AppArmor restricts user namespaces. As root: 'sysctl -w {'.'.join(_APPARMOR.parts[3:])}=0'."
    return (
        "Unprivileged user namespaces must be allowed; in a container, run it with '--security-opt seccomp=unconfined'."
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

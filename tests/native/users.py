"""Running a program as a user without rights, with or without a range of ids of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from needs import missing

UID = 60_000 + os.getpid() % 5000
"""Nobody's, and another one for each run."""
_FIRST = 2_000_000
_SWITCH = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "sh", "-c", 'exec "$@"', "sh"]
"""The shell in between is started with no rights left, unlike what `setpriv` itself starts."""


class OrdinaryUser:
    """A user that only this program's mount namespace knows: the machine's own files stay as they are."""

    def __init__(self, folder: Path, ranges: bool) -> None:
        self.home = folder / f"home-{'range' if ranges else 'single'}"
        self.home.mkdir(mode=0o755)
        os.chown(self.home, UID, UID)
        account = f"sandy:x:{UID}:{UID}::{self.home}:/bin/sh\n"
        ids = f"sandy:{_FIRST}:65536\n" if ranges else ""
        self._files = {"passwd": Path("/etc/passwd").read_text() + account, "subuid": ids, "subgid": ids}
        for name, text in self._files.items():
            (self.home / f".{name}").write_text(text)
        self.group: Path | None = None
        """A control group that its programs start in."""
        self.python = self._find_python()

    def run(self, *command: str, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
        binds = " && ".join(f"mount --bind {self.home}/.{name} /etc/{name}" for name in self._files)
        if self.group is not None:
            binds += f" && echo $$ >{self.group}/cgroup.procs"
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONWARNINGS": "ignore",
        }
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", f'{binds} && exec "$@"', "sh", *_SWITCH, *command],
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )

    def _find_python(self) -> str:
        """This Python, or one of the system's of the same version, whichever such a user can run."""
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        for candidate in (sys.executable, f"/usr/local/bin/{name}", f"/usr/bin/{name}"):
            if self.run(candidate, "-c", "import atoll.conformance").returncode == 0:
                return candidate
        reason = "another user can run no Python with these packages: they are in a home directory"
        missing(reason)

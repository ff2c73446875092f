"""The OCI runtimes: how to find them, how to call them, and how to read their errors."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from atoll.engines.host.machine import locate as locate
from atoll.engines.linux.launcher import Isolation
from atoll.errors import EngineUnavailableError
from atoll.printable import printable

BY_ISOLATION: dict[Isolation, tuple[str, ...]] = {
    "namespaces": ("runc", "crun"),
    "gvisor": ("runsc",),
    "vm": ("kata-runtime", "kata"),
}
"""The OCI runtimes for each isolation level, the preferred one first."""

_HINTS = {
    "runc": "Install it: 'apt-get install runc'.",
    "crun": "Install it: 'apt-get install crun'.",
    "runsc": "Run 'scripts/get-runsc', or install gVisor's runsc.",
    "kata-runtime": "Install Kata Containers.",
}
_MAX_LOG_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Runtime:
    name: str
    program: Path
    network: str = "none"
    """Where gVisor's own network stack gets its links: `none`, or `sandbox` for the sandbox's network namespace."""

    @property
    def isolation(self) -> Isolation:
        return isolation_of(self.name)

    @property
    def virtual_kernel(self) -> bool:
        """Whether sandboxes have a kernel of their own, so that descriptors and mounts of the host have no effect
        inside."""
        return self.isolation != "namespaces"

    def command(self, state: Path, *words: str, log: Path | None = None) -> list[str]:
        options = ["--root", str(state)]
        if log is not None:
            options += ["--log", f"file:{log}" if self.name == "crun" else str(log), "--log-format", "json"]
        if self.name == "runsc":
            options += ["--platform=systrap", f"--network={self.network}", "--overlay2=none", "--host-uds=none"]
            if self.network != "none":
                options.append("--net-disconnect-ok")  # connections do not outlive a checkpoint of the memory
        return [str(self.program), *options, *words]


def isolation_of(name: str) -> Isolation:
    """Return the isolation level of an OCI runtime. Raises EngineUnavailableError for an unknown one."""
    for isolation, names in BY_ISOLATION.items():
        if name in names:
            return isolation
    known = ", ".join(name for names in BY_ISOLATION.values() for name in names)
    raise EngineUnavailableError(f"there is no OCI runtime '{name}'", hint=f"Known OCI runtimes: {known}.")


def find(isolation: Isolation, data_dir: Path, prefer: str | None = None) -> Runtime:
    """Return an installed OCI runtime for an isolation level. Raises EngineUnavailableError if there is none. An
    isolation level is never replaced by another."""
    names = BY_ISOLATION[isolation]
    if prefer is not None:
        if prefer not in names:
            raise EngineUnavailableError(f"OCI runtime '{prefer}' does not provide isolation '{isolation}'")
        names = (prefer,)
    for name in names:
        program = locate(name, data_dir)
        if program is not None:
            return Runtime(name, program)
    raise EngineUnavailableError(
        f"isolation '{isolation}' needs {' or '.join(names)}, which is not installed", hint=_HINTS.get(names[0])
    )


def version_of(program: Path) -> str:
    """Return the first line that an OCI runtime prints about its version. Blocks. Raises EngineUnavailableError."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineUnavailableError(f"'{program}' does not work: {error}") from error
    return done.stdout.partition("\n")[0].strip()[:200]


def last_error(log: Path) -> str:
    """Return the last message in the OCI runtime's log, shortened and made printable. The log may contain anything."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_LOG_BYTES))
            lines = file.read(_MAX_LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    text = ""
    for line in lines:
        try:
            entry = json.loads(line)
            if entry.get("level", "error") in ("error", "fatal", "warning"):
                text = str(entry.get("msg", ""))
        except (ValueError, AttributeError):
            text = line or text
    return printable(text, 500, instead=" ")

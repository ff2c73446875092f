"""Compiles the C programs. Run by hatchling when the package is built, and by `make agent` as a script.

The system's C compiler is used when there is one that can link statically, else the one in the `ziglang` package. The
results are static programs in `src/atoll/bin`, which run on every Linux of their architecture, so the wheel is tagged
by platform and not by Python version.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a script there is no hatchling
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
BIN = ROOT / "src" / "atoll" / "bin"
LAUNCHER = ROOT / "native" / "launcher"
PROGRAMS = {
    "atoll-agent": (ROOT / "native" / "agent",),
    "atoll-mount": (LAUNCHER / "core", LAUNCHER / "runtime"),
    "atoll-native": (LAUNCHER / "core", LAUNCHER / "sandbox"),
}
FLAGS = shlex.split(
    "-std=gnu11 -static -Os -s -Wall -Wextra -Werror -Wshadow -Wvla -fno-strict-aliasing -ffunction-sections"
)
LINKING = ["-Wl,--gc-sections"]
# Without a C library: its start alone takes longer than all that these programs do.
_FREESTANDING = shlex.split("-nostdlib -ffreestanding -fno-stack-protector")
OWN_FLAGS = {"atoll-mount": _FREESTANDING, "atoll-native": _FREESTANDING}
HARDENING = shlex.split("-fstack-protector-strong -D_FORTIFY_SOURCE=2")
ZIG = "ziglang>=0.13"
NO_COMPILER = (
    "no C compiler can build the agent: install one (Debian: apt-get install gcc libc6-dev) or `pip install ziglang`"
)


class BuildError(Exception):
    """The agent could not be compiled. The text says why."""

    status = 1


class NoCompilerError(BuildError):
    """Nothing here can compile it. `scripts/setup` knows the status and fetches a compiler."""

    status = 3


def sources(name: str) -> list[Path]:
    return sorted(path for folder in PROGRAMS[name] for pattern in ("*.c", "*.h") for path in folder.glob(pattern))


def is_fresh(name: str) -> bool:
    """Whether the program is newer than everything it is made from."""
    if not (BIN / name).exists():
        return False
    made = (BIN / name).stat().st_mtime_ns
    return all(path.stat().st_mtime_ns <= made for path in [*sources(name), Path(__file__)])


@functools.cache
def system_compiler() -> tuple[str, ...] | None:
    """`$CC`, `musl-gcc`, `cc`, `gcc` or `clang`: the first that makes a static program.

    With musl it is a seventh of the size, and so is what each sandbox keeps in memory.
    """
    for name in (os.environ.get("CC", ""), "musl-gcc", "cc", "gcc", "clang"):
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            if name == "musl-gcc":
                command += _kernel_headers()
            if _links_statically(command):
                return tuple(command)
    return None


def _kernel_headers() -> list[str]:
    """musl-gcc leaves out the folders in which the kernel's headers are; behind musl's own they do no harm."""
    return [f"-idirafter{path}" for path in (f"/usr/include/{_machine()}-linux-gnu", "/usr/include")]


def _zig_headers(package: Path) -> list[str]:
    """Zig leaves out the kernel's headers where there is no C library."""
    kernel = {"x86_64": "x86"}.get(_machine(), _machine())
    folder = package / "lib" / "libc" / "include"
    return [f"-idirafter{folder / name}" for name in (f"{kernel}-linux-any", "any-linux-any")]


def _links_statically(command: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, "probe.c")
        probe.write_text('#include <linux/filter.h>\n#include <stdio.h>\nint main(void) { return puts("") < 0; }\n')
        result = subprocess.run([*command, "-static", "-o", f"{folder}/probe", str(probe)], capture_output=True)
        return result.returncode == 0


def compiler() -> tuple[str, ...]:
    found = system_compiler()
    if found:
        return (*found, *HARDENING)
    zig = importlib.util.find_spec("ziglang")
    if zig and zig.submodule_search_locations:
        headers = _zig_headers(Path(zig.submodule_search_locations[0]))
        return (sys.executable, "-m", "ziglang", "cc", "-target", f"{_machine()}-linux-musl", *headers)
    raise NoCompilerError(NO_COMPILER)


def _machine() -> str:
    machine = platform.machine()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(machine.lower(), machine)


def build(name: str) -> bool:
    """Compile if anything changed. Returns whether it did."""
    if is_fresh(name):
        return False
    units = [str(path) for path in sources(name) if path.suffix == ".c"]
    if not units:
        raise BuildError(f"there are no sources in {PROGRAMS[name][-1]}")
    BIN.mkdir(parents=True, exist_ok=True)
    # Beside the target, then renamed: a running sandbox keeps the old program, and a failure leaves it as it was.
    fresh = BIN / f".{name}.{os.getpid()}"
    try:
        command = [*compiler(), *FLAGS, *OWN_FLAGS.get(name, ()), "-o", str(fresh), *units, *LINKING]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise BuildError(f"compiling {name} failed:\n{shlex.join(command)}\n{result.stderr.strip()}")
        os.replace(fresh, BIN / name)
    finally:
        fresh.unlink(missing_ok=True)
    return True


class AgentBuildHook(BuildHookInterface):  # type: ignore[misc]
    """What hatchling calls."""

    def dependencies(self) -> list[str]:
        return [] if all(map(is_fresh, PROGRAMS)) or system_compiler() else [ZIG]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        build_data["pure_python"] = False
        machine = _machine()
        build_data["tag"] = f"py3-none-manylinux_2_17_{machine}.musllinux_1_1_{machine}"
        try:
            for name in PROGRAMS:
                build(name)
        except BuildError as error:
            if version != "editable":
                self.app.abort(str(error))
            # In a working copy the sources may be half edited; `make agent` builds it again and fails loudly.
            self.app.display_warning(str(error))


def main() -> int:
    try:
        for name in PROGRAMS:
            print(f"src/atoll/bin/{name}: {'built' if build(name) else 'up to date'}")
    except BuildError as error:
        print(error, file=sys.stderr)
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(main())

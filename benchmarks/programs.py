"""The programs that are measured: a static `true`, the smallest thing that can be started."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def static_true(directory: Path) -> Path:
    """Compiled anew, so that it is the same on every machine."""
    source, program = directory / "true.c", directory / "true"
    source.write_text("int main(void) { return 0; }\n")
    compiler = next(name for name in ("cc", "gcc", "clang") if shutil.which(name))
    subprocess.run([compiler, "-static", "-Os", "-o", str(program), str(source)], check=True)
    return program


def spawn_and_wait(program: Path) -> None:
    """The unit U: what the kernel itself takes to start a program and see its end."""
    pid = os.posix_spawn(program, [str(program)], {})
    os.waitpid(pid, 0)

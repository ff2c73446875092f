"""Runs a block of shell commands, requests or variables of the documentation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from docs import forked_atoll
from docs.blocks import Block, BlockError, replace

_TIMEOUT_S = 50

_ATOLL = """\
#!/bin/sh
# `atoll shell` needs a terminal: it gets one, whose user types `exit` at once.
[ "$1" = shell ] || exec "$PYTHON" -IS "$FORKED" call "$SOCKET" "$@"
printf 'exit\\n' | script -qefc "$PYTHON -m atoll.cli $*" /dev/null
"""
_PREAMBLE = """\
unset BASH_ENV
PS4='+ line ${LINENO}: '
set -euxo pipefail
"""


@contextmanager
def forking_atoll(socket: Path) -> Iterator[None]:
    """Let `run_shell` call the `atoll` command, at this path."""
    command = [sys.executable, "-W", "ignore", forked_atoll.__file__, "serve", str(socket)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


def run_shell(
    block: Block, folder: Path, variables: Mapping[str, str], replaced: Mapping[str, str], socket: Path
) -> None:
    """Run it with bash in this folder. Every command has to succeed. `socket` is that of `forking_atoll`."""
    programs, preamble = folder / ".programs", folder / ".preamble"
    programs.mkdir()
    (programs / "atoll").write_text(_ATOLL)
    (programs / "atoll").chmod(0o755)
    preamble.write_text(_PREAMBLE)
    ours = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "FORKED": forked_atoll.__file__,
        "SOCKET": str(socket),
        "BASH_ENV": str(preamble),
    }
    # The empty lines make the numbers of lines in messages those of the page.
    done = subprocess.run(
        ["bash", "-c", "\n" * (block.line - 1) + replace(block.text, replaced)],
        cwd=folder,
        env={**os.environ, **variables, **ours},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise BlockError(block, f"It ended with exit code {done.returncode}.", done.stdout)


def requests(text: str) -> Iterator[tuple[str, str, object]]:
    """Yield method, path and body of the requests of a block: `METHOD PATH BODY`, where a body may go on in lines that
    are indented."""
    for request in re.split(r"\n(?=\S)", text.strip()):
        method, path, *rest = request.split(None, 2)
        yield method, path, json.loads(rest[0]) if rest else None


def run_requests(block: Block, client: httpx.Client) -> None:
    """Send them to a server. Every one has to succeed. `ID` in a path is the sandbox that was made before."""
    said, sandbox_id = "", "ID"
    for method, path, body in requests(block.text):
        answer = client.request(method, path.replace("ID", sandbox_id), json=body)
        said += f"{method} {path}: {answer.status_code} {answer.text[:500]}\n"
        if not answer.is_success:
            raise BlockError(block, f"{method} {path} was answered with status {answer.status_code}.", said)
        if (method, path) == ("POST", "/sandboxes"):
            sandbox_id = answer.json()["id"]


def variables_of(block: Block, replaced: Mapping[str, str]) -> dict[str, str]:
    """The variables of a block of `NAME=VALUE` lines."""
    lines = (line.partition("#")[0].strip() for line in replace(block.text, replaced).splitlines())
    return {name: value for name, _, value in (line.partition("=") for line in lines if line)}

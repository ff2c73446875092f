"""What the blocks of each page take as given: names, variables, files, and what stands for what they name."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from atoll import Sandbox, SandboxSpec
from docs.blocks import Block


@dataclass
class Given:
    folder: Path
    """The current directory of the block."""
    names: dict[str, object] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)


Prelude = Callable[[Block, Given], AbstractContextManager[None]]


@contextmanager
def _nothing(_: Block, given: Given) -> Iterator[None]:
    yield


@contextmanager
def _readme(_: Block, given: Given) -> Iterator[None]:
    (given.folder / "script.py").write_text("print(6 * 7)\n")
    yield


@contextmanager
def _sandboxes(_: Block, given: Given) -> Iterator[None]:
    data = given.folder / "data"
    data.mkdir()
    given.replaced["/data"] = str(data)
    with Sandbox() as sandbox:
        sandbox.make_dir("src")
        sandbox.write_file("Makefile", "all:\n\techo made\n")
        given.names |= {"sandbox": sandbox, "sandbox_id": sandbox.id, "command_id": sandbox.start("echo done").id}
        yield


@contextmanager
def _checkpoints(block: Block, given: Given) -> Iterator[None]:
    if block.language != "sh":
        yield
        return
    spec = SandboxSpec(isolation="gvisor") if "pause" in block.text else SandboxSpec.of(undo={"keep": 3})
    with Sandbox(spec) as sandbox:
        sandbox.exec("echo hello >file")
        given.variables["ID"] = sandbox.id
        yield


@contextmanager
def _network(block: Block, given: Given) -> Iterator[None]:
    with Sandbox(network={}) as sandbox:
        given.names["sandbox"] = sandbox
        given.variables["ID"] = sandbox.id
        yield


@contextmanager
def _images(_: Block, given: Given) -> Iterator[None]:
    """The smallest root file system that Atoll accepts."""
    root = given.folder / "root"
    for name in ("bin", "etc", "usr/bin"):
        (root / name).mkdir(parents=True)
    (root / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    with tarfile.open(given.folder / "root.tar.gz", "w:gz") as archive:
        archive.add(root, ".")
    yield


@contextmanager
def _server(_: Block, given: Given) -> Iterator[None]:
    (given.folder / "notes.txt").write_text("one\n")
    yield


_OF_PAGES: dict[str, Prelude] = {
    "docs/guides/environments.md": _server,
    "README.md": _readme,
    "docs/guides/checkpoints.md": _checkpoints,
    "docs/guides/images.md": _images,
    "docs/guides/network.md": _network,
    "docs/guides/sandboxes.md": _sandboxes,
    "docs/guides/server.md": _server,
}


def prelude(block: Block) -> Prelude:
    return _OF_PAGES.get(block.page, _nothing)

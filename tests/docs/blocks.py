"""The code blocks of the documentation: what each one is, where it is, and whether it runs here.

A comment directly before a block, which no reader sees, declares what is special about it:

    <!-- not run: needs the internet -->      one of `REASONS`; such a block is only checked
    <!-- run with: docker -->                 its sandboxes are containers of the Docker engine of the tests
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

RUN = frozenset({"python", "sh", "http", "dotenv"})
"""Languages of blocks that run."""
CHECKED = frozenset({"toml", "json", "text", "tree"})
"""Languages of blocks that nothing can run. `tree` is the map in ARCHITECTURE.md, which `make check` compares."""
REASONS = {
    "needs the internet": r"\bpip3? |https?://(?!127\.0\.0\.1)|image pull",
    "needs a registry": r"python:3|image (pull|push|load)|registry\.example",
    "needs a Debian mirror": r"image build|atoll build",
    "needs mirrors of Debian, PyPI and npm": r"computer|manus",
    "needs a server and a context": r"context\.tar",
    "needs gVisor": r"gvisor",
    "starts a Docker engine": r"builds\.record",
    "runs until it is stopped": r"atoll serve",
    "sets up a machine": r"\bmake (setup|run|demo)\b",
    "runs tests": r"\bmake (test|test-slow|check)\b",
}
"""Why a block may be not run, and what then has to be in the block."""

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_NOTE = re.compile(r"<!--(?P<note>(?:(?!-->).)*)-->\n*\Z", re.DOTALL)
_ANY_NOTE = re.compile(r"<!--.*?-->", re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_INDENTED = re.compile(r"\n\n(?P<text>(?: {4}\S[^\n]*\n)+)")


@dataclass(frozen=True)
class Block:
    page: str
    """The path of the page from the root of the repository."""
    line: int
    """The line of the page in which its text begins."""
    language: str
    text: str
    note: str = ""
    """The comment before it, without its marks."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str | None:
        """Why it is not run; None if it is."""
        return self.note.removeprefix("not run: ") if self.note.startswith("not run: ") else None

    def is_excused(self) -> bool:
        """Whether the reason applies: something in the block needs what it names."""
        return self.reason in REASONS and re.search(REASONS[self.reason], self.text) is not None

    @property
    def needs_docker(self) -> bool:
        return self.note == "run with: docker"

    def shown(self) -> str:
        return f"{self.place}\n" + "\n".join(
            f"{number:5} | {line}" for number, line in enumerate(self.text.splitlines(), self.line)
        )


class BlockError(AssertionError):
    """A block that does not do what the page says."""

    def __init__(self, block: Block, problem: str, printed: str = "") -> None:
        said = f"\n\nIt printed:\n{printed}" if printed else ""
        super().__init__(f"\n{block.shown()}\n\n{problem}{said}")


def replace(text: str, replaced: Mapping[str, str]) -> str:
    """Write what the tests have in place of what a page names, such as the address of their server."""
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text


def parsed(text: str, place: str) -> ast.Module:
    """Parse Python in which `await` and `async with` may stand outside of functions."""
    tree: ast.Module = compile(text, place, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return tree


@lru_cache
def pages() -> tuple[str, ...]:
    """All Markdown pages that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(name for name in listed.splitlines() if (ROOT / name).exists())


@lru_cache
def blocks() -> tuple[Block, ...]:
    """All fenced blocks of all pages, in the order in which a reader finds them."""
    return tuple(block for page in pages() for block in _blocks_of(page))


def _blocks_of(page: str) -> Iterator[Block]:
    whole = (ROOT / page).read_text()
    for fence in _FENCE.finditer(whole):
        note = _NOTE.search(whole[: fence.start()])
        text = fence["text"].replace(f"\n{fence['indent']}", "\n").removeprefix(fence["indent"])
        line = whole[: fence.start("text")].count("\n") + 1
        yield Block(page, line, fence["language"].strip(), text, note["note"].strip() if note else "")


def stray_notes() -> list[str]:
    """Comments that belong to no block, with their places."""
    found = []
    for page in pages():
        whole = (ROOT / page).read_text()
        notes = _ANY_NOTE.findall(_INLINE.sub("", _FENCE.sub("", whole)))
        used = [f"<!-- {block.note} -->" for block in blocks() if block.page == page and block.note]
        for note in notes:
            if note in used:
                used.remove(note)
            else:
                found.append(f"{page}: {note}")
    return found


def indented() -> list[str]:
    """Blocks that are marked by four spaces instead of a fence, which would escape every test."""
    found = []
    for page in pages():
        whole = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), (ROOT / page).read_text())
        for block in _INDENTED.finditer(whole):
            found.append(f"{page}:{whole[: block.start('text')].count(chr(10)) + 1}: {block['text'].splitlines()[0]}")
    return found


def inline(*starts: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every piece of code in the prose that begins with one of these words."""
    for page in pages():
        whole = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), (ROOT / page).read_text())
        for number, line in enumerate(whole.splitlines(), 1):
            for code in _INLINE.findall(line):
                if code.split(" ")[0] in starts:
                    yield f"{page}:{number}", code

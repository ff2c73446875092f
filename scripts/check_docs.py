"""Checks the documentation against the tree.

Every relative link in a Markdown file has to lead to a file and heading that exist. The map in ARCHITECTURE.md has to
name every folder, and none that does not exist.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"`[^`\n]*`")


def pages() -> list[Path]:
    """Return all pages that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).exists()]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings."""
    headings = re.findall(r"^#+ +(.+?) *$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def problems(page: Path) -> Iterator[str]:
    text = _INLINE_CODE.sub("", _FENCE.sub("", page.read_text()))
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{page.relative_to(ROOT)}: there is no {link}"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
            yield f"{page.relative_to(ROOT)}: {target.relative_to(ROOT)} has no heading #{anchor}"


def folders() -> set[str]:
    """Return the folders that the map has to name. Those of tests and of single migrations are described elsewhere."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {str(parent) for name in listed.splitlines() for parent in Path(name).parents if (ROOT / name).exists()}
    return {name for name in found if not name.startswith((".", "tests/")) and "migrations/" not in name}


def mapped(page: str) -> set[str]:
    """Return the folders in fenced `tree` blocks. Each line has a name that ends with a slash, indented below its
    parent."""
    found, path = set(), list[str]()
    for block in re.findall(r"^```tree\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for indent, name in re.findall(r"^( *)([\w./-]+)/(?= |$)", block, re.MULTILINE):
            path[len(indent) // 2 :] = [name]
            found.add("/".join(path))
    return found


def unmapped() -> Iterator[str]:
    real, drawn = folders(), mapped((ROOT / "ARCHITECTURE.md").read_text())
    drawn |= {str(parent) for name in drawn for parent in Path(name).parents} - {"."}
    yield from (f"ARCHITECTURE.md: the map does not name {name}/" for name in sorted(real - drawn))
    yield from (f"ARCHITECTURE.md: there is no {name}/" for name in sorted(drawn - real))


def main() -> int:
    found = [*(problem for page in pages() for problem in problems(page)), *unmapped()]
    print("\n".join(found) or "docs: all links lead somewhere, and the map names every folder")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

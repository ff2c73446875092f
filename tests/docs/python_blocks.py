"""Runs a Python block of the documentation, and compares what it prints with what its comments say that it prints.

A comment at the end of a line with `print(…)` is what that line prints; `…` stands for anything, and commas and spaces
are the same. Places in tracebacks are those of the page.
"""

from __future__ import annotations

import ast
import asyncio
import io
import re
import sys
import tokenize
import traceback
from collections import defaultdict
from collections.abc import Mapping
from types import CodeType
from typing import Any

from atoll import AsyncSandbox, Sandbox
from docs.blocks import Block, BlockError, blocks, parsed, replace

_VALUE = "the value of the last expression"


def run(block: Block, names: Mapping[str, Any], replaced: Mapping[str, str]) -> None:
    """Run it with these names defined. Each text of `replaced` stands for another one on the page."""
    printed: dict[int, list[str]] = defaultdict(list)

    def record(*values: object, sep: str = " ", end: str = "\n", **_: object) -> None:
        printed[sys._getframe(1).f_lineno].append(sep.join(map(str, values)) + end)

    space = {"__name__": "__main__", **names, "print": record}
    exec(_imports_before(block), space)
    try:
        _execute(_compiled(block, replaced), space)
        _use(space.pop(_VALUE, None))
        _put_away(space, names)
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == block.page]
        where = "".join(f"{frame.filename}:{frame.lineno}: {frame.line}\n" for frame in frames)
        what = "".join(traceback.format_exception_only(error))
        raise BlockError(block, f"{where}{what}", _all(printed)) from error
    for line, expected in expectations(block).items():
        found = "".join(printed.get(line, []))
        if not _matches(expected, found):
            problem = f"{block.page}:{line} prints {found.strip()!r}, not {expected!r}"
            raise BlockError(block, problem, _all(printed))


def expectations(block: Block) -> dict[int, str]:
    """What the comments say that is printed, by line of the page."""
    tokens = list(tokenize.generate_tokens(io.StringIO(block.text).readline))
    printing = {token.start[0] for token in tokens if token.type == tokenize.NAME and token.string == "print"}
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    return {block.line + line - 1: comments[line].lstrip("# ") for line in printing & comments.keys()}


def _imports_before(block: Block) -> str:
    """What earlier blocks of the page import, which a page does not repeat."""
    earlier = [each for each in blocks() if each.page == block.page and each.line < block.line]
    lines = (line for each in earlier if each.language == "python" for line in each.text.splitlines())
    return "\n".join(line for line in lines if line.startswith(("import ", "from ")))


def _compiled(block: Block, replaced: Mapping[str, str]) -> CodeType:
    tree = parsed(replace(block.text, replaced), block.page)
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        kept = ast.Assign([ast.Name(_VALUE, ast.Store())], last.value)
        tree.body[-1] = ast.copy_location(kept, last)
    ast.increment_lineno(ast.fix_missing_locations(tree), block.line - 1)
    code: CodeType = compile(tree, block.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return code


def _execute(code: CodeType, space: dict[str, Any]) -> None:
    outcome = eval(code, space)
    if outcome is not None:
        asyncio.run(outcome)


def _use(value: object) -> None:
    """What a block only describes has to work too: a sandbox is created, and so is one with a network policy."""
    if isinstance(value, dict):
        value = Sandbox(network=value)
    if isinstance(value, Sandbox):
        with value:
            assert value.exec("true").success


def _put_away(space: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    """Let go of the sandboxes that a block leaves in its variables, as the end of a program does."""
    for name, value in space.items():
        if isinstance(value, Sandbox) and names.get(name) is not value:
            value.cleanup()
        elif isinstance(value, AsyncSandbox) and names.get(name) is not value:
            asyncio.run(value.cleanup())


def _matches(expected: str, found: str) -> bool:
    parts = (r"[\s,]+".join(re.escape(word) for word in re.split(r"[\s,]+", part)) for part in expected.split("…"))
    return re.fullmatch(".*".join(parts).strip(), found.strip(), re.DOTALL) is not None


def _all(printed: Mapping[int, list[str]]) -> str:
    return "".join(f"{line:5} | {text}" for line, texts in sorted(printed.items()) for text in texts)

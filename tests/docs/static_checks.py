"""What can be checked of code that is not run: that commands, options, names and arguments exist."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import shlex
import subprocess
import tomllib
import typing
from collections.abc import Iterator
from types import UnionType
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from atoll.cli.listed_command import ListedCommand
from docs.blocks import ROOT, Block, parsed

Command = TyperCommand | TyperGroup

# --- the command line -------------------------------------------------------------------------------------------------


@functools.lru_cache
def program() -> TyperGroup:
    """The parser of the `atoll` command."""
    from atoll import cli

    return cast(TyperGroup, typer.main.get_command(cli.app))


def _context(command: Command) -> typer.Context:
    return typer.Context(command, info_name="atoll")


def command_problem(line: str, *, strict: bool) -> str | None:
    """Return what is wrong with a command line that begins with `atoll`; None if nothing is.

    Prose names commands without all of their arguments: then, without `strict`, only the names have to exist.
    """
    words = shlex.split(line.replace("…", "X"), comments=True)[1:]
    command: Any = program()
    while isinstance(command, TyperGroup):
        known = _options(command)
        while words and words[0] in known:
            words = words[2:]
        if not words:
            return None if not strict else f"'{line}' names no command"
        found = command.get_command(_context(command), words[0])
        if found is None:
            return f"there is no command '{words[0]}' in '{line}'"
        command, words = found.imported() if isinstance(found, ListedCommand) else found, words[1:]
    if not strict:
        own = words[: words.index("--")] if "--" in words else words
        unknown = [word for word in own if re.match(r"\[?--?[a-z]", word) and not _known(command, word)]
        return f"'{line}' has unknown options: {', '.join(unknown)}" if unknown else None
    try:
        command.make_context(command.name, list(words))
    except typer.TyperException as error:
        return f"'{line}': {error.format_message()}"
    return None


def _known(command: Command, word: str) -> bool:
    return word.strip("[]").partition("=")[0] in _options(command)


def _options(command: Command) -> set[str]:
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return options | {"--help"}


def shell_problems(block: Block) -> Iterator[str]:
    """Check the `atoll`, `make` and `pip install` commands of a block of shell commands."""
    for number, whole in enumerate(block.text.splitlines(), block.line):
        line = re.sub(r"^(\w+=\S* +)+", "", whole)  # variables of one command
        for word, problem in (("atoll", atoll_problem), ("make", make_problem), ("pip", extra_problem)):
            if line.startswith(f"{word} ") and (found := problem(line)):
                yield f"{block.page}:{number}: {found}"


def atoll_problem(line: str) -> str | None:
    return command_problem(line, strict=True)


def make_problem(line: str) -> str | None:
    """Ask make itself, which runs nothing with -n. `make X` for a target that does not exist is an error."""
    words = shlex.split(line, comments=True)[1:]
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=30)
    return None if done.returncode == 0 else f"'{line}': {done.stderr.strip()}"


def extra_problem(line: str) -> str | None:
    """`pip install 'atoll[EXTRA]'` names an extra that the package has."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [name for names in re.findall(r"atoll\[([^\]]*)\]", line) for name in names.split(",")]
    wrong = ", ".join(name for name in named if name not in extras)
    return f"the package has no extra {wrong}" if wrong else None


# --- Python -----------------------------------------------------------------------------------------------------------


def python_problems(block: Block) -> Iterator[str]:
    """Check that the names which a block imports from Atoll exist, and the keyword arguments of its calls of them."""
    tree = parsed(block.text, block.page)
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "atoll":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    yield f"{block.page}:{block.line + node.lineno - 1}: there is no {node.module}.{alias.name}"
                else:
                    names[alias.asname or alias.name] = getattr(module, alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in _unknown_keywords(node, names):
                yield f"{block.page}:{block.line + node.lineno - 1}: {ast.unparse(node.func)} has no '{keyword}'"


def _unknown_keywords(call: ast.Call, names: dict[str, Any]) -> list[str]:
    used = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    if isinstance(call.func, ast.Name) and call.func.id in names:
        candidates = [names[call.func.id]]
    elif isinstance(call.func, ast.Attribute):
        candidates = [getattr(kind, call.func.attr) for kind in public_classes() if hasattr(kind, call.func.attr)]
    else:
        return []
    accepted = [keywords for candidate in candidates if (keywords := keywords_of(candidate)) is not None]
    if not accepted or len(accepted) < len(candidates):
        return []
    return (
        []
        if any(keywords >= set(used) for keywords in accepted)
        else sorted(set(used) - {name for keywords in accepted for name in keywords})
    )


@functools.lru_cache
def public_classes() -> tuple[type, ...]:
    import atoll
    from atoll import openhands, openmanus

    modules = (atoll, openmanus, openhands)
    found = {getattr(module, name) for module in modules for name in module.__all__}
    return tuple(each for each in found if isinstance(each, type))


def keywords_of(function: Any) -> set[str] | None:
    """Return the names that can be given as keyword arguments; None if that can be any."""
    try:
        parameters = inspect.signature(function, eval_str=False).parameters
    except (TypeError, ValueError):
        return None
    found: set[str] = set()
    for name, parameter in parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            known = _typed_keywords(function, name)
            if known is None:
                return None
            found |= known
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            found.add(name)
    return found


def _typed_keywords(function: Any, name: str) -> set[str] | None:
    """The keys of a `**names: Unpack[Keys]`."""
    target = getattr(function, "__init__") if isinstance(function, type) else function  # noqa: B009
    try:
        hint = typing.get_type_hints(target).get(name)
    except (NameError, TypeError):
        return None
    arguments = typing.get_args(hint)
    keys = arguments[0] if arguments and not isinstance(hint, UnionType) else hint
    annotations = getattr(keys, "__annotations__", None)
    return set(annotations) if annotations else None

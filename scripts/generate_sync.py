"""Writes src/atoll/_sync.py and _sync_image.py: the synchronous classes, generated from the asynchronous ones.

Every public method gets a twin with the same name, arguments and text that runs the original through the portal. So the
two cannot diverge. With --check nothing is written, and a difference is an error.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from generated import formatted, write_or_check

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src/atoll/_sync.py"
SOURCES = {
    "src/atoll/sandbox/command.py": {"AsyncCommand": "Command"},
    "src/atoll/sandbox/terminal.py": {"AsyncTerminal": "Terminal"},
    "src/atoll/sandbox/shell.py": {"AsyncShell": "Shell"},
    "src/atoll/guest/file_watch.py": {"AsyncWatch": "Watch"},
    "src/atoll/guest/port_streams.py": {"AsyncPortStream": "PortStream"},
    "src/atoll/sandbox/port_forward.py": {"AsyncForward": "Forward"},
    "src/atoll/sandbox/sandbox.py": {"AsyncSandbox": "Sandbox"},
    "src/atoll/sandbox/volumes.py": {"AsyncVolumes": "Volumes"},
}
OF_IMAGES = {"src/atoll/builds/image.py": {"AsyncImage": "Image"}}
"""In a file of their own, because few programs need them and importing them takes time."""
TARGETS = {TARGET: SOURCES, TARGET.with_name("_sync_image.py"): OF_IMAGES}
PARTS = "src/atoll/sandbox/*_methods.py"
"""The files with the base classes of `AsyncSandbox`."""
CLASSES = {old: new for names in (SOURCES | OF_IMAGES).values() for old, new in names.items()}
INTERNAL = {"access", "is_kept", "listen"}
"""Public members that are for the rest of Atoll, not for users."""
DUNDERS = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aclose": "close",
}
HEADER = '''"""The synchronous classes. Generated from the asynchronous ones by scripts/generate_sync.py."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from atoll.model import manus_names
from atoll.model.checkpoint import Change, Checkpoint, Snapshot, Undo
from atoll.sandbox.command import DEFAULT_OUTPUT_BYTES, AsyncCommand, Output
from atoll.engines.contract import Engine
from atoll.sandbox.export import Export
from atoll.sandbox.port_forward import AsyncForward
from atoll.sandbox.start_up import StartState
from atoll.guest.files import FileInfo
from atoll.guest.port_streams import AsyncPortStream
from atoll.guest.file_watch import AsyncWatch, FileEvent
from atoll.model import ExecutionResult, ListedSandbox, ListeningPort, Observation
from atoll.model import SandboxDetails, SandboxSpec, Stats, UndoRule
from atoll.model.network_policy import NetworkRules
from atoll.network.refusals import Refusal
from atoll.sandbox.on_class import on_class_too_sync
from atoll.sandbox.options import NamedImage
from atoll.sandbox.portal import Portal, portal
from atoll.sandbox.execution import CommandLine
from atoll.sandbox.sandbox import DEFAULT_TIMEOUT_S, AsyncSandbox
from atoll.settings import Settings
from atoll.sandbox.shell import AsyncShell
from atoll.sandbox.start_up import StartState
from atoll.sandbox.terminal import AsyncTerminal
from atoll.sandbox.volumes import AsyncVolumes
from atoll.model.volume import VolumeInfo
'''
HEADER_OF_IMAGES = """
from atoll.builds.image import DEFAULT_BUILD_S, AsyncImage
from atoll.builds.request import OnBuildEvent
from atoll.images import ImageConfig
"""
WRAPPER = """
    def __init__(self, original: {old}, portal: Portal) -> None:
        self._async = original
        self._portal = portal
"""


TWIN = """
    def _twin(self, original: AsyncSandbox) -> Self:
        twin = type(self).__new__(type(self))
        twin._async, twin._portal = original, self._portal
        return twin
"""


def sync_type(annotation: ast.expr | None) -> str:
    """Return the annotation with the names of the synchronous classes."""
    text = ast.unparse(annotation) if annotation else "None"
    for old, new in {
        "AsyncIterable[bytes] | ": "",
        "AsyncIterator": "Iterator",
        "AsyncGenerator": "Iterator",
        **CLASSES,
    }.items():
        text = text.replace(old, new)
    # Inside the class, `list` is its method.
    return re.sub(r"(?<![.\w])list\[", "builtins.list[", text)


def docstring(node: ast.AST, indent: str) -> str:
    text = ast.get_docstring(node, clean=False)  # type: ignore[arg-type]
    if not text:
        return ""
    return f'{indent}"""{text.replace("async with", "with").replace("async for", "for")}"""\n'


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, str]:
    """Return the parameter list, and the arguments for calling the original."""
    parts = function.args
    for argument in [*parts.args, *parts.kwonlyargs]:
        if argument.annotation:
            argument.annotation = ast.parse(sync_type(argument.annotation), mode="eval").body
    if parts.vararg and parts.vararg.annotation:
        parts.vararg.annotation = ast.parse(sync_type(parts.vararg.annotation), mode="eval").body
    positional = [argument.arg for argument in parts.args[1:]]
    keywords = [f"{argument.arg}={argument.arg}" for argument in parts.kwonlyargs]
    star = [f"*{parts.vararg.arg}"] if parts.vararg else []
    rest = [f"**{parts.kwarg.arg}"] if parts.kwarg else []
    return ast.unparse(parts), ", ".join([*positional, *star, *keywords, *rest])


def is_decorated(function: ast.FunctionDef | ast.AsyncFunctionDef, decorator: str) -> bool:
    return any(isinstance(item, ast.Name) and item.id == decorator for item in function.decorator_list)


def method(function: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> str:
    name = DUNDERS.get(function.name, function.name)
    parameters, passed = arguments(function)
    returned = sync_type(function.returns)
    text = docstring(function, " " * 8)
    if is_decorated(function, "property"):
        return (
            f"\n    @property\n    def {name}(self) -> {returned}:\n{text}        return self._async.{function.name}\n"
        )
    head = f"\n    def {name}({parameters}) -> {returned}:\n{text}"
    if is_decorated(function, "on_class_too"):
        head = f"\n    @on_class_too_sync{head}"
    if is_decorated(function, "classmethod"):
        call = f"portal().call({owner}.{function.name}({passed}))"
        if returned == "builtins.list[Self]":
            call = f"[cls(each, portal()) for each in {call}]"
        if returned != "Self":
            return f"\n    @classmethod{head}        {'' if returned == 'None' else 'return '}{call}\n"
        return (
            f"\n    @classmethod\n    def {name}({parameters}) -> {returned}:\n{text}"
            f"        made = cls.__new__(cls)\n        made._async = {call}\n"
            "        made._portal = portal()\n        return made\n"
        )
    call = f"self._async.{function.name}({passed})"
    if name == "__next__":
        return (
            f"{head}        try:\n            return self._portal.call({call})\n"
            "        except StopAsyncIteration:\n            raise StopIteration from None\n"
        )
    if name == "__iter__" and not isinstance(function, ast.AsyncFunctionDef):
        return f"\n    def __iter__(self) -> Self:\n{text}        return self\n"
    if returned.startswith("Iterator"):
        return f"{head}        return self._portal.iterate({call})\n"
    if isinstance(function, ast.AsyncFunctionDef):
        call = f"self._portal.call({call})"
    if returned in CLASSES.values():
        if name in ("__enter__", "__iter__"):
            return f"\n    def {name}(self) -> Self:\n{text}        {call}\n        return self\n"
        return f"{head}        return {returned}({call}, self._portal)\n"
    if returned == "Self":
        return f"{head}        {call}\n        return self\n"
    if returned == "builtins.list[Self]":
        return f"{head}        return [self._twin(each) for each in {call}]\n"
    return f"{head}        {'' if returned == 'None' else 'return '}{call}\n"


def constructor(function: ast.FunctionDef) -> str:
    parameters, passed = arguments(function)
    return (
        f"\n    def __init__({parameters}) -> None:\n{docstring(function, ' ' * 8)}"
        f"        self._async = AsyncSandbox({passed})\n        self._portal = portal()\n"
    )


def is_public(name: str) -> bool:
    return name in DUNDERS or not (name.startswith("_") or name in INTERNAL)


def public_attributes(node: ast.ClassDef) -> list[str]:
    """Return the public names that the constructor sets."""
    found: list[str] = []
    constructors = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    for item in [part for constructor in constructors for part in ast.walk(constructor)]:
        targets = (
            item.targets if isinstance(item, ast.Assign) else [item.target] if isinstance(item, ast.AnnAssign) else []
        )
        found += [t.attr for t in targets if isinstance(t, ast.Attribute) and is_public(t.attr)]
    return found


ATTRIBUTE_TYPES = {
    "port": "int",
    "id": "str",
    "name": "str",
    "spec": "SandboxSpec",
    "timeout_s": "float",
    "path": "str",
}


def twin(node: ast.ClassDef, new: str) -> str:
    text = f"\n\nclass {new}:\n{docstring(node, '    ')}"
    if new == "Sandbox":
        text += constructor(next(i for i in node.body if isinstance(i, ast.FunctionDef) and i.name == "__init__"))
    elif any(isinstance(item, ast.FunctionDef) and item.name == "__init__" for item in node.body):
        text += WRAPPER.format(old=node.name)
    if new == "Sandbox":
        text += TWIN
    for name in public_attributes(node):
        text += (
            f"\n    @property\n    def {name}(self) -> {ATTRIBUTE_TYPES[name]}:\n        return self._async.{name}\n"
        )
    for part in [node, *bases(node)]:
        for item in part.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and is_public(item.name):
                text += method(item, node.name)
    return text


def bases(node: ast.ClassDef) -> list[ast.ClassDef]:
    """Return the base classes of the class that are in files of their own, in their order."""
    trees = [ast.parse(path.read_text()) for path in sorted(ROOT.glob(PARTS))]
    found = {item.name: item for tree in trees for item in tree.body if isinstance(item, ast.ClassDef)}
    return [found[base.id] for base in node.bases if isinstance(base, ast.Name)]


def generate(target: Path) -> str:
    sources = TARGETS[target]
    text = HEADER + (HEADER_OF_IMAGES if sources is OF_IMAGES else "")
    for source, names in sources.items():
        tree = ast.parse((ROOT / source).read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                text += twin(node, names[node.name])
    return formatted(target, text, "I,F401")


def main() -> int:
    return max(write_or_check(target, generate(target)) for target in TARGETS)


if __name__ == "__main__":
    raise SystemExit(main())

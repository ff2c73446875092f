"""The sandbox class of the public API, with its commands, shells, terminals, files and ports.

`sandbox.py` defines `AsyncSandbox`: how a sandbox is created, attached to and deleted. Each other group of its methods
has its own file, and all of them reach the sandbox through `sandbox_access.py`.
"""

from atoll.sandbox.command import AsyncCommand, Output
from atoll.sandbox.execution import CommandLine
from atoll.sandbox.export import Export
from atoll.sandbox.port_forward import AsyncForward
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.sandbox.shell import AsyncShell
from atoll.sandbox.terminal import AsyncTerminal

__all__ = [
    "AsyncCommand",
    "AsyncForward",
    "AsyncSandbox",
    "AsyncShell",
    "AsyncTerminal",
    "CommandLine",
    "Export",
    "Output",
]

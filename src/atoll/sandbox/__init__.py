"""One sandbox, as users hold it: commands, shells, terminals, files and ports of one environment.

`AsyncSandbox` lies in `sandbox.py`: how it is made, attached to and deleted. What else it can do lies beside it, one
file for each group of methods, and all of them reach the sandbox through `access.py`.
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

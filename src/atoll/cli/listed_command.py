"""Commands that are listed without their modules, which are imported only when a command is used.

The modules of all commands together take several times longer to import than any one of them, which every start of
`atoll` would have to wait for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand


class ListedCommand(TyperCommand):
    """A command, or a group of commands, as its name, its help in the list of commands, and where it is."""

    def __init__(self, name: str, target: str, help: str) -> None:
        """Create it from its name, `module:function` or `module:app`, and the first sentence of its help."""
        super().__init__(name, help=help, rich_markup_mode=None)
        self._target = target

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Begin the command: everything from here on is done by the one that is imported."""
        return self.imported().make_context(*args, **options)

    def imported(self) -> Any:
        """Return the command itself."""
        assert self.name is not None
        module, _, attribute = self._target.partition(":")
        found = getattr(import_module(module), attribute)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=self.name)
        else:
            app.command(self.name)(found)
        return typer.main.get_group(app).commands[self.name]

"""The progress bar of an image that is being made: bytes of a download, or steps of a build."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from atoll.printable import printable

if TYPE_CHECKING:
    from atoll.sandbox.sandbox import AsyncSandbox

_SHOWN = 48


class Step(Protocol):
    """What is reported by images, and by engines."""

    @property
    def stage(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def done_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int | None: ...
    @property
    def step(self) -> int: ...
    @property
    def steps(self) -> int: ...


class ImageBar:
    """Shows nothing until there is something to show. Without a terminal it writes one line for each step of a build,
    and nothing else."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._bars: Any = None
        self._bar: Any = None
        self._said = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def advance(self, step: Step) -> None:
        detail = printable(step.detail)
        if not sys.stderr.isatty():
            if step.steps and detail != self._said:
                self._said = detail
                print(f"{self._title}: {detail}", file=sys.stderr)
            return
        if self._bars is None:
            self._start()
        short = detail if len(detail) <= _SHOWN else detail[: _SHOWN - 1] + "…"
        done, total = (step.step - 1, step.steps) if step.steps else (step.done_bytes, step.total_bytes)
        unit = f"{step.step}/{step.steps}" if step.steps else _bytes(step)
        description = f"{self._title}: {short}" if step.steps else f"{self._title}: {step.stage} {short}"
        self._bars.update(self._bar, description=description, completed=done, total=total, unit=unit)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(24),
            TextColumn("{task.fields[unit]}", markup=False),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=Console(stderr=True, highlight=False), transient=True)
        self._bar = self._bars.add_task(self._title, total=None, unit="")
        self._bars.start()


def _bytes(step: Step) -> str:
    from atoll.cli.target import size

    done = size(step.done_bytes) if step.done_bytes else ""
    return f"{done} of {size(step.total_bytes)}" if step.total_bytes else done


async def fetch_image(sandbox: AsyncSandbox) -> None:
    """Make the image of a sandbox that is about to be created, with a progress bar, unless it is there already."""
    from atoll.engines.contract import ImageSource

    image = sandbox.spec.image
    if image == "host" or image.startswith("snapshot:"):
        return
    engine = await sandbox.access.engine()
    if isinstance(engine, ImageSource):
        with ImageBar(image) as bar:
            await engine.ensure_image(image, bar.advance)

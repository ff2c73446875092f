"""Errors of a build, which say where in the Dockerfile they happened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from atoll.builds.dockerfile.instructions import Place
from atoll.builds.steps import Step
from atoll.errors import BuildError, SandboxError
from atoll.printable import printable

_SHOWN = 200


@contextlib.contextmanager
def explained(place: Place, text: str, number: int = 0) -> Iterator[None]:
    """Let errors name the instruction that they come from."""
    try:
        yield
    except BuildError as error:
        if error.place:
            raise
        raise _placed(error, place, text, number) from error
    except SandboxError as error:
        where = f"{place.file}:{place.line}"
        if error.reason.startswith(where):
            raise
        raise _placed(error, place, text, number) from error
    except (OSError, ValueError) as error:
        what = printable(str(error.strerror or error) if isinstance(error, OSError) else str(error))[:_SHOWN]
        raise _placed(BuildError(f"it failed: {what}"), place, text, number) from error


def _placed(error: SandboxError, place: Place, text: str, number: int) -> BuildError:
    where = f"{place.file}:{place.line}"
    own = error if isinstance(error, BuildError) else BuildError(error.reason)
    cause = own.cause or str(getattr(error, "cause", ""))
    return BuildError(
        f"{where}: {error.reason}",
        hint=error.hint,
        step=number,
        place=where,
        instruction=shown(text),
        exit_code=own.exit_code,
        cause=cause,
        output=own.output,
        sandbox_id=own.sandbox_id,
    )


@contextlib.contextmanager
def in_step(step: Step) -> Iterator[None]:
    with explained(step.place, step.text, step.number):
        yield


def shown(text: str) -> str:
    """Return an instruction for a message: on one line, printable, and not too long."""
    line = printable(text.replace("\n", " "))
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"

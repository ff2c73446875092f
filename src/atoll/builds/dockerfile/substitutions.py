"""Which parts of an instruction have variables substituted in them, and whether they are written correctly."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.builds.dockerfile.instructions import (
    Arg,
    Copy,
    DeclaredVolumes,
    Env,
    Expose,
    Instruction,
    Label,
    Run,
    StopSignal,
    User,
    Word,
    WorkDir,
)
from atoll.builds.dockerfile.refusals import refusal, shown
from atoll.builds.dockerfile.variables import MissingVariableError, SubstitutionError, expand, expand_text


def words_of(instruction: Instruction) -> Iterator[Word]:
    match instruction:
        case Arg():
            yield from (word for name, default in instruction.names for word in (name, default) if word)
        case Env():
            yield from (word for pair in instruction.variables for word in pair)
        case Label():
            yield from (word for pair in instruction.labels for word in pair)
        case Copy():
            yield from (*instruction.sources, instruction.target, instruction.owner, instruction.mode)
        case Run():
            yield from (word for each in instruction.mounts for word in (each.target, each.source, each.id))
        case WorkDir():
            yield instruction.path
        case User():
            yield instruction.user
        case Expose():
            yield from instruction.ports
        case StopSignal():
            yield instruction.signal
        case DeclaredVolumes():
            yield from instruction.paths


def check_substitutions(instruction: Instruction, escape: str) -> None:
    """Refuse what cannot be substituted, whatever the values are."""
    for word in words_of(instruction):
        try:
            expand(word, {}, escape)
        except MissingVariableError:
            continue
        except SubstitutionError as error:
            hint = f"Write ${{NAME}} or ${{NAME:-DEFAULT}}, close each quote, and write {escape}$ for a dollar sign."
            raise refusal(instruction.place, f"{shown(word)}: {error}", hint) from None
    for document in instruction.heredocs if isinstance(instruction, Copy) else ():
        try:
            if document.expand:
                expand_text(document.content, {})
        except MissingVariableError:
            continue
        except SubstitutionError as error:
            hint = f"Write <<'{document.name}' if nothing is to be substituted in it, or \\$ for a dollar sign."
            reason = f"the here-document {shown(document.name)}: {error}"
            raise refusal(instruction.place, reason, hint) from None

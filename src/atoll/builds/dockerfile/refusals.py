"""How a Dockerfile is refused: where, why, and what to write in its place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from atoll.builds.dockerfile.instructions import Place
from atoll.errors import DockerfileError
from atoll.printable import printable

_SHOWN_CHARS = 80

USAGE = {
    "ADD": "ADD [--chown=USER:GROUP] [--chmod=MODE] SOURCE… TARGET",
    "ARG": "ARG NAME[=DEFAULT]…",
    "CMD": 'CMD ["PROGRAM", "ARGUMENT"…], or CMD COMMAND LINE',
    "COPY": "COPY [--from=STAGE] [--chown=USER:GROUP] [--chmod=MODE] SOURCE… TARGET",
    "ENTRYPOINT": 'ENTRYPOINT ["PROGRAM", "ARGUMENT"…], or ENTRYPOINT COMMAND LINE',
    "ENV": "ENV NAME=VALUE…",
    "EXPOSE": "EXPOSE PORT[/PROTOCOL]…",
    "FROM": "FROM IMAGE [AS NAME]",
    "HEALTHCHECK": "HEALTHCHECK [--interval=30s] CMD COMMAND, or HEALTHCHECK NONE",
    "LABEL": "LABEL NAME=VALUE…",
    "MAINTAINER": "LABEL org.opencontainers.image.authors=NAME",
    "ONBUILD": "the instruction itself, without ONBUILD, in the Dockerfile that uses the image",
    "RUN": "RUN [--mount=…] [--network=none] COMMAND LINE",
    "SHELL": 'SHELL ["PROGRAM", "ARGUMENT"…]',
    "STOPSIGNAL": "STOPSIGNAL SIGNAL",
    "USER": "USER NAME[:GROUP]",
    "VOLUME": "VOLUME PATH…",
    "WORKDIR": "WORKDIR PATH",
}


def refusal(place: Place, reason: str, hint: str) -> DockerfileError:
    return DockerfileError(f"{place.file}:{place.line}: {reason}", hint=hint)


def misuse(place: Place, keyword: str, reason: str) -> DockerfileError:
    """Return the refusal of an instruction that is not written as it has to be."""
    return refusal(place, f"{keyword} {reason}", f"Write {USAGE[keyword]}.")


def shown(text: str) -> str:
    """Return the text in quotes as it may stand in a message."""
    cut = text[:_SHOWN_CHARS]
    return f"'{printable(cut)}{'…' if len(text) > len(cut) else ''}'"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably meant."""
    found = difflib.get_close_matches(name[:_SHOWN_CHARS], list(names), n=1, cutoff=0.6)
    return found[0] if found else None

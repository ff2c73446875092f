"""The flags of instructions, such as `--from=STAGE`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from atoll.builds.dockerfile.instructions import Place
from atoll.builds.dockerfile.refusals import nearest, refusal, shown

Kind = Literal["switch", "text", "texts"]

KNOWN: Mapping[str, Mapping[str, Kind]] = {
    "ADD": {
        "chown": "text",
        "chmod": "text",
        "link": "switch",
        "keep-git-dir": "switch",
        "checksum": "text",
        "exclude": "texts",
    },
    "COPY": {
        "from": "text",
        "chown": "text",
        "chmod": "text",
        "link": "switch",
        "exclude": "texts",
        "parents": "switch",
    },
    "FROM": {"platform": "text"},
    "HEALTHCHECK": {
        "interval": "text",
        "timeout": "text",
        "start-period": "text",
        "start-interval": "text",
        "retries": "text",
    },
    "RUN": {"mount": "texts", "network": "text"},
}
_UNSUPPORTED = {
    ("RUN", "security"): "Remove it: each RUN is in a sandbox, and none has more rights than the others.",
    ("RUN", "device"): "Remove it: there are no devices of this machine in a build.",
    ("ADD", "unpack"): "Remove it: ADD unpacks local archives, and COPY copies them as they are.",
}
_MAX_FLAGS = 100


class Flags:
    """The flags that an instruction was given."""

    def __init__(self, place: Place, keyword: str, flags: Sequence[str]) -> None:
        self._values: dict[str, list[str]] = {}
        known = KNOWN.get(keyword, {})
        if len(flags) > _MAX_FLAGS:
            raise refusal(place, f"{keyword} has {len(flags)} flags", f"Use at most {_MAX_FLAGS}.")
        for flag in flags:
            name, equals, value = flag[2:].partition("=")
            kind = known.get(name)
            if kind is None:
                raise _unknown(place, keyword, name, known)
            if name in self._values and kind != "texts":
                raise refusal(place, f"--{name} is there twice", "Keep one of them.")
            if kind == "switch":
                value = value.lower() if equals else "true"
                if value not in ("true", "false"):
                    raise refusal(
                        place, f"--{name} is {shown(value)}", f"Write --{name}, --{name}=true or --{name}=false."
                    )
            elif not equals:
                raise refusal(place, f"--{name} has no value", f"Write --{name}=….")
            self._values.setdefault(name, []).append(value)

    def text(self, name: str) -> str:
        return self._values.get(name, [""])[0]

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(self._values.get(name, ()))

    def is_on(self, name: str) -> bool:
        return self.text(name) == "true"

    def all(self) -> dict[str, str]:
        return {name: values[0] for name, values in self._values.items()}


def _unknown(place: Place, keyword: str, name: str, known: Mapping[str, Kind]) -> Exception:
    if hint := _UNSUPPORTED.get((keyword, name)):
        return refusal(place, f"{keyword} --{name} is not supported", hint)
    if meant := nearest(name, known):
        return refusal(place, f"{keyword} has no flag {shown('--' + name)}", f"Did you mean --{meant}?")
    flags = ", ".join(f"--{each}" for each in known)
    return refusal(
        place,
        f"{keyword} has no flag {shown('--' + name)}",
        f"It has {flags}." if flags else f"{keyword} has no flags.",
    )

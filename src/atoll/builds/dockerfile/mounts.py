"""The `--mount` of RUN."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from typing import Literal, cast

from atoll.builds.dockerfile.instructions import Mount, Place
from atoll.builds.dockerfile.refusals import nearest, refusal, shown
from atoll.errors import DockerfileError

_HINT = "Write --mount=type=bind|cache|secret|tmpfs,target=PATH,…."
_TYPES = ("bind", "cache", "secret", "tmpfs")
_SHARING = ("shared", "private", "locked")
_OTHER_NAMES = {"src": "source", "dst": "target", "destination": "target", "ro": "readonly", "rw": "readwrite"}
_KEYS: dict[str, tuple[str, ...]] = {
    "bind": ("type", "target", "source", "from", "readonly", "readwrite"),
    "cache": ("type", "target", "source", "from", "readonly", "readwrite", "id", "sharing", "mode", "uid", "gid"),
    "secret": ("type", "target", "source", "id", "required", "mode", "uid", "gid", "env"),
    "tmpfs": ("type", "target", "size", "readonly", "readwrite"),
}
_ANY_KEY = tuple(dict.fromkeys(key for keys in _KEYS.values() for key in keys))
_SWITCHES = ("readonly", "readwrite", "required")
_TRUE = ("1", "t", "true")
_FALSE = ("0", "f", "false")
_SIZE = re.compile(r"(\d{1,15})(?:\.\d{1,6})? ?([kmgtp]?)(?:i?b)?", re.IGNORECASE)
_MAX_ID = (1 << 32) - 2
_MAX_MODE = 0o7777
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_mount(text: str, place: Place) -> Mount:
    return _Reader(text, place).mount()


@dataclass(frozen=True, slots=True)
class _Reader:
    text: str
    place: Place

    def mount(self) -> Mount:
        options = self._options()
        kind = options.get("type", "bind").lower()
        if kind == "ssh":
            raise self._refusal("type=ssh is not supported", "Give a key as a secret: --mount=type=secret,id=….")
        if kind not in _TYPES:
            meant = nearest(kind, _TYPES)
            raise self._refusal(f"has no type {shown(kind)}", f"Did you mean type={meant}?" if meant else _HINT)
        for key in options:
            if key not in _KEYS[kind]:
                raise self._refusal(f"of type {kind} has no option '{key}'", f"It has {', '.join(_KEYS[kind])}.")
        mount = Mount(
            type=cast(Literal["bind", "cache", "secret", "tmpfs"], kind),
            target=options.get("target", ""),
            source="" if kind == "secret" else options.get("source", ""),
            source_stage=options.get("from", ""),
            id=options.get("id") or (options.get("source", "") if kind == "secret" else ""),
            writable=self._is_writable(kind, options),
            sharing=cast(Literal["shared", "private", "locked"], self._sharing(options)),
            required=self._switch(options, "required"),
            mode=self._number(options, "mode", 8, _MAX_MODE),
            uid=self._number(options, "uid", 10, _MAX_ID) or 0,
            gid=self._number(options, "gid", 10, _MAX_ID) or 0,
            size_bytes=self._size(options),
            env=options.get("env", ""),
        )
        self._check(mount, options)
        return mount

    def _check(self, mount: Mount, options: dict[str, str]) -> None:
        if "$" in mount.source_stage:
            raise self._refusal(
                "cannot have a variable in 'from'", "Name a stage after it: FROM $IMAGE AS NAME, and from=NAME."
            )
        if mount.type == "secret":
            if options.get("id") and options.get("source"):
                raise self._refusal("has both 'id' and 'source'", "Keep 'id'.")
            if not mount.id and not mount.target:
                raise self._refusal("of type secret has no id", "Write --mount=type=secret,id=NAME.")
            if mount.env and not _ENV_NAME.fullmatch(mount.env):
                raise self._refusal(f"cannot set a variable {shown(mount.env)}", "Write env=NAME.")
        elif not mount.target:
            raise self._refusal("has no target", _HINT)

    def _options(self) -> dict[str, str]:
        try:
            fields = next(csv.reader([self.text], strict=True), [])
        except csv.Error as error:
            raise self._refusal(f"cannot be read: {error}", _HINT) from None
        options: dict[str, str] = {}
        for field in fields:
            written, equals, value = field.partition("=")
            key = _OTHER_NAMES.get(written.lower(), written.lower())
            if key not in _ANY_KEY:
                meant = nearest(key, _ANY_KEY)
                raise self._refusal(f"has no option {shown(written)}", f"Did you mean '{meant}'?" if meant else _HINT)
            if not equals and key not in _SWITCHES:
                raise self._refusal(f"has no value for '{key}'", f"Write {key}=….")
            if key in options:
                raise self._refusal(f"has two values for '{key}'", "Keep one of them.")
            options[key] = value if equals else "true"
        return options

    def _is_writable(self, kind: str, options: dict[str, str]) -> bool:
        if "readonly" in options:
            return not self._switch(options, "readonly")
        if "readwrite" in options:
            return self._switch(options, "readwrite")
        return kind in ("cache", "tmpfs")

    def _switch(self, options: dict[str, str], key: str) -> bool:
        value = options.get(key, "false").lower()
        if value not in _TRUE + _FALSE:
            raise self._refusal(f"has {key}={shown(value)}", f"Write {key}=true or {key}=false.")
        return value in _TRUE

    def _sharing(self, options: dict[str, str]) -> str:
        sharing = options.get("sharing", "shared").lower()
        if sharing not in _SHARING:
            raise self._refusal(f"has sharing={shown(sharing)}", f"Write sharing={'|'.join(_SHARING)}.")
        return sharing

    def _number(self, options: dict[str, str], key: str, base: int, most: int) -> int | None:
        if key not in options:
            return None
        text = options[key]
        digits = "01234567" if base == 8 else "0123456789"
        if not text or len(text) > 12 or text.strip(digits) or int(text, base) > most:
            what = "octal digits" if base == 8 else "a number"
            raise self._refusal(
                f"has {key}={shown(text)}", f"Write {key} as {what}; variables are not substituted in it."
            )
        return int(text, base)

    def _size(self, options: dict[str, str]) -> int | None:
        if "size" not in options:
            return None
        match = _SIZE.fullmatch(options["size"])
        if match is None:
            raise self._refusal(f"has size={shown(options['size'])}", "Write a size as 100m or 2g.")
        return int(match[1]) << (10 * "kmgtp".find(match[2].lower()) + 10 if match[2] else 0)

    def _refusal(self, reason: str, hint: str) -> DockerfileError:
        return refusal(self.place, f"the mount {shown(self.text)} {reason}", hint)

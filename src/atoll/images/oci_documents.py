"""Parsing the documents of an OCI image: index, manifest, configuration. They are not trusted; nothing else is read."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from typing import Any

from atoll.archive import strict_json
from atoll.archive.archive_limits import ImageLimits
from atoll.errors import ImageError

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_LAYER_TYPE = re.compile(
    r"^application/vnd\.(?:oci\.image\.layer(?:\.nondistributable)?\.v1\.tar(?:\+gzip|\+zstd)?"
    r"|docker\.image\.rootfs\.diff\.tar(?:\.gzip|\.zstd)?)\Z"
)
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}\Z")
_MACHINES = {
    "x86_64": ("amd64", ""),
    "aarch64": ("arm64", "v8"),
    "armv7l": ("arm", "v7"),
    "armv6l": ("arm", "v6"),
    "i686": ("386", ""),
    "ppc64le": ("ppc64le", ""),
    "s390x": ("s390x", ""),
    "riscv64": ("riscv64", ""),
}
_MAX_TEXT = 128 * 1024
_MAX_ITEMS = 4096
_MAX_HISTORY = 1024
_MAX_STEP = 4096


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The defaults that an image gives for running it. They are used only inside a sandbox, and shown.

    Annotations are dropped here, and no text of an image ever becomes an option of a program on the host.
    """

    env: dict[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    work_dir: str = ""
    user: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    exposed_ports: tuple[str, ...] = ()
    """Such as `8000/tcp`."""
    volumes: tuple[str, ...] = ()
    """The paths that VOLUME declares, which are only noted."""
    stop_signal: str = ""
    shell: tuple[str, ...] = ()
    """What runs command lines of a Dockerfile. Empty: `/bin/sh -c`."""
    healthcheck: dict[str, object] = field(default_factory=dict)
    """As in an OCI configuration: `Test`, `Interval`, … in nanoseconds."""
    history: tuple[str, ...] = ()
    """The instructions that made the image, oldest first. They are only shown."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    digest: str
    size: int
    media_type: str


@dataclass(frozen=True, slots=True)
class Manifest:
    config: Descriptor
    layers: tuple[Descriptor, ...]


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = strict_json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"the {what} of the image is not valid JSON") from error
    if not isinstance(value, dict):
        raise ImageError(f"the {what} of the image is malformed")
    return value


def machine() -> tuple[str, str]:
    """Return this machine's architecture and variant, as OCI names them."""
    return _MACHINES.get(os.uname().machine, (os.uname().machine, ""))


def choose(index: dict[str, Any]) -> Descriptor:
    """Return the entry of an index for this machine. An exact variant is preferred to an unspecified one."""
    architecture, variant = machine()
    offered, fitting = [], []
    for entry in _list(index, "manifests", "index"):
        place = entry.get("platform") if isinstance(entry, dict) else None
        if not isinstance(place, dict):
            place = {}
        offered.append(f"{place.get('os', '?')}/{place.get('architecture', '?')}"[:40])
        if (place.get("os"), place.get("architecture")) == ("linux", architecture):
            theirs = place.get("variant", "")
            if theirs in ("", variant) or not variant:
                fitting.append((theirs != variant, descriptor(entry, "index")))
    if not fitting and len(offered) == 1 and offered[0] == "?/?":
        return descriptor(_list(index, "manifests", "index")[0], "index")
    if not fitting:
        raise ImageError(
            f"the image is not made for linux/{architecture}, only for {', '.join(offered[:12]) or 'nothing'}"
        )
    return min(fitting, key=lambda item: item[0])[1]


def descriptor(value: object, what: str) -> Descriptor:
    if isinstance(value, dict):
        digest, size, kind = value.get("digest"), value.get("size"), value.get("mediaType", "")
        if (
            isinstance(digest, str)
            and isinstance(size, int)
            and isinstance(kind, str)
            and size >= 0
            and _DIGEST.match(digest)
        ):
            return Descriptor(digest, size, kind)
    raise ImageError(f"the {what} of the image is malformed, or uses digests other than SHA-256")


def parse_manifest(value: dict[str, Any], limits: ImageLimits) -> Manifest:
    if value.get("schemaVersion") != 2:
        raise ImageError(
            "the image has a manifest of an old or unknown format", hint="Push it again with a current tool."
        )
    layers = tuple(descriptor(item, "manifest") for item in _list(value, "layers", "manifest"))
    config = descriptor(value.get("config"), "manifest")
    if not layers or len(layers) > limits.layers:
        raise ImageError(f"the image has {len(layers)} layers; between 1 and {limits.layers} are possible")
    for layer in layers:
        if not _LAYER_TYPE.match(layer.media_type):
            raise ImageError(f"this is not a file system image: it has a layer of type {layer.media_type[:100]!r}")
    if config.size > limits.document_bytes or sum(layer.size for layer in layers) > limits.download_bytes:
        raise ImageError(
            f"the image is a download of more than {limits.download_bytes:,} bytes",
            hint="Raise the limit download_bytes if you trust this image.",
        )
    return Manifest(config, layers)


def parse_config(value: dict[str, Any], layers: int) -> tuple[ImageConfig, tuple[str, ...]]:
    """Return the configuration and the digests of the uncompressed layers."""
    os_name = value.get("os", "linux")
    if os_name != "linux":
        raise ImageError(f"the image is made for {str(os_name)[:40]!r}, not for Linux")
    rootfs = value.get("rootfs")
    diff_ids = _list(rootfs, "diff_ids", "configuration") if isinstance(rootfs, dict) else []
    if len(diff_ids) != layers or not all(isinstance(item, str) and _DIGEST.match(item) for item in diff_ids):
        raise ImageError("the configuration of the image does not fit its layers")
    inner = value.get("config")
    if not isinstance(inner, dict):
        inner = {}
    config = ImageConfig(
        env=dict(_variable(item) for item in _texts(inner, "Env")),
        entrypoint=_texts(inner, "Entrypoint"),
        cmd=_texts(inner, "Cmd"),
        work_dir=_text(inner, "WorkingDir"),
        user=_text(inner, "User"),
        labels=_labels(inner),
        exposed_ports=_keys(inner, "ExposedPorts"),
        volumes=_keys(inner, "Volumes"),
        stop_signal=_text(inner, "StopSignal"),
        shell=_texts(inner, "Shell"),
        healthcheck=_healthcheck(inner),
        history=_history(value),
    )
    return config, tuple(diff_ids)


def _labels(value: dict[str, Any]) -> dict[str, str]:
    found = value.get("Labels") or {}
    if not isinstance(found, dict) or len(found) > _MAX_ITEMS:
        raise ImageError("the configuration of the image is malformed at Labels")
    return {_checked(name, "Labels"): _checked(text, "Labels") for name, text in found.items()}


def _keys(value: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return the names of what an OCI configuration writes as an object with empty values."""
    found = value.get(key) or {}
    if not isinstance(found, dict) or len(found) > _MAX_ITEMS:
        raise ImageError(f"the configuration of the image is malformed at {key}")
    return tuple(_checked(name, key) for name in sorted(found))


def _healthcheck(value: dict[str, Any]) -> dict[str, object]:
    """Return the parts of a health check that have the right form. It is only noted, so the others are left out."""
    found = value.get("Healthcheck")
    if not isinstance(found, dict):
        return {}
    checked: dict[str, object] = {}
    test = found.get("Test")
    if isinstance(test, list) and len(test) <= _MAX_ITEMS:
        checked["Test"] = [_checked(item, "Healthcheck") for item in test]
    for name in ("Interval", "Timeout", "StartPeriod", "StartInterval", "Retries"):
        number = found.get(name)
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 62:
            checked[name] = number
    return checked


def _history(value: dict[str, Any]) -> tuple[str, ...]:
    found = value.get("history")
    if not isinstance(found, list):
        return ()
    texts = (entry.get("created_by") for entry in found[:_MAX_HISTORY] if isinstance(entry, dict))
    return tuple(text[:_MAX_STEP] for text in texts if isinstance(text, str) and "\0" not in text)


def _list(value: dict[str, Any], key: str, what: str) -> list[Any]:
    items = value.get(key)
    if not isinstance(items, list) or len(items) > _MAX_ITEMS:
        raise ImageError(f"the {what} of the image is malformed")
    return items


def _checked(text: object, key: str) -> str:
    if not isinstance(text, str) or "\0" in text or len(text) > _MAX_TEXT:
        raise ImageError(f"the configuration of the image is malformed at {key}")
    return text


def _text(value: dict[str, Any], key: str) -> str:
    return _checked(value.get(key) or "", key)


def _texts(value: dict[str, Any], key: str) -> tuple[str, ...]:
    items = value.get(key) or []
    if not isinstance(items, list) or len(items) > _MAX_ITEMS:
        raise ImageError(f"the configuration of the image is malformed at {key}")
    return tuple(_checked(item, key) for item in items)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or any(character.isspace() for character in name):
        raise ImageError("the configuration of the image is malformed at Env")
    return name, value

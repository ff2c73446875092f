"""Images as other programs read them: the documents of an OCI image, and an archive with all of it.

The archive is an OCI layout that also has the `manifest.json` of a Docker archive, so that skopeo, `docker load` of any
version, and Atoll itself read it. The same image always becomes the same bytes.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from atoll import durable
from atoll.archive.work import Work
from atoll.images.image import Image
from atoll.images.layer_tar import PackedLayer, header, pack, padding
from atoll.images.oci_documents import ImageConfig, digest_of, machine
from atoll.images.reference import DEFAULT_REGISTRY, Kind, Reference

CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_CHUNK = 1 << 20
_TAIL = bytes(1024)


@dataclass(frozen=True, slots=True)
class PackedImage:
    """An image as a registry or an archive holds it."""

    config: bytes
    manifest: bytes
    layers: tuple[PackedLayer, ...]
    """Lowest first."""


def packed(image: Image, scratch: Path, work: Work) -> PackedImage:
    """Pack all layers of an image into files in a directory."""
    layers = []
    for number, root in enumerate(reversed(image.layers), 1):
        detail = f"layer {number} of {len(image.layers)}"
        layers.append(pack(root, scratch / f"packed-{number}", work, detail))
    config = _config(image, [layer.diff_id for layer in layers])
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": digest_of(config), "size": len(config)},
        "layers": [{"mediaType": LAYER_TYPE, "digest": layer.digest, "size": layer.size} for layer in layers],
    }
    return PackedImage(config, _json(manifest), tuple(layers))


def write_archive(image: PackedImage, name: str, target: Path, work: Work) -> int:
    """Write an archive, and return its size. `name` is what `docker load` will call the image; "" leaves it without.

    The file replaces what has this name when it is complete.
    """
    place = {"platform": {"os": "linux", "architecture": machine()[0]}}
    notes = {"org.opencontainers.image.ref.name": name, "io.containerd.image.name": name} if name else {}
    entry: dict[str, Any] = {"mediaType": MANIFEST_TYPE, "digest": digest_of(image.manifest)}
    entry |= {"size": len(image.manifest)} | place | ({"annotations": notes} if notes else {})
    index = {"schemaVersion": 2, "mediaType": _INDEX_TYPE, "manifests": [entry]}
    listed = {
        "Config": _path(digest_of(image.config)),
        "RepoTags": [name] if name else None,
        "Layers": [_path(layer.digest) for layer in image.layers],
    }
    with durable.draft(target) as draft, draft.open("xb") as file:
        _add(file, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        for layer in {layer.digest: layer for layer in image.layers}.values():
            _add_file(file, _path(layer.digest), layer, work)
        _add(file, _path(digest_of(image.config)), image.config)
        _add(file, _path(digest_of(image.manifest)), image.manifest)
        _add(file, "index.json", _json(index))
        _add(file, "manifest.json", _json([listed]))
        file.write(_TAIL)
        return file.tell()


def docker_name(reference: Reference) -> str:
    """Return the name of an image for other programs: without the default registry; "" for what has no such name."""
    if reference.kind is Kind.DEBIAN:
        return f"debian:{reference.name}"
    if reference.kind is Kind.RECIPE:
        return f"{reference.name}:latest"
    if reference.kind not in (Kind.OCI, Kind.DOCKER) or reference.digest:
        return ""
    text = str(dataclasses.replace(reference, kind=Kind.OCI))
    return text.removeprefix(f"{DEFAULT_REGISTRY}/library/").removeprefix(f"{DEFAULT_REGISTRY}/")


def _config(image: Image, diff_ids: Sequence[str]) -> bytes:
    created = datetime.datetime.fromtimestamp(int(image.created_at), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    architecture, variant = machine()
    value: dict[str, Any] = {"created": created, "architecture": architecture, "os": "linux"}
    if variant:
        value["variant"] = variant
    value["config"] = _inner(image.config)
    value["rootfs"] = {"type": "layers", "diff_ids": list(diff_ids)}
    value["history"] = _history(image.config.history, len(diff_ids), created)
    return _json(value)


def _inner(config: ImageConfig) -> dict[str, Any]:
    values = {
        "Env": [f"{name}={value}" for name, value in config.env.items()],
        "Entrypoint": list(config.entrypoint),
        "Cmd": list(config.cmd),
        "WorkingDir": config.work_dir,
        "User": config.user,
        "Labels": config.labels,
        "ExposedPorts": {port: {} for port in config.exposed_ports},
        "Volumes": {path: {} for path in config.volumes},
        "StopSignal": config.stop_signal,
        "Shell": list(config.shell),
        "Healthcheck": config.healthcheck,
    }
    return {name: value for name, value in values.items() if value}


def _history(steps: Sequence[str], layers: int, created: str) -> list[dict[str, Any]]:
    """Return an entry for each step. As many of the last ones as there are layers count as those that made them,
    because layers of an image that was pulled are not kept apart."""
    texts = [*steps] + ["atoll"] * max(0, layers - len(steps))
    empty = len(texts) - layers
    return [
        {"created": created, "created_by": text} | ({"empty_layer": True} if number < empty else {})
        for number, text in enumerate(texts)
    ]


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _add(file: BinaryIO, name: str, data: bytes) -> None:
    file.write(header(name, len(data)) + data + padding(len(data)))


def _add_file(file: BinaryIO, name: str, layer: PackedLayer, work: Work) -> None:
    file.write(header(name, layer.size))
    with layer.path.open("rb") as source:
        while chunk := source.read(_CHUNK):
            work.check()
            file.write(chunk)
    file.write(padding(layer.size))

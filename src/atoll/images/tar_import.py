"""Importing tar archives: a root file system, or an image saved by `docker save` or OCI tools.

The archive is unpacked first, like any untrusted archive. If it contains a saved image, its layers are read from the
unpacked files, again through a `Root`, because the archive may contain links.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from atoll.archive.archive_limits import Budget, ImageLimits
from atoll.archive.decompress import Reader, plain
from atoll.archive.extract import Extraction, extract
from atoll.archive.root import Root
from atoll.archive.work import Work
from atoll.errors import ImageError, ImageNotFoundError
from atoll.images.archive_program import Program, running
from atoll.images.flatten import Layer, flatten
from atoll.images.image import Draft
from atoll.images.image_store import READABLE
from atoll.images.oci_documents import (
    INDEX_TYPES,
    Descriptor,
    ImageConfig,
    choose,
    digest_of,
    parse_config,
    parse_json,
    parse_manifest,
)
from atoll.images.reference import DEFAULT_REGISTRY, Kind, Reference

_MAX_NESTING = 4
OnRoom = Callable[[int], None]


def import_stream(
    reader: Reader, draft: Draft, limits: ImageLimits, work: Work, room: OnRoom | None = None
) -> tuple[ImageConfig, Extraction]:
    """Fill the draft from an archive of either kind. `room` is called with the size of each piece, and may raise."""
    with plain(reader, limits, work) as stream, Root(draft.rootfs) as root:
        result = extract(stream, root, Budget(limits, room=room), work, detail="archive")
        if not _is_saved_image(root):
            return ImageConfig(), result
    archive = draft.scratch / "archive"
    draft.rootfs.rename(archive)
    draft.rootfs.mkdir()
    os.chmod(draft.rootfs, READABLE)
    return import_archive(archive, draft, limits, work, room)


def import_archive(
    archive: Path, draft: Draft, limits: ImageLimits, work: Work, room: OnRoom | None = None
) -> tuple[ImageConfig, Extraction]:
    """Fill the draft from the unpacked archive of an image."""
    with Root(archive) as root:
        config, layers = _docker_archive(root, limits) or _oci_layout(root, limits)
        return config, flatten(layers, draft.rootfs, limits, work, room)


def load_stream(
    reader: Reader, draft: Draft, limits: ImageLimits, work: Work, room: OnRoom | None = None
) -> tuple[str, ImageConfig, Extraction]:
    """Fill the draft from the archive of an image, which may say what the image is called. Returns that name, or "".

    Raises ImageError if the archive holds a root file system only.
    """
    with plain(reader, limits, work) as stream, Root(draft.rootfs) as root:
        extract(stream, root, Budget(limits, room=room), work, detail="archive")
        if not _is_saved_image(root):
            raise ImageError(
                "the archive holds a root file system and no image", hint="Use `atoll image import` with a name."
            )
    archive = draft.scratch / "archive"
    draft.rootfs.rename(archive)
    draft.rootfs.mkdir()
    os.chmod(draft.rootfs, READABLE)
    with Root(archive) as root:
        name = _name_in(root, limits)
    return name, *import_archive(archive, draft, limits, work, room)


def _name_in(root: Root, limits: ImageLimits) -> str:
    """Return the name that an archive gives its image. It is not checked."""
    listed = root.read("manifest.json", limits.document_bytes)
    if listed is not None:
        images = parse_json(b'{"images":%s}' % listed, "list of images")["images"]
        tags = (
            images[0].get("RepoTags") if isinstance(images, list) and images and isinstance(images[0], dict) else None
        )
        if isinstance(tags, list) and tags and isinstance(tags[0], str):
            return tags[0]
    index = root.read("index.json", limits.document_bytes)
    entries = parse_json(index, "index").get("manifests") if index is not None else None
    if isinstance(entries, list) and entries and isinstance(entries[0], dict):
        notes = entries[0].get("annotations")
        for key in ("io.containerd.image.name", "org.opencontainers.image.ref.name"):
            found = notes.get(key) if isinstance(notes, dict) else None
            if isinstance(found, str) and (":" in found or "/" in found):
                return found
    return ""


_DOCKER_HINT = "Install Docker's command line tool, or pull the image from its registry."


def docker_name(reference: Reference) -> str:
    """Return the name under which Docker lists the image: without the default registry."""
    name = str(reference).removeprefix(f"{Kind.DOCKER}:")
    return name.removeprefix(f"{DEFAULT_REGISTRY}/").removeprefix("library/")


def import_from_docker(
    reference: Reference, draft: Draft, limits: ImageLimits, work: Work, room: OnRoom | None = None
) -> tuple[ImageConfig, Extraction]:
    """Fill the draft with an image of the local Docker engine, by `docker save`.

    Raises ImageNotFoundError if Docker has no such image, ImageError if Docker is not there.
    """
    name = docker_name(reference)
    work.report("pull", f"asking the Docker engine for {name}")
    with running(["docker", "image", "save", name], dict(os.environ), work, lambda _: None, _DOCKER_HINT) as program:
        try:
            result = import_stream(program, draft, limits, work, room)
        except ImageError as error:
            work.check()
            if program.status():
                raise _failed(name, program) from error
            raise
        if program.status():
            raise _failed(name, program)
    return result


def _failed(name: str, program: Program) -> ImageError:
    reason = " ".join(program.lines)[-500:]
    if "reference does not exist" in reason or "No such image" in reason or "not found" in reason:
        return ImageNotFoundError(f"the Docker engine has no image {name!r}", hint="`docker images` lists what it has.")
    return ImageError(f"the Docker engine did not give us {name!r}: {reason}", hint="Check that it runs: docker info")


def _is_saved_image(root: Root) -> bool:
    if any(root.lstat((name,)) for name in (b"bin", b"etc", b"usr")):
        return False
    return any(root.lstat((name,)) for name in (b"manifest.json", b"oci-layout"))


def _docker_archive(root: Root, limits: ImageLimits) -> tuple[ImageConfig, list[Layer]] | None:
    """Read the archive of a Docker engine, if it is one.

    Its `manifest.json` lists images, each with the paths of its configuration and layers.
    """
    data = root.read("manifest.json", limits.document_bytes)
    if data is None:
        return None
    images = parse_json(b'{"images":%s}' % data, "list of images")["images"]
    if not isinstance(images, list) or not all(isinstance(image, dict) for image in images):
        raise ImageError("manifest.json of the archive is malformed")
    if len(images) != 1:
        raise ImageError(f"the archive holds {len(images)} images", hint="Save one image to an archive of its own.")
    path, paths = images[0].get("Config"), images[0].get("Layers")
    if not isinstance(path, str) or not isinstance(paths, list) or not all(isinstance(item, str) for item in paths):
        raise ImageError("manifest.json of the archive is malformed")
    if not paths or len(paths) > limits.layers:
        raise ImageError(f"the image has {len(paths)} layers; between 1 and {limits.layers} are possible")
    return _with_config(root, _required(root, path, limits), paths, limits)


def _oci_layout(root: Root, limits: ImageLimits) -> tuple[ImageConfig, list[Layer]]:
    """Read an OCI layout, which consists of `index.json` and `blobs/`.

    An index may point to another one, for several machines.
    """
    value = parse_json(_required(root, "index.json", limits), "index")
    manifests = value.get("manifests")
    if isinstance(manifests, list) and len(manifests) == 1 and isinstance(manifests[0], dict):
        manifests[0].pop("platform", None)
    for _ in range(_MAX_NESTING):
        if "manifests" not in value:
            manifest = parse_manifest(value, limits)
            paths = [_blob_path(layer.digest) for layer in manifest.layers]
            return _with_config(root, _blob(root, manifest.config, limits), paths, limits)
        value = parse_json(_blob(root, choose(value), limits), "manifest")
        if value.get("mediaType") in INDEX_TYPES and "manifests" not in value:
            break
    raise ImageError("the index of the archive is malformed")


def _with_config(root: Root, config: bytes, paths: list[str], limits: ImageLimits) -> tuple[ImageConfig, list[Layer]]:
    """Return the configuration and the layers, which are later checked against the digests in the configuration."""
    parsed, diff_ids = parse_config(parse_json(config, "configuration"), len(paths))
    return parsed, [Layer(_opener(root, path), diff_id) for path, diff_id in zip(paths, diff_ids, strict=True)]


def _opener(root: Root, path: str) -> Any:
    def open_layer() -> BinaryIO:
        try:
            return os.fdopen(root.open(path), "rb", buffering=0)
        except OSError as error:
            raise ImageError(f"the archive lacks the layer {path[:120]!r}") from error

    return open_layer


def _blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _blob(root: Root, descriptor: Descriptor, limits: ImageLimits) -> bytes:
    data = _required(root, _blob_path(descriptor.digest), limits)
    if digest_of(data) != descriptor.digest:
        raise ImageError(f"the archive is damaged: {descriptor.digest} has other content")
    return data


def _required(root: Root, path: str, limits: ImageLimits) -> bytes:
    try:
        data = root.read(path, limits.document_bytes)
    except OSError as error:
        raise ImageError(f"the archive has no readable {path[:120]!r}") from error
    if data is None:
        raise ImageError(f"the archive lacks {path[:120]!r}")
    return data

"""Pulling images from a registry: the reading half of the OCI distribution protocol.

Registries are not trusted. Documents and layers are bounded in size and checked against their digests before they are
parsed; a token is requested only over TLS; a redirect to another origin does not carry credentials, and none may lead
from TLS to plain HTTP. Plain HTTP is used only with registries on this machine and those listed in the settings.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import http.client
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from atoll.archive.archive_limits import ImageLimits
from atoll.archive.extract import Extraction
from atoll.archive.work import Work
from atoll.errors import ImageError, ImageNotFoundError
from atoll.images import oci_documents
from atoll.images.access import Access
from atoll.images.flatten import Layer, flatten
from atoll.images.image import Draft
from atoll.images.oci_documents import Descriptor, ImageConfig, Manifest
from atoll.images.reference import DEFAULT_REGISTRY, Reference, is_loopback
from atoll.images.transport import HTTP_ERRORS, Authority, Transport

_ACCEPT = ", ".join((*oci_documents.MANIFEST_TYPES, *oci_documents.INDEX_TYPES))
_CHUNK = 256 << 10
_TRIES = 3
_OFFLINE = "Check the network. Offline: import an archive (tar:/PATH), build debian:SUITE from a mirror, or use host."
_MAX_NESTING = 3
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The manifest that a reference currently points to."""

    digest: str
    """The digest of the manifest for this machine."""
    manifest: Manifest


class Registry:
    def __init__(
        self,
        reference: Reference,
        limits: ImageLimits,
        work: Work,
        *,
        plain_http_registries: Collection[str] = (),
        access: Access | None = None,
    ) -> None:
        self._access = access or Access()
        self._reference, self._limits, self._work = reference, limits, work
        self._registry = reference.registry
        plain = is_loopback(self._registry) or self._registry in plain_http_registries
        host = f"registry-1.{DEFAULT_REGISTRY}" if self._registry == DEFAULT_REGISTRY else self._registry
        self._base = f"{'http' if plain else 'https'}://{host}/v2/{reference.name}"
        authority = Authority(self._registry, f"repository:{reference.name}:pull", plain_http=plain)
        self._transport = Transport(authority, work, self._access)

    @property
    def used_login(self) -> bool:
        """Whether a login was sent to the registry, needed or not."""
        return self._transport.used_login

    def resolve(self) -> Resolved:
        """Request the manifest for this machine, through an index if there is one."""
        self._work.report("pull", f"asking {self._registry} for {self._reference}")
        wanted = self._reference.digest or self._reference.tag
        for _ in range(_MAX_NESTING):
            data, said = self._document(f"{self._base}/manifests/{wanted}", _ACCEPT)
            digest = oci_documents.digest_of(data)
            expected = wanted if wanted.startswith("sha256:") else said
            if expected and digest != expected:
                what = "it promised" if self._access.guarded else expected
                raise ImageError(
                    f"the registry {self._registry} sent something other than {what}",
                    hint="Do not trust this registry.",
                )
            with self._not_repeating():
                value = oci_documents.parse_json(data, "manifest")
                if "manifests" not in value:
                    return Resolved(digest, oci_documents.parse_manifest(value, self._limits))
                wanted = oci_documents.choose(value).digest
        raise ImageError("the indices of the image are nested too deeply")

    def fetch(self, resolved: Resolved, draft: Draft) -> tuple[ImageConfig, Extraction]:
        """Fill the draft. All layers are downloaded and verified before the first one is unpacked."""
        manifest = resolved.manifest
        data, _ = self._document(f"{self._base}/blobs/{manifest.config.digest}", "*/*")
        if oci_documents.digest_of(data) != manifest.config.digest:
            raise ImageError(f"the configuration of the image is not {manifest.config.digest}", hint="Pull it again.")
        with self._not_repeating():
            config, diff_ids = oci_documents.parse_config(
                oci_documents.parse_json(data, "configuration"), len(manifest.layers)
            )
        total, done = sum(layer.size for layer in manifest.layers), 0
        layers = []
        for number, (descriptor, diff_id) in enumerate(zip(manifest.layers, diff_ids, strict=True), 1):
            path = draft.scratch / f"layer-{number}"
            self._download(descriptor, path, f"layer {number} of {len(manifest.layers)}", done, total)
            done += descriptor.size
            layers.append(Layer(functools.partial(_open, path), diff_id))
        return config, flatten(layers, draft.rootfs, self._limits, self._work)

    def _document(self, url: str, accept: str) -> tuple[bytes, str]:
        for attempt in range(_TRIES):
            with self._retrying(attempt), self._get(url, accept) as response:
                data = response.read(self._limits.document_bytes + 1)
                if len(data) > self._limits.document_bytes:
                    raise ImageError(
                        f"the registry {self._registry} sent a document of more than {len(data) - 1:,} bytes"
                    )
                if response.length:
                    raise http.client.IncompleteRead(b"", response.length)
                return data, response.headers.get("Docker-Content-Digest", "")
        raise AssertionError("the last attempt raises")

    def _download(self, descriptor: Descriptor, path: Path, detail: str, before: int, total: int) -> None:
        for attempt in range(_TRIES):
            with (
                self._retrying(attempt),
                self._get(f"{self._base}/blobs/{descriptor.digest}", "*/*") as response,
                path.open("wb") as file,
            ):
                digest, size = hashlib.sha256(), 0
                while chunk := response.read(_CHUNK):
                    self._work.check()
                    size += len(chunk)
                    if size > descriptor.size:
                        break
                    digest.update(chunk)
                    file.write(chunk)
                    self._work.report("pull", detail, before + size, total)
                if size < descriptor.size:
                    raise http.client.IncompleteRead(b"", descriptor.size - size)
                if size > descriptor.size or f"sha256:{digest.hexdigest()}" != descriptor.digest:
                    raise ImageError(
                        f"{detail} from {self._registry} is not {descriptor.digest}",
                        hint="It was damaged or changed on its way.",
                    )
                return

    @contextlib.contextmanager
    def _get(self, url: str, accept: str) -> Iterator[http.client.HTTPResponse]:
        with self._transport.get(url, accept) as response:
            if response.status == 404:
                raise ImageNotFoundError(
                    f"the registry {self._registry} has no image {self._reference}", hint="Check the name and the tag."
                )
            if response.status in (401, 403):
                raise ImageError(
                    f"the registry {self._registry} denies access to {self._reference}, or it does not exist",
                    hint=f"Check the name, or log in: docker login {self._registry}",
                )
            if response.status == 429 or response.status >= 500:
                raise _BusyError(f"it answers {response.status}{self._words(response.reason)}")
            if response.status != 200:
                raise ImageError(
                    f"the registry {self._registry} answers {response.status}{self._words(response.reason)}"
                )
            yield response

    def _words(self, said: str) -> str:
        return "" if self._access.guarded else f" {said[:80]!r}"

    @contextlib.contextmanager
    def _not_repeating(self) -> Iterator[None]:
        """Hide the details of errors about a document, which quote it, from users of a server."""
        try:
            yield
        except ImageError as error:
            if not self._access.guarded:
                raise
            raise ImageError(
                f"what the registry {self._registry} sent for {self._reference} is not an image that can be used here"
            ) from error

    @contextlib.contextmanager
    def _retrying(self, attempt: int) -> Iterator[None]:
        """Suppress a temporary failure after a pause, so that the caller retries. The last one raises ImageError."""
        try:
            yield
        except (*HTTP_ERRORS, _BusyError) as error:
            self._work.check()
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                raise
            if attempt + 1 < _TRIES:
                self._work.sleep(0.2 * 4**attempt)
                return
            why = "" if self._access.guarded else f": {error or type(error).__name__}"
            raise ImageError(
                f"cannot reach the registry {self._registry} for {self._reference}{why}", hint=_OFFLINE
            ) from error


class _BusyError(Exception):
    pass


def _open(path: Path) -> BinaryIO:
    return path.open("rb", buffering=0)

"""Pulling images from a registry: the reading half of the OCI distribution protocol.

Registries are not trusted. Documents and layers are bounded in size and checked against their digests before they are
parsed; a token is requested only over TLS; a redirect to another origin does not carry credentials, and none may lead
from TLS to plain HTTP. Plain HTTP is used only with registries on this machine and those listed in the settings.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from atoll.errors import ImageError
from atoll.images import oci_documents
from atoll.images.blobs import Blobs
from atoll.images.flatten import Layer
from atoll.images.layer_downloads import LayerDownloads
from atoll.images.oci_documents import ImageConfig, Manifest
from atoll.images.registry_client import RegistryClient

_ACCEPT = ", ".join((*oci_documents.MANIFEST_TYPES, *oci_documents.INDEX_TYPES))
_MAX_NESTING = 3


@dataclass(frozen=True, slots=True)
class Resolved:
    """The manifest that a reference currently points to."""

    digest: str
    """The digest of the manifest for this machine."""
    manifest: Manifest

    @property
    def download_bytes(self) -> int:
        return sum({layer.digest: layer.size for layer in self.manifest.layers}.values())


class Registry:
    """One place where an image can be pulled: its registry, or a mirror."""

    def __init__(self, client: RegistryClient, blobs: Blobs) -> None:
        self._client, self._blobs = client, blobs

    @property
    def used_login(self) -> bool:
        """Whether a login was sent to the registry, needed or not."""
        return self._client.used_login

    def resolve(self) -> Resolved:
        """Request the manifest for this machine, through an index if there is one."""
        client, reference = self._client, self._client.reference
        client.work.report("pull", f"asking {client.host} for {reference}")
        wanted = reference.digest or reference.tag
        for _ in range(_MAX_NESTING):
            data, said = client.document(f"{client.base}/manifests/{wanted}", _ACCEPT)
            digest = oci_documents.digest_of(data)
            expected = wanted if wanted.startswith("sha256:") else said
            if expected and digest != expected:
                what = "it promised" if client.access.guarded else expected
                raise ImageError(
                    f"the registry {client.host} sent something other than {what}",
                    hint="Do not trust this registry.",
                )
            with client.not_repeating():
                value = oci_documents.parse_json(data, "manifest")
                if "manifests" not in value:
                    return Resolved(digest, oci_documents.parse_manifest(value, client.limits))
                wanted = oci_documents.choose(value).digest
        raise ImageError("the indices of the image are nested too deeply")

    def download(self, resolved: Resolved, scratch: Path) -> tuple[ImageConfig, list[Layer]]:
        """Return the configuration and the layers, lowest first. All of them are here and verified."""
        client, manifest = self._client, resolved.manifest
        data, _ = client.document(f"{client.base}/blobs/{manifest.config.digest}", "*/*")
        if oci_documents.digest_of(data) != manifest.config.digest:
            raise ImageError(f"the configuration of the image is not {manifest.config.digest}", hint="Pull it again.")
        with client.not_repeating():
            config, diff_ids = oci_documents.parse_config(
                oci_documents.parse_json(data, "configuration"), len(manifest.layers)
            )
        paths = LayerDownloads(client, self._blobs, scratch).fetch(manifest.layers)
        self._blobs.sweep()
        return config, _layers(paths, diff_ids)


def _layers(paths: Sequence[Path], diff_ids: Sequence[str]) -> list[Layer]:
    return [Layer(functools.partial(_open, path), diff_id) for path, diff_id in zip(paths, diff_ids, strict=True)]


def _open(path: Path) -> BinaryIO:
    return path.open("rb", buffering=0)

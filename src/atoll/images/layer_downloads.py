"""Downloading the layers of an image: several at once, resumed where an attempt was broken off, kept in a cache.

A registry may break off, stall, ignore that only the rest was asked for, or send something else. Whatever arrives is
appended to a file that is used only when it has the size and the digest that the manifest gives.
"""

from __future__ import annotations

import functools
import hashlib
import http.client
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from atoll.archive.work import Work
from atoll.errors import ImageError
from atoll.images.blobs import BlobKey, Blobs
from atoll.images.oci_documents import Descriptor
from atoll.images.registry_client import OFFLINE, TEMPORARY, BusyError, RegistryClient
from atoll.images.side_by_side import run_all

_CHUNK = 256 << 10
_PROGRESS = 1 << 20
"""An attempt that brought so many bytes does not count as a failure."""
_LEAST = 16 << 10
"""The fewest bytes in the time after which a silent registry is given up."""
_RANGE = re.compile(r"^bytes ([0-9]{1,20})-([0-9]{1,20})/([0-9]{1,20}|\*)\Z")
_KEPT = "What has arrived is kept: pull again to go on from there."


class LayerDownloads:
    def __init__(self, client: RegistryClient, blobs: Blobs, scratch: Path) -> None:
        self._client, self._blobs, self._scratch = client, blobs, scratch
        self._lock = threading.Lock()
        self._done: dict[str, int] = {}
        self._total = 0

    def fetch(self, layers: Sequence[Descriptor]) -> list[Path]:
        """Return the files of the layers, each verified against its digest."""
        unique = {layer.digest: layer for layer in layers}
        self._total = sum(layer.size for layer in unique.values())
        tasks, paths = [], {}
        for number, layer in enumerate(unique.values(), 1):
            paths[layer.digest] = self._scratch / f"layer-{number}"
            detail = f"layer {number} of {len(unique)}"
            tasks.append(functools.partial(self._fetch, layer, paths[layer.digest], detail))
        run_all(tasks, self._client.work)
        return [paths[layer.digest] for layer in layers]

    def _fetch(self, layer: Descriptor, target: Path, detail: str, work: Work) -> None:
        # An image may name a mirror's blob, but it is the registry of the image that answers for it.
        key = BlobKey(self._client.reference.registry, layer.digest)
        if self._taken(key, target, work):
            self._report(layer, layer.size, detail)
            return
        with self._blobs.writing(key, target, work) as path:
            if path != target and self._taken(key, target, work):
                self._report(layer, layer.size, detail)
                return
            self._download(layer, path, detail, work)
            self._blobs.keep(key, path, target)

    def _taken(self, key: BlobKey, target: Path, work: Work) -> bool:
        """Take a blob of the cache, if the registry would give it to us as well."""
        return self._blobs.has(key) and self._client.has_blob(key.digest) and self._blobs.take(key, target, work)

    def _download(self, layer: Descriptor, path: Path, detail: str, work: Work) -> None:
        failures = 0
        is_resumed = False
        while True:
            before = path.stat().st_size
            is_resumed = is_resumed or before > 0
            try:
                digest = self._transfer(layer, path, detail, work)
            except TEMPORARY as error:
                if path.stat().st_size - before >= _PROGRESS:
                    failures = 0
                what = f"{detail} could not be read from the registry {self._client.host}"
                hint = _KEPT if path.stat().st_size else OFFLINE
                self._client.pause_or_give_up(error, failures, what, hint, work)
                failures += 1
                continue
            if digest == layer.digest:
                return
            os.truncate(path, 0)
            if not is_resumed:
                raise ImageError(
                    f"{detail} from {self._client.host} is not {layer.digest}",
                    hint="It was damaged or changed on its way.",
                )
            is_resumed = False  # perhaps what was there before was wrong: once more, from the start

    def _transfer(self, layer: Descriptor, path: Path, detail: str, work: Work) -> str:
        """Append what is missing, and return the digest of the whole. "" stands for a file that is too long."""
        with path.open("r+b", buffering=0) as file:
            digest, size = hashlib.sha256(), 0
            while chunk := file.read(_CHUNK):
                work.check()
                digest.update(chunk)
                size += len(chunk)
            if size > layer.size:
                return ""
            if size and size == layer.size:
                # It is whole, but only the registry knows whether it is for us.
                return f"sha256:{digest.hexdigest()}" if self._client.has_blob(layer.digest) else ""
            headers = {"Accept": "*/*"} | ({"Range": f"bytes={size}-"} if size else {})
            url = f"{self._client.base}/blobs/{layer.digest}"
            with self._client.get(url, headers, work, statuses=(200, 206, 416)) as response:
                if not _continues(response, size, layer.size):
                    digest, size = hashlib.sha256(), 0
                    os.ftruncate(file.fileno(), 0)
                    file.seek(0)
                    if response.status != 200:
                        raise BusyError("it sent another part than it was asked for")
                if response.length is not None and response.length > layer.size - size:
                    return ""
                self._append(response, file, digest, size, layer, detail, work)
        return f"sha256:{digest.hexdigest()}"

    def _append(
        self,
        response: http.client.HTTPResponse,
        file: BinaryIO,
        digest: hashlib._Hash,
        size: int,
        layer: Descriptor,
        detail: str,
        work: Work,
    ) -> None:
        stall_s = self._client.limits.stall_s
        window, arrived = time.monotonic(), 0
        end = layer.size if response.length is None else size + response.length
        while size < layer.size:
            chunk = response.read1(min(_CHUNK, end - size)) if size < end else b""
            work.check()
            if not chunk:
                raise http.client.IncompleteRead(b"", layer.size - size)
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            arrived += len(chunk)
            self._report(layer, size, detail)
            if time.monotonic() - window > stall_s:
                if arrived < _LEAST:
                    raise BusyError(f"it sent only {arrived} bytes in {stall_s:g} s")
                window, arrived = time.monotonic(), 0
        if response.length is None and response.read1(1):
            digest.update(b"more than there should be")

    def _report(self, layer: Descriptor, size: int, detail: str) -> None:
        with self._lock:
            self._done[layer.digest] = size
            done = sum(self._done.values())
            self._client.work.report("pull", detail, done, self._total)


def _continues(response: http.client.HTTPResponse, start: int, total: int) -> bool:
    """Return whether the answer is the part that was asked for: from `start`, or all of it."""
    if response.status == 200:
        return start == 0
    found = _RANGE.match(response.headers.get("Content-Range", ""))
    return (
        response.status == 206
        and found is not None
        and int(found[1]) == start
        and int(found[2]) < total
        and found[3] in ("*", str(total))
    )

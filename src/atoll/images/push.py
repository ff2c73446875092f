"""Pushing images to a registry: the writing half of the OCI distribution protocol.

Layers that the registry has are not sent. The others are sent side by side, large ones in parts, each of which is sent
again from where the registry says that it ended. The manifest comes last: before it, the image does not exist there.
"""

from __future__ import annotations

import functools
import io
import re
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from atoll.archive.work import Work
from atoll.errors import ImageError
from atoll.images.image import Pushed
from atoll.images.oci_archive import MANIFEST_TYPE, PackedImage
from atoll.images.oci_documents import digest_of
from atoll.images.registry_client import TEMPORARY, TRIES, RegistryClient
from atoll.images.side_by_side import run_all
from atoll.images.transport import Body

PART_BYTES = 16 << 20
_RANGE = re.compile(r"^0-([0-9]{1,20})\Z")
_BINARY = {"Content-Type": "application/octet-stream"}


class _Part(io.RawIOBase):
    """A part of a file, for reading once from its start to its end."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._file, self._left = path.open("rb", buffering=0), size
        self._file.seek(start)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        chunk = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(chunk)
        return chunk

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass(frozen=True, slots=True)
class _Blob:
    digest: str
    size: int
    detail: str
    part: Callable[[int, int], BinaryIO]
    """Opens this many bytes from this place on."""


class Push:
    def __init__(self, client: RegistryClient, part_bytes: int = PART_BYTES) -> None:
        self._client, self._part_bytes = client, part_bytes
        self._lock = threading.Lock()
        self._done: dict[str, int] = {}
        self._total = self._sent = 0

    def push(self, image: PackedImage) -> Pushed:
        client = self._client
        blobs = [
            _Blob(layer.digest, layer.size, f"layer {number}", functools.partial(_open_part, layer.path))
            for number, layer in enumerate(image.layers, 1)
        ]
        blobs.append(_Blob(digest_of(image.config), len(image.config), "configuration", _opener(image.config)))
        unique = {blob.digest: blob for blob in blobs}
        self._total = sum(blob.size for blob in unique.values())
        run_all([functools.partial(self._send, blob) for blob in unique.values()], client.work)
        digest = digest_of(image.manifest)
        self._put_manifest(image.manifest, client.reference.tag or digest)
        return Pushed(str(client.reference), digest, self._sent)

    def _send(self, blob: _Blob, work: Work) -> None:
        client = self._client
        if not client.has_blob(blob.digest):
            self._upload(blob, work)
            with self._lock:
                self._sent += blob.size
        self._report(blob, blob.size)

    def _upload(self, blob: _Blob, work: Work) -> None:
        """Send a blob. What fails is tried again, from where the registry says that the last attempt ended."""
        url, start, failures = "", 0, 0
        what = f"{blob.detail} could not be sent to the registry {self._client.host}"
        while True:
            try:
                if not url:
                    url, start = self._begin(work), 0
                while blob.size - start > self._part_bytes:
                    url = self._send_part(url, blob, start, self._part_bytes, work)
                    start += self._part_bytes
                    failures = 0
                self._finish(url, blob, start, work)
                return
            except TEMPORARY as error:
                self._client.pause_or_give_up(error, failures, what, "Push it again: what has arrived stays.", work)
                failures += 1
                url, start = self._place(url, blob, work)

    def _begin(self, work: Work) -> str:
        with self._client.send("POST", f"{self._client.base}/blobs/uploads/", work=work) as response:
            self._client.check(response, (202,))
            return self._location(f"{self._client.base}/blobs/uploads/", response.headers.get("Location", ""))

    def _send_part(self, url: str, blob: _Blob, start: int, size: int, work: Work) -> str:
        headers = _BINARY | {"Content-Range": f"{start}-{start + size - 1}"}
        body = Body(lambda: blob.part(start, size), size)
        with self._client.send("PATCH", url, headers, body, work) as response:
            self._client.check(response, (202,))
            self._report(blob, start + size)
            return self._location(url, response.headers.get("Location", ""))

    def _finish(self, url: str, blob: _Blob, start: int, work: Work) -> None:
        parts = urllib.parse.urlsplit(url)
        query = [*urllib.parse.parse_qsl(parts.query, keep_blank_values=True), ("digest", blob.digest)]
        target = urllib.parse.urlunsplit(parts._replace(query=urllib.parse.urlencode(query)))
        size = blob.size - start
        headers = _BINARY | ({"Content-Range": f"{start}-{blob.size - 1}"} if start else {})
        body = Body(lambda: blob.part(start, size), size)
        with self._client.send("PUT", target, headers, body, work) as response:
            self._client.check(response, (201,))

    def _place(self, url: str, blob: _Blob, work: Work) -> tuple[str, int]:
        """Ask how much of an upload has arrived. ("", 0) means that it has to begin again."""
        if not url:
            return "", 0
        try:
            with self._client.send("GET", url, work=work) as response:
                found = _RANGE.match(response.headers.get("Range", ""))
                if response.status != 204 or found is None:
                    return "", 0
                # The registry may have nothing and still say "0-0", so a single byte is sent again.
                start = int(found[1]) + 1 if int(found[1]) else 0
                location = self._location(url, response.headers.get("Location", "") or url)
                return (location, start) if start < blob.size else ("", 0)
        except TEMPORARY:
            work.check()
            return "", 0

    def _location(self, url: str, location: str) -> str:
        if not location:
            raise ImageError(f"the registry {self._client.host} does not say where to send a layer to")
        return urllib.parse.urljoin(url, location)

    def _put_manifest(self, manifest: bytes, tag: str) -> None:
        client, digest = self._client, digest_of(manifest)
        url = f"{client.base}/manifests/{tag}"
        for attempt in range(TRIES):
            with client.retrying(attempt):
                with client.send("PUT", url, {"Content-Type": MANIFEST_TYPE}, Body.of(manifest)) as response:
                    client.check(response, (201, 202))
                break
        data, _ = client.document(url, MANIFEST_TYPE)
        if digest_of(data) != digest:
            raise ImageError(
                f"the registry {client.host} has something other than what was pushed",
                hint="Perhaps somebody else pushed to this name at the same time. Push again.",
            )

    def _report(self, blob: _Blob, size: int) -> None:
        with self._lock:
            self._done[blob.digest] = size
            self._client.work.report("push", blob.detail, sum(self._done.values()), self._total)


def _open_part(path: Path, start: int, size: int) -> BinaryIO:
    return _Part(path, start, size)  # type: ignore[return-value]


def _opener(data: bytes) -> Callable[[int, int], BinaryIO]:
    return lambda start, size: io.BytesIO(data[start : start + size])

"""Requests to one registry, or to a mirror of it, for one repository: retried, bounded, with errors for users."""

from __future__ import annotations

import contextlib
import errno
import http.client
from collections.abc import Collection, Iterator, Mapping

from atoll.archive.archive_limits import ImageLimits
from atoll.archive.work import Work
from atoll.errors import ImageError, ImageNotFoundError
from atoll.images.access import Access
from atoll.images.mirrors import Mirror
from atoll.images.reference import DEFAULT_REGISTRY, Reference, is_loopback
from atoll.images.transport import HTTP_ERRORS, Authority, Body, Transport

TRIES = 3
OFFLINE = "Check the network. Offline: import an archive (tar:/PATH), build debian:SUITE from a mirror, or use host."
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class BusyError(Exception):
    """The registry cannot answer now."""


TEMPORARY = (*HTTP_ERRORS, BusyError)
"""What may be different at the next attempt."""


class RegistryClient:
    def __init__(
        self,
        reference: Reference,
        limits: ImageLimits,
        work: Work,
        *,
        plain_http_registries: Collection[str] = (),
        access: Access | None = None,
        mirror: Mirror | None = None,
        actions: str = "pull",
    ) -> None:
        """With `mirror`, the requests go there. A login for the registry is never sent to a mirror."""
        self.reference, self.limits, self.work = reference, limits, work
        self.access = access or Access()
        self.host = reference.registry
        if mirror is not None:
            self.host, plain = mirror.host, mirror.plain_http
            self.access = self.access.at_mirror(mirror.host)
        else:
            plain = is_loopback(self.host) or self.host in plain_http_registries
        host = f"registry-1.{DEFAULT_REGISTRY}" if self.host == DEFAULT_REGISTRY else self.host
        origin = f"{'http' if plain else 'https'}://{host}"
        self.base = f"{origin}/v2/{reference.name}"
        authority = Authority(self.host, f"repository:{reference.name}:{actions}", plain_http=plain, base=origin)
        self._transport = Transport(authority, work, self.access, timeout_s=limits.stall_s)

    @property
    def used_login(self) -> bool:
        """Whether a login was sent to the registry, needed or not."""
        return self._transport.used_login

    def document(self, url: str, accept: str) -> tuple[bytes, str]:
        """Return a document and the digest that the registry says it has, or ""."""
        for attempt in range(TRIES):
            with self.retrying(attempt), self.get(url, {"Accept": accept}) as response:
                data = response.read(self.limits.document_bytes + 1)
                if len(data) > self.limits.document_bytes:
                    raise ImageError(f"the registry {self.host} sent a document of more than {len(data) - 1:,} bytes")
                if response.length:
                    raise http.client.IncompleteRead(b"", response.length)
                return data, response.headers.get("Docker-Content-Digest", "")
        raise AssertionError("the last attempt raises")

    def has_blob(self, digest: str) -> bool:
        """Return whether the registry has a blob in this repository and would give it to us."""
        for attempt in range(TRIES):
            with self.retrying(attempt), self.send("HEAD", f"{self.base}/blobs/{digest}") as response:
                self._refuse_busy(response)
                return response.status == 200
        raise AssertionError("the last attempt raises")

    @contextlib.contextmanager
    def get(
        self, url: str, headers: Mapping[str, str], work: Work | None = None, *, statuses: Collection[int] = (200,)
    ) -> Iterator[http.client.HTTPResponse]:
        """Provide the response to a GET request. Raises ImageError, or BusyError, for any other status."""
        with self._transport.send("GET", url, headers, work=work) as response:
            self.check(response, statuses)
            yield response

    @contextlib.contextmanager
    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        work: Work | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Provide the response to any request, whatever its status."""
        with self._transport.send(method, url, {"Accept": "*/*"} | dict(headers or {}), body, work) as response:
            yield response

    def check(self, response: http.client.HTTPResponse, statuses: Collection[int]) -> None:
        """Raise the error that an unexpected status stands for."""
        if response.status in statuses:
            return
        if response.status == 404:
            raise ImageNotFoundError(
                f"the registry {self.host} has no image {self.reference}", hint="Check the name and the tag."
            )
        if response.status in (401, 403):
            raise ImageError(
                f"the registry {self.host} denies access to {self.reference}, or it does not exist",
                hint=f"Check the name, or log in: docker login {self.host}",
            )
        self._refuse_busy(response)
        raise ImageError(f"the registry {self.host} answers {response.status}{self._words(response.reason)}")

    def _refuse_busy(self, response: http.client.HTTPResponse) -> None:
        if response.status == 429 or response.status >= 500:
            raise BusyError(f"it answers {response.status}{self._words(response.reason)}")

    def _words(self, said: str) -> str:
        return "" if self.access.guarded else f" {said[:80]!r}"

    @contextlib.contextmanager
    def not_repeating(self) -> Iterator[None]:
        """Hide the details of errors about a document, which quote it, from users of a server."""
        try:
            yield
        except ImageError as error:
            if not self.access.guarded:
                raise
            raise ImageError(
                f"what the registry {self.host} sent for {self.reference} is not an image that can be used here"
            ) from error

    @contextlib.contextmanager
    def retrying(self, attempt: int) -> Iterator[None]:
        """Suppress a temporary failure after a pause, so that the caller retries. The last one raises ImageError."""
        try:
            yield
        except TEMPORARY as error:
            self.pause_or_give_up(error, attempt, f"cannot reach the registry {self.host} for {self.reference}")

    def pause_or_give_up(
        self, error: BaseException, attempt: int, what: str, hint: str = OFFLINE, work: Work | None = None
    ) -> None:
        """Wait before the next attempt. Raises ImageError after the last one, and the error if the disk is at fault."""
        work = work or self.work
        work.check()
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            raise error
        if attempt + 1 < TRIES:
            work.sleep(0.2 * 4**attempt)
            return
        why = "" if self.access.guarded else f": {error or type(error).__name__}"
        raise ImageError(f"{what}{why}", hint=hint) from error

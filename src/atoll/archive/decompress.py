"""Decompression of streams, with bounded memory and a bounded ratio.

The format is recognized by the first bytes, never by a name or a media type, both of which the sender chooses. gzip, xz
and bzip2 come with Python; zstd uses the `zstd` program, which refuses frames with a window of more than 128 MiB.
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import shutil
import subprocess
import threading
import zlib
from collections.abc import Iterator
from typing import Protocol

from atoll.archive.archive_limits import MIB, ImageLimits
from atoll.archive.work import Work
from atoll.errors import ImageError

_CHUNK = 256 << 10
_OUTPUT = 1 * MIB
_XZ_MEMORY = 256 * MIB
_ZSTD_MEMORY = "128MiB"


class Reader(Protocol):
    """A source of bytes. `read` returns up to `size` of them, and b"" only at the end."""

    def read(self, size: int, /) -> bytes: ...


class _Decoder(Protocol):
    """The decompressor interface of `lzma` and `bz2`."""

    def decompress(self, data: bytes, max_length: int) -> bytes: ...
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...


class _Gzip:
    """An adapter that gives `zlib` the same interface."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)
        self._full = False

    def decompress(self, data: bytes, max_length: int) -> bytes:
        output = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        # If the output is full, zlib may hold more of it even though it has consumed all of the input.
        self._full = len(output) >= max_length
        return output

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not self._inner.eof and not self._inner.unconsumed_tail and not self._full

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


def _decoder(kind: str) -> _Decoder:
    if kind == "gzip":
        return _Gzip()
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY) if kind == "xz" else bz2.BZ2Decompressor()


def _sniff(head: bytes) -> str | None:
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head.startswith(b"\xfd7zXZ\0"):
        return "xz"
    if head.startswith(b"BZh"):
        return "bzip2"
    # A zstd stream may begin with a skippable frame, which the seekable variants use.
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50):
        return "zstd"
    return None


class _Source:
    """The compressed stream. It counts the bytes that are read, and its `head` is available before reading."""

    def __init__(self, inner: Reader) -> None:
        self._inner = inner
        self.count = 0
        self.head = b""
        while len(self.head) < 6 and (chunk := inner.read(6 - len(self.head))):
            self.head += chunk
        self._pending = self.head

    def read(self, size: int, /) -> bytes:
        if self._pending:
            chunk, self._pending = self._pending, b""
        else:
            chunk = self._inner.read(size)
        self.count += len(chunk)
        return chunk


class _Ratio:
    """Passes on decompressed bytes while their ratio to the compressed bytes stays within the limit."""

    def __init__(self, inner: Reader, source: _Source, limits: ImageLimits, work: Work) -> None:
        self._inner, self._source, self._limits, self._work = inner, source, limits, work
        self._count = 0

    def read(self, size: int, /) -> bytes:
        self._work.check()
        chunk = self._inner.read(size)
        self._count += len(chunk)
        if self._count > max(self._limits.ratio_free_bytes, self._limits.ratio * self._source.count):
            raise ImageError(
                f"the archive unpacks to more than {self._limits.ratio} times its size, as decompression bombs do",
                hint="Raise the limit ratio if you trust this image.",
            )
        return chunk


class _Decoded:
    """The decompressed content of one or more concatenated streams, as parallel compressors and seekable images make
    them."""

    def __init__(self, kind: str, source: _Source) -> None:
        self._kind, self._source = kind, source
        self._decoder = _decoder(kind)
        self._input = b""
        self._ended = False

    def read(self, size: int, /) -> bytes:
        while not self._ended:
            try:
                chunk = self._step(min(size, _OUTPUT))
            except (zlib.error, lzma.LZMAError, OSError, ValueError, EOFError) as error:
                raise ImageError(f"the archive is damaged: {error}") from error
            if chunk:
                return chunk
        return b""

    def _step(self, size: int) -> bytes:
        if self._decoder.eof:
            self._next_stream()
            return b""
        if self._decoder.needs_input and not self._input:
            self._input = self._source.read(_CHUNK)
            if not self._input:
                raise EOFError("it ends too early")
        data, self._input = self._input, b""
        return self._decoder.decompress(data, size)

    def _next_stream(self) -> None:
        """Zeros may follow a stream as padding; anything else must be a stream of the same kind."""
        rest = self._decoder.unused_data
        while not (rest := rest.lstrip(b"\0")):
            rest = self._source.read(_CHUNK)
            if not rest:
                self._ended = True
                return
        while len(rest) < 6 and (more := self._source.read(_CHUNK)):
            rest += more
        if _sniff(rest) != self._kind:
            raise ValueError("it has data after its end")
        self._decoder, self._input = _decoder(self._kind), rest


class _Zstd:
    """The output of a `zstd` process that another thread feeds."""

    def __init__(self, process: subprocess.Popen[bytes], source: _Source) -> None:
        self._process, self._source = process, source
        self._failure: Exception | None = None
        self._feeder = threading.Thread(target=self._feed, daemon=True, name="atoll-zstd")
        self._feeder.start()

    def _feed(self) -> None:
        assert self._process.stdin is not None
        try:
            # A dead zstd is reported by its exit status, so a broken pipe needs no report of its own.
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                while chunk := self._source.read(_CHUNK):
                    stdin.write(chunk)
        except Exception as error:  # handed to the reading thread
            self._failure = error

    def read(self, size: int, /) -> bytes:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        chunk = self._process.stdout.read(size)
        if chunk:
            return chunk
        self._feeder.join()
        if self._failure is not None:
            raise self._failure
        if self._process.wait():
            reason = self._process.stderr.read(4096).decode(errors="replace").strip() or "zstd failed"
            raise ImageError(f"the archive is damaged: {reason}")
        return b""

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._feeder.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@contextlib.contextmanager
def plain(inner: Reader, limits: ImageLimits, work: Work) -> Iterator[Reader]:
    """The stream, decompressed if it was compressed. Raises ImageError while reading from a damaged one or a bomb."""
    source = _Source(inner)
    kind = _sniff(source.head)
    if kind is None:
        yield source
    elif kind != "zstd":
        yield _Ratio(_Decoded(kind, source), source, limits, work)
    else:
        program = shutil.which("zstd")
        if program is None:
            raise ImageError("the archive is packed with zstd, which is not installed", hint="apt-get install zstd")
        process = subprocess.Popen(
            [program, "-q", "-d", "-c", f"--memory={_ZSTD_MEMORY}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        zstd = _Zstd(process, source)
        try:
            with work.on_cancel(process.kill):
                yield _Ratio(zstd, source, limits, work)
        finally:
            zstd.close()

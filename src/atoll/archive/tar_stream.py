"""A parser for tar streams that supports only ustar, GNU long names and pax.

The standard library's parser allocates as much memory as a header requests, follows chains of headers by recursion and
builds sparse maps of any length. This one only reads forward, holds at most one block and one bounded extension, and
refuses features that no image needs: sparse files, several volumes, unknown types, global headers that rename entries.

Names stay bytes, because archives do not declare an encoding and the kernel does not need one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.archive.archive_limits import Budget
from atoll.archive.decompress import Reader
from atoll.errors import ImageError

BLOCK = 512
_READ = 1 << 20
_ZERO = bytes(BLOCK)
_EXTENSIONS = (b"L", b"K", b"x", b"X", b"g")
_MAX_EXTENSIONS = 8
_MAX_TIME = 1 << 33


class Type(enum.Enum):
    FILE = "0"
    HARD_LINK = "1"
    SYMLINK = "2"
    CHARACTER_DEVICE = "3"
    BLOCK_DEVICE = "4"
    DIRECTORY = "5"
    FIFO = "6"


@dataclass(frozen=True, slots=True)
class Member:
    name: bytes
    type: Type
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    link: bytes


class TarStream:
    """An iterator of members. The data of a file can be read with `data()` until the next member is requested."""

    def __init__(self, reader: Reader, budget: Budget, *, require_end: bool = True) -> None:
        self._reader, self._budget = reader, budget
        self._require_end = require_end
        self._buffer = b""
        self._position = 0
        self._unread = 0
        self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        extensions: dict[bytes, bytes] = {}
        count = 0
        while True:
            self._skip_data()
            block = self._block()
            if block is None:
                if self._require_end or count:
                    raise ImageError("the archive is cut off: its end mark is missing")
                return
            if block == _ZERO:
                if count:
                    raise ImageError("the archive is damaged: it ends within an entry")
                self._finish()
                return
            self._budget.spend_entry()
            _verify(block)
            flag = block[156:157]
            if flag in _EXTENSIONS:
                count += 1
                if count > _MAX_EXTENSIONS:
                    raise ImageError("the archive has too many headers for one entry")
                self._extend(flag, self._extension(block), extensions)
                continue
            yield self._member(block, flag, extensions)
            extensions, count = {}, 0

    def data(self) -> Iterator[bytes]:
        """Yield the data of the current member."""
        while self._unread:
            chunk = self._some(min(self._unread, _READ))
            self._unread -= len(chunk)
            yield chunk

    def _member(self, block: bytes, flag: bytes, extensions: dict[bytes, bytes]) -> Member:
        name = extensions.get(b"path")
        if name is None:
            name = _text(block[0:100])
            # GNU tar writes two spaces after the magic and uses the prefix field for something else.
            if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500])):
                name = prefix + b"/" + name
        kind = _type(flag, name)
        link = extensions.get(b"linkpath", _text(block[157:257]))
        size = _decimal(extensions, b"size", _number(block[124:136]))
        if kind is not Type.FILE:
            size = 0
        if size > self._budget.limits.file_bytes:
            raise ImageError(
                f"a file of the image has {size:,} bytes, more than {self._budget.limits.file_bytes:,}",
                hint="Raise the limit file_bytes if you trust this image.",
            )
        self._expect(size)
        return Member(
            name=name,
            type=kind,
            mode=_number(block[100:108]) & 0o7777,
            uid=_decimal(extensions, b"uid", _number(block[108:116])),
            gid=_decimal(extensions, b"gid", _number(block[116:124])),
            size=size,
            mtime=min(_decimal(extensions, b"mtime", _number(block[136:148])), _MAX_TIME),
            link=link,
        )

    def _extension(self, block: bytes) -> bytes:
        size = _number(block[124:136])
        flag = block[156:157]
        if size > (self._budget.limits.path_bytes + 1 if flag in (b"L", b"K") else self._budget.limits.pax_bytes):
            raise ImageError(f"the archive has a header of {size:,} bytes, more than any image needs")
        self._expect(size)
        data = b"".join(self.data())
        # GNU tar reads a name up to the first zero byte, even after the end of the data.
        if flag in (b"L", b"K") and b"\0" not in data and self._padding_bytes().strip(b"\0"):
            raise ImageError("the archive is damaged: a long name does not end where it should")
        return data

    def _extend(self, flag: bytes, data: bytes, extensions: dict[bytes, bytes]) -> None:
        if flag == b"L":
            _add(extensions, {b"path": _text(data)})
        elif flag == b"K":
            _add(extensions, {b"linkpath": _text(data)})
        else:
            records = _pax_records(data)
            if any(key.startswith(b"GNU.sparse") for key in records):
                raise _sparse()
            if flag == b"g":
                if records.keys() & {b"path", b"linkpath", b"size"}:
                    raise ImageError("the archive has a global header that names or sizes every entry")
                return
            if b"\0" in records.get(b"path", b"") + records.get(b"linkpath", b""):
                raise ImageError("the archive has a name with a zero byte")
            # The mark is no key that a record could have: its sign is the one that ends a key.
            _add(extensions, records | {b"=": b""})

    def _expect(self, size: int) -> None:
        self._budget.spend_bytes(size)
        self._unread = size
        self._padding = -size % BLOCK

    def _skip_data(self) -> None:
        for _ in self.data():
            pass
        self._padding_bytes()

    def _padding_bytes(self) -> bytes:
        self._unread, self._padding = self._padding, 0
        return b"".join(self.data())

    def _fill(self) -> bool:
        chunk = self._reader.read(_READ)
        if not chunk:
            return False
        self._buffer = self._buffer[self._position :] + chunk
        self._position = 0
        return True

    def _some(self, size: int) -> bytes:
        if self._position == len(self._buffer) and not self._fill():
            raise ImageError("the archive is cut off")
        chunk = self._buffer[self._position : self._position + size]
        self._position += len(chunk)
        return chunk

    def _block(self) -> bytes | None:
        while len(self._buffer) - self._position < BLOCK:
            if not self._fill():
                if self._position == len(self._buffer):
                    return None
                raise ImageError("the archive is cut off")
        block = self._buffer[self._position : self._position + BLOCK]
        self._position += BLOCK
        return block

    def _finish(self) -> None:
        """Read the stream to its end, so that a digest of the whole stream covers it. Only padding may follow."""
        rest = self._buffer[self._position :] or self._reader.read(_READ)
        while rest:
            if rest.strip(b"\0"):
                raise ImageError("the archive is damaged: it has data after its end")
            self._budget.spend_bytes(len(rest))
            rest = self._reader.read(_READ)


def _add(extensions: dict[bytes, bytes], more: dict[bytes, bytes]) -> None:
    """Add what one more header says about the next entry. Programs disagree about which of two headers counts."""
    if extensions.keys() & more.keys():
        raise ImageError("the archive describes an entry twice")
    extensions.update(more)


def _verify(block: bytes) -> None:
    stored = _number(block[148:156])
    blank = block[:148] + b" " * 8 + block[156:]
    if stored == sum(blank):
        return
    # Some very old programs summed signed bytes.
    if stored != sum(byte - 256 if byte > 127 else byte for byte in blank):
        raise ImageError("this is not a tar archive, or it is damaged: a header's checksum is wrong")


def _type(flag: bytes, name: bytes) -> Type:
    if flag in (b"0", b"\0", b"7"):
        if not name.endswith(b"/"):
            return Type.FILE
        # Archives older than ustar mark a directory only by the slash. In others some programs would see a file.
        if flag == b"\0":
            return Type.DIRECTORY
        raise ImageError("the archive has a file whose name ends like that of a directory")
    if flag == b"S":
        raise _sparse()
    try:
        return Type(flag.decode("ascii"))
    except ValueError:
        raise ImageError(f"the archive has an entry of unknown type {flag!r}") from None


def _sparse() -> ImageError:
    return ImageError("the archive has sparse files, which images do not need", hint="Make it without tar's --sparse.")


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes) -> int:
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ~(0x80 << (8 * (len(field) - 1)))
        if field[0] & 0x40:
            raise ImageError("the archive is damaged: a header has a negative number")
        return value
    digits = field.strip(b" \0")
    if digits and (digits.strip(b"01234567")):
        raise ImageError("the archive is damaged: a header has an invalid number")
    return int(digits, 8) if digits else 0


def _decimal(extensions: dict[bytes, bytes], key: bytes, default: int) -> int:
    text = extensions.get(key)
    if text is None:
        return default
    whole = text.partition(b".")[0] if key == b"mtime" else text
    if key == b"mtime" and whole.startswith(b"-"):
        return 0
    if not whole.isdigit() or len(whole) > 20:
        raise ImageError(f"the archive is damaged: {key.decode()} is not a number")
    return int(whole)


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """Parse records of the form `LENGTH KEY=VALUE\\n`, where the length counts the whole record."""
    records: dict[bytes, bytes] = {}
    position = 0
    while position < len(data) and data[position]:
        space = data.find(b" ", position, position + 9)
        digits = data[position:space] if space > 0 else b""
        length = int(digits) if digits.isdigit() else 0
        record = data[space + 1 : position + length]
        key, equals, value = record[:-1].partition(b"=")
        if position + length > len(data) or not record.endswith(b"\n") or not equals or not key:
            raise ImageError("the archive is damaged: an extended header is malformed")
        records[key] = value
        position += length
    return records

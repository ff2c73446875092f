"""Say in an OTLP export whose it is: each resource in it gets attributes that its sender can neither choose nor hide.

The sender is untrusted code. Of protobuf only the outermost levels are read, which are the same for traces, metrics and
logs: a request has resources, a resource has attributes, and everything below is copied as bytes. So nothing is built
in memory from what the sender wrote, and the number of fields that are looked at is bounded.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

RESERVED = "atoll."
"""Resource attributes of this prefix are the server's alone."""
MAX_BYTES = 4 << 20
"""Maximum size of an export after decompression."""
_MAX_FIELDS = 10_000
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT = 10
_MAX_NUMBER = (1 << 29) - 1
_GZIP = 31
_ITEM = 1
"""In a request: the list of resources with what belongs to them."""
_RESOURCE, _SCOPES, _SCHEMA = 1, 2, 3
_ATTRIBUTE, _DROPPED = 1, 2
_KEY, _VALUE, _STRING = 1, 2, 1
_JSON_ITEMS = {
    "traces": ("resourceSpans", "scopeSpans"),
    "metrics": ("resourceMetrics", "scopeMetrics"),
    "logs": ("resourceLogs", "scopeLogs"),
}
_BAD_PROTOBUF = "the body is not a valid export in protobuf"
_BAD_JSON = "the body is not a valid export in JSON"


class TooLargeError(ValueError):
    """The export is larger than `MAX_BYTES`."""


def decompressed(data: bytes) -> bytes:
    """Return the content of a gzip file. Raises TooLargeError as soon as it is too large, and ValueError if it is
    damaged."""
    work = zlib.decompressobj(_GZIP)
    try:
        content = work.decompress(data, MAX_BYTES + 1)
    except zlib.error as error:
        raise ValueError("the body is not valid gzip") from error
    if len(content) > MAX_BYTES:
        raise TooLargeError(f"an export may have at most {MAX_BYTES} bytes after decompression")
    if not work.eof or work.unused_data:
        raise ValueError("the body is not one complete gzip file")
    return content


def stamped(data: bytes, attributes: Mapping[str, str]) -> bytes:
    """Return an export in protobuf whose resources have these attributes, and no others of the reserved prefix. Raises
    ValueError."""
    view, count = memoryview(data), _Count()
    ours = b"".join(_field(_ATTRIBUTE, _attribute(name, value)) for name, value in attributes.items())
    done = bytearray()
    for number, value, _ in _fields(view, count):
        if number == _ITEM and value is not None:
            done += _field(_ITEM, _stamped_item(value, ours, count))
    return bytes(done)


def stamped_json(data: bytes, signal: str, attributes: Mapping[str, str]) -> bytes:
    """As `stamped`, for an export in JSON. What is not known to belong there is left out."""
    ours = [{"key": name, "value": {"stringValue": value}} for name, value in attributes.items()]
    items_name, scopes_name = _JSON_ITEMS[signal]
    try:
        items = _list(_object(json.loads(data)).get(items_name, []))
        made = []
        for item in map(_object, items):
            resource = _object(item.get("resource", {}))
            theirs = [each for each in map(_object, _list(resource.get("attributes", []))) if not _is_reserved(each)]
            made.append({"resource": {"attributes": theirs + ours}, scopes_name: _list(item.get(scopes_name, []))})
        return json.dumps({items_name: made}, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(_BAD_JSON) from error


# --- protobuf ---------------------------------------------------------------------------------------------------------


class _Count:
    """How many fields were looked at, over all levels."""

    def __init__(self) -> None:
        self._left = _MAX_FIELDS

    def one(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"the body has more than {_MAX_FIELDS} resources and attributes of resources")


def _stamped_item(item: memoryview, ours: bytes, count: _Count) -> bytes:
    """Return the item with one resource. A resource that is given in several parts is one: so readers see it."""
    resource, rest = bytearray(), bytearray()
    for number, value, whole in _fields(item, count):
        if number == _RESOURCE and value is not None:
            resource += _kept(value, count)
        elif number in (_SCOPES, _SCHEMA) and value is not None:
            rest += whole
    return _field(_RESOURCE, bytes(resource) + ours) + bytes(rest)


def _kept(resource: memoryview, count: _Count) -> bytes:
    kept = bytearray()
    for number, value, whole in _fields(resource, count):
        if number == _ATTRIBUTE and value is not None:
            keys = [bytes(text) for field, text, _ in _fields(value, count) if field == _KEY and text is not None]
            if not any(key.startswith(RESERVED.encode()) for key in keys):
                kept += whole
        elif number == _DROPPED and value is None:
            kept += whole
    return bytes(kept)


def _fields(data: memoryview, count: _Count) -> Iterator[tuple[int, memoryview | None, memoryview]]:
    """Yield number, content and whole of each field; the content is None unless the field has a length."""
    position = 0
    while position < len(data):
        count.one()
        start = position
        tag, position = _varint(data, position)
        number, kind = tag >> 3, tag & 7
        value = None
        if kind == _VARINT:
            _, position = _varint(data, position)
        elif kind == _LENGTH:
            size, position = _varint(data, position)
            value = data[position : position + size]
            position += size
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(_BAD_PROTOBUF)
        if position > len(data) or not 0 < number <= _MAX_NUMBER:  # some readers cut off the upper bits
            raise ValueError(_BAD_PROTOBUF)
        yield number, value, data[start:position]


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(_MAX_VARINT):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position
    raise ValueError(_BAD_PROTOBUF)


def _field(number: int, content: bytes) -> bytes:
    return _encoded(number << 3 | _LENGTH) + _encoded(len(content)) + content


def _encoded(value: int) -> bytes:
    done = bytearray()
    while value >= 0x80:
        done.append(value & 0x7F | 0x80)
        value >>= 7
    done.append(value)
    return bytes(done)


def _attribute(name: str, value: str) -> bytes:
    return _field(_KEY, name.encode()) + _field(_VALUE, _field(_STRING, value.encode(errors="replace")))


# --- JSON -------------------------------------------------------------------------------------------------------------


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(_BAD_JSON)
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(_BAD_JSON)
    return value


def _is_reserved(attribute: dict[str, Any]) -> bool:
    return str(attribute.get("key", "")).startswith(RESERVED)

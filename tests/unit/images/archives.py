"""Makes tar archives byte by byte, so that they can say things that no tar program would."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

END = bytes(1024)


def block(
    name: bytes,
    kind: bytes = b"0",
    *,
    size: int = 0,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    link: bytes = b"",
    device: tuple[int, int] = (0, 0),
    size_field: bytes | None = None,
) -> bytes:
    fields = bytearray(512)
    fields[0:100] = name[:100].ljust(100, b"\0")
    fields[100:108] = b"%07o\0" % mode
    fields[108:116] = _number(uid, 8)
    fields[116:124] = _number(gid, 8)
    fields[124:136] = size_field or _number(size, 12)
    fields[136:148] = b"%011o\0" % 1_700_000_000
    fields[156:157] = kind
    fields[157:257] = link[:100].ljust(100, b"\0")
    fields[257:265] = b"ustar\x0000"
    fields[329:337] = b"%07o\0" % device[0]
    fields[337:345] = b"%07o\0" % device[1]
    fields[148:156] = b"%06o\0 " % (sum(fields) + 8 * 32)
    return bytes(fields)


def _number(value: int, width: int) -> bytes:
    if value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    return bytes([0x80]) + value.to_bytes(width - 1, "big")


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def file(name: str | bytes, data: bytes = b"", **fields: Any) -> bytes:
    return _entry(name, b"0", data, **fields)


def directory(name: str | bytes, **fields: Any) -> bytes:
    return _entry(name, b"5", b"", **({"mode": 0o755} | fields))


def symlink(name: str | bytes, target: str | bytes, **fields: Any) -> bytes:
    return _entry(name, b"2", b"", target=target, **fields)


def hard_link(name: str | bytes, target: str | bytes, **fields: Any) -> bytes:
    return _entry(name, b"1", b"", target=target, **fields)


def deep(levels: int, name: bytes = b"d") -> bytes:
    """Directories in one another, more than a name may have: each link leads to where the name before it ended."""
    step, members, start = 100, [], b""
    for number in range(-(-levels // step)):
        way = b"/".join([name] * min(step, levels - number * step))
        members.append(directory(start + way))
        members.append(symlink(b"to%d" % number, start + way))
        start = b"to%d/" % number
    return b"".join([*members, file(start + b"bottom", b"here")])


def special(name: str | bytes, kind: bytes, device: tuple[int, int] = (0, 0)) -> bytes:
    return _entry(name, kind, b"", device=device)


def _entry(name: str | bytes, kind: bytes, data: bytes, target: str | bytes = b"", **fields: Any) -> bytes:
    name, target = _bytes(name), _bytes(target)
    records = {}
    if len(name) > 100:
        records["path"] = name
    if len(target) > 100:
        records["linkpath"] = target
    before = pax(records) if records else b""
    return before + block(name, kind, size=len(data), link=target, **fields) + padded(data)


def pax(records: Mapping[str, str | bytes], kind: bytes = b"x") -> bytes:
    data = b"".join(_record(key, _bytes(value)) for key, value in records.items())
    return block(b"pax", kind, size=len(data)) + padded(data)


def _record(key: str, value: bytes) -> bytes:
    body = b" " + key.encode() + b"=" + value + b"\n"
    length = len(body)
    while length != len(body) + len(str(length)):
        length = len(body) + len(str(length))
    return str(length).encode() + body


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def long_name(name: bytes, kind: bytes = b"L") -> bytes:
    data = name + b"\0"
    return block(b"././@LongLink", kind, size=len(data)) + padded(data)


def tar(*entries: bytes) -> bytes:
    return b"".join(entries) + END


def small_root(*more: bytes) -> bytes:
    """The least that looks like a root file system."""
    return tar(
        directory("etc"), file("etc/os-release", b"ID=test\n"), directory("usr/bin"), file("usr/bin/true", b"#!"), *more
    )


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def oci_config(layers: Sequence[bytes], **more: Any) -> bytes:
    """A configuration for layers given as plain tar streams."""
    value = {
        "os": "linux",
        "architecture": "amd64",
        "config": {
            "Env": ["PATH=/usr/bin", "GREETING=a=b"],
            "Cmd": ["true"],
            "WorkingDir": "/srv",
            "User": "1000:1000",
        },
        "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in layers]},
    }
    return json.dumps(value | more).encode()


def fingerprint(path: Path) -> list[tuple[object, ...]]:
    """All that a test could see change in a directory, with its times."""
    found: list[tuple[object, ...]] = []
    for item in sorted([path, *path.rglob("*")]):
        info = item.lstat()
        content = item.read_bytes() if item.is_file() and not item.is_symlink() else b""
        found.append((str(item), info.st_mode, info.st_uid, info.st_gid, info.st_nlink, info.st_mtime_ns, content))
    return found

"""What a fuzzer says to the agent: mostly sense, with something wrong in it."""

from __future__ import annotations

import random
import struct

from agent.client import Record, frame_bytes
from atoll.guest.frames import FrameType, Op, Tag, Verb, encode_u16, encode_u32

NUMBERS = [0, 1, 2, 3, 8, 9, 15, 17, 31, 63, 64, 65, 127, 255, 4096, 65535, 65536, 262_143, 262_144, 262_145]
NUMBERS += [(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
PATHS = [b"f", b"d", b"d/e", b"l", b"big", b".", b"", b"/work", b"/proc/self/fd", b"/dev/null", b"/dev/zero"]
PATHS += [
    b"/proc/version",
    b"fifo",
    b"s",
    b"x" * 255,
    b"x" * 256,
    b"d/" * 1000,
    b"/" * 4095,
    b"a\0b",
    b"loop",
    b"new/a/b",
]
WIDE = [b"/", b"//", b"..", b"/work/../usr"]
"""All of the machine's programs: to walk them takes long, so seldom."""
IDS = [b"a", b"b", b"c", b"d", b"e", b"x" * 64, b"x" * 65, b""]
SHELL = [b"true", b"echo out; echo err >&2", b"cat", b"head -c 300000 /dev/zero", b"sleep 0.02", b"echo 1 >&9; exit 3"]
SHELL += [
    b"sleep 0.1 & exit",
    b"setsid sleep 0.1 & exit 1",
    b"kill -9 $PPID",
    b"kill -STOP $PPID",
    b"kill -9 $$",
    b"tty; stty size",
]
ARGS = [b"echo", b"cat", b"true", b"/no/such", b"./f", b"/", b"", b"x" * 5000]
NUMBER_TAGS = [7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 32, 33, 34, 35, 36, 38, 39, 50]
OPS = [int(op) for op in Op]


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def session(self) -> bytes:
        """All that one host says, some of it broken on the way."""
        self._number = 0
        self._open: list[int] = []
        words = [self._frame() for _ in range(self.chance.randrange(1, 40))]
        if self.chance.random() < 0.5:
            words = [self._mutate(word) if self.chance.random() < 0.15 else word for word in words]
        if self.chance.random() < 0.1:
            self.chance.shuffle(words)
        return b"".join(words)

    def _number_of(self) -> int:
        return (
            self.chance.choice(NUMBERS)
            if self.chance.random() < 0.7
            else self.chance.getrandbits(self.chance.randrange(1, 65))
        )

    def _path(self) -> bytes:
        return self.chance.choice(PATHS if self.chance.random() < 0.99 else WIDE)

    def _stream(self) -> int:
        if self._open and self.chance.random() < 0.95:
            return self.chance.choice(self._open)
        return self.chance.choice([0, self._number, self._number + 1, 0xFFFFFFFF])

    def _frame(self) -> bytes:
        kind = self.chance.choices(
            [FrameType.OPEN, FrameType.DATA, FrameType.END, FrameType.CREDIT, FrameType.CONTROL, FrameType.CLOSE, 99],
            [50, 25, 10, 8, 6, 6, 0.3] if self._open else [1, 0, 0, 0, 0, 0, 0],
        )[0]
        if kind == FrameType.OPEN:
            self._number += 1 if self.chance.random() < 0.95 else self.chance.choice([0, 5, 1 << 20])
            self._open.append(self._number)
            op = self.chance.choice(OPS) if self.chance.random() < 0.98 else self.chance.getrandbits(16)
            return frame_bytes(kind, self._number & 0xFFFFFFFF, encode_u16(op) + self._fields(op))
        payload = b""
        if kind == FrameType.DATA:
            payload = self._data()
        elif kind == FrameType.CREDIT:
            payload = encode_u32(self._number_of() & 0xFFFFFFFF)
        elif kind == FrameType.CONTROL:
            payload = encode_u16(self.chance.choice([Verb.RESIZE, Verb.SIGNAL, 3, 999])) + self._fields(0)
        return frame_bytes(kind, self._stream(), payload)

    def _field(self, tag: int, value: bytes | int) -> bytes:
        data = struct.pack("<Q", value) if isinstance(value, int) else value
        length = len(data) if self.chance.random() < 0.995 else self._number_of() & 0xFFFFFFFF
        return struct.pack("<HI", tag, length) + data

    def _fields(self, op: int) -> bytes:
        pick, chance = self.chance.choice, self.chance.random
        fields: list[tuple[int, bytes | int]] = []
        if op in (Op.START, Op.ATTACH, Op.KILL, Op.RELEASE):
            fields.append((Tag.ID, pick(IDS)))
        if op == Op.START:
            if chance() < 0.6:
                fields.append((Tag.SHELL, pick(SHELL)))
            else:
                fields += [(Tag.ARG, pick(ARGS)) for _ in range(self.chance.randrange(1, 4))]
            fields += [(Tag.ENV, pick([b"A=1", b"PATH=/usr/bin", b"=", b"A", b"PATH=", b"A=" + b"x" * 9000]))] * (
                chance() < 0.3
            )
            fields += [(Tag.CWD, self._path())] * (chance() < 0.2)
            fields += [(Tag.USER, pick([b"1000", b"root", b"nobody", b"1:2", b":", b"", b"99999999999"]))] * (
                chance() < 0.1
            )
            limit = struct.pack("<QQQ", self._number_of() % 20, self._number_of(), self._number_of())
            fields += [(Tag.RLIMIT, limit)] * (chance() < 0.1)
            fields.append((Tag.FLAGS, self.chance.getrandbits(7)))
            fields += [(Tag.DEADLINE_MS, pick([1, 5, 20, 50]))] * (chance() < 0.3)
        elif op >= Op.STAT or op == 0:
            fields.append((Tag.PATH, self._path()))
            fields += [(Tag.TARGET, self._path())] * (chance() < 0.4)
            fields += [(Tag.CWD, self._path())] * (chance() < 0.1)
            fields.append((Tag.FLAGS, self.chance.getrandbits(4)))
        fields += [(pick(NUMBER_TAGS), self._number_of()) for _ in range(pick([0, 0, 1, 2, 3]))]
        if chance() < 0.1:
            self.chance.shuffle(fields)
        if chance() < 0.03:
            fields *= 2
        return b"".join(self._field(int(tag), value) for tag, value in fields)

    def _data(self) -> bytes:
        what = self.chance.random()
        if what < 0.5:
            return b"".join(self._item() for _ in range(self.chance.randrange(1, 6)))
        if what < 0.9:
            return self.chance.randbytes(self.chance.choice([0, 1, 35, 36, 37, 1000, 65536]))
        return bytes(self.chance.choice([200_000, 262_144]))

    def _item(self) -> bytes:
        path = self.chance.choice(
            [b"", b"", b"f", b"d", b"d/e", b"d/l", b"l", b"../x", b"/x", b"x" * 256, b"d/" * 2000]
        )
        kind = self.chance.choice("dddfffl!p")
        content = self.chance.randbytes(self.chance.choice([0, 1, 100])) if kind == "f" else b""
        size = len(content) if self.chance.random() < 0.9 else self._number_of()
        target = self.chance.choice([b"", b"d", b"..", b"/etc"])
        return Record(
            kind, path, target, self.chance.getrandbits(12), size, self.chance.getrandbits(63), content
        ).encode()

    def _mutate(self, word: bytes) -> bytes:
        changed = bytearray(word)
        for _ in range(self.chance.randrange(1, 4)):
            at = self.chance.randrange(len(changed)) if changed else 0
            how = self.chance.randrange(5)
            if how == 0 and changed:
                changed[at] ^= 1 << self.chance.randrange(8)
            elif how == 1 and changed:
                changed[at] = self.chance.choice([0, 1, 0x7F, 0x80, 0xFF])
            elif how == 2:
                changed[at:at] = self.chance.randbytes(self.chance.randrange(1, 9))
            elif how == 3:
                del changed[at : at + self.chance.randrange(1, 9)]
            else:
                changed[at : at + 4] = encode_u32(self._number_of() & 0xFFFFFFFF)
        return bytes(changed)

"""A seccomp profile as the program that the kernel runs, for launchers without a library for that.

The program is classic BPF. It checks the architecture (a foreign one kills the process), refuses the x32 numbers that
share a table with x86, and finds the call by a binary search over ranges of numbers with the same verdict. For the few
calls with conditions it tests the arguments rule by rule. A number that is newer than the table answers ENOSYS, as an
old kernel would, so programs fall back.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

from atoll.engines.host.confinement.seccomp import Match, Profile, Rule
from atoll.engines.host.confinement.syscalls import NUMBERS

AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
X32_BIT = 0x4000_0000
KILL, ERRNO, NOTIFY, ALLOW = 0x8000_0000, 0x0005_0000, 0x7FC0_0000, 0x7FFF_0000
LD, AND, JEQ, JGE, RET = 0x20, 0x54, 0x15, 0x35, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
_MAX_JUMP = 255
_MAX_PROGRAM = 4096


@dataclass(frozen=True, slots=True)
class Instruction:
    code: int
    jump_true: int
    jump_false: int
    value: int

    def pack(self) -> bytes:
        return struct.pack("<HBBI", self.code, self.jump_true, self.jump_false, self.value)


Verdict = int | tuple[Rule, ...]
"""A return value of the filter, or the rules that decide by arguments."""


def program(profile: Profile, machine: str) -> list[Instruction]:
    """Return the program for a profile. Raises ValueError if it would be too long for the kernel."""
    numbers = NUMBERS[machine]
    ranges = _ranges(profile, numbers)
    search = _search(ranges, profile)
    # x32 is a second table under the same architecture and is treated like a foreign one. Where nothing else is
    # refused, another filter may have to answer such a call, and a kill would override any answer.
    foreign = KILL if profile.default_error is not None else _refuse(errno.ENOSYS)
    head = [
        Instruction(LD, 0, 0, ARCHITECTURE),
        Instruction(JEQ, 1, 0, AUDIT_ARCH[machine]),
        Instruction(RET, 0, 0, foreign),
        Instruction(LD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":
        head += [Instruction(JGE, 0, 1, X32_BIT), Instruction(RET, 0, 0, foreign)]
    found = head + search
    if len(found) > _MAX_PROGRAM:
        raise ValueError(f"the filter has {len(found)} instructions; the kernel takes {_MAX_PROGRAM}")
    return found


def assemble(profile: Profile, machine: str) -> bytes:
    return b"".join(instruction.pack() for instruction in program(profile, machine))


def _refuse(number: int | None) -> int:
    return ERRNO | number if number is not None else ALLOW


def _answer(rule: Rule) -> int:
    return NOTIFY if rule.supervised else _refuse(rule.error)


def _verdicts(profile: Profile, numbers: dict[str, int]) -> dict[int, Verdict]:
    by_name: dict[str, list[Rule]] = {}
    for rule in profile.rules:
        for name in rule.names:
            by_name.setdefault(name, []).append(rule)
    found: dict[int, Verdict] = {}
    for name, number in numbers.items():
        rules = by_name.get(name, [])
        plain = [rule for rule in rules if not rule.matches]
        if plain:
            found[number] = _answer(plain[0])
        else:
            found[number] = tuple(rules) if rules else _refuse(profile.default_error)
    return found


def _ranges(profile: Profile, numbers: dict[str, int]) -> list[tuple[int, Verdict]]:
    """Return the first number of each stretch with the same verdict, ascending from 0."""
    verdicts = _verdicts(profile, numbers)
    unknown: Verdict = _refuse(profile.default_error)
    found: list[tuple[int, Verdict]] = []
    for number in range(max(verdicts) + 1):
        verdict = verdicts.get(number, unknown)
        if not found or found[-1][1] != verdict or isinstance(verdict, tuple):
            found.append((number, verdict))
    return [*found, (max(verdicts) + 1, _refuse(errno.ENOSYS if profile.default_error is not None else None))]


def _search(ranges: list[tuple[int, Verdict]], profile: Profile) -> list[Instruction]:
    if len(ranges) == 1:
        return _leaf(ranges[0][1], profile)
    middle = len(ranges) // 2
    low, high = _search(ranges[:middle], profile), _search(ranges[middle:], profile)
    # A jump reaches 255 instructions. For a longer lower half, a second jump without that limit is inserted.
    if len(low) <= _MAX_JUMP:
        return [Instruction(JGE, len(low), 0, ranges[middle][0]), *low, *high]
    return [Instruction(JGE, 0, 1, ranges[middle][0]), Instruction(0x05, 0, 0, len(low)), *low, *high]


def _leaf(verdict: Verdict, profile: Profile) -> list[Instruction]:
    if isinstance(verdict, int):
        return [Instruction(RET, 0, 0, verdict)]
    found: list[Instruction] = []
    for rule in verdict:
        found += _test(rule)
    return [*found, Instruction(RET, 0, 0, _refuse(profile.default_error))]


def _test(rule: Rule) -> list[Instruction]:
    """Return the instructions for one rule. Execution falls through to what follows if the rule does not match."""
    checks = [check for match in rule.matches for check in _halves(match)]
    body: list[Instruction] = [Instruction(RET, 0, 0, _answer(rule))]
    for offset, mask, value in reversed(checks):
        body = [
            Instruction(LD, 0, 0, offset),
            Instruction(AND, 0, 0, mask),
            Instruction(JEQ, 0, len(body), value),
            *body,
        ]
    return body


def _halves(match: Match) -> list[tuple[int, int, int]]:
    """Return offset, mask and value of the 32-bit words that matter. Both architectures are little-endian."""
    low = ARGUMENTS + 8 * match.index
    words = [(low, match.mask & 0xFFFF_FFFF, match.value & 0xFFFF_FFFF), (low + 4, match.mask >> 32, match.value >> 32)]
    return [word for word in words if word[1]]

"""The profile, by what it answers: the same questions to the data, the OCI rendering and the kernel's program."""

from __future__ import annotations

import errno
import stat
import struct

import pytest

from atoll.engines.host.confinement import bpf, syscalls
from atoll.engines.host.confinement.seccomp import NEW_NAMESPACES, Profile, default_profile

ALLOW = None
MACHINES = ("x86_64", "aarch64")


def by_data(profile: Profile, machine: str, name: str, arguments: tuple[int, ...]) -> int | None:
    for rule in profile.rules:
        if name in rule.names and all(arguments[m.index] & m.mask == m.value for m in rule.matches):
            return rule.error
    return profile.default_error


def run(code: bytes, data: bytes) -> int:
    """The kernel's machine, as far as our programs use it."""
    program = list(struct.iter_unpack("<HBBI", code))
    accumulator = counter = 0
    while True:
        operation, jump_true, jump_false, value = program[counter]
        counter += 1
        match operation:
            case bpf.LD:
                (accumulator,) = struct.unpack_from("<I", data, value)
            case bpf.AND:
                accumulator &= value
            case bpf.JEQ:
                counter += jump_true if accumulator == value else jump_false
            case bpf.JGE:
                counter += jump_true if accumulator >= value else jump_false
            case 0x05:
                counter += value
            case bpf.RET:
                return int(value)
            case _:
                raise AssertionError(f"unknown instruction {operation:#x}")


def call(machine: str, number: int, arguments: tuple[int, ...], architecture: int | None = None) -> bytes:
    return struct.pack("<IIQ6Q", number, architecture or bpf.AUDIT_ARCH[machine], 0, *arguments)


def by_program(profile: Profile, machine: str, name: str, arguments: tuple[int, ...]) -> int | None:
    answer = run(bpf.assemble(profile, machine), call(machine, syscalls.NUMBERS[machine][name], arguments))
    if answer == bpf.ALLOW:
        return ALLOW
    assert answer & 0xFFFF_0000 == bpf.ERRNO
    return answer & 0xFFFF


@pytest.fixture(params=[by_data, by_program])
def ask(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    profile = default_profile()

    def ask(name: str, *arguments: int, machine: str = "x86_64") -> int | None:
        padded = (*arguments, *([0] * (6 - len(arguments))))
        return request.param(profile, machine, name, padded)  # type: ignore[no-any-return]

    return ask


def test_all_that_docker_refuses_is_refused(ask) -> None:  # type: ignore[no-untyped-def]
    for name in sorted(syscalls.DENIED_BY_DOCKER):
        assert ask(name) in (errno.EPERM, errno.ENOSYS), name


def test_more_than_fifteen_others_are_refused_too(ask) -> None:  # type: ignore[no-untyped-def]
    assert len(syscalls.DENIED_BESIDES) >= 15
    for name in sorted(syscalls.DENIED_BESIDES):
        assert ask(name) in (errno.EPERM, errno.ENOSYS), name


@pytest.mark.parametrize(
    "name",
    ["read", "openat", "execve", "futex", "mmap", "chown", "setuid", "fsync", "inotify_add_watch", "statx", "rseq"],
)
def test_what_programs_need_is_allowed(ask, name: str) -> None:  # type: ignore[no-untyped-def]
    assert ask(name) is ALLOW


def test_clone_makes_processes_and_threads_but_no_namespace(ask) -> None:  # type: ignore[no-untyped-def]
    assert ask("clone", 0x11) is ALLOW
    assert ask("clone", 0x003D_0F00) is ALLOW
    for bit in range(64):
        if NEW_NAMESPACES >> bit & 1:
            assert ask("clone", 0x11 | 1 << bit) == errno.EPERM
    assert ask("clone3") == errno.ENOSYS


@pytest.mark.parametrize("high", [0, 1 << 32, 0xFFFF_FFFF << 32])
def test_sockets_are_local_internet_or_routing(ask, high: int) -> None:  # type: ignore[no-untyped-def]
    allowed = {(1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 2, 0), (10, 1, 0), (10, 2, 0), (2, 2 | 0x80000, 17), (16, 3, 0)}
    for family in range(50):
        for kind in (1, 2, 3, 5):
            expected = (family, kind) in {(family, kind) for family, kind, _ in allowed} or family in (1, 16)
            assert (ask("socket", family | high, kind, 0) is ALLOW) == expected, (family, kind)
    for protocol in range(1, 32):
        assert ask("socket", 16 | high, 3, protocol) in (errno.EPERM, errno.EPROTONOSUPPORT)


def test_su_is_told_that_there_is_no_audit_log(ask) -> None:  # type: ignore[no-untyped-def]
    assert ask("socket", 16, 3, 9) == errno.EPROTONOSUPPORT


@pytest.mark.parametrize(("name", "index"), [("mknod", 1), ("mknodat", 2)])
def test_nodes_are_files_pipes_and_sockets(ask, name: str, index: int) -> None:  # type: ignore[no-untyped-def]
    for kind in range(16):
        mode = kind << 12 | 0o644
        expected = mode & 0o170000 in (0, stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK)
        assert (ask(name, *([0] * index), mode) is ALLOW) == expected, oct(mode)


@pytest.mark.parametrize("high", [0, 1 << 32])
def test_a_terminal_cannot_be_typed_into(ask, high: int) -> None:  # type: ignore[no-untyped-def]
    assert ask("ioctl", 0, 0x5412 | high) == errno.EPERM
    assert ask("ioctl", 0, 0x541C | high) == errno.EPERM
    for request in (*range(0x5400, 0x5480), 0, 0x8914, 0xC020_660B, 0xFFFF_FFFF, 0x4004_5412, 0x1_5412):
        if request not in (0x5412, 0x541C):
            assert ask("ioctl", 0, request | high) is ALLOW, hex(request)


def test_personality_takes_only_what_weakens_nothing(ask) -> None:  # type: ignore[no-untyped-def]
    assert ask("personality", 0xFFFF_FFFF) is ALLOW
    assert ask("personality", 0x0040_0000) == errno.EPERM  # READ_IMPLIES_EXEC


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_answers_the_same_in_all_three_forms(machine: str) -> None:
    profile = default_profile()
    for name in syscalls.NUMBERS[machine]:
        arguments = (1, 0o10644, 0o10644, 0, 0, 0)
        answers = {form(profile, machine, name, arguments) for form in (by_data, by_program)}
        assert len(answers) == 1, name


@pytest.mark.parametrize("machine", MACHINES)
def test_a_foreign_architecture_kills(machine: str) -> None:
    code = bpf.assemble(default_profile(), machine)
    for architecture in (0x4000_0003, 0xC000_00F3, *(set(bpf.AUDIT_ARCH.values()) - {bpf.AUDIT_ARCH[machine]})):
        assert run(code, call(machine, 20, (0,) * 6, architecture)) == bpf.KILL


def test_x32_kills() -> None:
    code = bpf.assemble(default_profile(), "x86_64")
    assert run(code, call("x86_64", 0x4000_0000 + 39, (0,) * 6)) == bpf.KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_a_call_of_the_future_does_not_exist_yet(machine: str) -> None:
    code = bpf.assemble(default_profile(), machine)
    assert run(code, call(machine, 5000, (0,) * 6)) == bpf.ERRNO | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_the_program_fits_and_every_jump_stays_inside(machine: str) -> None:
    program = bpf.program(default_profile(), machine)
    assert len(program) <= 4096
    for position, instruction in enumerate(program):
        assert max(instruction.jump_true, instruction.jump_false) <= 255
        if instruction.code in (bpf.JEQ, bpf.JGE):
            assert position + 1 + max(instruction.jump_true, instruction.jump_false) < len(program)
    assert program[-1].code == bpf.RET


def test_no_name_is_both_allowed_and_refused() -> None:
    refused = syscalls.DENIED_BY_DOCKER | syscalls.DENIED_BESIDES
    assert not syscalls.ALLOWED & refused
    assert refused >= syscalls.ANSWER_NOT_IMPLEMENTED
    known = set(syscalls.X86_64) | set(syscalls.AARCH64)
    assert syscalls.ALLOWED | refused <= known

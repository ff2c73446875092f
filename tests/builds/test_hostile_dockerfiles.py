"""Dockerfiles that want to use up time or memory: each is read or refused at once, and says where it is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from atoll.builds.dockerfile.checks import check
from atoll.builds.dockerfile.lines import MAX_FILE_BYTES, MAX_INSTRUCTION_CHARS, MAX_LINE_BYTES, MAX_LINES
from atoll.builds.dockerfile.parser import MAX_INSTRUCTIONS, MAX_STAGES, parse
from atoll.errors import DockerfileError

_LONG = MAX_LINE_BYTES - 200

REFUSED: dict[str, Callable[[], bytes]] = {
    "a long line": lambda: b"FROM a\nRUN " + b"x" * MAX_LINE_BYTES,
    "a large file": lambda: b"FROM a\n" + b"#\n" * MAX_FILE_BYTES,
    "many lines": lambda: b"FROM a\n" + b"\n" * MAX_LINES,
    "many instructions": lambda: b"FROM a\n" + b"USER x\n" * MAX_INSTRUCTIONS,
    "many stages": lambda: b"FROM a\n" * (MAX_STAGES + 1),
    "a long instruction": lambda: b"FROM a\nRUN x" + b"x" * 60_000 + b"\\\n" + (b"y" * 60_000 + b"\\\n") * 20,
    "many here-documents": lambda: b"FROM a\nRUN " + b"<<E " * 10_000,
    "a here-document without end": lambda: b"FROM a\nRUN <<E\n" + b"x\n" * 90_000,
    "many flags": lambda: b"FROM a\nCOPY " + b"--exclude=x " * 5_000 + b"a b",
    "deep arrays": lambda: b"FROM a\nRUN " + b"[" * _LONG,
    "closed deep arrays": lambda: b"FROM a\nRUN " + b"[" * (_LONG // 2) + b"]" * (_LONG // 2),
    "a deep substitution": lambda: b"FROM a\nENV a=" + b"${b:-" * 10_000,
    "a huge number in an array": lambda: b"FROM a\nRUN [" + b"1" * _LONG + b"]",
    "an unknown instruction": lambda: b"FROM a\n" + b"R" * _LONG,
}
READ: dict[str, Callable[[], bytes]] = {
    "spaces": lambda: b"FROM a\nRUN x" + b" " * _LONG + b"y\nENV a" + b" " * _LONG + b"b",
    "a directive of spaces": lambda: b"# syntax=x" + b" " * _LONG + b"y\nFROM a",
    "backslashes": lambda: b"FROM a\nRUN " + b"\\ " * (_LONG // 2) + b"x",
    "quotes": lambda: b"FROM a\nRUN " + b"\"'" * (_LONG // 2),
    "less-than signs": lambda: b"FROM a\nRUN " + b"<" * _LONG,
    "here-documents that are none": lambda: b"FROM a\nRUN x '" + b"<< <" * (_LONG // 4),
    "spaces after a here-document": lambda: b"FROM a\nRUN <<" + b" " * _LONG + b"<",
    "continuation lines": lambda: b"FROM a\nRUN x\\\n" + b"\\\n" * 90_000,
    "comments in an instruction": lambda: b"FROM a\nRUN x\\\n" + b"#\n" * 90_000,
    "many variables": lambda: b"FROM a\nENV " + b"a=b " * (_LONG // 4),
    "dollar signs": lambda: b"FROM a\nENV a=" + b"$" * _LONG,
    "commas in a mount": lambda: b"FROM a\nRUN --mount=target=/a" + b"/b" * 20_000 + b" x",
    "a long array": lambda: b"FROM a\nRUN [" + b'"a",' * (_LONG // 4) + b'"b"]',
    "many arguments that grow": lambda: b"".join(
        [b"ARG A0=x\n", *(b"ARG A%d=$A%d\n" % (n + 1, n) for n in range(2000)), b"FROM a\n"]
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_its_place(name: str) -> None:
    with pytest.raises(DockerfileError, match=r"^Dockerfile:\d+: ") as error:
        check(parse(REFUSED[name]()))
    assert error.value.hint
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("name", READ)
def test_it_is_read(name: str) -> None:
    assert check(parse(READ[name]())).stages


def test_arguments_that_double_are_refused() -> None:
    lines = [b"ARG A0=xxxxxxxx", *(b"ARG A%d=$A%d$A%d" % (n + 1, n, n) for n in range(60)), b"FROM a:$A60"]
    with pytest.raises(DockerfileError, match="more than"):
        check(parse(b"\n".join(lines)))


def test_a_line_of_ten_gigabytes_costs_nothing() -> None:
    """The file is sparse; whoever reads it reads no more than may be in a Dockerfile."""
    assert MAX_LINE_BYTES < MAX_INSTRUCTION_CHARS < MAX_FILE_BYTES
    program = (
        "import resource, sys\n"
        "from atoll.builds.dockerfile.parser import parse\n"
        "from atoll.builds.dockerfile.lines import MAX_FILE_BYTES\n"
        "from atoll.errors import DockerfileError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "with open('/dev/zero', 'rb') as file:\n"
        "    text = file.read(MAX_FILE_BYTES + 1)\n"
        "try:\n"
        "    parse(text)\n"
        "except DockerfileError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Dockerfile:1: the file has")

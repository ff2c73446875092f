"""What is refused before anything runs, and which stages a target needs."""

from __future__ import annotations

import pytest

from atoll.builds.dockerfile.checks import Checked, check, machine_platform
from atoll.builds.dockerfile.parser import parse
from atoll.errors import DockerfileError


def checked(text: str, target: str = "", **args: str) -> Checked:
    return check(parse(text.encode()), target=target, args=args)


STAGES = (
    "FROM a AS one\nFROM b AS two\nCOPY --from=one x y\nFROM one AS three\nFROM c\nRUN --mount=from=two,target=/x y\n"
)


@pytest.mark.parametrize(
    ("target", "needed"), [("", [0, 1, 3]), ("one", [0]), ("TWO", [0, 1]), ("three", [0, 2]), ("1", [0, 1])]
)
def test_only_what_the_target_needs_is_built(target: str, needed: list[int]) -> None:
    assert [stage.index for stage in checked(STAGES, target).stages] == needed


def test_bases_are_images_or_earlier_stages() -> None:
    found = checked("ARG N=x\nFROM $N:${T:-1} AS a\nFROM A\nFROM scratch\nCOPY --from=0 a b\nCOPY --from=1 a b").stages
    assert [(stage.base, stage.base_stage) for stage in found] == [("x:1", None), ("", 0), ("scratch", None)]


def test_arguments_of_the_build_win_over_defaults() -> None:
    found = checked("ARG A=1\nARG B=$A-x\nARG C\nFROM a:$B", A="2")
    assert found.stages[0].base == "a:2-x"
    assert {name: found.arguments.get(name) for name in "ABC"} == {"A": "2", "B": "2-x", "C": None}
    assert found.arguments["TARGETPLATFORM"] == machine_platform()


def test_an_argument_that_nothing_uses_is_a_warning() -> None:
    found = checked("FROM a\nARG VERSION", VERSON="1", HTTP_PROXY="x", VERSION="2")
    assert found.warnings == ("the build argument 'VERSON' is not used; did you mean VERSION?",)


@pytest.mark.parametrize(
    ("text", "line", "reason", "hint"),
    [
        ("FROM a AS x\nFROM b AS X", 2, "already, in line 1", "name of its own"),
        ("FROM x\nFROM a AS x", 1, "comes later", "before"),
        ("FROM a\nCOPY --from=x a b\nFROM a AS x", 2, "comes later", "before"),
        ("FROM a\nCOPY --from=0 a b", 2, "no stage '0' before", "first stage"),
        ("FROM a\nFROM b\nCOPY --from=1 a b", 3, "no stage '1' before", "0 to 0"),
        ("FROM a AS x\nCOPY --from=x a b", 2, "uses itself", "earlier"),
        ("FROM a\nCOPY --from=$x a b", 2, "cannot have a variable", "FROM $IMAGE AS NAME"),
        ("FROM a\nRUN --mount=from=7,target=/x y", 2, "no stage '7'", "first"),
        ("FROM ${X}", 1, "is empty", "--build-arg"),
        ("FROM --platform=windows/arm64 a", 1, "platform", "linux/"),
        ("FROM a\nCOPY --chmod=rwx a b", 2, "not a mode", "octal"),
        ("FROM a\nCOPY --parents a b", 2, "not supported", "target"),
        ("FROM a\nADD https://example.invalid/x /x", 2, "policy", "--network"),
        ("FROM a\nADD git@example.invalid:x.git /x", 2, "repository", "Clone"),
        ("FROM a\nENV A=${B:=c}", 2, "':='", "${NAME:-DEFAULT}"),
        ('FROM a\nLABEL a="b', 2, "double quotes", "quote"),
        ("FROM a\nCOPY <<E /x\n${\nE", 2, "here-document 'E'", "<<'E'"),
        ("ARG A=${\nFROM a", 1, "'}'", "substitution"),
    ],
)
def test_a_mistake_is_explained_before_anything_runs(text: str, line: int, reason: str, hint: str) -> None:
    with pytest.raises(DockerfileError) as error:
        checked(text)
    assert error.value.reason.startswith(f"Dockerfile:{line}: ")
    assert reason in error.value.reason
    assert error.value.hint is not None
    assert hint in error.value.hint


def test_an_unknown_target_is_explained() -> None:
    with pytest.raises(DockerfileError, match="no stage 'buidl'") as error:
        checked("FROM a AS build\nFROM b", "buidl")
    assert error.value.hint == "Did you mean build?"


def test_a_required_variable_is_no_mistake_of_the_file() -> None:
    assert checked("FROM a\nENV A=${B:?needed}").stages


def test_a_url_may_be_added_if_the_policy_allows_it() -> None:
    read = parse(b"FROM a\nADD https://example.invalid/x /x")
    assert check(read, allows_url=lambda url: url == "https://example.invalid/x").stages

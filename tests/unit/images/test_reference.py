from __future__ import annotations

import pytest

from atoll.errors import ImageNotFoundError, SpecError
from atoll.images.reference import Kind, Reference, debian_suite, is_loopback, parse

HEX = "a" * 64
RECIPES = ("python", "mine")


@pytest.mark.parametrize(
    ("text", "expected", "canonical"),
    [
        ("host", Reference(Kind.HOST, "host"), "host"),
        ("debian:trixie", Reference(Kind.DEBIAN, "trixie"), "debian:trixie"),
        ("python", Reference(Kind.RECIPE, "python"), "recipe:python"),
        ("recipe:mine", Reference(Kind.RECIPE, "mine"), "recipe:mine"),
        ("tar:/srv//a.tar.gz", Reference(Kind.TAR, "/srv/a.tar.gz"), "tar:/srv/a.tar.gz"),
        ("alpine", Reference(Kind.OCI, "library/alpine", "docker.io", "latest"), "docker.io/library/alpine:latest"),
        ("python:3.12", Reference(Kind.OCI, "library/python", "docker.io", "3.12"), "docker.io/library/python:3.12"),
        ("team/app:1", Reference(Kind.OCI, "team/app", "docker.io", "1"), "docker.io/team/app:1"),
        ("localhost/a", Reference(Kind.OCI, "a", "localhost", "latest"), "localhost/a:latest"),
        (
            "r.example:5000/a/b_c/d--e",
            Reference(Kind.OCI, "a/b_c/d--e", "r.example:5000", "latest"),
            "r.example:5000/a/b_c/d--e:latest",
        ),
        ("[::1]:5000/a:T", Reference(Kind.OCI, "a", "[::1]:5000", "T"), "[::1]:5000/a:T"),
        (
            f"a:tag@sha256:{HEX}",
            Reference(Kind.OCI, "library/a", "docker.io", "", f"sha256:{HEX}"),
            f"docker.io/library/a@sha256:{HEX}",
        ),
        ("docker:app:2", Reference(Kind.DOCKER, "library/app", "docker.io", "2"), "docker:docker.io/library/app:2"),
        ("docker:0123456789ab", Reference(Kind.DOCKER, "0123456789ab"), "docker:0123456789ab"),
    ],
)
def test_a_reference_has_one_meaning_and_one_spelling(text: str, expected: Reference, canonical: str) -> None:
    parsed = parse(text, RECIPES)
    assert parsed == expected
    assert str(parsed) == canonical
    assert parse(canonical, RECIPES) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a b",
        "a\n",
        "-rf",
        "A",
        "a/",
        "/a",
        "a//b",
        "..",
        "../a",
        "a:",
        "a:-x",
        "a:b:c",
        "a@sha256:1",
        "a@md5:1",
        "a@",
        "é",
        "tar:relative",
        "tar:",
        "tar:/a/../b",
        "tar:/a\0b",
        "snapshot:1",
        "recipe:-x",
        "recipe:",
        "docker:",
        "docker:--help",
        "bad_host:x/a",
        "r.example:99999999/a",
        "a" * 2000,
        "\x1b[31m",
        "a,upperdir=/etc",
    ],
)
def test_what_cannot_be_a_reference_is_refused_with_advice(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text, RECIPES)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["recipe:unknown"])
def test_what_names_nothing_is_not_found_and_the_choices_are_named(text: str) -> None:
    with pytest.raises(ImageNotFoundError) as caught:
        parse(text, RECIPES)
    assert caught.value.hint is not None
    assert "bookworm" in caught.value.hint or "python" in caught.value.hint


@pytest.mark.parametrize(
    ("registry", "expected"),
    [
        ("localhost", True),
        ("localhost:1", True),
        ("127.9.9.9:80", True),
        ("[::1]:5000", True),
        ("::1", True),
        ("[::1]", True),
        ("docker.io", False),
        ("10.0.0.1:5000", False),
        ("localhost.example", False),
        ("127.0.0.1.example:1", False),
    ],
)
def test_only_this_machine_is_loopback(registry: str, expected: bool) -> None:
    assert is_loopback(registry) is expected


@pytest.mark.parametrize(
    ("text", "suite"),
    [
        ("debian", "stable"),
        ("debian:latest", "stable"),
        ("debian:12", "bookworm"),
        ("debian:12.5-slim", "bookworm"),
        ("debian:bookworm-slim", "bookworm"),
        ("debian:trixie-20251117-slim", "trixie"),
        ("debian:sid", "sid"),
        ("debian:buster", ""),
        ("debian:10", ""),
        ("ubuntu:latest", ""),
        ("docker.io/library/debian:12", ""),
        ("debian:", ""),
    ],
)
def test_names_of_debian_images_mean_suites(text: str, suite: str) -> None:
    assert debian_suite(text) == suite


def test_a_debian_that_cannot_be_built_is_one_of_the_registry() -> None:
    assert str(parse("debian:buster")) == "docker.io/library/debian:buster"

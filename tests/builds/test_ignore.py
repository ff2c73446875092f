"""Which files of a context are left out, and patterns of names."""

from __future__ import annotations

import pytest

from atoll.builds.dockerfile.globs import GlobError, has_wildcards, matches
from atoll.builds.dockerfile.ignore import MAX_RULES, IgnoreRules
from atoll.errors import DockerfileError


@pytest.mark.parametrize(
    ("rules", "left_out", "kept"),
    [
        ("a", ["a", "a/b", "a/b/c"], ["b/a", "ab"]),
        ("/a/", ["a", "a/b"], ["b/a"]),
        ("*.md\n!README.md", ["x.md"], ["README.md", "d/x.md"]),
        ("**/*.pyc", ["x.pyc", "a/b/x.pyc"], ["x.py"]),
        ("**/node_modules", ["node_modules", "a/node_modules/b"], ["node_modules2"]),
        ("docs/**", ["docs/a", "docs/a/b"], ["docs"]),
        ("a/*/c", ["a/b/c", "a/b/c/d"], ["a/c", "a/b/b/c"]),
        ("temp?", ["temp1"], ["temp", "temp12"]),
        ("[a-c]x", ["ax", "cx"], ["dx"]),
        ("[^a]x", ["bx"], ["ax"]),
        ("a\n!a/b\na/b/c", ["a/x", "a/b/c"], ["a/b/d"]),
        ("!a\na", ["a"], []),
        ("# comment\n\n  spaced  ", ["spaced"], ["# comment"]),
        ("a/../b", ["b"], ["a"]),
        ("**foo", ["foo", "xfoo", "a/xfoo"], ["foox"]),
        ("a**b", ["ab", "a/x/b"], ["axb"]),
        ("a\\*b", ["a*b"], ["axb"]),
        ("**/*a*b*c*d", ["x/1a2b3c4d"], ["x/abc"]),
        (".", [], ["a"]),
    ],
)
def test_rules_leave_files_out(rules: str, left_out: list[str], kept: list[str]) -> None:
    read = IgnoreRules.parse(rules.encode())
    assert [path for path in left_out if not read.excludes(path, False)] == []
    assert [path for path in kept if read.excludes(path, False)] == []


def test_a_directory_is_entered_only_if_something_in_it_may_stay() -> None:
    read = IgnoreRules.parse(b"node_modules\ndocs\n!docs/keep\n")
    assert [path for path in ("node_modules", "docs", "src", "docs/other") if read.may_enter(path)] == ["docs", "src"]


def test_the_result_does_not_depend_on_what_was_asked_before() -> None:
    rules = b"a\n!a/b\n"
    asked = ["a/b/c", "a", "a/b", "a/x"]
    one_by_one = [IgnoreRules.parse(rules).excludes(path, False) for path in asked]
    together = IgnoreRules.parse(rules)
    assert [together.excludes(path, False) for path in asked] == one_by_one == [False, True, False, True]


@pytest.mark.parametrize("rules", ["[a", "!", "a\\", "[]", 2000 * "x", "x\n" * (MAX_RULES + 1)])
def test_a_rule_that_cannot_be_read_is_explained(rules: str) -> None:
    with pytest.raises(DockerfileError, match=r"^\.dockerignore:\d+: ") as error:
        IgnoreRules.parse(rules.encode())
    assert error.value.hint


@pytest.mark.parametrize("pattern", [400 * "*a" + "b", 200 * "**/" + "b", 100 * "*/" + "b", 100 * "**a*" + "b"])
def test_no_rule_takes_much_time(pattern: str) -> None:
    read = IgnoreRules.parse(pattern.encode())
    assert not read.excludes("/".join(200 * ["a" * 19]), False)


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("a*c", "abbc", True), ("a*c", "ab/c", False), ("*", "a", True), ("*", "a/b", False), ("a?c", "abc", True),
        ("[a-c]", "b", True), ("[^a-c]", "b", False), ("\\*", "*", True), ("*/b", "a/b", True), ("a[\\]]", "a]", True),
        ("*a*b*c", "xxaxxbxxc", True), ("*a*b*c", "xxaxxcxxb", False), ("", "", True), ("a/*", "a", False),
    ],
)  # fmt: skip
def test_globs_are_those_of_go(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


@pytest.mark.parametrize("pattern", ["[", "[a", "[]", "[a-]", "a\\"])
def test_an_incomplete_glob_is_an_error(pattern: str) -> None:
    with pytest.raises(GlobError):
        matches(pattern, "a")


def test_no_glob_takes_much_time() -> None:
    assert not matches(2000 * "*a" + "b", 4000 * "a")
    assert has_wildcards("a*")
    assert not has_wildcards("a.b")

"""Substituting variables."""

from __future__ import annotations

import pytest

from atoll.builds.dockerfile.variables import (
    MAX_WORD_CHARS,
    MissingVariableError,
    SubstitutionError,
    expand,
    expand_text,
    expand_words,
)

KNOWN = {"a": "value", "empty": "", "file": "dir/archive.tar.gz", "o": "foo/bar/foo"}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("plain", "plain"),
        ("$a ${a} x$a.y", "value value xvalue.y"),
        ("$nothing|${nothing}|", "||"),
        ("${nothing:-x}${empty:-y}${empty-z}", "xy"),
        ("${a:+x}${empty:+y}${empty+z}${nothing+n}", "xz"),
        ("${a:?m}${empty?m}", "value"),
        ("${nothing:-${a}-${nothing:-b}}", "value-b"),
        ("'$a'\"$a\"\\$a", "$avalue$a"),
        ('"a\\"b\\\\c\\d"', 'a"b\\c\\d'),
        ("a\\ b\\'c", "a b'c"),
        ("${file#*/}|${file##*.}", "archive.tar.gz|gz"),
        ("${file%.*}|${file%%.*}", "dir/archive.tar|dir/archive"),
        ("${o/foo/x}|${o//foo/x}|${o//?oo/}", "x/bar/foo|x/bar/x|/bar/"),
        ("${o/\\//-}", "foo-bar/foo"),
        ("${a#?}${a%??}", "alueval"),
        ("cost: 5$ and $", "cost: 5$ and $"),
        ("$1$@x", "x"),
    ],
)
def test_a_word_is_expanded(word: str, expected: str) -> None:
    assert expand(word, KNOWN) == expected


def test_the_escape_character_counts() -> None:
    assert expand("`$a \\$a", KNOWN, "`") == "$a \\value"


def test_words_are_split_after_the_substitution() -> None:
    assert expand_words("$x \"$x\" a'b c'", {"x": "1 2"}) == ["1", "2", "1 2", "ab c"]


def test_quotes_have_no_meaning_in_a_here_document() -> None:
    assert expand_text("'$a' \"$a\" \\$a", KNOWN) == "'value' \"value\" $a"


@pytest.mark.parametrize(
    "word", ["${a", "${", "${}", "${:a}", "${a:=b}", "${a!b}", "'a", '"a', "${a:-", "${a/b", "${a/b/c", "${a#\\q}"]
)
def test_a_wrong_substitution_is_an_error(word: str) -> None:
    with pytest.raises(SubstitutionError):
        expand(word, KNOWN)


def test_a_variable_may_be_required() -> None:
    with pytest.raises(MissingVariableError, match="nothing: say so"):
        expand("${nothing:?say so}", KNOWN)
    with pytest.raises(MissingVariableError, match="empty"):
        expand("${empty:?}", KNOWN)


def test_what_doubles_each_time_is_stopped() -> None:
    value = "x"
    while len(value) < MAX_WORD_CHARS:
        value = expand("$v$v", {"v": value})
    with pytest.raises(SubstitutionError, match="more than"):
        expand("$v$v", {"v": value})


@pytest.mark.parametrize(
    "word",
    [
        "${v//a/" + 1000 * "b" + "}",
        10_000 * "$v",
        "${v//a/$v}",
        "".join("${n:-" for _ in range(10_000)),
        "${v#" + 200 * "*a" + "b}",
        "${v%%" + 400 * "*?" + "b}",
        "${v//" + 300 * "?*" + "b/x}",
        "${v//*/$v}" * 100,
    ],
)
def test_no_substitution_takes_much_time_or_memory(word: str) -> None:
    try:
        assert len(expand(word, {"v": 100_000 * "a"})) <= MAX_WORD_CHARS
    except SubstitutionError as error:
        assert str(error)  # noqa: PT017

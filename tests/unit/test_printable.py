"""What is shown steers no terminal, stands on one line and has an end."""

from atoll.printable import printable, printable_lines


def test_what_cannot_be_printed_is_replaced() -> None:
    assert printable("\x1b[2Jred\u202ealert\x00") == "\ufffd[2Jred\ufffdalert\ufffd"
    assert printable(b"caf\xc3\xa9 \xff\x07", instead="?") == "caf\xe9 \ufffd?"
    assert printable("plain text, \N{SNOWMAN}") == "plain text, \N{SNOWMAN}"
    assert printable("a\x07b", instead="") == "ab"


def test_it_is_one_line_without_surrounding_white_space() -> None:
    assert printable("  first\nsecond\r\n", instead=" ") == "first second"
    assert printable("\x00\x1b", instead=" ") == ""


def test_it_has_an_end() -> None:
    assert printable("0123456789", 4) == "0123"
    assert printable("0123456789", 4, end=True) == "6789"
    assert printable("01", 4, end=True) == "01"


def test_lines_keep_their_form() -> None:
    assert printable_lines("  a\tb\n\x1bc\n\n") == "  a\tb\n\ufffdc"

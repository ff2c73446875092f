"""Splitting an instruction into its keyword, flags and words, as BuildKit's parser does.

Quotes and escapes stay in the words: they are removed when variables are substituted. Each function reads its text
once.
"""

from __future__ import annotations

import re

SPACES = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""What Unicode, and therefore Go, calls white space. Python's own list is longer."""
_BETWEEN = re.compile(r"[\t\v\f\r ]+")
_QUOTES = "'\""


def split_keyword(line: str) -> tuple[str, str]:
    """Return the keyword of an instruction, as it is written, and the rest."""
    parts = _BETWEEN.split(line.strip(SPACES), maxsplit=1)
    return parts[0], parts[1] if len(parts) == 2 else ""


def split_plain(text: str) -> list[str]:
    """Return the words between white space; quotes have no meaning."""
    return _BETWEEN.split(text) if text else []


def split_first(text: str) -> tuple[str, str | None]:
    """Return the first word, and the rest without the white space before it, or None if there is only one word."""
    parts = _BETWEEN.split(text, maxsplit=1)
    return parts[0], parts[1] if len(parts) == 2 else None


def split_flags(text: str, escape: str) -> tuple[list[str], str]:
    """Return the flags that the text begins with, without quotes and escapes, and the rest."""
    flags: list[str] = []
    at = 0
    while True:
        while at < len(text) and text[at] in SPACES:
            at += 1
        if not text.startswith("--", at):
            return flags, text[at:]
        flag, at = _flag(text, at, escape)
        if flag == "--":
            return flags, text[at:]
        flags.append(flag)


def _flag(text: str, at: int, escape: str) -> tuple[str, int]:
    """Return the flag that begins there, and where it ends."""
    flag: list[str] = []
    quote = ""
    while at < len(text):
        char = text[at]
        if char == quote:
            quote = ""
        elif not quote and char in SPACES:
            break
        elif not quote and char in _QUOTES:
            quote = char
        elif char == escape:
            at += 1
            flag.append(text[at : at + 1])
        else:
            flag.append(char)
        at += 1
    return "".join(flag), at


def split_words(text: str, escape: str) -> list[str]:
    """Return the words between white space that is neither quoted nor escaped."""
    words: list[str] = []
    word: list[str] = []
    quote = ""
    at = 0
    while at < len(text):
        char = text[at]
        if not quote and char in SPACES:
            if word:
                words.append("".join(word))
                word = []
        elif char == escape and quote != "'":
            # An escape at the very end stands for nothing.
            word.append(text[at : at + 2] if at + 1 < len(text) else "")
            at += 1
        else:
            if char == quote:
                quote = ""
            elif not quote and char in _QUOTES:
                quote = char
            word.append(char)
        at += 1
    if joined := "".join(word):
        words.append(joined)
    return words

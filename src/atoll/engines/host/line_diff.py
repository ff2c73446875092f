"""Unified diffs of two texts, in time that grows with their length and not with its square.

Lines that occur exactly once on both sides are the anchors, as in a patience diff. What lies between two anchors is
compared by Myers' algorithm if few lines differ; otherwise it is shown as replaced. The result is always a correct
diff, if not always the shortest one. `difflib` compares every line with every other: two files of 15 KB can take it
minutes.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Callable, Iterator

_MAX_EDITS = 128
"""If more lines than this differ between two anchors, all of them are shown as replaced."""
_MAX_DEPTH = 8
"""How many times anchors are searched between anchors. Each time looks at every line once."""
Region = tuple[int, int, int, int]


def unified_diff(old: list[str], new: list[str], path: str, check: Callable[[], None] = lambda: None) -> str:
    """Return the text that `diff -u` would write. Every line ends with a newline. `check` is called from time to
    time."""
    matched = _Matched(old, new, check)
    lines: list[str] = []
    for group in matched.get_grouped_opcodes(3):
        lines.append(f"@@ -{_range(group[0][1], group[-1][2])} +{_range(group[0][3], group[-1][4])} @@\n")
        for tag, old_start, old_end, new_start, new_end in group:
            if tag == "equal":
                lines += [f" {line}" for line in old[old_start:old_end]]
                continue
            lines += [f"-{line}" for line in old[old_start:old_end]]
            lines += [f"+{line}" for line in new[new_start:new_end]]
    if lines:
        lines[:0] = [f"--- a/{path}\n", f"+++ b/{path}\n"]
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def matching_blocks(a: list[str], b: list[str], check: Callable[[], None] = lambda: None) -> list[tuple[int, int, int]]:
    """Return the equal blocks in order, as few as possible: the start in `a`, the start in `b`, and the length."""
    numbers: dict[str, int] = {}
    first = [numbers.setdefault(line, len(numbers)) for line in a]
    second = [numbers.setdefault(line, len(numbers)) for line in b]
    joined: list[tuple[int, int, int]] = []
    for i, j in sorted(_pairs(first, second, check)):
        if joined and joined[-1][0] + joined[-1][2] == i and joined[-1][1] + joined[-1][2] == j:
            joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + 1)
        else:
            joined.append((i, j, 1))
    return joined


class _Matched(difflib.SequenceMatcher[str]):
    """Groups the blocks that were found here into hunks."""

    def __init__(self, old: list[str], new: list[str], check: Callable[[], None]) -> None:
        super().__init__(autojunk=False)
        self._found = [difflib.Match(*block) for block in matching_blocks(old, new, check)]
        self._found.append(difflib.Match(len(old), len(new), 0))

    def get_matching_blocks(self) -> list[difflib.Match]:
        return self._found


def _pairs(a: list[int], b: list[int], check: Callable[[], None]) -> Iterator[tuple[int, int]]:
    regions: list[tuple[Region, int]] = [((0, len(a), 0, len(b)), 0)]
    while regions:
        check()
        (a_start, a_end, b_start, b_end), depth = regions.pop()
        while a_start < a_end and b_start < b_end and a[a_start] == b[b_start]:
            yield a_start, b_start
            a_start, b_start = a_start + 1, b_start + 1
        while a_start < a_end and b_start < b_end and a[a_end - 1] == b[b_end - 1]:
            a_end, b_end = a_end - 1, b_end - 1
            yield a_end, b_end
        if a_start == a_end or b_start == b_end:
            continue
        region = (a_start, a_end, b_start, b_end)
        anchors = _anchors(a, b, region) if depth < _MAX_DEPTH else []
        if not anchors:
            yield from _myers(a, b, region, check)
        for i, j in [*anchors, (a_end, b_end)] if anchors else []:
            regions.append(((a_start, i, b_start, j), depth + 1))
            if i < a_end:
                yield i, j
            a_start, b_start = i + 1, j + 1


def _anchors(a: list[int], b: list[int], region: Region) -> list[tuple[int, int]]:
    """Return the longest common subsequence of the lines that occur once on each side."""
    places, where = _once(a, region[0], region[1]), _once(b, region[2], region[3])
    candidates = [(i, where[line]) for line, i in sorted(places.items(), key=lambda item: item[1]) if line in where]
    ends: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for number, (_, j) in enumerate(candidates):
        length = bisect_left(ends, j)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [j]
        last[length : length + 1] = [number]
    found: list[tuple[int, int]] = []
    number = last[-1] if last else -1
    while number >= 0:
        found.append(candidates[number])
        number = before[number]
    return found[::-1]


def _once(lines: list[int], start: int, end: int) -> dict[int, int]:
    seen: dict[int, int] = {}
    for position in range(start, end):
        seen[lines[position]] = -1 if lines[position] in seen else position
    return {line: position for line, position in seen.items() if position >= 0}


def _myers(a: list[int], b: list[int], region: Region, check: Callable[[], None]) -> Iterator[tuple[int, int]]:
    """Yield the equal lines of a shortest edit script, or nothing if that has more than `_MAX_EDITS` edits."""
    a_start, a_end, b_start, b_end = region
    width, height = a_end - a_start, b_end - b_start
    if abs(width - height) > _MAX_EDITS:
        return
    reach = {1: 0}
    history: list[dict[int, int]] = []
    for edits in range(_MAX_EDITS + 1):
        check()
        history.append(reach.copy())
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (diagonal != edits and reach[diagonal - 1] < reach[diagonal + 1])
            x = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            y = x - diagonal
            while x < width and y < height and a[a_start + x] == b[b_start + y]:
                x, y = x + 1, y + 1
            reach[diagonal] = x
            if x >= width and y >= height:
                yield from ((a_start + i, b_start + j) for i, j in _back(history, width, height))
                return


def _back(history: list[dict[int, int]], x: int, y: int) -> Iterator[tuple[int, int]]:
    for edits in range(len(history) - 1, -1, -1):
        reach, diagonal = history[edits], x - y
        down = diagonal == -edits or (diagonal != edits and reach[diagonal - 1] < reach[diagonal + 1])
        old_x = reach[diagonal + 1 if down else diagonal - 1]
        old_y = old_x - (diagonal + 1 if down else diagonal - 1)
        while x > max(old_x, 0) and y > max(old_y, 0):
            x, y = x - 1, y - 1
            yield x, y
        x, y = old_x, old_y


def _range(start: int, end: int) -> str:
    length = end - start
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"

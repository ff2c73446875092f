"""One kind of page for every list that can grow: `items`, and the `page_id` of the next page."""

from __future__ import annotations

import bisect
import heapq
import math
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
Place = tuple[float, str]
"""Where an item is in its list: a number, such as the time at which it was made, and then a name."""


def page(
    found: Iterable[T], place: Callable[[T], Place], page_id: str | None, limit: int
) -> tuple[list[T], str | None]:
    """Return the items of one page, in the order of their places, and the id of the next page.

    The id names the last item of the page, so nothing is skipped or repeated if items are added or removed between two
    requests. Raises ValueError for an invalid id.
    """
    after = _parsed(page_id) if page_id is not None else None
    rest = (item for item in found if after is None or place(item) > after)
    items = heapq.nsmallest(limit + 1, rest, key=place)
    return items[:limit], _text(place(items[limit - 1])) if len(items) > limit else None


def page_of_sorted(
    found: Sequence[T], place: Callable[[T], Place], page_id: str | None, limit: int
) -> tuple[Sequence[T], str | None]:
    """As `page`, for a list that is in the order of its places. It may be very long."""
    start = 0 if page_id is None else bisect.bisect_right(found, _parsed(page_id), key=place)
    items = found[start : start + limit]
    return items, _text(place(items[-1])) if start + limit < len(found) else None


def _text(place: Place) -> str:
    return f"{place[0]!r}~{urllib.parse.quote(place[1], safe='', errors='surrogateescape')}"


def _parsed(page_id: str) -> Place:
    number, tilde, name = page_id.partition("~")
    try:
        found = float(number)
    except ValueError:
        found = math.nan
    if not tilde or math.isnan(found):
        raise ValueError("invalid page_id: use the next_page_id of the previous page")
    return found, urllib.parse.unquote(name, errors="surrogateescape")

"""JSON as its standard defines it. Python also reads `Infinity`, `NaN` and `1e999`, which JSON cannot express."""

from __future__ import annotations

import json
import math
from typing import Any


def loads(data: bytes | str) -> Any:
    """Parse a JSON document. Raises ValueError, or RecursionError if it is nested too deeply."""
    return json.loads(data, parse_constant=_refuse, parse_float=_finite)


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not a valid number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text[:20])

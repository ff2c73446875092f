"""What a test needs of this machine. What is missing is a skip on a laptop and a failure where `CI` is set.

`@needs("root", "zstd")` names programs, or `root`; `missing` is for what has to be tried to be known. `scripts/setup
test` installs every program that is named.
"""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))

needs = pytest.mark.needs
"""A mark. `tests/conftest.py` keeps it."""


def need(*names: str) -> None:
    """Go on if we are `root` and if these programs are installed, whichever are named."""
    for name in names:
        if name == "root":
            if os.geteuid() != 0:
                missing("needs root")
        elif shutil.which(name, path=_PATH) is None:
            missing(f"needs {name}: run 'scripts/setup test'")


def missing(reason: str) -> NoReturn:
    """End the test for want of a program or of a privilege."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)  # noqa: TID251


def not_applicable(reason: str) -> NoReturn:
    """End a test that has nothing to say about this engine or machine, whatever is installed on it."""
    pytest.skip(reason)  # noqa: TID251

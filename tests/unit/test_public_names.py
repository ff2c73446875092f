"""What `import atoll` gives: every public name, each imported when it is first used and not before."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

import atoll


def imported_by(program: str) -> set[str]:
    """Return the modules that a new interpreter has imported for a program, beyond those that it starts with."""
    text = f"import sys\nbefore = set(sys.modules)\n{program}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", atoll.__all__)
def test_every_public_name_is_what_its_module_has(name: str) -> None:
    assert getattr(atoll, name) is getattr(importlib.import_module(atoll.EXPORTS[name]), name)


def test_importing_the_package_imports_nothing_else() -> None:
    imported = imported_by("import atoll")
    assert {name for name in imported if name.startswith("atoll")} == {"atoll"}
    assert imported.isdisjoint({"asyncio", "dataclasses", "inspect", "pydantic", "re", "ssl", "typing"})


def test_an_error_is_imported_without_the_rest() -> None:
    imported = imported_by("from atoll import SandboxError")
    assert {name for name in imported if name.startswith("atoll")} == {"atoll", "atoll.errors"}


def test_everything_is_imported_with_a_star_and_is_listed() -> None:
    names: dict[str, object] = {}
    exec("from atoll import *", names)
    assert set(atoll.__all__) <= set(names)
    assert imported_by("import atoll\nassert {*atoll.__all__, '__doc__'} <= set(dir(atoll))") >= {"atoll"}


def test_a_misspelt_name_is_an_error_as_in_any_module() -> None:
    with pytest.raises(AttributeError, match=r"^module 'atoll' has no attribute 'Sandbx'$"):
        atoll.Sandbx  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match=r"^cannot import name 'Sandbx' from 'atoll'"):
        exec("from atoll import Sandbx")
    assert not hasattr(atoll, "__wrapped__")


def test_a_submodule_is_there_without_an_import_of_its_own() -> None:
    assert imported_by("import atoll; atoll.errors.SandboxError; atoll.model.Limits") >= {"atoll.errors", "atoll.model"}


def test_a_submodule_that_lacks_a_package_says_which() -> None:
    program = (
        "import sys, atoll\nsys.modules['pydantic'] = None\n"
        "try: atoll.model\nexcept ModuleNotFoundError as error: assert error.name == 'pydantic', error\n"
        "else: raise SystemExit('imported')"
    )
    imported_by(program)


def test_values_survive_a_journey_to_another_process() -> None:
    limits = atoll.Limits(memory_bytes=64 << 20)
    assert pickle.loads(pickle.dumps(limits)) == limits
    assert pickle.loads(pickle.dumps(atoll.Sandbox)) is atoll.Sandbox

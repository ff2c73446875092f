"""Recipes: named combinations of a Debian suite and packages to install.

There are only a few built-in ones. A user's recipe is one JSON file in the data directory and overrides a built-in one
of the same name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll import durable
from atoll.errors import ImageNotFoundError, SpecError
from atoll.images.reference import SUITES, valid_recipe_name

_PACKAGE = re.compile(r"^[a-z0-9][a-z0-9+.-]{1,99}(?::[a-z0-9]+)?\Z")
_MAX_PACKAGES = 1000
_MAX_FILE = 1 << 20

BASE_PACKAGES = ("bash", "ca-certificates")
"""Packages installed in every image that is built here, besides apt and Debian's essential packages."""
DEFAULT_SUITE = "bookworm"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe. Raises SpecError for invalid names."""

    name: str
    suite: str = DEFAULT_SUITE
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not valid_recipe_name(self.name):
            raise SpecError(
                f"{self.name[:80]!r} cannot be the name of a recipe",
                hint="Use lower case letters, digits, '-', '_', '.'.",
            )
        if self.suite not in SUITES:
            raise SpecError(f"there is no Debian suite {self.suite[:80]!r}", hint=f"Suites are {', '.join(SUITES)}.")
        if len(self.packages) > _MAX_PACKAGES:
            raise SpecError(f"a recipe has at most {_MAX_PACKAGES} packages")
        for package in self.packages:
            if not _PACKAGE.match(package):
                raise SpecError(f"{package[:80]!r} cannot be the name of a Debian package")

    @property
    def digest(self) -> str:
        """A digest of the suite and packages. It changes when another image would be built."""
        text = json.dumps([self.suite, sorted(set(BASE_PACKAGES) | set(self.packages))])
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def suite_recipe(suite: str) -> Recipe:
    """Return the recipe for `debian:SUITE`."""
    return Recipe("debian", suite)


BUILT_IN = {
    recipe.name: recipe
    for recipe in (
        Recipe("debian"),
        Recipe("python", packages=("ca-certificates", "curl", "git", "python3", "python3-pip", "python3-venv")),
        Recipe("build", packages=("build-essential", "ca-certificates", "curl", "git", "pkg-config", "python3")),
    )
}


class Recipes:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def all(self) -> dict[str, Recipe]:
        recipes = dict(BUILT_IN)
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(self._directory.glob("*.json")):
                recipe = _read(path)
                recipes[recipe.name] = recipe
        return recipes

    def get(self, name: str) -> Recipe:
        recipes = self.all()
        if name not in recipes:
            raise ImageNotFoundError(
                f"there is no recipe {name[:80]!r}", hint=f"Recipes are: {', '.join(sorted(recipes))}."
            )
        return recipes[name]

    def add(self, recipe: Recipe) -> None:
        """Store a recipe under its name, replacing an older one."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{recipe.name}.json"
        durable.write(path, json.dumps(asdict(recipe), indent=1), sync=True)

    def remove(self, name: str) -> None:
        """Remove a user's recipe. May be repeated."""
        if valid_recipe_name(name):
            (self._directory / f"{name}.json").unlink(missing_ok=True)


def _read(path: Path) -> Recipe:
    try:
        if path.stat().st_size > _MAX_FILE:
            raise ValueError("it is too large")
        value = json.loads(path.read_bytes())
        recipe = Recipe(str(value["name"]), str(value["suite"]), tuple(str(item) for item in value["packages"]))
        if recipe.name != path.stem:
            raise ValueError("it has another name than its file")
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(f"the recipe in {path} cannot be read: {error}", hint="Repair or remove the file.") from error
    return recipe

"""Which files of a workspace OpenManus's tools leave out, and how they name the others."""

from __future__ import annotations

import posixpath

from atoll.errors import SpecError

EXCLUDED_FILES = frozenset(
    {
        *(".DS_Store", ".gitignore", "components.json", "jsconfig.json", "package-lock.json"),
        *("postcss.config.js", "postcss.config.mjs", "tsconfig.json", "tsconfig.tsbuildinfo"),
    }
)
EXCLUDED_DIRS = frozenset({".git", ".next", "build", "dist", "node_modules"})
EXCLUDED_EXT = frozenset({".bmp", ".db", ".gif", ".ico", ".jpeg", ".jpg", ".png", ".sql", ".svg", ".tiff", ".webp"})


def should_exclude_file(rel_path: str) -> bool:
    """Whether tools leave it out. A directory counts by its whole name: `rebuild/x` is not in `build`."""
    *directories, name = rel_path.split("/")
    extension = posixpath.splitext(name)[1].lower()
    return name in EXCLUDED_FILES or not EXCLUDED_DIRS.isdisjoint(directories) or extension in EXCLUDED_EXT


def clean_path(path: str, workspace_path: str = "/workspace") -> str:
    """The path, relative to the workspace, as `src/main.py`; empty for the workspace itself.

    SpecError (a ValueError) for one that leads out of it.
    """
    parts, root = _parts(path), _parts(workspace_path)
    if parts[: len(root)] == root:
        parts = parts[len(root) :]
    elif parts[:1] == ["workspace"]:
        parts = parts[1:]
    clean = _parts(posixpath.normpath("/".join(parts)))
    if clean[:1] == [".."]:
        raise SpecError(f"'{path}' leads out of the workspace", hint="Name a file below it, without '..'.")
    return "/".join(clean)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]

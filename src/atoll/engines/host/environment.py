"""The environment that programs in a sandbox see. Nothing of the host's environment is in it."""

from __future__ import annotations

from atoll.model import SandboxSpec

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def default_environment(home: str, user: str) -> dict[str, str]:
    """Return the variables that every engine sets. Those of an image and of the spec override them."""
    return {
        "PATH": PATH,
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PYTHONUNBUFFERED": "1",
    }


def clean_environment(sandbox_id: str, spec: SandboxSpec, home: str, user: str) -> dict[str, str]:
    return {**default_environment(home, user), **spec.env, "ATOLL_SANDBOX_ID": sandbox_id}

"""What an image says about sandboxes made from it, and how that and a spec together decide. Images are not trusted."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from atoll.errors import SpecError
from atoll.model.spec import DEFAULT_WORK_DIR, USER, SandboxSpec, absolute_path

_ROOT = frozenset({"", "0", "0:0", "root", "root:root", "root:0", "0:root"})
_MAX_PATH = 4096
_LONGEST_VARIABLE, _MOST_VARIABLES = 100_000, 1 << 20
_MOST_TEXT = 32 << 10


class ImageDefaults(BaseModel):
    """The configuration of an image, as far as it matters for a sandbox. Its variables are in the sandbox."""

    model_config = ConfigDict(frozen=True)
    digest: str = ""
    """The digest of the image's files. Empty for the image `host`, and where an engine does not know it."""
    user: str = ""
    """The user of the image's commands. Empty: root."""
    work_dir: str = ""
    """The directory where the image's commands start."""
    entrypoint: tuple[str, ...] = ()
    """The program that the image runs, with its first arguments."""
    cmd: tuple[str, ...] = ()
    """Its further arguments or, without an entry point, the program and its arguments."""
    exposed_ports: tuple[str, ...] = ()
    """Such as `8000/tcp`. They are shown; nothing is exposed because of them."""
    labels: dict[str, str] = {}
    """The labels of the image. They are shown, and are no labels of the sandbox."""

    @property
    def command(self) -> tuple[str, ...]:
        """What the image runs if nothing else is asked for."""
        return (*self.entrypoint, *self.cmd)

    def shortened(self) -> ImageDefaults:
        """Return this without the parts that are too long to be kept with every sandbox."""
        size = sum(len(name) + len(value) for name, value in self.labels.items())
        ports = sum(len(port) for port in self.exposed_ports)
        words = sum(len(word) for word in self.command)
        update: dict[str, object] = {"labels": {}} if size > _MOST_TEXT else {}
        update |= {"exposed_ports": ()} if ports > _MOST_TEXT else {}
        update |= {"entrypoint": (), "cmd": ()} if words > _MOST_TEXT else {}
        return self.model_copy(update=update)


def resolved(spec: SandboxSpec, image: ImageDefaults, *, has_users: bool = True) -> SandboxSpec:
    """Return the spec with the image's work directory and user where it names none.

    Without `has_users` there is only one user inside, and that of the image is ignored. Raises SpecError if the image
    names what cannot be used.
    """
    work_dir = spec.work_dir or _work_dir(image.work_dir)
    user = spec.user
    if user is None and has_users and image.user not in _ROOT:
        user = image.user
        if not USER.fullmatch(user):
            raise SpecError(f"the image's user {user[:80]!r} is not the name of one", hint="Give a user of your own.")
    return spec.model_copy(update={"work_dir": work_dir, "user": user})


def check_variables(env: Mapping[str, str]) -> None:
    """Raise SpecError if the variables of an image are more than the kernel passes to a program."""
    longest = max((len(name) + len(value) for name, value in env.items()), default=0)
    total = sum(len(name) + len(value) + 2 for name, value in env.items())
    if longest > _LONGEST_VARIABLE or total > _MOST_VARIABLES:
        raise SpecError(
            f"the image's environment variables take {total:,} bytes, the longest of them {longest:,}",
            hint=f"At most {_MOST_VARIABLES:,} and {_LONGEST_VARIABLE:,} are possible.",
        )


def _work_dir(path: str) -> str:
    # Many tools write `/` where a Dockerfile names nothing.
    if path in ("", "/"):
        return DEFAULT_WORK_DIR
    try:
        if len(path) > _MAX_PATH or not path.isprintable():
            raise ValueError
        found = absolute_path(path)
    except ValueError:
        found = "/proc"
    if found.split("/")[1] in ("proc", "sys", "dev"):
        raise SpecError(f"the image's work directory {path[:80]!r} cannot be used", hint="Give a work_dir of your own.")
    return DEFAULT_WORK_DIR if found == "/" else found


def default_user(spec: SandboxSpec) -> str | None:
    """Return the user that commands run as if they name none. None: root, or the only user inside."""
    return None if spec.user is None or spec.user in _ROOT else spec.user

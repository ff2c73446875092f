"""Names of users and groups, looked up in the files of the stage that is built. Those files are not trusted: they are
read inside the sandbox, by its agent, which reads regular files only, and with a limit on their size."""

from __future__ import annotations

from atoll.errors import BuildError
from atoll.guest.files import Files
from atoll.guest.put_items import Owner

_MAX_BYTES = 1 << 20
_PASSWD = "/etc/passwd"  # noqa: S105
_MAX_ID = 65_535
"""The highest id that exists in a sandbox."""


async def owner_of(files: Files, text: str) -> Owner:
    """Return what `--chown` means: USER, UID, USER:GROUP or UID:GID. Raises BuildError for a name that is unknown."""
    user, colon, group = text.partition(":")
    uid, gid = await _user(files, user)
    if colon and group:
        gid = _id(group) if group.isdecimal() else await _group(files, group)
    return uid, gid


async def user_of_commands(files: Files, text: str) -> str:
    """Return what the agent is asked to run commands as. It looks up users itself, but no names of groups."""
    user, colon, group = text.partition(":")
    if not user and not colon:
        return "0"
    if not colon or not group:
        known = not user.isdecimal() or any(len(each) > 2 and each[2] == user for each in await _lines(files, _PASSWD))
        # A number without an account has the group of root, as in Docker.
        return (user or "0") if known else f"{_id(user)}:0"
    uid = _id(user) if user.isdecimal() else (await _user(files, user))[0]
    gid = _id(group) if group.isdecimal() else await _group(files, group)
    return f"{uid}:{gid}"


async def _user(files: Files, name: str) -> Owner:
    if not name:
        return 0, 0
    if name.isascii() and name.isdecimal():
        return _id(name), _id(name)
    for fields in await _lines(files, _PASSWD):
        if fields[0] == name and len(fields) >= 4 and fields[2].isdecimal() and fields[3].isdecimal():
            return _id(fields[2]), _id(fields[3])
    raise _unknown("user", name, _PASSWD)


async def _group(files: Files, name: str) -> int:
    for fields in await _lines(files, "/etc/group"):
        if fields[0] == name and len(fields) >= 3 and fields[2].isdecimal():
            return _id(fields[2])
    raise _unknown("group", name, "/etc/group")


async def _lines(files: Files, path: str) -> list[list[str]]:
    try:
        text = await files.read(path, limit_bytes=_MAX_BYTES)
    except OSError:
        return []
    return [line.split(":") for line in text.decode(errors="replace").splitlines()]


def _id(text: str) -> int:
    number = int(text[:12])
    if number > _MAX_ID:
        raise BuildError(
            f"the id {text[:20]} does not exist in a sandbox", hint=f"Ids are numbers from 0 to {_MAX_ID}."
        )
    return number


def _unknown(what: str, name: str, path: str) -> BuildError:
    return BuildError(
        f"there is no {what} {name[:80]!r} in {path} of this stage", hint=f"Make the {what} by a RUN, or give a number."
    )

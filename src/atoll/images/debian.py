"""Building Debian root file systems with mmdebstrap.

The packages come from the sources of this machine's apt, with its mirrors, proxies and keys. mmdebstrap writes the
finished root as a tar stream, which is unpacked like any untrusted archive. Everything that mmdebstrap copies from the
host (host name, resolver, proxies, mirrors) is removed, so an image reveals nothing about the machine that built it.
"""

from __future__ import annotations

import os
import re
import subprocess
import urllib.parse

from atoll.archive.archive_limits import Budget, ImageLimits
from atoll.archive.extract import Extraction, extract
from atoll.archive.root import Root
from atoll.archive.work import Work
from atoll.errors import ImageError
from atoll.images.archive_program import Program, running
from atoll.images.image import Draft
from atoll.images.image_store import PASSABLE
from atoll.images.recipes import BASE_PACKAGES, Recipe
from atoll.images.reference import SUITES

_HINT = "apt-get install mmdebstrap"
_ROLLING = ("sid", "unstable")
_PARTS = ("", "-updates", "-security")
_APT_OPTIONS = ("Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::Check-Valid-Until", "Acquire::Retries")
_APT_TIMEOUT_S = 20
_MAX_SOURCES = 1 << 20
_DEFAULTS = (("debian.sources", "etc/apt/sources.list.d/debian.sources"), ("sources.list", "etc/apt/sources.list"))
_HOSTS = b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"


def build(recipe: Recipe, draft: Draft, limits: ImageLimits, work: Work) -> Extraction:
    """Fill the draft. Raises ImageError with the error messages of mmdebstrap or apt."""
    packages = ",".join(sorted(set(BASE_PACKAGES) | set(recipe.packages)))
    argv = ["mmdebstrap", f"--mode={'root' if os.geteuid() == 0 else 'unshare'}", "--variant=minbase", "--format=tar"]
    argv += [f"--include={packages}", *(f"--aptopt={option}" for option in _apt_options())]
    argv += [recipe.suite, "-", *sources(recipe.suite)]
    env = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "http_proxy", "https_proxy", "no_proxy")
        if name in os.environ
    }
    env |= {"LC_ALL": "C.UTF-8", "TMPDIR": str(draft.scratch)}
    # In its own user namespace mmdebstrap has another user id, which must be able to reach its temporary directory.
    os.chmod(draft.scratch, PASSABLE)

    def on_line(line: str) -> None:
        if line.startswith("I: "):
            work.report("build", line.removeprefix("I: ").rstrip("."))

    work.report("build", f"Debian {recipe.suite} with {packages}")
    with running(argv, env, work, on_line, _HINT) as program, Root(draft.rootfs) as root:
        try:
            result = extract(program, root, Budget(limits), work, detail=f"Debian {recipe.suite}")
        except ImageError as error:
            work.check()
            if program.status():
                raise _failed(recipe, program) from error
            raise
        if program.status():
            raise _failed(recipe, program)
        _anonymise(root, recipe.suite)
    return result


def _failed(recipe: Recipe, program: Program) -> ImageError:
    complaints = [line for line in program.lines if line.startswith(("E: ", "Err:", "W: Fail"))]
    reason = "; ".join(list(dict.fromkeys(complaints))[:4] or list(program.lines)[-3:])
    hint = "The lines are those of apt and mmdebstrap."
    if re.search(r"resolve|connect|404|timed out|unreachable|fetch", reason, re.IGNORECASE):
        hint = f"Check that this machine's apt mirrors can be reached and have {recipe.suite}."
    elif re.search(r"unable to locate|no installation candidate", reason, re.IGNORECASE):
        hint = f"Check the names of the packages; Debian {recipe.suite} does not have them all."
    elif re.search(r"newuidmap|subuid|unshare|user namespace", reason, re.IGNORECASE):
        hint = "Run as root, or install uidmap and give your user a range in /etc/subuid and /etc/subgid."
    return ImageError(f"building {recipe.name!r} failed: {reason[:1000] or 'no reason was given'}", hint=hint)


def sources(suite: str) -> list[str]:
    """Return this machine's apt sources, changed to another suite.

    The list is empty if this machine is not a Debian; mmdebstrap then uses its default sources.
    """
    # Without that option, apt knows only the suites of which it has fetched the lists.
    words = ("--no-release-info", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages")
    output = _apt("apt-get", "indextargets", *words)
    lines: dict[str, None] = {}
    for line in output.splitlines():
        uri, _, release = line.partition(" ")
        for part in _PARTS:
            base = release.removesuffix(part) if part else release
            if base in SUITES and base + part == release and not (part and suite in _ROLLING):
                lines[f"deb {uri} {suite}{part} main"] = None
    # The updates of a suite are useless without the suite itself.
    return list(lines) if any(f" {suite} " in line for line in lines) else []


def _apt_options() -> list[str]:
    output = _apt("apt-config", "dump", "--no-empty", "--format", "%F %v%n", *_APT_OPTIONS)
    options = []
    for line in output.splitlines():
        name, _, value = line.partition(" ")
        if value and '"' not in value:
            options.append(f'{name} "{value}"')
    return options


def _apt(*argv: str) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_APT_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _anonymise(root: Root, suite: str) -> None:
    for name in ("apt.conf.d/99mmdebstrap", "auth.conf.d/99mmdebstrap"):
        parts = (b"etc", b"apt", *name.encode().split(b"/"))
        if root.lstat(parts) is not None:
            root.remove(parts)
    root.write("etc/hostname", b"sandbox\n")
    root.write("etc/resolv.conf", b"")
    root.write("etc/hosts", _HOSTS)
    if _has_default_sources(root, suite):
        return
    found = root.read("etc/apt/sources.list", _MAX_SOURCES)
    if found is not None:
        lines = (" ".join(_without_password(word) for word in line.split(" ")) for line in found.decode().split("\n"))
        root.write("etc/apt/sources.list", "\n".join(lines).encode())


def _has_default_sources(root: Root, suite: str) -> bool:
    """Give apt Debian's own sources, as its documentation in the image has them. Returns False if it has none for this
    suite; the image then names the mirrors of this machine."""
    for name, target in _DEFAULTS:
        text = root.read(f"usr/share/doc/apt/examples/{name}", _MAX_SOURCES)
        if text is not None and f" {suite} ".encode() in text.replace(b"\n", b" "):
            if root.lstat((b"etc", b"apt", b"sources.list")) is not None:
                root.remove((b"etc", b"apt", b"sources.list"))
            root.write(target, text)
            return True
    return False


def _without_password(word: str) -> str:
    parts = urllib.parse.urlsplit(word) if "://" in word else None
    if parts is None or "@" not in parts.netloc:
        return word
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

"""What we build from the corpus, beside what a real `docker build` makes of it.

`expected.json` of each case was written by a real one (`builds.record`). The slow test runs it again, on this machine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from builds import reference, trees
from builds.corpus import DEBIAN, SCRATCH, Case, cases
from builds.ours import Ours, our_builder
from builds.reference import Built, Reference
from needs import missing, need

Entry = trees.Entry | None

ALWAYS = ("arg-env", "copy-over-links", "dockerignore", "mount-secret", "replacements", "run-heredoc", "user")
"""The cases of `make test`. The others are in `make test-all`."""


@dataclass(frozen=True)
class Difference:
    reason: str
    applies: Callable[[Case, str, Entry, Entry], bool]
    """To a case, a path, and what Docker and we have there."""


def _is_pipe(case: Case, path: str, docker: Entry, ours: Entry) -> bool:
    return docker is not None and docker["kind"] == "fifo" and ours is None


def _is_mount_point(case: Case, path: str, docker: Entry, ours: Entry) -> bool:
    return case.base == SCRATCH and path in ("run", "tmp") and docker is None


def _is_of_links(case: Case, path: str, docker: Entry, ours: Entry) -> bool:
    return path in _LINKED.get(case.name, ())


_LINKED = {"copy-hard-links": ("made/b", "made/sub/c"), "links-across-steps": ("c",)}

DIFFERENCES = (
    Difference(
        "A named pipe is left out of an image, as devices and sockets are: no image has special files.",
        _is_pipe,
    ),
    Difference(
        "An image from scratch has the directories on which every sandbox mounts something, such as /run and /tmp.",
        _is_mount_point,
    ),
    Difference(
        "A file with several names stays one file when a later step writes to it. Docker's overlay copies the name "
        "that is written to, so that the others keep the old content.",
        _is_of_links,
    ),
)


def test_at_most_three_differences_are_allowed() -> None:
    assert len(DIFFERENCES) <= 3
    assert all(difference.reason for difference in DIFFERENCES)


def test_the_corpus_has_at_least_forty_cases() -> None:
    assert len(cases()) >= 40
    assert {case.name for case in cases()} >= {*ALWAYS}


def differing(case: Case, docker: dict[str, Any], ours: dict[str, Any]) -> tuple[dict[str, Any], set[Difference]]:
    """Return what differs without a listed reason, and the differences that were met."""
    found: dict[str, Any] = {}
    met: set[Difference] = set()
    if docker["config"] != ours["config"]:
        found["config"] = (docker["config"], ours["config"])
    for path in sorted({*docker["files"], *ours["files"]}):
        there, here = (side["files"].get(path, "as in the base") for side in (docker, ours))
        if there == here:
            continue
        known = [None if each == "as in the base" else each for each in (there, here)]
        reasons = {each for each in DIFFERENCES if each.applies(case, path, *known)}
        met |= reasons
        if not reasons:
            found[path] = (there, here)
    return found, met


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ours() -> AsyncIterator[Ours]:
    need("root", "mkfs.btrfs")
    async with our_builder() as made:
        yield made


async def _plain(ours: Ours, case: Case) -> dict[str, Any]:
    built = await ours.build(case)
    base = await ours.base(case.base)
    return {"config": built.config, "files": trees.relative_changes(base, built.tree)}


_STORED = [case for case in cases() if case.base != DEBIAN]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=() if each.name in ALWAYS else pytest.mark.again, id=each.name) for each in _STORED],
)
async def test_a_build_makes_what_docker_build_makes(case: Case, ours: Ours) -> None:
    expected = case.expected
    assert expected is not None, "run builds.record"
    found, _ = differing(case, expected, await _plain(ours, case))
    assert found == {}


def test_a_listed_difference_is_still_there() -> None:
    """What is in the table is needed by the files of some case."""
    pipes = [case.name for case in _STORED if "fifo" in str((case.expected or {})["files"])]
    assert pipes, "no case has a pipe any more"
    assert any(case.base == SCRATCH for case in _STORED)
    assert all(path in (Case(name).expected or {})["files"] for name, paths in _LINKED.items() for path in paths)


@pytest.fixture(scope="module")
def docker() -> Iterator[Reference]:
    need("root", "mmdebstrap", "setpriv")
    try:
        with reference.docker() as running:
            yield running
    except reference.ReferenceError as error:
        missing(str(error))


def _of(built: Built, base: trees.Tree) -> dict[str, Any]:
    return {"config": built.config, "files": trees.relative_changes(base, built.tree)}


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
async def test_docker_on_this_machine_makes_the_same(case: Case, ours: Ours, docker: Reference) -> None:
    theirs = docker.build(case)
    base = {} if case.base == SCRATCH else docker.tree(case.base)
    real = _of(theirs, base)
    if case.expected is not None:
        assert real == case.expected, "Docker makes something else than what was recorded: run builds.record"
    found, _ = differing(case, real, await _plain(ours, case))
    assert found == {}

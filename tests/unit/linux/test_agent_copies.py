"""Memory goes on over the copy of the agent that it was saved with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.engines.linux.runtimes.virtual_kernel import AGENT_NOTE, choose_agent_copy, note_agent_copy

OLD, OLDER = "atoll-agent-00000000000000aa-755", "atoll-agent-00000000000000bb-755"


class Layout:
    """The three places that count here."""

    def __init__(self, folder: Path) -> None:
        self.programs, self._folder = folder / "programs", folder
        self.programs.mkdir()
        for name, made in ((OLDER, 1_000), (OLD, 2_000)):
            (self.programs / name).touch()
            os.utime(self.programs / name, (made, made))

    def agent(self, mode: int) -> Path:
        path = self.programs / f"atoll-agent-00000000000000cc-{mode:o}"
        path.touch()
        return path

    def run(self, sandbox_id: str) -> Path:
        path = self._folder / "run" / sandbox_id
        path.mkdir(parents=True, exist_ok=True)
        return path


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.mkdir()
    (path / "checkpoint.img").touch()
    return path


def test_a_new_sandbox_runs_from_the_newest_and_its_memory_remembers_it(layout: Layout, memory: Path) -> None:
    current = choose_agent_copy(layout, "a", None)  # type: ignore[arg-type]
    assert current == layout.agent(0o755)
    note_agent_copy(layout, "a", memory)  # type: ignore[arg-type]
    (layout.programs / "atoll-agent-00000000000000dd-755").touch()  # a later version
    assert choose_agent_copy(layout, "b", memory) == current  # type: ignore[arg-type]
    note_agent_copy(layout, "b", memory)  # type: ignore[arg-type]
    assert (memory / AGENT_NOTE).read_text() == current.name


@pytest.mark.parametrize(("saved", "name"), [(1_500, OLDER), (2_500, OLD)])
def test_without_a_note_it_is_the_newest_of_that_time(layout: Layout, memory: Path, saved: int, name: str) -> None:
    os.utime(memory / "checkpoint.img", (saved, saved))
    assert choose_agent_copy(layout, "a", memory).name == name  # type: ignore[arg-type]


@pytest.mark.parametrize("note", ["../../bin/sh", "atoll-agent-00000000000000ee-755", ""])
def test_a_note_that_names_no_copy_is_not_followed(layout: Layout, memory: Path, note: str) -> None:
    (memory / AGENT_NOTE).write_text(note)
    assert choose_agent_copy(layout, "a", memory) == layout.agent(0o755)  # type: ignore[arg-type]

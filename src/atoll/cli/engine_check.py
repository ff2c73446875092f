"""`atoll doctor --check ENGINE`: whether an engine keeps the promises of the conformance suite on this machine."""

from __future__ import annotations

import asyncio
import logging
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.theme import Theme

from atoll.cli.run import stopped_by_signals
from atoll.cli.target import print_json
from atoll.conformance import CHECKS, Check, CheckResult, Outcome, run
from atoll.conformance.installation import own_bench
from atoll.engines import registry
from atoll.errors import EngineUnavailableError, SpecError
from atoll.settings import Settings

_WORDS = {Outcome.KEPT: "ok", Outcome.BROKEN: "BROKEN", Outcome.SKIPPED: "n/a"}
_THEME = Theme({"progress.elapsed": "default"})
"""Yellow cannot be read on a light background."""
_STYLES = {Outcome.KEPT: "green", Outcome.BROKEN: "bold red", Outcome.SKIPPED: "default"}


def check_engine(name: str, only: Sequence[str], *, slow: bool, as_json: bool) -> int:
    """Run the checks and report them. Returns the exit code: 1 if a promise was broken.

    Sandboxes are made in an installation that exists only for this, also if the program is interrupted.
    """
    engine = _available(name)
    checks = [
        check for check in CHECKS if (slow or not check.slow) and (not only or any(part in check.name for part in only))
    ]
    if not checks:
        raise SpecError(f"no check has {' or '.join(map(repr, only))} in its name", hint=f"Groups: {_groups()}.")
    logging.getLogger("atoll").setLevel(logging.ERROR)  # checks provoke failures, whose warnings would be noise
    warnings.simplefilter("ignore")
    return asyncio.run(_check(engine, checks, as_json))


def _available(name: str) -> str:
    settings = Settings.load()
    if name == "auto":
        return registry.auto(settings)[0].name
    found = registry.probe(name, settings, thorough=True)
    if not found.available:
        raise EngineUnavailableError(
            f"engine '{found.name}' does not work here: {'; '.join(found.reasons)}", hint=" ".join(found.hints) or None
        )
    return found.name


def _groups() -> str:
    return ", ".join(dict.fromkeys(check.name.partition(".")[0] for check in CHECKS))


async def _check(engine: str, checks: Sequence[Check], as_json: bool) -> int:
    task = asyncio.current_task()
    assert task is not None
    received: list[int] = []
    console = Console(highlight=False, stderr=as_json, theme=_THEME)
    results: list[CheckResult] = []
    with stopped_by_signals(task, received), _progress(console, engine, len(checks)) as (began, ended):

        def note(result: CheckResult) -> None:
            results.append(result)
            ended(result)

        try:
            async with own_bench(engine) as bench:
                await run(bench, quick=False, checks=checks, on_result=note, on_start=began)
        except asyncio.CancelledError:
            if not received:
                raise
    if as_json:
        print_json({"engine": engine, "complete": not received, "checks": [_as_json(result) for result in results]})
    else:
        _report(console, engine, results, len(checks) - len(results))
    if received:
        return 128 + received[0]
    return 1 if any(result.outcome is Outcome.BROKEN for result in results) else 0


@contextmanager
def _progress(
    console: Console, engine: str, total: int
) -> Iterator[tuple[Callable[[Check], None], Callable[[CheckResult], None]]]:
    """Yield what to call before and after each check: a bar on a terminal, elsewhere a line for each."""
    if not console.is_terminal:
        yield lambda check: None, lambda result: print(_line(result), file=console.file, flush=True)
        return
    counts = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        TextColumn(engine), *counts, TextColumn("{task.fields[now]}"), console=console, transient=True
    ) as bar:
        task = bar.add_task(engine, total=total, now="")

        def ended(result: CheckResult) -> None:
            bar.advance(task)
            if result.outcome is Outcome.BROKEN:
                bar.print(f"[bold red]BROKEN[/] {result.check.name}")

        yield lambda check: bar.update(task, now=check.name.partition(".")[2].replace("_", " ")[:34]), ended


def _line(result: CheckResult) -> str:
    said = f"\n       {result.reason}" if result.reason else ""
    return f"{_WORDS[result.outcome]:6} {result.duration_s:6.2f} s  {result.check.name}{said}"


def _report(console: Console, engine: str, results: Sequence[CheckResult], not_run: int) -> None:
    counts = Counter(result.outcome for result in results)
    skipped = Counter(result.reason for result in results if result.outcome is Outcome.SKIPPED)
    for result in results:
        if result.outcome is Outcome.BROKEN:
            console.print(f"\n[bold red]BROKEN[/]  {result.check.name}", soft_wrap=True)
            for text in (result.check.promise, f"Seen: {result.reason}"):
                console.print(textwrap.indent(text, "  "), markup=False, soft_wrap=True)
    if skipped:
        console.print("\nNot applicable:")
        for reason, count in skipped.most_common():
            console.print(f"  {count:3}  {reason}", markup=False, soft_wrap=True)
    console.print(
        f"\n{engine}: [green]{counts[Outcome.KEPT]} kept[/], "
        f"[{_STYLES[Outcome.BROKEN] if counts[Outcome.BROKEN] else 'default'}]{counts[Outcome.BROKEN]} broken[/], "
        f"{counts[Outcome.SKIPPED]} not applicable"
    )
    if not_run:
        console.print(f"Interrupted: {not_run} not run. Nothing is left behind.")


def _as_json(result: CheckResult) -> dict[str, object]:
    return {
        "name": result.check.name,
        "promise": result.check.promise,
        "outcome": result.outcome.value,
        "reason": result.reason,
        "duration_s": round(result.duration_s, 3),
    }

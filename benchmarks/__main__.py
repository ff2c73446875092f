"""`python -m benchmarks [--engine E] [NAME...]`: prints a table, writes JSON and a plot to benchmarks/results."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import Figure

NAMES = (
    "exec_latency",
    "startup",
    "create",
    "memory",
    "copying",
    "oci",
    "native",
    "neighbours",
    "environments",
    "checkpoints",
    "builds",
    "docker",
    "manager",
    "network",
    "service",
)
RESULTS = Path(__file__).parent / "results"


async def collect(names: list[str], engine: str) -> list[Figure]:
    figures: list[Figure] = []
    for name in names:
        print(f"measuring {name} …", flush=True)
        with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir="/var/tmp") as directory:
            Path(directory).chmod(0o755)
            async for figure in importlib.import_module(f"benchmarks.{name}").measure(Path(directory), engine):
                figures.append(figure)
                print(line(figure), flush=True)
    return figures


def line(figure: Figure) -> str:
    promises = (("≤", figure.at_most), ("≥", figure.at_least))
    promise = next((f"{sign} {value:g}" for sign, value in promises if value is not None), "nothing")
    verdict = "kept" if figure.kept else "MISSED"
    return (
        f"  {figure.name:40} {figure.ours:10.3f} {figure.unit:8} {figure.peer_name} {figure.peer:.3f}: "
        f"ratio {figure.ratio:.2f} (promised {promise}) {verdict}"
    )


def plot(figures: list[Figure], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(9, 0.6 * len(figures) + 1.2))
    for row, figure in enumerate(reversed(figures)):
        promised = figure.at_most if figure.at_most is not None else figure.at_least
        axes.barh(row, figure.ratio, color="#2a9d8f" if figure.kept else "#e76f51", height=0.6)
        if promised is not None:
            axes.plot([promised, promised], [row - 0.4, row + 0.4], color="black")
    labels = [f"{f.name}\n({'at most' if f.at_most is not None else 'at least'} the line)" for f in reversed(figures)]
    axes.set_yticks(range(len(figures)), labels, fontsize=8)
    axes.set_xlabel("ratio to the peer measured in the same run; the line is the promise")
    pyplot.tight_layout()
    pyplot.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--engine", default="bubblewrap")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(NAMES)}")
    # The other benchmarks use this machine's own root file system, which no Docker engine has as an image.
    every = ["docker"] if options.engine == "docker" else list(NAMES)
    figures = asyncio.run(collect(options.names or every, options.engine))
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"{options.engine}-{time.strftime('%Y%m%d-%H%M%S')}"
    rows = [{**asdict(figure), "ratio": figure.ratio, "kept": figure.kept} for figure in figures]
    stem.with_suffix(".json").write_text(json.dumps(rows, indent=2) + "\n")
    plot(figures, stem.with_suffix(".png"))
    print(f"\nwritten: {stem}.json, {stem}.png")
    raise SystemExit(0 if all(figure.kept for figure in figures) else 1)


if __name__ == "__main__":
    main()

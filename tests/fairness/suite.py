"""The fairness suite: what an ordinary user notices while a hostile one does their worst, on a real server.

    make fairness                                   # every abuse for a minute, three times; about an hour
    make fairness ARGS="--seconds 5 --runs 1 --trips 10 --only 'fork bomb'"

Figures (a table, and JSON with --json): p50 and p99 of the ordinary user's create + exec + write + read, quiet and
under each abuse; the promise is a p99 within 4 times the quiet one, as the median of the runs. What must never happen
ends the suite with exit code 1: a refusal, a round trip of more than 10 s, a server of more than 600 MB, or anything
that is left on the host afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from atoll.settings import Settings
from fairness.abuses import ABUSES, SANDBOXES
from leftovers import leftovers
from server.conftest import new_user
from server.running import ROOT, RunningServer, everything, start_server

LONGEST_S = 10.0
MOST_RSS = 600 << 20
RATIO = 4.0
_GIVE_UP_S = 600.0


@dataclass
class Run:
    """The round trips of one time."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    """What the hostile user was answered."""

    @property
    def p50(self) -> float:
        return statistics.median(self.seconds) if self.seconds else 0.0

    @property
    def p99(self) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] if ordered else 0.0


class Rss:
    """The most memory that the server had."""

    def __init__(self, pid: int) -> None:
        self.most = 0
        self._status = Path(f"/proc/{pid}/status")
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        try:
            while True:
                for line in self._status.read_text().splitlines():
                    if line.startswith("VmRSS"):
                        self.most = max(self.most, int(line.split()[1]) << 10)
                time.sleep(0.1)
        except OSError:
            pass


def round_trip(client: httpx.Client, run: Run) -> None:
    began = time.monotonic()
    content = os.urandom(10_000)
    sandbox = ""
    try:
        made = client.post("/sandboxes")
        made.raise_for_status()
        sandbox = f"/sandboxes/{made.json()['id']}"
        done = client.post(f"{sandbox}/exec", json={"command": "echo hello"})
        if done.status_code != 200 or done.json()["stdout"] != "hello\n":
            run.failures.append(f"exec: {done.status_code} {done.text[:300]}")
        client.put(f"{sandbox}/files/content", params={"path": "f"}, content=content).raise_for_status()
        back = client.get(f"{sandbox}/files/content", params={"path": "f"})
        if back.content != content:
            run.failures.append(f"read: {back.status_code}")
        took = time.monotonic() - began
        run.seconds.append(took)
        if took > LONGEST_S:
            run.failures.append(f"a round trip took {took:.1f} s")
    except httpx.HTTPStatusError as error:
        run.failures.append(f"refused: {error.response.status_code} {error.response.text[:300]}")
    except httpx.HTTPError as error:
        run.failures.append(f"{type(error).__name__} after {time.monotonic() - began:.1f} s")
    if sandbox:
        try:
            client.delete(sandbox)
        except httpx.HTTPError as error:
            run.failures.append(f"delete: {type(error).__name__}")


def measure(client: httpx.Client, seconds: float, trips: int) -> Run:
    """At least so long and so many."""
    run, began = Run(), time.monotonic()
    while True:
        passed = time.monotonic() - began
        if (passed >= seconds and len(run.seconds) >= trips) or passed > _GIVE_UP_S or len(run.failures) > 50:
            return run
        round_trip(client, run)


def under(name: str, server: RunningServer, key: str, ann: httpx.Client, options: argparse.Namespace) -> Run:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])}
    limits = "default" if options.default_limits else "explicit"
    longest = str(_GIVE_UP_S)
    command = [sys.executable, "-W", "ignore", "-m", "fairness.abuses", name, server.url, key, longest, limits]
    hostile = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert hostile.stdout is not None
        if hostile.stdout.readline() != "ready\n":
            return Run(failures=["the abuse could not begin"])
        run = measure(ann, options.seconds, options.trips)
        hostile.terminate()
        run.answers = json.loads(hostile.communicate(timeout=60)[0].splitlines()[-1])
        if not any(word == "left" or word.startswith("2") for word in run.answers):
            run.failures.append(f"the abuse did nothing: {run.answers}")
        return run
    finally:
        hostile.kill()
        hostile.wait()
        with server.client(key) as mallory:
            mallory.event_hooks = {}
            mallory.timeout = httpx.Timeout(120)
            _delete_all(mallory)


def _delete_all(client: httpx.Client) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        answer = client.get("/sandboxes/search")
        if answer.status_code == 200:
            found = answer.json()["items"]
            if not found:
                return
            for info in found:
                client.delete(f"/sandboxes/{info['id']}")
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description="What an ordinary user notices of a hostile one.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each abuse, at least")
    parser.add_argument("--trips", type=int, default=500, help="round trips under each abuse, at least")
    parser.add_argument("--runs", type=int, default=3, help="of everything; the table shows medians")
    parser.add_argument("--only", action="append", choices=list(ABUSES), help="this abuse; may be repeated")
    parser.add_argument("--engine", default="native")
    parser.add_argument("--default-limits", action="store_true", help="bombs without limits of their own")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))
    folder.chmod(0o755)
    problems: list[str] = []
    try:
        rows, most_rss = _all(folder, options, problems)
    finally:
        left = _left(folder)
        shutil.rmtree(folder, ignore_errors=True)
    problems += [f"left on the host: {each}" for each in left]
    _print(rows, most_rss, problems)
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows, "rss_bytes": most_rss, "problems": problems}, indent=1))
    return 1 if problems else 0


def _all(folder: Path, options: argparse.Namespace, problems: list[str]) -> tuple[list[dict[str, Any]], int]:
    server = start_server(folder, options.engine, 0, ATOLL_MAX_NUM_SANDBOXES="200", ATOLL_REGISTRIES="127.0.0.0/8")
    rss = Rss(server.process.pid)
    names = options.only or list(ABUSES)
    quiet: list[Run] = []
    found: dict[str, list[Run]] = {name: [] for name in names}
    try:
        with server.client() as admin:
            ann = new_user(admin, "ann", max_sandboxes=10)
            mallory = new_user(admin, "mallory", max_sandboxes=SANDBOXES + 4)
        with server.client(ann.key) as client:
            client.event_hooks = {}
            measure(client, 0, 5)  # what is made at the first use is not what this is about
            for number in range(options.runs):
                quiet.append(measure(client, 0, min(options.trips, 200)))
                print(f"run {number + 1}: quiet p50 {quiet[-1].p50 * 1e3:.0f} ms", flush=True)
                for name in names:
                    run = under(name, server, mallory.key, client, options)
                    found[name].append(run)
                    problems += [f"{name}: {failure}" for failure in run.failures]
                    times = f"p50 {run.p50 * 1e3:.0f} ms p99 {run.p99 * 1e3:.0f} ms"
                    print(f"run {number + 1}: {name}: {times}, {run.answers}", flush=True)
    finally:
        with server.client() as admin:
            for info in everything(admin):
                admin.delete(f"/sandboxes/{info['id']}")
        server.stop()
        server.close()
    if rss.most > MOST_RSS:
        problems.append(f"the server had {rss.most >> 20} MiB")
    base = statistics.median(run.p99 for run in quiet)
    rows = [_row("quiet", quiet, base), *(_row(name, runs, base) for name, runs in found.items())]
    return rows, rss.most


def _row(name: str, runs: list[Run], base: float) -> dict[str, Any]:
    p99 = statistics.median(run.p99 for run in runs)
    return {
        "abuse": name,
        "trips": sum(len(run.seconds) for run in runs),
        "p50_ms": round(statistics.median(run.p50 for run in runs) * 1e3, 1),
        "p99_ms": round(p99 * 1e3, 1),
        "longest_ms": round(max((max(run.seconds, default=0.0) for run in runs), default=0.0) * 1e3, 1),
        "ratio": round(p99 / base, 2) if base else 0.0,
        "failures": sum(len(run.failures) for run in runs),
        "hostile": [run.answers for run in runs],
    }


def _left(folder: Path) -> list[str]:
    settings = Settings(data_dir=folder / "data", run_dir=folder / "run")
    deadline = time.monotonic() + 20
    while (found := leftovers(settings)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _print(rows: list[dict[str, Any]], most_rss: int, problems: list[str]) -> None:
    print(f"\n{'abuse':22} {'trips':>6} {'p50 ms':>8} {'p99 ms':>8} {'longest':>8} {'p99/quiet':>9} {'failures':>8}")
    for row in rows:
        kept = "" if row["ratio"] <= RATIO else "  over 4"
        print(
            f"{row['abuse']:22} {row['trips']:6} {row['p50_ms']:8} {row['p99_ms']:8} {row['longest_ms']:8} "
            f"{row['ratio']:9} {row['failures']:8}{kept}"
        )
    print(f"\nmost memory of the server: {most_rss >> 20} MiB")
    for problem in problems[:40]:
        print(f"NEVER: {problem}")


if __name__ == "__main__":
    sys.exit(main())

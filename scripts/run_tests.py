"""Run the tests in parts, with one line of progress for each.

    run_tests.py [short | rest | all] [--minutes N] [--silence SECONDS]

`short` is what `make test` runs. `rest` is what only `make test-all` runs: the tests marked `again`, and the short ones
on other versions of Python. After N minutes no further test begins, and the summary lists what was not run.

The time limit of a test ends what the test waits for, but not what its fixtures wait for afterwards. So a part in which
no test begins or ends for a long time is killed. It fails with the names of the tests that hang and with what their
threads were doing.

Up to three failed tests of a part are repeated, one after another, with nothing beside them: on a small or busy machine
some exceed their time limits. A test that fails again has failed. The summary has every failure in full, and a list of
all repeated tests with the reason of the first failure: a test that fails and then passes has found a race.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MANY = 3
"""Processes for parts whose tests wait most of the time. Other parts have two."""
MAX_RETRIED = 3
MAX_REASON_LINES = 12
PLACE = re.compile(r"[^\s:]+\.py:\d+: ")
SILENCE_S = 420.0
"""Longer than any test may take that is not slow."""
DUMP_S = 3.0
"""Time for writing down what the threads of a process are doing."""
REDRAW_S, REPEAT_S = 0.5, 30.0
"""How often the line of progress is drawn again on a terminal, and written again elsewhere."""

# These compare the whole machine before and after, so nothing else may run beside them.
ALONE = ("tests/native", "tests/network", "tests/oci", "tests/security", "tests/upgrade")
# These start Docker engines of their own, which the others would see.
DOCKER = ("tests/docker", "tests/openmanus", "tests/openhands/test_docker.py")
# These do not depend on the version of Python: they test programs that are not written in Python.
NO_PYTHON = ("tests/agent",)
OTHER_PYTHONS = ("3.13", "3.12")


@dataclass(frozen=True)
class Part:
    """Tests that run at the same time: those with these marks, in these directories or in all but some."""

    name: str
    marks: str
    paths: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    python: str | None = None
    workers: int = 2

    @property
    def exists(self) -> bool:
        return not self.paths or any((ROOT / path).exists() for path in self.paths)

    @property
    def program(self) -> str:
        return str(ROOT / (f".venv-{self.python}" if self.python else ".venv") / "bin" / "python")

    def arguments(self) -> list[str]:
        paths = [path for path in self.paths if (ROOT / path).exists()]
        ignored = [f"--ignore={path}" for path in self.without]
        return ["-m", self.marks, "-n", str(self.workers), "--dist", "worksteal", *paths, *ignored]


def parts(marks: str, prefix: str = "") -> list[Part]:
    """Return the parts for all tests with these marks."""
    return [
        Part(f"{prefix}most", marks, without=ALONE + DOCKER, workers=MANY),
        Part(f"{prefix}machine", f"{marks} and not docker", ALONE),
        Part(f"{prefix}docker", marks, DOCKER),
        Part(f"{prefix}machine with docker", f"{marks} and docker", ALONE),
    ]


SHORT = parts("not slow and not again")
REST = [
    *parts("again and not slow", "again: "),
    *(
        Part(f"Python {version}", SHORT[0].marks, without=ALONE + DOCKER + NO_PYTHON, python=version, workers=MANY)
        for version in OTHER_PYTHONS
    ),
]
PARTS = {"short": SHORT, "rest": REST, "all": [*SHORT, *REST]}


@dataclass
class Result:
    """The results of one run of pytest."""

    tests: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: int = 0
    log: str = ""
    """The complete output of pytest."""

    def having(self, outcome: str) -> list[str]:
        return [name for name, event in self.ended.items() if event["outcome"] == outcome]

    @property
    def not_run(self) -> int:
        return len(self.tests) - len(self.ended)

    @property
    def broke(self) -> bool:
        """Whether something other than a test failed. 0, 1 and 5 mean success, failed tests, and no tests."""
        return self.status not in (0, 1, 5) or (self.status == 1 and not self.having("failed"))

    def counts(self) -> str:
        found = [f"{len(self.having(outcome))} {outcome}" for outcome in ("passed", "failed", "skipped")]
        return ", ".join(each for each in found if not each.startswith("0 ")) or "nothing to run"


class Durations:
    """How long each test took in its last run, stored between runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        with contextlib.suppress(OSError, ValueError):
            self._seconds = json.loads(path.read_text())
        self._mean = sum(self._seconds.values()) / len(self._seconds) if self._seconds else 1.0

    def of(self, tests: Iterable[str]) -> float:
        return sum(self._seconds.get(test, self._mean) for test in tests)

    def learn(self, result: Result) -> None:
        self._seconds |= {name: round(event["seconds"], 3) for name, event in result.ended.items()}
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(self._seconds))


class Line:
    """The line of progress: redrawn on a terminal, elsewhere written from time to time."""

    def __init__(self, name: str, durations: Durations) -> None:
        self._name = name
        self._durations = durations
        self._began = self._shown = time.monotonic()

    def show(self, result: Result) -> None:
        now, is_drawn = time.monotonic(), sys.stdout.isatty()
        if now - self._shown < (REDRAW_S if is_drawn else REPEAT_S):
            return
        self._shown = now
        text = self._text(result, now - self._began)
        if is_drawn:
            print("\r\033[K" + text[: os.get_terminal_size().columns - 1], end="", flush=True)
        else:
            print(text, flush=True)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        print(("\r\033[K" if sys.stdout.isatty() else "") + text, flush=True)

    def end(self, result: Result) -> None:
        not_run = f", {result.not_run} not run" if result.not_run else ""
        self.say(f"{self._name}: {result.counts()}{not_run}; took {clock(time.monotonic() - self._began)}")

    def _text(self, result: Result, elapsed_s: float) -> str:
        if not result.tests:
            return f"{self._name}: looking for tests, {clock(elapsed_s)}"
        failed = f", {len(result.having('failed'))} failed" if result.having("failed") else ""
        count = f"{len(result.ended)} of {len(result.tests)}{failed}"
        return f"{self._name}: {count}, {clock(elapsed_s)}{self._left(result, elapsed_s)}"

    def _left(self, result: Result, elapsed_s: float) -> str:
        """Return the estimated time left, from the speed so far and the durations of the last run."""
        done = self._durations.of(result.ended)
        todo = self._durations.of(set(result.tests) - set(result.ended))
        return f", about {clock(elapsed_s * todo / done)} left" if done else ""


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def run_pytest(part: Part, arguments: list[str], until: float | None, silence_s: float, line: Line) -> Result:
    result = Result()
    environment = dict(os.environ)
    if part.python:
        environment.pop("CI", None)  # nobody needs to have another Python, or one that other users can run
    folder = tempfile.mkdtemp(prefix="at-", dir="/tmp")
    readable, writable = os.pipe()
    command = [part.program, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", "--basetemp", f"{folder}/t"]
    command += ["--events", str(writable), *(["--until", str(until)] if until is not None else []), *arguments]
    try:
        with open(f"{folder}/log", "w+", errors="replace") as log:
            running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, pass_fds=[writable])
            os.close(writable)
            try:
                for event in _events(readable, silence_s, line, result):
                    _note(event, result, line)
            except TimeoutError:
                line.say(f"{part.name}: no test has ended for {clock(silence_s)}: killed")
                _kill(running)
            finally:
                if running.poll() is None and sys.exc_info()[0] is SystemExit:
                    running.send_signal(signal.SIGINT)  # a terminal has already sent it a SIGINT
                result.status = running.wait()
            log.seek(0)
            result.log = log.read()
    finally:
        os.close(readable)
        subprocess.run(["rm", "-rf", "--one-file-system", folder], check=False)
    return result


def _events(readable: int, silence_s: float, line: Line, result: Result) -> Iterator[Any]:
    """Yield events until no process is left to write any, and show the line meanwhile. Raises TimeoutError after a long
    silence."""
    unfinished = b""
    heard = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(readable, selectors.EVENT_READ)
        while True:
            line.show(result)
            if not selector.select(REDRAW_S):
                if time.monotonic() - heard > silence_s:
                    raise TimeoutError
                continue
            heard = time.monotonic()
            if not (data := os.read(readable, 1 << 16)):
                return
            *lines, unfinished = (unfinished + data).split(b"\n")
            yield from map(json.loads, lines)


def _note(event: Any, result: Result, line: Line) -> None:
    if isinstance(event, list):
        result.tests = event
        return
    if "begun" in event:
        result.running.add(event["begun"])
        return
    result.running.discard(event["test"])
    result.ended[event["test"]] = event
    if event["outcome"] == "failed":
        line.say(f"FAILED {event['test']}")


def _kill(running: subprocess.Popen[bytes]) -> None:
    """Kill pytest and all that it started. The processes that run tests first log what their threads are doing."""
    family = _descendants(running.pid)
    for pid in _children(running.pid):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/exe") == os.readlink(f"/proc/{running.pid}/exe"):
                os.kill(pid, signal.SIGABRT)
    time.sleep(DUMP_S)
    for pid in [*family, running.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    return [each for child in _children(pid) for each in (*_descendants(child), child)]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


@dataclass
class Run:
    """All parts, one after another, and the summary at the end."""

    until: float | None
    silence_s: float
    durations: Durations = field(default_factory=lambda: Durations(ROOT / ".pytest_cache" / "durations.json"))
    outcomes: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    retried: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def part(self, part: Part) -> None:
        if self.until is not None and time.time() > self.until:
            self.not_run.append(f"{part.name}: no time was left")
            return
        if part.python and (problem := _set_up(part.python)):
            self.not_run.append(f"{part.name}: {problem}")
            return
        line = Line(part.name, self.durations)
        result = run_pytest(part, part.arguments(), self.until, self.silence_s, line)
        line.end(result)
        self.durations.learn(result)
        self.outcomes.update(event["outcome"] for event in result.ended.values())
        self.skipped.update(result.ended[name]["text"] for name in result.having("skipped"))
        if result.not_run and not result.broke:
            self.not_run.append(f"{part.name}: {result.not_run} of {len(result.tests)} tests, because no time was left")
        again = self._again(part, result) if result.status == 1 else None
        for found in (result, again) if again and again.broke else (again or result,):
            if found.broke:
                hanging = "".join(f"\nstill running: {test}" for test in sorted(found.running))
                self.failures.append(f"{part.name}: pytest ended with {found.status}{hanging}\n{found.log}")
            self.failures += [f"{name}\n{found.ended[name]['text']}" for name in found.having("failed")]

    def _again(self, part: Part, first: Result) -> Result | None:
        failed = first.having("failed")
        if not 0 < len(failed) <= MAX_RETRIED:
            return None
        line = Line(f"{part.name}, once more, alone", self.durations)
        second = run_pytest(part, failed, None, self.silence_s, line)
        line.end(second)
        passed = second.having("passed")
        for name in failed:
            verdict = "passed the second time" if name in passed else "failed again"
            self.retried.append(f"{name}: {verdict}\n{_indented(_reason(first.ended[name]['text']))}")
        self.outcomes.update(passed=len(passed), failed=-len(passed))
        return second

    def summary(self, seconds: float) -> str:
        """Return the summary. Its last line has the totals; details are above it."""
        blocks = [f"\n=== FAILED: {failure}" for failure in self.failures]
        if self.retried:
            blocks += ["\nTried twice, and why the first time failed:\n", *self.retried]
        if self.skipped:
            blocks += ["\nSkipped:", *(f"  {count:4}  {reason}" for reason, count in self.skipped.most_common())]
        if self.not_run:
            blocks += ["\nNot run:", *(f"  {each}" for each in self.not_run)]
        counts = [f"{self.outcomes[name]} {name}" for name in ("failed", "passed", "skipped") if self.outcomes[name]]
        return "\n".join([*blocks, f"\n{', '.join(counts) or 'no tests'} in {clock(seconds)}"])


def _set_up(version: str) -> str | None:
    """Create the environment with that Python. Returns the problem; None if there is none."""
    done = subprocess.run([ROOT / "scripts" / "setup", "python", version], capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1].removeprefix("setup: ")


def _reason(text: str) -> str:
    """Return what pytest marks as the error, and the places that led to it; the last lines if nothing is marked, as in
    groups of errors."""
    lines = [line for line in text.partition("\n--- ")[0].splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith("E  ")][:MAX_REASON_LINES]
    places = [line for line in lines if PLACE.match(line)]
    return "\n".join([*marked, *places[-MAX_REASON_LINES:]] if marked else lines[-MAX_REASON_LINES:])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests in parts.")
    parser.add_argument("which", nargs="?", choices=PARTS, default="short")
    parser.add_argument("--minutes", type=float, help="begin no test after so long")
    parser.add_argument("--silence", type=float, default=SILENCE_S, help="kill a part in which so long no test ends")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    run = Run(None if options.minutes is None else time.time() + options.minutes * 60, options.silence)
    try:
        for part in PARTS[options.which]:
            if part.exists:
                run.part(part)
    except KeyboardInterrupt:
        run.failures.append("interrupted")
    print(run.summary(time.monotonic() - began), flush=True)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())

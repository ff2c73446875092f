"""What a build says on the way: events, with bounded output and without secrets."""

from __future__ import annotations

import codecs
import dataclasses
import time
from collections.abc import Iterable
from typing import Literal

from atoll.builds.failures import shown
from atoll.builds.request import BuildEvent, OnBuildEvent
from atoll.builds.steps import Step
from atoll.errors import BuildError, SandboxError

MAX_OUTPUT_BYTES = 2 << 20
"""How much of one step's output is reported. Its end is kept for the error in any case."""
TAIL_BYTES = 16 << 10
_HIDDEN = b"***"
_LEAST_SECRET = 4
"""Shorter secrets are not searched for in output, because they would be found everywhere."""


class Reporter:
    def __init__(self, on_event: OnBuildEvent | None, secrets: Iterable[bytes]) -> None:
        self._on_event = on_event
        self.steps = 0
        self.carried_out = 0
        self._secrets: tuple[bytes, ...] = ()
        self.hide(secrets)

    def hide(self, secrets: Iterable[bytes]) -> None:
        """Hide these in the output of commands that start from now on."""
        found = {part for each in secrets for part in (each, each.strip()) if len(part) >= _LEAST_SECRET}
        self._secrets = tuple({*self._secrets, *found})

    def emit(self, event: BuildEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def plan(self, steps: int) -> None:
        self.steps = steps
        self.emit(BuildEvent("plan", steps=steps))

    def warn(self, text: str) -> None:
        self.emit(BuildEvent("warning", text))

    def step(self, step: Step) -> None:
        self.emit(self._of(step, "step"))

    def known(self, step: Step) -> None:
        self.emit(self._of(step, "cached"))

    def done(self, step: Step, began: float) -> None:
        self.carried_out += 1
        self.emit(dataclasses.replace(self._of(step, "done"), seconds=time.monotonic() - began))

    def failed(self, error: SandboxError) -> None:
        step, place = (error.step, error.place) if isinstance(error, BuildError) else (0, "")
        self.emit(BuildEvent("failed", str(error), step=step, steps=self.steps, place=place))

    def output_of(self, step: Step) -> StepOutput:
        return StepOutput(self, step, self._secrets)

    def output(self, step: Step, channel: int, text: str) -> None:
        self.emit(dataclasses.replace(self._of(step, "output"), text=text, channel=channel))

    def _of(self, step: Step, kind: Literal["step", "cached", "output", "done"]) -> BuildEvent:
        return BuildEvent(
            kind=kind,
            text=shown(step.text),
            stage=step.stage,
            step=step.number,
            steps=self.steps,
            place=step.where,
        )


class StepOutput:
    """Takes what a command writes, of any length, in bounded memory."""

    def __init__(self, reporter: Reporter, step: Step, secrets: tuple[bytes, ...]) -> None:
        self._reporter = reporter
        self._step = step
        self._left = MAX_OUTPUT_BYTES
        self._tail = bytearray()
        decoder = codecs.getincrementaldecoder("utf-8")
        self._channels = {channel: (_Hiding(secrets), decoder(errors="replace")) for channel in (1, 2)}

    def add(self, channel: int, data: bytes) -> None:
        if channel in self._channels:
            self._pass_on(channel, self._channels[channel][0].feed(data))

    def finish(self) -> str:
        """Report what was held back, and return the last lines."""
        for channel, (hiding, _) in self._channels.items():
            self._pass_on(channel, hiding.finish(), final=True)
        return self._tail.decode(errors="replace")

    def _pass_on(self, channel: int, data: bytes, *, final: bool = False) -> None:
        self._tail += data[-TAIL_BYTES:]
        del self._tail[:-TAIL_BYTES]
        if self._left > 0 or final:
            text = self._channels[channel][1].decode(data[: max(self._left, 0)], final)
            if text:
                self._reporter.output(self._step, channel, text)
        if 0 < self._left <= len(data):
            self._reporter.output(
                self._step, channel, f"\n[more than {MAX_OUTPUT_BYTES >> 20} MiB of output; the rest is left out]\n"
            )
        self._left -= len(data)


class _Hiding:
    """Replaces secrets in a stream. The longest beginning of a secret is held back until it is clear what follows."""

    def __init__(self, secrets: tuple[bytes, ...]) -> None:
        self._secrets = sorted(secrets, key=len, reverse=True)
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        if not self._secrets:
            return data
        data = self._replaced(self._held + data)
        keep = max((self._overlap(data, secret) for secret in self._secrets), default=0)
        self._held = data[len(data) - keep :]
        return data[: len(data) - keep]

    def finish(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _replaced(self, data: bytes) -> bytes:
        for secret in self._secrets:
            data = data.replace(secret, _HIDDEN)
        return data

    def _overlap(self, data: bytes, secret: bytes) -> int:
        """Return the length of the longest end of `data` with which the secret begins."""
        longest = min(len(secret) - 1, len(data))
        return next((size for size in range(longest, 0, -1) if data.endswith(secret[:size])), 0)

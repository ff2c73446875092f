"""What is for OpenHands: on the programs of this machine, and for one test on a Docker engine of its own."""

from __future__ import annotations

from docker import private_engine


def pytest_sessionfinish() -> None:
    private_engine.stop()

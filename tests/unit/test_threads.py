"""Threads that come when they are needed, and go."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
from concurrent.futures import wait

import pytest

from atoll.workers import Threads


def alive(name: str) -> int:
    return sum(thread.name.startswith(f"{name}_") for thread in threading.enumerate())


def test_what_they_do_is_answered_and_they_end_when_idle() -> None:
    threads, gate = Threads("ends", idle_s=0.05), threading.Event()
    held = [threads.submit(gate.wait) for _ in range(5)]
    assert alive("ends") == 5
    gate.set()
    wait(held, timeout=10)
    assert threads.submit(lambda: 7).result(10) == 7
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(10)
    deadline = time.monotonic() + 10
    while alive("ends"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert threads.submit(lambda: 8).result(10) == 8, "a new one comes"


def test_the_one_that_was_busy_last_is_asked_first() -> None:
    threads, gate = Threads("last", idle_s=60), threading.Event()
    held = [threads.submit(gate.wait) for _ in range(4)]
    gate.set()
    wait(held, timeout=10)
    deadline = time.monotonic() + 10
    while len(threads._idle) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    names = set()
    for _ in range(20):
        names.add(threads.submit(lambda: threading.current_thread().name).result(10))
        while len(threads._idle) < 4:
            time.sleep(0.001)
    assert len(names) == 1
    assert alive("last") == 4


def test_many_at_once_and_threads_that_are_just_leaving() -> None:
    threads = Threads("many", idle_s=0.0)
    for _ in range(30):
        futures = [threads.submit(functools.partial(int, number)) for number in range(20)]
        assert [future.result(10) for future in futures] == list(range(20))


def test_a_program_that_ends_waits_for_what_runs_and_not_for_who_is_idle() -> None:
    code = """
import time
from atoll.workers import Threads
threads = Threads("x", idle_s=1000)
threads.submit(lambda: None).result()
threads.submit(lambda: (time.sleep(0.3), print("done", flush=True)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)

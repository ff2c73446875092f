"""The boundary probe: every wall, as root and as an ordinary user, and where there are no walls at all."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import platform
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.engines.linux.native_engine import NativeEngine
from atoll.engines.linux.oci_engine import OciEngine
from atoll.engines.linux.runtimes.oci_runtimes import locate
from atoll.model import SandboxSpec
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from needs import missing, not_applicable
from security import host_state, probe
from security.canaries import Canaries
from security.conftest import PIDS
from security.weak import Weak

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("known_machine")]

PROGRAM = Path(probe.__file__).read_text()
Verdicts = dict[str, tuple[str, str]]

REFUSED = {"EPERM", "EACCES", "ENOSYS", "ENOENT", "SIGSYS"}
"""What a wall says. Any other errno would mean that the call was let in and failed for another reason."""

NOT_IN_THIS_KERNEL = {"ENOSYS", "ENOENT", "ENODEV", "ENXIO", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT"}
CANNOT_FIRE = {
    "A27.root_disk": "the machine's own root may not open its disk, where a hypervisor or a container holds it",
    "A27.mem": "needs CONFIG_DEVMEM",
    "A30.realtime": "a control group without real-time budget refuses it to everybody",
    "A30.deadline": "a control group without real-time budget refuses it to everybody",
    "C02./proc/kpagecount": "the first pages of a machine may be unused",
    "C02./proc/swaps": "there may be no swap",
    "C02./proc/locks": "there may be no lock",
    "C02./sys/power/state": "a virtual machine may have no sleep states",
    "C07.processes": "the control has a PID namespace to protect this machine; the bare host is the control",
    "B12.abstract_sockets": "the control has a network namespace to protect this machine; the bare host is the control",
    "D09.open_files": "needs CAP_SYS_RESOURCE, which this machine's root may not have",
    "D17.oom_score": "needs CAP_SYS_RESOURCE, which this machine's root may not have",
    "M01.tiocsti": "needs legacy_tiocsti=1",
}


@pytest.fixture(scope="session")
def known_machine() -> None:
    if platform.machine() != "x86_64":
        not_applicable("the probe knows the system calls of x86-64")


def read(output: str) -> Verdicts:
    lines = [json.loads(line) for line in output.splitlines()]
    found = {line["id"]: (line["verdict"], line["why"]) for line in lines}
    assert found.keys() == probe.CHECKS.keys(), "the probe did not run to its end"
    return found


Look = Callable[[str, str], Verdicts]


@pytest.fixture(scope="session")
def look(settings: Settings, canaries: Canaries) -> Look:
    """What the probe says in a sandbox of that runtime, as that user. Each is asked once."""
    seen: dict[tuple[str, str], Verdicts] = {}

    async def run(runtime: str) -> None:
        native = runtime == "native"
        engine = NativeEngine(settings) if native else OciEngine(settings, None if runtime == "runsc" else runtime)
        spec = SandboxSpec.of(isolation="gvisor") if runtime == "runsc" else SandboxSpec.of(limits={"pids": PIDS})
        try:
            async with AsyncSandbox(spec, engine=engine, settings=settings) as sandbox:
                for user in ("0", "1000"):
                    canary = next(iter(canaries.places))
                    command = ["python3", "-I", "-", canary[::-1]]
                    result = await sandbox.exec(command, stdin=PROGRAM, user=user, timeout=60)
                    canaries.search(result.stdout_bytes + result.stderr_bytes)
                    assert result.success, result.stderr
                    seen[runtime, user] = read(result.stdout)
        finally:
            await engine.aclose()

    def ask(runtime: str, user: str) -> Verdicts:
        if (runtime, user) not in seen:
            if runtime not in ("runsc", "native") and locate(runtime, settings.data_dir) is None:
                missing(f"needs {runtime}")
            asyncio.run(run(runtime))
        return seen[runtime, user]

    return ask


@pytest.fixture(scope="session")
def in_weak(weak: Weak) -> Verdicts:
    """PID 1 of the control holds the canary, as a careless daemon would."""
    said = weak.run(
        ["sh", "-c", "python3 -I - $SECRET; exit $?"], stdin=PROGRAM.encode(), env=["SECRET=canary-of-pid-1"]
    )
    assert said.status == 0, said.text
    return read(said.text)


@pytest.mark.parametrize("check", probe.CHECKS)
@pytest.mark.parametrize("user", ["0", "1000"])
@pytest.mark.parametrize("runtime", ["native", "runc", pytest.param("crun", marks=pytest.mark.again)])
def test_the_wall_holds(runtime: str, user: str, check: str, look: Look) -> None:
    verdict, why = look(runtime, user)[check]
    assert verdict == "HELD", why
    if why.isupper() and why.isalnum():
        assert why in REFUSED, f"{why} is no refusal"


@pytest.mark.parametrize("check", probe.CHECKS)
def test_the_same_check_fires_where_there_is_no_wall(check: str, in_weak: Verdicts) -> None:
    verdict, why = in_weak[check]
    if verdict != "PWNED":
        assert verdict == "HELD", why
        assert why in NOT_IN_THIS_KERNEL or check in CANNOT_FIRE, why


def test_most_checks_can_fire(in_weak: Verdicts) -> None:
    fired = [check for check, (verdict, _) in in_weak.items() if verdict == "PWNED"]
    assert len(fired) >= len(probe.CHECKS) * 2 // 3


@pytest.mark.parametrize("check", ["C07.processes", "B12.abstract_sockets"])
def test_what_the_control_keeps_closed_fires_on_the_bare_host(check: str) -> None:
    with socket.socket(socket.AF_UNIX) as beacon:
        beacon.bind(f"\0atoll-test-{check}")
        only = PROGRAM.replace('if __name__ == "__main__":\n    main()', f"print(judge(CHECKS[{check!r}])[0])")
        done = subprocess.run(["python3", "-I", "-"], input=only, capture_output=True, text=True, timeout=30)
    assert done.stdout == "PWNED\n", done.stderr


def test_on_gvisor_nothing_of_it_reaches_the_host(
    look: Look, runsc: Path, settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel is its own and says yes to much. What counts is that the host is as before."""
    monkeypatch.setenv("ATOLL_RUNSC", str(runsc))
    before = host_state.settled(settings, folder)
    for user in ("0", "1000"):
        verdicts = look("runsc", user)
        assert [check for check, (verdict, _) in verdicts.items() if verdict == "ERROR"] == []
        for check in ("C03.host_paths", "C03.layers", "C06.canary", "B04.descriptors", "B12.host_sockets"):
            assert verdicts[check][0] == "HELD", (check, verdicts[check][1])
    after = host_state.settled(settings, folder)
    # The first sandbox of its kind makes a copy of the agent.
    assert set(before.programs) <= set(after.programs)
    assert dataclasses.replace(after, programs=before.programs) == before

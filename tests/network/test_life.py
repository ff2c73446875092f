"""A policy holds for as long as the sandbox does: through changes, pauses, rollbacks, forks, restarts of ours and the
death of the gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from atoll import Sandbox, UnsupportedError
from atoll.engines.docker.api import endpoint, facts
from atoll.engines.docker.api.http import Http
from atoll.engines.docker.connect.container_link import ContainerLinks
from atoll.engines.host.process_ref import descendants
from atoll.engines.linux.oci_engine import OciEngine
from atoll.engines.linux.runtimes import oci_runtimes
from atoll.model import SandboxSpec
from atoll.network.client import Gateway
from atoll.settings import Settings
from docker import private_engine
from needs import missing
from network import world
from network.attacks import run
from network.conftest import NAMES, Kind, Make
from network.internet import Internet
from network.test_isolation import destinations

WEB, EVIL = world.WEB, world.EVIL
LOOK = (
    f"[connect('{EVIL}', 80, get('allowed.test')), connect('{EVIL}', 80, get('evil.test')),"
    f" connect('{EVIL}', 22, wait=2),"
    f" connect('{world.METADATA}', 80, get('x')), datagram('198.18.0.1', 53, question('evil.test'), 15)[3:4]]"
)


def is_as_named(sandbox: Sandbox, internet: Internet) -> None:
    """It reaches allowed.test and nothing else."""
    _, packets = internet.mark()
    found = run(sandbox, LOOK)
    assert '"at": "WEB"' in found[0]
    assert found[1].startswith("HTTP/1.1 403")
    assert "SSH" not in found[2]
    assert "CANARY" not in found[3]
    assert found[4] == "\x83"
    assert {each.rpartition(".")[0] for each in destinations(internet, packets)} <= {WEB, EVIL}
    assert not [each for each in destinations(internet, packets) if each.startswith(f"{EVIL}.") and each[-3:] != ".53"]


def test_a_change_ends_what_it_forbids_and_holds_for_what_is_new(make: Make, kind: Kind) -> None:
    sandbox = make(kind, NAMES)
    flow = sandbox.start("curl -sS -N http://allowed.test/slow > flow 2>&1; echo over > over")
    sandbox.exec("until grep -q . flow; do sleep 0.02; done")
    sandbox.set_network("none")
    assert sandbox.exec("timeout 20 sh -c 'until grep -q over over; do sleep 0.02; done' 2>/dev/null").success
    assert "WEB" not in run(sandbox, f"connect('{WEB}', 80, get('allowed.test'))")
    sandbox.set_network({"allowed_domains": ["evil.test"]})
    assert '"at": "EVIL"' in run(sandbox, f"connect('{WEB}', 80, get('evil.test'))")
    assert run(sandbox, f"connect('{WEB}', 80, get('allowed.test'))").startswith("HTTP/1.1 403")
    flow.kill()


def test_a_change_leaves_what_it_allows(make: Make, kind: Kind) -> None:
    sandbox = make(kind, NAMES)
    flow = sandbox.start("curl -sS -N http://allowed.test/slow > flow 2>&1; echo over > over")
    sandbox.exec("until grep -q . flow; do sleep 0.02; done")
    sandbox.set_network({"allowed_domains": ["allowed.test"]})
    sandbox.exec("a=$(wc -c < flow); until [ $(wc -c < flow) -gt $a ]; do sleep 0.02; done")
    assert not sandbox.exec("test -e over").success
    flow.kill()


def test_a_network_can_be_given_later(make: Make, kind: Kind, internet: Internet) -> None:
    sandbox = make(kind, "none")
    if "isolation" in kind:
        with pytest.raises(UnsupportedError, match="its own kernel cannot get one") as refused:
            sandbox.set_network(NAMES)
        assert "network={}" in (refused.value.hint or "")
        assert sandbox.inspect().state == "RUNNING"
        return
    sandbox.set_network(NAMES)
    is_as_named(sandbox, internet)


@pytest.fixture(scope="session")
def bare_image(folder: Path) -> str:
    """An image that says nothing of any network: this machine's programs are put into it by a volume."""
    archive = folder / "bare.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("etc", "tmp", "usr", "root", "workspace"):
            made = tarfile.TarInfo(name)
            made.type, made.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(made)
        for name in ("bin", "sbin", "lib", "lib64"):
            made = tarfile.TarInfo(name)
            made.type, made.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(made)
    return f"tar:{archive}"


@pytest.mark.parametrize("runtime", ["native", "runc", pytest.param("crun", marks=pytest.mark.again)])
def test_a_network_can_be_given_later_to_any_image(
    settings: Settings, internet: Internet, bare_image: str, runtime: str
) -> None:
    if runtime != "native" and oci_runtimes.locate(runtime, settings.data_dir) is None:
        missing(f"{runtime} is not installed")
    engine = "native" if runtime == "native" else OciEngine(settings, runtime)
    usr = ["/usr:/usr:ro"]
    with Sandbox(engine=engine, settings=settings, image=bare_image, volumes=usr, timeout=40) as sandbox:
        assert run(sandbox, "[n for _, n in socket.if_nameindex()]") == ["lo"]
        sandbox.set_network(NAMES)
        is_as_named(sandbox, internet)
        assert run(sandbox, "socket.gethostbyname('allowed.test')") == WEB, "by its own name server"
        sandbox.set_network("none")
        assert "WEB" not in run(sandbox, f"connect('{WEB}', 80, get('allowed.test'))")


def test_a_pause_changes_nothing(make: Make, kind: Kind, internet: Internet) -> None:
    sandbox = make(kind, NAMES)
    sandbox.pause()
    sandbox.resume()
    is_as_named(sandbox, internet)
    if "isolation" in kind:
        sandbox.pause(memory="disk")
        sandbox.resume()
        is_as_named(sandbox, internet)


def test_a_rollback_keeps_the_policy_of_now(make: Make, kind: Kind, internet: Internet) -> None:
    sandbox = make(kind, "all")
    kept = sandbox.checkpoint()
    sandbox.set_network(NAMES)
    sandbox.rollback(kept.id)
    is_as_named(sandbox, internet)


def test_a_fork_has_the_policy_of_its_origin(make: Make, kind: Kind, internet: Internet) -> None:
    sandbox = make(kind, "all")
    sandbox.set_network(NAMES)
    (twin,) = sandbox.fork(1)
    with twin:
        is_as_named(twin, internet)
        is_as_named(sandbox, internet)
        twin.set_network("none")
        assert "WEB" not in run(twin, f"connect('{WEB}', 80, get('allowed.test'))")
        is_as_named(sandbox, internet)


def test_another_process_finds_the_policy(settings: Settings, make: Make, kind: Kind, internet: Internet) -> None:
    """Made by a process that is gone, and the gateway with it."""
    program = (
        "import sys; from pathlib import Path; from atoll import Sandbox; from atoll.settings import Settings\n"
        f"s = Sandbox(settings=Settings(Path('{settings.data_dir}'), Path('{settings.run_dir}')), network={NAMES!r},"
        f" **{kind!r}).create(); print(s.id); s.detach()"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50)
    sandbox = Sandbox.attach(made.stdout.strip(), engine=kind["engine"], settings=settings)
    with sandbox:
        is_as_named(sandbox, internet)
        assert sandbox.network_log()


def gateway_processes(settings: Settings) -> tuple[int, list[int]]:
    """The parent and its worker."""
    directory = str(Gateway(settings).files.directory)
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"atoll.network.gateway.process" in words and directory.encode() in words:
            found.append(int(path.parent.name))
    parents = [pid for pid in found if descendants(pid)]
    assert len(parents) <= 1
    return (parents or found or [0])[0], [pid for pid in found if pid not in parents]


def test_without_the_gateway_nothing_passes_and_it_comes_back(
    settings: Settings, make: Make, kind: Kind, internet: Internet
) -> None:
    sandbox = make(kind, NAMES)
    _, workers = gateway_processes(settings)
    os.kill(workers[0], signal.SIGSTOP)
    _, packets = internet.mark()
    found = run(
        sandbox,
        f"[connect('{WEB}', 80, get('allowed.test'), wait=1), datagram('198.18.0.1', 53, question('evil.test'))]",
    )
    assert "WEB" not in found[0]
    assert "error" in found[1]
    assert destinations(internet, packets) == set()
    os.kill(workers[0], signal.SIGKILL)
    assert "WEB" in run(sandbox, f"eventually('{WEB}', 80, get('allowed.test'))"), "its parent started another"
    is_as_named(sandbox, internet)


def test_when_all_of_the_gateway_is_killed_the_next_use_starts_it(
    settings: Settings, make: Make, kind: Kind, internet: Internet
) -> None:
    sandbox = make(kind, NAMES)
    parent, _ = gateway_processes(settings)
    os.kill(parent, signal.SIGKILL)
    while any(gateway_processes(settings)[1]) or gateway_processes(settings)[0]:
        time.sleep(0.01)
    _, packets = internet.mark()
    found = run(sandbox, f"[connect(h, p, wait=1) for h in ('{WEB}', '{EVIL}') for p in (22, 80, 443)]")
    assert all("error" in each for each in found)
    assert destinations(internet, packets) == set()
    attached = Sandbox.attach(sandbox.id, engine=kind["engine"], settings=settings)
    assert attached.exec("true").success
    attached.detach()
    is_as_named(sandbox, internet)


def test_deleting_leaves_nothing(settings: Settings, make: Make, kind: Kind) -> None:
    gateway = Gateway(settings)
    with Sandbox(settings=settings, network=NAMES, **kind) as sandbox:
        run(sandbox, f"connect('{EVIL}', 80, get('evil.test'))")
        assert gateway.files.is_member(sandbox.id)
        assert gateway.refusals(sandbox.id)
    assert not list(gateway.files.members.glob(f"{sandbox.id}*"))


@pytest.mark.parametrize("runtime", ["runc", pytest.param("crun", marks=pytest.mark.again)])
def test_the_other_runtimes_keep_it_too(settings: Settings, internet: Internet, runtime: str) -> None:
    if oci_runtimes.locate(runtime, settings.data_dir) is None:
        missing(f"{runtime} is not installed")
    with Sandbox(engine=OciEngine(settings, runtime), settings=settings, network=NAMES) as sandbox:
        is_as_named(sandbox, internet)
        sandbox.set_network("none")
        assert "WEB" not in run(sandbox, f"connect('{WEB}', 80, get('allowed.test'))")


@pytest.mark.docker
def test_a_container_without_its_link_gets_it_before_it_is_used(
    settings: Settings, make: Make, internet: Internet, docker_host: str
) -> None:
    """As one that was started anew has none."""
    kind = {"engine": "docker", "image": private_engine.DEBIAN, "volumes": ["/usr:/usr:ro"]}
    sandbox = make(kind, NAMES)
    container = private_engine.docker("ps", "-q", "--filter", f"label=atoll.sandbox_id={sandbox.id}")
    private_engine.docker("restart", "-t", "0", container)
    attached = Sandbox.attach(sandbox.id, engine="docker", settings=settings)
    is_as_named(attached, internet)
    attached.detach()


@pytest.mark.docker
def test_docker_refuses_what_it_cannot_enforce(settings: Settings, docker_host: str) -> None:
    """Where the link could not be put in: on another machine, and under a kernel that reads its links at the start."""
    http = Http(endpoint.parse(docker_host))
    known = asyncio.run(facts.learn(http))
    spec = SandboxSpec.of(network=NAMES)
    ContainerLinks(settings, http).check(spec, known)
    under_gvisor = dataclasses.replace(known, default_runtime="runsc")
    elsewhere = dataclasses.replace(known, root_dir="/not/on/this/machine")
    remote = Http(endpoint.parse("tcp://192.0.2.7:2375"))
    for each, found, reason in (
        (http, under_gvisor, "runsc"),
        (http, elsewhere, "not on this machine"),
        (remote, known, "not on this machine"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            ContainerLinks(settings, each).check(spec, found)
        ContainerLinks(settings, each).check(SandboxSpec(), found)


@pytest.mark.parametrize("engine", ["bubblewrap"])
def test_an_engine_that_cannot_enforce_a_policy_refuses_it(settings: Settings, engine: str) -> None:
    for policy in ("all", {}, NAMES):
        with pytest.raises(UnsupportedError, match="cannot enforce network"):
            Sandbox(engine=engine, settings=settings, network=policy).create()

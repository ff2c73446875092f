"""An engine on another machine, as far as we can tell: over TCP with certificates, its processes out of sight."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import AsyncSandbox, SandboxSpec
from atoll.engines.docker.api import endpoint
from atoll.engines.docker.api.endpoint import Endpoint
from atoll.engines.docker.engine import DockerEngine
from atoll.errors import EngineError
from atoll.openmanus import AsyncDockerizedTerminal
from atoll.settings import Settings
from docker import private_engine
from docker.private_engine import BUSYBOX, DEBIAN, docker

pytestmark = pytest.mark.slow


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def make_certificates(folder: Path) -> None:
    """ca.pem, and a pair each for the server and for us."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(folder, "req", "-x509", *key, "-keyout", "ca-key.pem", "-out", "ca.pem", "-subj", "/CN=test", "-days", "2")
    for name, extension in (("server-", "subjectAltName=IP:127.0.0.1"), ("", "extendedKeyUsage=clientAuth")):
        openssl(folder, "req", *key, "-keyout", f"{name}key.pem", "-out", "request", "-subj", f"/CN={name or 'us'}")
        (folder / "extensions").write_text(extension)
        signing = ("-CA", "ca.pem", "-CAkey", "ca-key.pem", "-CAcreateserial", "-days", "2")
        openssl(folder, "x509", "-req", "-in", "request", "-out", f"{name}cert.pem", *signing, "-extfile", "extensions")


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    files = {"tlscacert": "ca.pem", "tlscert": "server-cert.pem", "tlskey": "server-key.pem"}
    words = [f"--{option}={folder / name}" for option, name in files.items()]
    host, engine = private_engine.start_another(" ".join(["--host", f"tcp://127.0.0.1:{port}", "--tlsverify", *words]))
    del host
    yield Endpoint(host="127.0.0.1", port=port, certificates=folder)
    private_engine.stop_another(engine)


async def test_a_sandbox_far_away_works_like_any_other(remote: Endpoint, settings: Settings) -> None:
    engine = DockerEngine(settings, remote)
    async with AsyncSandbox(SandboxSpec(image=DEBIAN), engine=engine) as sandbox:
        assert (await sandbox.exec("echo hi", timeout=20)).stdout == "hi\n"
        await sandbox.write_file("large", b"x" * 5_000_000)
        assert len(await sandbox.read_bytes("large")) == 5_000_000
        assert await sandbox.run_command("cd /tmp; pwd", 20) == "/tmp"
        again = await AsyncSandbox.attach(sandbox.id, engine=DockerEngine(settings, remote))
        assert await again.exec("cat large | wc -c", timeout=20)
        await again.detach()
    await engine.aclose()
    assert await engine.list() == []


async def test_a_terminal_far_away(remote: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"tcp://{remote.host}:{remote.port}")
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(remote.certificates))
    far = ["--tlsverify", *(f"--tls{kind}={remote.certificates}/{kind.replace('cacert', 'ca')}.pem" for kind in ("cacert", "cert", "key"))]  # fmt: skip # noqa: E501
    host = f"tcp://{remote.host}:{remote.port}"
    container = docker(*far, "run", "-d", "--network", "none", BUSYBOX, "sleep", "1000", host_=host)
    async with AsyncDockerizedTerminal(container) as terminal:
        assert await terminal.run_command("x=1; echo $x") == "1"
    assert docker(*far, "exec", container, "sh", "-c", "ls -a / | grep atoll; true", host_=host) == ""


async def test_somebody_without_a_certificate_is_turned_away(remote: Endpoint, settings: Settings) -> None:
    plain = DockerEngine(settings, Endpoint(host=remote.host, port=remote.port))
    with pytest.raises(EngineError, match="HTTPS"):
        await plain.list()


def test_it_is_not_taken_for_local(remote: Endpoint) -> None:
    assert not remote.may_be_local
    assert endpoint.parse("unix:///x").may_be_local

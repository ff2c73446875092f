"""What separates a container and its agent from the machine and from each other."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from atoll.engines.docker.engine import DockerEngine
from atoll.errors import AgentUnreachableError, SpecError, UnsupportedError
from atoll.settings import Settings
from docker.containers import handle_of, new
from docker.private_engine import where


async def test_the_container_is_what_was_planned(engine: DockerEngine) -> None:
    async with new(engine, limits={"memory_bytes": "64m", "cpus": 0.5, "pids": 50}) as sandbox:
        seen = await engine.container(sandbox.id)
        host = seen["HostConfig"]
        assert (host["Memory"], host["MemorySwap"]) == (64 << 20, 64 << 20)
        assert (host["NanoCpus"], host["PidsLimit"]) == (500_000_000, 50)
        assert host["NetworkMode"] == "none"
        assert not host["Privileged"]
        assert [mount["Destination"] for mount in seen["Mounts"]] == ["/.atoll"]
        assert not seen["Mounts"][0]["RW"]
        status = (await sandbox.exec("cat /proc/self/status", timeout=10)).stdout
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert int(fields["CapBnd"], 16) == int(fields["CapEff"], 16) == 0x4FB
        assert (fields["NoNewPrivs"].strip(), fields["Seccomp"].strip()) == ("1", "2")


async def test_the_agent_cannot_be_changed_from_inside(engine: DockerEngine) -> None:
    async with new(engine) as sandbox:
        for command in ("echo x >/.atoll/agent", "rm -f /.atoll/agent", "mount -o remount,rw /.atoll", "mv /.atoll /x"):
            assert not (await sandbox.exec(command, timeout=10)).success, command
        filled = await sandbox.exec("head -c 1000000 /dev/zero >/.atoll/run/big", timeout=10)
        assert not filled.success  # the one writable place there is tiny


async def test_a_socket_of_the_host_is_never_reached_through_a_link(engine: DockerEngine, tmp_path: Path) -> None:
    """Code inside replaces the agent's socket by a link to a socket of the host that we could connect to."""
    path = tmp_path / "victim"
    with socket.socket(socket.AF_UNIX) as victim:
        victim.bind(str(path))
        victim.listen()
        victim.setblocking(False)
        async with new(engine) as sandbox:
            script = f"rm /.atoll/run/socket; ln -s /proc/1/root{path} /.atoll/run/socket; ls -l /.atoll/run"
            assert (await sandbox.exec(script, timeout=10)).success
            handle = await handle_of(engine, sandbox)
            with pytest.raises(AgentUnreachableError):
                await engine.connect(handle)
        with pytest.raises(BlockingIOError):
            victim.accept()


async def test_nobody_inside_takes_the_agents_place(engine: DockerEngine) -> None:
    async with new(engine) as sandbox:
        code = (
            "import socket, os, time; p = '/.atoll/run/socket'; os.unlink(p); s = socket.socket(socket.AF_UNIX);"
            "s.bind(p); s.listen(); print('up', flush=True); time.sleep(1000)"
        )
        impostor = await sandbox.start(["python3", "-c", code])
        async for piece in impostor:
            assert piece.text.startswith("up")
            break
        with pytest.raises(AgentUnreachableError, match="taken the place"):
            await engine.connect(await handle_of(engine, sandbox))


async def test_no_set_id_program_gets_onto_a_writable_volume(engine: DockerEngine, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "in").mkdir()
    (tmp_path / "in").chmod(0o777)
    attempts = (
        "cp /bin/cat /in/cat; chmod 4755 /in/cat; chmod 2755 /in/cat; chmod u+s /tmp/own; cp -p /in/cat /in/copy;"
        " touch /tmp/own && chmod 755 /tmp/own && chmod 644 /in/cat && stat -c %a /in/cat"
    )
    async with new(engine, volumes=[{"host": str(tmp_path / "in"), "path": "/in"}]) as sandbox:
        result = await sandbox.exec(attempts, timeout=20)
        assert result.stdout == "644\n", result
        assert "not permitted" in result.stderr
        with pytest.raises(PermissionError):
            await sandbox.write_file("/in/written", "x", mode=0o4755)
    modes = [path.stat().st_mode & 0o7000 for path in (tmp_path / "in").iterdir()]
    assert modes
    assert not any(modes)
    async with new(engine, volumes=[{"host": str(tmp_path / "in"), "path": "/in", "read_only": True}]) as sandbox:
        result = await sandbox.exec("touch /tmp/own && chmod 4755 /tmp/own && stat -c %a /tmp/own", timeout=20)
        assert result.stdout == "4755\n", "without a writable volume it is allowed"


async def test_volumes_that_give_the_machine_away_are_refused(engine: DockerEngine, settings: Settings) -> None:
    engine_socket = where().path
    for path in (engine_socket, str(Path(engine_socket).parent), "/", str(settings.data_dir)):
        with pytest.raises(SpecError, match="would show"):
            await new(engine, volumes=[{"host": path, "path": "/in"}]).create()


async def test_isolation_that_the_engine_lacks_is_refused(engine: DockerEngine) -> None:
    for isolation in ("gvisor", "vm"):
        with pytest.raises(UnsupportedError, match=isolation):
            await new(engine, isolation=isolation).create()

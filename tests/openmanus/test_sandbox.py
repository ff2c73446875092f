"""How OpenManus's own programs use a sandbox, and every defect of theirs that is not to come back."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from atoll.compat.openmanus.policy import ALLOW, Verdict
from atoll.errors import (
    ImageNotFoundError,
    SandboxError,
    SandboxGoneError,
    SandboxResourceError,
    SandboxTimeoutError,
    UnsupportedError,
)
from atoll.openmanus import DockerSandbox, OperationError, SandboxSettings, ask, refuse
from docker.private_engine import BUSYBOX, docker

Config = SandboxSettings


# --- commands: what they print is what is returned --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo 42", "42"),
        ("seq 1 5", "1\n2\n3\n4\n5"),
        ("printf 'a\\nb\\n' > f; wc -l < f", "2"),
        ("python3 -c 'print(1+1)'", "2"),
        ("false", ""),
        ("mkdir -p x", ""),
        ("printf 'no newline'", "no newline"),
        ("printf 'a\\n\\n\\nb\\n'", "a\n\n\nb"),
        ("printf 'a\\rb\\r\\n'", "a\rb\r"),
        ("echo 'price: 5$ '; echo next", "price: 5$ \nnext"),
        ("printf '$ '", "$ "),
        ("echo one\necho two", "one\ntwo"),
        ("if true; then\n  echo yes\nfi", "yes"),
        ("echo 'echo $?'", "echo $?"),
        ("printf '\\377\\n'", "\ufffd"),
        ("rm -rf /workspace/build; echo mkfs", "mkfs"),
    ],
)
async def test_the_answer_is_what_the_command_wrote(sandbox: DockerSandbox, command: str, expected: str) -> None:
    assert await sandbox.run_command(command) == expected


async def test_exit_codes_and_both_streams_can_be_had(sandbox: DockerSandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert await sandbox.run_command("false; echo $?") == "1"


async def test_the_shell_remembers(sandbox: DockerSandbox) -> None:
    await sandbox.run_command("cd /tmp; export A=b; f() { echo from f; }")
    assert await sandbox.run_command("pwd; echo $A; f") == "/tmp\nb\nfrom f"
    await sandbox.run_command("cd /workspace")


async def test_a_timeout_kills_the_command_and_leaves_the_session_in_step(sandbox: DockerSandbox) -> None:
    with pytest.raises(SandboxTimeoutError, match=r"timed out after 0\.5 seconds") as caught:
        await sandbox.run_command("echo early; sleep 2717; echo LATE", timeout=0.5)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.output == "early\n"
    assert await sandbox.run_command("echo next") == "next"
    assert "2717" not in await sandbox.run_command("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -v grep")


async def test_no_time_at_all_is_not_the_default_time(sandbox: DockerSandbox) -> None:
    with pytest.raises(ValueError, match="timeout"):
        await sandbox.run_command("true", timeout=0)


async def test_concurrent_commands_and_files_do_not_mix(sandbox: DockerSandbox) -> None:
    commands = [sandbox.run_command(f"sleep 0.05; echo {number}") for number in range(6)]
    files = [sandbox.write_file(f"deep/{number}/file", str(number)) for number in range(6)]
    answers = await asyncio.gather(*commands, *files)
    assert answers[:6] == [str(number) for number in range(6)]
    assert await sandbox.run_command("cat deep/*/file") == "012345"


async def test_exit_does_not_end_the_sandbox(sandbox: DockerSandbox) -> None:
    await sandbox.run_command("exit 7")
    assert await sandbox.run_command("echo still here") == "still here"


async def test_the_event_loop_is_never_held_up(sandbox: DockerSandbox) -> None:
    longest, last = 0.0, time.monotonic()

    async def tick() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    ticking = asyncio.create_task(tick())
    await sandbox.run_command("sleep 0.5")
    async with DockerSandbox(sandbox.config):
        pass
    ticking.cancel()
    assert longest < 5  # theirs stood still for as long as the command took, or for ever


async def test_a_terminal_is_there_too(sandbox: DockerSandbox) -> None:
    assert sandbox.terminal is not None
    assert await sandbox.terminal.run_command("echo $((6 * 7))") == "42"
    assert sandbox.container is not None
    assert (
        docker("inspect", "-f", "{{.Name}} {{.State.Status}}", sandbox.container.id)
        == f"/{sandbox.container.name} running"
    )
    assert sandbox.container.status == "running"


# --- walls ------------------------------------------------------------------------------------------------------------


async def test_commands_have_few_rights(sandbox: DockerSandbox) -> None:
    text = await sandbox.run_command("grep CapEff /proc/self/status")
    assert int(text.split()[1], 16) == 0x4FB
    assert not (await sandbox.exec("mount -t tmpfs x /mnt")).success


async def test_processes_memory_and_network_are_bounded(sandbox: DockerSandbox) -> None:
    seen = await sandbox.client.container(sandbox.sandbox.id)
    host = seen["HostConfig"]
    assert (host["PidsLimit"], host["MemorySwap"], host["NetworkMode"]) == (1024, 256 << 20, "none")
    assert (await sandbox.run_command("cat /proc/net/dev | grep -c :")).strip() == "1"


async def test_a_memory_limit_as_the_cause_is_told(config: Config) -> None:
    async with DockerSandbox(config.model_copy(update={"memory_limit": "64m"})) as sandbox:
        with pytest.raises(SandboxResourceError, match="64m"):
            await sandbox.run_command("python3 -c 'bytearray(400 << 20)'")
        assert await sandbox.run_command("echo on") == "on"
        with pytest.raises(SandboxResourceError):
            await sandbox.exec(["python3", "-c", "bytearray(400 << 20)"])


async def test_a_killed_command_without_a_limit_as_the_cause_is_a_result(sandbox: DockerSandbox) -> None:
    assert await sandbox.run_command("sh -c 'kill -9 $$'; echo $?") == "137"


async def test_volumes_can_be_read_only(config: Config, tmp_path: Path) -> None:
    (tmp_path / "rw").mkdir()
    if os.geteuid() == 0:
        os.chown(tmp_path / "rw", 4321, 4321)
    (tmp_path / "ro").mkdir()
    (tmp_path / "ro" / "file").write_text("given")
    bindings = {str(tmp_path / "rw"): "/data", str(tmp_path / "ro"): "/given:ro"}
    async with DockerSandbox(config, bindings) as sandbox:
        await sandbox.write_file("/data/made", "inside")
        assert await sandbox.read_file("/given/file") == "given"
        assert not (await sandbox.exec("echo x >/given/file")).success
    assert (tmp_path / "rw" / "made").read_text() == "inside"


# --- files ------------------------------------------------------------------------------------------------------------


async def test_files_are_written_and_read(sandbox: DockerSandbox) -> None:
    await sandbox.write_file("some dir/it's; a $(file).txt", "häß\n")
    assert await sandbox.read_file("some dir/it's; a $(file).txt") == "häß\n"
    assert await sandbox.read_file("/workspace/some dir/it's; a $(file).txt") == "häß\n"
    stat = await sandbox.sandbox.stat("some dir/it's; a $(file).txt")
    assert abs(stat.mtime_s - time.time()) < 3600


async def test_what_is_missing_is_a_file_not_found(sandbox: DockerSandbox, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"File not found: nope\.txt"):
        await sandbox.read_file("nope.txt")
    with pytest.raises(FileNotFoundError, match="not found"):
        await sandbox.copy_from("nope.txt", tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="not found"):
        await sandbox.copy_to(tmp_path / "nope.txt", "x")
    assert not (tmp_path / "x").exists()


async def test_paths_that_lead_out_are_refused(sandbox: DockerSandbox) -> None:
    for attempt in (sandbox.read_file("../etc/passwd"), sandbox.write_file("a/../../x", "")):
        with pytest.raises(ValueError, match="potentially unsafe"):
            await attempt


async def test_other_failures_are_runtime_errors_with_their_cause(sandbox: DockerSandbox) -> None:
    with pytest.raises(RuntimeError, match="Failed to read file: ") as caught:
        await sandbox.read_file("/etc")
    assert isinstance(caught.value, SandboxError)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(RuntimeError, match="Failed to write file: "):
        await sandbox.write_file("/proc/version", "x")
    await sandbox.exec("printf '\\377' >binary")
    with pytest.raises(RuntimeError, match="Failed to read file: "):
        await sandbox.read_file("binary")


async def test_a_file_and_a_directory_go_in_and_out(sandbox: DockerSandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "script").write_text("#!/bin/sh\necho ran\n")
    (source / "script").chmod(0o755)
    await sandbox.copy_to(source, "/workspace/tree/")
    assert await sandbox.run_command("tree/script; ls -d tree/empty") == "ran\ntree/empty"
    (tmp_path / "out").mkdir()
    await sandbox.copy_from("tree", tmp_path / "out")  # into a directory that exists
    assert os.access(tmp_path / "out" / "tree" / "script", os.X_OK)
    await sandbox.copy_from("tree/script", tmp_path / "new" / "parents" / "script")
    assert (tmp_path / "new" / "parents" / "script").read_text().startswith("#!")


async def test_a_copy_that_fails_says_so(sandbox: DockerSandbox, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in ("/proc/version", "/.atoll/x; true"):
        with pytest.raises(RuntimeError, match="Failed to copy file: "):
            await sandbox.copy_to(tmp_path / "file", path)
    await sandbox.copy_to(tmp_path / "file", "a b; touch injected/$(x)")
    assert await sandbox.read_file("a b; touch injected/$(x)") == "x"


async def test_bytes_can_be_written_and_a_mode_is_kept(sandbox: DockerSandbox) -> None:
    await sandbox.write_file("data.bin", bytes(range(256)))
    assert await sandbox.sandbox.read_bytes("data.bin") == bytes(range(256))
    await sandbox.run_command("printf '#!/bin/sh\\necho old\\n' >tool; chmod 750 tool")
    await sandbox.write_file("tool", "#!/bin/sh\necho new\n")
    assert await sandbox.run_command("./tool; stat -c %a tool") == "new\n750"


async def test_links_made_inside_lead_to_what_is_inside(sandbox: DockerSandbox) -> None:
    """A path is resolved in the sandbox: whatever a link says, it never reads a file of the host."""
    await sandbox.run_command("ln -sf /etc/hostname host-name")
    assert (await sandbox.read_file("host-name")).strip() == "sandbox"


async def test_links_made_inside_do_not_lead_out(sandbox: DockerSandbox, tmp_path: Path) -> None:
    await sandbox.run_command(f"mkdir evil; ln -s {tmp_path} evil/out; ln -s /etc/shadow evil/shadow")
    await sandbox.copy_from("evil", tmp_path / "copy")
    assert (tmp_path / "copy" / "shadow").is_symlink()


async def test_a_large_file_is_streamed(sandbox: DockerSandbox, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(os.urandom(1 << 20) * 48)
    await sandbox.copy_to(tmp_path / "large", "large")
    await sandbox.copy_from("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "large").read_bytes()
    await sandbox.exec("rm large")


# --- life -------------------------------------------------------------------------------------------------------------


async def test_before_create_and_after_cleanup_it_says_so(config: Config, tmp_path: Path) -> None:
    sandbox = DockerSandbox(config)
    for _ in range(2):
        assert sandbox.container is None
        assert sandbox.terminal is None
        for attempt in (
            sandbox.run_command("true"),
            sandbox.read_file("x"),
            sandbox.write_file("x", ""),
            sandbox.copy_to(tmp_path, "x"),
            sandbox.copy_from("x", tmp_path / "x"),
        ):
            with pytest.raises(RuntimeError, match="Sandbox not initialized"):
                await attempt
        await sandbox.cleanup()
        async with sandbox:
            assert await sandbox.run_command("echo hi") == "hi"


async def test_a_failed_create_is_told_as_before_and_leaves_nothing(config: Config) -> None:
    sandbox = DockerSandbox(config.model_copy(update={"image": "127.0.0.1:1/no:such"}))
    before = await sandbox.client.list()
    with pytest.raises(RuntimeError, match=r"^Failed to create sandbox: ") as caught:
        await sandbox.create()
    assert isinstance(caught.value.__cause__, ImageNotFoundError)
    assert await sandbox.client.list() == before
    assert sandbox.container is None


async def test_creating_twice_keeps_the_first(config: Config) -> None:
    async with DockerSandbox(config) as sandbox:
        with pytest.raises(RuntimeError, match="already created"):
            await sandbox.create()
        assert await sandbox.run_command("echo hi") == "hi"


async def test_cleanup_is_quick_and_leaves_nothing_on_the_host(config: Config) -> None:
    before = set(Path("/tmp").glob("sandbox_*"))
    sandbox = await DockerSandbox(config).create()
    await sandbox.run_command("trap '' TERM; sleep 1000 &")
    assert sandbox.container is not None
    name = sandbox.container.name
    await sandbox.cleanup()
    await sandbox.cleanup()
    assert name not in docker("ps", "-a", "--format", "{{.Names}}")
    assert set(Path("/tmp").glob("sandbox_*")) == before


async def test_a_container_killed_from_outside_is_told(config: Config) -> None:
    sandbox = await DockerSandbox(config).create()
    assert sandbox.container is not None
    waiting = asyncio.create_task(sandbox.run_command("sleep 100"))
    await sandbox.exec(["true"])
    docker("kill", sandbox.container.id)
    async with asyncio.timeout(30):
        with pytest.raises(OperationError, match="Failed to execute command: ") as caught:
            await waiting
        assert isinstance(caught.value.__cause__, SandboxGoneError)
        with pytest.raises(RuntimeError):
            await sandbox.read_file("x")
        await sandbox.cleanup()


async def test_an_orphan_of_a_dead_process_is_found_by_its_labels(config: Config) -> None:
    sandbox = await DockerSandbox(config).create()
    again = DockerSandbox(config)
    handles = [handle for handle in await again.client.list() if handle.sandbox_id == sandbox.sandbox.id]
    assert len(handles) == 1
    await again.client.delete(handles[0])
    await sandbox.cleanup()


async def test_a_failed_cleanup_is_not_hidden(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await DockerSandbox(config).create()
    real = sandbox.client.delete

    async def refuse_to_delete(handle: object) -> None:
        raise SandboxError("it is stuck")

    # A real engine that cannot remove a container cannot be arranged without harming the machine.
    monkeypatch.setattr(sandbox.client, "delete", refuse_to_delete)
    with pytest.raises(RuntimeError, match="Failed to clean up sandbox: it is stuck"):
        await sandbox.cleanup()
    assert sandbox.container is not None
    monkeypatch.setattr(sandbox.client, "delete", real)
    await sandbox.cleanup()


async def test_many_at_once(config: Config) -> None:
    async def use(number: int) -> str:
        async with DockerSandbox(config) as sandbox:
            return await sandbox.run_command(f"echo {number}")

    assert await asyncio.gather(*(use(number) for number in range(4))) == ["0", "1", "2", "3"]


async def test_an_image_without_bash_works(config: Config) -> None:
    async with DockerSandbox(config.model_copy(update={"image": BUSYBOX})) as sandbox:
        async with asyncio.timeout(30):
            assert await sandbox.run_command("x=1; echo $x; false; echo $?") == "1\n1"


async def test_a_network_that_cannot_be_had_is_refused_and_not_ignored(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.network.client.problem", lambda: "there is no nftables")
    with pytest.raises(RuntimeError, match="cannot enforce network") as caught:
        await DockerSandbox(config.model_copy(update={"network_enabled": True})).create()
    assert isinstance(caught.value.__cause__, UnsupportedError)


# --- policy -----------------------------------------------------------------------------------------------------------


async def test_a_policy_allows_refuses_or_asks(config: Config) -> None:
    asked: list[str] = []

    async def policy(command: str) -> Verdict:
        if "forbidden" in command:
            return refuse("not here")
        return ask("really?") if "costly" in command else ALLOW

    def asker(command: str, question: str) -> bool:
        asked.append(f"{command}: {question}")
        return "please" in command

    async with DockerSandbox(config, policy=policy, asker=asker) as sandbox:
        assert await sandbox.run_command("echo fine") == "fine"
        assert await sandbox.run_command("echo costly please") == "costly please"
        for command in ("echo forbidden", "echo costly"):
            with pytest.raises(RuntimeError, match="Command refused: "):
                await sandbox.run_command(command)
            with pytest.raises(RuntimeError, match="Command refused: "):
                await sandbox.exec(["echo", command])
        assert asked[0] == "echo costly please: really?"

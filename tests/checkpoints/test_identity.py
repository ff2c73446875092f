"""What is never in a saved state, and what is never the same in two sandboxes that came from one."""

from __future__ import annotations

import gzip
import os
import secrets
import stat
import time
from pathlib import Path

import pytest

from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.states.identity import freshen
from atoll.sandbox.sandbox import AsyncSandbox
from checkpoints.conftest import MakeSandbox
from checkpoints.test_memory import gvisor
from needs import needs

__all__ = ["gvisor"]
MACHINE_ID = "0123456789abcdef0123456789abcdef\n"


def found_in(engine: LinuxEngine, text: bytes) -> list[str]:
    """The files of all saved states, and what is written about them, that hold it."""
    layers = engine.layout.layers
    found = []
    for saved_id in layers.list_saved():
        with layers.looking(saved_id, saved=True) as path:
            found += [each for each in _files(path) if text in each.read_bytes() or text in os.fsencode(each)]
    found += [each for each in _files(engine.layout.data / "saved") if text in each.read_bytes()]
    return [each.name for each in found]


def _files(path: Path) -> list[Path]:
    return [each for each in path.rglob("*") if not each.is_symlink() and each.is_file()]


def unpacked(file: Path) -> bytes:
    head, _, rest = file.read_bytes().partition(b"\n")
    return head + gzip.decompress(rest[:-65])


async def test_secrets_of_the_environment_are_not_in_a_snapshot(
    engine: LinuxEngine, sandbox_on: MakeSandbox, tmp_path: Path
) -> None:
    of_sandbox, of_command = secrets.token_hex(16), secrets.token_hex(16)
    async with sandbox_on(engine, env={"TOKEN": of_sandbox}) as sandbox:
        used = 'test -n "$TOKEN$OTHER" && echo used >file'
        assert (await sandbox.exec(used, env={"OTHER": of_command})).success
        await sandbox.run_command(f"export OTHER={of_command}; {used}")
        await sandbox.checkpoint("point")
        await sandbox.snapshot("mine")
        await engine.export_snapshot("mine", tmp_path / "mine")
        for secret in (of_sandbox, of_command):
            assert found_in(engine, secret.encode()) == []
            assert secret.encode() not in unpacked(tmp_path / "mine")
        # What a program writes to a file is in it: so these looks would find a secret.
        await sandbox.exec("echo $TOKEN >leak")
        await sandbox.snapshot("leaky")
        await engine.export_snapshot("leaky", tmp_path / "leaky")
        assert found_in(engine, of_sandbox.encode()) == ["leak"]
        assert of_sandbox.encode() in unpacked(tmp_path / "leaky")
    async with sandbox_on(engine, image="snapshot:mine") as other:
        assert (await other.exec("env")).stdout.count(of_sandbox) == 0


async def identity_of(sandbox: AsyncSandbox) -> tuple[str, str]:
    look = "cat /etc/machine-id; ls /etc/ssh /var/lib/systemd; head -c 16 /dev/urandom | od -An -tx1"
    seen = await sandbox.exec(look)
    *rest, random = seen.stdout.splitlines()
    return "\n".join(rest), random


async def test_each_that_comes_from_a_state_is_somebody_else(engine: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    make = "mkdir -p /etc/ssh /var/lib/systemd; echo key >/etc/ssh/ssh_host_ed25519_key; echo ok >/etc/ssh/sshd_config;"
    async with sandbox_on(engine) as sandbox:
        await sandbox.exec(make + f"printf '{MACHINE_ID}' >/etc/machine-id; echo x >/var/lib/systemd/random-seed")
        await sandbox.checkpoint("point")
        await sandbox.snapshot("mine")
        forks = await sandbox.fork(2)
        try:
            async with sandbox_on(engine, image="snapshot:mine") as restored:
                seen = [await identity_of(each) for each in (sandbox, *forks, restored)]
                assert len({machine for machine, _ in seen}) == 4
                assert len({random for _, random in seen}) == 4
                for machine, _ in seen[1:]:
                    assert machine.split("\n")[1:] == ["/etc/ssh:", "sshd_config", "", "/var/lib/systemd:"]
            await forks[0].restart()
            assert (await identity_of(forks[0]))[0] == seen[1][0]
        finally:
            for fork in forks:
                await fork.cleanup()
        # Going back it stays who it is, but for the seed, which must not be used twice.
        await sandbox.rollback("point")
        machine, random = await identity_of(sandbox)
        assert machine.startswith(MACHINE_ID)
        assert "ssh_host_ed25519_key" in machine
        assert "random-seed" not in machine
        assert random != seen[0][1]


@pytest.mark.timeout(120)
async def test_the_clock_goes_on_while_a_memory_is_saved(gvisor: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(gvisor) as sandbox:
        taken = time.time()
        await sandbox.checkpoint("here", memory=True)
        await sandbox.exec("sleep 1.5")
        await sandbox.rollback("here")
        (fork,) = await sandbox.fork(1, "here")
        try:
            for each in (sandbox, fork):
                before = time.time()
                inside = float((await each.exec("date +%s.%N")).stdout)
                assert before - taken > 1.5
                assert before - 0.5 <= inside <= time.time() + 0.5
        finally:
            await fork.cleanup()


@needs("root")
def test_what_comes_from_the_image_is_changed_too(tmp_path: Path) -> None:
    below, layer = tmp_path / "below", tmp_path / "layer"
    for path in ("etc/machine-id", "etc/ssh/ssh_host_rsa_key", "etc/ssh/moduli", "var/lib/systemd/random-seed"):
        (below / path).parent.mkdir(parents=True, exist_ok=True)
        (below / path).write_text(MACHINE_ID)
    (below / "etc/ssh").chmod(0o711)
    layer.mkdir()
    freshen(layer, [below], "one", own=False)
    assert (layer / "etc/machine-id").read_text() not in ("", MACHINE_ID)
    for path in ("etc/ssh/ssh_host_rsa_key", "var/lib/systemd/random-seed"):
        info = (layer / path).lstat()
        assert stat.S_ISCHR(info.st_mode)
        assert info.st_rdev == 0
    assert stat.S_IMODE((layer / "etc/ssh").lstat().st_mode) == 0o711
    assert not (layer / "etc/ssh/moduli").exists()
    freshen(layer, [below], "two", own=False)
    assert (below / "etc/machine-id").read_text() == MACHINE_ID


@needs("root")
@pytest.mark.parametrize("value", [b"n", b"x", b""])
def test_a_directory_that_only_looks_opaque_hides_nothing_of_the_image(tmp_path: Path, value: bytes) -> None:
    below, layer = tmp_path / "below", tmp_path / "layer"
    for root in (below, layer):
        (root / "etc").mkdir(parents=True)
    (below / "etc/machine-id").write_text(MACHINE_ID)
    os.setxattr(layer / "etc", "user.overlay.opaque", value)
    freshen(layer, [below], "one", own=False)
    assert (layer / "etc/machine-id").read_text() not in ("", MACHINE_ID)


@needs("root")
def test_a_hostile_layer_leads_nowhere(tmp_path: Path) -> None:
    below, outside = tmp_path / "below", tmp_path / "outside"
    for folder in (below, outside):
        (folder / "etc").mkdir(parents=True)
        (folder / "etc/machine-id").write_text(MACHINE_ID)
    for kind in ("link", "file", "whiteout", "inner link", "opaque"):
        layer = tmp_path / kind
        etc = layer / "etc"
        layer.mkdir()
        if kind == "link":
            etc.symlink_to(outside / "etc")
        elif kind == "file":
            etc.write_text("a file")
        elif kind == "whiteout":
            os.mknod(etc, stat.S_IFCHR, 0)
        else:
            etc.mkdir()
            if kind == "opaque":
                os.setxattr(etc, "user.overlay.opaque", b"y")
            else:
                (etc / "machine-id").symlink_to(outside / "etc/machine-id")
        before = sorted(str(path) for path in layer.rglob("*"))
        freshen(layer, [below], "one", own=False)
        assert sorted(str(path) for path in layer.rglob("*")) == before
        assert (outside / "etc/machine-id").read_text() == MACHINE_ID


@needs("root")
def test_of_an_image_with_layers_what_a_process_sees_counts(tmp_path: Path) -> None:
    lowest, upper, layer = tmp_path / "lowest", tmp_path / "upper", tmp_path / "layer"
    for path in ("etc/machine-id", "etc/ssh/ssh_host_rsa_key", "etc/ssh/ssh_host_dsa_key", "var/lib/dbus/machine-id"):
        (lowest / path).parent.mkdir(parents=True, exist_ok=True)
        (lowest / path).write_text(MACHINE_ID)
    (upper / "etc/ssh").mkdir(parents=True)
    os.mknod(upper / "etc/ssh/ssh_host_dsa_key", stat.S_IFCHR, 0)  # the upper layer removes it
    (upper / "var/lib/dbus").mkdir(parents=True)
    os.setxattr(upper / "var/lib/dbus", "user.overlay.opaque", b"y")
    layer.mkdir()
    freshen(layer, [upper, lowest], "one", own=False)
    assert (layer / "etc/machine-id").read_text() not in ("", MACHINE_ID)
    assert stat.S_ISCHR((layer / "etc/ssh/ssh_host_rsa_key").lstat().st_mode)
    assert not os.path.lexists(layer / "etc/ssh/ssh_host_dsa_key")
    assert not os.path.lexists(layer / "var/lib/dbus/machine-id")

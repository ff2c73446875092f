"""A real `docker build`, to compare ours with: Debian 13's Docker engine and buildx in a root of their own.

The root is made once by mmdebstrap and kept outside of the clone, in `$ATOLL_TEST_CACHE` or `~/.cache/atoll-tests`. The
engine runs with mount and process namespaces of its own, over a copy of the root in memory, and keeps its data in a
temporary directory, so that nothing is left when it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builds import trees
from builds.corpus import ARCHIVES, Case

SUITE = "trixie"
PACKAGES = ("docker.io", "docker-cli", "docker-buildx", "iptables", "ca-certificates", "xz-utils")
_SCRIPT = Path(__file__).parents[2] / "scripts" / "test-docker"
_START_S = 60
_BUILD_S = 300
_SHARED = "/shared"
_SET_UP = """
set -e
mount -t tmpfs tmpfs "$DATA/memory"
mkdir "$DATA/memory/upper" "$DATA/memory/work"
mount -t overlay -o "lowerdir=$ROOT,upperdir=$DATA/memory/upper,workdir=$DATA/memory/work" overlay "$DATA/root"
cd "$DATA/root"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs tmpfs run
mkdir shared
mount --bind "$DATA/shared" shared
exec chroot . dockerd --data-root /shared/data --exec-root /shared/exec --pidfile /run/docker.pid \
    --host unix:///shared/docker.sock --cgroup-parent "$GROUP" \
    --bridge none --iptables=false --ip6tables=false --ip-masq=false
"""


class ReferenceError(Exception):
    """The engine cannot be prepared or started, or a build of it failed."""


@dataclass(frozen=True)
class Built:
    tree: trees.Tree
    config: dict[str, Any]


def cache() -> Path:
    return Path(os.environ.get("ATOLL_TEST_CACHE") or Path.home() / ".cache" / "atoll-tests")


def prepared_root() -> Path:
    """Return the root with the engine. The first call makes it, which takes a minute."""
    key = hashlib.sha256(json.dumps([SUITE, PACKAGES]).encode()).hexdigest()[:12]
    root = cache() / f"docker-{key}"
    cache().mkdir(parents=True, exist_ok=True)
    with open(cache() / f"docker-{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            with tempfile.TemporaryDirectory(dir=cache(), prefix="draft-") as draft:
                made = Path(draft) / "root"
                command = [
                    "mmdebstrap",
                    "--quiet",
                    "--variant=apt",
                    f"--include={','.join(PACKAGES)}",
                    SUITE,
                    str(made),
                ]
                _run(command)
                made.rename(root)
    return root


def _run(command: Sequence[str], *, timeout_s: float = 900, **options: Any) -> bytes:
    done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False, **options)
    if done.returncode:
        raise ReferenceError(f"{' '.join(command[:3])} failed: {done.stderr.decode(errors='replace')[-2000:]}")
    return bytes(done.stdout)


@contextlib.contextmanager
def docker() -> Iterator[Reference]:
    """Run the engine. It ends with this block, or with this process."""
    root = prepared_root()
    images = Path(os.environ.get("ATOLL_TEST_IMAGES") or "/var/tmp/atoll-test-images")
    _run([str(_SCRIPT), "images", str(images)])
    with tempfile.TemporaryDirectory(prefix="atoll-reference-") as folder:
        data = Path(folder)
        for name in ("memory", "root", "shared"):
            (data / name).mkdir()
        group = f"/atoll-reference-{os.getpid()}"
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child=KILL"]
        environment = {"PATH": os.environ["PATH"], "ROOT": str(root), "DATA": str(data), "GROUP": group}
        with open(data / "log", "wb") as log:
            engine = subprocess.Popen(
                [*command, "sh", "-c", _SET_UP], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        try:
            reference = Reference(_child(engine, data / "log"), data)
            reference.wait(engine)
            for image, name in ARCHIVES.items():
                shutil.copyfile(images / name, data / "shared" / name)
                reference.run("docker", "import", f"{_SHARED}/{name}", image)
            yield reference
        finally:
            _end(engine)
            _remove_groups(group)


def _child(engine: subprocess.Popen[bytes], log: Path) -> int:
    """Return the process id of the first process of the new namespaces."""
    until = time.monotonic() + _START_S
    while time.monotonic() < until and engine.poll() is None:
        children = Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.01)
    raise ReferenceError(f"unshare does not start: {log.read_text()[-500:]}")


def _end(engine: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError, IndexError):
        first = int(Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()[0])
        os.kill(first, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine.wait(20)
    engine.kill()
    engine.wait()


def _remove_groups(group: str) -> None:
    """Remove the control groups that the engine made. They are empty now."""
    for top in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()):
        parent = top / group.strip("/")
        if parent.is_dir():
            for path in sorted((each for each in parent.rglob("*") if each.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    path.rmdir()
            with contextlib.suppress(OSError):
                parent.rmdir()


@dataclass(frozen=True)
class Reference:
    """The running engine."""

    pid: int
    data: Path

    def run(self, *command: str, timeout_s: float = _BUILD_S, variables: Mapping[str, str] | None = None) -> bytes:
        """Run a program in the root of the engine, which has its client."""
        given = {"DOCKER_HOST": f"unix://{_SHARED}/docker.sock", "HOME": "/root", **(variables or {})}
        settings = [f"{name}={value}" for name, value in given.items()]
        enter = [
            "nsenter",
            f"--target={self.pid}",
            "--mount",
            "--pid",
            "chroot",
            str(self.data / "root"),
            "env",
            *settings,
        ]
        return _run([*enter, *command], timeout_s=timeout_s)

    def wait(self, engine: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + _START_S
        while engine.poll() is None and time.monotonic() < until:
            with contextlib.suppress(ReferenceError):
                self.run("docker", "version")
                return
            time.sleep(0.1)
        raise ReferenceError(f"dockerd does not start: {(self.data / 'log').read_text()[-1000:]}")

    def build(self, case: Case) -> Built:
        """Build a case of the corpus and return what came out."""
        context = self.data / "shared" / "contexts" / case.name
        context.mkdir(parents=True)
        case.make_context(context)
        inside = f"{_SHARED}/contexts/{case.name}"
        image = f"built-{case.name}"
        command = [
            "docker",
            "build",
            "--network=none",
            "--progress=plain",
            f"--tag={image}",
            f"--file={inside}/{case.file}",
        ]
        command += [f"--build-arg={name}={value}" for name, value in case.args.items()]
        if case.target:
            command.append(f"--target={case.target}")
        for name, value in case.secrets.items():
            (self.data / "shared" / name).write_text(value)
            command.append(f"--secret=id={name},src={_SHARED}/{name}")
        try:
            self.run(*command, inside)
            return Built(self.tree(image), self.config(image))
        finally:
            shutil.rmtree(context)

    def tree(self, image: str) -> trees.Tree:
        container = self.run("docker", "create", "--network=none", image, "never-run").decode().strip()
        exported = self.data / "shared" / f"{container}.tar"
        try:
            self.run("docker", "export", f"--output={_SHARED}/{exported.name}", container)
            with tarfile.open(exported) as archive:
                return trees.of_tar(archive)
        finally:
            exported.unlink(missing_ok=True)
            self.run("docker", "rm", container)

    def config(self, image: str) -> dict[str, Any]:
        [inspected] = json.loads(self.run("docker", "image", "inspect", image))
        return normal_config(inspected["Config"])


_COMPARED = (
    "Env", "User", "WorkingDir", "Entrypoint", "Cmd", "Labels", "ExposedPorts", "Volumes", "StopSignal", "Shell",
    "Healthcheck",
)  # fmt: skip


def normal_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that are compared, without empty ones. The order of variables has no meaning."""
    found = {name: config[name] for name in _COMPARED if config.get(name)}
    if "Env" in found:
        found["Env"] = sorted(found["Env"])
    return found

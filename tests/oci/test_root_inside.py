"""Root inside works as people expect: package managers, users, compilers, version control, databases."""

from __future__ import annotations

import asyncio
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atoll.engines.linux.oci_engine import OciEngine
from atoll.images import Recipe
from atoll.model import SandboxSpec
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from needs import need
from oci.benches import EACH_RUNTIME, RUNTIMES
from oci.conftest import NeedRuntime, empty

POOL = """
import multiprocessing
from multiprocessing import shared_memory
def square(n): return n * n
if __name__ == "__main__":
    with multiprocessing.Pool(4) as pool: print(sum(pool.map(square, range(100))))
    queue = multiprocessing.Queue(); queue.put(1); print(queue.get())
    memory = shared_memory.SharedMemory(create=True, size=1000); memory.close(); memory.unlink()
"""
ANYWHERE = {
    "chown": "touch f; chown 1000:1000 f; chmod 4755 f; chgrp 33 f; stat -c '%u %g' f | grep '1000 33'",
    "su": "su user -s /bin/sh -c 'id -u; touch ~/mine && ls -l ~/mine' | head -1 | grep 1000",
    "gcc": "printf 'int main(void){return 42;}' >a.c; gcc a.c; ./a.out; test $? = 42",
    "git": "git init -q r && cd r && git config user.email a@b && git config user.name a && echo 1 >a && git add a"
    " && git commit -qm first && git clone -q . ../copy && git -C ../copy log --oneline | grep first",
    "multiprocessing": "python3 pool.py | tr '\\n' ' ' | grep '328350 1'",
    "sqlite": "python3 -c \"import sqlite3; d = sqlite3.connect('d'); d.execute('pragma journal_mode=wal');"
    " d.execute('create table t(a)'); d.execute('insert into t values (7)'); d.commit();"
    " print(d.execute('select a from t').fetchall())\" | grep 7",
    "pip": "python3 -m venv --without-pip v && python3 -m pip --python v/bin/python install -q --no-index"
    " /packages/*.whl && v/bin/python -c 'import tiny'",
    "ping": "command -v ping || exit 0; ping -c 1 -W 2 127.0.0.1",
    "port 80": "python3 -c \"import socket; s = socket.socket(); s.bind(('127.0.0.1', 80)); s.listen()\"",
}
DEBIAN = {
    "apt-get install ./file": "cp /packages/hello*.deb . && apt-get install -y ./hello*.deb && hello",
    "dpkg": "dpkg -i /packages/hello*.deb && dpkg -r hello",
    "apt-get from a repository": "mkdir /repo && cp /packages/hello*.deb /repo && cd /repo && d=$(ls) &&"
    ' (dpkg-deb -f $d; echo "Filename: ./$d"; echo "Size: $(stat -c %s $d)";'
    ' echo "SHA256: $(sha256sum <$d | cut -c-64)")'
    " >Packages && rm -rf /etc/apt/sources.list.d && echo 'deb [trusted=yes] file:/repo ./' >/etc/apt/sources.list"
    " && apt-get update && apt-get install -y hello && apt-get remove -y hello",
    "useradd and su": "useradd -m bob && su bob -c 'touch ~/mine; id -un' | grep bob",
    "pip into the system": "pip install --break-system-packages -q --no-index /packages/*.whl"
    " && python3 -c 'import tiny'",
    "npm": 'mkdir -p p/q && cd p/q && echo \'{"name": "q", "version": "1.0.0"}\' >package.json && cd .. &&'
    " npm install --offline --no-audit ./q && npm install -g --offline --no-audit ./q && ls node_modules/q",
}


def _wheel(folder: Path) -> None:
    about = "tiny-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "tiny.py,,\n" + "".join(f"{about}/{n},,\n" for n in ("METADATA", "WHEEL")))


@asynccontextmanager
async def sandbox_for(
    settings: Settings, runtime: str, packages: Path, image: str = "host"
) -> AsyncIterator[AsyncSandbox]:
    engine = OciEngine(settings, runtime)
    packages.chmod(0o755)
    spec = SandboxSpec.of(
        image=image, volumes=[{"host": str(packages), "path": "/packages", "read_only": True}], env={"HOME": "/root"}
    )
    try:
        async with AsyncSandbox(spec, engine=engine, settings=settings) as sandbox:
            await sandbox.write_file("pool.py", POOL)
            yield sandbox
    finally:
        await empty(engine)


async def failures(sandbox: AsyncSandbox, commands: dict[str, str]) -> list[str]:
    found = []
    for name, command in commands.items():
        result = await sandbox.exec(f"mkdir -p '/workspace/{name}'; cd /workspace; {command}", timeout=120)
        if not result.success:
            found.append(f"{name}: {result.exit_code} {result.stdout[-300:]} {result.stderr[-500:]}")
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("runtime", EACH_RUNTIME)
async def test_on_the_host_image(runtime: str, settings: Settings, need_runtime: NeedRuntime, tmp_path: Path) -> None:
    need_runtime(runtime)
    _wheel(tmp_path)
    need("gcc", "git", "pip3")
    async with sandbox_for(settings, runtime, tmp_path) as sandbox:
        assert await failures(sandbox, ANYWHERE) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_on_a_debian_image(settings: Settings, need_runtime: NeedRuntime, tmp_path: Path) -> None:
    """Built once, then tried with every runtime. The network is off, so packages come in a volume."""
    _wheel(tmp_path)
    download = await asyncio.create_subprocess_exec("apt-get", "download", "-qq", "hello", cwd=tmp_path)
    assert await download.wait() == 0
    engine = OciEngine(settings)
    names = ("python3-minimal", "python3-pip", "python3-venv", "git", "gcc", "libc6-dev", "npm", "iputils-ping")
    await engine.layout.images.build(Recipe("full", "bookworm", names))
    for runtime in RUNTIMES:
        need_runtime(runtime)
        async with sandbox_for(settings, runtime, tmp_path, "recipe:full") as sandbox:
            await sandbox.exec("useradd -m user", timeout=30)
            assert (runtime, await failures(sandbox, ANYWHERE | DEBIAN)) == (runtime, [])

"""Programs as they are: pip and git work through rules by name, with nothing set inside the sandbox."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from network.conftest import Kind, Make
from network.internet import Internet


def _wheel(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "island.py": b"NAME = 'atoll'\n",
        "island-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: island\nVersion: 1.0\n",
        "island-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digest = {n: base64.urlsafe_b64encode(hashlib.sha256(c).digest()).rstrip(b"=").decode() for n, c in files.items()}
    record = "".join(f"{n},sha256={digest[n]},{len(c)}\n" for n, c in files.items()) + "island-1.0.dist-info/RECORD,,\n"
    with zipfile.ZipFile(folder / "island-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr("island-1.0.dist-info/RECORD", record)
    (folder / "index.html").write_text('<a href="island-1.0-py3-none-any.whl">island-1.0-py3-none-any.whl</a>')


def _repository(folder: Path) -> None:
    work = folder.with_suffix(".work")
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@a.test",
           "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@a.test"}  # fmt: skip

    def git(*words: str) -> None:
        subprocess.run(["git", *words], check=True, capture_output=True, env=env, timeout=20)

    git("init", "-q", "-b", "main", str(work))
    (work / "reef.txt").write_text("coral\n")
    git("-C", str(work), "add", ".")
    git("-C", str(work), "commit", "-qm", "one")
    git("clone", "-q", "--bare", str(work), str(folder))
    git("-C", str(folder), "update-server-info")


@pytest.mark.timeout(200)
def test_pip_and_git_work_by_name(internet: Internet, make: Make, kind: Kind) -> None:
    _wheel(internet.web_root / "simple/island")
    if not (internet.web_root / "reef.git").exists():
        _repository(internet.web_root / "reef.git")
    sandbox = make(kind, {"allowed_domains": ["allowed.test"]})
    options = (
        "--index-url http://allowed.test/simple --trusted-host allowed.test --no-cache-dir --disable-pip-version-check"
    )
    found = sandbox.exec(f"pip install -q --break-system-packages --target lib {options} island; ls lib", timeout=120)
    assert "island.py" in found.stdout, found
    cloned = sandbox.exec("git clone -q http://allowed.test/reef.git reef && cat reef/reef.txt", timeout=60)
    assert cloned.stdout == "coral\n", cloned
    refused = sandbox.exec("git clone -q http://evil.test/reef.git no")
    assert not refused.success
    assert "resolve host" in refused.stderr

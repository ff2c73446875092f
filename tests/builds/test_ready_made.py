"""The environment `computer`, for real: its size, Chromium, Playwright, and that nothing of this machine stays in it.

The first run builds it from the mirrors of this machine, which takes minutes. Later runs take it from the cache.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import AsyncSandbox
from atoll.builds.mirrors import Mirrors, certificates
from atoll.images import Images, tree_view
from atoll.model import SandboxSpec
from atoll.settings import Settings
from needs import need, needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), needs("root", "mkfs.btrfs")]
ENVIRONMENT = "computer"
MAX_BYTES = 2_500_000_000
PAGE = "data:text/html,<body style='background:white'><h1 style='color:red'>Hello 世界 😀</h1>"
COLOURS = """
import sys
from PIL import Image
image = Image.open(sys.argv[1]).convert("RGB")
colours = {colour for _, colour in image.getcolors(1 << 24)}
print(image.size, (255, 255, 255) in colours, (255, 0, 0) in colours, len(colours) > 20)
"""
PYTHON = """
import sys
from playwright.sync_api import sync_playwright
with sync_playwright() as playwright:
    browser = playwright.chromium.launch()
    page = browser.new_page(viewport={"width": 800, "height": 600})
    page.goto(sys.argv[1])
    page.screenshot(path=sys.argv[2])
    print(page.inner_text("h1"))
    browser.close()
"""
NODE = """
const { chromium } = require('playwright');
(async () => {
  const browser = await chromium.launch();
  const page = await browser.newPage({ viewport: { width: 800, height: 600 } });
  await page.goto(process.argv[2]);
  await page.screenshot({ path: process.argv[3] });
  console.log(await page.innerText('h1'));
  await browser.close();
})();
"""
SEEN = "(800, 600) True True True\n"


@pytest.fixture(scope="module")
def computer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """An installation with the image, which the command line makes: the first use of a new machine."""
    need("mmdebstrap", "npm")
    folder = Path(f"/tmp/atoll-ready-{os.getpid()}")
    settings = Settings(folder / "data", folder / "run")
    run("image", "build", ENVIRONMENT, settings=settings)
    yield settings
    subprocess.run(["umount", "-q", str(settings.data_dir / "pool")], check=False)
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def run(*words: str, settings: Settings) -> str:
    """Return what the command line prints."""
    environ = {**os.environ, "ATOLL_DATA_DIR": str(settings.data_dir), "ATOLL_RUN_DIR": str(settings.run_dir)}
    argv = [str(Path(sys.executable).with_name("atoll")), *words]
    return subprocess.run(argv, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout


def made(settings: Settings, **options: object) -> AsyncSandbox:
    spec = SandboxSpec.of(image=ENVIRONMENT, memory="3g", **options)
    return AsyncSandbox(spec, engine="auto" if "isolation" in options else "native", settings=settings)


@pytest.mark.parametrize("isolation", ["namespaces", "gvisor"])
@pytest.mark.parametrize("user", ["root", "user"])
async def test_chromium_and_both_playwrights_take_pictures_of_a_page(
    computer: Settings, isolation: str, user: str
) -> None:
    if isolation == "gvisor":
        need("runsc")
    async with made(computer, isolation=isolation, shm="512m") as sandbox:
        home = (await sandbox.exec("mktemp -d", user=user)).stdout.strip()
        for name, text in (("colours.py", COLOURS), ("page.py", PYTHON), ("page.js", NODE)):
            await sandbox.write_file(f"/opt/{name}", text)
        version = await sandbox.exec(["chromium", "--version"], user=user)
        assert version.stdout.startswith("Chromium ")
        plain = f"chromium --headless --window-size=800,600 --screenshot={home}/plain.png '{PAGE}'"
        commands = {
            "plain": plain,
            "python": f"python /opt/page.py '{PAGE}' {home}/python.png",
            "node": f"node /opt/page.js '{PAGE}' {home}/node.png",
        }
        for name, command in commands.items():
            done = await sandbox.exec(command, user=user, timeout=180)
            assert done.success, f"{name}: {done.stderr[-2000:]}"
            seen = await sandbox.exec(["python", "/opt/colours.py", f"{home}/{name}.png"], user=user)
            assert seen.stdout == SEEN, name


async def test_a_desktop_without_a_screen_shows_windows(computer: Settings) -> None:
    script = """
    Xvfb :1 -screen 0 800x600x24 >/dev/null 2>&1 & export DISPLAY=:1
    until xdotool getdisplaygeometry >/dev/null 2>&1; do sleep 0.1; done
    openbox & xsetroot -solid red 2>/dev/null; x11vnc -display :1 -forever -nopw -quiet >/dev/null 2>&1 &
    until (exec 3<>/dev/tcp/127.0.0.1/5900) 2>/dev/null; do sleep 0.1; done
    head -c 12 <>/dev/tcp/127.0.0.1/5900; scrot -o /tmp/screen.png; xdotool getdisplaygeometry
    """
    async with made(computer) as sandbox:
        done = await sandbox.exec(["bash", "-c", script], user="user", timeout=60)
        assert "RFB 003" in done.stdout
        assert done.stdout.endswith("800 600\n"), done.stderr


async def test_what_was_promised_is_there_for_both_users(computer: Settings) -> None:
    modules = "IPython,numpy,pandas,scipy,matplotlib,requests,bs4,lxml,openpyxl,PIL"
    programs = "git curl jq rg unzip make gcc g++ node npm npx chromium playwright"
    programs += " Xvfb openbox x11vnc xdotool scrot ffmpeg tmux"
    async with made(computer) as sandbox:
        for user, home in (("root", "/root"), ("user", "/home/user")):
            done = await sandbox.exec(f"python -c 'import {modules}' && which {programs} | wc -l", user=user)
            assert done.stdout.split() == [str(len(programs.split()))], done.stderr
            told = await sandbox.exec("echo $HOME $LANG; date +%Z; node --version; python -m venv /tmp/v-$$", user=user)
            assert re.fullmatch(rf"{home} C\.UTF-8\nUTC\nv24\..*\n", told.stdout), told
        fonts = (await sandbox.exec("fc-list :lang=zh family; fc-list : family")).stdout
        assert "Noto Sans CJK" in fonts
        assert "Noto Color Emoji" in fonts


async def test_both_users_can_install_from_the_registries(computer: Settings) -> None:
    found = Mirrors.of_machine(suite="trixie")
    ours = {**found.variables, "npm_config_cafile": certificates.PATH}
    del ours["npm_config_userconfig"]
    async with made(computer, network={"rules": [rule.model_dump() for rule in found.rules]}) as sandbox:
        for path, content in found.files.items():
            await sandbox.write_file(path, content)
        for user in ("root", "user"):
            done = await sandbox.exec(
                "pip install -q cowsay && python -c 'import cowsay' && npm install -g playwright >/dev/null"
                " && node -e \"console.log(require('playwright').chromium.executablePath())\"",
                user=user,
                env=ours,
                timeout=300,
            )
            assert done.stdout.startswith("/opt/playwright/chromium-"), done.stderr


async def test_it_is_small_enough_and_nothing_of_this_machine_is_in_it(computer: Settings) -> None:
    images = Images(computer.data_dir)
    image = await images.get(ENVIRONMENT)
    assert image.size_bytes < MAX_BYTES
    own = Mirrors.of_machine(suite="trixie")
    assert not {*own.variables} & {*image.config.env}
    assert "atoll-build" not in f"{image.config!r}"
    bundle = own.files[certificates.PATH].decode()
    with tree_view.view(image.layers) as root:
        assert "atoll-build" not in os.listdir(f"/proc/self/fd/{root}/run")
        theirs = Path(f"/proc/self/fd/{root}/etc/ssl/certs/ca-certificates.crt").read_text()
        private = [each.strip().splitlines()[1] for each in bundle.split("-----END CERTIFICATE-----\n") if each.strip()]
        private = [line for line in private if line not in theirs]
        apt = Path(f"/proc/self/fd/{root}/etc/apt")
        assert not (apt / "sources.list").exists()
        default = Path(f"/proc/self/fd/{root}/usr/share/doc/apt/examples/debian.sources")
        assert (apt / "sources.list.d/debian.sources").read_bytes() == default.read_bytes()
        traces = [each.encode() for each in (*private, *own.secrets, "/run/atoll-build")]
        for path in _files(f"/proc/self/fd/{root}"):
            content = path.read_bytes()
            assert not any(trace in content for trace in traces), path


def _files(top: str) -> Iterator[Path]:
    for folder, _, names in os.walk(top):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 16 << 20:
                yield path


def test_the_command_line_shows_versions_and_a_bill_of_materials(computer: Settings) -> None:
    assert run("run", "--image", ENVIRONMENT, "--", "chromium", "--version", settings=computer).startswith("Chromium")
    shown = json.loads(run("image", "inspect", ENVIRONMENT, settings=computer))
    assert shown["digest"].startswith("sha256:")
    assert {"chromium", "bash"} <= shown["versions"]["debian"].keys()
    assert {"numpy", "playwright"} <= shown["versions"]["pypi"].keys()
    assert {"npm", "playwright"} <= shown["versions"]["npm"].keys()
    spdx = json.loads(run("image", "inspect", ENVIRONMENT, "--sbom", "spdx", settings=computer))
    assert len(spdx["packages"]) == 1 + sum(map(len, shown["versions"].values()))

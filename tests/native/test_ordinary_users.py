"""The `native` engine of a user without rights: with a range of ids of its own, and with a single one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.engines.linux.native.rootless import find_ranges
from atoll.engines.linux.plan.sandbox_plan import IdRange
from native.users import UID, OrdinaryUser
from needs import missing, need, not_applicable
from promises import OF_THE_ENGINE
from security import probe

KILLING = Path(__file__).with_name("killing.py")


@pytest.fixture(params=["range", "single"])
def user(request: pytest.FixtureRequest, session_folder: Path) -> Iterator[OrdinaryUser]:
    need("root", "newuidmap", "newgidmap")
    made = OrdinaryUser(session_folder, request.param == "range")
    yield made
    found = subprocess.run(["ps", "-u", str(UID), "-o", "stat=,args="], capture_output=True, text=True).stdout
    shutil.rmtree(made.home)
    assert [line for line in found.splitlines() if not line.startswith("Z")] == []


def told(user: OrdinaryUser, program: str, *arguments: str) -> str:
    done = user.run(user.python, "-c", textwrap.dedent(program), *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "only",
    [pytest.param(tuple(OF_THE_ENGINE), id="of_the_engine"), pytest.param((), id="all", marks=pytest.mark.again)],
)
def test_every_promise_is_kept(user: OrdinaryUser, only: tuple[str, ...]) -> None:
    conforms(user, only)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_promise_is_kept_also_the_slow_ones(user: OrdinaryUser) -> None:
    conforms(user, ("--slow",), timeout_s=580)


def conforms(user: OrdinaryUser, words: tuple[str, ...], timeout_s: float = 230) -> None:
    done = user.run(user.python, "-m", "atoll.conformance", "--engine", "native", *words, timeout_s=timeout_s)
    broken = done.stdout[done.stdout.find("BROKEN") :] if "BROKEN" in done.stdout else done.stdout[-500:]
    assert done.returncode == 0, f"{broken}\n{done.stderr[-2000:]}"


PROBE = """
import sys
from atoll import Sandbox
program = open(0).read()
with Sandbox() as sandbox:
    assert sandbox.engine_name == "native"
    print(sandbox.exec(["python3", "-I", "-", sys.argv[1]], stdin=program, user=sys.argv[2] or None).stdout, end="")
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("inside", ["", "nobody"])
def test_no_wall_is_open(user: OrdinaryUser, inside: str) -> None:
    if inside and user.home.name == "home-single":
        not_applicable("there is nobody else inside")
    secret = user.home / "secret"
    secret.write_text("the user's own secret 83f1")
    os.chown(secret, UID, UID)
    program = PROBE.replace("open(0).read()", repr(Path(probe.__file__).read_text()))
    said = told(user, program, secret.read_text(), inside)
    found = {line["id"]: (line["verdict"], line["why"]) for line in map(json.loads, said.splitlines())}
    assert found.keys() == probe.CHECKS.keys()
    assert {name: why for name, why in found.items() if why[0] != "HELD"} == {}


def test_what_cannot_be_enforced_is_refused_with_the_reason(user: OrdinaryUser) -> None:
    said = told(
        user,
        """
        from atoll import Sandbox
        from atoll.errors import UnsupportedError
        for name, value in {"memory": "64m", "cpus": 1, "pids": 50, "disk": "64m", "network": "all"}.items():
            try:
                with Sandbox(engine="native", **{name: value}):
                    print("made")
            except UnsupportedError as error:
                print(error.reason)
        """,
    )
    lines = said.splitlines()
    assert ["control groups" in line for line in lines] == [True, True, True, False, False]
    assert "quotas" in lines[3]
    assert "cannot enforce network" in lines[4]


def test_defaults_that_cannot_be_enforced_are_left_out_and_reported(user: OrdinaryUser) -> None:
    said = told(
        user,
        """
        from atoll import Sandbox
        with Sandbox(engine="native") as sandbox:
            found = sandbox.info()
            print(*found.limits_left_out)
            print(found.limits.open_files, sandbox.exec("ulimit -n").stdout, end="")
        """,
    )
    assert said == "memory_bytes cpus pids disk_bytes\n4096 4096\n"


def test_files_of_every_owner_and_mode_go_with_the_sandbox(user: OrdinaryUser) -> None:
    said = told(
        user,
        """
        import os
        from atoll import Sandbox
        from atoll.settings import Settings
        with Sandbox(engine="native") as sandbox:
            sandbox.exec('''
                mkdir -p a/b/c d && touch a/b/c/x d/y && ln -s /etc/passwd a/link && mkfifo a/pipe
                for i in $(seq 40); do mkdir -p deep && cd deep; done; cd /workspace
                for i in $(seq 300); do : >a/b/$i; done
                chown -R 33:33 a 2>/dev/null; chmod 000 a/b/c a/b d; chown 1:1 d 2>/dev/null; true
            ''')
            layers = Settings.load().data_dir / "layers"
            assert os.listdir(layers) == [sandbox.id]
        print(os.listdir(layers))
        """,
    )
    assert said == "[]\n"


@pytest.mark.timeout(120)
def test_a_maker_killed_at_any_moment_leaves_a_sandbox_or_nothing(user: OrdinaryUser) -> None:
    done = user.run(user.python, str(KILLING), f"{user.home}/d", f"{user.home}/r", "25")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


def test_doctor_says_which_ids_there_are(user: OrdinaryUser) -> None:
    said = " ".join(told(user, "from atoll.cli.doctor import doctor; doctor()").split())
    assert "`auto` picks native" in said
    assert ("from your range" in said) == (user.home.name == "home-range")
    assert ("one, not root" in said) == (user.home.name == "home-single")


def test_ranges_are_found_by_name_or_number_and_only_if_large_enough(tmp_path: Path) -> None:
    need("newuidmap", "newgidmap")
    for text, first in {
        "0:5:65535\n": 5,
        "root:7:65536\n": 7,
        "root:7:100\nroot:9:70000\n": 9,
        "root:7:65534\n": None,
        "other:7:65536\n": None,
        "root:x:65536\nroot\n\xff\n": None,
    }.items():
        for name in ("subuid", "subgid"):
            (tmp_path / name).write_text(text, encoding="latin-1")
        found = find_ranges(0, tmp_path)
        assert (found and (found.users, found.groups)) == (first and (first, first))


def test_a_map_has_a_line_for_what_comes_from_elsewhere() -> None:
    assert IdRange(1, first_alone=True).mapping == "0 1 1\n1 2 65535\n"
    assert IdRange(1, 1, inner=1000).mapping == "1000 1 1\n"
    assert IdRange(0x7000_0000).mapping == f"0 {0x7000_0000} 65536\n"


DELEGATED = """
import asyncio
from atoll import AsyncSandbox
from atoll.engines.linux.native_engine import NativeEngine
from atoll.model import Capability, State
from atoll.settings import Settings

async def main():
    settings = Settings.load()
    engine = NativeEngine(settings)
    assert Capability.PAUSE in (await engine.describe()).capabilities
    async with AsyncSandbox(engine=engine, settings=settings) as sandbox:
        group = engine.layout.group(sandbox.id)
        assert engine.first_pid(sandbox.id) in group.pids()
        await engine.pause(sandbox.access.handle())
        assert (await sandbox.inspect()).state is State.PAUSED
        await engine.resume(sandbox.access.handle())
        assert (await sandbox.exec("echo on")).stdout == "on\\n"
    assert not group.exists()
    await engine.aclose()
    print("done")

asyncio.run(main())
"""


def test_a_delegated_control_group_is_used(user: OrdinaryUser) -> None:
    """Without controllers, as on a machine that has them on v1, it can still stop and kill a sandbox as a whole."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    top = next((words[1] for words in mounts if words[2] == "cgroup2"), None)
    if top is None:
        missing("no control groups v2")
    group = Path(top) / f"atoll-test-{os.getpid()}"
    group.mkdir()
    try:
        for path in (group, group / "cgroup.procs", group / "cgroup.subtree_control", group / "cgroup.threads"):
            os.chown(path, UID, UID)
        user.group = group
        assert told(user, DELEGATED) == "done\n"
    finally:
        for each in sorted((path for path in group.glob("**/") if path.is_dir()), reverse=True):
            each.rmdir()


VOLUME = """
import os
from atoll import Sandbox
volume = os.path.expanduser("~/volume")
os.makedirs(volume)
with Sandbox(volumes={volume: "/v"}) as sandbox:
    made = sandbox.exec(
        "cp /usr/bin/cat /v/cat && chmod 4755 /v/cat && stat -c %a /v/cat && cp /v/cat /tmp/cat && chmod 4755 /tmp/cat"
        " && stat -c %a /tmp/cat"
    )
    try:
        sandbox.write_file("/v/written", "x", mode=0o6755)
    except PermissionError:
        print("refused")
modes = [oct(os.stat(f"{volume}/{name}").st_mode) for name in sorted(os.listdir(volume))]
print(made.stdout.split(), made.stderr, *modes)
"""


def test_no_set_uid_program_of_the_user_comes_to_lie_in_a_volume(user: OrdinaryUser) -> None:
    """With a single id the agent cannot be looked into by the user's own supervisor: it is refused, not let through."""
    refused = user.home.name == "home-single"
    expected = "refused\n['755', '4755']  0o100755\n" if refused else "['755', '4755']  0o100755 0o100755\n"
    assert told(user, VOLUME) == expected

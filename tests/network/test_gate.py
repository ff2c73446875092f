"""What no rule could allow is refused when the connection begins, and still written down."""

from __future__ import annotations

import json
import random
import subprocess
import time
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from atoll import Sandbox
from atoll.model import SandboxSpec
from atoll.network.client import Gateway
from atoll.network.gateway.member import Member
from atoll.network.gateway.refused_attempts import read_attempt
from atoll.network.link import netlink
from atoll.network.link.threshold import steps
from atoll.network.refusals import RefusalLog
from atoll.settings import Settings
from network import world
from network.attacks import run
from network.conftest import Kind, Make
from network.internet import Internet
from network.test_isolation import destinations

WEB, EVIL, PRIVATE = world.WEB, world.EVIL, world.PRIVATE
ADDRESSES = [WEB, EVIL, PRIVATE, "10.99.1.5", "169.254.169.254", "127.0.0.1", "100.64.0.1", "224.0.0.1", "11.0.0.1"]
PORTS = [22, 79, 80, 81, 443, 5432, 8080, 65535]
RULES: list[dict[str, Any]] = [
    {"domain": "allowed.test"},
    {"domain": "*.w.test", "ports": ["8080", "70-79", "75-80"]},
    {"domain": "git.test", "protocol": "tcp", "port": 22},
    {"domain": "any.test", "protocol": "tcp"},
    {"domain": "allowed.test", "action": "deny"},
    {"cidr": f"{WEB}/32", "port": 5432},
    {"cidr": "203.0.113.0/24"},
    {"cidr": "10.99.0.0/24", "ports": ["5432", "80"]},
    {"cidr": "10.0.0.0/7"},
    {"cidr": "0.0.0.0/0", "port": 22},
    {"cidr": "::/0"},
    {"cidr": f"{EVIL}/32", "protocol": "udp"},
    {"cidr": "203.0.113.64/26", "action": "deny"},
    {"cidr": "203.0.113.0/24", "action": "deny", "port": 443},
    {"cidr": "169.254.169.254/32"},
]
CONNECT = """
import json, socket
def attempt(host, port):
    with socket.socket() as s:
        s.settimeout(15)
        try: s.connect((host, port))
        except ConnectionResetError: return "connected"  # and refused a moment later
        except OSError as error: return type(error).__name__
        return "connected"
"""


def test_the_kernel_agrees_with_the_gateway(tmp_path: Path) -> None:
    """Over many policies: refused is what would be refused by address anyway, and nothing that a name could open."""
    dice = random.Random(70)
    policies: list[Any] = ["none", "all"]
    for _ in range(60):
        chosen = dice.sample(RULES, dice.randint(0, 6))
        policies.append({"default": dice.choice(["allow", "deny"]), "rules": chosen})
    for wanted in policies:
        policy = SandboxSpec.of(network=wanted).network
        member = Member("box", 1, policy, RefusalLog(tmp_path / "log"))
        for address in map(IPv4Address, ADDRESSES):
            for port in PORTS:
                passes = next(step for step in steps(policy) if step.covers(address, port)).passes
                decided = bool(member.by_address(address, port, "tcp")) or member.evaluator.reads_names(port)
                member.pin("git.test", (address,), 60)
                member.pin("any.test", (address,), 60)
                possible = bool(member.by_address(address, port, "tcp")) or decided
                member._pins.clear()
                assert decided <= passes, (wanted, address, port)
                assert possible == passes, (wanted, address, port)


def attempts(sandbox: Sandbox, *targets: tuple[str, int]) -> list[str]:
    program = f"{CONNECT}\nprint(json.dumps([attempt(h, p) for h, p in {list(targets)!r}]))"
    found = sandbox.exec(["python3", "-c", program], timeout=40)
    assert found.success, found.stderr
    return [str(each) for each in json.loads(found.stdout)]


def test_connect_itself_fails(internet: Internet, make: Make, kind: Kind) -> None:
    sandbox = make(kind, {"allowed_domains": ["allowed.test"], "rules": [{"cidr": f"{WEB}/32", "port": 5432}]})
    _, packets = internet.mark()
    closed = [(EVIL, 22), (EVIL, 8080), (WEB, 22), (PRIVATE, 5432), ("169.254.169.254", 8080), ("203.0.113.1", 1)]
    began = time.monotonic()
    assert attempts(sandbox, *closed) == ["ConnectionRefusedError"] * len(closed)
    assert time.monotonic() - began < 10, "they are refused, not given up"
    assert destinations(internet, packets) == set(), "not one packet of them left"
    assert attempts(sandbox, (WEB, 5432), (EVIL, 80), (EVIL, 443)) == ["connected"] * 3, "a name may come there"
    assert run(sandbox, f"connect('{EVIL}', 80, get('evil.test'))").startswith("HTTP/1.1 403"), "names are judged there"
    found = {each.destination: each for each in sandbox.network_log() if each.protocol == "tcp"}
    assert {f"{host}:{port}" for host, port in closed} <= found.keys()
    assert found[f"{EVIL}:22"].rule == "no rule allows it"
    assert found["169.254.169.254:8080"].rule == "metadata services are never reached"
    if "isolation" not in kind:
        assert found[f"{EVIL}:22"].process.startswith("python3[")


def test_a_change_of_the_policy_changes_what_is_refused(internet: Internet, make: Make, kind: Kind) -> None:
    sandbox = make(kind, {"rules": [{"domain": "git.test", "protocol": "tcp", "port": 22}]})
    target = (WEB, 5432)
    assert attempts(sandbox, target, (world.GIT, 22)) == ["ConnectionRefusedError", "connected"], "it may be pinned"
    sandbox.set_network("all")
    assert attempts(sandbox, target, (PRIVATE, 5432)) == ["connected", "ConnectionRefusedError"]
    sandbox.set_network({"rules": [{"cidr": f"{EVIL}/32", "port": 80}]})
    assert attempts(sandbox, target, (EVIL, 80)) == ["ConnectionRefusedError", "connected"]
    sandbox.set_network("none")
    assert attempts(sandbox, target, (EVIL, 80)) == ["ConnectionRefusedError"] * 2


def test_a_scan_finds_nothing_open_and_is_counted(internet: Internet, make: Make) -> None:
    scanner = make({"engine": "native"}, {"allowed_domains": ["allowed.test"]})
    targets = [(EVIL, port) for port in range(1000, 1300)]
    assert set(attempts(scanner, *targets)) == {"ConnectionRefusedError"}
    log = [each for each in scanner.network_log() if each.destination.startswith(EVIL)]
    assert 200 <= len(log) + sum(each.dropped for each in log) <= len(targets)


def chains(settings: Settings) -> set[str]:
    with open(Gateway(settings).files.router) as router, netlink.inside(router.fileno()):
        listed = subprocess.run(["nft", "list", "chains"], check=True, capture_output=True, text=True).stdout
    return {line.split()[1] for line in listed.splitlines() if "chain policy_" in line}


def test_equal_policies_share_a_chain_and_unused_ones_go(internet: Internet, make: Make, settings: Settings) -> None:
    rules = {"rules": [{"cidr": f"{EVIL}/32", "port": 4711}]}
    first = make({"engine": "native"}, rules)
    before = chains(settings)
    second = make({"engine": "native"}, rules)
    assert chains(settings) == before
    for sandbox in (first, second):
        sandbox.set_network({"allowed_domains": ["allowed.test"]})
    deadline = time.monotonic() + 20
    while len(chains(settings) & before) == len(before):
        assert time.monotonic() < deadline, "a chain that nobody uses stays"
        time.sleep(0.2)


def test_what_is_no_beginning_of_a_connection_is_ignored() -> None:
    for packet in (b"", b"\x45", b"\x45" + bytes(30), b"\x4f" + bytes(8) + b"\6" + bytes(30), bytes(64)):
        assert read_attempt(packet) is None

"""Group H: what no policy lets out. The servers and the packet capture of the offline internet are the judges."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from atoll import Sandbox
from network import world
from network.attacks import run
from network.conftest import NAMES, Kind, Make
from network.internet import CONTROL_PORT, Internet

WEB, EVIL, PRIVATE, METADATA = world.WEB, world.EVIL, world.PRIVATE, world.METADATA
METADATA_ADDRESSES = (METADATA, "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192")


def web_requests(internet: Internet, since: int) -> list[tuple[str, str]]:
    return [(each["at"], each["host"]) for each in internet.seen(since) if each["kind"] == "http"]


def names_asked(internet: Internet, since: int) -> list[str]:
    return [each["name"] for each in internet.seen(since) if each["kind"] == "dns"]


def destinations(internet: Internet, since: int) -> set[str]:
    return {each for each in internet.packets()[since:] if not each.startswith("ff02::")}


def test_the_world_is_there(internet: Internet) -> None:
    """The control of all others: without a sandbox in between everything can be reached."""
    code = (
        "import socket; host = '{}'; s = socket.socket(10 if ':' in host else 2); s.setsockopt(1, 2, 1); "
        f"s.bind(('', {CONTROL_PORT})); s.settimeout(20); s.connect((host, 80)); "
        "s.sendall(b'GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'); print(s.recv(9999).decode())"
    )
    assert "CANARY-METADATA" in internet.inside_uplink(code.format(METADATA))
    assert "CANARY-PRIVATE" in internet.inside_uplink(code.format(PRIVATE))
    assert "EVIL" in internet.inside_uplink(code.format(EVIL))
    assert "2001:db8:66::66" in internet.inside_uplink(code.format("2001:db8:66::66"))
    code = "import socket; socket.create_connection(('{}', 80), 20)"
    internet.inside_uplink(code.format(world.GIT))
    assert internet.unexpected()[0] == {f"{world.GIT}.80"}, "the judge of all tests sees what nobody allowed"
    internet.forgive(f"{world.GIT}.80")


def test_off_is_off(internet: Internet, make: Make, kind: Kind) -> None:
    sandbox = make(kind, "none")
    seen, packets = internet.mark()
    found = run(
        sandbox,
        f"[[n for _, n in socket.if_nameindex()], connect('{EVIL}', 80), connect('2001:db8:66::66', 80), "
        f"datagram('{EVIL}', 9999, b'x'), datagram('198.18.0.1', 53, question('evil.test'))]",
    )
    assert found[0] in (["lo"], [])
    assert all("nreachable" in each or "No route" in each or "Cannot assign" in each for each in found[1:]), found
    assert internet.seen(seen) == []
    assert destinations(internet, packets) == set()


@pytest.mark.parametrize("policy", ["named", "opened"])
def test_metadata_services_are_never_reached(internet: Internet, named: Sandbox, opened: Sandbox, policy: str) -> None:
    sandbox = {"named": named, "opened": opened}[policy]
    seen, packets = internet.mark()
    hosts = (*METADATA_ADDRESSES, "meta.test")
    found = run(sandbox, f"[connect(h, 80, get(h)) for h in {METADATA_ADDRESSES!r}]")
    curl = sandbox.exec("".join(f"curl -sS -m 4 http://{host}/;" for host in (*hosts, "2852039166", "0xa9fea9fe")))
    assert "CANARY" not in str(found) + curl.stdout + curl.stderr
    assert web_requests(internet, seen) == []
    assert not [each for each in destinations(internet, packets) if each.startswith(METADATA_ADDRESSES)]
    assert WEB in str(run(sandbox, "[socket.gethostbyname('allowed.test')]"))


def test_the_host_and_the_router_are_never_reached(internet: Internet, opened: Sandbox) -> None:
    _, packets = internet.mark()
    ports = (22, 80, 5300, 5301, 5302, 8080)
    found = run(
        opened, f"[connect(h, p, b'x\\r\\n', 2) for h in ('198.18.0.2', '198.18.0.1', '192.0.2.1') for p in {ports}]"
    )
    assert all(each == "" or "error" in each for each in found), found
    assert any("this host" in each.rule for each in opened.network_log() if each.destination == "192.0.2.1:80")
    assert not [each for each in destinations(internet, packets) if each.startswith(("198.18.", "192.0.2.1"))]


def test_private_addresses_need_a_rule_that_names_them(
    internet: Internet, opened: Sandbox, make: Make, kind: Kind
) -> None:
    _, packets = internet.mark()
    found = run(opened, f"[connect('{PRIVATE}', 80, get('x')), connect('{PRIVATE}', 5432)]")
    assert "CANARY" not in str(found)
    assert not [each for each in destinations(internet, packets) if each.startswith(PRIVATE)]
    allowed = make(kind, {"rules": [{"cidr": f"{PRIVATE}/32", "port": 80}]})
    assert "CANARY-PRIVATE" in run(allowed, f"connect('{PRIVATE}', 80, get('x'))")
    assert "error" in run(allowed, f"connect('{PRIVATE}', 5432)")


def test_one_sandbox_does_not_reach_another(make: Make, kind: Kind) -> None:
    one, other = make(kind, "all"), make(kind, "all")
    program = "import socket; s = socket.create_server(('0.0.0.0', 9000))\nwhile 1: s.accept()[0].send(b'CANARY-PEER')"
    server = one.start(["python3", "-c", program])
    address = one.exec("ip -4 addr | sed -n 's#.*inet \\(198[^/]*\\)/.*#\\1#p'").stdout.strip()
    assert "CANARY-PEER" in run(one, f"eventually('{address}', 9000)"), "the control"
    assert "CANARY" not in run(other, f"connect('{address}', 9000, wait=1)")
    assert "CANARY" not in run(other, f"datagram('{address}', 9000, b'x')")
    server.kill()


@pytest.mark.parametrize("policy", [NAMES, {}])
def test_names_carry_nothing_out(internet: Internet, make: Make, kind: Kind, policy: Any) -> None:
    sandbox = make(kind, policy)
    seen, packets = internet.mark()
    kinds = (1, 2, 5, 10, 12, 15, 16, 28, 33, 64, 65, 255)
    found = run(
        sandbox,
        f"[datagram('198.18.0.1', 53, question(n, k), 15)[3:4] for k in {kinds} "
        "for n in ('%032x.evil.test' % k, 'evil.test', 'x.allowed.test', 'allowed.test.evil.test')]",
    )
    assert set(found) == {"\x83"}, "all of them are said not to exist"
    other = run(sandbox, f"[datagram('{EVIL}', 53, question('evil.test'), 15)[3:4], connect('{EVIL}', 53, b'\\0\\x1b' "
                         "+ question('evil.test'), enough=6)[5:6]]")  # fmt: skip
    assert other == ["\x83", "\x83"], "at whatever address, by UDP and TCP"
    assert names_asked(internet, seen) == []
    assert destinations(internet, packets) == set()
    assert {each.name for each in sandbox.network_log()} >= {"evil.test", "x.allowed.test"}


def test_of_an_allowed_name_only_addresses_are_asked(internet: Internet, named: Sandbox) -> None:
    seen, _ = internet.mark()
    answers = run(
        named, "[datagram('198.18.0.1', 53, question('a.w.test', k), 15) for k in (1, 16, 28, 64, 65, 255, 10)]"
    )
    assert socket.inet_aton(WEB).decode("latin-1") in answers[0]
    assert all(each[3:8] == "\x80\x00\x01\x00\x00" for each in answers[1:]), "nothing else, and no encrypted hello"
    assert {(each["name"], each["type"]) for each in internet.seen(seen) if each["kind"] == "dns"} <= {("a.w.test", 1)}


def test_ipv6_is_closed_like_the_rest(internet: Internet, opened: Sandbox) -> None:
    _, packets = internet.mark()
    hosts = ("2001:db8:66::66", "fd00::2", "fe80::1", "::ffff:10.99.0.5", "64:ff9b::a9fe:a9fe")
    found = run(opened, f"[connect(h, 80, get('x'), 3) for h in {hosts!r}]")
    assert all("error" in each or "refused" in each or each == "" for each in found), found
    assert not [each for each in destinations(internet, packets) if ":" in each.rsplit(".", 1)[0]]


def test_a_host_without_an_ipv4_address_is_refused_with_the_reason(internet: Internet, make: Make, kind: Kind) -> None:
    sandbox = make(kind, {"allowed_domains": ["six.test"], "allowed_cidrs": ["2001:db8::/32"]})
    _, packets = internet.mark()
    found = sandbox.exec(
        f"curl -sS -m 20 http://six.test/; curl -sS -m 20 --resolve six.test:80:{EVIL} http://six.test/;"
        "curl -sS -m 20 'http://[2001:db8:66::66]/'"
    )
    assert "six.test cannot be reached: it has no IPv4 address, and IPv6 is closed" in found.stdout
    assert "resolve host" in found.stderr
    assert any(
        (each.name, each.rule) == ("six.test", "it has no IPv4 address, and IPv6 is closed")
        for each in sandbox.network_log()
    )
    assert all(each.endswith(".53") for each in destinations(internet, packets))


@pytest.mark.parametrize("policy", ["named", "opened"])
def test_udp_is_closed(internet: Internet, named: Sandbox, opened: Sandbox, policy: str) -> None:
    sandbox = {"named": named, "opened": opened}[policy]
    _, packets = internet.mark()
    found = run(sandbox, f"[datagram(h, p, b'quic') for h in ('{WEB}', '{EVIL}') for p in (443, 9999)]")
    assert all("error" in each for each in found)
    assert not [each for each in destinations(internet, packets) if each.endswith((".443", ".9999"))]


def test_udp_opens_by_a_rule(internet: Internet, make: Make, kind: Kind) -> None:
    sandbox = make(kind, {"rules": [{"cidr": f"{WEB}/32", "port": 9999, "protocol": "udp"}]})
    found = run(
        sandbox,
        f"[datagram('{WEB}', 9999, b'abc', 15), datagram('{EVIL}', 9999, b'abc'), datagram('{WEB}', 443, b'x')]",
    )
    assert found[0] == "cba"
    assert all("error" in each for each in found[1:])
    sandbox.set_network({})
    assert "error" in run(sandbox, f"datagram('{WEB}', 9999, b'abc')")


def test_root_inside_cannot_change_the_network(named: Sandbox, kind: Kind) -> None:
    found = named.exec(
        "id -u; ip addr add 198.18.0.99/31 dev eth0; ip link set eth0 down; ip route add 203.0.113.0/24 dev eth0;"
        "ip link add x type dummy; ip tuntap add t0 mode tun; nft list ruleset; echo 1 > /proc/sys/net/ipv4/ip_forward;"
        "python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)' 2>&1 | tail -1;"
        "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 255)' 2>&1 | tail -1; true"
    )
    text = found.stdout + found.stderr
    assert found.stdout.startswith("0\n")
    assert text.count("ot permitted") + text.count("denied") >= 6, text
    assert WEB in named.exec("getent hosts allowed.test").stdout, "and it still works"


def test_other_protocols_go_nowhere(internet: Internet, opened: Sandbox) -> None:
    _, packets = internet.mark()
    opened.exec(
        f'ping -c1 -W1 {EVIL}; python3 -c \'import socket; socket.socket(2, 2, 136).sendto(b"x", ("{EVIL}", 1))\''
    )
    assert destinations(internet, packets) == set()

"""What a policy allows, as tables."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from atoll.errors import SpecError
from atoll.model import SandboxSpec
from atoll.model.addresses import closed_for_all, is_private, name_of_words, normal_name, parse_address, unwrapped
from atoll.model.network_policy import NetworkRules
from atoll.network.decision import PolicyEvaluator


def judge(network: Any) -> PolicyEvaluator:
    return PolicyEvaluator(SandboxSpec.of(network=network).network)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("example.com", "example.com"),
        ("EXAMPLE.com", "example.com"),
        ("example.com.", "example.com"),
        ("ex_ample.com", "ex_ample.com"),
        ("a" * 63 + ".test", "a" * 63 + ".test"),
    ],
)
def test_names_are_compared_in_one_spelling(text: str, name: str) -> None:
    assert normal_name(text) == name_of_words(text) == name


@pytest.mark.parametrize("text", ["bücher.example", "BÜCHER.example", "xn--bcher-kva.example"])
def test_a_policy_may_name_hosts_in_any_language(text: str) -> None:
    assert name_of_words(text) == "xn--bcher-kva.example"


@pytest.mark.parametrize(
    "text",
    [
        "\uff25xample.com",  # a full-width letter
        "example\u3002com",  # an ideographic full stop
        "example\uff0ecom",
        "exam\u00adple.com",  # a soft hyphen, which nobody sees
        "exam\u200bple.com",
        "bü\u00adcher.example",
        "bücher\u200d.example",
        "ﬁle.example",
        "bücher\u00a0.example",
    ],
)
def test_look_alikes_are_no_names(text: str) -> None:
    for read in (normal_name, name_of_words):
        with pytest.raises(ValueError, match="it "):
            read(text)


def test_a_name_on_the_wire_is_ascii() -> None:
    with pytest.raises(ValueError, match="not a host name"):
        normal_name("bücher.example")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "a..b",
        "example.com..",
        "evil.test\0.allowed.test",
        "allowed.test%00.evil.test",
        "a b",
        "-a.test",
        "a-.test",
        "a" * 64 + ".test",
        ".".join(["a" * 60] * 5),
        "127.0.0.1",
        "1.2.3.0x7f",
        "2130706433",
        "[::1]",
        "a/b",
        "user@host",
        "host:80",
        "a\r\nb",
        "*.test",
        "ex\u200bample.com\ud800",
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="it is"):
        normal_name(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("0x7f.1", "127.0.0.1"),
        ("0177.0.0.1", "127.0.0.1"),
        ("2130706433", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("0", "0.0.0.0"),
        ("169.16689662", "169.254.169.254"),
        ("[::1]", "::1"),
        ("::ffff:10.99.0.5", "::ffff:10.99.0.5"),
        ("example.com", None),
        ("1.2.3.example", None),
    ],
)
def test_addresses_are_known_in_every_spelling(text: str, address: str | None) -> None:
    found = parse_address(text)
    assert found == (None if address is None else ip_address(address))


@pytest.mark.parametrize(
    "text", ["fe80::1%25eth0", "fe80::1%eth0", "1.2.3.256", "256.1", "1.2.3.4.5", "::g", "089", "1\0"]
)
def test_what_only_looks_like_an_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not an address|base 8"):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("64:ff9b::a9fe:a9fe", "169.254.169.254"),
        ("64:ff9b:1::10.0.0.1", "10.0.0.1"),
        ("2002:a9fe:a9fe::1", "169.254.169.254"),
        ("::127.0.0.1", "127.0.0.1"),
        ("2001:0:1::f5ff:fffa", "10.0.0.5"),
        ("2001:db8::5efe:7f00:1", "127.0.0.1"),
        ("2606:4700::1111", "2606:4700::1111"),
        ("::1", "::1"),
    ],
)
def test_an_address_inside_another_is_found(text: str, inner: str) -> None:
    assert unwrapped(ip_address(text)) == ip_address(inner)


NEVER = [
    "0.0.0.0",
    "0.1.2.3",
    "127.0.0.1",
    "127.9.9.9",
    "169.254.169.254",
    "169.254.170.2",
    "169.254.1.1",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "224.0.0.1",
    "239.1.1.1",
    "255.255.255.255",
    "240.0.0.1",
    "198.18.0.1",
    "198.19.255.255",
    "::",
    "::1",
    "fe80::1",
    "fd00:ec2::254",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "::127.0.0.1",
]
PRIVATE = [
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "100.64.0.1",
    "fc00::1",
    "fd12::1",
    "::ffff:10.99.0.5",
    "64:ff9b::a63:5",
    "2002:0a63:0005::1",
]
PUBLIC = ["1.1.1.1", "172.32.0.1", "203.0.113.66", "2606:4700::1111", "99.255.255.255", "100.128.0.1"]
OPEN_POLICIES: list[Any] = [
    "all",
    {"default": "allow"},
    {"allowed_cidrs": ["0.0.0.0/0", "::/0"]},
    {"allowed_domains": ["*"], "default": "allow"},
]


@pytest.mark.parametrize(
    "policy", [*OPEN_POLICIES, {"allowed_cidrs": ["169.254.169.254/32", "127.0.0.0/8", "fe80::/10"]}]
)
@pytest.mark.parametrize("address", NEVER)
def test_host_metadata_and_link_local_are_never_reached(policy: Any, address: str) -> None:
    assert closed_for_all(ip_address(address))
    assert not judge(policy).address(ip_address(address), 80, "tcp")
    assert not judge(policy).answer(ip_address(address))


@pytest.mark.parametrize("policy", OPEN_POLICIES)
@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_the_internet(policy: Any, address: str) -> None:
    assert is_private(ip_address(address))
    assert not judge(policy).address(ip_address(address), 80, "tcp")
    assert not judge(policy).answer(ip_address(address))


@pytest.mark.parametrize("policy", OPEN_POLICIES)
@pytest.mark.parametrize("address", PUBLIC)
def test_the_internet_is_reached_when_it_is_open(policy: Any, address: str) -> None:
    assert judge(policy).address(ip_address(address), 80, "tcp")


def test_a_rule_that_names_a_private_range_opens_it_and_nothing_beside() -> None:
    found = judge({"rules": [{"cidr": "10.99.0.0/24", "port": 5432}]})
    assert found.address(ip_address("10.99.0.5"), 5432, "tcp")
    assert not found.address(ip_address("10.99.0.5"), 5433, "tcp")
    assert not found.address(ip_address("10.99.1.5"), 5432, "tcp")
    assert not found.address(ip_address("10.99.0.5"), 5432, "udp")


NAMES = {"allowed_domains": ["allowed.test", "*.w.test"]}


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("allowed.test", True),
        ("sub.allowed.test", False),
        ("notallowed.test", False),
        ("allowed.test.evil.test", False),
        ("a.w.test", True),
        ("a.b.w.test", True),
        ("w.test", False),
        ("xw.test", False),
        ("w.test.evil.test", False),
        ("test", False),
    ],
)
def test_domains_match_whole_labels(name: str, allowed: bool) -> None:
    assert bool(judge(NAMES).name(name, 443, "web")) is allowed
    assert bool(judge(NAMES).lookup(name)) is allowed


@pytest.mark.parametrize("domain", ["ALLOWED.test", "allowed.test.", "Allowed.Test"])
def test_the_spelling_of_a_rule_does_not_matter(domain: str) -> None:
    assert judge({"allowed_domains": [domain]}).name("allowed.test", 443, "web")


@pytest.mark.parametrize(
    ("port", "protocol", "allowed"),
    [
        (80, "web", True),
        (443, "web", True),
        (8080, "web", False),
        (22, "tcp", False),
        (443, "tcp", False),
        (443, "udp", False),
    ],
)
def test_a_domain_without_more_is_the_web(port: int, protocol: Any, allowed: bool) -> None:
    assert bool(judge(NAMES).name("allowed.test", port, protocol)) is allowed


def test_other_protocols_go_by_addresses_that_were_given_for_the_name() -> None:
    found = judge({"rules": [{"domain": "git.test", "port": 22, "protocol": "tcp"}]})
    assert found.pinned(["git.test"], 22, "tcp")
    assert not found.pinned(["git.test"], 23, "tcp")
    assert not found.pinned(["other.test"], 22, "tcp")
    assert not found.pinned([], 22, "tcp")
    assert not found.address(ip_address("203.0.113.1"), 22, "tcp")


def test_a_denial_beats_every_permission() -> None:
    found = judge(
        {
            "default": "allow",
            "rules": [
                {"domain": "*.evil.test", "action": "deny"},
                {"domain": "good.evil.test"},
                {"cidr": "203.0.113.0/24", "action": "deny", "port": 25},
                {"cidr": "203.0.113.66/32"},
            ],
        }
    )
    assert not found.name("good.evil.test", 443, "web")
    assert not found.lookup("good.evil.test")
    assert not found.address(ip_address("203.0.113.66"), 25, "tcp")
    assert found.address(ip_address("203.0.113.66"), 26, "tcp")
    assert found.name("other.test", 443, "web")


CLOSED: list[Any] = [
    "none",
    None,
    False,
    {},
    {"allowed_domains": []},
    {"allowed_domains": None},
    {"rules": []},
    {"rules": None},
    {"network_enabled": False},
    {"allow_outbound": False, "allowed_domains": ["allowed.test"]},
    {"network_enabled": None},
    {"network_enabled": True, "allowed_domains": []},
    {"network_enabled": True, "allowed_domains": None},
    {"network_enabled": True, "allow_outbound": False},
]


@pytest.mark.parametrize("policy", CLOSED)
def test_empty_null_and_missing_lists_open_nothing(policy: Any) -> None:
    found = judge(policy)
    assert not found.name("allowed.test", 443, "web")
    assert not found.lookup("allowed.test")
    assert not found.address(ip_address("203.0.113.1"), 443, "tcp")


def test_the_switches_of_the_seeds_are_understood() -> None:
    assert SandboxSpec.of(network={"network_enabled": True}).network == "all"
    assert SandboxSpec.of(network={"allow_outbound": True}).network == "all"
    found = SandboxSpec.of(network={"network_enabled": True, "allowed_domains": ["a.test"]}).network
    assert found == NetworkRules.model_validate({"allowed_domains": ["a.test"]})
    assert judge({"network_enabled": True, "denied_domains": ["a.test"]}).name("b.test", 443, "web")


@pytest.mark.parametrize("policy", OPEN_POLICIES)
def test_udp_is_closed_unless_a_rule_opens_it(policy: Any) -> None:
    assert not judge(policy).address(ip_address("1.1.1.1"), 443, "udp")
    opened = judge({"rules": [{"cidr": "1.1.1.0/24", "protocol": "udp", "port": 123}]})
    assert opened.address(ip_address("1.1.1.1"), 123, "udp")
    assert not opened.address(ip_address("1.1.1.1"), 123, "tcp")


@pytest.mark.parametrize(
    "network",
    [
        "some",
        1,
        True,
        {"allowed_domains": "a.test"},
        {"allowed_domains": ["1.2.3.4"]},
        {"allowed_domains": ["*.*.test"]},
        {"allowed_domains": ["a\0.test"]},
        {"allowed_cidrs": ["10.0.0.1/8"]},
        {"rules": [{"domain": "a.test", "cidr": "1.0.0.0/8"}]},
        {"rules": [{}]},
        {"rules": [{"domain": "a.test", "port": 0}]},
        {"rules": [{"domain": "a.test", "port": "9-8"}]},
        {"rules": [{"action": "deny", "cidr": "1.0.0.0/8", "protocol": "web"}]},
        {"rules": [{"domain": "a.test", "ports": [True]}]},
        {"unknown": 1},
        {"network_enabled": "false"},
        {"inject": [{"domain": "*.test", "headers": {}}]},
        {"inject": [{"domain": "a.test", "headers": {"Host": "b"}}]},
        {"inject": [{"domain": "a.test", "headers": {"X": "a\r\nb"}}]},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(network: Any) -> None:
    with pytest.raises(SpecError, match="network"):
        SandboxSpec.of(network=network)


def test_a_spec_with_a_policy_survives_being_written_down() -> None:
    spec = SandboxSpec.of(
        network={"allowed_domains": ["a.test"], "rules": [{"cidr": "10.0.0.0/8", "ports": ["1-5", 9]}]}
    )
    assert SandboxSpec.model_validate_json(spec.model_dump_json()) == spec
    assert SandboxSpec.model_validate_json('{"network": "none"}').network == "none"


def test_a_web_rule_for_a_range_lets_allowed_names_lead_there_and_opens_nothing_else() -> None:
    found = judge({"rules": [{"domain": "a.test"}, {"cidr": "10.1.2.3/32", "ports": [443], "protocol": "web"}]})
    inside, beside = ip_address("10.1.2.3"), ip_address("10.1.2.4")
    assert found.answer(inside, 443)
    assert not found.answer(beside, 443)
    assert not found.address(inside, 443, "tcp")
    assert not found.address(inside, 443, "udp")
    assert not found.name("b.test", 443, "web")
    assert not judge({"rules": [{"domain": "a.test"}]}).answer(inside, 443)

"""How a policy is written: errors are about what was written, and the seeds' spellings are understood."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import SpecError
from atoll.model import SandboxSpec
from atoll.model.network_policy import NetworkRules


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"allow_domains": ["a.example"]}, ["allow_domains", "Did you mean 'allowed_domains'?"]),
        ({"rules": [{"domain": "a b"}]}, ["rules.0.domain", "'a b' is not a domain"]),
        ({"rules": [{"domain": "a.example", "cidr": "1.1.1.0/24"}]}, ["either a domain or a cidr"]),
        ({"rules": [{"cidr": "1.1.1.1/24"}]}, ["rules.0.cidr", "not a range of addresses"]),
        ({"rules": [{"domain": "a.example", "ports": [70000]}]}, ["rules.0.ports", "70000 is not a port"]),
        ({"allowed_domains": "a.example"}, ["allowed_domains must be a list"]),
        ({"default": "maybe"}, ["default", "'deny' or 'allow'"]),
        ({"bytes_per_s": 1}, ["bytes_per_s", "1024"]),
        ({"inject": [{"domain": "*.example", "headers": {}}]}, ["inject.0.domain", "not for a pattern"]),
        ({"allow_outbound": "yes"}, ["true or false"]),
        ({"allowOutbound": True, "allow_outbound": True}, ["allow_outbound is given twice"]),
        ("internet", ["'none' or 'all'"]),
        (["a.example"], ["'none', 'all' or an object with rules"]),
        (7, ["'none', 'all' or an object with rules"]),
    ],
)
def test_an_error_is_about_what_was_written(network: Any, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        SandboxSpec.of(network=network)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_the_seeds_camel_case_is_understood() -> None:
    spec = SandboxSpec.of(network={"allowOutbound": True, "allowedDomains": ["a.example", "*.b.example"]})
    assert isinstance(spec.network, NetworkRules)
    assert [str(rule) for rule in spec.network.rules] == ["allow a.example", "allow *.b.example"]
    assert spec.network.default == "deny"
    assert SandboxSpec.of(network={"allowOutbound": True}).network == "all"
    assert SandboxSpec.of(network={"allowOutbound": False, "allowedDomains": ["a.example"]}).network == "none"
    assert SandboxSpec.of(network={"networkEnabled": True, "deniedDomains": ["a.example"]}).network == NetworkRules(
        default="allow",
        rules=({"action": "deny", "domain": "a.example"},),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("port", ["0443", "+443", "4_43", " 443", "٤٤٣", "443-0500", 443.5, True, "-1"])
def test_a_port_is_written_in_one_way(port: Any) -> None:
    with pytest.raises(SpecError, match="not a port"):
        SandboxSpec.of(network={"rules": [{"domain": "a.example", "ports": [port]}]})

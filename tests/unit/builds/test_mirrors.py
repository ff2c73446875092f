"""RUN steps get this machine's configuration of apt, pip and npm: exactly its hosts, and no credentials in any text."""

from __future__ import annotations

import os
from ipaddress import ip_address
from pathlib import Path

import pytest

from atoll.builds import mirrors
from atoll.builds.mirrors import Mirrors, certificates, endpoint
from atoll.builds.mirrors.endpoint import Endpoint, rules_for
from atoll.errors import SpecError
from atoll.model.network_policy import NetworkRules
from atoll.network.decision import PolicyEvaluator
from needs import need

CA = "-----BEGIN CERTIFICATE-----\nowncertificate\n-----END CERTIFICATE-----\n"
SECRETS = ("apt-password", "pip-password", "netrc-password", "npm-token", "proxy-password")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine with mirrors of its own, read by the real programs."""
    need("apt-get", "npm")
    home = tmp_path_factory.mktemp("machine")

    def written(name: str, text: str) -> str:
        (home / name).write_text(text)
        return str(home / name)

    sources = written(
        "sources.list",
        "deb https://me:apt-password@apt.corp.test:8443/debian bookworm main\n"
        "deb https://apt.corp.test/security bookworm-security main\ndeb file:///srv/debian bookworm main\n",
    )
    apt = f'Dir::Etc::sourcelist "{sources}"; Dir::Etc::sourceparts "-"; Acquire::Retries "7";'
    pip = (
        "[global]\nindex-url = https://me:pip-password@pip.corp.test/simple\n"
        "extra-index-url = file:///srv/pypi https://more.corp.test/simple\nfind-links = /opt/wheels\n"
    )
    npm = "registry=https://npm.corp.test/all/\n//npm.corp.test/all/:_authToken=${TOKEN}\n//other.test/:_authToken=no\n"
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "APT_CONFIG": written("apt.conf", apt),
        "PIP_CONFIG_FILE": written("pip.conf", pip),
        "npm_config_userconfig": written(".npmrc", npm),
        "NETRC": written(
            "netrc", "machine more.corp.test login me password netrc-password\nmachine x login y password z"
        ),
        "TOKEN": "npm-token",
        "SSL_CERT_FILE": written("ca.pem", CA),
        "https_proxy": "http://me:proxy-password@proxy.corp.test:3128",
    }


@pytest.fixture(scope="module")
def found(machine: dict[str, str]) -> Mirrors:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("PIP_", "npm_", "UV_"))]:
            patch.delenv(name)
        for name, value in machine.items():
            patch.setenv(name, value)
        patch.setattr(endpoint, "addresses_of", lambda host: [ip_address("10.1.2.3")] if "apt" in host else [])
        return Mirrors.of_machine(suite="trixie")


def test_exactly_the_hosts_of_the_configuration_are_allowed_where_they_are_private_too(found: Mirrors) -> None:
    policy = PolicyEvaluator(NetworkRules(rules=found.rules))
    for host, port in (("apt.corp.test", 8443), ("apt.corp.test", 443), ("pip.corp.test", 443)):
        assert policy.name(host, port, "web"), host
    for host, port in (("more.corp.test", 443), ("npm.corp.test", 443)):
        assert policy.name(host, port, "web"), host
    assert policy.name("proxy.corp.test", 3128, "tcp")
    for host, port in (("other.test", 443), ("pip.corp.test", 80), ("corp.test", 443), ("x", 443)):
        assert not policy.name(host, port, "web"), host
    assert policy.answer(ip_address("10.1.2.3"), 443)
    assert not policy.answer(ip_address("10.1.2.4"), 443)
    assert not policy.address(ip_address("10.1.2.3"), 443, "tcp")


def test_apt_has_the_mirrors_of_the_machine_in_the_suite_of_the_image(found: Mirrors) -> None:
    assert found.files["/run/atoll-build/apt-sources.list"].decode().splitlines() == [
        "deb https://apt.corp.test:8443/debian/ trixie main",
        "deb https://apt.corp.test/security/ trixie-security main",
    ]
    options = found.files[found.variables["APT_CONFIG"]].decode()
    assert 'Acquire::Retries "7";' in options
    assert 'Dir::Etc::sourceparts "-";' in options


def test_credentials_are_in_files_of_their_own_and_only_for_their_hosts(found: Mirrors) -> None:
    assert found.files["/run/atoll-build/apt-logins"] == b"machine apt.corp.test login me password apt-password\n"
    assert found.variables["PIP_INDEX_URL"] == "https://pip.corp.test/simple"
    assert found.variables["PIP_EXTRA_INDEX_URL"] == "https://more.corp.test/simple"
    assert "PIP_FIND_LINKS" not in found.variables
    assert found.files[found.variables["NETRC"]].decode().splitlines() == [
        "machine pip.corp.test login me password pip-password",
        "machine more.corp.test login me password netrc-password",
    ]
    npm = found.files[found.variables["npm_config_userconfig"]].decode().splitlines()
    assert npm == ["registry=https://npm.corp.test/all/", "//npm.corp.test/all/:_authToken=npm-token"]


def test_no_text_shows_credentials_or_certificates(found: Mirrors) -> None:
    assert set(SECRETS) <= set(found.secrets)
    assert not any(secret in f"{found!r} {found.rules} {found.notes}" for secret in (*SECRETS, "owncertificate"))
    assert found.hidden("a pip-password b") == "a *** b"


def test_the_certificates_of_the_machine_are_one_bundle(found: Mirrors) -> None:
    bundle = found.files[certificates.PATH].decode()
    assert CA in bundle
    assert {found.variables[name] for name in ("SSL_CERT_FILE", "PIP_CERT", "NODE_EXTRA_CA_CERTS")} == {
        certificates.PATH
    }


def test_this_machine_itself_is_left_out() -> None:
    rules, notes = rules_for([Endpoint("127.0.0.1", 3141), Endpoint("localhost", 80)])
    assert rules == ()
    assert len(notes) == 2


def test_only_named_hosts_are_allowed_if_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "addresses_of", lambda _: [])
    rules = Mirrors.of_machine(("only.test",), environ={"PATH": "/nowhere"}).rules
    assert {rule.domain for rule in rules} == {"only.test"}


def test_without_a_client_its_steps_may_reach_public_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "addresses_of", lambda _: [])
    made = Mirrors.of_machine(environ={"PATH": "/nowhere"})
    assert "*" in {rule.domain for rule in made.rules}
    assert any("npm" in note for note in made.notes)
    assert Mirrors.of_machine(False).rules == ()


@pytest.mark.parametrize(
    ("text", "choice"),
    [("", None), ("true", True), ("0", False), ("off", False), ("a.test, B.test", ("a.test", "b.test"))],
)
def test_the_setting_is_a_switch_or_a_list_of_hosts(text: str, choice: mirrors.Choice | None) -> None:
    assert mirrors.parse(text) == choice


def test_a_setting_with_something_else_than_hosts_is_refused() -> None:
    with pytest.raises(SpecError, match="ATOLL_BUILD_MIRRORS"):
        mirrors.parse("http://a.test")


def test_an_unreadable_file_is_left_out(tmp_path: Path) -> None:
    assert endpoint.read_text(str(tmp_path)) == ""

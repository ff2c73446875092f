from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from atoll.engines.docker.api import endpoint
from atoll.engines.docker.api.endpoint import Endpoint
from atoll.errors import EngineUnavailableError


def context(folder: Path, name: str, host: str) -> Path:
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = folder / "contexts" / "meta" / digest
    meta.mkdir(parents=True)
    (meta / "meta.json").write_text(json.dumps({"Name": name, "Endpoints": {"docker": {"Host": host}}}))
    return folder / "contexts" / "tls" / digest / "docker"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("unix:///run/other.sock", Endpoint(path="/run/other.sock")),
        ("tcp://box:2375", Endpoint(host="box", port=2375)),
        ("tcp://box", Endpoint(host="box", port=2375)),
        ("tcp://[::1]:99/", Endpoint(host="::1", port=99)),
    ],
)
def test_addresses_are_those_of_docker(address: str, expected: Endpoint) -> None:
    assert endpoint.find({"DOCKER_HOST": address}) == expected


@pytest.mark.parametrize(
    "address", ["nonsense", "unix://relative", "tcp://", "tcp://box:notaport", "https://box", "ftp://x"]
)
def test_nonsense_is_refused_with_a_hint(address: str) -> None:
    with pytest.raises(EngineUnavailableError) as caught:
        endpoint.find({"DOCKER_HOST": address})
    assert caught.value.hint


def test_ssh_says_what_to_do_instead() -> None:
    with pytest.raises(EngineUnavailableError, match="ssh is not supported") as caught:
        endpoint.find({"DOCKER_HOST": "ssh://me@box"})
    assert "ssh -nNT -L" in str(caught.value.hint)


def test_tls_uses_the_certificates_that_docker_uses(tmp_path: Path) -> None:
    environ = {"DOCKER_HOST": "tcp://box", "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": str(tmp_path)}
    found = endpoint.find(environ)
    assert found == Endpoint(host="box", port=2376, certificates=tmp_path)
    with pytest.raises(EngineUnavailableError, match="certificates"):
        found.tls()


def test_the_chosen_context_is_used(tmp_path: Path) -> None:
    context(tmp_path, "desk", "unix:///run/desk.sock")
    secrets = context(tmp_path, "far", "tcp://far:2376")
    secrets.mkdir(parents=True)
    environ = {"DOCKER_CONFIG": str(tmp_path)}
    assert endpoint.find({**environ, "DOCKER_CONTEXT": "desk"}) == Endpoint(path="/run/desk.sock")
    (tmp_path / "config.json").write_text(json.dumps({"currentContext": "far"}))
    assert endpoint.find(environ) == Endpoint(host="far", port=2376, certificates=secrets)
    with pytest.raises(EngineUnavailableError, match="no Docker context 'gone'"):
        endpoint.find({**environ, "DOCKER_CONTEXT": "gone"})


def test_without_a_word_it_is_the_customary_socket(tmp_path: Path) -> None:
    assert endpoint.find({"HOME": str(tmp_path)}).path
    (tmp_path / "config.json").write_text("not json")
    assert endpoint.find({"DOCKER_CONFIG": str(tmp_path)}).path.endswith(".sock")

"""Pulls for strangers reach nothing but what is public, tell nothing of it, and have no login but their own."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from atoll.engines.docker.api import image_pull as docker_images
from atoll.errors import ImageError, ImageUnreachableError, SpecError
from atoll.images import Images
from atoll.images.access import OPERATOR, Access, current, parse_places, pulling_with
from atoll.images.registry_login import Credentials
from needs import needs
from unit.images.archives import file, small_root
from unit.images.registries import PASSWORD, USER, Front, Pusher, registry

pytestmark = needs("docker-registry")
STRANGER = Access(guarded=True)


@pytest.fixture(scope="module")
def open_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry") / "open") as address:
        Pusher(address, "a/b").image("1", [small_root(file("data", b"open"))])
        yield address


@pytest.fixture(scope="module")
def closed_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry") / "closed", password=True) as address:
        Pusher(address, "a/b", password=True).image("1", [small_root(file("data", b"closed"))])
        yield address


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_registry: str) -> Images:
    """With a login of the operator's for the registry that has a password."""
    (tmp_path / "docker").mkdir()
    secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {closed_registry: {"auth": secret}}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return Images(tmp_path / "data")


def listed(*places: str, shared_logins: frozenset[str] = frozenset()) -> Access:
    names, networks = parse_places(places)
    return Access(True, names, networks, shared_logins)


async def refused(images: Images, reference: str, access: Access) -> ImageError:
    with pulling_with(access), pytest.raises(ImageError) as caught:
        await images.ensure(reference)
    return caught.value


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "127.1"])
async def test_a_stranger_reaches_no_registry_of_this_machine(images: Images, host: str) -> None:
    with Front("nowhere", "") as front:
        port = front.address.rpartition(":")[2]
        assert isinstance(await refused(images, f"{host}:{port}/a/b:1", STRANGER), ImageUnreachableError)
        assert front.seen == []


async def test_what_is_private_and_what_is_not_there_look_alike(images: Images) -> None:
    errors = [await refused(images, f"{host}/a/b:1", STRANGER) for host in ("10.0.0.1:5000", "registry.invalid")]
    assert {str(error).replace("10.0.0.1", "X").replace("registry.invalid", "X") for error in errors} == {
        str(errors[0]).replace("10.0.0.1", "X")
    }


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "10.1.2.3", "192.168.0.1", "172.16.5.5", "100.64.0.1", "0.0.0.0", "fd00::1", "fe80::1",
     "::1", "64:ff9b::a00:1", "::ffff:10.0.0.1", "198.18.0.1"],
)  # fmt: skip
def test_no_address_but_public_ones_is_connected_to(address: str) -> None:
    with pytest.raises(ImageUnreachableError):
        STRANGER.check("name.example", 443, [ip_address("1.1.1.1"), ip_address(address)])


def test_registries_and_networks_that_are_listed_are_reached() -> None:
    private = [ip_address("10.1.2.3")]
    listed("10.1.0.0/16").check("name.example", 443, private)
    listed("name.example").check("name.example", 443, private)
    listed("name.example:443").check("name.example", 443, private)
    for access in (listed("10.2.0.0/16"), listed("name.example:80"), listed("example"), listed("other.example")):
        with pytest.raises(ImageUnreachableError):
            access.check("name.example", 443, private)
    with pytest.raises(SpecError):
        parse_places(["10.0.0.1/8"])


def test_the_address_that_was_judged_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that answers differently the second time gains nothing: it is asked once."""
    answers = iter([["1.1.1.1"], ["127.0.0.1"]])
    asked: list[object] = []

    def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", (address, port)) for address in next(answers)]

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(place)
        raise TimeoutError

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(TimeoutError):
        STRANGER.connect(("rebinding.example", 443), 1.0)
    assert asked == [("1.1.1.1", 443)]


@pytest.mark.parametrize("mode", ["redirect", "token elsewhere"])
async def test_a_registry_leads_a_stranger_nowhere_else(images: Images, open_registry: str, mode: str) -> None:
    with Front(open_registry, "") as inner, Front(open_registry, mode) as front:
        front.storage = inner.address
        own = Access(True, frozenset({front.address}), login=Credentials(USER, PASSWORD))
        error = await refused(images, f"{front.address}/a/b:1", own)
        assert inner.seen == []
        assert len(front.seen) > 0
        assert inner.address not in str(error)


@pytest.mark.parametrize("mode", ["secret page", "secret status"])
async def test_errors_repeat_nothing_of_an_answer(images: Images, open_registry: str, mode: str) -> None:
    with Front(open_registry, mode) as front:
        error = await refused(images, f"{front.address}/a/b:1", listed(front.address))
        assert "secret" not in f"{error} {error.hint}"
        assert "schemaVersion" not in str(error)


async def test_the_operators_login_is_not_a_strangers(images: Images, closed_registry: str) -> None:
    name = f"{closed_registry}/a/b:1"
    assert "denies access to" in str(await refused(images, name, listed(closed_registry)))
    shared = listed(closed_registry, shared_logins=frozenset({closed_registry}))
    with pulling_with(shared):
        assert (await images.ensure(name)).private


async def test_what_came_with_a_login_is_not_everybodys_because_it_is_here(
    images: Images, closed_registry: str
) -> None:
    name = f"{closed_registry}/a/b:1"
    assert current() is OPERATOR
    assert (await images.ensure(name)).private
    assert "denies access to" in str(await refused(images, name, listed(closed_registry)))
    own = Access(True, frozenset({closed_registry}), login=Credentials(USER, PASSWORD))
    wrong = Access(True, frozenset({closed_registry}), login=Credentials(USER, "another"))
    with pulling_with(own):
        assert (await images.ensure(name)).root is not None
    assert "denies access to" in str(await refused(images, name, wrong))
    assert (await images.ensure(name)).private


async def test_what_the_registry_gives_to_everybody_is_everybodys(images: Images, open_registry: str) -> None:
    """Though the operator showed a login when it came."""
    name = f"{open_registry}/a/b:1"
    with pulling_with(listed(open_registry)):
        made = await images.ensure(name)
        assert not made.private
    record = next((images.store.directory / "names").glob("*.json"))
    record.write_text(json.dumps(json.loads(record.read_bytes()) | {"private": True}))
    with pulling_with(listed(open_registry)):
        await images.ensure(name)
    assert not (await images.get(name)).private


def test_a_docker_engine_is_not_sent_there_either(images: Images, closed_registry: str) -> None:
    """It makes the connection itself; where the name leads now is judged before, and no login goes along."""
    for name in ("127.0.0.1:5000/a/b", "localhost:5000/a", "10.0.0.1/a/b", "registry.invalid/a"):
        with pytest.raises(ImageUnreachableError):
            docker_images._credentials(name, STRANGER)
    assert docker_images._credentials("library/python", STRANGER) == {}
    assert docker_images._credentials(f"{closed_registry}/a/b", listed(closed_registry)) == {}
    assert "X-Registry-Auth" in docker_images._credentials(f"{closed_registry}/a/b", OPERATOR)

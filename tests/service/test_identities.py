"""Tokens of an identity provider, and limits of users: the parts that need no server to be seen."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from atoll.errors import SpecError
from atoll.manager import LimitReachedError
from atoll.model import Limits
from atoll.server.admission import RateLimiter
from atoll.server.settings import ServerSettings
from atoll.service import Caller, Identities, NotAuthenticatedError, RateLimitedError, Scope, UserService
from atoll.service.credentials import TokenRules
from atoll.service.quotas import Reservations
from atoll.store import Quotas, Role, Store, User

SECRET = b"s" * 32


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = Store.at(tmp_path / "a.db")
    await made.open()
    yield made
    await made.aclose()


@pytest.fixture(scope="module")
def private_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def public_pem(key: rsa.RSAPrivateKey) -> str:
    kind, form = serialization.PublicFormat.SubjectPublicKeyInfo, serialization.Encoding.PEM
    return key.public_key().public_bytes(form, kind).decode()


def claims(**more: Any) -> dict[str, Any]:
    return {"sub": "zoe", "aud": "atoll", "exp": datetime.now(UTC) + timedelta(hours=1), **more}


async def test_a_user_of_the_provider_is_a_user_here(store: Store, private_key: rsa.RSAPrivateKey) -> None:
    identities = Identities(store, SECRET, TokenRules("RS256", issuer="idp", public_key=public_pem(private_key)))
    caller = await identities.caller(jwt.encode(claims(iss="idp"), private_key, "RS256"))
    assert caller.user_id == "idp|zoe"
    assert Scope.ADMIN not in caller.scopes
    user = await store.user("idp|zoe")
    assert user is not None
    assert user.role is Role.USER


async def test_no_name_of_the_provider_is_a_user_of_ours(store: Store, private_key: rsa.RSAPrivateKey) -> None:
    """Least of all the administrator of the first run."""
    identities = Identities(store, SECRET, TokenRules("RS256", issuer="idp", public_key=public_pem(private_key)))
    await UserService(store, identities).first_run()
    await UserService(store, identities).create("ann", Role.USER, Quotas())
    for name in ("admin", "ann"):
        caller = await identities.caller(jwt.encode(claims(iss="idp", sub=name, scope="admin"), private_key, "RS256"))
        assert caller.user_id == f"idp|{name}"
        assert not caller.is_admin


async def test_the_same_name_at_two_providers_is_two_users(store: Store, private_key: rsa.RSAPrivateKey) -> None:
    identities = Identities(store, SECRET, TokenRules("RS256", public_key=public_pem(private_key)))
    names = [("one", "zoe"), ("two", "zoe"), ("one|x", "y"), ("one", "x|y"), ("one", "z" * 255), ("i" * 900, "zoe")]
    names += [("one", "a\0b"), ("one", "\ud800")]
    tokens = [jwt.encode(claims(iss=issuer, sub=name), private_key, "RS256") for issuer, name in names]
    found = {(await identities.caller(token)).user_id for token in tokens}
    assert len(found) == len(names)
    identities.forget()
    assert {(await identities.caller(token)).user_id for token in tokens} == found


async def test_a_user_of_the_provider_from_before_keeps_the_record(
    store: Store, private_key: rsa.RSAPrivateKey
) -> None:
    identities = Identities(store, SECRET, TokenRules("RS256", issuer="idp", public_key=public_pem(private_key)))
    await store.add_user(User(id="zoe", created_at=datetime.now(UTC), identity="*|zoe"))
    token = jwt.encode(claims(iss="idp"), private_key, "RS256")
    assert (await identities.caller(token)).user_id == "zoe"
    other = Identities(store, SECRET, TokenRules("RS256", issuer="other", public_key=public_pem(private_key)))
    assert (await other.caller(jwt.encode(claims(iss="other"), private_key, "RS256"))).user_id == "other|zoe"
    identities.forget()
    assert (await identities.caller(token)).user_id == "zoe"


async def test_an_administrator_links_a_user_to_the_provider(store: Store, private_key: rsa.RSAPrivateKey) -> None:
    identities = Identities(store, SECRET, TokenRules("RS256", issuer="idp", public_key=public_pem(private_key)))
    await UserService(store, identities).create("root", Role.ADMIN, Quotas())
    await UserService(store, identities).link("root", "idp|zoe")
    caller = await identities.caller(jwt.encode(claims(iss="idp", scope="admin"), private_key, "RS256"))
    assert (caller.user_id, caller.is_admin) == ("root", True)


async def test_tokens_with_anything_wrong_are_refused(store: Store, private_key: rsa.RSAPrivateKey) -> None:
    pem = public_pem(private_key)
    identities = Identities(store, SECRET, TokenRules("RS256", issuer="idp", public_key=pem))
    past = datetime.now(UTC) - timedelta(hours=1)
    other = rsa.generate_private_key(65537, 2048)
    without = {name: value for name, value in claims(iss="idp").items() if name != "exp"}
    refused = [
        jwt.encode(claims(iss="idp", aud="another"), private_key, "RS256"),
        jwt.encode(claims(iss="somebody"), private_key, "RS256"),
        jwt.encode(claims(iss="idp", exp=past), private_key, "RS256"),
        jwt.encode(without, private_key, "RS256"),
        jwt.encode(claims(iss="idp"), other, "RS256"),
        jwt.encode(claims(iss="idp"), "", "none"),
        jwt.encode(claims(iss="idp"), "p" * 32, "HS256"),  # the algorithm is the server's choice
        "x.y.z",
        "",
        "é" * 10,
    ]
    for token in refused:
        with pytest.raises(NotAuthenticatedError):
            await identities.caller(token)
    assert await store.user("zoe") is None


@pytest.fixture
def provider(private_key: rsa.RSAPrivateKey) -> Iterator[str]:
    """The keys of an identity provider, at a real address."""
    listed = json.loads(RSAAlgorithm.to_jwk(private_key.public_key())) | {"kid": "one", "use": "sig", "alg": "RS256"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"keys": [listed]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing to say."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}/jwks.json"
        listening.shutdown()
        thread.join()


async def test_keys_are_found_at_the_provider(store: Store, private_key: rsa.RSAPrivateKey, provider: str) -> None:
    identities = Identities(store, SECRET, TokenRules("RS256", jwks_url=provider))
    token = jwt.encode(claims(), private_key, "RS256", headers={"kid": "one"})
    assert (await identities.caller(token)).user_id == "provider|zoe"
    unknown = jwt.encode(claims(), private_key, "RS256", headers={"kid": "two"})
    with pytest.raises(NotAuthenticatedError):
        await identities.caller(unknown)


async def test_the_first_key_is_made_once(store: Store) -> None:
    identities = Identities(store, SECRET)
    key = await UserService(store, identities).first_run()
    assert key is not None
    assert (await identities.caller(key)).is_admin
    assert await UserService(store, identities).first_run() is None


def test_a_rate_lets_saved_requests_through_and_then_waits() -> None:
    now = 0.0
    limiter = RateLimiter(2.0, burst_s=2.0, now=lambda: now)
    caller = Caller("ann", frozenset())
    for _ in range(4):
        limiter.count(caller)
    with pytest.raises(RateLimitedError) as refused:
        limiter.count(caller)
    assert refused.value.retry_after_s == pytest.approx(0.5)
    limiter.count(Caller("bob", frozenset()))
    now = 0.5
    limiter.count(caller)
    with pytest.raises(RateLimitedError):
        limiter.count(caller)


def test_reservations_count_until_they_end() -> None:
    reservations = Reservations()
    caller = Caller("ann", frozenset(), Quotas(max_sandboxes=2, max_cpus=3))
    two = Limits(cpus=2)
    with reservations.reserve(caller, "a", two, []):
        with pytest.raises(LimitReachedError, match="CPUs"), reservations.reserve(caller, "b", two, []):
            pass
        with reservations.reserve(caller, "c", Limits(cpus=1), []):
            with pytest.raises(LimitReachedError, match="limit"), reservations.reserve(caller, "d", Limits(cpus=1), []):
                pass
            with reservations.reserve(caller, "a", two, []):  # the same request again
                pass
    with reservations.reserve(caller, "b", two, []):
        pass
    with pytest.raises(LimitReachedError, match="must say"), reservations.reserve(caller, "e", Limits(), []):
        pass


def test_the_environment_has_the_last_word(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[server]\nport = 1000\nengine = "process"\n')
    environ = {"ATOLL_CONFIG": str(file), "ATOLL_PORT": "2000", "ATOLL_STATE_DIR": "/x", "ATOLL_CORS_ORIGINS": "a, b"}
    settings = ServerSettings.load(environ)
    assert (settings.port, settings.engine, settings.cors_origins) == (2000, "process", ["a", "b"])
    assert (settings.timeout, settings.close_delay) == (120, 3600)
    assert ServerSettings.load(environ, port=3000).port == 3000
    for bad in ("[server]\nunknown = 1\n", "[server\n", '[server]\njwt_algorithm = "RS256"\n'):
        file.write_text(bad)
        with pytest.raises(SpecError):
            ServerSettings.load(environ)

"""The credentials of users, which are API keys and tokens, and their formats.

An API key is `atoll_ID_SECRET`. Only the hash of the secret is stored, which is enough for 256 random bits. A token is
a JWT. Its algorithm is fixed by the server's settings, never taken from the token.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import jwt

from atoll import workers
from atoll.service.caller import ORDINARY, Caller, Scope
from atoll.service.failures import ForbiddenError, NotAuthenticatedError
from atoll.store import ApiKey

_PREFIX = "atoll_"
_LEEWAY_S = 5
_MAX_IDENTITY = 600


@dataclass(frozen=True, slots=True)
class TokenRules:
    """How tokens are checked: with the server's own secret (HS256), or with the public keys of an identity provider."""

    algorithm: str = "HS256"
    audience: str = "atoll"
    issuer: str | None = None
    public_key: str | None = None
    jwks_url: str | None = None
    max_lifetime_s: float = 86400.0


class Tokens:
    def __init__(self, secret: bytes, rules: TokenRules | None = None) -> None:
        self.rules = rules or TokenRules()
        self._secret = hashlib.sha256(b"atoll tokens\0" + secret).digest()
        self._provider = jwt.PyJWKClient(self.rules.jwks_url, timeout=10) if self.rules.jwks_url else None

    @property
    def are_foreign(self) -> bool:
        """Whether an identity provider issues the tokens, and not this server."""
        return self.rules.algorithm != "HS256"

    async def claims(self, token: str) -> dict[str, Any]:
        """Return the claims of a valid token. Raise NotAuthenticatedError for any other."""
        rules = self.rules
        try:
            key: Any = self._secret
            if self._provider is not None:
                key = (await workers.run(workers.IDENTITY, self._provider.get_signing_key_from_jwt, token)).key
            elif self.are_foreign:
                key = rules.public_key
            return jwt.decode(
                token,
                key,
                algorithms=[rules.algorithm],
                audience=rules.audience,
                issuer=rules.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "sub", "aud"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise NotAuthenticatedError("the token has expired", hint="Get a new one.") from error
        except (jwt.PyJWTError, ValueError) as error:
            raise invalid_credential() from error

    def create(self, caller: Caller, *, scopes: frozenset[Scope], lifetime_s: float) -> tuple[str, datetime]:
        """Return a new token and when it expires. It has no more scopes than the caller, expires no later than the
        caller's credential, and ends with the caller's key."""
        if self.are_foreign:
            raise ForbiddenError("this server does not create tokens: they come from the identity provider")
        if not scopes <= caller.scopes:
            raise ForbiddenError(
                f"a token cannot have more scopes than its creator: {', '.join(sorted(caller.scopes))}"
            )
        now = datetime.now(UTC)
        expires = now + timedelta(seconds=min(lifetime_s, self.rules.max_lifetime_s))
        if caller.expires_at is not None:
            expires = min(expires, datetime.fromtimestamp(caller.expires_at, UTC))
        claims: dict[str, object] = {
            "sub": caller.user_id,
            "aud": self.rules.audience,
            "iat": now,
            "exp": expires,
            "scope": " ".join(sorted(scopes)),
        }
        if caller.key_id is not None:
            claims["key"] = caller.key_id
        if self.rules.issuer is not None:
            claims["iss"] = self.rules.issuer
        return jwt.encode(claims, self._secret, algorithm="HS256"), expires


def is_api_key(credential: str) -> bool:
    return credential.startswith(_PREFIX)


def new_api_key() -> tuple[str, bytes, str]:
    """Return the id of a new key, the hash of its secret, and the whole key as its user gets it."""
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return key_id, _hash(secret), f"{_PREFIX}{key_id}_{secret}"


def key_id_of(text: str) -> str | None:
    """Return the id in the text of a key, or None if no key can have that id."""
    key_id = text.removeprefix(_PREFIX).partition("_")[0]
    return key_id if key_id.isalnum() and len(key_id) <= 32 else None


def is_secret_of(text: str, key: ApiKey | None) -> bool:
    """Whether the text contains the secret of this key. The check takes the same time for a key that does not exist."""
    secret = text.removeprefix(_PREFIX).partition("_")[2]
    return hmac.compare_digest(_hash(secret), key.hash if key is not None else bytes(32))


def scopes_in(claims: dict[str, Any]) -> set[Scope]:
    """Return the scopes in the claim `scope`, or those of an ordinary user without it. Unknown scopes are ignored."""
    words = claims.get("scope")
    if not isinstance(words, str):
        return set(ORDINARY)
    return {Scope(word) for word in words.split() if word in set(Scope)}


def identity_of(issuer: str, subject: str) -> str:
    """Return a name that is unique for each user of each identity provider."""
    identity = f"{issuer.replace('%', '%25').replace('|', '%7C')}|{subject}"
    return identity if len(identity) <= _MAX_IDENTITY and identity.isprintable() else digest(identity)


def digest(identity: str) -> str:
    return f"~{hashlib.sha256(identity.encode(errors='replace')).hexdigest()}"


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()


def invalid_credential() -> NotAuthenticatedError:
    return NotAuthenticatedError("invalid credential", hint="Send 'Authorization: Bearer' with a key or token.")

"""A certificate authority for a single sandbox, so that headers can be added to the sandbox's HTTPS requests.

Its key stays with the gateway, in a file that only root can read. The sandbox has its certificate among those that it
trusts; nothing else trusts it. It signs certificates only for the hosts for which headers are added.
"""

from __future__ import annotations

import contextlib
import functools
import os
import ssl
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from atoll import durable
from atoll.errors import UnsupportedError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
"""The file in the sandbox that holds the certificate, after all those that the machine trusts."""
VARIABLES = dict.fromkeys(
    (
        "SSL_CERT_FILE",
        "CURL_CA_BUNDLE",
        "GIT_SSL_CAINFO",
        "NODE_EXTRA_CA_CERTS",
        "PIP_CERT",
        "REQUESTS_CA_BUNDLE",
    ),
    BUNDLE,
)
"""Environment variables for programs that ship their own certificates, or look for them in another file."""
_BUNDLES = (
    BUNDLE,
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_CA_DAYS, _HOST_DAYS = 3650, 30
_FRESH_S = 86_400.0
_MAX_HOSTS = 200


@functools.cache
def problem() -> str | None:
    """Return why no authority can be made on this machine, or None if it can."""
    try:
        import cryptography.x509  # noqa: F401
    except ImportError:
        return "the package 'cryptography' is not installed; run \"pip install 'atoll[tls]'\""
    return None


@dataclass(slots=True)
class Authority:
    key: EllipticCurvePrivateKey
    certificate: x509.Certificate
    _contexts: dict[str, tuple[float, ssl.SSLContext]] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path) -> Authority:
        """Load the authority from this file, or make it and the file if there is none. Raises UnsupportedError if
        certificates cannot be made on this machine."""
        if (reason := problem()) is not None:
            raise UnsupportedError(f"headers cannot be added over TLS: {reason}")
        with contextlib.suppress(FileNotFoundError, ValueError):
            return cls.load(path)
        made = cls._made(path.name)
        durable.write(path, _key_pem(made.key) + made.pem)
        return made

    @classmethod
    def load(cls, path: Path) -> Authority:
        """Load the authority from a file. Raises FileNotFoundError if there is none, and ValueError if it is
        invalid."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        content = path.read_bytes()
        key = load_pem_private_key(content, None)
        if not isinstance(key, EllipticCurvePrivateKey):
            raise ValueError("the key is of another kind")
        return cls(key, x509.load_pem_x509_certificate(content))

    @property
    def pem(self) -> bytes:
        """The certificate, which the sandbox has to trust."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return self.certificate.public_bytes(Encoding.PEM)

    def context(self, host: str) -> ssl.SSLContext:
        """Return a TLS context for a server that poses as this host to clients that trust the authority. It offers
        HTTP/1.1 only."""
        made_at, context = self._contexts.get(host, (0.0, None))
        if context is None or time.monotonic() - made_at > _FRESH_S:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.options |= ssl.OP_NO_RENEGOTIATION
            context.set_alpn_protocols(["http/1.1"])
            _load(context, self._for_host(host))
            if len(self._contexts) >= _MAX_HOSTS:
                self._contexts.clear()
            self._contexts[host] = (time.monotonic(), context)
        return context

    @classmethod
    def _made(cls, sandbox_id: str) -> Authority:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"Atoll, sandbox {sandbox_id[:32]}")])
        made = (
            _builder(name, name, key.public_key(), _CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, made)

    def _for_host(self, host: str) -> bytes:
        """Make a certificate for a host. Return it with its key, which is never stored."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding

        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        server = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
        made = (
            _builder(x509.Name([]), self.certificate.subject, key.public_key(), _HOST_DAYS)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(server, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return _key_pem(key) + made.public_bytes(Encoding.PEM)


def trusted(authority: Authority) -> bytes:
    """Return all certificates that this machine trusts, and the sandbox's own."""
    for path in _BUNDLES:
        with contextlib.suppress(OSError):
            return Path(path).read_bytes().rstrip(b"\n") + b"\n" + authority.pem
    return authority.pem


def _builder(subject: x509.Name, issuer: x509.Name, key: EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(**given: bool) -> x509.KeyUsage:
    from cryptography import x509

    names = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign"
        " encipher_only decipher_only"
    )
    return x509.KeyUsage(**{name: given.get(name, False) for name in names.split()})


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Load a certificate and its key into a context. The `ssl` module reads only files, so a nameless file in memory is
    used."""
    fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)

"""The certificates that this machine trusts, those of its administrator included, for clients in RUN steps."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from atoll.builds.mirrors.endpoint import HOME, Found, read_text

PATH = f"{HOME}/certificates.pem"
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_NAMED = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "CURL_CA_BUNDLE")
_GIVEN = (
    *("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "CURL_CA_BUNDLE"),
    *("GIT_SSL_CAINFO", "npm_config_cafile"),
)
_END = "-----END CERTIFICATE-----"


def found(environ: Mapping[str, str]) -> Found:
    """Return one bundle with all certificates, and the variables that name it."""
    paths = [*(environ[name] for name in _NAMED if environ.get(name)), *_system()]
    certificates: dict[str, None] = {}
    for path in dict.fromkeys(paths):
        pieces = read_text(path).split(_END)[:-1]
        certificates |= {f"{piece[piece.find('-----BEGIN') :]}{_END}\n": None for piece in pieces}
    if not certificates:
        return Found(notes=("this machine has no bundle of certificates",))
    return Found(variables=dict.fromkeys(_GIVEN, PATH), files={PATH: "".join(certificates).encode()})


def _system() -> list[str]:
    usual = ssl.get_default_verify_paths().cafile
    return [path for path in (usual, *_BUNDLES) if path is not None and Path(path).is_file()]

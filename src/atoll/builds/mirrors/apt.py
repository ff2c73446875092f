"""The configuration of this machine's apt: its sources, proxies and credentials."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Mapping

from atoll.builds.mirrors import certificates
from atoll.builds.mirrors.endpoint import (
    HOME,
    Endpoint,
    Found,
    Login,
    netrc,
    output_of,
    parse_url,
    proxies,
    read_text,
)
from atoll.images.debian import sources

_CONFIGURATION, _SOURCES, _LOGINS = f"{HOME}/apt.conf", f"{HOME}/apt-sources.list", f"{HOME}/apt-logins"
_OPTIONS = ("Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::Check-Valid-Until", "Acquire::Retries")
_TARGETS = ("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages")
_LOGIN_FILES = ("/etc/apt/auth.conf", "/etc/apt/auth.conf.d/*.conf")


def found(suite: str, environ: Mapping[str, str]) -> Found:
    """Return the configuration for steps in images of this Debian suite. Without one apt has the image's sources."""
    lines = sources(suite) if suite else []
    uris = [line.split()[1] for line in lines] or (output_of(_TARGETS, environ) or "").split()
    urls = [parsed for uri in uris if (parsed := parse_url(uri)) is not None]
    around = proxies(environ)
    endpoints = [*(url.endpoint for url in urls), *around.endpoints]
    hosts = {url.endpoint.host for url in urls}
    logins = [url.login for url in urls if url.login is not None] + _logins(hosts)
    options, through = _options(environ)
    options.append(f'Acquire::https::CaInfo "{certificates.PATH}";')
    files = {}
    if usable := [line for line in lines if parse_url(line.split()[1]) is not None]:
        files[_SOURCES] = "".join(f"{_without_login(line)}\n" for line in usable).encode()
        options += [f'Dir::Etc::sourcelist "{_SOURCES}";', 'Dir::Etc::sourceparts "-";']
    if logins:
        files[_LOGINS] = netrc(logins)
        options.append(f'Dir::Etc::netrc "{_LOGINS}";')
    files[_CONFIGURATION] = "".join(f"{option}\n" for option in options).encode()
    return Found(
        endpoints=(*dict.fromkeys(endpoints), *through.endpoints),
        variables={**around.variables, "APT_CONFIG": _CONFIGURATION},
        files=files,
        secrets=(*(login.password for login in logins), *around.secrets, *through.secrets),
        notes=("apt of this machine names no mirror that a sandbox can reach",) if not urls else (),
        complete=bool(urls),
    )


def _without_login(line: str) -> str:
    words = line.split()
    parsed = parse_url(words[1])
    return " ".join([words[0], parsed.url if parsed is not None else words[1], *words[2:]])


def _options(environ: Mapping[str, str]) -> tuple[list[str], Found]:
    output = output_of(("apt-config", "dump", "--no-empty", "--format", "%F %v%n", *_OPTIONS), environ) or ""
    options, endpoints, secrets = [], [], []
    for line in output.splitlines():
        name, _, value = line.partition(" ")
        if not value or '"' in value:
            continue
        options.append(f'{name} "{value}";')
        if name.endswith("::Proxy") and (parsed := parse_url(value)) is not None:
            endpoints.append(Endpoint(parsed.endpoint.host, parsed.endpoint.port, "tcp"))
            secrets += [parsed.login.password] if parsed.login is not None else []
    return options, Found(tuple(endpoints), secrets=tuple(secrets))


def _logins(hosts: set[str]) -> list[Login]:
    """Return the credentials in apt's own files, as far as they are for these hosts."""
    logins = []
    for path in (path for pattern in _LOGIN_FILES for path in sorted(glob.glob(pattern))):
        words = read_text(path).split()
        entry: dict[str, str] = {}
        for name, value in itertools.pairwise(words):
            if name == "machine":
                entry = {"machine": value.partition("://")[2] or value}
            elif name in ("login", "password"):
                entry[name] = value
            host = entry.get("machine", "").partition("/")[0].partition(":")[0]
            if name == "password" and host in hosts and "login" in entry:
                logins.append(Login(entry["machine"], entry["login"], value))
    return logins

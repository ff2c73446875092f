"""The configuration of this machine's npm: its registries, proxies and credentials."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from atoll.builds.mirrors.endpoint import HOME, Endpoint, Found, output_of, parse_url, read_text

_FILE = f"{HOME}/npmrc"
_VARIABLE = re.compile(r"\$\{([A-Za-z0-9_]+)\}")
_SECRET = re.compile(r"^//(?P<place>[^\s=]+):(?P<name>_authToken|_auth|_password|username|email)\s*=\s*(?P<value>.+)$")
_SCOPE = re.compile(r"^(?P<scope>@[A-Za-z0-9._-]+):registry\s*=\s*(?P<url>\S+)$")


def found(environ: Mapping[str, str]) -> Found:
    settings = _settings(environ)
    registry = parse_url(settings.get("registry", ""))
    if registry is None:
        return Found(notes=("the registry of npm is not known: there is no npm on this machine",), complete=False)
    own = [read_text(path) for name in ("globalconfig", "userconfig") if (path := settings.get(name, ""))]
    lines = [line.strip() for text in own for line in text.splitlines()]
    scopes = {
        match["scope"]: url for line in lines if (match := _SCOPE.match(line)) and (url := parse_url(match["url"]))
    }
    endpoints = [registry.endpoint, *(url.endpoint for url in scopes.values())]
    written = [f"registry={registry.url}", *(f"{scope}:registry={url.url}" for scope, url in scopes.items())]
    secrets = []
    for line, secret in _logins(lines, {each.host for each in endpoints}, environ):
        written.append(line)
        secrets.append(secret)
    for name in ("proxy", "https-proxy"):
        if (proxy := parse_url(settings.get(name, ""))) is not None:
            endpoints.append(Endpoint(proxy.endpoint.host, proxy.endpoint.port, "tcp"))
            written.append(f"{name}={settings[name]}")
            secrets += [proxy.login.password] if proxy.login is not None else []
    return Found(
        endpoints=tuple(dict.fromkeys(endpoints)),
        variables={"npm_config_userconfig": _FILE},
        files={_FILE: "".join(f"{line}\n" for line in written).encode()},
        secrets=tuple(secrets),
    )


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of npm, without credentials, which it does not show."""
    try:
        found = json.loads(output_of(("npm", "config", "list", "--long", "--json"), environ) or "{}")
    except ValueError:
        return {}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _logins(lines: list[str], hosts: set[str], environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the lines with credentials for these hosts, with variables of the environment filled in, and the secret of
    each."""
    for line in lines:
        match = _SECRET.match(line)
        if match and re.split("[:/]", match["place"])[0] in hosts:
            value = _VARIABLE.sub(lambda variable: environ.get(variable[1], ""), match["value"].strip().strip("'\""))
            yield f"//{match['place']}:{match['name']}={value}", value if match["name"].startswith("_") else ""

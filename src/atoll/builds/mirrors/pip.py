"""The configuration of this machine's pip: its indexes, proxy and credentials."""

from __future__ import annotations

import ast
import netrc as netrc_files
import os
import sys
from collections.abc import Iterator, Mapping

from atoll.builds.mirrors.endpoint import HOME, Endpoint, Found, Login, MirrorUrl, netrc, output_of, parse_url, proxies

_NETRC = f"{HOME}/netrc"
_DEFAULTS = "from pip._internal.models.index import PyPI as i; print(i.simple_url, 'https://' + i.file_storage_domain)"
_KEPT = ("trusted-host", "default-timeout", "timeout", "retries", "no-index")


def found(environ: Mapping[str, str]) -> Found:
    python, settings = _settings(environ)
    index = settings.get("index-url", "") or environ.get("UV_DEFAULT_INDEX", "") or environ.get("UV_INDEX_URL", "")
    known = [parsed for parsed in map(parse_url, index.split()) if parsed is not None]
    defaults: list[MirrorUrl] = []
    if not known and python is not None:
        words = (output_of((python, "-c", _DEFAULTS), environ) or "").split()
        defaults = [parsed for parsed in map(parse_url, words) if parsed is not None]
    more = {name: _urls(settings.get(name, "")) for name in ("extra-index-url", "find-links")}
    urls = [*known, *defaults, *(url for each in more.values() for url in each)]
    variables = {f"PIP_{name.replace('-', '_').upper()}": settings[name] for name in _KEPT if settings.get(name)}
    if known:
        variables["PIP_INDEX_URL"] = known[0].url
    for name, each in more.items():
        if each:
            variables[f"PIP_{name.replace('-', '_').upper()}"] = " ".join(url.url for url in each)
    around = proxies(environ)
    endpoints, secrets = [*(url.endpoint for url in urls), *around.endpoints], list(around.secrets)
    if proxy := parse_url(settings.get("proxy", "")):
        variables["PIP_PROXY"] = settings["proxy"]
        endpoints.append(Endpoint(proxy.endpoint.host, proxy.endpoint.port, "tcp"))
        secrets += [proxy.login.password] if proxy.login is not None else []
    logins = [*(url.login for url in urls if url.login is not None), *_logins({url.endpoint.host for url in urls})]
    files = {_NETRC: netrc(logins)} if logins else {}
    return Found(
        endpoints=tuple(dict.fromkeys(endpoints)),
        variables={**around.variables, **variables, **({"NETRC": _NETRC} if logins else {})},
        files=files,
        secrets=(*secrets, *(login.password for login in logins)),
        notes=() if known or defaults else ("the index of pip is not known: there is no pip on this machine",),
        complete=bool(known or defaults),
    )


def _settings(environ: Mapping[str, str]) -> tuple[str | None, dict[str, str]]:
    """Return the interpreter that has a pip, and the settings of pip, of which variables of the environment win."""
    for python in (sys.executable, "python3", "python"):
        output = output_of((python, "-m", "pip", "config", "list"), environ)
        if output is not None:
            parsed = sorted(_parsed(output), key=lambda item: item[0].startswith(":env:"))
            return python, {place.rpartition(".")[2]: value for place, value in parsed}
    return None, {}


def _parsed(output: str) -> Iterator[tuple[str, str]]:
    for line in output.splitlines():
        place, equals, written = line.partition("=")
        if equals and place.startswith(("global.", "install.", "download.", "user.", "site.", ":env:.")):
            try:
                yield place, str(ast.literal_eval(written))
            except (ValueError, SyntaxError):
                continue


def _urls(text: str) -> list[MirrorUrl]:
    """Return the URLs that can be reached from a sandbox. Directories of this machine cannot."""
    return [parsed for parsed in map(parse_url, text.split()) if parsed is not None]


def _logins(hosts: set[str]) -> list[Login]:
    """Return the credentials for these hosts in the netrc file of this user, which pip reads, too."""
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        entries = netrc_files.netrc(path).hosts
    except (OSError, netrc_files.NetrcParseError):
        return []
    return [Login(host, entries[host][0], entries[host][2] or "") for host in sorted(hosts & entries.keys())]

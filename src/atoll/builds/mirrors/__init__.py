"""This machine's own configuration of apt, pip and npm, for the RUN steps of builds.

RUN steps may reach exactly the hosts that the configuration names, also where their addresses are private, and get its
proxies, credentials and certificates. All of that is variables and files below `/run/atoll-build`, which are there only
while a RUN runs: nothing of it is in a layer, in a label, in the key of a step or in a log.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.builds.mirrors import apt, certificates, npm, pip
from atoll.builds.mirrors.endpoint import Endpoint, Found, rules_for
from atoll.errors import SpecError
from atoll.model.addresses import name_of_words
from atoll.model.network_policy import Rule

VARIABLE = "ATOLL_BUILD_MIRRORS"
Choice = bool | tuple[str, ...]
"""Whether builds use the configuration of this machine, or only what it says of these hosts."""
_WORDS = {"": None, "1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False}
_WORDS["off"] = False
_ANY = Rule(domain="*")


@dataclass(frozen=True, slots=True)
class Mirrors:
    """What RUN steps get of this machine's configuration. Its text shows neither credentials nor certificates."""

    rules: tuple[Rule, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Passwords and tokens among them, which no message may contain."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    @classmethod
    def of_machine(cls, choice: Choice = True, *, suite: str = "", environ: Mapping[str, str] | None = None) -> Mirrors:
        """Read the configuration. Blocks for some hundred milliseconds.

        `suite` is the Debian suite of the images in which the steps run; without it apt has the sources of the image.
        Where a client is not installed here, its hosts are unknown. Its steps may then reach every public host, unless
        `choice` names hosts.
        """
        environ = os.environ if environ is None else environ
        if choice is False:
            return cls()
        found = [apt.found(suite, environ), pip.found(environ), npm.found(environ)]
        named = None if choice is True else frozenset(choice)
        endpoints = [each for one in found for each in one.endpoints if named is None or each.host in named]
        rules, notes = rules_for([*endpoints, *(Endpoint(host, port) for host in named or () for port in (80, 443))])
        if named is None and not all(one.complete for one in found):
            rules = (*rules, _ANY)
        allowed = frozenset(each.host for each in endpoints)
        whole = Found.joined([*(one.only(allowed) for one in found), certificates.found(environ)])
        return cls(rules, whole.variables, whole.files, whole.secrets, (*whole.notes, *notes))

    def hidden(self, text: str) -> str:
        """Return a text without credentials."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def parse(text: str) -> Choice | None:
    """Parse the value of the setting: `true`, `false` or hosts separated by commas. Empty: None. Raises SpecError."""
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    return hosts_of([host.strip() for host in text.split(",") if host.strip()])


def hosts_of(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return names of hosts in their normal form. Raises SpecError."""
    try:
        return tuple(name_of_words(host) for host in hosts)
    except ValueError as error:
        raise SpecError(
            f"{VARIABLE} has a name that is no host: {error}", hint="Write true, false or hosts separated by commas."
        ) from error

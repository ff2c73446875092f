"""Secrets that never enter: headers that the gateway adds, to plain requests and, where that was chosen, to HTTPS."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from atoll import Sandbox, UnsupportedError
from atoll.network.client import Gateway
from atoll.settings import Settings
from needs import need, not_applicable
from network import world
from network.attacks import run
from network.conftest import Kind, Make
from network.internet import Internet
from network.test_life import gateway_processes

WEB, EVIL = world.WEB, world.EVIL
SECRET = "CANARY-KEY"
ADDED = {"Authorization": f"Bearer {SECRET}"}
POLICY = {
    "allowed_domains": ["allowed.test", "a.w.test", "stranger.test"],
    "inject": [
        {"domain": "allowed.test", "headers": ADDED, "tls": True},
        {"domain": "stranger.test", "headers": ADDED, "tls": True},
    ],
}


def test_headers_are_added_for_one_host_and_never_seen_inside(make: Make, kind: Kind) -> None:
    policy = {"allowed_domains": ["allowed.test", "a.w.test"], "inject": [{"domain": "allowed.test", "headers": ADDED}]}
    sandbox = make(kind, policy)
    ask = "connect('203.0.113.10', 80, get({!r}, extra='authorization: mine\\r\\n'))"
    assert SECRET in run(sandbox, ask.format("allowed.test")), "the host echoes what it got"
    other = run(sandbox, ask.format("a.w.test"))
    assert '"at": "WEB"' in other
    assert SECRET not in other
    for method in ("TRACE", "TRACK"):
        traced = run(sandbox, f"connect('203.0.113.10', 80, get('allowed.test').replace(b'GET', b'{method}'))")
        assert traced.startswith("HTTP/1.1 403")
    untouched = sandbox.exec("curl -sSk -m 20 --http1.1 https://allowed.test/").stdout
    assert '"at": "WEB"' in untouched
    assert SECRET not in untouched, "TLS passes as it is"
    is_clean_inside(sandbox)


def is_clean_inside(sandbox: Sandbox) -> None:
    inside = sandbox.exec(
        "cat /proc/*/environ /etc/resolv.conf /etc/hosts 2>/dev/null; env;"
        f"grep -rs -e {SECRET} -e 'PRIVATE KEY' /workspace /tmp /etc /run /var"
    )
    assert SECRET not in inside.stdout
    assert "PRIVATE KEY" not in inside.stdout


@pytest.fixture(scope="session")
def trusting(make: Make, kind: Kind) -> Sandbox:
    """One whose HTTPS requests to allowed.test get a header."""
    return make(kind, POLICY)


def test_headers_are_added_to_https_by_choice(trusting: Sandbox, internet: Internet) -> None:
    """Programs as they are: nothing is set inside, and each verifies whom it speaks to."""
    seen, _ = internet.mark()
    found = trusting.exec("curl -sS -m 20 -H 'Authorization: mine' -H 'X-Mine: 1' https://allowed.test/by-curl")
    assert found.stdout.count(SECRET) == 1, found
    assert '"mine"' not in found.stdout, "what the sandbox sent under that name is replaced"
    assert '"x-mine": "1"' in found.stdout
    python = "import urllib.request as u; print(u.urlopen('https://allowed.test/', timeout=20).read())"
    assert SECRET in trusting.exec(["python3", "-c", python]).stdout
    need("node")
    node = "fetch('https://allowed.test/').then(r => r.text()).then(console.log, e => console.log(e.cause))"
    assert SECRET in trusting.exec(["node", "-e", node]).stdout
    trusting.exec("git ls-remote https://allowed.test/none.git")
    asked = [each for each in internet.seen(seen) if each["kind"] == "http"]
    assert any("none.git" in each["line"] and SECRET in each["headers"]["authorization"] for each in asked)
    assert SECRET in trusting.exec("curl -sS -m 20 --http1.1 https://allowed.test/ https://allowed.test/2").stdout
    big = trusting.exec("curl -sS -m 30 https://allowed.test/bytes/30000000 | wc -c")
    assert big.stdout.strip() == "30000000"
    up = trusting.exec("head -c 3000000 /dev/zero | curl -sS -m 20 --data-binary @- https://allowed.test/up")
    assert '"body": 3000000' in up.stdout
    is_clean_inside(trusting)


def test_everything_else_stays_as_it_is(trusting: Sandbox, internet: Internet) -> None:
    """Another host is not read: whoever trusts only the sandbox's own authority does not trust that host."""
    untouched = trusting.exec("curl -sSk -m 20 --http1.1 https://a.w.test/").stdout
    assert '"at": "WEB"' in untouched
    assert SECRET not in untouched
    found = trusting.exec("curl -sS -m 20 https://a.w.test/")
    assert "certificate" in found.stderr, "its own certificate was seen, which nobody here trusts"
    assert SECRET not in trusting.exec("curl -sS -m 20 http://allowed.test/").stdout, "nor in plain requests"
    assert SECRET in trusting.exec("curl -sS -m 20 https://allowed.test/").stdout, "the control"


def test_every_request_in_it_is_judged(trusting: Sandbox, internet: Internet) -> None:
    seen, _ = internet.mark()
    program = f"""
import socket, ssl, sys
def ask(name, *heads):
    with socket.create_connection(("{EVIL}", 443), 10) as raw:
        with ssl.create_default_context().wrap_socket(raw, server_hostname=name) as tls:
            tls.sendall("".join(heads).encode())
            data = b""
            while data.count(b'"body"') < len(heads) and (piece := tls.recv(65536)):
                data += piece
            return data.decode()
get = "GET / HTTP/1.1\\r\\nHost: %s\\r\\n%s\\r\\n"
close = "Connection: close\\r\\n"
print("one", ask("allowed.test", get % ("evil.test", close))[:12])
print("two", ask("allowed.test", get % ("a.w.test", close))[:12])
print("trace", ask("allowed.test", (get % ("allowed.test", close)).replace("GET", "TRACE"))[:12])
print("good", "{SECRET}" in ask("allowed.test", get % ("allowed.test", ""), get % ("allowed.test", close)))
print("stranger", ask("stranger.test", get % ("stranger.test", close)).replace("\\r\\n", " ").strip())
"""
    found = trusting.exec(["python3", "-c", program])
    lines = dict(line.split(" ", 1) for line in found.stdout.splitlines())
    assert lines.pop("stranger").startswith("HTTP/1.1 502"), found
    assert lines == {"one": "HTTP/1.1 403", "two": "HTTP/1.1 403", "trace": "HTTP/1.1 403", "good": "True"}, found
    asked = [each for each in internet.seen(seen) if each["kind"] == "http"]
    assert {each["host"] for each in asked} == {"allowed.test"}, "a secret goes to nobody with a bad certificate"
    assert {each["at"] for each in asked} == {WEB}
    rules = {each.rule for each in trusting.network_log()}
    assert "the connection was made for allowed.test" in rules
    assert SECRET not in str(trusting.network_log())


def test_headers_are_added_where_everything_is_open(make: Make, kind: Kind, internet: Internet) -> None:
    if kind["engine"] != "native":
        not_applicable("decided by the gateway alone: the same for every engine")
    inject = [
        {"domain": "allowed.test", "headers": ADDED, "tls": True},
        {"domain": "a.w.test", "headers": ADDED},
    ]
    sandbox = make(kind, {"default": "allow", "inject": inject})
    found = {
        url: sandbox.exec(f"curl -sSk -m 20 {url}").stdout
        for url in (
            "https://allowed.test/",
            "http://allowed.test/",
            "https://a.w.test/",
            "http://a.w.test/",
            "http://evil.test/",
            f"http://{EVIL}/",
            f"https://{EVIL}/",
        )
    }
    assert {url for url, text in found.items() if SECRET in text} == {"https://allowed.test/", "http://a.w.test/"}
    assert all('"at": ' in text for text in found.values()), found
    assert "SSH-2.0" in run(sandbox, f"connect('{world.GIT}', 22)"), "a server that speaks first"


def test_websockets_pass_in_it_too(trusting: Sandbox) -> None:
    program = f"""
import socket, ssl
raw = socket.create_connection(("{WEB}", 443), 20)
tls = ssl.create_default_context().wrap_socket(raw, server_hostname="allowed.test")
upgrade = "Connection: Upgrade\\r\\nUpgrade: websocket\\r\\n"
tls.sendall(f"GET /ws HTTP/1.1\\r\\nHost: allowed.test\\r\\n{{upgrade}}\\r\\n".encode())
head = b""
while b"\\r\\n\\r\\n" not in head: head += tls.recv(1000)
tls.sendall(b"hello")
print(head[:12].decode(), tls.recv(100).decode())
"""
    found = trusting.exec(["python3", "-c", program])
    assert found.stdout.strip() == "HTTP/1.1 101 olleh", found


def test_it_is_the_same_after_the_gateway_died(settings: Settings, make: Make, kind: Kind, internet: Internet) -> None:
    if kind["engine"] != "native":
        not_applicable("decided by the gateway alone: the same for every engine")
    sandbox = make(kind, POLICY)
    _, workers = gateway_processes(settings)
    os.kill(workers[0], signal.SIGKILL)
    look = f"until curl -s -m 20 https://allowed.test/ | grep -o {SECRET}; do sleep 0.05; done"
    assert sandbox.exec(look).stdout.strip() == SECRET


def test_an_authority_is_one_sandboxs_own(
    settings: Settings, make: Make, kind: Kind, trusting: Sandbox, internet: Internet
) -> None:
    other = make(kind, POLICY)
    bundle = "cat /etc/ssl/certs/ca-certificates.crt"
    mine, theirs = (each.exec(bundle).stdout[-900:] for each in (trusting, other))
    assert "END CERTIFICATE" in mine
    assert mine != theirs
    place = Gateway(settings).files.authority(trusting.id)
    assert place.stat().st_mode & 0o777 == 0o600
    for line in place.read_text().splitlines()[1:3]:
        assert line not in trusting.exec("grep -rs . /etc/ssl /run /workspace").stdout, "its key is not inside"
    trusting.write_file("theirs.pem", theirs[theirs.rindex("-----BEGIN") :])
    refused = trusting.exec("curl -sS -m 20 --cacert theirs.pem https://allowed.test/")
    assert "certificate" in refused.stderr
    other.cleanup()
    assert not Gateway(settings).files.authority(other.id).exists()
    assert not list(settings.data_dir.glob(f"**/trusted/{other.id}"))


def test_it_holds_through_the_life_of_a_sandbox(settings: Settings, make: Make, kind: Kind, internet: Internet) -> None:
    sandbox = make(kind, POLICY)
    look = "curl -sS -m 20 https://allowed.test/"
    sandbox.pause()
    sandbox.resume()
    assert SECRET in sandbox.exec(look).stdout
    changed = {**POLICY, "inject": [{"domain": "a.w.test", "headers": {"X-Other": "CANARY-OTHER"}, "tls": True}]}
    sandbox.set_network(changed)
    assert "CANARY-OTHER" in sandbox.exec("curl -sS -m 20 https://a.w.test/").stdout
    assert "certificate" in sandbox.exec(look).stderr, "now it passes as it is"
    sandbox.set_network(POLICY)
    attached = Sandbox.attach(sandbox.id, engine=kind["engine"], settings=settings)
    assert SECRET in attached.exec(look).stdout
    attached.detach()
    plain = make(kind, {"allowed_domains": ["allowed.test"]})
    with pytest.raises(UnsupportedError, match="trusts no authority"):
        plain.set_network(POLICY)
    kept = sandbox.checkpoint()
    sandbox.rollback(kept.id)
    assert SECRET in sandbox.exec(look).stdout
    (twin,) = sandbox.fork(1)
    with twin:
        assert SECRET in twin.exec(look).stdout
        bundle = "tail -c 900 /etc/ssl/certs/ca-certificates.crt"
        assert twin.exec(bundle).stdout != sandbox.exec(bundle).stdout, "a fresh authority"
    secrets = [path for path in settings.data_dir.glob("oci/**/*") if path.is_file() and contains(path)]
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets), secrets
    assert not [path for path in secrets if "layers" in path.parts]


def contains(path: Path) -> bool:
    with path.open("rb") as file:
        return SECRET.encode() in file.read(1 << 20)

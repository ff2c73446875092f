"""Group I: ways around a policy by name. The servers of the offline internet say what reached them."""

from __future__ import annotations

import pytest

from atoll import Sandbox
from needs import not_applicable
from network import world
from network.attacks import PRELUDE, run
from network.conftest import Kind, Make
from network.internet import Internet
from network.test_isolation import destinations, names_asked, web_requests

WEB, EVIL, GIT, PRIVATE, METADATA = world.WEB, world.EVIL, world.GIT, world.PRIVATE, world.METADATA


def test_names_match_whole_labels_in_any_spelling(internet: Internet, named: Sandbox) -> None:
    seen, packets = internet.mark()
    good = ("allowed.test", "ALLOWED.test", "allowed.test.", "a.w.test", "A.W.TEST:80")
    bad = (
        "notallowed.test",
        "allowed.test.evil.test",
        "xw.test",
        "w.test",
        "evil.test",
        "allowed.test..",
        ".allowed.test",
        "evil.test\\0.allowed.test",
        "evil.test%00.allowed.test",
        "allowed.test@evil.test",
        "allowed.test:81",
        "",
        "allowed.test, evil.test",
        "203.0.113.66",
        "3405803842",
        "0xcb007142",
        "[::ffff:203.0.113.66]",
        "a.w.test:x",
    )
    found = run(named, f"[connect('{EVIL}', 80, get(h)) for h in {good!r}]")
    assert all('"at": "WEB"' in each for each in found), "the gateway goes to the name, not to the address"
    refused = run(named, f"[connect('{WEB}', 80, get(h)) for h in {bad!r}]")
    assert all(each.startswith(("HTTP/1.1 403", "HTTP/1.1 400")) for each in refused), refused
    assert {at for at, _ in web_requests(internet, seen)} == {WEB}
    assert len(web_requests(internet, seen)) == len(good)
    assert not [each for each in destinations(internet, packets) if each.startswith(EVIL) and not each.endswith(".53")]
    assert set(names_asked(internet, seen)) <= {"allowed.test", "a.w.test"}


def test_a_refusal_says_why(named: Sandbox) -> None:
    found = named.exec("curl -sS -m 20 --resolve evil.test:80:203.0.113.66 http://evil.test/")
    assert found.stdout == "atoll: http://evil.test:80 is refused by this sandbox's network policy: no rule allows it\n"
    assert any(
        (each.name, each.destination, each.rule) == ("evil.test", "203.0.113.66:80", "no rule allows it")
        for each in named.network_log()
    )
    assert (
        "access denied" in named.exec("curl -sSk -m 20 --resolve evil.test:443:203.0.113.66 https://evil.test/").stderr
    )


def test_every_request_of_a_connection_is_judged(internet: Internet, named: Sandbox) -> None:
    seen, _ = internet.mark()
    keep = "GET / HTTP/1.1\\r\\nHost: {}\\r\\n\\r\\n"
    both = keep.format("allowed.test") + keep.format("evil.test")
    found = run(named, f"connect('{WEB}', 80, b'{both}', answers=2)")
    assert {host for _, host in web_requests(internet, seen)} <= {"allowed.test"}
    assert found.count("200 OK") <= 1
    # Another allowed name is another destination too.
    other = keep.format("allowed.test") + keep.format("a.w.test")
    run(named, f"connect('{WEB}', 80, b'{other}', answers=2)")
    assert "a.w.test" not in {host for _, host in web_requests(internet, seen)}
    same = keep.format("allowed.test") * 3
    same = same.replace("GET /", "GET /same")  # what was refused half-way may still arrive now
    run(named, f"connect('{WEB}', 80, b'{same}' + get('allowed.test', '/same'), answers=4)")
    lines = [each["line"] for each in internet.seen(seen) if each["kind"] == "http"]
    assert lines.count("GET /same HTTP/1.1") == 4, "the control: many requests on one connection"


SMUGGLED = {
    "two lengths": "POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nContent-Length: 5\\r\\nContent-Length: 50\\r\\n\\r\\n",
    "length and chunks": "POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nContent-Length: 5\\r\\n"
    "Transfer-Encoding: chunked\\r\\n\\r\\n",
    "odd coding": "POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nTransfer-Encoding: xchunked\\r\\n\\r\\n",
    "coding twice": "POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nTransfer-Encoding: chunked, chunked\\r\\n\\r\\n",
    "signed length": "POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nContent-Length: +5\\r\\n\\r\\n",
    "folded": "GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\n Host: evil.test\\r\\n\\r\\n",
    "space before colon": "GET / HTTP/1.1\\r\\nHost : evil.test\\r\\nHost: allowed.test\\r\\n\\r\\n",
    "two hosts": "GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\nHost: evil.test\\r\\n\\r\\n",
    "bare line feeds": "GET / HTTP/1.1\\nHost: allowed.test\\nX: y\\n\\n\\r\\n\\r\\n",
    "bare feed in value": "GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\nX: y\\nHost: evil.test\\r\\n\\r\\n",
    "no host": "GET / HTTP/1.1\\r\\n\\r\\n",
    "old": "GET /\\r\\n\\r\\n",
    "target elsewhere": "GET http://evil.test/ HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n",
    "connect": "CONNECT evil.test:443 HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n",
    "connect allowed": "CONNECT allowed.test:443 HTTP/1.1\\r\\nHost: allowed.test:443\\r\\n\\r\\n",
    "http 2": "PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n",
    "nul": "GET /\\0 HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n",
}


def test_requests_that_two_could_read_differently_are_refused(internet: Internet, named: Sandbox) -> None:
    seen, _ = internet.mark()
    texts = "[" + ",".join(f"b'{text}' + get('evil.test', '/smuggled')" for text in SMUGGLED.values()) + "]"
    found = dict(zip(SMUGGLED, run(named, f"[connect('{WEB}', 80, d) for d in {texts}]"), strict=True))
    assert {name: text[:12] for name, text in found.items() if not text.startswith("HTTP/1.1 4")} == {}
    assert web_requests(internet, seen) == []


def test_chunks_are_written_anew(internet: Internet, named: Sandbox) -> None:
    body = '4;x=\\"y\\"\\r\\nabcd\\r\\n0\\r\\nX-Trailer: 1\\r\\n\\r\\n'
    head = "POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nTransfer-Encoding: chunked\\r\\n"
    head += "Upgrade: h2c\\r\\nHTTP2-Settings: x\\r\\n\\r\\n"
    seen, _ = internet.mark()
    found = run(named, f'connect("{WEB}", 80, b"{head}" + b"{body}" + get("allowed.test"), answers=2)')
    assert found.count("200 OK") == 2
    asked = [each for each in internet.seen(seen) if each["kind"] == "http"]
    assert len(asked) == 2, "one request, and the one after it"
    assert "upgrade" not in asked[0]["headers"]
    assert "http2-settings" not in asked[0]["headers"]


def test_uploads_and_websockets_pass(named: Sandbox) -> None:
    found = named.exec(
        "head -c 3000000 /dev/zero | curl -sS -m 20 -T - http://allowed.test/up;"
        "head -c 3000000 /dev/zero | curl -sS -m 20 --data-binary @- http://allowed.test/up"
    )
    assert found.stdout.count('"body": 3') == 2, found
    upgrade = "Upgrade: websocket\\r\\n"
    start = f"GET /ws HTTP/1.1\\r\\nHost: allowed.test\\r\\nConnection: Upgrade\\r\\n{upgrade}\\r\\n"
    talk = (
        f"(lambda s: (s.sendall(b'{start}'), s.recv(999), s.sendall(b'hello'), s.recv(99).decode()))"
        f"(socket.create_connection(('{WEB}', 80)))[3]"
    )
    assert run(named, talk) == "olleh"
    # Without the server's consent the connection stays one of requests.
    refused = start.replace("/ws", "/no") + "GET / HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n"
    found = run(named, f"connect('{WEB}', 80, b'{refused}', answers=2)")
    assert found.startswith("HTTP/1.1 200")
    assert "403 Forbidden" in found


@pytest.mark.parametrize("framing", ["Content-Length: 5", "Transfer-Encoding: chunked"])
def test_nothing_of_an_upgrade_with_a_body_is_sent(internet: Internet, named: Sandbox, framing: str) -> None:
    seen, _ = internet.mark()
    head = "GET /no HTTP/1.1\\r\\nHost: allowed.test\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n"
    found = run(named, f"connect('{WEB}', 80, b'{head}{framing}\\r\\n\\r\\n5\\r\\nhello\\r\\n0\\r\\n\\r\\n')")
    assert found.startswith("HTTP/1.1 400")
    assert "an upgrade must not have a body" in found
    assert run(named, f"connect('{WEB}', 80, get('allowed.test', '/after'))").startswith("HTTP/1.1 200")
    assert [each["line"] for each in internet.seen(seen) if each["kind"] == "http"] == ["GET /after HTTP/1.1"]


def test_tls_goes_by_its_server_name(internet: Internet, named: Sandbox) -> None:
    seen, packets = internet.mark()
    control = named.exec("curl -sSk -m 20 --http1.1 https://allowed.test/")
    assert '"at": "WEB"' in control.stdout
    bad = (
        "hello('evil.test')",
        "hello(None)",
        "hello('evil.test\\0.allowed.test')",
        "hello('allowed.test', ech=True)",
        "hello('203.0.113.10')",
        "hello('')",
        "hello('xallowed.test')",
        "b'\\x80\\x2e\\x01\\0\\x02' + b'a'*40",
        "b'\\x16\\x03\\x01\\xff\\xff' + b'a'*70000",
        "b'\\x16\\x03\\x01\\0\\x05\\x02\\0\\0\\x01\\0'",
        "b'\\x16\\x03\\x01\\0\\0'",
        "b'SSH-2.0-x\\r\\n'",
        "b'\\0'*100",
        "hello('evil.test', names=1)[:20]",
    )
    found = run(named, f"[connect('{WEB}', 443, d, 7) for d in ({','.join(bad)},)]", timeout=60)
    assert all(each in ("", "\x15\x03\x03\x00\x02\x02\x31") or "error" in each for each in found), found
    assert not [each for each in destinations(internet, packets) if each.startswith(EVIL) and not each.endswith(".53")]
    assert len(web_requests(internet, seen)) == 1
    rules = {each.rule for each in named.network_log()}
    assert "an encrypted hello hides the name" in rules


def test_a_hello_in_pieces_is_read_as_one(named: Sandbox) -> None:
    data = run(named, f"connect('{EVIL}', 443, real_hello('allowed.test'), pieces=50, pause=0.01, enough=1)")
    assert data[:1] == "\x16", "a real server answered"
    split = "b''.join(b'\\x16\\x03\\x01\\0\\x01' + bytes((b,)) for b in hello('evil.test')[5:])"
    assert run(named, f"connect('{WEB}', 443, {split})") == "\x15\x03\x03\x00\x02\x02\x31"


@pytest.mark.parametrize("name", ["inside.test", "loop.test", "mixed.test", "meta.test", "host.test", "rebind"])
def test_an_allowed_name_that_leads_inside_is_refused(internet: Internet, make: Make, kind: Kind, name: str) -> None:
    if kind["engine"] != "native" and name != "rebind":
        not_applicable("decided by the gateway alone: the same for every engine")
    rebinds = name == "rebind"
    if rebinds:
        name = f"rebind-{kind['engine']}.test"
    sandbox = make(kind, {"allowed_domains": [name]})
    seen, packets = internet.mark()
    command = f"curl -sS -m 20 http://{name}/; curl -sS -m 20 --resolve {name}:80:{WEB} http://{name}/;"
    if rebinds:
        # Each answer is good for a second, and the third of them leads inside.
        command = f"for i in 1 2 3; do curl -sS -m 20 http://{name}/; sleep 1.2; done; {command}"
    found = sandbox.exec(command)
    text = found.stdout + found.stderr
    assert "CANARY" not in text
    assert all(at == EVIL for at, _ in web_requests(internet, seen))
    assert not [each for each in destinations(internet, packets) if not each.startswith(EVIL)]
    assert any("leads to" in each.rule or "this host" in each.rule for each in sandbox.network_log())
    if rebinds:
        assert "EVIL" in text, "the control: at first it led outside"


def test_a_star_is_every_name_and_nothing_inside(internet: Internet, make: Make, kind: Kind) -> None:
    if kind["engine"] != "native":
        not_applicable("decided by the gateway alone: the same for every engine")
    sandbox = make(kind, {"allowOutbound": True, "allowedDomains": ["*"]})
    seen, packets = internet.mark()
    inside = ("inside.test", "meta.test", "loop.test", "host.test", PRIVATE, METADATA)
    hosts = " ".join(("allowed.test", "stranger.test", *inside))
    found = sandbox.exec(
        f"for host in {hosts}; do curl -sS -m 20 http://$host/; done; curl -sS -m 20 http://{WEB}:8080/"
    )
    assert "CANARY" not in found.stdout + found.stderr
    assert web_requests(internet, seen) == [(WEB, "allowed.test"), (WEB, "stranger.test")]
    resolver = f"{EVIL}.53"
    assert destinations(internet, packets) <= {f"{WEB}.80", resolver}


def test_what_is_open_can_be_denied_by_name(internet: Internet, make: Make, kind: Kind) -> None:
    sandbox = make(kind, {"default": "allow", "denied_domains": ["evil.test"]})
    seen, _ = internet.mark()
    both = "GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\nGET / HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n"
    found = run(
        sandbox,
        f"[connect('{EVIL}', 80, get('evil.test')), connect('{EVIL}', 443, hello('evil.test')),"
        f" connect('{WEB}', 80, b'{both}'),"
        f" connect('{GIT}', 22), connect('{EVIL}', 80, get('allowed.test')), connect('{EVIL}', 443, hello(None))]",
    )
    assert found[0].startswith("HTTP/1.1 403")
    assert found[1] == "\x15\x03\x03\x00\x02\x02\x31"
    assert "SSH" in found[3]
    assert '"at": "WEB"' in found[4]
    assert found[5] == "\x15\x03\x03\x00\x02\x02\x31", "without a name it cannot be told from the denied one"
    assert {host for _, host in web_requests(internet, seen)} == {"allowed.test"}


def test_redirects_are_the_sandboxs_own_business(internet: Internet, named: Sandbox) -> None:
    seen, packets = internet.mark()
    found = named.exec("curl -sS -m 20 -i http://allowed.test/redirect; curl -sSL -m 20 http://allowed.test/redirect")
    assert "302 Found" in found.stdout
    assert "CANARY" not in found.stdout
    assert {at for at, _ in web_requests(internet, seen)} == {WEB}
    assert not [each for each in destinations(internet, packets) if each.startswith("169.254")]


def test_other_protocols_go_by_names_that_were_asked_for(internet: Internet, make: Make, kind: Kind) -> None:
    sandbox = make(kind, {"rules": [{"domain": "git.test", "port": 22, "protocol": "tcp"}]})
    assert "error" in run(sandbox, f"connect('{GIT}', 22)"), "not before its name was asked for"
    assert "SSH-2.0" in run(sandbox, "connect(socket.gethostbyname('git.test'), 22)")
    assert "error" in run(sandbox, f"connect('{GIT}', 5432)")
    assert "error" in run(sandbox, f"connect('{WEB}', 22)")


def test_idle_connections_of_one_do_not_stop_another(make: Make, kind: Kind, named: Sandbox) -> None:
    if kind["engine"] != "native":
        not_applicable("decided by the gateway alone: the same for every engine")
    greedy = make(kind, {"allowed_domains": ["allowed.test"]})
    lines = (
        "import socket, time",
        "found = []",
        "for i in range(1500):",
        "  s = socket.socket(); s.settimeout(2)",
        f"  try: s.connect(('{WEB}', 443)); found.append(s)",
        "  except OSError: pass",
        "print('held', len(found), flush=True)",
        "time.sleep(60)",
    )
    greedy.write_file("h.py", "\n".join(lines))
    command = greedy.start("python3 h.py > held 2>&1")
    greedy.exec("until grep -q . held; do sleep 0.02; done")
    assert '"at": "WEB"' in named.exec("curl -sS -m 20 http://allowed.test/").stdout
    assert any("connections at once" in each.rule for each in greedy.network_log())
    command.kill()


def test_questions_count_with_the_connections_of_their_sandbox(make: Make, kind: Kind, named: Sandbox) -> None:
    if kind["engine"] != "native":
        not_applicable("decided by the gateway alone: the same for every engine")
    greedy = make(kind, {"allowed_domains": ["allowed.test"]})
    lines = (
        "ask = lambda: datagram('203.0.113.66', 53, question('allowed.test'))",
        "held = [socket.create_connection(('203.0.113.66', 53)) for _ in range(1024)]",
        "while not ask().startswith('error'): pass",
        "for each in held: each.close()",
        "while ask().startswith('error'): pass",
    )
    found = greedy.exec(["python3", "-c", "\n".join((PRELUDE, *lines))])
    assert found.success, found.stderr
    assert "allowed" in run(named, f"datagram('{EVIL}', 53, question('allowed.test'), 15)")


def test_a_refusal_says_who(make: Make, kind: Kind) -> None:
    sandbox = make(kind, {"allowed_domains": ["allowed.test"]})
    done = sandbox.exec(
        f"curl -s -m 20 http://{EVIL}:9/; curl -s -m 20 --resolve evil.test:80:{EVIL} http://evil.test/;"
        f'curl -s -m 20 http://evil.test/; python3 -c "import socket as s; u = s.socket(2, 2); u.settimeout(1)\n'
        f"u.sendto(b'x', ('{EVIL}', 9999))\ntry: u.recv(1)\nexcept OSError: pass\"; true"
    )
    assert done.success
    found: dict[str, str] = {}
    while set(found) != {"tcp", "web", "dns", "udp"}:
        found = {each.protocol: each.process for each in sandbox.network_log()}
    if "isolation" in kind:
        assert set(found.values()) == {""}, "a kernel of its own tells nobody"
        return
    assert found["tcp"].startswith("curl["), found
    assert found["web"].startswith("curl["), found
    assert found["dns"].startswith("curl["), found
    assert found["udp"].startswith("python3["), found

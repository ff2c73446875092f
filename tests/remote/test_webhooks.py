"""A server tells another what happens: signed, once, to whom it should; and who cannot be told asks."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from atoll.settings import Settings
from atoll.signature import HEADER, SignatureError, Verifier
from remote.receiving import Receiver
from server.conftest import new_user
from server.running import RunningServer, everything, new_folder, running_server
from server.test_kill import free_port

PATIENCE_S = 20.0
NEVER_S = "3600"


@pytest.fixture(scope="module")
def back(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> Iterator[RunningServer]:
    need_engine("bubblewrap", session_settings)
    with running_server(new_folder(session_folder, "told"), "bubblewrap", ATOLL_WEBHOOK_HOSTS="127.0.0.1") as running:
        yield running


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def front_of(back: RunningServer, **options: str) -> dict[str, str]:
    assert back.key is not None
    return {"ATOLL_URL": back.url, "ATOLL_API_KEY": back.key, **options}


def dies_behind(front: RunningServer, back: RunningServer) -> None:
    """A sandbox is deleted on the server behind: the one in front finds out, though nobody asks it for that one."""
    with front.client() as ours, back.client() as theirs:
        id = ours.post("/sandboxes").json()["id"]
        (far,) = theirs.get("/sandboxes/search", params={"name": id}).json()["items"]
        assert theirs.delete(f"/sandboxes/{far['id']}").status_code == 200
        until(lambda: id not in [info["id"] for info in everything(ours)], "it is not noticed")
        assert ours.get(f"/sandboxes/{id}").json()["cause"] == "lost"


@pytest.mark.timeout(180)
def test_a_change_is_told_and_nobody_else_can_tell_one(session_folder: Path, back: RunningServer) -> None:
    port = free_port()
    receive = f"http://127.0.0.1:{port}/api/v1/engine-events"
    with Receiver(passes_on_to=receive) as between:
        options = front_of(back, ATOLL_PUBLIC_URL=between.url, ATOLL_POLLING_INTERVAL=NEVER_S)
        with running_server(session_folder / "hears", "remote", port, **options) as front:
            until(lambda: len(between.messages) > 0, "the server behind does not call")
            dies_behind(front, back)
            assert between.events()
            with back.client() as theirs:
                (hook,) = [
                    hook for hook in theirs.get("/webhooks").json()["items"] if hook["url"].startswith(between.url)
                ]
            assert (hook["failing"], hook["delivered"] > 0) == (False, True)
            # Whatever went over the wire is worth nothing to whoever saw it.
            for signature, body in between.messages:
                assert refusal(receive, signature, body) == "this message was already received (replay)"
                assert refusal(receive, signature, body + b" ") == "invalid signature"
                assert refusal(receive, signature.replace("t=1", "t=2"), body) == "invalid signature"
            assert refusal(receive, "", b"{}") == "invalid signature"


def refusal(url: str, signature: str, body: bytes) -> str:
    answer = httpx.post(url, content=body, headers={HEADER: signature}, trust_env=False)
    assert (answer.status_code, answer.json()["code"]) == (401, "bad_signature")
    return str(answer.json()["detail"])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("url", ["", "http://127.0.0.1:1"], ids=["no URL", "an URL where nobody is"])
def test_who_cannot_be_told_asks(session_folder: Path, back: RunningServer, url: str) -> None:
    options = front_of(back, ATOLL_PUBLIC_URL=url, ATOLL_POLLING_INTERVAL="0.5")
    with running_server(session_folder / f"asks{len(url)}", "remote", **options) as front:
        dies_behind(front, back)


@pytest.mark.timeout(180)
def test_who_is_not_told_any_more_asks(session_folder: Path, back: RunningServer) -> None:
    port = free_port()
    with Receiver(passes_on_to=f"http://127.0.0.1:{port}/api/v1/engine-events") as between:
        options = front_of(back, ATOLL_PUBLIC_URL=between.url, ATOLL_POLLING_INTERVAL="1")
        with running_server(session_folder / "deaf", "remote", port, **options) as front:
            until(lambda: len(between.messages) > 0, "the server behind does not call")
            between.close()
            dies_behind(front, back)


# --- the side that tells ----------------------------------------------------------------------------------------------


def lease(client: httpx.Client, url: str, secret: str, **more: object) -> httpx.Response:
    return client.put("/webhooks", json={"url": url, "secret": secret, **more})


@pytest.mark.timeout(120)
def test_nothing_is_left_out_when_the_receiver_fails_for_a_while(back: RunningServer) -> None:
    secret = secrets.token_hex(32)
    with Receiver() as receiver, back.client() as admin:
        ann = new_user(admin, f"ann{secrets.token_hex(3)}")
        with back.client(ann.key) as client:
            first = lease(client, receiver.url, secret).json()
            assert lease(client, receiver.url, secret).json()["id"] == first["id"], "renewing is no new one"
            receiver.failures = 3
            id = client.post("/sandboxes").json()["id"]
            client.delete(f"/sandboxes/{id}")
            wanted = [event["number"] for event in client.get("/events").json()["items"]]
            until(lambda: [event["number"] for event in receiver.events()] == wanted, "events are missing")
            assert receiver.refused == 3
            assert {event["sandbox_id"] for event in receiver.events()} == {id}
            verifier = Verifier(bytes.fromhex(secret))
            for signature, body in receiver.messages:
                verifier.check(signature, body)
                with pytest.raises(SignatureError):
                    verifier.check(signature, body)
            # Its key is revoked: nothing is told any more, and it is forgotten.
            (key,) = client.get("/keys").json()["items"]
            told = len(receiver.messages)
            assert admin.delete(f"/keys/{key['id']}").status_code == 204
            other = admin.post("/sandboxes").json()["id"]
            admin.delete(f"/sandboxes/{other}")
            until(lambda: receiver.url not in admin.get("/webhooks").text, "a webhook outlives its key")
            assert len(receiver.messages) == told


def test_an_url_must_answer_the_challenge(back: RunningServer) -> None:
    class Silent(Receiver):
        def take(self, signature: str, body: bytes) -> tuple[int, bytes]:
            return 200, b"{}"

    with Silent() as receiver, back.client() as client:
        refused = lease(client, receiver.url, secrets.token_hex(32))
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
        assert client.get("/webhooks").json()["items"] == [] or receiver.url not in client.get("/webhooks").text


def test_webhooks_are_their_owners_and_have_a_number(back: RunningServer) -> None:
    with Receiver() as receiver, back.client() as admin:
        ann, bob = (new_user(admin, f"{name}{secrets.token_hex(3)}") for name in ("ann", "bob"))
        with back.client(ann.key) as hers, back.client(bob.key) as his:
            mine = lease(hers, f"{receiver.url}/0", secrets.token_hex(32)).json()
            assert his.get("/webhooks").json()["items"] == []
            assert his.delete(f"/webhooks/{mine['id']}").status_code == 404
            for number in range(1, 8):
                assert lease(hers, f"{receiver.url}/{number}", secrets.token_hex(32)).status_code == 200
            assert lease(hers, f"{receiver.url}/8", secrets.token_hex(32)).status_code == 429
            for hook in hers.get("/webhooks").json()["items"][2:]:
                assert hers.delete(f"/webhooks/{hook['id']}").status_code == 204

            def another(number: int) -> int:
                with back.client(ann.key) as client:
                    return lease(client, f"{receiver.url}/more/{number}", secrets.token_hex(32)).status_code

            with ThreadPoolExecutor(12) as threads:
                answers = Counter(threads.map(another, range(12)))
            assert answers == {200: 6, 429: 6}, "many at once are no more than one after another"
            for hook in hers.get("/webhooks").json()["items"]:
                assert hers.delete(f"/webhooks/{hook['id']}").status_code == 204
            assert hers.get("/webhooks").json()["items"] == []


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:{port}/",
        "http://127.1:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "http://2130706433:{port}/",
        "http://0.0.0.0:{port}/",
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1/",
        "http://user@127.0.0.1:{port}/",
        "file:///etc/passwd",
        "gopher://127.0.0.1:{port}/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:{port}/#x",
    ],
)
def test_nothing_of_the_servers_own_network_is_reached(back: RunningServer, url: str) -> None:
    """127.0.0.1 is allowed on this server by its very name, and nothing else that leads there."""
    with Receiver() as receiver, back.client() as admin:
        wanted = url.replace("{port}", receiver.url.rpartition(":")[2])
        assert lease(admin, wanted, secrets.token_hex(32)).status_code == 422
        assert receiver.messages == []


def test_a_redirection_is_not_followed(back: RunningServer) -> None:
    with Receiver() as target, Receiver() as receiver, back.client() as admin:
        receiver.redirects_to = target.url
        assert lease(admin, receiver.url, secrets.token_hex(32)).status_code == 422
        assert (len(receiver.messages), target.messages) == (1, [])

"""Sandboxes over REST: the seed's table, with the right codes."""

from __future__ import annotations

import concurrent.futures

import httpx

from server.conftest import Person, new_user
from server.running import RunningServer


def test_what_a_sandbox_uses_is_told_when_asked_for(client: httpx.Client, sandbox: str) -> None:
    assert client.get(sandbox).json()["resources"] is None
    used = client.get(sandbox, params={"resources": "true"}).json()["resources"]
    assert used["pids"] >= 1
    assert used["memory_bytes"] > 0


def test_a_sandbox_is_started_found_and_deleted(client: httpx.Client) -> None:
    started = client.post("/sandboxes", params={"sandbox_spec_id": "default"}, json={"labels": {"task": "1"}})
    assert started.status_code == 201
    info = started.json()
    assert info["status"] == "RUNNING"
    assert info["created_by_user_id"] == "ann"
    assert info["sandbox_spec_id"] == "default"
    assert info["session_api_key"].startswith("atolls_")
    assert info["exposed_urls"] == []
    assert info["labels"] == {"task": "1"}
    path = f"/sandboxes/{info['id']}"
    assert client.get(path).json()["id"] == info["id"]
    found = client.get("/sandboxes/search", params={"label": "task=1"}).json()["items"]
    assert [item["id"] for item in found] == [info["id"]]
    assert client.get("/sandboxes/search", params={"label": "task=2"}).json()["items"] == []
    assert client.delete(path).json() == {"success": True}
    assert client.delete(path).status_code == 404
    gone = client.get(path)
    assert gone.status_code == 410
    assert gone.json()["cause"] == "user"
    ended = client.get("/sandboxes/search", params={"ended": True}).json()["items"]
    assert info["id"] in [item["id"] for item in ended]


def test_a_batch_keeps_its_order_and_says_null_for_what_is_missing(client: httpx.Client, others: httpx.Client) -> None:
    first, second = (client.post("/sandboxes").json()["id"] for _ in range(2))
    got = client.get("/sandboxes", params=[("id", second), ("id", "missing"), ("id", first)]).json()
    assert [item and item["id"] for item in got] == [second, None, first]
    assert others.get("/sandboxes", params={"id": first}).json() == [None]
    assert client.get("/sandboxes").status_code == 422
    assert client.get("/sandboxes", params=[("id", "x")] * 100).status_code == 200
    assert client.get("/sandboxes", params=[("id", "x")] * 101).status_code == 422


def test_pages_follow_each_other_without_gap_or_repetition(client: httpx.Client) -> None:
    made = {client.post("/sandboxes").json()["id"] for _ in range(3)}
    seen: list[str] = []
    page: str | None = None
    for _ in range(3):
        answer = client.get("/sandboxes/search", params={"limit": 1} | ({"page_id": page} if page else {})).json()
        seen += [item["id"] for item in answer["items"]]
        page = answer["next_page_id"]
    assert page is None
    assert set(seen) == made
    assert len(seen) == 3
    for bad in ({"limit": 0}, {"limit": 101}, {"page_id": "nonsense"}, {"status": "NO"}):
        assert client.get("/sandboxes/search", params=bad).status_code == 422


def test_the_same_key_gives_the_same_sandbox(client: httpx.Client) -> None:
    keyed = {"Idempotency-Key": "abc"}
    first = client.post("/sandboxes", headers=keyed).json()["id"]
    assert client.post("/sandboxes", headers=keyed).json()["id"] == first
    other = client.post("/sandboxes", headers=keyed, json={"labels": {"a": "b"}})
    assert other.status_code == 409
    assert other.json()["code"] == "conflict"


def test_a_name_is_taken_once_for_each_user(client: httpx.Client, others: httpx.Client) -> None:
    assert client.post("/sandboxes", json={"name": "work"}).status_code == 201
    assert client.post("/sandboxes", json={"name": "work"}).status_code == 409
    other = others.post("/sandboxes", json={"name": "work"})
    assert other.status_code == 201
    others.delete(f"/sandboxes/{other.json()['id']}")


def test_what_makes_no_sense_is_refused(client: httpx.Client) -> None:
    assert client.post("/sandboxes", params={"sandbox_spec_id": "unknown"}).status_code == 404
    for body, status in (
        ({"unknown": 1}, 422),
        ({"settings": {"work_dir": "relative"}}, 422),
        ({"settings": {}, "sandbox_spec_id": "default"}, 422),
        ({"settings": {"limits": {"memory_bytes": 1}}}, 422),
        ({"settings": {"limits": {"disk_bytes": 1 << 30}}}, 422),  # this engine cannot enforce it
        ({"settings": {"volumes": [{"host": "/etc", "path": "/mnt"}]}}, 403),
        ({"lifetime_s": -1}, 422),
        ({"labels": {"sandbox_spec_id": "forged"}}, 422),
    ):
        assert client.post("/sandboxes", json=body).status_code == status, body
    malformed = client.post("/sandboxes", content=b"{", headers={"Content-Type": "application/json"})
    assert malformed.status_code == 400
    assert malformed.json()["code"] == "malformed_json"


def test_what_this_engine_cannot_do_is_said(client: httpx.Client, sandbox: str) -> None:
    paused = client.post(f"{sandbox}/pause", json={"memory": "disk"})
    assert paused.status_code == 422
    assert paused.json()["code"] == "unsupported"
    assert client.post("/sandboxes/0000/pause").status_code == 404
    assert client.post("/sandboxes/0000/resume").status_code == 404


def test_an_expiry_can_be_set_and_ends_the_sandbox(client: httpx.Client, sandbox: str) -> None:
    assert client.get(sandbox).json()["expires_at"] is None
    assert client.put(f"{sandbox}/expiry", json={"lifetime_s": 1000}).json()["expires_at"] is not None
    assert client.put(f"{sandbox}/expiry", json={"lifetime_s": 0}).status_code == 422
    client.put(f"{sandbox}/expiry", json={"lifetime_s": 0.1})
    id = sandbox.rpartition("/")[2]
    with client.stream("GET", "/events/stream", params={"after": 0, "sandbox_id": id}) as stream:
        assert any('"after":"MISSING"' in line for line in stream.iter_lines())
    assert client.get(sandbox).status_code == 410


def test_wait_answers_when_it_runs(client: httpx.Client, sandbox: str) -> None:
    assert client.get(f"{sandbox}/wait").json()["status"] == "RUNNING"
    client.delete(sandbox)
    assert client.get(f"{sandbox}/wait").status_code == 410


def test_a_quota_is_exact_under_concurrent_starts(server: RunningServer, admin: httpx.Client) -> None:
    carl = new_user(admin, "carl", max_sandboxes=3)
    with server.client(carl.key) as client, concurrent.futures.ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: client.post("/sandboxes"), range(10)))
        assert sorted(answer.status_code for answer in answers) == [201] * 3 + [429] * 7
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["code"] == "limit_reached"
        for answer in answers:
            if answer.status_code == 201:
                client.delete(f"/sandboxes/{answer.json()['id']}")
        assert client.post("/sandboxes").status_code == 201


def test_a_rate_is_kept(server: RunningServer, admin: httpx.Client) -> None:
    dora = new_user(admin, "dora", requests_per_s=2)
    with server.client(dora.key) as client:
        answers = [client.get("/sandboxes/search") for _ in range(20)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert refused[0].json()["code"] == "rate_limited"
    assert int(refused[0].headers["retry-after"]) >= 1


def test_the_session_key_stands_for_its_sandbox_alone(
    server: RunningServer, client: httpx.Client, sandbox: str, ann: Person
) -> None:
    other = f"/sandboxes/{client.post('/sandboxes').json()['id']}"
    key = client.get(sandbox).json()["session_api_key"]
    with server.client("", **{"X-Session-API-Key": key}) as session:
        assert session.post(f"{sandbox}/exec", json={"command": "echo hi"}).json()["stdout"] == "hi\n"
        assert session.post(f"{other}/exec", json={"command": "echo hi"}).status_code == 404
        assert session.get("/sandboxes/search").status_code == 403
        assert session.delete(sandbox).status_code == 403
        client.delete(sandbox)
        assert session.get(sandbox).status_code == 401
    forged = key[:-1] + ("0" if key[-1] != "0" else "1")
    with server.client("", **{"X-Session-API-Key": forged}) as session:
        assert session.get(sandbox).status_code == 401


def test_specs_are_made_seen_and_used(client: httpx.Client, others: httpx.Client, admin: httpx.Client) -> None:
    assert client.get("/sandbox-specs/default").json()["is_default"] is True
    body = {
        "id": "anns-spec",
        "settings": {"env": {"STAGE": "test"}, "work_dir": "/work"},
        "command": ["sh", "-c", "echo ran >> marker"],
        "exposed_ports": [{"name": "WORKER_1", "port": 8011}],
    }
    assert client.post("/sandbox-specs", json=body).status_code == 201
    try:
        assert client.post("/sandbox-specs", json=body).status_code == 409
        shown = client.get("/sandbox-specs/anns-spec").json()
        assert (shown["initial_env"], shown["working_dir"]) == ({"STAGE": "test"}, "/work")
        assert others.get("/sandbox-specs/anns-spec").status_code == 404
        assert others.post("/sandboxes", params={"sandbox_spec_id": "anns-spec"}).status_code == 404
        assert others.delete("/sandbox-specs/anns-spec").status_code == 404
        assert others.delete("/sandbox-specs/default").status_code == 403
        found = client.get("/sandbox-specs", params=[("id", "anns-spec"), ("id", "none")]).json()
        assert [item and item["id"] for item in found] == ["anns-spec", None]
        assert "anns-spec" in [s["id"] for s in client.get("/sandbox-specs/search").json()["items"]]
        info = client.post("/sandboxes", params={"sandbox_spec_id": "anns-spec"}).json()
        assert info["exposed_urls"][0]["name"] == "WORKER_1"
        path = f"/sandboxes/{info['id']}"
        ran = client.post(
            f"{path}/exec", json={"command": "until test -e marker; do :; done; cat marker; echo $STAGE; pwd"}
        )
        assert ran.json()["stdout"] == "ran\ntest\n/work\n"
        assert client.post("/sandbox-specs", json={"id": "all", "shared": True}).status_code == 403
    finally:
        assert client.delete("/sandbox-specs/anns-spec").status_code == 204


def test_events_are_ones_own(client: httpx.Client, others: httpx.Client, sandbox: str) -> None:
    id = sandbox.rpartition("/")[2]
    page = client.get("/events", params={"sandbox_id": id}).json()
    assert [event["after"] for event in page["items"]] == ["STARTING", "RUNNING"]
    assert client.get("/events", params={"sandbox_id": id, "after": page["next_after"]}).json()["items"] == []
    assert others.get("/events", params={"sandbox_id": id}).status_code == 404
    assert id not in {event["sandbox_id"] for event in others.get("/events", params={"limit": 1000}).json()["items"]}
    assert "STARTING -> RUNNING" in client.get(f"{sandbox}/logs").text


def test_figures_are_for_administrators(client: httpx.Client, admin: httpx.Client, server: RunningServer) -> None:
    assert client.get("/metrics").status_code == 403
    text = admin.get("/metrics").text
    assert 'atoll_sandboxes{state="RUNNING"}' in text
    assert 'atoll_http_requests_total{method="POST",route="/sandboxes",status="201"}' in text
    with server.client("") as nobody:
        assert nobody.get("/health").json()["status"] == "ok"
    assert client.get("/info").json()["engine"] == "bubblewrap"

"""Commands over HTTP: to their end, as they go, and in the background."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in response.iter_lines() if line]


def test_a_command_is_a_result(client: httpx.Client, sandbox: str) -> None:
    done = client.post(f"{sandbox}/exec", json={"command": "echo out; echo err >&2; exit 3"}).json()
    assert (done["stdout"], done["stderr"], done["exit_code"]) == ("out\n", "err\n", 3)
    assert (done["cause"], done["success"]) == ("exit", False)
    argv = {"command": ["printf", "%s", "a b"], "env": {"A": "1"}, "cwd": "/tmp"}
    assert client.post(f"{sandbox}/exec", json=argv).json()["stdout"] == "a b"
    late = client.post(f"{sandbox}/exec", json={"command": "sleep 60", "timeout_s": 0.2}).json()
    assert (late["cause"], late["exit_code"]) == ("timeout", 124)
    assert client.post(f"{sandbox}/exec", json={"command": "cat", "stdin": "hi"}).json()["stdout"] == "hi"


def test_bytes_come_through_as_base64(client: httpx.Client, sandbox: str) -> None:
    data = bytes(range(256))
    body = {
        "command": "cat",
        "stdin": base64.b64encode(data).decode(),
        "stdin_encoding": "base64",
        "encoding": "base64",
    }
    assert base64.b64decode(client.post(f"{sandbox}/exec", json=body).json()["stdout"]) == data
    assert client.post(f"{sandbox}/exec", json={**body, "stdin": "no base64!"}).status_code == 422


@pytest.mark.parametrize(
    "body", [{}, {"command": ""}, {"command": []}, {"command": "x", "timeout_s": 0}, {"command": 1}]
)
def test_a_request_without_sense_is_refused(client: httpx.Client, sandbox: str, body: dict[str, Any]) -> None:
    assert client.post(f"{sandbox}/exec", json=body).status_code == 422


def test_a_command_with_a_key_runs_once(client: httpx.Client, sandbox: str) -> None:
    for _ in range(3):
        answer = client.post(
            f"{sandbox}/exec", json={"command": "echo x >> count; cat count"}, headers={"Idempotency-Key": "once"}
        )
        assert answer.json()["stdout"] == "x\n"


def test_output_streams_as_it_comes(client: httpx.Client, sandbox: str) -> None:
    body = {"command": "echo one; read line; echo two", "stdin": True}
    seen: list[dict[str, Any]] = []
    with client.stream("POST", f"{sandbox}/exec/stream", json=body) as stream:
        assert stream.headers["content-type"].startswith("application/x-ndjson")
        for line in stream.iter_lines():
            event = json.loads(line)
            seen.append(event)
            if event["type"] == "stdout" and event["data"] == "one\n":  # the command waits: this came while it ran
                path = f"{sandbox}/commands/{seen[0]['command_id']}/kill"
                assert client.post(path, json={"signal": 9}).status_code == 204
    assert seen[-1]["type"] == "exit"
    assert seen[-1]["cause"] in ("killed", "signal")


def test_input_reaches_a_command_that_is_followed(client: httpx.Client, sandbox: str) -> None:
    body = {"command": "echo ready; read x; echo got $x", "stdin": True}
    seen: list[dict[str, Any]] = []
    with client.stream("POST", f"{sandbox}/exec/stream", json=body) as stream:
        for line in stream.iter_lines():
            event = json.loads(line)
            seen.append(event)
            if event.get("data") == "ready\n":
                assert client.post(f"{sandbox}/commands/{seen[0]['command_id']}/stdin", content=b"it\n").is_success
    assert [event["data"] for event in seen if event["type"] == "stdout"] == ["ready\n", "got it\n"]
    assert seen[-1]["exit_code"] == 0


def test_server_sent_events_for_those_who_ask(client: httpx.Client, sandbox: str) -> None:
    headers = {"Accept": "text/event-stream"}
    with client.stream("POST", f"{sandbox}/exec/stream", json={"command": "echo hi"}, headers=headers) as stream:
        text = stream.read().decode()
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert 'event: stdout\ndata: {"type":"stdout","data":"hi\\n","offset":3' in text
    assert "event: exit\n" in text


def test_a_background_command_is_found_again_by_offset(client: httpx.Client, sandbox: str) -> None:
    body = {"command": "echo first; read x; echo got $x", "stdin": True}
    started = client.post(f"{sandbox}/commands", json=body)
    assert started.status_code == 201
    id = started.json()["id"]
    path = f"{sandbox}/commands/{id}"
    assert id in [each["id"] for each in client.get(f"{sandbox}/commands").json()["items"]]
    offset = 0
    with client.stream("GET", path) as stream:
        for line in stream.iter_lines():
            event = json.loads(line)
            if event["type"] == "stdout":
                offset = event["offset"]
                break  # the connection is closed in the middle; the command goes on
    assert offset == 6
    assert client.post(f"{path}/stdin", content=b"it\n", params={"end": True}).status_code == 204
    with client.stream("GET", path, params={"stdout": offset}) as stream:
        rest = lines(stream)
    assert [event["data"] for event in rest if event["type"] == "stdout"] == ["got it\n"]
    assert rest[-1]["exit_code"] == 0
    # It is still known, with all of its output, for whoever lost the answer.
    assert client.get(f"{path}/result").json()["stdout"] == "first\ngot it\n"
    assert client.get(f"{sandbox}/commands/unknown").status_code == 404
    assert client.get(f"{sandbox}/commands/unknown/result").status_code == 404


def test_a_started_command_with_a_key_is_started_once(client: httpx.Client, sandbox: str) -> None:
    keyed = {"Idempotency-Key": "start"}
    ids = {client.post(f"{sandbox}/commands", json={"command": "sleep 60"}, headers=keyed).json()["id"] for _ in "123"}
    assert len(ids) == 1
    late = client.get(f"{sandbox}/commands/{ids.pop()}/result", params={"timeout": 0.1})
    assert late.status_code == 504


def test_text_is_never_cut_inside_a_character(client: httpx.Client, sandbox: str) -> None:
    command = r"printf '\342'; sleep 0.3; printf '\202\254'"
    with client.stream("POST", f"{sandbox}/exec/stream", json={"command": command}) as stream:
        events = [event for event in lines(stream) if event["type"] == "stdout"]
    assert "".join(event["data"] for event in events) == "€"
    assert events[0]["offset"] in (0, 3)
    assert events[-1]["offset"] == 3


def test_the_shell_remembers(client: httpx.Client, sandbox: str) -> None:
    assert client.post(f"{sandbox}/shell", json={"command": "cd /tmp; X=1"}).json()["exit_code"] == 0
    assert client.post(f"{sandbox}/shell", json={"command": "pwd; echo $X"}).json()["stdout"] == "/tmp\n1\n"
    assert client.post(f"{sandbox}/shell", json={"command": "pwd", "shell": "b"}).json()["stdout"] == "/workspace\n"

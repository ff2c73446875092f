"""What a hostile user does, each for a while, in a process of its own:
`python -m fairness.abuses NAME URL KEY SECONDS LIMITS`. At its end, or at SIGTERM, it prints what it was answered.

Everything here is bounded: it ends by itself, and what it started inside sandboxes ends with them. A request that is
refused is fine; whoever is hostile tries the next.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import socket
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from fairness.silence import SilentRegistry

SANDBOXES = 20
LIMITS = {"memory_bytes": 128 << 20, "pids": 256, "disk_bytes": 64 << 20}
_MIB = 1 << 20


class Hostile:
    """One hostile user with a deadline."""

    def __init__(self, url: str, key: str, seconds: float, limits: dict[str, int] | None) -> None:
        self.url, self.key, self.limits = url, key, limits
        self.until = time.monotonic() + seconds
        self.seconds = seconds
        self.answers: Counter[str] = Counter()
        """How many requests were answered with which status, broken off, or left by their client."""
        headers = {"Authorization": f"Bearer {key}"}
        self.client = httpx.Client(
            base_url=f"{url}/api/v1",
            headers=headers,
            timeout=30,
            trust_env=False,
            verify=False,
            limits=httpx.Limits(max_connections=400, max_keepalive_connections=50),
        )

    @property
    def going(self) -> bool:
        return time.monotonic() < self.until

    def call(self, method: str, path: str, **options: object) -> httpx.Response | None:
        try:
            answer = self.client.request(method, path, **options)  # type: ignore[arg-type]
        except httpx.HTTPError:
            self.answers["broken"] += 1
            time.sleep(0.05)
            return None
        self.answers[str(answer.status_code)] += 1
        if answer.status_code >= 400:
            time.sleep(0.02)  # a loop of refusals would measure this program
            return None
        return answer

    def sandbox(self, **settings: object) -> str | None:
        wanted = settings | ({"limits": self.limits} if self.limits is not None else {})
        body = {"settings": wanted} if wanted else {}
        made = self.call("POST", "/sandboxes", json=body)
        return f"/sandboxes/{made.json()['id']}" if made is not None else None

    def run(self, path: str, command: str) -> None:
        self.call("POST", f"{path}/exec", json={"command": command, "timeout_s": 30})

    def ready(self) -> None:
        """Everything is prepared: from now on the others are disturbed."""
        print("ready", flush=True)

    def at_once(self, count: int, work: Callable[[int], None]) -> None:
        """`work` again and again until the time is over, in so many threads."""

        def again(number: int) -> None:
            while self.going:
                work(number)

        self.ready()
        threads = [threading.Thread(target=again, args=(number,), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.until - time.monotonic()) + 35)

    def vanish(self, method: str, path: str, body: bytes = b"", missing: int = 0, wait_s: float = 1.0) -> None:
        """A request whose client goes away before it is answered."""
        address = urlsplit(self.url)
        head = (
            f"{method} /api/v1{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body) + missing}\r\n\r\n"
        )
        with contextlib.suppress(OSError):
            with socket.create_connection((address.hostname or "", address.port or 80), timeout=5) as sock:
                sock.sendall(head.encode() + body)
                time.sleep(min(wait_s, max(0.0, self.until - time.monotonic())))
        self.answers["left"] += 1


def silent_registries(user: Hostile) -> None:
    """Creates on registries that say nothing; some clients wait, some are gone."""
    registry = SilentRegistry()

    def create(number: int) -> None:
        image = f"127.0.0.1:{registry.port}/x/y:{random.getrandbits(60)}"
        body = f'{{"settings": {{"image": "{image}"}}}}'.encode()
        user.vanish("POST", "/sandboxes", body, wait_s=0.5 if number % 2 else 10.0)

    user.at_once(40, create)
    registry.close()


def text_diffs(user: Hostile) -> None:
    """Text differences of files that are alike nowhere, whose clients are mostly gone."""
    path = user.sandbox()
    if path is None:
        return
    write = "for i in $(seq 40); do shuf -r -n 5000 -i 0-2 > f$i; done"
    user.run(path, write)
    user.call("POST", f"{path}/checkpoints", json={"name": "one"})
    user.run(path, write)

    def diff(number: int) -> None:
        target = f"{path}/checkpoints/one/diff?text=true"
        if number % 3:
            user.vanish("GET", target, wait_s=0.2)
        else:
            user.call("GET", target)

    user.at_once(6, diff)


def memory_of_the_server(user: Hostile) -> None:
    """Outputs of control bytes, large appends, bodies that never end, large lists."""
    path = user.sandbox()
    if path is None:
        return
    user.run(path, "mkdir d; cd d; seq 20000 | xargs touch")
    flood = {"command": f"head -c {64 * _MIB} /dev/zero", "max_output_bytes": 64 * _MIB}
    body = b'{"command": "' + b"x" * (7 * _MIB)

    def abuse(number: int) -> None:
        if number < 4:
            with contextlib.suppress(httpx.HTTPError):
                with user.client.stream("POST", f"{path}/exec", json=flood) as answer:
                    user.answers[str(answer.status_code)] += 1
                    for _ in answer.iter_raw(_MIB):
                        if not user.going:
                            break
        elif number < 6:
            user.call("POST", f"{path}/files/append", params={"path": "f"}, content=_zeros(32))
            user.run(path, "rm -f f")
        elif number < 14:
            user.vanish("POST", f"{path}/exec", body, missing=1, wait_s=3.0)
        else:
            user.call("GET", f"{path}/files", params={"path": "d"})

    user.at_once(16, abuse)


def sparse_trees(user: Hostile) -> None:
    """Files of gigabytes that hold nothing, in and out."""
    path = user.sandbox()
    if path is None:
        return
    user.run(path, "mkdir s; truncate -s 3G s/huge")
    member = tarfile.TarInfo("huge")
    member.size = 1 << 30

    def archive() -> Iterator[bytes]:
        yield member.tobuf()
        for _ in range(member.size // _MIB):
            if not user.going:
                return
            yield bytes(_MIB)
        yield bytes(1024)

    def transfer(number: int) -> None:
        if number % 2:
            user.call("PUT", f"{path}/files/tree", params={"path": f"t{number}"}, content=archive())
            return
        with contextlib.suppress(httpx.HTTPError):
            with user.client.stream("GET", f"{path}/files/tree", params={"path": "s"}) as answer:
                user.answers[str(answer.status_code)] += 1
                for _ in answer.iter_raw(_MIB):
                    if not user.going:
                        break

    user.at_once(4, transfer)


def directories(user: Hostile) -> None:
    """Differences of states with very many directories on one level."""
    path = user.sandbox()
    if path is None:
        return
    user.call("POST", f"{path}/checkpoints", json={"name": "one"})
    user.run(path, "mkdir d; cd d; seq 20000 | xargs mkdir")
    user.at_once(4, lambda _: _nothing(user.call("GET", f"{path}/checkpoints/one/diff")))


def records(user: Hostile) -> None:
    """Specs, keys and sandboxes that come and go, and searches through all of them."""

    def abuse(number: int) -> None:
        name = f"x{random.getrandbits(60):x}"
        if number < 2:
            user.call("POST", "/sandbox-specs", json={"id": name, "settings": {"env": {"A": "x" * 1000}}})
        elif number < 4:
            user.call("POST", "/keys", json={"name": name, "scopes": ["read"]})
        elif number < 6:
            made = user.sandbox()
            if made is not None:
                user.call("DELETE", made)
        else:
            user.call("GET", "/sandboxes/search", params={"ended": True, "limit": 100})

    user.at_once(8, abuse)


def volumes(user: Hostile) -> None:
    """Volumes that come and go, copies of one that is being filled, restorations, lists, and files without end."""
    user.call("POST", "/volumes", json={"name": "busy", "size": "512m"})
    path = user.sandbox(volumes=[{"name": "busy", "path": "/v"}])
    if path is None:
        return

    def abuse(number: int) -> None:
        name = f"x{random.getrandbits(60):x}"
        if number < 1:
            user.run(path, "cd /v; head -c 400m /dev/urandom >f; rm f; seq 20000 | xargs touch; rm -rf /v/*")
        elif number < 4:
            made = user.call("POST", "/volumes", json={"name": name, "size": "1m"})
            user.call("POST", f"/volumes/{name}/restore", json={"source": "busy"})
            if made is not None:
                user.call("DELETE", f"/volumes/{name}")
        elif number < 6:
            user.call("POST", "/volumes/busy/copies", json={"name": name, "read_only": True})
            user.call("DELETE", f"/volumes/{name}")
        else:
            user.call("GET", "/volumes", params={"limit": 100})

    user.at_once(8, abuse)


_BUILDS = (
    "f() { f | f & }; while :; do f; busybox sleep 0.1; done",
    "while :; do busybox head -c 1000000000 /dev/zero > /f; busybox rm -f /f; done",
    "while :; do echo a flood of a log; done",
    "while :; do :; done",
    "busybox sleep 1000",
    "exit 1",
)
"""What the steps of builds do. busybox comes with the context."""


def builds(user: Hostile) -> None:
    """Builds whose steps fork, fill disks, write without end or never end; most of their clients are gone."""
    program = Path("/usr/bin/busybox").read_bytes()

    def build(number: int) -> None:
        command = json.dumps(["/bin/busybox", "sh", "-c", _BUILDS[random.randrange(len(_BUILDS))]])
        dockerfile = f"FROM scratch\nCOPY busybox /bin/busybox\nENV N={random.getrandbits(60)}\nRUN {command}\n"
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, data in (("Dockerfile", dockerfile.encode()), ("busybox", program)):
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), 0o755
                archive.addfile(member, io.BytesIO(data))
        options = {"limits": user.limits or {}, "timeout_s": 30}
        parts = {"options": (None, json.dumps(options)), "context": ("c", packed.getvalue())}
        made = user.call("POST", "/images/builds", files=parts)
        if made is None:
            return
        path = f"/images/builds/{made.json()['id']}"
        if number % 3 == 0:
            user.vanish("GET", f"{path}/logs", wait_s=1.0)
        elif number % 3 == 1:
            user.call("GET", f"{path}/logs", params={"follow": False})
        else:
            user.call("DELETE", path)

    user.at_once(16, build)


def _bomb(command: str) -> Callable[[Hostile], None]:
    def explode(user: Hostile) -> None:
        paths = [path for path in (user.sandbox() for _ in range(SANDBOXES)) if path is not None]
        for path in paths:
            body = {"command": ["sh", "-c", command], "timeout_s": user.seconds + 5}
            user.call("POST", f"{path}/commands", json=body)
        user.ready()
        while user.going:
            time.sleep(0.1)

    explode.__doc__ = f"In {SANDBOXES} sandboxes at once: {command}"
    return explode


_CONNECTIONS = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
while True:
    held = []
    try:
        while len(held) < 2000:
            held.append(socket.create_connection(listener.getsockname(), timeout=1))
            held.append(listener.accept()[0])
    except OSError:
        pass
    for each in held:
        each.close()
"""


def connections(user: Hostile) -> None:
    """Inside sandboxes, and to the server: idle ones, and such that never finish their headers."""
    script = _CONNECTIONS.replace('"', '\\"')
    inside = threading.Thread(target=_bomb(f'python3 -c "{script}"'), args=(user,), daemon=True)
    inside.start()
    address = urlsplit(user.url)

    def connect(number: int) -> None:
        held = []
        with contextlib.suppress(OSError):
            for _ in range(25):
                sock = socket.create_connection((address.hostname or "", address.port or 80), timeout=5)
                held.append(sock)
                user.answers["left"] += 1
                if number % 2:
                    sock.sendall(b"GET /api/v1/health HTTP/1.1\r\nX-Slow: ")
            time.sleep(min(5.0, max(0.0, user.until - time.monotonic())))
        for sock in held:
            sock.close()

    user.at_once(20, connect)
    inside.join(10)


def images(user: Hostile) -> None:
    """Pulls without end: of registries that say nothing or drip, and of names that change; and lists, and prunes."""
    silent = SilentRegistry()

    def pull(number: int) -> None:
        name = f"127.0.0.1:{silent.port}/x/y:{random.getrandbits(60)}"
        if number < 8:
            user.call("POST", "/images/pull", json={"name": name})
        elif number < 12:
            user.vanish("POST", "/sandboxes", f'{{"settings": {{"image": "{name}"}}}}'.encode(), wait_s=0.5)
        elif number < 14:
            user.call("POST", "/images/prune", json={"all": True})
        else:
            listed = user.call("GET", "/images")
            for image in listed.json()["items"] if listed is not None else ():
                user.call("DELETE", "/images", params={"name": image["name"]})

    user.at_once(16, pull)
    silent.close()


ABUSES: dict[str, Callable[[Hostile], None]] = {
    "silent registries": silent_registries,
    "images": images,
    "text diffs": text_diffs,
    "memory of the server": memory_of_the_server,
    "sparse trees": sparse_trees,
    "directories": directories,
    "records": records,
    "builds": builds,
    "volumes": volumes,
    "fork bomb": _bomb("f() { f | f & }; while :; do f; sleep 0.1; done"),
    "memory bomb": _bomb("while :; do head -c 4g /dev/zero | tail -c 4g | wc -c; done"),
    "disk bomb": _bomb("while :; do head -c 1g /dev/zero > f; rm -f f; done"),
    "connection bomb": connections,
}


def _zeros(mebibytes: int) -> Iterator[bytes]:
    for _ in range(mebibytes):
        yield bytes(_MIB)


def _nothing(_: object) -> None:
    pass


def main() -> None:
    name, url, key, seconds, limits = sys.argv[1:6]
    os.nice(5)  # what is measured is the server and not this program beside it
    user = Hostile(url, key, float(seconds), LIMITS if limits == "explicit" else None)

    def end(*_: object) -> None:
        print(json.dumps(user.answers), flush=True)
        os._exit(0)  # threads that still wait for an answer are of no interest

    signal.signal(signal.SIGTERM, end)
    ABUSES[name](user)
    end()


if __name__ == "__main__":
    main()

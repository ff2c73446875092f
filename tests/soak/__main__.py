"""`make soak`: a real server under the load of many users, for long, and then again while it is killed each minute.

Afterwards all users delete what they have, and what the server and this machine hold of it must be back where it was.
The state before is measured after a warm-up in which everything was done once. Needs root, the engine `native`, and
no other Atoll on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

from server.running import RunningServer, start_server
from server.test_kill import free_port
from soak import measures
from soak.users import PORT, User, spec_of

_WARM_UP_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="of load; 0: leave it out")
    parser.add_argument("--kill-minutes", type=float, default=10, help="of load with kills; 0: leave it out")
    parser.add_argument("--kill-every", type=float, default=60, help="seconds")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--engine", default="native")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("needs root")
    print(f"seed {options.seed}")
    kept = True
    if options.minutes:
        kept &= Soak(options, kills=False).run(options.minutes * 60)
    if options.kill_minutes:
        kept &= Soak(options, kills=True).run(options.kill_minutes * 60)
    return 0 if kept else 1


class Soak:
    """One server, its users, and the folder that everything is in."""

    def __init__(self, options: argparse.Namespace, *, kills: bool) -> None:
        self._options, self._kills = options, kills
        self._folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))
        self._folder.chmod(0o755)
        self._tmp = self._folder / "tmp"
        self._tmp.mkdir()
        self._port = free_port()
        self._killed = 0

    def run(self, seconds: float) -> bool:
        what = f"a kill every {self._options.kill_every:g} s" if self._kills else "no kills"
        print(f"\n{seconds / 60:g} minutes, {self._options.users} users, {what}, in {self._folder}", flush=True)
        self._server = self._start()
        users: list[User] = []
        try:
            users = self._users()
            for user in users:
                user.each_once()
            self._load(users, _WARM_UP_S, kills=False)
            before = self._settled(users)
            users = self._users(users)
            self._load(users, seconds, kills=self._kills)
            after = self._settled(users, before)
            kept = self._report(users, measures.compare(before, after)) and self._server.stop() == 0
        finally:
            for user in users:
                user.over.set()
            if self._server.process.poll() is None:
                self._server.process.kill()
                print(f"kept for a look: {self._folder}")
        if kept:
            shutil.rmtree(self._folder, ignore_errors=True)
        return kept

    def _start(self) -> RunningServer:
        variables = {"TMPDIR": str(self._tmp), "ATOLL_MAX_NUM_SANDBOXES": "200"}
        return start_server(self._folder / "s", self._options.engine, self._port, **variables)

    def _users(self, known: list[User] | None = None) -> list[User]:
        """Threads cannot be started twice: the same users, new."""
        made = []
        with self._server.client() as admin:
            for number in range(self._options.users):
                key = known[number].key if known else self._new_user(admin, number)
                made.append(User(number, self._server.url, key, self._options.seed, self._kills))
        return made

    def _new_user(self, admin: httpx.Client, number: int) -> str:
        name = f"user{number}"
        admin.post("/users", json={"id": name, "quotas": {}}).raise_for_status()
        scopes = ["read", "use", "manage", "keys"]
        key = admin.post("/keys", json={"user_id": name, "name": "soak", "scopes": scopes}).json()["key"]
        with self._server.client(key) as client:
            ports = [{"name": "web", "port": PORT}]
            client.post("/sandbox-specs", json={"id": spec_of(number), "exposed_ports": ports}).raise_for_status()
        return str(key)

    def _load(self, users: list[User], seconds: float, *, kills: bool) -> None:
        for user in users:
            user.thread.start()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, self._options.kill_every))
            if kills and time.monotonic() < end:
                self._server.process.send_signal(signal.SIGKILL)
                self._server.process.wait()
                self._killed += 1
                self._server = self._start()
            print(f"  {sum(user.done for user in users)} answers, {max(0, left):.0f} s left", flush=True)
        for user in users:
            user.over.set()
        for user in users:
            user.thread.join()

    def _settled(self, users: list[User], before: dict[str, int] | None = None) -> dict[str, int]:
        for user in users:
            user.delete_all()
        with self._server.client() as admin:
            # What was made for an answer that nobody got any more.
            for info in admin.get("/sandboxes/search", params={"limit": "100"}).json()["items"]:
                admin.delete(f"/sandboxes/{info['id']}")
        return measures.settle(lambda: measures.take(self._server, self._tmp), before)

    def _report(self, users: list[User], rows: list[measures.Row]) -> bool:
        acts = sum((user.acts for user in users), Counter[str]())
        problems = [problem for user in users for problem in user.problems]
        print(measures.table(rows))
        print(f"{sum(user.done for user in users)} answers, {self._killed} kills,", end=" ")
        print(", ".join(f"{count} {name}" for name, count in sorted(acts.items())))
        for problem in problems[:20]:
            print(f"  {problem[:500]}")
        if len(problems) > 20:
            print(f"  and {len(problems) - 20} more")
        return not problems and all(row.is_kept for row in rows)


if __name__ == "__main__":
    sys.exit(main())

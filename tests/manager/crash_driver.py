"""A program with a manager under load, made to be killed. It tells what it was told, line by line.

python -m manager.crash_driver ENGINE DATA RUN STATE LOG SEED
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

from atoll.errors import SandboxError
from atoll.manager import PoolSettings, Record, SandboxManager
from atoll.model import SandboxSpec, State
from atoll.settings import Settings

CAP = 10
CLIENTS = 4


class Log:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(self, what: str, value: object, **more: object) -> None:
        os.write(self._fd, (json.dumps({what: value, **more}) + "\n").encode())


async def client(manager: SandboxManager, log: Log, dice: random.Random) -> None:
    while True:
        records = await manager.list_sandboxes()
        try:
            if len(records) < CAP - 2 and dice.random() < 0.5:
                id = await manager.create_sandbox(labels={"round": str(os.getpid())})
                log.say("made", id)
                continue
            if not records:
                continue
            id = dice.choice(records).id
            if dice.random() < 0.4:
                log.say("ending", id)
                await manager.delete_sandbox(id)
                log.say("ended", id)
            else:
                await work(manager, log, id, dice)
        except (SandboxError, OSError):
            await asyncio.sleep(0)  # another client ended it meanwhile


async def work(manager: SandboxManager, log: Log, id: str, dice: random.Random) -> None:
    sandbox = await manager.get_sandbox(id)
    text = f"{dice.random()}"
    if dice.random() < 0.5:
        await sandbox.write_file(f"file-{text}", text)
        log.say("wrote", id, text=text)
    else:
        command = await sandbox.start(f"echo {text}; sleep 1000")
        log.say("started", id, text=text, command=command.id)


def _is_odd(record: Record) -> bool:
    return record.state is not State.RUNNING


async def main(engine: str, data: str, run: str, state: str, log_path: str, seed: str) -> None:
    log = Log(log_path)
    manager = SandboxManager(
        CAP,
        engine=engine,
        settings=Settings(Path(data), Path(run)),
        state_dir=Path(state),
        pools=[PoolSettings(SandboxSpec(), size=1)],
    )
    log.say("opening", os.getpid())
    recovered = await manager.start()
    records = await manager.list_sandboxes()
    odd = [f"{record.id} {record.state} {record.act}: {record.reason}" for record in records if _is_odd(record)]
    log.say("up", {record.id: record.state for record in records}, odd=odd, failed=recovered.failed)
    await asyncio.gather(*(client(manager, log, random.Random(f"{seed} {number}")) for number in range(CLIENTS)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

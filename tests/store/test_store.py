"""The store keeps its promises on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import glob
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from atoll.store import AlreadyThereError, ApiKey, Quotas, Role, Store, StoredSpec, StoreError, User
from atoll.store.store import _MIGRATIONS, LATEST
from atoll.store.tables import metadata
from needs import missing

NOW = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A PostgreSQL of our own: its files and its socket are in a temporary directory."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin"))
    if not found:
        missing("PostgreSQL is not installed: run 'scripts/setup test'")
    folder = Path(tempfile.mkdtemp(prefix="at-pg-", dir="/tmp"))
    as_user: list[str] = []
    if os.geteuid() == 0:  # it refuses to run as root
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        as_user = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups"]
    data = folder / "data"

    def run(program: str, *arguments: str) -> None:
        command = [*as_user, f"{found[-1]}/{program}", *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd="/", timeout=50)

    try:
        run("initdb", "-D", str(data), "-U", "atoll", "-A", "trust", "--no-sync")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        run("pg_ctl", "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql://atoll@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-D", str(data), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("postgres")) if request.param == "postgresql" else f"sqlite:///{tmp_path}/a.db"


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    made = Store(url)
    await made.open()
    async with made._engine.begin() as connection:
        for table in reversed(metadata.sorted_tables):
            await connection.execute(table.delete())
    yield made
    await made.aclose()


def a_user(name: str, **more: object) -> User:
    return User.model_validate({"id": name, "created_at": NOW, **more})


def a_key(name: str, user: str) -> ApiKey:
    return ApiKey(id=name, user_id=user, name="n", hash=b"\0\xff" * 16, scopes=("read", "use"), created_at=NOW)


async def test_users_are_kept_as_they_were_given(store: Store) -> None:
    ann = a_user("ann", role=Role.ADMIN, quotas=Quotas(max_cpus=1.5, max_memory_bytes=1 << 40))
    await store.add_user(ann)
    assert await store.user("ann") == ann
    assert await store.user("bob") is None
    with pytest.raises(AlreadyThereError):
        await store.add_user(ann)
    assert await store.change_user("ann", role=Role.USER, disabled=True)
    changed = await store.user("ann")
    assert changed is not None
    assert (changed.role, changed.quotas, changed.disabled_at is not None) == (Role.USER, ann.quotas, True)
    assert not await store.change_user("bob", role=Role.ADMIN)


async def test_users_come_in_pages(store: Store) -> None:
    for name in "dbca":
        await store.add_user(a_user(name))
    assert [user.id for user in await store.users(limit=3)] == ["a", "b", "c"]
    assert [user.id for user in await store.users(after="c")] == ["d"]


async def test_keys_are_revoked_once_and_only_by_their_user(store: Store) -> None:
    for name in ("ann", "bob"):
        await store.add_user(a_user(name))
    await store.add_key(a_key("1", "ann"))
    assert await store.key("1") == a_key("1", "ann")
    assert await store.keys("bob") == []
    assert not await store.revoke_key("1", "bob")
    assert await store.revoke_key("1", "ann")
    assert not await store.revoke_key("1", "ann")
    revoked = await store.key("1")
    assert revoked is not None
    assert revoked.revoked_at is not None
    with pytest.raises(StoreError):
        await store.add_key(a_key("2", "nobody"))


async def test_specs_are_everybodys_or_ones_own(store: Store) -> None:
    for id, owner in (("a", None), ("b", "ann"), ("c", "bob")):
        await store.add_spec(StoredSpec(id=id, owner_id=owner, body="{}", created_at=NOW))
    found = await store.specs(owner_id="ann", everybodys=False, after="", limit=10)
    assert [spec.id for spec in found] == ["a", "b"]
    assert len(await store.specs(owner_id="ann", everybodys=True, after="a", limit=10)) == 2
    assert await store.remove_spec("c")
    assert not await store.remove_spec("c")


async def test_writes_at_once_all_arrive(store: Store) -> None:
    await asyncio.gather(*(store.add_user(a_user(f"u{number}")) for number in range(40)))
    assert len(await store.users()) == 40


async def test_the_migrations_lead_to_the_tables(store: Store) -> None:
    """What Alembic makes step by step is what the code expects, and opening again changes nothing."""
    await store.open()
    async with store._engine.connect() as connection:
        changes = await connection.run_sync(lambda raw: compare_metadata(MigrationContext.configure(raw), metadata))
    assert changes == []
    assert ScriptDirectory(str(_MIGRATIONS)).get_current_head() == LATEST


async def test_two_servers_may_start_at_once(url: str) -> None:
    stores = [Store(url) for _ in range(2)]
    await asyncio.gather(*(store.open() for store in stores))
    for store in stores:
        await store.aclose()


async def test_a_database_that_is_away_is_an_error_of_ours(tmp_path: Path) -> None:
    for url in ("postgresql://nobody@127.0.0.1:1/x", f"sqlite:///{tmp_path}/none/a.db"):
        store = Store(url)
        with pytest.raises(StoreError):
            await store.open()
        await store.aclose()
    with pytest.raises(StoreError):
        Store("mysql://x/y")

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
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from atoll.errors import ConflictError, LimitReachedError, StoreError
from atoll.store import ApiKey, Quotas, Role, Store, StoredSpec, User
from atoll.store.database import LATEST, MIGRATIONS
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
    with pytest.raises(ConflictError):
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
    found = await store.specs(owner_id="ann", everybodys=False, limit=10)
    assert [spec.id for spec in found] == ["a", "b"]
    assert len(await store.specs(owner_id="ann", everybodys=True, after=("a", ""), limit=10)) == 2
    assert not await store.remove_spec("c", "ann")
    assert await store.remove_spec("c", "bob")
    assert not await store.remove_spec("c", "bob")


async def test_two_users_have_specs_of_one_name_and_neither_knows(store: Store) -> None:
    for owner in ("bob", "ann"):
        await store.add_spec(StoredSpec(id="same", owner_id=owner, body=f'"{owner}"', created_at=NOW))
    with pytest.raises(ConflictError):
        await store.add_spec(StoredSpec(id="same", owner_id="ann", body="{}", created_at=NOW))
    await store.add_spec(StoredSpec(id="same", owner_id=None, body="{}", created_at=NOW))
    with pytest.raises(ConflictError):
        await store.add_spec(StoredSpec(id="same", owner_id="eve", body="{}", created_at=NOW))
    hers = await store.spec("same", "ann")
    assert hers is not None
    assert hers.body == '"ann"'
    everything = [spec.owner_id for spec in await store.specs(owner_id=None, everybodys=True, limit=10)]
    assert everything == [None, "ann", "bob"]
    page = await store.specs(owner_id="ann", everybodys=True, after=("same", ""), limit=1)
    assert [spec.owner_id for spec in page] == ["ann"]


async def test_a_user_has_no_more_specs_and_keys_than_the_limit_however_many_are_made_at_once(store: Store) -> None:
    await store.add_user(a_user("ann"))
    specs = (StoredSpec(id=f"s{number}", owner_id="ann", body="{}", created_at=NOW) for number in range(12))
    answers = await asyncio.gather(*(store.add_spec(spec, most=5) for spec in specs), return_exceptions=True)
    assert sum(isinstance(answer, LimitReachedError) for answer in answers) == 7
    assert len(await store.specs(owner_id="ann", everybodys=False, limit=100)) == 5
    keys = (store.add_key(a_key(f"k{number}", "ann"), most=5) for number in range(12))
    answers = await asyncio.gather(*keys, return_exceptions=True)
    assert sum(isinstance(answer, LimitReachedError) for answer in answers) == 7


async def test_keys_that_are_over_do_not_pile_up(store: Store) -> None:
    await store.add_user(a_user("ann"))
    await store.add_user(a_user("bob"))
    await store.add_key(a_key("other", "bob"))
    assert await store.revoke_key("other", None)
    for number in range(130):
        await store.add_key(a_key(f"k{number}", "ann"), most=1)
        assert await store.revoke_key(f"k{number}", "ann")
    assert len(await store.keys("ann")) <= 101
    assert len(await store.keys("bob")) == 1


async def test_what_was_made_with_a_key_is_revoked_with_it(store: Store) -> None:
    for name in ("ann", "bob"):
        await store.add_user(a_user(name))
    await store.add_key(a_key("a", "ann"))
    for id, parent, user in (("b", "a", "ann"), ("c", "b", "ann"), ("d", "a", "bob"), ("e", None, "ann")):
        await store.add_key(a_key(id, user).model_copy(update={"parent_id": parent}))
    assert await store.revoke_key("a", "ann")
    keys = [await store.key(id) for id in "abcde"]
    assert [key is not None and key.revoked_at is not None for key in keys] == [True, True, True, False, False]
    with pytest.raises(StoreError):
        await store.add_key(a_key("f", "ann").model_copy(update={"parent_id": "c"}))


async def test_a_database_of_before_goes_on(url: str) -> None:
    """Users, keys and specs of the first version are there after the upgrade, and the provider's users are found."""

    def old(connection: Connection) -> None:
        connection.execute(text("DROP TABLE IF EXISTS api_keys"))
        for table in ("users", "specs", "alembic_version"):
            connection.execute(text(f"DROP TABLE IF EXISTS {table}"))
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for user, role in (("admin", "admin"), ("zoe", "user"), ("root", "admin")):
            connection.execute(text(f"INSERT INTO users VALUES ('{user}', '{role}', '{{}}', '2030-01-02', NULL)"))
        key = "('1', 'zoe', 'n', 'hash', 'read', '2030-01-02', NULL, NULL)"
        connection.execute(text(f"INSERT INTO api_keys VALUES {key}"))
        for id, owner in (("a", "NULL"), ("b", "'zoe'")):
            connection.execute(text(f"INSERT INTO specs VALUES ('{id}', {owner}, '{{}}', '2030-01-02')"))

    store = Store(url)
    async with store._engine.begin() as connection:
        await connection.run_sync(old)
    await store.open()
    try:
        zoe = await store.user_of("*|zoe")
        assert zoe is not None
        assert zoe.id == "zoe"
        assert await store.user_of("*|admin") is None
        assert await store.user_of("*|root") is None
        assert await store.key("1") is not None
        assert await store.spec("a", None) is not None
        assert await store.spec("b", "zoe") is not None
    finally:
        await store.aclose()


async def test_writes_at_once_all_arrive(store: Store) -> None:
    await asyncio.gather(*(store.add_user(a_user(f"u{number}")) for number in range(40)))
    assert len(await store.users()) == 40


async def test_the_migrations_lead_to_the_tables(store: Store) -> None:
    """What Alembic makes step by step is what the code expects, and opening again changes nothing."""
    await store.open()
    async with store._engine.connect() as connection:
        changes = await connection.run_sync(lambda raw: compare_metadata(MigrationContext.configure(raw), metadata))
    assert changes == []
    assert ScriptDirectory(str(MIGRATIONS)).get_current_head() == LATEST


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

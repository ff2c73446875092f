"""What `atoll run` and the SDK import on the way to a command: nothing that only others need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from atoll.settings import Settings

RUN = """
import sys
from atoll.cli import main
sys.argv[1:] = ["run", "--engine", "ENGINE", "--", "true"]
try: main()
except SystemExit as end: assert end.code == 0, end.code
"""
PROGRAM = """
import sys
from atoll import Sandbox
with Sandbox(engine="ENGINE") as sandbox: assert sandbox.exec("true").success
"""
OF_OTHERS = {
    *("alembic", "asyncpg", "cryptography", "fastapi", "h11", "httpx", "opentelemetry", "prometheus_client"),
    *("pydantic_settings", "rich", "sqlalchemy", "starlette", "structlog", "tarfile", "tomllib", "uvicorn"),
    *("websockets", "http.client", "multiprocessing"),
    *("atoll.compat", "atoll.conformance", "atoll.manager", "atoll.server", "atoll.service", "atoll.store"),
    *("atoll.engines.diagnosis", "atoll.engines.docker", "atoll.engines.remote", "atoll.engines.unsafe_none"),
    *("atoll.images.debian", "atoll.images.maker", "atoll.images.pull", "atoll.network.gateway"),
}


@pytest.mark.parametrize("engine", ["native", "bubblewrap"])
@pytest.mark.parametrize("program", [RUN, PROGRAM], ids=["atoll run", "Sandbox"])
def test_a_command_in_a_sandbox_imports_nothing_that_only_others_need(
    program: str, engine: str, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> None:
    need_engine(engine, session_settings)
    other = "atoll.engines.linux" if engine == "bubblewrap" else "atoll.engines.bubblewrap"
    own = {"ATOLL_DATA_DIR": str(session_settings.data_dir), "ATOLL_RUN_DIR": str(session_settings.run_dir)}
    done = subprocess.run(
        [sys.executable, "-c", f"{program.replace('ENGINE', engine)}\nprint(*sys.modules)"],
        env={**{name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}, **own},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    imported = set(done.stdout.split())
    assert "atoll.sandbox.sandbox" in imported
    assert imported & (OF_OTHERS | {other}) == set()

"""Control groups of accounts above containers, without a Docker engine."""

from __future__ import annotations

import threading

import pytest

from atoll import workers
from atoll.engines.docker.api.endpoint import Endpoint
from atoll.engines.docker.container_accounts import ContainerAccounts
from atoll.settings import Settings
from needs import needs


@pytest.fixture
def accounts(settings: Settings) -> ContainerAccounts:
    settings.installation_id()
    return ContainerAccounts(settings, Endpoint(path="/run/docker.sock"))


@needs("root")
async def test_work_that_fails_is_not_done_again(accounts: ContainerAccounts) -> None:
    seen: list[threading.Thread] = []

    def work() -> bool:
        seen.append(threading.current_thread())
        raise RuntimeError("the work itself")

    with pytest.raises(RuntimeError, match="the work itself"):
        await accounts._do(work)
    assert len(seen) == 1
    assert threading.current_thread() not in seen


@needs("root")
async def test_work_is_done_even_if_no_thread_can_be_started(
    accounts: ContainerAccounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_workers", {})  # no thread is idle
    before = threading.stack_size(1 << 46)
    try:
        assert await accounts._do(lambda: threading.current_thread() is threading.main_thread())
    finally:
        threading.stack_size(before)

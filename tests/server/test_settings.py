"""Where the settings of a server come from, and what is said about those that are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import SpecError
from atoll.server.settings import ServerSettings

STATE = {"ATOLL_STATE_DIR": "/x"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.toml"


def test_arguments_come_before_the_environment_and_that_before_the_file(file: Path) -> None:
    file.write_text('[server]\nport = 1\ntimeout = 2\nengine = "native"\nregistries = ["a.test", "b.test"]\n')
    environ = {**STATE, "ATOLL_PORT": "3", "ATOLL_TIMEOUT": "4", "ATOLL_ENGINE": "", "ATOLL_CORS_ORIGINS": "c, d"}
    settings = ServerSettings.load(environ, file=file, port=5, host=None)
    assert (settings.port, settings.timeout, settings.engine) == (5, 4, "native")
    assert (settings.registries, settings.cors_origins, settings.webhook_hosts) == (
        ["a.test", "b.test"],
        ["c", "d"],
        [],
    )
    origins = [settings.origin(name) for name in ("port", "timeout", "engine", "host")]
    assert origins == ["argument", "ATOLL_TIMEOUT", str(file), "default"]


def test_only_load_looks_at_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_PORT", "ATOLL_port"):
        monkeypatch.setenv(name, "3")
    assert ServerSettings.model_validate({"state_dir": "/x"}).port == 8420


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        (
            "[server]\nmax_num_sandboxs = 3\n",
            "there is no setting 'max_num_sandboxs'",
            "Did you mean max_num_sandboxes?",
        ),
        ("[server]\nPort = 3\n", "there is no setting 'Port'", "Did you mean port?"),
        ("[server]\nzzzz = 3\n", "there is no setting 'zzzz'", "`atoll config` lists all settings"),
        ("[serevr]\nport = 3\n", "'serevr'", "below a line `[server]`"),
        ("port = 3\n", "'port'", "below a line `[server]`"),
        ("[server]\nport = 'x'\n", "Invalid server configuration: port: ", "Correct port in '{file}'"),
        ("server = 3\n", "is not a table", "[server]"),
        ("[server\n", "cannot read the configuration", "readable TOML file"),
        ("[server]\nport = '\xff'\n", "cannot read the configuration", "readable TOML file"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_what_to_do(file: Path, text: str, said: str, hint: str) -> None:
    file.write_text(text, "latin-1")
    with pytest.raises(SpecError) as error:
        ServerSettings.load(STATE, file=file)
    assert said in error.value.reason
    assert hint.replace("{file}", str(file)) in (error.value.hint or "")
    assert "\n" not in error.value.reason


def test_what_is_wrong_elsewhere_is_named_with_its_variable_or_argument_and_never_shown() -> None:
    for environ, given, hint in (
        ({"ATOLL_PORT": "s3cret"}, {}, "Correct ATOLL_PORT."),
        ({}, {"port": "s3cret"}, "Correct the argument for port."),
        ({"ATOLL_JWT_ALGORITHM": "ES256"}, {}, "ATOLL_JWT_ALGORITHM"),
    ):
        with pytest.raises(SpecError) as error:
            ServerSettings.load({**STATE, **environ}, **given)  # type: ignore[arg-type]
        assert hint in (error.value.hint or "")
        assert "s3cret" not in f"{error.value!r}{error.value.__cause__!r}"


def test_a_misspelt_variable_gets_a_warning_and_those_of_other_parts_none() -> None:
    others = ["URL", "API_KEY", "CONFIG", "DATA_DIR", "RUN_DIR", "SANDBOX_MEMORY", "USER_PIDS", "NETWORK_UPLINK"]
    environ = {**STATE, **{f"ATOLL_{name}": "" for name in others}, "ATOLL_DRAIN_SECONDS": "1", "ATOLL_\x1b[1mQ": ""}
    odd, near = ServerSettings.load(environ).warnings
    assert near == "the variable ATOLL_DRAIN_SECONDS is not a setting and is ignored; did you mean ATOLL_DRAIN_S?"
    assert odd.isprintable()


def test_atoll_config_says_where_each_value_comes_from(file: Path) -> None:
    file.write_text("[server]\ntimeout = 7\n")
    names = {"ATOLL_CONFIG": str(file), "ATOLL_PORT": "99", "ATOLL_PROT": "1"}
    names["ATOLL_DATABASE_URL"] = "postgresql://ann:s3c:r@t@db/atoll"
    environment = {**{name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}, **names}

    def config(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "atoll.cli", "config", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True)

    shown = config()
    rows = {line.split()[0]: line.split()[1:3] for line in shown.stdout.splitlines() if "ATOLL_" in line}
    assert (rows["port"], rows["host"]) == (["99", "environment"], ["127.0.0.1", "default"])
    assert rows["timeout"][0] == "7.0"
    assert str(file)[:20] in shown.stdout
    assert "did you mean ATOLL_PORT?" in shown.stderr
    exact = config("--json").stdout
    assert json.loads(exact)["port"] == 99
    assert json.loads(exact)["database_url"] == "postgresql://ann:***@db/atoll"
    assert "s3c" not in shown.stdout + exact

"""`atoll doctor`: what works on this machine, what is missing, which engine `auto` chooses, and what each engine can
enforce."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from atoll.cli import capability_matrix
from atoll.cli.target import JsonOption, print_json
from atoll.engines.diagnosis import Diagnosis, diagnose
from atoll.engines.host.machine import Machine
from atoll.errors import SpecError
from atoll.model import EffectiveLimits
from atoll.model.state import Availability
from atoll.settings import Settings


def doctor(
    check: Annotated[
        str | None,
        typer.Option("--check", metavar="ENGINE", help="Check whether this engine keeps every promise here."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PART", help="With --check: checks with this in their names; may be repeated."),
    ] = None,
    slow: Annotated[bool, typer.Option("--slow", help="With --check: also the checks that take minutes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what works on this machine, what is missing, and what to install."""
    if check is not None:
        from atoll.cli.engine_check import check_engine

        raise SystemExit(check_engine(check, only or (), slow=slow, as_json=as_json))
    if only or slow:
        raise SpecError("--only and --slow choose among the checks of an engine", hint="Add --check ENGINE.")
    found = diagnose(Settings.load())
    if as_json:
        print_json(_as_json(found))
    else:
        _show(found)
    if found.auto is None:
        raise SystemExit(1)


def _show(found: Diagnosis) -> None:
    console = Console(highlight=False)
    console.print(_machine(found.machine))
    console.print(_engines(found.engines))
    _verdict(console, found)
    for table in capability_matrix.tables(found.levels):
        console.print(table)
    for reason in capability_matrix.reasons(found.levels):
        console.print(f"  {reason}", markup=False)
    if found.limits is not None:
        console.print(_limits(found, found.limits))
    console.print(f"\nData: {found.settings.data_dir}   Sockets: {found.settings.run_dir}")


def _as_json(found: Diagnosis) -> dict[str, Any]:
    limits = found.limits
    return {
        "machine": dataclasses.asdict(found.machine),
        "engines": [dataclasses.asdict(engine) for engine in found.engines],
        "auto": found.auto,
        "auto_reasons": found.auto_reasons,
        "levels": capability_matrix.as_json(found.levels),
        "default_limits": limits and limits.limits.model_dump(mode="json"),
        "limits_left_out": limits and limits.left_out,
        "shared_ceilings": found.shared,
        "data_dir": str(found.settings.data_dir),
        "run_dir": str(found.settings.run_dir),
    }


def _machine(machine: Machine) -> Table:
    table = Table(title="This machine", title_justify="left", show_header=False, box=None, padding=(0, 2))
    yes_no = {True: "[green]yes[/]", False: "no"}
    rows = {
        "system": f"{machine.distribution}, Linux {machine.kernel}, {machine.architecture}",
        "size": f"{machine.cpus} CPUs, {machine.memory_bytes / (1 << 30):.1f} GiB",
        "user": "root" if machine.is_root else "not root",
        "cgroups": machine.cgroups,
        "user namespaces": yes_no[machine.user_namespaces],
        "overlayfs": yes_no[machine.overlayfs],
        "btrfs": yes_no[machine.btrfs],
        "seccomp": yes_no[machine.seccomp],
        "Landlock": f"ABI {machine.landlock_abi}" if machine.landlock_abi else yes_no[False],
        "KVM": yes_no[machine.kvm],
    }
    rows |= {tool.name: tool.version or tool.path or "not found" for tool in machine.tools}
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _engines(engines: tuple[Availability, ...]) -> Table:
    table = Table(title="\nEngines", title_justify="left", box=None, padding=(0, 2))
    for column in ("engine", "works here", "why not, and what to do"):
        table.add_column(column, header_style="bold")
    for engine in engines:
        works = "[green]yes[/]" if engine.available else "[red]no[/]"
        table.add_row(engine.name, works, "\n".join([*engine.reasons, *engine.hints]))
    return table


def _limits(found: Diagnosis, held: EffectiveLimits) -> Table:
    table = Table(title="\nDefault limits", title_justify="left", box=None, padding=(0, 2))
    for column in ("", "each sandbox", "each user of a server", "all together"):
        table.add_column(column, header_style="bold")
    given, user, total = held.limits, found.settings.resources.account, found.settings.resources.installation
    missing = "not enforced here"
    rows = {
        "memory": ("memory_bytes", _gib(given.memory_bytes), _gib(user.memory_bytes), _gib(total.memory_bytes)),
        "processes": ("pids", given.pids, user.pids, total.pids),
        "CPUs": ("cpus", given.cpus, f"weight {user.cpu_weight}", f"weight {total.cpu_weight}"),
        "disk": ("disk_bytes", _gib(given.disk_bytes), "", ""),
        "open files": ("open_files", given.open_files, "", ""),
    }
    for name, (field, own, *shared) in rows.items():
        first = missing if field in held.left_out else str(own or "none")
        bounded = {"memory": "memory", "processes": "pids", "CPUs": "cpu"}.get(name)
        rest = [(str(value) if bounded in found.shared else missing) if bounded else "" for value in shared]
        table.add_row(name, first, *rest)
    return table


def _gib(size: int | None) -> str | None:
    return None if size is None else f"{size / (1 << 30):.1f} GiB"


def _verdict(console: Console, found: Diagnosis) -> None:
    console.print()
    if found.auto is None:
        console.print("[red]No engine with isolation works here.[/]")
    else:
        console.print(f"`auto` picks [bold green]{found.auto}[/].")
    for reason in found.auto_reasons:
        console.print(f"  {reason}")

"""The law for every engine: what any sandbox does, whatever makes it, as checks that are plain async functions.

`run` is for `atoll doctor` and for tests alike. It lies beside the command line, above everything that it drives, so
that imports still point one way: engines know nothing of the law that they are measured by.
"""

# Importing a module enters its checks into the list, in this order.
from atoll.conformance import life_cycle  # isort: skip
from atoll.conformance import exec, process_trees, background, start_commands, shells, terminals  # isort: skip
from atoll.conformance import files, special_files, watches, copied_trees, port_connections  # isort: skip
from atoll.conformance import isolation, controls, changed_limits, adoption, saved_states, named_volumes  # isort: skip
from atoll.conformance.bench import Bench
from atoll.conformance.check import CHECKS, Check
from atoll.conformance.runner import CheckResult, Outcome, run, run_one

_MODULES = (
    life_cycle,
    exec,
    process_trees,
    background,
    start_commands,
    shells,
    terminals,
    files,
    special_files,
    watches,
    copied_trees,
    port_connections,
    isolation,
    controls,
    changed_limits,
    adoption,
    saved_states,
    named_volumes,
)

__all__ = ["CHECKS", "Bench", "Check", "CheckResult", "Outcome", "run", "run_one"]

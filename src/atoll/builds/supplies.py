"""Whether RUN steps get this machine's own configuration of package managers: by the setting `build_mirrors`."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

from atoll import workers
from atoll.builds.environments import SUITE
from atoll.builds.mirrors import VARIABLE, Mirrors, parse
from atoll.builds.reporting import Reporter
from atoll.builds.request import BuildRequest, Supplies
from atoll.builds.steps import StagePlan
from atoll.images import Kind


async def supplies_for(request: BuildRequest, plans: Sequence[StagePlan], reporter: Reporter) -> Supplies | None:
    """Return what the request gives or, if it gives nothing and the setting is on, the configuration of this machine.

    The secrets in it are hidden from now on."""
    found = request.mirrors
    choice = parse(os.environ.get(VARIABLE, "")) if request.use_mirrors is None else request.use_mirrors
    if found is None and choice:
        read = functools.partial(Mirrors.of_machine, choice, suite=_suite(plans))
        mirrors = await workers.run(workers.ENGINE, read)
        for note in mirrors.notes:
            reporter.warn(mirrors.hidden(note))
        found = mirrors
    if found is not None:
        reporter.hide(each.encode() for each in found.secrets)
    return found


def _suite(plans: Sequence[StagePlan]) -> str:
    """Return the Debian suite of the base images; "" if there is none, or more than one."""
    images = [plan.image for plan in plans if plan.parent is None and plan.image is not None]
    suites = {image.reference.partition(":")[2] for image in images if image.kind is Kind.DEBIAN}
    suites |= {SUITE for image in images if image.kind is Kind.ENVIRONMENT}
    return suites.pop() if len(suites) == 1 else ""

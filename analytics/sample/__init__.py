"""A believable month of logs, in the daemon's own format, of which everything is known."""

from __future__ import annotations

from pathlib import Path

from analytics.sample.incidents import plant
from analytics.sample.spec import SCHEDULE, Spec
from analytics.sample.traffic import Traffic
from analytics.sample.truth import Boot, DayTruth, Incident, Ledger, Truth
from analytics.sample.world import World

__all__ = ["SCHEDULE", "Boot", "DayTruth", "Incident", "Ledger", "Spec", "Truth", "generate"]


def generate(directory: Path, spec: Spec) -> Truth:
    """
    Write the logs of the days declared: a directory for each process, closed segments, and the one still open.

    The same declaration gives the same bytes.

    :param directory: is made; a segment that comes late goes beside it, into the same name with `-late`.
    :return: what the logs add up to.
    """
    world = World(spec, directory)
    traffic = Traffic(world)
    # Before anything else of the same moment: an incident of midnight is there from the first line on.
    plant(traffic)
    world.begin()
    traffic.begin()
    world.run()
    return world.finish()

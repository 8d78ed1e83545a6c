"""Generated logs in the daemon's format, with known contents: a realistic month for the demo and tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from analytics.sample.ground_truth import SampleSpec, SampleTruth
from analytics.sample.simulation import Simulation
from analytics.sample.traffic import PhoneSimulator, TrafficSimulator, plant_incidents


def generate_logs(
    directory: Path, spec: SampleSpec, report_days: Callable[[int], None] = lambda days: None
) -> SampleTruth:
    """
    Write the logs of a specification: a directory for each process, with closed segments and an open one.

    Equal specifications give equal bytes.

    :param directory: is created; late segments go into a directory of the same name with `-late`.
    :param report_days: receives the number of generated days.
    :return: the contents of the logs.
    """
    world = Simulation(spec, directory)
    traffic, phones = TrafficSimulator(world), PhoneSimulator(world)
    # Before other events at the same time: an incident at midnight affects the first line.
    plant_incidents(traffic)
    world.begin()
    traffic.begin()
    phones.begin_wallets()
    world.run(report_days)
    return world.finish()

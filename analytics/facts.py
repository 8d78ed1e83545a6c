"""What report and textfile say about the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime

from analytics.job import Span


@dataclass(frozen=True, slots=True)
class RunFacts:
    """
    One run, as its outputs name it.

    What a report says must not depend on the run, but on the input alone: :mod:`analytics.runs` has the rest.

    :param version: of mediatord, whose code ran.
    :param span: days that the run made.
    :param now: when its results were complete, with a time zone.
    :param final_until: the last day that late segments can no longer change; later ones may still change.
    :param duration_s: seconds since the run began.
    """

    version: str
    span: Span
    now: datetime
    final_until: date
    duration_s: float

    def is_final(self, day: date) -> bool:
        """Whether late segments can no longer change this day."""
        return day <= self.final_until

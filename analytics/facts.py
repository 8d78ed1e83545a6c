"""What report and textfile say about the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime

from analytics.job import Span


@dataclass(frozen=True, slots=True)
class RunFacts:
    """
    One run, as its outputs name it.

    :param run_id: random name of the run.
    :param version: of mediatord, whose code ran.
    :param span: days that the run made.
    :param now: when its results were complete, with a time zone.
    :param final_until: the last day that late segments can no longer change; later ones may still change.
    :param inputs: segments that were read in this run.
    :param input_bytes: bytes of them.
    :param seconds: what each step took so far, by name, in order.
    """

    run_id: str
    version: str
    span: Span
    now: datetime
    final_until: date
    inputs: int
    input_bytes: int
    seconds: dict[str, float]

    def is_final(self, day: date) -> bool:
        """Whether late segments can no longer change this day."""
        return day <= self.final_until

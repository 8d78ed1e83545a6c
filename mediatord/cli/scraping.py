"""What a running mediator says of itself: `/health`, `/ready` and `/metrics`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from math import inf
from time import monotonic
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

# Seconds. Who asks first whether it is ready waits until it has been tried.
_TIMEOUT = 10.0


class Unreachable(Exception):
    """Nobody answers there, or not as a mediator does; the text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class State:
    """
    One of its answers about itself.

    :param text: `ok`, or what is the matter.
    :param age: seconds since that was found out; None where it is not said.
    """

    well: bool
    text: str
    age: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """
    What `/metrics` said.

    :param at: when, by a clock that nobody sets, seconds.
    :param date: the same by the clock of the mediator's host, seconds since the epoch; None where it is not said.
    """

    at: float
    samples: tuple[Sample, ...]
    date: float | None = None

    def of(self, name: str) -> Iterator[Sample]:
        """The series of this name."""
        return (sample for sample in self.samples if sample.name == name)

    def has(self, name: str) -> bool:
        return any(True for _ in self.of(name))

    def sum(self, name: str, chosen: Callable[[dict[str, str]], bool] = lambda labels: True) -> float:
        """Of all series of this name that have such labels."""
        return sum(sample.value for sample in self.of(name) if chosen(sample.labels))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of a label."""
        sums: dict[str, float] = {}
        for sample in self.of(name):
            value = sample.labels.get(label, "")
            sums[value] = sums.get(value, 0.0) + sample.value
        return sums

    def quantiles(self, name: str, label: str, *shares: float) -> dict[str, list[float]]:
        """
        Of a histogram, by the value of a label: estimates as Prometheus makes them, in its unit.

        :param name: without `_bucket`.
        :param shares: 0 to 1.
        """
        buckets: dict[str, dict[float, float]] = {}
        for sample in self.of(f"{name}_bucket"):
            counts = buckets.setdefault(sample.labels.get(label, ""), {})
            bound = float(sample.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + sample.value
        return {
            value: [_quantile(sorted(counts.items()), share) for share in shares]
            for value, counts in sorted(buckets.items())
            if counts.get(inf)
        }


def _quantile(counts: list[tuple[float, float]], share: float) -> float:
    """:param counts: upper bounds and how many are not above them."""
    wanted = counts[-1][1] * share
    below, before = 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            if bound == inf:
                return below
            inside = count - before
            return below + (bound - below) * ((wanted - before) / inside if inside else 1.0)
        below, before = bound, count
    return below


def ask_health(url: str) -> State:
    """
    Whether it is well.

    :param url: the mediator's, without a slash at its end.
    :raise Unreachable: there is no mediator.
    """
    code, body, _ = _get(f"{url}/health")
    state = _state(code, body)
    if state is None:
        raise Unreachable(f"{url}/health: expected the answer of a mediator, got HTTP {code}")
    return state


def ask_ready(url: str) -> State | None:
    """
    Whether a message would get through; None where it cannot be asked that.

    :raise Unreachable: as :func:`ask_health`.
    """
    code, body, _ = _get(f"{url}/ready")
    return None if code == 404 else _state(code, body) or State(False, f"HTTP {code}")


def ask_figures(url: str) -> Figures | str:
    """
    What it has measured, or why that is not known.

    :raise Unreachable: as :func:`ask_health`.
    """
    code, text, date = _get(f"{url}/metrics")
    if code != 200:
        return f"not shown to this address (HTTP {code}; see metrics.allow)"
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:
        return "not readable"
    return Figures(monotonic(), tuple(sample for family in families for sample in family.samples), date)


def _state(code: int, body: str) -> State | None:
    try:
        answer: Any = json.loads(body)
        state, detail = str(answer["status"]), str(answer.get("detail", ""))
        age = float(answer["age_ms"]) / 1000 if "age_ms" in answer else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return State(code == 200 and state == "ok", f"{state}: {detail}" if detail else state, age)


def _get(url: str) -> tuple[int, str, float | None]:
    """Status, body and date."""
    # A proxy has no business between an operator and a daemon.
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT) as response:
            return response.status, response.read().decode("utf-8", "replace"), _date(response.headers)
    except HTTPError as error:
        with error:
            return error.code, error.read().decode("utf-8", "replace"), _date(error.headers)
    except HTTPException:
        raise Unreachable(f"{url}: what answers there does not speak HTTP, or stopped amid it") from None
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise Unreachable(f"{url}: {getattr(reason, 'strerror', None) or reason}") from None


def _date(headers: Message) -> float | None:
    try:
        return parsedate_to_datetime(headers.get("Date", "")).timestamp()
    except ValueError:
        return None

"""What `mediatord status` asks and shows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_TIMEOUT = 5.0
_QUEUE = "mediator_message_queue_size"
_COUNTED = ("forwarded", "stored", "delivered", "expired", "evicted")


class Unreachable(Exception):
    """Nobody answers there, or not as a mediator does; the text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class Report:
    """:param rows: pairs of what and how much, to be shown in this order."""

    healthy: bool
    rows: tuple[tuple[str, str], ...]

    def table(self) -> str:
        """The rows as lines in two columns."""
        width = max(len(name) for name, _ in self.rows)
        return "\n".join(f"{name:{width}}  {value}" for name, value in self.rows)


def ask_status(url: str) -> Report:
    """
    Ask `/health` and `/metrics`.

    :param url: the mediator's, without a slash at its end.
    :raise Unreachable: there is no mediator.
    """
    code, body = _get(f"{url}/health")
    try:
        health = json.loads(body)
        state, detail = str(health["status"]), str(health.get("detail", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Unreachable(f"{url}/health: expected the answer of a mediator, got HTTP {code}") from None
    healthy = code == 200 and state == "ok"
    shown = f"{state}: {detail}" if detail else state
    return Report(healthy, (("status", shown), *_measured(*_get(f"{url}/metrics"))))


def _get(url: str) -> tuple[int, str]:
    # A proxy has no business between an operator and a daemon.
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT) as response:
            return response.status, response.read().decode("utf-8", "replace")
    except HTTPError as error:
        with error:
            return error.code, error.read().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise Unreachable(f"{url}: {getattr(reason, 'strerror', None) or reason}") from None


def _measured(code: int, text: str) -> list[tuple[str, str]]:
    if code != 200:
        return [("metrics", f"not shown to this address (HTTP {code}; see metrics.allow)")]
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        return [("metrics", "not readable")]
    waiting = [sample.value for sample in samples if sample.name == _QUEUE]
    versions = [sample.labels.get("version", "") for sample in samples if sample.name == "mediator_build_info"]
    return [
        ("version", versions[0] if versions else "unknown"),
        ("storage", "up" if _value(samples, "mediator_storage_up") else "down"),
        *_workers(samples),
        ("connections", f"{_value(samples, 'mediator_active_connections'):.0f}"),
        ("waiting", f"{sum(waiting):.0f} messages, {max(waiting, default=0):.0f} in the longest queue"),
        *((name, f"{_value(samples, f'mediator_messages_{name}_total'):.0f}") for name in _COUNTED),
        ("refused", f"{_value(samples, 'mediator_rejected_total'):.0f}"),
    ]


def _workers(samples: list[Sample]) -> list[tuple[str, str]]:
    """Nothing where there is one process."""
    asked, answered = (_value(samples, f"mediator_workers{suffix}") for suffix in ("", "_answered"))
    return [("workers", f"{answered:.0f} of {asked:.0f} answer")] if asked else []


def _value(samples: list[Sample], name: str) -> float:
    """The sum over all series of this name."""
    return sum(sample.value for sample in samples if sample.name == name)

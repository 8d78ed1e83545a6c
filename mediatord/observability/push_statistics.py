"""What the metrics of a daemon say about its push services, for the status page and `mediatord status`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.samples import Sample

_REQUESTS = "mediator_push_requests_total"
_DEVICES = "mediator_push_devices"
_FORGOTTEN = "mediator_push_devices_forgotten_total"
_BACKING_OFF = "mediator_push_hosts_backing_off"
# What :func:`read_push_statistics` reads.
PUSH_METRICS = frozenset((_REQUESTS, _DEVICES, _FORGOTTEN, _BACKING_OFF))
_WEBHOOK = "webhook"


@dataclass(frozen=True, slots=True)
class PushStatistics:
    """
    A configured push service, or the webhook. Counts are since the start of the daemon.

    :param devices: registered ones; None for the webhook, which has none.
    :param retry: requests that failed, and may be repeated.
    :param rejected: requests that failed for good.
    :param forgotten: devices removed because the service does not know them.
    :param hosts_backing_off: hosts to which nothing is sent at the moment, as they fail.
    """

    service: str
    devices: int | None
    sent: int
    retry: int
    rejected: int
    forgotten: int
    hosts_backing_off: int


def read_push_statistics(samples: Iterable[Sample]) -> list[PushStatistics]:
    """The configured services in order of their names; none without push notifications."""
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    numbers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for sample in samples:
        service, value = sample.labels.get("service", ""), int(sample.value)
        if sample.name == _REQUESTS:
            outcomes[service][sample.labels["outcome"]] += value
        elif sample.name in PUSH_METRICS:
            numbers[sample.name][service] += value
    return [
        PushStatistics(
            service,
            None if service == _WEBHOOK else numbers[_DEVICES][service],
            counts["sent"],
            counts["retry"],
            counts["rejected"],
            numbers[_FORGOTTEN][service],
            numbers[_BACKING_OFF][service],
        )
        for service, counts in sorted(outcomes.items())
    ]

"""Interface of the push services: devices, wake-ups, and outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

from mediatord.push.devices import ServiceName

# What became of one attempt: `sent`, the service has accepted it; `gone`, the service no longer knows the device;
# `mismatch`, the device belongs to another sender; `rejected`, another try is pointless; `retry`, another try may
# succeed: the service, or the way to it, is at fault, or limits how often it is called.
PushOutcome = Literal["sent", "gone", "mismatch", "rejected", "retry"]


class PushResult(NamedTuple):
    """
    The outcome of one request.

    :param reason: the code of the answer if it is one that the service documents, or a constant word of ours; nothing
        else that was received.
    :param status: HTTP status; None if there was no response.
    :param retry_after: seconds for which the service wants no requests; None if it did not say.
    """

    outcome: PushOutcome
    reason: str = ""
    status: int | None = None
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Wakeup:
    """
    What may be told to a device.

    :param mediator: opaque id of this mediator, so that a wallet with several knows which has something.
    :param message_ids: ids of waiting messages; empty unless the operator has switched them on.
    """

    mediator: str
    message_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PushAlert:
    """
    A visible notification, as the operator configured it; it is false if there is neither text nor key.

    :param title_key: key of a localised title in the app, instead of `title`; likewise `body_key`.
    """

    title: str = ""
    body: str = ""
    title_key: str = ""
    body_key: str = ""

    def __bool__(self) -> bool:
        return bool(self.title or self.body or self.title_key or self.body_key)


def make_aps(alert: PushAlert | None) -> dict[str, object]:
    """The member `aps` of a notification by APNs: wakes the app, and shows the alert if there is one."""
    if not alert:
        return {"content-available": 1}
    text = {
        "title-loc-key": alert.title_key,
        "loc-key": alert.body_key,
        "title": "" if alert.title_key else alert.title,
        "body": "" if alert.body_key else alert.body,
    }
    return {"alert": {key: value for key, value in text.items() if value}, "content-available": 1}


D = TypeVar("D", contravariant=True)


class IPushService(Protocol[D]):
    """One configured push service."""

    @property
    def name(self) -> ServiceName:
        """Its name in configuration, metrics and log."""

    def host_of(self, device: D) -> str:
        """The host that a wake-up of this device goes to, which backs off as one."""

    async def send(self, device: D, wakeup: Wakeup) -> PushResult:
        """
        Send one request, within :data:`REQUEST_TIMEOUT`. Credentials are renewed once for all who wait. Never fails.
        """

    async def close(self) -> None:
        """Abort what is in progress, and close connections."""


# Seconds for one request, with connecting and renewing credentials.
REQUEST_TIMEOUT = 10.0

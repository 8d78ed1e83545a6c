"""Wake-ups that an operator asks for, to see what the push services answer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from mediatord.push.sender import PushSender
from mediatord.push.service import PushOutcome, PushResult
from mediatord.runtime.request_time import outside_request
from mediatord.store.interfaces.devices import WakeupClaim
from mediatord.store.interfaces.store import IStore


@dataclass(frozen=True, slots=True)
class ManualWakeup:
    """
    What became of one request.

    :param service: its name, or `webhook`.
    :param status: HTTP status; None without a response.
    :param reason: code of the service, or a word of ours; may be empty.
    :param retry_after: seconds until the service may be asked again, if it said so.
    :param seconds: duration.
    """

    service: str
    outcome: PushOutcome
    status: int | None
    reason: str
    retry_after: float | None
    seconds: float


async def send_manual_wakeup(
    account: str, store: IStore, sender: PushSender, monotonic: Callable[[], float]
) -> list[ManualWakeup]:
    """
    Wake all devices of an account now, in parallel, and call the webhook. The store does not count it as a wake-up,
    so that it delays none; devices that their service does not know are removed.

    :param account: DID of a DIDComm account or a Decentrl identity.
    """
    devices = await store.devices.list_devices(account)
    summary = await store.administration.find_account(account)
    messages, size = (summary.messages, summary.bytes) if summary else (0, 0)

    async def measure(service: str, request: Coroutine[Deferred[Any], Any, PushResult]) -> ManualWakeup:
        began = monotonic()
        result = await request
        seconds = max(0.0, monotonic() - began)
        return ManualWakeup(service, result.outcome, result.status, result.reason, result.retry_after, seconds)

    # These may take longer than the store has for a request.
    with outside_request():
        requests = [measure(one.service, sender.wake(account, one)) for one in devices]
        if sender.has_webhook:
            claim = WakeupClaim(account, (), messages, size)
            requests.append(measure("webhook", sender.notify(claim)))
        sending = [Deferred.fromCoroutine(one) for one in requests]
    return list(await gatherResults(sending))

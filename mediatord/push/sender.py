"""
Sends claimed wake-ups: records what push services answer, removes devices that a service no longer knows, and decides
when the others are tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from mediatord.errors import StoreUnavailable
from mediatord.observability.event_recorder import EventRecorder
from mediatord.push.requester import (
    INITIAL_BACKOFF,
    MAX_BACKOFF,
    MAX_RETRY_AFTER,
    MAX_UNTRUSTED_ATTEMPTS,
    UNRECORDED,
    IPushRequester,
    PushRequest,
    TimedResult,
)
from mediatord.push.service import REQUEST_TIMEOUT, PushResult
from mediatord.runtime.failure_logging import redact_failure
from mediatord.store.interfaces.devices import Device, IDeviceStore, WakeupClaim

_log = Logger()

# Stands for the webhook among the ids of devices.
WEBHOOK_TARGET = b"webhook"


@dataclass(frozen=True, slots=True)
class SendReport:
    """
    What became of a wake-up.

    :param owed: ids of the devices that are still to be woken; :data:`WEBHOOK_TARGET` for the webhook.
    :param is_partial: whether some devices were woken, and something is owed.
    :param retry_in: seconds until the next attempt, if any is owed.
    """

    owed: frozenset[bytes]
    is_partial: bool = False
    retry_in: float = 0.0


_NOTHING_OWED = SendReport(frozenset())
ReportCallback = Callable[[SendReport], None]


class _Attempt(NamedTuple):
    """
    A wake-up that is being sent.

    :param number: of attempts before this one.
    :param age: seconds since the message arrived.
    """

    request: PushRequest
    number: int
    age: float


class PushSender:
    """
    Sends wake-ups to all devices of an account at once.

    :param has_webhook: whether a webhook is configured.
    :param uniform: as `random.uniform`.
    """

    def __init__(
        self,
        requester: IPushRequester,
        devices: IDeviceStore,
        recorder: EventRecorder,
        uniform: Callable[[float, float], float],
        *,
        has_webhook: bool = False,
    ) -> None:
        self._requester = requester
        self._devices = devices
        self._recorder = recorder
        self._uniform = uniform
        self.has_webhook = has_webhook

    def start(self) -> None:
        """Called when the daemon starts."""
        self._requester.start()

    def send(
        self,
        claim: WakeupClaim,
        done: ReportCallback,
        only: Container[bytes] | None = None,
        *,
        attempt: int = 0,
        age: float = 0.0,
    ) -> None:
        """
        Send a wake-up to the devices of its owner, and to the webhook. `done` is called once, perhaps at once.

        :param only: ids of the devices to wake; None for all.
        :param attempt: number of attempts before this one.
        :param age: seconds since the message arrived.
        """
        devices: Sequence[Device] = claim.devices
        if only is not None:
            devices = [device for device in devices if device.id in only]
        is_notified = self.has_webhook and (only is None or WEBHOOK_TARGET in only)
        webhook = (claim.messages, claim.bytes) if is_notified else None
        request = PushRequest(claim.owner, devices, claim.message_ids, webhook)
        self._requester.request(request, partial(self._finish, _Attempt(request, attempt, age), done))

    async def wake(self, owner: str, device: Device) -> PushResult:
        """Send one wake-up to one device, record the outcome, and remove the device if its service says so."""
        return await self._request_one(PushRequest(owner, (device,)))

    async def notify(self, claim: WakeupClaim) -> PushResult:
        """Call the webhook, and record the outcome."""
        return await self._request_one(PushRequest(claim.owner, (), webhook=(claim.messages, claim.bytes)))

    def count_backing_off(self) -> Mapping[str, int]:
        """As of :class:`~mediatord.push.requester.IPushRequester`."""
        return self._requester.count_backing_off()

    async def close(self) -> None:
        """Abort requests; those who wait for them get `retry`."""
        await self._requester.close()

    async def _request_one(self, request: PushRequest) -> PushResult:
        made: Deferred[Sequence[TimedResult]] = Deferred()
        self._requester.request(request, made.callback)
        results = await made
        await self._forget(request.owner, self._record(request, 0.0, results))
        return results[0].result

    def _finish(self, attempt: _Attempt, done: ReportCallback, results: Sequence[TimedResult]) -> None:
        request = attempt.request
        try:
            gone = self._record(request, attempt.age, results)
        except Exception:
            _log.failure("recording a wake-up failed", redact_failure())
            gone = []
        report = self._make_report(attempt, results)
        if gone:
            forgotten = Deferred.fromCoroutine(self._forget(request.owner, gone))
            forgotten.addErrback(lambda failure: _log.failure("removing devices failed", redact_failure(failure)))
            forgotten.addCallback(lambda _: done(report))
        else:
            done(report)

    def _make_report(self, attempt: _Attempt, results: Sequence[TimedResult]) -> SendReport:
        for one in results:
            if one.result.outcome == "retry":
                break
        else:
            return _NOTHING_OWED
        devices = attempt.request.devices
        owed = {
            id_: one.result
            for id_, one in zip((*(device.id for device in devices), WEBHOOK_TARGET), results, strict=False)
            if one.result.outcome == "retry" and (one.is_trusted or attempt.number < MAX_UNTRUSTED_ATTEMPTS)
        }
        if not owed:
            return _NOTHING_OWED
        pause = min(MAX_BACKOFF, INITIAL_BACKOFF * 2 ** min(attempt.number, 16)) * self._uniform(0.5, 1.5)
        pause = max(pause, min(result.retry_after or 0.0 for result in owed.values()))
        is_partial = any(one.result.outcome == "sent" for one in results[: len(devices)])
        return SendReport(frozenset(owed), is_partial, min(pause, MAX_RETRY_AFTER))

    def _record(self, request: PushRequest, age: float, results: Sequence[TimedResult]) -> list[tuple[Device, str]]:
        """Record the results; the devices that are to be removed, each with the reason."""
        gone: list[tuple[Device, str]] = []
        devices = request.devices
        for number, (result, seconds, _) in enumerate(results):
            device = devices[number] if number < len(devices) else None
            outcome, reason, status, retry_after = result
            if reason not in UNRECORDED:
                self._recorder.record_wakeup(
                    request.owner,
                    "webhook" if device is None else device.service,
                    outcome,
                    code=reason or None,
                    status=status,
                    age=age,
                    seconds=min(seconds, 2 * REQUEST_TIMEOUT),
                    retry_after=retry_after,
                )
            if outcome in ("gone", "mismatch") and device is not None:
                gone.append((device, reason or outcome))
        return gone

    async def _forget(self, owner: str, gone: Sequence[tuple[Device, str]]) -> None:
        for device, reason in gone:
            try:
                if await self._devices.forget_devices([device.id]):
                    self._recorder.record_device_forgotten(owner, device.service, reason)
            except StoreUnavailable:
                pass  # the next wake-up finds out again

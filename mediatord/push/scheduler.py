"""
Decides when accounts are woken: messages that no socket took are noted; the wake-ups that they ask for are claimed in
the store, sent, and finished there.

The store decides which of several processes sends a wake-up. A process that dies between accepting a message and
sending loses nothing: the message is in the store, and whoever takes over finds that its wake-up is owed.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import StoreUnavailable
from mediatord.protocol.canonical_did import is_decentrl_did
from mediatord.protocol.probe_markers import PROBE_DID_INFIX
from mediatord.push.sender import PushSender, SendReport
from mediatord.runtime.failure_logging import LogThrottle, redact_failure
from mediatord.runtime.request_time import outside_request
from mediatord.store.interfaces.devices import (
    FinishedWakeup,
    IDeviceStore,
    WakeupClaim,
    WakeupPolicy,
    WakeupRequest,
)

_log = Logger()

# Seconds for which messages are collected before their accounts are looked up.
COLLECT_SECONDS = 0.1
# Accounts that are looked up together, and wake-ups that are sent at a time.
CLAIM_BATCH_SIZE = 200
MAX_WAKEUPS_AT_ONCE = 1_000
# Accounts that are noted or wait for a retry. Others are found in the store once there is room again.
MAX_NOTED_ACCOUNTS = 200_000
# Polls that are recorded in the store together, and seconds for which they are collected.
MAX_COLLECTED_POLLS = 10_000
POLL_SECONDS = 1.0
STORE_RETRY_SECONDS = 1.0
RECOVERY_SLICE = 500
_RECOVERY_PAUSE = 0.01
# The longest pause between two attempts: a wallet may have registered another device meanwhile.
MAX_RETRY_SECONDS = 300.0
# Seconds by which the store may have set the time of a claim later than this process.
_CLAIM_MARGIN = 1.0
# Seconds that the last requests have at the stop of the daemon.
STOP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Retry:
    """
    A wake-up that was not sent to all devices.

    :param owed: what is still to be woken.
    :param attempts: made so far.
    :param arrived_at: arrival that is claimed again; after any other there is a newer message, for all devices.
    """

    owed: Container[bytes]
    attempts: int
    arrived_at: float


class WakeupScheduler(Service):
    """
    Schedules the wake-ups of this process.

    :param policy: when an account is woken.
    :param repeat_after: seconds after which an unanswered wake-up is repeated while messages wait; 0 for never.
    :param monotonic: returns seconds, by a clock that cannot be set; by default that of the reactor.
    :param decentrl: whether Decentrl identities are woken, which may have registered devices before.
    """

    name = "wake-ups"

    def __init__(
        self,
        clock: IReactorTime,
        store: IDeviceStore,
        sender: PushSender,
        policy: WakeupPolicy,
        repeat_after: float = 0.0,
        monotonic: Callable[[], float] | None = None,
        decentrl: bool = True,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic or clock.seconds
        self._wakes_decentrl = decentrl
        self._store = store
        self._sender = sender
        self._policy = policy
        self._repeat_after = repeat_after
        # Accounts to look up, with the arrival of their last message.
        self._noted: dict[str, float] = {}
        # Accounts to look up at a later time, with that time. Entries of the heap with another time are stale.
        self._postponed: dict[str, tuple[float, float]] = {}
        self._heap: list[tuple[float, str]] = []
        self._retries: dict[str, _Retry] = {}
        self._polls: dict[str, float] = {}
        self._sending: set[str] = set()
        self._finished: list[FinishedWakeup] = []
        self._is_working = False
        self._has_overflowed = False
        self._recovery: Deferred[None] | None = None
        self._must_recover_again = False
        self._sent_all: Deferred[None] | None = None
        self._timer: IDelayedCall | None = None
        self._warning = LogThrottle(clock)

    @property
    def waiting(self) -> int:
        """Number of accounts whose wake-up is not sent yet, or may have to be repeated."""
        return len(self._noted) + len(self._postponed) + len(self._sending)

    def startService(self) -> None:
        """Start, and look for wake-ups that are owed since before, as soon as the store is open."""
        super().startService()
        self._sender.start()
        self._arm(COLLECT_SECONDS)
        self.recover()

    def stopService(self) -> Deferred[None]:
        """Claim no more; fires when the wake-ups that are being sent have ended, or were aborted."""
        super().stopService()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._recovery is not None:
            self._recovery.cancel()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        if self._sending:
            self._sent_all = Deferred()
            abort = self._clock.callLater(STOP_SECONDS, lambda: Deferred.fromCoroutine(self._sender.close()))
            await self._sent_all
            if abort.active():
                abort.cancel()
        await self._sender.close()
        try:
            await self._flush_finished()
        except StoreUnavailable:
            pass  # they are claimed again when their leases have ended

    def note(self, owner: str) -> None:
        """A message of this owner became visible, and no socket took it. Never fails."""
        if owner not in self._noted:
            if PROBE_DID_INFIX in owner or (not self._wakes_decentrl and is_decentrl_did(owner)):
                return
            if self.waiting >= MAX_NOTED_ACCOUNTS:
                self._has_overflowed = True
                return
        self._noted[owner] = self._monotonic()
        if self._timer is None:
            self._arm(COLLECT_SECONDS)

    def note_poll(self, owner: str) -> None:
        """The owner was in contact about its messages; it is not woken for those that it can know of. Never fails."""
        self._noted.pop(owner, None)
        self._postponed.pop(owner, None)
        self._retries.pop(owner, None)
        if owner in self._polls or len(self._polls) < MAX_COLLECTED_POLLS:
            self._polls[owner] = self._monotonic()
            if self._timer is None:
                self._arm(POLL_SECONDS)

    def recover(self) -> None:
        """Look in the background for wake-ups that are owed, such as those of a process that has died."""
        if self._recovery is not None:
            self._must_recover_again = True  # what this is about may be where the search has been already
        elif self.running:
            with outside_request():
                self._recovery = Deferred.fromCoroutine(self._recover())
            if self._recovery.called:
                self._recovery.addErrback(self._log_failure, "looking for owed wake-ups")
                self._recovery = None
            else:
                self._recovery.addErrback(self._log_failure, "looking for owed wake-ups")
                self._recovery.addBoth(self._end_recovery)

    def _end_recovery(self, _: object) -> None:
        self._recovery = None
        if self._must_recover_again:
            self._must_recover_again = False
            self.recover()

    async def _recover(self) -> None:
        after: str | None = ""
        while after is not None:
            pause = _RECOVERY_PAUSE
            if self.waiting >= MAX_NOTED_ACCOUNTS // 2:
                pause = STORE_RETRY_SECONDS
            else:
                try:
                    await self._flush_finished()  # what was just sent is not owed
                    await self._flush_polls()
                    owners, after = await self._store.find_owed_wakeups(
                        after, RECOVERY_SLICE, self._policy, repeat_after=self._repeat_after
                    )
                    for owner in owners:
                        if owner not in self._sending and owner not in self._postponed:
                            self.note(owner)
                except StoreUnavailable:
                    pause = STORE_RETRY_SECONDS
            if after is not None:
                await deferLater(self._clock, pause)

    def _postpone(self, owner: str, seconds: float, arrived_at: float) -> None:
        """Look an owner up later."""
        if self.waiting >= MAX_NOTED_ACCOUNTS:
            self._has_overflowed = True
            self._retries.pop(owner, None)
            return
        due = self._monotonic() + seconds
        self._postponed[owner] = due, arrived_at
        heappush(self._heap, (due, owner))
        if len(self._heap) > 2 * len(self._postponed) + CLAIM_BATCH_SIZE:
            self._heap = [(due, owner) for owner, (due, _) in self._postponed.items()]
            heapify(self._heap)

    def _arm(self, seconds: float) -> None:
        if self._timer is None and self.running:
            self._timer = self._clock.callLater(seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._is_working:
            return  # its end arms the timer
        self._is_working = True
        self._note_postponed()
        with outside_request():
            work = Deferred.fromCoroutine(self._work())
        work.addErrback(self._log_failure, "scheduling wake-ups")
        work.addBoth(self._end_work)

    def _end_work(self, _: object) -> None:
        self._is_working = False
        if self._has_overflowed and self._recovery is None and self.waiting < MAX_NOTED_ACCOUNTS // 2:
            self._has_overflowed = False
            self.recover()
        if self._noted or self._finished:
            self._arm(COLLECT_SECONDS)
        elif self._heap or self._polls or self._has_overflowed:
            left = self._heap[0][0] - self._monotonic() if self._heap else POLL_SECONDS
            self._arm(min(max(COLLECT_SECONDS, left), POLL_SECONDS))

    def _note_postponed(self) -> None:
        now = self._monotonic()
        while self._heap and self._heap[0][0] <= now:
            due, owner = heappop(self._heap)
            postponed = self._postponed.get(owner)
            if postponed is not None and postponed[0] == due:
                del self._postponed[owner]
                self._noted.setdefault(owner, postponed[1])

    async def _work(self) -> None:
        """Record in the store what has happened, then claim wake-ups and start to send them."""
        try:
            await self._flush_finished()
            await self._flush_polls()
            while self.running and (room := min(CLAIM_BATCH_SIZE, MAX_WAKEUPS_AT_ONCE - len(self._sending))) > 0:
                batch = self._take_noted(room)
                if not batch:
                    break
                await self._claim(batch)
        except StoreUnavailable:
            if self._warning.count_occurrence():
                _log.warn("could not schedule wake-ups: the store was unavailable")

    def _take_noted(self, most: int) -> dict[str, float]:
        """The first owners that were noted, except those that are just being woken."""
        batch: dict[str, float] = {}
        for owner, arrived_at in self._noted.items():
            if owner not in self._sending:
                batch[owner] = arrived_at
                if len(batch) >= most:
                    break
        for owner in batch:
            del self._noted[owner]
        return batch

    async def _claim(self, batch: dict[str, float]) -> None:
        now = self._monotonic()
        requests = [WakeupRequest(owner, now - arrived_at) for owner, arrived_at in batch.items()]
        try:
            decisions = await self._store.claim_wakeups(requests, self._policy)
        except StoreUnavailable:
            for owner, arrived_at in batch.items():
                self._postpone(owner, STORE_RETRY_SECONDS, arrived_at)
            raise
        for owner, decision in zip(batch, decisions, strict=True):
            if isinstance(decision, WakeupClaim):
                self._send(decision, batch[owner])
            elif decision is not None and owner not in self._noted:  # else it is looked up soon
                self._postpone(owner, decision, batch[owner])
            elif self._find_retry(owner, batch[owner]) is not None:
                del self._retries[owner]

    def _find_retry(self, owner: str, arrived_at: float) -> _Retry | None:
        retry = self._retries.get(owner)
        return retry if retry is not None and retry.arrived_at == arrived_at else None

    def _send(self, claim: WakeupClaim, arrived_at: float) -> None:
        owner, claimed_at = claim.owner, self._monotonic()
        retry = self._find_retry(owner, arrived_at)
        self._retries.pop(owner, None)
        attempts, only = (0, None) if retry is None else (retry.attempts, retry.owed)
        self._sending.add(owner)
        done = partial(self._finish, claim, arrived_at, claimed_at, attempts)
        self._sender.send(claim, done, only, attempt=attempts, age=max(0.0, claimed_at - arrived_at))

    def _finish(
        self, claim: WakeupClaim, arrived_at: float, claimed_at: float, attempts: int, report: SendReport
    ) -> None:
        """The attempt to send a wake-up has ended."""
        owner = claim.owner
        next_at = claimed_at + self._policy.min_interval + _CLAIM_MARGIN
        if not report.owed:
            self._finished.append(FinishedWakeup(owner, claim.claim))
            if self._repeat_after:
                self._postpone(owner, self._repeat_after, next_at)
        elif report.is_partial and self.running:
            # The devices that were woken must not wait for the others.
            self._finished.append(FinishedWakeup(owner, claim.claim))
            self._retry(owner, report, attempts + 1, max(report.retry_in, next_at - claimed_at), next_at)
        else:
            retry_in = min(report.retry_in, MAX_RETRY_SECONDS) if self.running else 0.0
            self._finished.append(FinishedWakeup(owner, claim.claim, retry_in))
            self._retry(owner, report, attempts + 1, retry_in, arrived_at)
        self._sending.discard(owner)
        if self._sent_all is not None and not self._sending:
            sent_all, self._sent_all = self._sent_all, None
            sent_all.callback(None)
        if self._timer is None:
            self._arm(COLLECT_SECONDS)

    def _retry(self, owner: str, report: SendReport, attempts: int, seconds: float, arrived_at: float) -> None:
        # A newer message is for all devices, unless the wake-up of some stands for that message too.
        if report.is_partial or owner not in self._noted:
            self._retries[owner] = _Retry(report.owed, attempts, arrived_at)
            self._postpone(owner, min(seconds, MAX_RETRY_SECONDS), arrived_at)

    async def _flush_finished(self) -> None:
        if self._finished:
            finished, self._finished = self._finished, []
            try:
                await self._store.finish_wakeups(finished)
            except StoreUnavailable:
                self._finished = finished + self._finished
                raise

    async def _flush_polls(self) -> None:
        """A poll that cannot be recorded is forgotten, and its account may be woken once too often."""
        if self._polls:
            now = self._monotonic()
            polls, self._polls = self._polls, {}
            await self._store.record_polls({owner: max(0.0, now - at) for owner, at in polls.items()})

    def _log_failure(self, failure: Failure, what: str) -> None:
        if not failure.check(CancelledError, StoreUnavailable):
            _log.failure("{what} failed", redact_failure(failure), what=what)

"""Devices of accounts that push services can wake, and the record of wake-ups that are owed, sent and answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from twisted.internet.defer import Deferred
from zope.interface import Interface

# Bytes of a device id: a keyed hash of service and token.
DEVICE_ID_BYTES = 16
# Seconds that a claim lasts at most, until the lease ends or a retry is due.
MAX_CLAIM_SECONDS = 600.0
# Seconds by which a time that is kept may be ahead of that of an operation, which may have waited for its execution.
_CLOCK_TOLERANCE = 60.0


@dataclass(frozen=True, slots=True)
class Device:
    """
    A device as it is stored. The store knows neither token nor endpoint.

    :param id: keyed hash of service and token, so that the same token is found under any account; 16 bytes.
    :param service: `fcm`, `apns` or `web_push`.
    :param sealed: the encrypted registration (:class:`~mediatord.push.devices.DeviceSealer`).
    :param expires_at: when the service stops accepting it; None for never.
    """

    id: bytes
    service: str
    sealed: bytes = field(repr=False)
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class WakeupPolicy:
    """
    When an account is woken.

    :param min_interval: seconds between two wake-ups of an account.
    :param quiet_after_poll: seconds after a poll during which the account is not woken.
    :param lease: seconds for which a claimed wake-up belongs to the process that claimed it.
    :param without_devices: whether accounts without a device are woken too, because a webhook is configured.
    :param max_message_ids: ids of waiting messages in a :class:`WakeupClaim` at most; 0 for none.
    """

    min_interval: float
    quiet_after_poll: float
    lease: float = 30.0
    without_devices: bool = False
    max_message_ids: int = 0


class WakeupRequest(NamedTuple):
    """
    A wake-up that may be due.

    :param owner: DID of a DIDComm account, or of a Decentrl identity.
    :param age: seconds since the message arrived, or became visible, that asks for it.
    """

    owner: str
    age: float = 0.0


# What tells a claim from others of the same owner; each store has its own kind.
ClaimKey = bytes | float


@dataclass(frozen=True, slots=True)
class WakeupClaim:
    """
    A wake-up that this process has to send.

    :param devices: those of the owner that have not expired, in order of registration.
    :param messages: number of messages in the owner's queues, whether they are visible and pending or not.
    :param bytes: of their payloads.
    :param message_ids: of the newest that are visible and pending, the newest first, if wanted.
    :param claim: its key, for :class:`FinishedWakeup`; empty if the store knows of no claim.
    """

    owner: str
    devices: tuple[Device, ...]
    messages: int
    bytes: int
    message_ids: tuple[str, ...] = ()
    claim: ClaimKey = field(default=b"", compare=False)


class FinishedWakeup(NamedTuple):
    """
    The end of an attempt to send a claimed wake-up.

    :param claim: that of the :class:`WakeupClaim`.
    :param retry_in: None if it was sent, or nothing was left to send it to; else seconds until the next attempt,
        before which nobody else claims it.
    """

    owner: str
    claim: ClaimKey
    retry_in: float | None = None


@dataclass(frozen=True, slots=True)
class WakeupState:
    """
    Times of an owner; minus infinity for never. Those that cannot be yet are from before the clock was set back, and
    count as never.
    """

    polled_at: float = -inf
    woken_at: float = -inf
    claimed_until: float = -inf

    def decide(self, arrival: float, now: float, policy: WakeupPolicy) -> float | None:
        """Seconds until the owner is to be woken for a message; None if it is not."""
        polled_at, woken_at, claimed_until = self._past(now)
        if polled_at >= arrival:
            return None
        if claimed_until > now:
            return claimed_until - now
        if polled_at > woken_at:
            due = max(polled_at + policy.quiet_after_poll, woken_at + policy.min_interval)
            return max(0.0, due - now)
        return None if arrival < woken_at + policy.min_interval else 0.0

    def is_owed(self, arrival: float, now: float, policy: WakeupPolicy, repeat_after: float) -> bool:
        """Whether no wake-up stands for a message that arrived at this time."""
        polled_at, woken_at, _ = self._past(now)
        if arrival <= polled_at:
            return False
        if polled_at > woken_at or arrival >= woken_at + policy.min_interval:
            return True
        return 0 < repeat_after <= now - woken_at

    def _past(self, now: float) -> tuple[float, float, float]:
        """The times that the clock allows."""
        polled_at = self.polled_at if self.polled_at <= now + _CLOCK_TOLERANCE else -inf
        latest_claim = now + MAX_CLAIM_SECONDS + _CLOCK_TOLERANCE
        woken_at = self.woken_at if self.woken_at <= now + _CLOCK_TOLERANCE else -inf
        return polled_at, woken_at, self.claimed_until if self.claimed_until <= latest_claim else -inf


# A claim; or seconds after which to ask again; or None if no wake-up is due.
WakeupDecision = WakeupClaim | float | None


class IDeviceStore(Interface):
    """
    Devices and wake-ups of DIDComm accounts and Decentrl identities.

    An owner is named by the DID of an account, or by a did:decentrl. Devices go with their owner: they follow
    :meth:`~mediatord.store.interfaces.store.IAccountStore.move_account`, and are removed with the account, or with
    the last registration of a Decentrl identity. Times are compared by one clock: that of the store's server, where
    there is one.
    """

    def set_device(owner: str, device: Device, max_devices: int) -> Deferred[None]:
        """
        Add a device, replace that of the same id, which keeps its place in the order of registration, or move it here
        from another owner. Expired devices of the owner do not count, and may be removed.

        :raise MediationNotGranted: there is no such account; of a Decentrl identity, it is not registered.
        :raise TooManyDevices: it would be one more than `max_devices`; nothing was changed.
        """

    def list_devices(owner: str, service: str | None = None) -> Deferred[list[Device]]:
        """Devices of an owner, of one service or of all, in order of registration; without expired ones."""

    def remove_devices(owner: str, service: str) -> Deferred[int]:
        """Remove all devices of an owner with one service; fires with their number."""

    def forget_devices(ids: Sequence[bytes]) -> Deferred[int]:
        """Remove devices by id, because their service no longer knows them; fires with their number."""

    def expire_devices(limit: int) -> Deferred[int]:
        """Remove at most `limit` devices that have expired; fires with their number."""

    def count_devices() -> Deferred[dict[str, int]]:
        """Number of devices by service; services without any are left out, expired devices perhaps not."""

    def scan_devices(after: bytes, limit: int) -> Deferred[list[Device]]:
        """
        Devices of all owners in the order of their ids, expired ones perhaps as well.

        :param after: id of the last one before; empty for the beginning.
        """

    def reseal_devices(changes: Sequence[tuple[Device, bytes]]) -> Deferred[None]:
        """Replace what is sealed of devices, except of those that were registered again meanwhile, or removed."""

    def record_polls(ages: Mapping[str, float]) -> Deferred[None]:
        """
        Record that owners were in contact about their messages. Those without a device for which no wake-up was ever
        claimed, and no poll recorded, are left out, as are unknown ones. Of several polls the latest counts.

        :param ages: seconds since the contact, by owner.
        """

    def claim_wakeups(requests: Sequence[WakeupRequest], policy: WakeupPolicy) -> Deferred[list[WakeupDecision]]:
        """
        Decide for each owner whether it is to be woken now, and claim the wake-up, atomically, so that one process
        sends it. With *arrival* the time of the message, *woken* and *polled* the last wake-up and the last poll:

        * No device, unless `policy.without_devices`; or no message of the owner that is visible and pending: None.
          Among many messages that are neither, a store may give up looking, and take one to be there.
        * *polled* is not before *arrival*: None, as the owner knows of the message.
        * Claimed, and the lease has not ended: seconds until its end.
        * *polled* is after *woken*, or the owner was never woken: claimed, but not before *polled* plus
          `quiet_after_poll`, nor before *woken* plus `min_interval`: else seconds until then.
        * Otherwise the last wake-up has not been answered: None if *arrival* is less than `min_interval` after
          *woken*, as that wake-up stands for the message too; else claimed.

        An owner may occur several times: once one of its requests is a claim, the others find that.

        :return: decisions, in the order of the requests.
        """

    def finish_wakeups(finished: Sequence[FinishedWakeup]) -> Deferred[None]:
        """
        End claims. Of a wake-up that was sent, *woken* becomes the time of its claim; one that is to be repeated
        stays claimed until then. Nothing happens where that claim does not exist any more; one whose lease has ended
        does until it is finished, or somebody claims the wake-up again.
        """

    def find_owed_wakeups(
        after: str, limit: int, policy: WakeupPolicy, *, repeat_after: float = 0.0
    ) -> Deferred[tuple[list[str], str | None]]:
        """
        A slice of the owners with visible pending messages for which a wake-up was never sent, as after a crash. The
        newest of those messages arrived, or became visible, after *polled*; and where *polled* is not after *woken*,
        at least `min_interval` after *woken*. Owners without a device are left out, unless `policy.without_devices`;
        claimed ones are included. Changes nothing, and reads a bounded number of rows.

        :param after: where to go on; empty for the beginning.
        :param limit: owners that are examined.
        :param repeat_after: seconds after an unanswered wake-up, after which the owner is included as well while the
            newest message arrived after *polled*; 0 for never.
        :return: owners, and where to go on, None at the end.
        """

"""Registration of the devices that push services can wake."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mediatord.errors import MediatorError, UnsupportedMessageType
from mediatord.push.device_json import parse_device
from mediatord.push.devices import SERVICE_NAMES, DeviceSealer, PushDevice, ServiceName
from mediatord.ratelimit.registration import RegistrationQuota
from mediatord.store.interfaces.devices import IDeviceStore

# Devices that are sealed again in one step, which takes the reactor about a millisecond.
RESEAL_SLICE = 100


class DeviceRegistry:
    """
    Devices of DIDComm accounts and Decentrl identities, sealed in the store.

    Those of a service that is not configured any more are kept, and count; wallets cannot see them, and DIDComm
    cannot remove them, as long as it is not configured again.

    :param quota: charges addresses for the bytes of new devices.
    :param services: those that are configured; devices of others are not accepted.
    :param max_devices: of one owner.
    :param mediator_id: what wake-ups contain, so that a wallet knows which of its mediators has something.
    :param vapid_public_key: key of this mediator that browsers bind subscriptions to: 65 bytes, base64url without
        padding; None without Web Push.
    :param allow_http: whether subscriptions of Web Push may be reached without TLS.
    :ivar services: in the order of :data:`~mediatord.push.devices.SERVICE_NAMES`.
    """

    def __init__(
        self,
        store: IDeviceStore,
        sealer: DeviceSealer,
        quota: RegistrationQuota,
        services: Collection[ServiceName],
        max_devices: int,
        mediator_id: str,
        *,
        vapid_public_key: str | None = None,
        allow_http: bool = False,
    ) -> None:
        if "web_push" in services and vapid_public_key is None:
            raise ValueError("Web Push requires a VAPID key")
        self.services = tuple(name for name in SERVICE_NAMES if name in services)
        self.mediator_id = mediator_id
        self.vapid_public_key = vapid_public_key
        self._store = store
        self._sealer = sealer
        self._quota = quota
        self._max_devices = max_devices
        self._allow_http = allow_http
        self._resealing_with = b""
        self._resealed_until: bytes | None = b""

    def parse_device(self, service: ServiceName, members: Mapping[str, Any]) -> PushDevice | None:
        """
        Read a registration, as :func:`~mediatord.push.device_json.parse_device`.

        :raise MissingDeviceValue: some values are null, and others are not.
        :raise InvalidBody: a value is malformed.
        """
        return parse_device(service, members, allow_http=self._allow_http)

    async def set_device(self, owner: str, device: PushDevice, peer: str) -> None:
        """
        Register a device, replace its registration, or move it here from another owner.

        :param peer: address to charge for it, unless the owner has it already.
        :raise MediationNotGranted: there is no such account or registered identity.
        :raise TooManyDevices: it is one too many.
        :raise RegistrationLimitExceeded: the address has registered too much; likewise RegistrationCapacityExceeded.
        :raise UnsupportedMessageType: its service is not configured.
        """
        sealed = self._sealer.seal(device)
        if sealed.service not in self.services:
            raise UnsupportedMessageType
        others = await self._store.list_devices(owner, sealed.service)
        size = 0 if any(one.id == sealed.id for one in others) else len(sealed.sealed)
        await self._quota.charge(peer, size)
        try:
            await self._store.set_device(owner, sealed, self._max_devices)
        except MediatorError:
            self._quota.refund(peer, size)
            raise

    async def get_devices(self, owner: str, service: ServiceName | None = None) -> list[PushDevice]:
        """
        Devices of one service or of all configured ones, in order of registration; without expired ones, and those
        that no key opens any more.
        """
        stored = await self._store.list_devices(owner, service)
        opened = [self._sealer.open(one) for one in stored if one.service in self.services]
        return [one for one in opened if one is not None]

    async def remove_devices(self, owner: str, service: ServiceName) -> int:
        """Remove all devices of one service; their number."""
        return await self._store.remove_devices(owner, service)

    async def reseal_devices(self) -> bool:
        """
        Seal a slice of all devices with the current key, where a former one opens them, so that former ones can be
        retired. Goes through all once for each key that becomes the current one, and once for that of the start.

        :return: whether there may be more.
        """
        current = self._sealer.get_current_secret()
        if current != self._resealing_with:
            self._resealing_with, self._resealed_until = current, b""
        if self._resealed_until is None:
            return False
        devices = await self._store.scan_devices(self._resealed_until, RESEAL_SLICE)
        resealed = [(one, self._sealer.reseal(one)) for one in devices]
        changes = [(one, sealed) for one, sealed in resealed if sealed is not None]
        if changes:
            await self._store.reseal_devices(changes)
        self._resealed_until = devices[-1].id if devices else None
        return bool(devices)

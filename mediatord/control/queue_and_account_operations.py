"""
Operations of the control socket, by name, with arguments and results that JSON can represent.

The command line calls the same operations directly on a store that no daemon uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from mediatord.observability.event_recorder import EventRecorder
from mediatord.push.manual_wakeup import ManualWakeup
from mediatord.store.interfaces.administration import MAX_PURGE_BATCH, MAX_ROWS, QUEUE_PROTOCOLS, QueueProtocol
from mediatord.store.interfaces.messages import RemovedMessage, is_valid_unicode
from mediatord.store.interfaces.store import IStore

# Largest page number that is accepted, in rows.
_MAX_OFFSET = 100_000_000
# Arguments of each operation. Most are those of the method of IStoreAdministration that has the same name.
_OPERATIONS: dict[str, tuple[str, ...]] = {
    "list_queues": ("protocols", "offset", "limit"),
    "sum_queues": ("protocols",),
    "list_dids": ("after", "limit"),
    "find_did": ("did",),
    "list_entries": ("did", "protocol", "after", "limit"),
    "has_live_session": ("did",),
    "purge": ("did", "protocol", "ids"),
    "list_accounts": ("offset", "limit"),
    "count_accounts": (),
    "find_account": ("did",),
    "list_recipients": ("account", "offset", "limit"),
    "count_devices": ("account",),
    "list_queued_dids": ("account",),
    "unregister_recipients": ("account",),
    "remove_account": ("account",),
    "wake_account": ("account",),
}


class ControlError(Exception):
    """An operation is not carried out; the text is one line for the operator."""


class ControlOperations:
    """
    :param open_recorder: logs removals; None while the event log takes no lines, when nothing is removed.
    :param has_subscriber: whether a socket of this daemon is subscribed to a DID.
    :param wake_account: wakes the devices of an account now; None without push notifications.
    """

    def __init__(
        self,
        store: IStore,
        open_recorder: Callable[[], EventRecorder | None],
        has_subscriber: Callable[[str], Awaitable[bool]] | None = None,
        wake_account: Callable[[str], Awaitable[list[ManualWakeup]]] | None = None,
    ) -> None:
        self._store = store
        self._has_subscriber = has_subscriber
        self._wake_account_now = wake_account
        self._open_recorder = open_recorder
        self._recorder: EventRecorder | None = None
        self._own_methods: dict[str, Callable[..., Any]] = {
            "purge": self._purge,
            "list_recipients": self._list_recipients,
            "count_devices": self._count_devices,
            "has_live_session": self._has_live_session,
            "wake_account": self._wake_account,
        }
        store.administration.on_late_purge = self._record_purge

    async def run(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """
        Run one operation.

        :raise ControlError: it does not exist, its arguments are not valid, or removals cannot be logged.
        :raise StoreUnavailable: the store does not answer.
        """
        if name not in _OPERATIONS:
            raise ControlError(f"unknown operation {name!r}")
        values = [_read_argument(arguments, one) for one in _OPERATIONS[name]]
        method = self._own_methods.get(name) or getattr(self._store.administration, name)
        return _to_json_value(await method(*values))

    async def _purge(self, did: str, protocol: QueueProtocol, ids: Sequence[str]) -> list[str]:
        recorder = self._open_recorder()
        if recorder is None:
            raise ControlError("nothing was removed: the event log cannot be written")
        self._recorder = recorder
        if not ids:
            return []
        removed = await self._store.administration.purge(did, protocol, ids)
        self._record_purge(protocol, removed)
        return [one.id for one in removed]

    def _record_purge(self, protocol: QueueProtocol, removed: Sequence[RemovedMessage]) -> None:
        assert self._recorder is not None
        for one in removed:
            self._recorder.record_purge(one, protocol)
        self._recorder.flush_events()

    async def _list_recipients(self, account: str, offset: int, limit: int) -> list[str]:
        names, _ = await self._store.list_recipients(account, offset=offset, limit=limit)
        return names

    async def _count_devices(self, account: str) -> dict[str, int]:
        """Devices of an account by service."""
        return dict(Counter([device.service for device in await self._store.devices.list_devices(account)]))

    async def _has_live_session(self, did: str) -> bool:
        """Whether messages for a DID are pushed to a WebSocket, here or at another worker or node."""
        if self._has_subscriber is not None and await self._has_subscriber(did):
            return True
        records = await self._store.cluster.find_presence([did])
        return any(one.node is not None for one in records)

    async def _wake_account(self, account: str) -> list[ManualWakeup]:
        if self._wake_account_now is None:
            raise ControlError("push notifications are not configured: no service under push is")
        return await self._wake_account_now(account)


def _to_json_value(result: Any) -> Any:
    if isinstance(result, list):
        return [_to_json_value(one) for one in result]
    return asdict(result) if is_dataclass(result) and not isinstance(result, type) else result


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and is_valid_unicode(value)


def _is_batch(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_PURGE_BATCH and all(isinstance(one, str) for one in value)


def _is_number_up_to(largest: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 <= value <= largest


# Of each argument: whether a value is valid, and what is expected.
_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("did", "account", "after"), (_is_text, "a string")),
    "offset": (_is_number_up_to(_MAX_OFFSET), f"a number up to {_MAX_OFFSET}"),
    "limit": (_is_number_up_to(MAX_ROWS), f"a number up to {MAX_ROWS}"),
    "protocol": (QUEUE_PROTOCOLS.__contains__, f"one of {', '.join(QUEUE_PROTOCOLS)}"),
    "ids": (_is_batch, f"a list of at most {MAX_PURGE_BATCH} strings"),
}


def _read_argument(arguments: Mapping[str, Any], name: str) -> Any:
    """:param name: `protocols` for the one that is given as `protocol`, or all."""
    if name == "protocols":
        return QUEUE_PROTOCOLS if arguments.get("protocol") is None else (_read_argument(arguments, "protocol"),)
    is_valid, expected = _ARGUMENTS[name]
    if not is_valid(arguments.get(name)):
        raise ControlError(f"{name}: expected {expected}")
    return arguments[name]

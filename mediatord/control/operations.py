"""
Operations of the control socket, by name, with arguments and results that JSON can represent.

The command line calls the same operations directly on a store that no daemon uses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, cast, get_args

from mediatord.store.interfaces.administration import (
    MAX_PURGE_BATCH,
    MAX_ROWS,
    QUEUE_PROTOCOLS,
    IStoreAdministration,
    QueueProtocol,
)
from mediatord.store.interfaces.messages import RemovedMessage
from mediatord.store.interfaces.store import IStore

# Largest page number that is accepted, in rows.
_MAX_OFFSET = 100_000_000


class ControlError(Exception):
    """An operation is not carried out; the text is one line for the operator."""


class PurgeRecorder(Protocol):
    """Logs removals."""

    def record_purge(self, removed: RemovedMessage, half: QueueProtocol, /) -> None:
        """Log one."""

    def flush_events(self) -> None:
        """Write what was logged."""


class ControlOperations:
    """
    :param recorder: logs removals.
    :param is_log_writable: whether the event log takes lines; nothing is removed while it does not.
    """

    def __init__(self, store: IStore, recorder: PurgeRecorder, is_log_writable: Callable[[], bool]) -> None:
        self._store = store
        self._administration: IStoreAdministration = store.administration
        self._recorder = recorder
        self._is_log_writable = is_log_writable
        self._administration.on_late_purge = self._record_purge
        self._operations: dict[str, Callable[[Mapping[str, Any]], Awaitable[Any]]] = {
            "list_queues": self._list_queues,
            "sum_queues": self._sum_queues,
            "list_dids": self._list_dids,
            "find_did": self._find_did,
            "list_entries": self._list_entries,
            "purge": self._purge,
            "list_accounts": self._list_accounts,
            "count_accounts": self._count_accounts,
            "find_account": self._find_account,
            "list_recipients": self._list_recipients,
            "list_queued_dids": self._list_queued_dids,
            "unregister_recipients": self._unregister_recipients,
            "remove_account": self._remove_account,
        }

    async def run(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """
        Run one operation.

        :raise ControlError: it does not exist, its arguments are not valid, or removals cannot be logged.
        :raise StoreUnavailable: the store does not answer.
        """
        operation = self._operations.get(name)
        if operation is None:
            raise ControlError(f"unknown operation {name!r}")
        return await operation(arguments)

    async def _list_queues(self, arguments: Mapping[str, Any]) -> Any:
        offset, limit = _get_number(arguments, "offset", _MAX_OFFSET), _get_number(arguments, "limit", MAX_ROWS)
        found = await self._administration.list_queues(_get_protocols(arguments), offset, limit)
        return [asdict(one) for one in found]

    async def _sum_queues(self, arguments: Mapping[str, Any]) -> Any:
        return asdict(await self._administration.sum_queues(_get_protocols(arguments)))

    async def _list_dids(self, arguments: Mapping[str, Any]) -> Any:
        limit = _get_number(arguments, "limit", MAX_ROWS)
        return asdict(await self._administration.list_dids(_get_text(arguments, "after"), limit))

    async def _find_did(self, arguments: Mapping[str, Any]) -> Any:
        return await self._administration.find_did(_get_text(arguments, "did"))

    async def _list_entries(self, arguments: Mapping[str, Any]) -> Any:
        did, after = _get_text(arguments, "did"), _get_text(arguments, "after")
        limit = _get_number(arguments, "limit", MAX_ROWS)
        return asdict(await self._administration.list_entries(did, _get_protocol(arguments), after, limit))

    async def _purge(self, arguments: Mapping[str, Any]) -> Any:
        did, protocol, ids = _get_text(arguments, "did"), _get_protocol(arguments), arguments.get("ids")
        if not isinstance(ids, list) or len(ids) > MAX_PURGE_BATCH or not all(isinstance(one, str) for one in ids):
            raise ControlError(f"ids: expected a list of at most {MAX_PURGE_BATCH} strings")
        if not self._is_log_writable():
            raise ControlError("the event log cannot be written, so nothing is removed")
        if not ids:
            return []
        removed = await self._administration.purge(did, protocol, ids)
        self._record_purge(protocol, removed)
        return [one.id for one in removed]

    def _record_purge(self, protocol: QueueProtocol, removed: Sequence[RemovedMessage]) -> None:
        for one in removed:
            self._recorder.record_purge(one, protocol)
        self._recorder.flush_events()

    async def _list_accounts(self, arguments: Mapping[str, Any]) -> Any:
        offset, limit = _get_number(arguments, "offset", _MAX_OFFSET), _get_number(arguments, "limit", MAX_ROWS)
        return [asdict(one) for one in await self._administration.list_accounts(offset, limit)]

    async def _count_accounts(self, arguments: Mapping[str, Any]) -> Any:
        return await self._administration.count_accounts()

    async def _find_account(self, arguments: Mapping[str, Any]) -> Any:
        found = await self._administration.find_account(_get_text(arguments, "did"))
        return None if found is None else asdict(found)

    async def _list_recipients(self, arguments: Mapping[str, Any]) -> Any:
        offset, limit = _get_number(arguments, "offset", _MAX_OFFSET), _get_number(arguments, "limit", MAX_ROWS)
        names, _ = await self._store.list_recipients(_get_text(arguments, "account"), offset=offset, limit=limit)
        return names

    async def _list_queued_dids(self, arguments: Mapping[str, Any]) -> Any:
        return await self._administration.list_queued_dids(_get_text(arguments, "account"))

    async def _unregister_recipients(self, arguments: Mapping[str, Any]) -> Any:
        await self._administration.unregister_recipients(_get_text(arguments, "account"))

    async def _remove_account(self, arguments: Mapping[str, Any]) -> Any:
        return await self._administration.remove_account(_get_text(arguments, "account"))


def _get_text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError:
        pass
    raise ControlError(f"{name}: expected a string")


def _get_number(arguments: Mapping[str, Any], name: str, largest: int) -> int:
    value = arguments.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise ControlError(f"{name}: expected a number up to {largest}")
    return value


def _get_protocol(arguments: Mapping[str, Any]) -> QueueProtocol:
    value = _get_text(arguments, "half")
    if value not in get_args(QueueProtocol):
        raise ControlError(f"half: expected one of {', '.join(QUEUE_PROTOCOLS)}")
    return cast(QueueProtocol, value)


def _get_protocols(arguments: Mapping[str, Any]) -> tuple[QueueProtocol, ...]:
    return QUEUE_PROTOCOLS if arguments.get("half") is None else (_get_protocol(arguments),)

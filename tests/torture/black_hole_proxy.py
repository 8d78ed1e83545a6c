"""Ways to the daemon that go dead: nothing comes through, and nobody is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mediatord.bench.raw_clients import TEXT_OPCODE, parse_frame
from mediatord.wallet.didcomm_client import DeliveredMessage, DIDCommWallet, read_delivery
from mediatord.wallet.didcomm_messages import UnreadableMessage
from tests.partition_proxy import PartitionProxy


class BlackHoleProxy(PartitionProxy):
    """:ivar swallowed: what the daemon has written to connections that were dead, a connection each."""

    def __init__(self, reactor: Any) -> None:
        super().__init__(reactor)
        self.swallowed: list[bytes] = []

    def entrance(self, port: int) -> int:
        """Where the way to this port begins."""
        return self._ways[port].entrance

    @contextlib.contextmanager
    def dead(self, port: int, *, one_way: bool) -> Iterator[None]:
        """
        Inside, connections through here are half open; afterwards they are gone.

        :param one_way: only what goes to the daemon is swallowed.
        """
        halves = list(self._ways[port].halves)
        for half in halves:
            if one_way:
                half.silent = True
            else:
                half.hush()
        self.swallowed = []
        try:
            yield
        finally:
            for half in halves:
                self.swallowed.append(b"".join(getattr(half.peer, "_held", ())))
                half.sever()


def parse_pushes(data: bytes, wallets: list[DIDCommWallet]) -> list[tuple[DIDCommWallet, DeliveredMessage]]:
    """What was pushed in these frames, as far as they begin and end in them, by whom it was for."""
    found = []
    while (parsed := _parsed(data)) is not None:
        opcode, payload, size = parsed
        data = data[size:]
        if opcode == TEXT_OPCODE:
            found += [one for wallet in wallets for one in _deliveries(wallet, payload)]
    return found


def _parsed(data: bytes) -> tuple[int, bytes, int] | None:
    try:
        return parse_frame(data)
    except ValueError:
        return None


def _deliveries(wallet: DIDCommWallet, payload: bytes) -> list[tuple[DIDCommWallet, DeliveredMessage]]:
    try:
        opened = wallet.open(payload)
        return [(wallet, one) for one in read_delivery(opened.message)]
    except (UnreadableMessage, ValueError):
        return []

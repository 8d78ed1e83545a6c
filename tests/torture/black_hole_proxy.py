"""Proxy whose connections can become half open: data is dropped and neither side is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mediatord.bench.raw_clients import TEXT_OPCODE, parse_frame
from mediatord.wallet.didcomm_client import DeliveredMessage, DIDCommWallet, read_delivery
from mediatord.wallet.didcomm_messages import UnreadableMessage
from tests.partition_proxy import PartitionProxy


class BlackHoleProxy(PartitionProxy):
    """:ivar swallowed: data that the daemon wrote to dead connections, one item each."""

    def __init__(self, reactor: Any) -> None:
        super().__init__(reactor)
        self.swallowed: list[bytes] = []

    def proxy_port(self, port: int) -> int:
        """Where the way to this port begins."""
        return self._routes[port].proxy_port

    @contextlib.contextmanager
    def black_hole(self, port: int, *, one_way: bool) -> Iterator[None]:
        """
        Connections are half open within this context, and closed afterwards.

        :param one_way: drop only what is sent to the daemon.
        """
        halves = list(self._routes[port].halves)
        for half in halves:
            if one_way:
                half.silent = True
            else:
                half.silence()
        self.swallowed = []
        try:
            yield
        finally:
            for half in halves:
                self.swallowed.append(b"".join(getattr(half.peer, "_held_back", ())))
                half.abort()


def parse_pushes(data: bytes, wallets: list[DIDCommWallet]) -> list[tuple[DIDCommWallet, DeliveredMessage]]:
    """Complete pushes among these frames, with their wallets."""
    pushes = []
    while (parsed := _parse_frame(data)) is not None:
        opcode, payload, size = parsed
        data = data[size:]
        if opcode == TEXT_OPCODE:
            pushes += [delivered for wallet in wallets for delivered in _deliveries(wallet, payload)]
    return pushes


def _parse_frame(data: bytes) -> tuple[int, bytes, int] | None:
    try:
        return parse_frame(data)
    except ValueError:
        return None


def _deliveries(wallet: DIDCommWallet, payload: bytes) -> list[tuple[DIDCommWallet, DeliveredMessage]]:
    try:
        message = wallet.open(payload)
        return [(wallet, delivered) for delivered in read_delivery(message.message)]
    except (UnreadableMessage, ValueError):
        return []

"""Ways to the daemon that go dead: nothing comes through, and nobody is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mediatord.bench.rawsocket import TEXT, parse
from mediatord.wallet.client import Wallet
from mediatord.wallet.mediation import Delivered, read_delivery
from mediatord.wallet.packing import Unreadable
from tests.network import Network


class Relay(Network):
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


def pushes_in(data: bytes, wallets: list[Wallet]) -> list[tuple[Wallet, Delivered]]:
    """What was pushed in these frames, as far as they begin and end in them, by whom it was for."""
    found = []
    while (parsed := _parsed(data)) is not None:
        opcode, payload, size = parsed
        data = data[size:]
        if opcode == TEXT:
            found += [one for wallet in wallets for one in _deliveries(wallet, payload)]
    return found


def _parsed(data: bytes) -> tuple[int, bytes, int] | None:
    try:
        return parse(data)
    except ValueError:
        return None


def _deliveries(wallet: Wallet, payload: bytes) -> list[tuple[Wallet, Delivered]]:
    try:
        opened = wallet.open(payload)
        return [(wallet, one) for one in read_delivery(opened.message)]
    except (Unreadable, ValueError):
        return []

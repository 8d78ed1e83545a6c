"""Who may have a connection with the node-to-node listener: nodes, and a number of strangers beside them."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Protocol

# Connections that have shown to be nodes'. What is more counts as strangers.
MAX_NODES = 256
# Connections that have not, or not yet, and those of one address.
MAX_STRANGERS = 128
MAX_OF_ONE = 64

_SITE_BITS = 64


class Guest(Protocol):
    """One connection."""

    @property
    def silent(self) -> bool:
        """Whether no whole request of it is waiting for an answer."""

    def end(self) -> None:
        """Cut it off."""

    def __hash__(self) -> int: ...


class Places:
    """
    Keeps a place for whoever comes: where strangers have taken theirs, the oldest that says nothing gives up its own.

    So nobody who only holds connections open keeps a node out, which says at once what it has to say.
    """

    def __init__(self) -> None:
        self._nodes: set[Guest] = set()
        self._strangers: dict[Guest, str] = {}

    def __len__(self) -> int:
        return len(self._nodes) + len(self._strangers)

    def __iter__(self) -> Iterator[Guest]:
        return iter((*self._nodes, *self._strangers))

    def make_room(self, origin: str) -> bool:
        """Whether there is a place for one more stranger from there, if need be at the cost of another."""
        of_this = [guest for guest, other in self._strangers.items() if origin and other == origin]
        if len(of_this) >= MAX_OF_ONE:
            return self._end_one(of_this)
        return len(self._strangers) < MAX_STRANGERS or self._end_one(list(self._strangers))

    def enter(self, guest: Guest, origin: str) -> None:
        """A stranger is here."""
        self._strangers[guest] = origin

    def known(self, guest: Guest) -> None:
        """It has shown to be a node."""
        if guest in self._strangers and len(self._nodes) < MAX_NODES:
            del self._strangers[guest]
            self._nodes.add(guest)

    def leave(self, guest: Guest) -> None:
        """It is gone."""
        self._nodes.discard(guest)
        self._strangers.pop(guest, None)

    def _end_one(self, oldest_first: list[Guest]) -> bool:
        guest = next((one for one in oldest_first if one.silent), None)
        if guest is None:
            return False
        self.leave(guest)
        guest.end()
        return True


def origin_of(host: str) -> str:
    """What counts as one address: with IPv6 it is what one customer has. The empty one is nobody's."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((int(address), _SITE_BITS), strict=False))

"""
Looks up the names of endpoints that clients register, so that slow ones delay no other lookup.

A lookup of the platform cannot be cancelled, and takes half a minute if a server of the name does not answer. In the
reactor's threads, ten of them would stop every connection to a name, and the end of the process too.
"""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address
from socket import SOCK_STREAM, getaddrinfo
from threading import Thread

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorFromThreads

from mediatord.net.outbound_http import OutboundRequestError

Addresses = list[IPv4Address | IPv6Address]

# Lookups at the same time. Each has a thread at once, so that no name waits for another.
MAX_LOOKUPS = 16


class NameLookups:
    """
    A bounded number of lookups, each in a thread that does not keep the process from ending.

    :param reactor: receives the results.
    """

    def __init__(self, reactor: IReactorFromThreads) -> None:
        self._reactor = reactor
        # By name, those who wait for its addresses; a lookup is in progress until it ends, even if nobody waits.
        self._waiting: dict[str, set[Deferred[Addresses]]] = {}

    def resolve(self, name: str) -> Deferred[Addresses]:
        """
        All addresses of a name, none if it is unknown. Those who ask for the same name share a lookup; an address
        needs none.

        :raise OutboundRequestError: too many names are being looked up.
        """
        with suppress(ValueError):
            ip_address(name)
            return succeed([_make_address(name)])
        if name not in self._waiting:
            if len(self._waiting) >= MAX_LOOKUPS:
                raise OutboundRequestError("ResolverBusy")
            Thread(target=self._look_up, args=(name,), name="name lookup", daemon=True).start()
            self._waiting[name] = set()
        waiting = self._waiting[name]
        done: Deferred[Addresses] = Deferred(waiting.discard)
        waiting.add(done)
        return done

    def _look_up(self, name: str) -> None:
        """Runs in the thread."""
        found: Addresses = []
        try:
            # A name that cannot be encoded is as unknown as others.
            with suppress(OSError, UnicodeError):
                found = [_make_address(str(entry[4][0])) for entry in getaddrinfo(name, None, type=SOCK_STREAM)]
        finally:
            self._reactor.callFromThread(self._finish, name, found)

    def _finish(self, name: str, found: Addresses) -> None:
        for done in self._waiting.pop(name):
            done.callback(found)


def _make_address(host: str) -> IPv4Address | IPv6Address:
    return (IPv6Address if ":" in host else IPv4Address)("TCP", host, 0)

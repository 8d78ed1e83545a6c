"""Lookups in threads of their own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from socket import AF_INET, AF_INET6, SOCK_STREAM, gaierror
from threading import Event
from typing import Any

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  threads hand results to it
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import CancelledError, gatherResults
from twisted.trial.unittest import TestCase

from mediatord.net import name_lookups
from mediatord.net.name_lookups import MAX_LOOKUPS, NameLookups
from mediatord.net.outbound_http import LOCAL_LIMIT_REASONS, OutboundRequestError
from tests.integration.message_load import PATIENCE_SECONDS
from tests.net.outbound_test_case import OTHER_PUBLIC, PUBLIC

reactor: Any = _reactor
ANSWER = [
    (AF_INET6, SOCK_STREAM, 6, "", (OTHER_PUBLIC, 0, 0, 0)),
    (AF_INET, SOCK_STREAM, 6, "", (PUBLIC, 0)),
]
ADDRESSES = [IPv6Address("TCP", OTHER_PUBLIC, 0), IPv4Address("TCP", PUBLIC, 0)]
# A process in which a lookup is still in progress when its reactor has stopped.
STOPPED_DURING_LOOKUP = """
import threading
from twisted.internet import reactor
from mediatord.net import name_lookups

began = threading.Event()

def look_up(*_, **__):
    began.set()
    threading.Event().wait()

name_lookups.getaddrinfo = look_up
waiting = name_lookups.NameLookups(reactor).resolve("slow.example")
began.wait()
reactor.callWhenRunning(reactor.stop)
reactor.run()
print("stopped", waiting.called)
"""


class NameLookupTests(TestCase):
    """With a platform that answers when told to."""

    timeout = 60

    def setUp(self) -> None:
        self.answered = Event()
        self.addCleanup(self.answered.set)
        self.asked: list[str] = []
        self.result: Callable[[], list[Any]] = lambda: ANSWER
        self.patch(name_lookups, "getaddrinfo", self.look_up)
        self.lookups = NameLookups(reactor)

    def look_up(self, name: str, port: int | None, *, type: int) -> list[Any]:
        """As :func:`socket.getaddrinfo`."""
        self.asked.append(name)
        self.answered.wait()
        return self.result()

    async def test_addresses(self) -> None:
        """All of both families, in the order of the platform."""
        self.answered.set()
        self.assertEqual(await self.lookups.resolve("push.example"), ADDRESSES)

    async def test_unknown_names(self) -> None:
        """Have no addresses; nor has a name that cannot be encoded."""
        failures: list[Any] = []
        self.patch(threading, "excepthook", failures.append)
        self.answered.set()
        for error in (gaierror(-2, "Name or service not known"), UnicodeError("label too long")):
            self.result = lambda error=error: (_ for _ in ()).throw(error)  # type: ignore[misc]
            before = set(threading.enumerate())
            self.assertEqual(await self.lookups.resolve("nobody.example"), [])
            for thread in set(threading.enumerate()) - before:
                thread.join()
        self.assertEqual(failures, [])

    async def test_same_name(self) -> None:
        """Is looked up once for all who ask meanwhile, and again for those who ask later."""
        waiting = [self.lookups.resolve("push.example") for _ in range(3 * MAX_LOOKUPS)]
        self.answered.set()
        self.assertEqual(await gatherResults(waiting), [ADDRESSES] * len(waiting))
        self.assertEqual(self.asked, ["push.example"])
        await self.lookups.resolve("push.example")
        self.assertEqual(len(self.asked), 2)

    async def test_number_of_lookups(self) -> None:
        """One more is refused at once, until a lookup has ended: no matter whether anybody waits for it."""
        before = set(threading.enumerate())
        waiting = [self.lookups.resolve(f"slow{number}.example") for number in range(MAX_LOOKUPS)]
        for one in waiting:
            one.cancel()
            self.failureResultOf(one, CancelledError)
        self.assertEqual(set().union(*self.lookups._waiting.values()), set())
        for _ in range(100):
            with self.assertRaises(OutboundRequestError) as caught:
                self.lookups.resolve("late.example")
            self.assertIn(caught.exception.reason, LOCAL_LIMIT_REASONS)
        self.assertEqual(len(set(threading.enumerate()) - before), MAX_LOOKUPS)
        last = self.lookups.resolve("slow0.example")
        self.answered.set()
        self.assertEqual(await last, ADDRESSES)
        self.assertEqual(await self.lookups.resolve("late.example"), ADDRESSES)

    def test_addresses_need_no_lookup(self) -> None:
        """Not even while all lookups are taken."""
        for number in range(MAX_LOOKUPS):
            self.lookups.resolve(f"slow{number}.example")
        self.assertEqual(self.successResultOf(self.lookups.resolve(PUBLIC)), [ADDRESSES[1]])
        self.assertEqual(self.successResultOf(self.lookups.resolve(OTHER_PUBLIC)), [ADDRESSES[0]])


@pytest.mark.system
class ProcessEndTests(TestCase):
    def test_lookup_does_not_keep_the_process(self) -> None:
        """It ends with its reactor, although the lookup never does."""
        ended = subprocess.run(
            [sys.executable, "-c", STOPPED_DURING_LOOKUP], capture_output=True, timeout=PATIENCE_SECONDS, check=True
        )
        self.assertEqual((ended.stdout, ended.stderr), (b"stopped False\n", b""))

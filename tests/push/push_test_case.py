"""Test case with a client for push services on loopback, and a clock that a test moves."""

from __future__ import annotations

from collections.abc import Coroutine
from ipaddress import ip_network
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, TypeVar

from twisted.internet import reactor as _reactor  # noqa: TID251  sockets and TLS are the subject
from twisted.internet.defer import Deferred
from twisted.internet.ssl import Certificate, trustRootFromCertificates
from twisted.trial.unittest import TestCase

from mediatord.net.outbound_http import ConnectionLimits, OutboundHTTPClient
from mediatord.push.service import REQUEST_TIMEOUT
from tests.certificate_authority import CertificateAuthority
from tests.push.scripted_server import LOOPBACK, Answer, ScriptedServer

T = TypeVar("T")
# Time-out of a request that is not answered; others have the usual one, as machines may be busy.
_SHORT_TIMEOUT = 0.3
_UNANSWERED = ("hang", "stall")


class MovableReactor:
    """The real reactor with a clock that stands still until a test moves it; timers run in real time."""

    def __init__(self) -> None:
        self._start = float(_reactor.seconds())
        self.offset = 0.0

    def seconds(self) -> float:
        """The time."""
        return self._start + self.offset

    def __getattr__(self, name: str) -> Any:
        return getattr(_reactor, name)


class PushTestCase(TestCase):
    """
    Base of the tests of push services.

    :ivar certificate: of the servers, which the client trusts.
    """

    timeout = 60

    def setUp(self) -> None:
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        authority = CertificateAuthority(self.directory)
        self.certificate = authority.issue("push", [LOOPBACK, "localhost"])
        trusted = trustRootFromCertificates([Certificate.loadPEM(authority.path.read_bytes())])
        self.reactor = MovableReactor()
        self.client = OutboundHTTPClient(
            self.reactor,
            allow_private=[ip_network("127.0.0.0/8")],
            trust_root=trusted,
            keep=ConnectionLimits(per_host=8, total=16),
        )
        self.addCleanup(self.client.close)

    def shorten_timeout(self, module: ModuleType, answer: Answer | None) -> None:
        """Let a service, in its module, wait for a moment only if the answer never comes."""
        is_answered = answer is None or answer.behaviour not in _UNANSWERED
        self.patch(module, "REQUEST_TIMEOUT", REQUEST_TIMEOUT if is_answered else _SHORT_TIMEOUT)

    def start(self, server: ScriptedServer) -> None:
        """Let a server listen until the end of the test."""
        server.start(_reactor)
        self.addCleanup(lambda: Deferred.fromCoroutine(server.stop()))


def begin(work: Coroutine[Deferred[Any], Any, T]) -> Deferred[T]:
    """Run a coroutine without waiting for it."""
    return Deferred.fromCoroutine(work)

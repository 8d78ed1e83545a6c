"""A daemon on one MongoDB server, which tests may take away or hold up."""

from __future__ import annotations

from contextlib import closing
from http.client import HTTPConnection
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.protocol.didcomm.message import ENCRYPTED_TYPE
from tests.integration.daemon import Daemon
from tests.integration.residents import ask_on
from tests.integration.traffic import enrolled, prepared
from tests.mongod import ReplicaSet, mongod_binary
from tests.web.premises import Answered

reactor: Any = _reactor

# Of the 3 s that an answer may take, and of what a machine with other things to do adds to it.
ANSWER_SECONDS = 5.0


def on_mongodb(uri: str) -> Daemon:
    """A single node, yet to be started."""
    return prepared({"storage": {"backend": "mongodb", "mongodb": {"uri": uri}}})


def ask(daemon: Daemon, method: str, path: str, body: bytes | None = None, kind: str = ENCRYPTED_TYPE) -> Answered:
    """
    One request.

    :param kind: what a body is, as a media type.
    :raise TimeoutError: there was no answer in time.
    """
    with closing(HTTPConnection("127.0.0.1", daemon.port, timeout=ANSWER_SECONDS)) as connection:
        return ask_on(connection, method, path, body, {} if body is None else {"Content-Type": kind})


class OneServerCase(TestCase):
    """
    :ivar bob: a wallet with an account.
    """

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        mongod_binary()
        self.servers = ReplicaSet()
        self.addCleanup(self.servers.close)
        await deferToThread(self.servers.open)
        self.daemon = on_mongodb(self.servers.uri("mediatord"))
        self.addCleanup(self.daemon.clean)
        await deferToThread(self.daemon.start)
        self.bob = await enrolled(self.daemon, reactor)

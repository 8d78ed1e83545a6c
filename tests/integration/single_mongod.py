"""Test case with a daemon on one MongoDB server, which tests may stop or delay."""

from __future__ import annotations

from contextlib import closing
from http.client import HTTPConnection
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from tests.http.in_memory_site import HTTPResponse
from tests.integration.daemon import Daemon
from tests.integration.message_load import enrol_wallet, prepare_daemon
from tests.integration.raw_decentrl_client import send_request_on
from tests.mongod_process import mongod_binary
from tests.replica_set import ReplicaSet

reactor: Any = _reactor

# The daemon answers within 3 s, whatever MongoDB does; a busy machine may need longer.
RESPONSE_SECONDS = 20.0


def make_mongo_daemon(uri: str) -> Daemon:
    """A single node, not running."""
    return prepare_daemon({"storage": {"backend": "mongodb", "mongodb": {"uri": uri}}})


def send_request(
    daemon: Daemon, method: str, path: str, body: bytes | None = None, kind: str = ENCRYPTED_MEDIA_TYPE
) -> HTTPResponse:
    """
    Send one request.

    :param kind: media type of the body.
    :raise TimeoutError: there was no response in time.
    """
    with closing(HTTPConnection("127.0.0.1", daemon.port, timeout=RESPONSE_SECONDS)) as connection:
        return send_request_on(connection, method, path, body, {} if body is None else {"Content-Type": kind})


class SingleMongodTestCase(TestCase):
    """
    A daemon on a server of its own.

    :ivar bob: a wallet with an account.
    """

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        mongod_binary()
        self.servers = ReplicaSet()
        self.addCleanup(self.servers.close)
        await deferToThread(self.servers.open)
        self.daemon = make_mongo_daemon(self.servers.uri("mediatord"))
        self.addCleanup(self.daemon.clean)
        await deferToThread(self.daemon.start)
        self.bob = await enrol_wallet(self.daemon, reactor)

"""Our HTTP/2 client against the server of Node, whose HTTP/2 is nghttp2."""

from __future__ import annotations

import shutil
import subprocess
from ipaddress import IPv4Network
from pathlib import Path
from tempfile import TemporaryDirectory

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.ssl import Certificate
from twisted.trial.unittest import SkipTest, TestCase

from mediatord.net.http2_client import HTTP2Client
from mediatord.net.http2_connection import HTTP2Response
from mediatord.net.outbound_http import OutboundHTTPClient
from tests.certificate_authority import CertificateAuthority
from tests.net.clocked_reactor import ClockedReactor
from tests.net.outbound_test_case import FakeResolver

NAME = "api.push.example"
SERVER = Path(__file__).with_name("http2_server.mjs")


class NodeServerTests(TestCase):
    """Requests to a process with another implementation of the protocol."""

    def setUp(self) -> None:
        node = shutil.which("node")
        if node is None:
            raise SkipTest("node is not installed")
        temporary = TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        directory = Path(temporary.name)
        authority = CertificateAuthority(directory)
        certificate = authority.issue(NAME, [NAME])
        self.process = subprocess.Popen([node, SERVER, certificate], stdout=subprocess.PIPE, text=True)
        self.addCleanup(self.process.wait)
        self.addCleanup(self.process.kill)
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.addCleanup(self.output.close)
        outbound = OutboundHTTPClient(
            ClockedReactor(reactor, FakeResolver({NAME: ["127.0.0.1"]})),
            allow_private=[IPv4Network("127.0.0.0/8")],
            trust_root=Certificate.loadPEM(authority.path.read_bytes()),
        )
        self.client = HTTP2Client(outbound, f"https://{NAME}:{int(self.output.readline())}")

    def end(self) -> list[str]:
        """End the server; return what it has written."""
        self.process.kill()
        return self.output.read().split()

    async def test_exactly_once(self) -> None:
        """
        Streams, windows and graceful ends of sessions: of 500 requests, 4 of which end their session, each is
        answered, and was processed once.
        """
        paths = [f"/{number}" + ("/last" if number % 120 == 100 else "") for number in range(500)]
        posted: list[Deferred[HTTP2Response]] = [
            Deferred.fromCoroutine(self.client.post(path, [("x-name", "value")], bytes(size), timeout=60.0))
            for size, path in enumerate(paths, 3500)
        ]
        responses = await gatherResults(posted)
        await self.client.close()
        self.assertEqual(sorted(self.end()), sorted(paths))
        self.assertEqual([int(response.body) for response in responses], list(range(3500, 4000)))
        self.assertEqual({response.status for response in responses}, {200})
        self.assertEqual(len({response.headers["x-connection"] for response in responses}), 5)

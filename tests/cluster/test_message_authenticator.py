"""How nodes know each other's requests and responses, and what they make of anything else."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.peer_protocol import (
    MAC_HEADER,
    MAX_TIMESTAMP_SKEW,
    MIN_SECRET_BYTES,
    NONCE_HEADER,
    RECEIVER_HEADER,
    SENDER_HEADER,
    TIME_HEADER,
    ClusterKeys,
    MessageAuthenticationError,
    MessageAuthenticator,
    ReplayCache,
    RequestId,
    derive_cluster_keys,
    read_cluster_keys,
)
from mediatord.secret_files import SecretFileError, create_secret_file
from tests.in_memory_mediator import NOW

KEYS = derive_cluster_keys(b"s" * MIN_SECRET_BYTES)
BODY = b'{"hints":{}}'
PATH = "/cluster/hints"


class SecretTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)

    def written(self, content: bytes) -> Path:
        """A private file of its own with this content."""
        path = self.directory / os.urandom(4).hex()
        create_secret_file(path, content)
        return path

    def refusal(self, path: Path) -> str:
        """Why a file cannot be used."""
        with self.assertRaises(SecretFileError) as caught:
            read_cluster_keys(path)
        self.assertNotIn("\n", str(caught.exception))
        return str(caught.exception)

    def test_same_secret_same_keys(self) -> None:
        """Whatever white space an editor leaves around it."""
        self.assertEqual(read_cluster_keys(self.written(b"s" * MIN_SECRET_BYTES)), KEYS)
        self.assertEqual(read_cluster_keys(self.written(b" " + b"s" * MIN_SECRET_BYTES + b"\r\n")), KEYS)

    def test_keys_differ(self) -> None:
        """From each other, from those of another secret, and they do not show themselves."""

        def of(keys: ClusterKeys) -> set[bytes]:
            return {keys.seal, keys.requests, keys.responses, keys.allowances}

        ours = of(KEYS)
        self.assertEqual(len(ours), 4)
        self.assertEqual(ours & of(derive_cluster_keys(b"t" * MIN_SECRET_BYTES)), set())
        self.assertEqual(repr(KEYS), "ClusterKeys()")

    def test_too_short(self) -> None:
        """White space does not count."""
        path = self.written(b"s" * (MIN_SECRET_BYTES - 1) + b"\n")
        self.assertIn(f"{path} holds less than 32 bytes", self.refusal(path))

    def test_open_to_others(self) -> None:
        """As with all private files."""
        path = self.written(b"s" * MIN_SECRET_BYTES)
        path.chmod(0o640)
        self.assertIn("chmod 600", self.refusal(path))

    def test_missing(self) -> None:
        """It is never made by itself: another node would have another one."""
        self.assertIn("cannot be read", self.refusal(self.directory / "none"))


class MessageAuthenticatorTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.here, self.there = MessageAuthenticator(self.clock, KEYS), MessageAuthenticator(self.clock, KEYS)
        self.request_id = self.here.new_request_id("aaaa", "bbbb")

    def headers(self) -> dict[str, str]:
        """Of a request from here."""
        return self.here.authenticate_request(self.request_id, "POST", PATH, BODY)

    def refused(self, work: Callable[[], Any]) -> str:
        """Why something is not taken for a node's."""
        with self.assertRaises(MessageAuthenticationError) as caught:
            work()
        return str(caught.exception.reason)

    def test_request(self) -> None:
        """Its stamp comes out as it was."""
        self.assertEqual(self.there.verify_request(self.headers(), "POST", PATH, BODY), self.request_id)

    def test_every_part_of_a_request_counts(self) -> None:
        """Whatever is altered, it is not a node's any more."""
        headers = self.headers()
        for name, value in {
            SENDER_HEADER: "aaab",
            RECEIVER_HEADER: "bbbc",
            TIME_HEADER: str(self.request_id.time_ms + 1),
            NONCE_HEADER: "0" * 32,
            MAC_HEADER: "0" * 64,
        }.items():
            altered = {**headers, name: value}
            self.assertEqual(self.refused(lambda: self.there.verify_request(altered, "POST", PATH, BODY)), "seal")  # noqa: B023
        for method, path, body in (
            ("GET", PATH, BODY),
            ("POST", "/cluster/probe", BODY),
            ("POST", PATH, BODY + b" "),
        ):
            refusal = self.refused(lambda: self.there.verify_request(headers, method, path, body))  # noqa: B023
            self.assertEqual(refusal, "seal")
        self.there.verify_request(headers, "POST", PATH, BODY)

    def test_parts_do_not_run_into_each_other(self) -> None:
        """What ends in one part cannot begin in the next."""
        moved = replace(self.request_id, sender="aaa", receiver="abbbb")
        headers = {**self.headers(), SENDER_HEADER: moved.sender, RECEIVER_HEADER: moved.receiver}
        self.assertEqual(self.refused(lambda: self.there.verify_request(headers, "POST", PATH, BODY)), "seal")

    def test_malformed(self) -> None:
        """Nothing is computed for headers that no node would write."""
        for name, values in {
            SENDER_HEADER: ("", "a b", "a" * 65, "é"),
            RECEIVER_HEADER: ("", "a/b"),
            TIME_HEADER: ("", "-1", "1.5", "9" * 16, "１"),
            NONCE_HEADER: ("", "0" * 31, "0" * 33, "G" * 32),
        }.items():
            for value in values:
                headers = {**self.headers(), name: value}
                refusal = self.refused(lambda: self.there.verify_request(headers, "POST", PATH, BODY))  # noqa: B023
                self.assertEqual(refusal, "malformed", (name, value))
        self.assertEqual(self.refused(lambda: self.there.verify_request({}, "POST", PATH, BODY)), "malformed")
        strange = {**self.headers(), MAC_HEADER: "é"}
        self.assertEqual(self.refused(lambda: self.there.verify_request(strange, "POST", PATH, BODY)), "seal")

    def test_another_secret(self) -> None:
        """Is none of ours."""
        stranger = MessageAuthenticator(self.clock, derive_cluster_keys(b"t" * MIN_SECRET_BYTES))
        headers = self.headers()
        self.assertEqual(self.refused(lambda: stranger.verify_request(headers, "POST", PATH, BODY)), "seal")

    def test_replay(self) -> None:
        """Once, whoever it is for."""
        headers = self.headers()
        self.there.verify_request(headers, "POST", PATH, BODY)
        self.assertEqual(self.refused(lambda: self.there.verify_request(headers, "POST", PATH, BODY)), "replay")

    def test_clocks_apart(self) -> None:
        """By a minute either way, and no more; a request that was refused for it is no replay later."""
        for ahead, refusal in (
            (-MAX_TIMESTAMP_SKEW - 0.001, "time"),
            (-MAX_TIMESTAMP_SKEW, ""),
            (MAX_TIMESTAMP_SKEW, ""),
            (MAX_TIMESTAMP_SKEW + 0.001, "time"),
        ):
            clock = Clock()
            clock.advance(NOW + ahead)
            authenticator = MessageAuthenticator(clock, KEYS)
            request_id = authenticator.new_request_id("aaaa", "bbbb")
            headers = authenticator.authenticate_request(request_id, "POST", PATH, BODY)
            if refusal:
                found = self.refused(lambda: self.there.verify_request(headers, "POST", PATH, BODY))  # noqa: B023
                self.assertEqual(found, refusal)
            else:
                self.assertEqual(self.there.verify_request(headers, "POST", PATH, BODY), request_id)

    def test_response(self) -> None:
        """Belongs to one request, and to its status and body."""
        headers = self.there.authenticate_response(self.request_id, "bbbb", 200, b"{}")
        self.assertEqual(set(headers), {SENDER_HEADER, MAC_HEADER})
        self.assertEqual(self.here.verify_response(self.request_id, headers, 200, b"{}"), "bbbb")
        other = self.here.new_request_id("aaaa", "bbbb")
        for request_id, status, body in (
            (other, 200, b"{}"),
            (replace(self.request_id, sender="aaab"), 200, b"{}"),
            (replace(self.request_id, receiver="bbbc"), 200, b"{}"),
            (self.request_id, 410, b"{}"),
            (self.request_id, 200, b"{} "),
        ):
            refusal = self.refused(lambda: self.here.verify_response(request_id, headers, status, body))  # noqa: B023
            self.assertEqual(refusal, "seal")

    def test_who_answers(self) -> None:
        """A node cannot answer as another one, nor can its answer be given as that of another one."""
        headers = self.there.authenticate_response(self.request_id, "cccc", 410, b"{}")
        self.assertEqual(self.here.verify_response(self.request_id, headers, 410, b"{}"), "cccc")
        for sender, reason in (("bbbb", "seal"), ("", "malformed"), ("c/c", "malformed"), ("\xff", "malformed")):
            altered = {**headers, SENDER_HEADER: sender}
            found = self.refused(lambda: self.here.verify_response(self.request_id, altered, 410, b"{}"))  # noqa: B023
            self.assertEqual(found, reason)

    def test_wrong_direction(self) -> None:
        """A response is not made with the key of requests: nothing sent to us can be sent back as an answer."""
        headers = self.headers()
        for status in (200, 410):
            found = self.refused(lambda: self.here.verify_response(self.request_id, headers, status, BODY))  # noqa: B023
            self.assertEqual(found, "seal")
        turned = {
            **self.headers(),
            MAC_HEADER: self.there.authenticate_response(self.request_id, "aaaa", 200, BODY)[MAC_HEADER],
        }
        self.assertEqual(self.refused(lambda: self.there.verify_request(turned, "POST", PATH, BODY)), "seal")


class ReplaysTests(SynchronousTestCase):
    def request_id(self, number: int, time_ms: int) -> RequestId:
        """One of a node at a time."""
        return RequestId("aaaa", "bbbb", time_ms, f"{number:032x}")

    def test_forgets_in_time(self) -> None:
        """What could not be sent again anyway is not kept."""
        replays = ReplayCache(100)
        for number in range(10):
            self.assertTrue(replays.claim(self.request_id(number, 1000), 1000))
        self.assertEqual(len(replays), 10)
        later = 1000 + int(MAX_TIMESTAMP_SKEW * 1000) + 1
        self.assertTrue(replays.claim(self.request_id(99, later), later))
        self.assertEqual(len(replays), 1)

    def test_bounded(self) -> None:
        """Where there is no room, what is as old as the forgotten is refused: nothing comes twice."""
        replays = ReplayCache(2)
        stamps = [self.request_id(number, 1000 + number) for number in range(4)]
        self.assertTrue(all(replays.claim(request_id, 1010) for request_id in stamps))
        self.assertEqual(len(replays), 2)
        self.assertFalse(any(replays.claim(request_id, 1010) for request_id in stamps))
        self.assertFalse(replays.claim(self.request_id(9, 1001), 1010))
        self.assertTrue(replays.claim(self.request_id(9, 1002), 1010))

    def test_same_nonce_of_another_node(self) -> None:
        """Nodes choose their nonces without asking each other."""
        replays = ReplayCache(2)
        request_id = self.request_id(1, 1000)
        self.assertTrue(replays.claim(request_id, 1000))
        self.assertTrue(replays.claim(replace(request_id, sender="cccc"), 1000))

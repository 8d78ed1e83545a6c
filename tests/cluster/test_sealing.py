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

from mediatord.cluster.sealing import NONCE, RECEIVER, SEAL, SENDER, TIME, WINDOW, NotSealed, Replays, Sealing, Stamp
from mediatord.cluster.secret import LEAST, ClusterKeys, derive, read_secret
from mediatord.private_file import PrivateFileError, create_private
from tests.house import NOW

KEYS = derive(b"s" * LEAST)
BODY = b'{"hints":{}}'
PATH = "/cluster/hints"


class SecretTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)

    def written(self, content: bytes) -> Path:
        """A private file of its own with this content."""
        path = self.directory / os.urandom(4).hex()
        create_private(path, content)
        return path

    def refusal(self, path: Path) -> str:
        """Why a file cannot be used."""
        with self.assertRaises(PrivateFileError) as caught:
            read_secret(path)
        self.assertNotIn("\n", str(caught.exception))
        return str(caught.exception)

    def test_same_secret_same_keys(self) -> None:
        """Whatever white space an editor leaves around it."""
        self.assertEqual(read_secret(self.written(b"s" * LEAST)), KEYS)
        self.assertEqual(read_secret(self.written(b" " + b"s" * LEAST + b"\r\n")), KEYS)

    def test_keys_differ(self) -> None:
        """From each other, from those of another secret, and they do not show themselves."""

        def of(keys: ClusterKeys) -> set[bytes]:
            return {keys.seal, keys.requests, keys.responses, keys.allowances}

        ours = of(KEYS)
        self.assertEqual(len(ours), 4)
        self.assertEqual(ours & of(derive(b"t" * LEAST)), set())
        self.assertEqual(repr(KEYS), "ClusterKeys()")

    def test_too_short(self) -> None:
        """White space does not count."""
        path = self.written(b"s" * (LEAST - 1) + b"\n")
        self.assertIn(f"{path} holds less than 32 bytes", self.refusal(path))

    def test_open_to_others(self) -> None:
        """As with all private files."""
        path = self.written(b"s" * LEAST)
        path.chmod(0o640)
        self.assertIn("chmod 600", self.refusal(path))

    def test_missing(self) -> None:
        """It is never made by itself: another node would have another one."""
        self.assertIn("cannot be read", self.refusal(self.directory / "none"))


class SealingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.here, self.there = Sealing(self.clock, KEYS), Sealing(self.clock, KEYS)
        self.stamp = self.here.stamp("aaaa", "bbbb")

    def headers(self) -> dict[str, str]:
        """Of a request from here."""
        return self.here.seal_request(self.stamp, "POST", PATH, BODY)

    def refused(self, work: Callable[[], Any]) -> str:
        """Why something is not taken for a node's."""
        with self.assertRaises(NotSealed) as caught:
            work()
        return str(caught.exception.reason)

    def test_request(self) -> None:
        """Its stamp comes out as it was."""
        self.assertEqual(self.there.open_request(self.headers(), "POST", PATH, BODY), self.stamp)

    def test_every_part_of_a_request_counts(self) -> None:
        """Whatever is altered, it is not a node's any more."""
        headers = self.headers()
        for name, value in {
            SENDER: "aaab",
            RECEIVER: "bbbc",
            TIME: str(self.stamp.time_ms + 1),
            NONCE: "0" * 32,
            SEAL: "0" * 64,
        }.items():
            altered = {**headers, name: value}
            self.assertEqual(self.refused(lambda: self.there.open_request(altered, "POST", PATH, BODY)), "seal")  # noqa: B023
        for method, path, body in (
            ("GET", PATH, BODY),
            ("POST", "/cluster/probe", BODY),
            ("POST", PATH, BODY + b" "),
        ):
            refusal = self.refused(lambda: self.there.open_request(headers, method, path, body))  # noqa: B023
            self.assertEqual(refusal, "seal")
        self.there.open_request(headers, "POST", PATH, BODY)

    def test_parts_do_not_run_into_each_other(self) -> None:
        """What ends in one part cannot begin in the next."""
        moved = replace(self.stamp, sender="aaa", receiver="abbbb")
        headers = {**self.headers(), SENDER: moved.sender, RECEIVER: moved.receiver}
        self.assertEqual(self.refused(lambda: self.there.open_request(headers, "POST", PATH, BODY)), "seal")

    def test_malformed(self) -> None:
        """Nothing is computed for headers that no node would write."""
        for name, values in {
            SENDER: ("", "a b", "a" * 65, "é"),
            RECEIVER: ("", "a/b"),
            TIME: ("", "-1", "1.5", "9" * 16, "１"),
            NONCE: ("", "0" * 31, "0" * 33, "G" * 32),
        }.items():
            for value in values:
                headers = {**self.headers(), name: value}
                refusal = self.refused(lambda: self.there.open_request(headers, "POST", PATH, BODY))  # noqa: B023
                self.assertEqual(refusal, "malformed", (name, value))
        self.assertEqual(self.refused(lambda: self.there.open_request({}, "POST", PATH, BODY)), "malformed")
        strange = {**self.headers(), SEAL: "é"}
        self.assertEqual(self.refused(lambda: self.there.open_request(strange, "POST", PATH, BODY)), "seal")

    def test_another_secret(self) -> None:
        """Is none of ours."""
        stranger = Sealing(self.clock, derive(b"t" * LEAST))
        headers = self.headers()
        self.assertEqual(self.refused(lambda: stranger.open_request(headers, "POST", PATH, BODY)), "seal")

    def test_replay(self) -> None:
        """Once, whoever it is for."""
        headers = self.headers()
        self.there.open_request(headers, "POST", PATH, BODY)
        self.assertEqual(self.refused(lambda: self.there.open_request(headers, "POST", PATH, BODY)), "replay")

    def test_clocks_apart(self) -> None:
        """By a minute either way, and no more; a request that was refused for it is no replay later."""
        for ahead, refusal in ((-WINDOW - 0.001, "time"), (-WINDOW, ""), (WINDOW, ""), (WINDOW + 0.001, "time")):
            clock = Clock()
            clock.advance(NOW + ahead)
            sealing = Sealing(clock, KEYS)
            stamp = sealing.stamp("aaaa", "bbbb")
            headers = sealing.seal_request(stamp, "POST", PATH, BODY)
            if refusal:
                found = self.refused(lambda: self.there.open_request(headers, "POST", PATH, BODY))  # noqa: B023
                self.assertEqual(found, refusal)
            else:
                self.assertEqual(self.there.open_request(headers, "POST", PATH, BODY), stamp)

    def test_response(self) -> None:
        """Belongs to one request, and to its status and body."""
        headers = self.there.seal_response(self.stamp, "bbbb", 200, b"{}")
        self.assertEqual(set(headers), {SENDER, SEAL})
        self.assertEqual(self.here.open_response(self.stamp, headers, 200, b"{}"), "bbbb")
        other = self.here.stamp("aaaa", "bbbb")
        for stamp, status, body in (
            (other, 200, b"{}"),
            (replace(self.stamp, sender="aaab"), 200, b"{}"),
            (replace(self.stamp, receiver="bbbc"), 200, b"{}"),
            (self.stamp, 410, b"{}"),
            (self.stamp, 200, b"{} "),
        ):
            refusal = self.refused(lambda: self.here.open_response(stamp, headers, status, body))  # noqa: B023
            self.assertEqual(refusal, "seal")

    def test_who_answers(self) -> None:
        """A node cannot answer as another one, nor can its answer be given as that of another one."""
        headers = self.there.seal_response(self.stamp, "cccc", 410, b"{}")
        self.assertEqual(self.here.open_response(self.stamp, headers, 410, b"{}"), "cccc")
        for sender, reason in (("bbbb", "seal"), ("", "malformed"), ("c/c", "malformed"), ("\xff", "malformed")):
            altered = {**headers, SENDER: sender}
            self.assertEqual(self.refused(lambda: self.here.open_response(self.stamp, altered, 410, b"{}")), reason)  # noqa: B023

    def test_wrong_direction(self) -> None:
        """A response is not made with the key of requests: nothing sent to us can be sent back as an answer."""
        headers = self.headers()
        for status in (200, 410):
            self.assertEqual(self.refused(lambda: self.here.open_response(self.stamp, headers, status, BODY)), "seal")  # noqa: B023
        turned = {**self.headers(), SEAL: self.there.seal_response(self.stamp, "aaaa", 200, BODY)[SEAL]}
        self.assertEqual(self.refused(lambda: self.there.open_request(turned, "POST", PATH, BODY)), "seal")


class ReplaysTests(SynchronousTestCase):
    def stamp(self, number: int, time_ms: int) -> Stamp:
        """One of a node at a time."""
        return Stamp("aaaa", "bbbb", time_ms, f"{number:032x}")

    def test_forgets_in_time(self) -> None:
        """What could not be sent again anyway is not kept."""
        replays = Replays(100)
        for number in range(10):
            self.assertTrue(replays.claim(self.stamp(number, 1000), 1000))
        self.assertEqual(len(replays), 10)
        later = 1000 + int(WINDOW * 1000) + 1
        self.assertTrue(replays.claim(self.stamp(99, later), later))
        self.assertEqual(len(replays), 1)

    def test_bounded(self) -> None:
        """Where there is no room, what is as old as the forgotten is refused: nothing comes twice."""
        replays = Replays(2)
        stamps = [self.stamp(number, 1000 + number) for number in range(4)]
        self.assertTrue(all(replays.claim(stamp, 1010) for stamp in stamps))
        self.assertEqual(len(replays), 2)
        self.assertFalse(any(replays.claim(stamp, 1010) for stamp in stamps))
        self.assertFalse(replays.claim(self.stamp(9, 1001), 1010))
        self.assertTrue(replays.claim(self.stamp(9, 1002), 1010))

    def test_same_nonce_of_another_node(self) -> None:
        """Nodes choose their nonces without asking each other."""
        replays = Replays(2)
        stamp = self.stamp(1, 1000)
        self.assertTrue(replays.claim(stamp, 1000))
        self.assertTrue(replays.claim(replace(stamp, sender="cccc"), 1000))

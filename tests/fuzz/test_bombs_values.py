"""Extreme numbers, texts and names in JSON."""

from __future__ import annotations

import json
from typing import Any

from tests.fuzz.bombs import BombTestCase
from tests.in_memory_mediator import CM3, MP, PING

DIGITS = b"9" * 100_000
QUERIES = "https://didcomm.org/discover-features/2.0/queries"


class ValueTests(BombTestCase):
    """In encrypted messages."""

    def test_numbers(self) -> None:
        """Too large for a double: no JSON. Too many digits: the nearest double."""
        for number, status in (
            (b"1e400", 400),
            (b"-1e400", 400),
            (DIGITS, 400),
            (b"1e" + DIGITS, 400),
            (b"1." + DIGITS, 202),
            (b"-1e-100000", 202),
            (b"18446744073709551616", 202),
        ):
            for where in (b'"body":{"a":%b}', b'"body":{},"expires_time":%b', b'"body":{},"delay_milli":%b'):
                if b"expires" in where and status == 202:
                    continue  # which is in the past
                raw = b'{"id":"1","type":"%b",%b}' % (PING.encode(), where % number)
                self.assertEqual(self.post(self.anoncrypted(raw)).status, status, number[:20])

    def test_limits_and_offsets(self) -> None:
        """Refused as a limit or an offset, without allocating memory for them."""
        for type_, body in (
            (f"{MP}/delivery-request", '{"limit":%s}'),
            (f"{CM3}/recipient-query", '{"paginate":{"limit":%s,"offset":0}}'),
            (f"{CM3}/recipient-query", '{"paginate":{"limit":1,"offset":%s}}'),
        ):
            for number in ("1e308", "18446744073709551616", "-1", "1.5", "-0.0", "true"):
                raw = self.message(type_, "BODY", return_route="all").replace(b'"BODY"', (body % number).encode())
                answer = self.post(self.authcrypted(raw))
                opened = self.guest.open(answer.body)
                self.assertEqual(opened.message.type.key, ("reportproblem", 2, "problemreport"), (type_, number))

    def test_surrogates(self) -> None:
        """Lone surrogates are refused anywhere."""
        for half in (b"\\ud800", b"\\udc00", b"\\ud800\\ud800", b"\xed\xa0\x80"):
            for raw in (
                b'{"id":"%b","type":"a","body":{}}' % half,
                b'{"id":"1","type":"a","body":{"%b":1}}' % half,
            ):
                self.assertEqual(self.refusal_code(self.anoncrypted(raw)), "e.p.msg")
            self.assertEqual(self.refusal_code(b'{"ciphertext":"%b"}' % half), "e.p.msg")

    def test_nul(self) -> None:
        """It is a character like others: it is returned in the thread, and invalid in a DID."""
        answer = self.post(self.authcrypted(self.message(id="a\0b", return_route="all")))
        self.assertEqual(self.guest.open(answer.body).message.thid, "a\0b")
        updates = {"updates": [{"recipient_did": "did:example:\0", "action": "add"}]}
        answer = self.post(self.authcrypted(self.message(f"{CM3}/recipient-update", updates, return_route="all")))
        (result,) = self.guest.open(answer.body).body["updated"]
        self.assertEqual(result["result"], "client_error")

    def test_duplicate_members(self) -> None:
        """Of members with one name the last one counts everywhere."""
        raw = b'{"id":"1","id":"2","type":"x","type":"%b","body":{}%b}'
        extra = b',"return_route":"none","return_route":"all","from":"%b","to":["%b"]'
        extra %= (self.guest.did.encode(), self.site_fixture.did.encode())
        answer = self.post(self.authcrypted(raw % (PING.encode(), extra)))
        self.assertEqual(self.guest.open(answer.body).message.thid, "2")


class FeatureTests(BombTestCase):
    """Queries of discover-features: a star matches any text, everything else itself."""

    def disclosed(self, *matches: str, most_calls: int) -> list[Any]:
        """What is disclosed."""
        queries = [{"feature-type": "protocol", "match": match} for match in matches]
        raw = self.authcrypted(self.message(QUERIES, {"queries": queries}, return_route="all"))
        answer = self.post(raw, most_calls=most_calls)
        found: list[Any] = self.guest.open(answer.body).body["disclosures"]
        return found

    def test_regular_expressions(self) -> None:
        """A regular expression is literal text; none is compiled."""
        for match in ("(a+)+$", "(.*)*b", "^(([a-z])+.)+[A-Z]([a-z])+$", "https://didcomm.org/.*", "[a-z]+"):
            self.assertEqual(self.disclosed(*[match] * 100, most_calls=20_000), [])

    def test_stars(self) -> None:
        """The longest pattern, a hundred times, on every feature: linear cost."""
        for match in ("*o" * 256, "*" * 512, "*a" * 255 + "*", "h*" * 256):
            found = self.disclosed(*[match] * 100, most_calls=40_000)
            self.assertEqual(bool(found), match == "*" * 512)

    def test_too_many_queries(self) -> None:
        """More than a hundred, or one longer than 512 characters, is a malformed body."""
        for queries in ([("protocol", "*")] * 101, [("protocol", "*" * 513)], [("protocol", "*")] * 100_000):
            body = {"queries": [{"feature-type": kind, "match": match} for kind, match in queries]}
            raw = self.authcrypted(self.message(QUERIES, body, return_route="all"))
            if len(raw) > self.site_fixture.config.limits.max_message_bytes:
                # Four megabytes, read one quantum at a time.
                self.assertEqual(self.post(raw, most_calls=4_500).status, 413)
                continue
            opened = self.guest.open(self.post(raw, most=40 * len(raw) + 600_000).body)
            self.assertEqual(opened.body["code"], "e.p.msg.bad-body")


class LongNameTests(BombTestCase):
    """Names of a megabyte, in every place."""

    def test_headers(self) -> None:
        """As the key id of a recipient or a sender."""
        name = "did:key:" + "z" * 700_000
        entries = [{"header": {"kid": f"{name}#a"}, "encrypted_key": "AA"}]
        raw = json.dumps({**self.encrypt_by_writer(), "recipients": entries}).encode()
        self.assertEqual(self.refusal_code(raw), "e.p.trust.crypto")
        raw = json.dumps(self.encrypt_by_writer(headers={"skid": f"{name}#a"})).encode()
        self.assertEqual(self.post(raw, most=30 * len(raw)).status, 400)

    def test_message(self) -> None:
        """As type, sender, recipient, thread, next hop and registration."""
        long = "did:web:" + "a" * 400_000
        for headers in ({"from": long}, {"thid": long}, {"id": long}, {"to": [long]}, {"from_prior": long}):
            self.assertIn(self.post(self.authcrypted(self.message(**headers))).status, (200, 202, 400))
        self.assertIn(
            self.post(self.authcrypted(self.message("https://didcomm.org/" + "a/" * 200_000))).status, (200, 202)
        )
        forward = {"id": "1", "type": "https://didcomm.org/routing/2.0/forward", "body": {"next": long}}
        attached = {**forward, "attachments": [{"data": {"json": {"ciphertext": "A"}}}]}
        self.assertEqual(self.refusal_code(self.anoncrypted(json.dumps(attached).encode())), "e.p.msg.missing-next")
        updates = {"updates": [{"recipient_did": long, "action": "add"}]}
        answer = self.post(
            self.authcrypted(self.message(f"{CM3}/recipient-update", updates, return_route="all")), most=40_000_000
        )
        (result,) = self.guest.open(answer.body).body["updated"]
        self.assertEqual(result["result"], "client_error")

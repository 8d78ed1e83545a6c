"""
What Decentrl says no to, over HTTP, and that nothing of it is kept (DCTRL-0004 11, reference 12).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

from mediatord.protocol.decentrl.crypto import generate_key_pair
from mediatord.protocol.encoding import encode_base64
from mediatord.wallet.decentrl_client import DIRECT_CHANNEL, PRIVATE_CHANNEL, PUBLIC_CHANNEL
from tests.http.in_memory_site import encode_request
from tests.in_memory_identities import bad_dids
from tests.integration.raw_decentrl_client import JSON, MANY, RawDecentrlClient, send_request_on, unix_time
from tests.integration.refusal_test_case import ELSEWHERE, REQUEST, RESPOND, SAVE, SEALED, WAYS, RefusalDaemonTestCase
from tests.protocol.decentrl.mutations import nested, paths_of, replaced, to_json, without

LIMIT = 1 << 20
NONCE = "6f1c1d52-6a0b-4e0e-9a37-0d6f3a1b2c{:02x}"


class CodeTests(RefusalDaemonTestCase):
    """One test for each code that a command can be refused with; Bob owns a contract with Alice, and she none."""

    alice: ClassVar[RawDecentrlClient]
    bob: ClassVar[RawDecentrlClient]
    carol: ClassVar[RawDecentrlClient]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.alice, cls.bob, cls.carol = (
            RawDecentrlClient(cls.daemon_client, alias) for alias in ("alice", "bob", "carol")
        )
        for one in (cls.alice, cls.bob):
            one.register()
        cls.bob.befriend(cls.alice)

    def query(self, sender: RawDecentrlClient | None = None, **header: Any) -> bytes:
        """A command that is fine but for the header."""
        return (sender or self.alice).command({"type": "QUERY_EVENTS"}, **header)

    def own_commands(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """What only a registered identity may ask of its mediator: channel, type and members."""
        asked = "COMMUNICATION_CONTRACT"
        contract = {"signed_communication_contract": self.alice.contract_with(self.bob)}
        yield f"QUERY_PENDING_{asked}_REQUESTS", DIRECT_CHANNEL, {}
        yield f"ACKNOWLEDGE_PENDING_{asked}_REQUESTS", DIRECT_CHANNEL, {"communication_contract_ids": []}
        yield SAVE, DIRECT_CHANNEL, contract
        yield f"QUERY_{asked}S", DIRECT_CHANNEL, {}
        yield "QUERY_PENDING_EVENTS", DIRECT_CHANNEL, {}
        yield "ACKNOWLEDGE_PENDING_EVENTS", DIRECT_CHANNEL, {"event_ids": []}
        yield "SAVE_EVENTS", DIRECT_CHANNEL, {"events": [self.alice.event("sealed", tags=("tag",))]}
        yield "QUERY_EVENTS", DIRECT_CHANNEL, {}
        yield "UPDATE_EVENT_TAGS", DIRECT_CHANNEL, {"events": []}
        yield "PUBLISH_PUBLIC_EVENT", PUBLIC_CHANNEL, self.alice.public_event("news")
        yield "DELETE_PUBLIC_EVENT", PUBLIC_CHANNEL, {"public_event_id": "a"}

    def test_every_body_that_is_no_command(self) -> None:
        """400 INVALID_COMMAND, whatever it is labelled with (reference 12)."""
        good = json.loads(self.alice.command("sealed", to=self.bob.did, channel=PRIVATE_CHANNEL))
        bodies = [b"", b"{", b"null", b"[]", b'"x"', b"7", b"\xff", b"{}", b"\xef\xbb\xbf{}", b"[" * 100_000]
        bodies += [to_json(without(good, path)) for path in paths_of(good)]
        for path in paths_of(good):
            if path != ("signature",):  # any text is one, if not a right one
                odd: tuple[Any, ...] = (None, True, {}, [], nested(70))
                bodies += [to_json(replaced(good, path, one)) for one in odd]
        bodies += [
            to_json(replaced(good, ("header", "channel"), "THREE_WAY")),
            to_json(replaced(good, ("header", "timestamp"), "1")),
            to_json(replaced(good, ("header", "timestamp"), float("nan"))),
            to_json(replaced(good, ("header", "timestamp"), 10**400)),
            to_json(replaced(good, ("header", "nonce"), "not-a-uuid")),
            to_json(replaced(good, ("header", "sender_did"), "")),
            to_json(replaced(good, ("payload",), "")),
            to_json(replaced(good, ("payload",), "\ud800")),
            to_json(replaced(good, ("unknown",), "\ud800")),
            to_json(good).replace(b'"payload"', b'"payload":"x","payload"'),
            to_json(good).replace(b'"channel"', b'"channel":"TWO_WAY_PRIVATE","channel"'),
        ]
        before = self.daemon_client.kept()
        for body in bodies:
            for way in WAYS:
                self.is_error(self.daemon_client.command(body, **way), 400, "INVALID_COMMAND")
        for label in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x", ""):
            for way in WAYS:
                self.is_error(
                    self.daemon_client.command(b"{}", **{**way, "Content-Type": label}), 400, "INVALID_COMMAND"
                )
        self.assertEqual(self.daemon_client.kept(), before)

    def test_payloads_that_are_none(self) -> None:
        """400 INVALID_COMMAND: any member of any payload missing, or of another kind."""
        before = self.daemon_client.kept()
        for name, channel, members in self.own_commands():
            payload = {"type": name, **members}
            for path in paths_of(payload):
                broken = [replaced(payload, path, {"a": 1})]
                if isinstance(path[-1], str):  # a list without one of its elements is a list
                    broken.append(without(payload, path))
                for one in broken:
                    raw = self.alice.command(one, channel=channel)
                    self.is_error(self.daemon_client.command(raw), 400, "INVALID_COMMAND")
        self.assertEqual(self.daemon_client.kept(), before)

    def test_payloads_beyond_bounds(self) -> None:
        """400 INVALID_COMMAND: pages that are none, too many of something, and what the channel does not have."""
        before = self.daemon_client.kept()
        event = self.alice.event("x")
        pages: tuple[Any, ...] = ({"page": -1}, {"page_size": 0}, {"page_size": 1001}, {"page": 1.5}, {"page": True})
        payloads: list[dict[str, Any]] = [
            *({"type": "QUERY_EVENTS", "pagination": pagination} for pagination in (*pages, [], None)),
            {"type": "QUERY_EVENTS", "filter": {"after_timestamp": "0"}},
            {"type": "SAVE_EVENTS", "events": [event] * (MANY + 1)},
            {"type": "SAVE_EVENTS", "events": [event, {**event, "timestamp": "now"}]},
            {"type": "SAVE_EVENTS", "events": [self.alice.event("x", tags=("tag",) * (MANY + 1))]},
            {"type": "SAVE_EVENTS", "events": [self.alice.event("x", tags=("t" * 1025,))]},
            {"type": REQUEST, **SEALED, "encrypted_contract_request": "A" * 100_000},
            {"type": REQUEST, **SEALED, "requestor_ephemeral_public_key": "A" * 1025},
            {"type": "QUERY_EVERYTHING"},
            {"type": "PUBLISH_PUBLIC_EVENT", **self.alice.public_event("news")},
        ]
        for payload in payloads:
            self.is_error(self.daemon_client.command(self.alice.command(payload)), 400, "INVALID_COMMAND")
        self.assertEqual(self.daemon_client.kept(), before)

    def test_a_body_that_is_no_command_burns_no_nonce(self) -> None:
        """The same nonce is good afterwards, and only then it is used (reference 6.1)."""
        nonce = NONCE.format(0)
        for broken in (b"{", to_json(replaced(json.loads(self.query(nonce=nonce)), ("payload",), "x"))):
            self.is_error(self.daemon_client.command(broken), 400, "INVALID_COMMAND")
        self.is_error(
            self.daemon_client.command(self.alice.command({"type": "NO_SUCH"}, nonce=nonce)), 400, "INVALID_COMMAND"
        )
        self.assertEqual(self.daemon_client.command(self.query(nonce=nonce)).status, 200)
        self.is_error(self.daemon_client.command(self.query(nonce=nonce)), 401, "DUPLICATE_NONCE")

    def test_requests_that_make_no_sense(self) -> None:
        """400 INVALID_COMMAND as well, though by then the nonce is used."""
        alice, bob, carol = self.alice, self.bob, self.carol
        others, own = bob.contract_with(carol), alice.contract_with(bob)
        for members, to in (
            ({"type": SAVE, "signed_communication_contract": others}, None),
            ({"type": RESPOND, "signed_communication_contract": others}, None),
            ({"type": RESPOND, "signed_communication_contract": alice.contract_with(carol)}, bob.did),
            ({"type": SAVE, "signed_communication_contract": alice.contract_with(alice)}, None),
            ({"type": SAVE, "signed_communication_contract": {**own, "ballast": "x" * 100_000}}, None),
            ({"type": SAVE, "signed_communication_contract": {**own, "requestor_signature": None}}, None),
            ({"type": REQUEST, **alice.sealed({"no": "contract"})}, None),
            ({"type": REQUEST, **alice.sealed([])}, None),
            ({"type": REQUEST, **alice.registration(expires_at=int(unix_time()) - 1)}, None),
            ({"type": REQUEST, **bob.registration()}, None),
            ({"type": REQUEST, **alice.registration(recipient_did=bob.did)}, None),
            ({"type": REQUEST, **alice.registration(recipient_signing_key_id=bob.identity.signing_key_id)}, None),
            ({"type": REQUEST, **alice.registration(expires_at="9999999999")}, None),
            ({"type": REQUEST, **alice.registration(), "requestor_ephemeral_public_key": "AAAA"}, None),
            ({"type": REQUEST, **alice.registration(), "requestor_ephemeral_public_key": "A" * 43 + "="}, None),
            ({"type": REQUEST, **alice.registration(), "encrypted_contract_request": "?"}, None),
            ({"type": REQUEST, **alice.registration(), "encrypted_contract_request": "AAAA"}, None),
            (
                {
                    "type": REQUEST,
                    **alice.registration(),
                    "requestor_ephemeral_public_key": encode_base64(generate_key_pair()[1]),
                },
                None,
            ),
        ):
            with self.subTest(members=members):
                self.is_refused(partial(alice.command, members, to=to), 400, "INVALID_COMMAND")
        nonce = NONCE.format(1)
        senseless = alice.command({"type": SAVE, "signed_communication_contract": others}, nonce=nonce)
        self.is_error(self.daemon_client.command(senseless), 400, "INVALID_COMMAND")
        self.is_error(self.daemon_client.command(self.query(nonce=nonce)), 401, "DUPLICATE_NONCE")

    def test_invalid_signature(self) -> None:
        """401: another key's, another text's, half of one, none at all; in every channel (DCTRL-0004 6.2)."""
        alice, bob = self.alice, self.bob
        for make in (
            lambda: alice.command({"type": "SAVE_EVENTS", "events": [alice.event("x")]}),
            lambda: alice.command("sealed", to=bob.did, channel=PRIVATE_CHANNEL),
            lambda: alice.command(
                {"type": "PUBLISH_PUBLIC_EVENT", **alice.public_event("news")}, channel=PUBLIC_CHANNEL
            ),
            lambda: alice.command({"type": REQUEST, **alice.registration()}),
        ):
            for change in (
                lambda good: {**good, "signature": ""},
                lambda good: {**good, "signature": "AAAA"},
                lambda good: {**good, "signature": good["signature"][:-4]},
                lambda good: {**good, "signature": good["signature"] + "!"},
                lambda good: {**good, "signature": "\0" + good["signature"]},
                lambda good: {**good, "signature": bob.identity.sign({k: good[k] for k in ("header", "payload")})},
                lambda good: {**good, "signature": alice.identity.sign(good["payload"])},
                lambda good: replaced(good, ("header", "timestamp"), good["header"]["timestamp"] + 1),
                lambda good: replaced(good, ("header", "extra"), 1),
                lambda good: replaced(good, ("header", "recipient_did"), self.carol.did),
                lambda good: (
                    {**good, "payload": good["payload"] + "x"}
                    if isinstance(good["payload"], str)
                    else replaced(good, ("payload", "extra"), None)
                ),
            ):
                self.is_refused(partial(self.altered, make, change), 401, "INVALID_SIGNATURE")

    def altered(self, make: Callable[[], bytes], change: Callable[[Any], Any]) -> bytes:
        """A command in which something was changed after it had been signed."""
        return to_json(change(json.loads(make())))

    def test_invalid_signatures(self) -> None:
        """401: a contract that one of the two did not sign, or whose keys are not to be found (reference 7.3)."""
        alice, bob, carol = self.alice, self.bob, self.carol
        good = bob.contract_with(alice)
        terms = good["communication_contract"]
        others = {
            "expires_at": terms["expires_at"] + 1,
            "timestamp": terms["timestamp"] + 1,
            "requestor_encryption_public_key": encode_base64(generate_key_pair()[1]),
            "requestor_signing_key_id": carol.identity.signing_key_id,
            "recipient_signing_key_id": f"{alice.did}#prekey",
            "unknown": 1,
        }
        unknown = {**terms, "requestor_did": ELSEWHERE, "requestor_signing_key_id": f"{ELSEWHERE}#signing"}
        for signed in (
            {**good, "requestor_signature": ""},
            {**good, "recipient_signature": "AAAA"},
            {**good, "requestor_signature": good["recipient_signature"]},
            {**good, "recipient_signature": good["requestor_signature"]},
            {**good, "communication_contract": unknown},
            *(replaced(good, ("communication_contract", name), other) for name, other in others.items()),
        ):
            members = {"signed_communication_contract": signed}
            with self.subTest(signed=signed):
                self.is_refused(partial(alice.command, {"type": SAVE, **members}), 401, "INVALID_SIGNATURES")
                if signed["communication_contract"]["requestor_did"] == bob.did:
                    respond = partial(alice.command, {"type": RESPOND, **members}, to=bob.did)
                    self.is_refused(respond, 401, "INVALID_SIGNATURES")
        unsigned = {"communication_contract": alice.terms(alice.mediator), "requestor_signature": "AAAA"}
        foreign = alice.terms(alice.mediator, requestor_signing_key_id=bob.identity.signing_key_id)
        signed_by_bob = {"communication_contract": foreign, "requestor_signature": bob.identity.sign(foreign)}
        for plaintext in (unsigned, signed_by_bob):
            make = partial(alice.command, {"type": REQUEST, **alice.sealed(plaintext)})
            self.is_refused(make, 401, "INVALID_SIGNATURES")

    def test_unauthorized_command(self) -> None:
        """401 for every command to the mediator that is addressed to another, or not from somebody registered."""
        for name, channel, members in self.own_commands():
            payload = {"type": name, **members}
            with self.subTest(name=name):
                for to in (self.bob.did, self.carol.did, ELSEWHERE, "nobody"):
                    make = partial(self.alice.command, payload, to=to, channel=channel)
                    self.is_refused(make, 401, "UNAUTHORIZED_COMMAND")
                make = partial(self.carol.command, payload, channel=channel)
                self.is_refused(make, 401, "UNAUTHORIZED_COMMAND")

    def test_timestamp_out_of_range(self) -> None:
        """401: more than five minutes ago or ahead when it arrives; the nonce stays free (DCTRL-0004 5.1)."""
        nonce = NONCE.format(2)
        for off in (-301_000, 360_000, -(10**13), 10**13):
            make = partial(self.query, timestamp_ms=int(unix_time() * 1000) + off, nonce=nonce)
            self.is_refused(make, 401, "TIMESTAMP_OUT_OF_RANGE")
        for off in (-240_000, 290_000):
            self.assertEqual(
                self.daemon_client.command(self.query(timestamp_ms=int(unix_time() * 1000) + off)).status, 200
            )
        self.assertEqual(self.daemon_client.command(self.query(nonce=nonce)).status, 200)

    def test_duplicate_nonce(self) -> None:
        """401 for the same command again, and for any other of this sender with its nonce (DCTRL-0004 5.2)."""
        nonce = NONCE.format(3)
        first = self.alice.command("once", to=self.bob.did, channel=PRIVATE_CHANNEL, nonce=nonce)
        self.assertEqual(self.daemon_client.command(first).status, 200)
        self.is_refused(lambda: first, 401, "DUPLICATE_NONCE")
        self.is_refused(lambda: self.query(nonce=nonce), 401, "DUPLICATE_NONCE")
        self.is_refused(
            lambda: self.alice.command("other", to=self.bob.did, channel=PRIVATE_CHANNEL, nonce=nonce),
            401,
            "DUPLICATE_NONCE",
        )
        self.assertEqual(self.daemon_client.command(self.query(self.bob, nonce=nonce)).status, 200)

    def test_a_failed_authentication_burns_the_nonce(self) -> None:
        """A nonce counts as used from the moment it was seen in time (DCTRL-0004 5.4)."""
        changes: list[dict[str, Any]] = [{"sender_signing_key_id": "#signing"}, {"recipient_did": ELSEWHERE}]
        for number, change in enumerate(changes):
            nonce = NONCE.format(10 + number)
            self.assertNotEqual(self.daemon_client.command(self.query(nonce=nonce, **change)).status, 200)
            self.is_refused(partial(self.query, nonce=nonce), 401, "DUPLICATE_NONCE")

    def test_many_copies_at_once(self) -> None:
        """Of many copies of one command that come at the same time, one is carried out."""
        dave = self.new_identity("dave")
        dave.befriend(self.alice)
        for round_ in range(5):
            raw = self.alice.command(f"round {round_}", to=dave.did, channel=PRIVATE_CHANNEL)
            answers = self.daemon_client.at_once([raw] * 12)
            self.assertEqual(sorted(answer.status for answer in answers), [200] + [401] * 11)
            for answer in answers:
                if answer.status == 401:
                    self.is_error(answer, 401, "DUPLICATE_NONCE")
        self.assertEqual([one["payload"] for one in dave.pending()], [f"round {number}" for number in range(5)])

    def test_a_crowd(self) -> None:
        """Good and bad that arrive together do not get in each other's way: each is answered and kept for itself."""
        dave, eve = self.new_identity("dave"), self.new_identity("eve")
        dave.befriend(self.alice)
        for _ in range(5):
            twice = self.alice.command("twice", to=dave.did, channel=PRIVATE_CHANNEL)
            crowd = list(self.crowd(dave, eve))
            answers = [
                answer.json for answer in self.daemon_client.at_once([*(raw for raw, _ in crowd), twice, twice])
            ]
            codes = [answer["code"] if answer["type"] == "ERROR" else "SUCCESS" for answer in answers]
            self.assertEqual(codes[:-2], [code for _, code in crowd])
            self.assertEqual(sorted(codes[-2:]), ["DUPLICATE_NONCE", "SUCCESS"])
        self.assertEqual(sorted(one["payload"] for one in dave.pending()), ["kept"] * 10 + ["twice"] * 5)
        self.assertEqual([one["payload"] for one in dave.items("EVENTS", "events")], ["kept"] * 20)
        self.assertEqual(len(dave.items("COMMUNICATION_CONTRACTS", "communication_contracts")), 6)
        self.assertEqual(len(dave.requests()), 5)
        self.assertEqual(len(self.daemon_client.ask("GET", f"/public/{dave.did}").json["events"]), 5)

    def crowd(self, dave: RawDecentrlClient, eve: RawDecentrlClient) -> Iterator[tuple[bytes, str]]:
        """Commands, and how they end; to Dave only Alice may write."""
        alice, carol = self.alice, self.carol
        save = {"type": "SAVE_EVENTS", "events": [dave.event("kept", tags=("a",)), dave.event("kept")]}
        contract = dave.contract_with(RawDecentrlClient(self.daemon_client, "somebody"))
        yield alice.command("kept", to=dave.did, channel=PRIVATE_CHANNEL), "SUCCESS"
        yield eve.command("never", to=dave.did, channel=PRIVATE_CHANNEL), "COMMUNICATION_CONTRACT_NOT_FOUND"
        yield alice.command("never", to=carol.did, channel=PRIVATE_CHANNEL), "RECIPIENT_NOT_REGISTERED"
        yield alice.command("kept", to=dave.did, channel=PRIVATE_CHANNEL), "SUCCESS"
        yield alice.command("never", to=ELSEWHERE, channel=PRIVATE_CHANNEL), "RECIPIENT_NOT_FOUND"
        yield dave.command(save), "SUCCESS"
        yield carol.command({"type": "SAVE_EVENTS", "events": [carol.event("never")]}), "UNAUTHORIZED_COMMAND"
        yield dave.command(save), "SUCCESS"
        yield to_json({**json.loads(dave.command(save)), "signature": ""}), "INVALID_SIGNATURE"
        yield dave.command({"type": SAVE, "signed_communication_contract": contract}), "SUCCESS"
        yield eve.command({"type": SAVE, "signed_communication_contract": {}}), "INVALID_COMMAND"
        yield carol.command({"type": REQUEST, **SEALED}, to=dave.did), "SUCCESS"
        for event, code in (
            (dave.public_event("kept"), "SUCCESS"),
            (eve.public_event("never"), "INVALID_EVENT_SIGNATURE"),
        ):
            yield dave.command({"type": "PUBLISH_PUBLIC_EVENT", **event}, channel=PUBLIC_CHANNEL), code

    def test_sender_not_found(self) -> None:
        """404: a sender whose DID does not resolve here, whatever the method; nothing is fetched (reference 2.2)."""
        parts = self.alice.did.split(":")
        broken = (":".join(parts[:5]), ":".join([*parts, "x"]), self.alice.did.replace(":z6Mk", ":z6LS", 1))
        for did in (ELSEWHERE, "did:key:z6MkhaXg", "did:decentrl:x", "nobody", *broken, *bad_dids(self.alice.did)):
            make = partial(self.query, sender_did=did, sender_signing_key_id=f"{did}#signing")
            self.is_refused(make, 404, "SENDER_NOT_FOUND")

    def test_sender_signing_key_not_found(self) -> None:
        """404: anything but the full id of the sender's own signing key (reference 2.2)."""
        alice = self.alice
        for key_id in (
            "#signing",
            alice.did,
            f"{alice.did}#prekey",
            f"{alice.did}#",
            self.bob.identity.signing_key_id,
            *bad_dids(alice.identity.signing_key_id),
        ):
            make = partial(self.query, sender_signing_key_id=key_id)
            self.is_refused(make, 404, "SENDER_SIGNING_KEY_NOT_FOUND")
        make = partial(self.query, sender_did=alice.mediator, sender_signing_key_id=alice.identity.signing_key_id)
        self.is_refused(make, 404, "SENDER_SIGNING_KEY_NOT_FOUND")

    def test_recipient_not_found(self) -> None:
        """404: an event for a DID that does not resolve here (DCTRL-0004 7.2)."""
        for did in (ELSEWHERE, "did:decentrl:x", "nobody", *bad_dids(self.bob.did)):
            make = partial(self.alice.command, "sealed", to=did, channel=PRIVATE_CHANNEL)
            self.is_refused(make, 404, "RECIPIENT_NOT_FOUND")

    def test_recipient_not_registered(self) -> None:
        """404: an event, a request or a contract for somebody who is not registered here, the mediator included."""
        alice, carol = self.alice, self.carol
        for to in (carol.did, alice.mediator):
            make = partial(alice.command, "sealed", to=to, channel=PRIVATE_CHANNEL)
            self.is_refused(make, 404, "RECIPIENT_NOT_REGISTERED")
        request = {"encrypted_contract_request": "AAAA", "requestor_ephemeral_public_key": "AAAA"}
        for to in (carol.did, ELSEWHERE, "nobody", *bad_dids(carol.did)):
            self.is_refused(
                partial(alice.command, {"type": REQUEST, **request}, to=to), 404, "RECIPIENT_NOT_REGISTERED"
            )
        contract = {"type": RESPOND, "signed_communication_contract": carol.contract_with(alice)}
        for to in (carol.did, alice.mediator):
            self.is_refused(partial(alice.command, contract, to=to), 404, "RECIPIENT_NOT_REGISTERED")

    def test_contract_not_found(self) -> None:
        """404: the recipient owns no contract with the sender that has not expired; one of the sender's is none."""
        alice, dave = self.alice, self.new_identity("dave")
        make = partial(alice.command, "sealed", to=dave.did, channel=PRIVATE_CHANNEL)
        self.is_refused(make, 404, "COMMUNICATION_CONTRACT_NOT_FOUND")
        alice.befriend(dave)
        self.is_refused(make, 404, "COMMUNICATION_CONTRACT_NOT_FOUND")
        dave.befriend(alice, expires_at=int(unix_time()) - 1)
        self.is_refused(make, 404, "COMMUNICATION_CONTRACT_NOT_FOUND")
        dave.befriend(self.bob)
        self.is_refused(make, 404, "COMMUNICATION_CONTRACT_NOT_FOUND")
        self.assertEqual(dave.pending(), [])
        dave.befriend(alice)
        self.assertEqual(self.daemon_client.command(make()).status, 200)

    def test_invalid_event_signature(self) -> None:
        """401: what is published has to be signed by the key of the command, all of it (reference 10.1)."""
        alice, bob = self.alice, self.bob
        good = alice.public_event("news", tags=("a", "b"), channel_id="blog")
        for event in (
            {**good, "event_signature": ""},
            {
                **good,
                "event_signature": bob.public_event("news", tags=("a", "b"), channel_id="blog")["event_signature"],
            },
            {**good, "event": "olds"},
            {**good, "tags": ["b", "a"]},
            {**good, "timestamp": good["timestamp"] + 1},
            {**good, "channel_id": "other"},
            without(good, ("channel_id",)),
            {**alice.public_event("news"), "channel_id": "blog"},
        ):
            make = partial(alice.command, {"type": "PUBLISH_PUBLIC_EVENT", **event}, channel=PUBLIC_CHANNEL)
            self.is_refused(make, 401, "INVALID_EVENT_SIGNATURE")
        self.assertEqual(self.daemon_client.ask("GET", f"/public/{alice.did}").json["events"], [])

    def test_public_event_not_found(self) -> None:
        """404: an id that is unknown, somebody else's, or deleted already (reference 10.2)."""
        id_ = self.bob.publish("news")
        payload = {"type": "DELETE_PUBLIC_EVENT", "public_event_id": id_}
        for unknown in (id_, "nothing", "", "\0"):
            make = partial(self.alice.command, {**payload, "public_event_id": unknown}, channel=PUBLIC_CHANNEL)
            self.is_refused(make, 404, "PUBLIC_EVENT_NOT_FOUND")
        self.assertEqual(self.daemon_client.command(self.bob.command(payload, channel=PUBLIC_CHANNEL)).status, 200)
        self.is_refused(partial(self.bob.command, payload, channel=PUBLIC_CHANNEL), 404, "PUBLIC_EVENT_NOT_FOUND")

    def test_what_belongs_to_others(self) -> None:
        """Ids of somebody else's are passed over: nothing of hers changes, and the reply is that of a success."""
        bob, eve = self.bob, self.new_identity("eve")
        self.assertEqual(self.alice.tell(bob, "for bob").status, 200)
        self.alice.get(REQUEST, to=bob.did, **SEALED)
        bob.get("SAVE_EVENTS", events=[bob.event("mine", sender=self.alice.did, tags=("tag",))])
        (stored,) = bob.items("EVENTS", "events")
        waiting = [one["id"] for one in bob.pending()]
        requested = [one["id"] for one in bob.requests()]
        before = self.daemon_client.kept()
        eve.get("ACKNOWLEDGE_PENDING_EVENTS", event_ids=waiting)
        eve.get("ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS", communication_contract_ids=requested)
        eve.get("UPDATE_EVENT_TAGS", events=[{"event_id": stored["id"], "encrypted_tags": ["stolen"]}])
        self.assertEqual(self.daemon_client.kept(), before)
        for list_ in (eve.pending(), eve.requests(), eve.items("EVENTS", "events")):
            self.assertEqual(list_, [])

    def test_a_connection_survives_refusals(self) -> None:
        """One refusal after the other and then a success, all on one connection, each answer to its own question."""
        for way in WAYS:
            with contextlib.closing(self.daemon_client.connection()) as connection:
                for raw, code in (
                    (b"{", "INVALID_COMMAND"),
                    (self.query(self.carol), "UNAUTHORIZED_COMMAND"),
                    (self.query(sender_signing_key_id="#x"), "SENDER_SIGNING_KEY_NOT_FOUND"),
                    (b"", "INVALID_COMMAND"),
                ):
                    answered = send_request_on(connection, "POST", "/", raw, {"Content-Type": JSON, **way})
                    self.is_error(answered, answered.status, code)
                self.assertEqual(send_request_on(connection, "POST", "/", self.query(), way).status, 200)


class HTTPTests(RefusalDaemonTestCase):
    """What is refused before or without a command (reference 10.3, 12)."""

    def test_not_found(self) -> None:
        """404 at any other address."""
        for path in ("/nowhere", "/ws/x", "/.well-known", "/.well-known/x", "/did/x", "/didcomm.json"):
            for method in ("GET", "POST"):
                body = b"{}" if method == "POST" else None
                self.is_error(self.daemon_client.ask(method, path, body), 404, "NOT_FOUND")

    def test_method_not_allowed(self) -> None:
        """405 with the methods that there are."""
        for method, path, allowed in (
            ("PUT", "/", "GET, HEAD, POST, OPTIONS"),
            ("DELETE", "/", "GET, HEAD, POST, OPTIONS"),
            ("PATCH", "/.well-known/did.json", "GET, HEAD, OPTIONS"),
            ("POST", "/public/did:x:y", "GET, HEAD, OPTIONS"),
            ("POST", "/ws", "GET, OPTIONS"),
            ("HEAD", "/ws", "GET, OPTIONS"),
            ("POST", "/did", "GET, HEAD, OPTIONS"),
        ):
            answered = self.daemon_client.ask(method, path, b"{}" if method == "POST" else None)
            self.assertEqual(answered.headers["allow"], allowed)
            if method != "HEAD":
                self.is_error(answered, 405, "METHOD_NOT_ALLOWED")

    def test_upgrade_required(self) -> None:
        """426 where only sockets are."""
        for headers in ({}, {"Upgrade": "h2c", "Connection": "Upgrade"}):
            answered = self.daemon_client.ask("GET", "/ws", None, headers)
            self.is_error(answered, 426, "UPGRADE_REQUIRED")
            self.assertEqual(answered.headers["upgrade"], "websocket")

    def test_public_reads(self) -> None:
        """400 INVALID_COMMAND for what is no DID and for values that a parameter cannot have."""
        did = RawDecentrlClient(self.daemon_client, "carol").did
        for path in ("x", "", "%ff", "DID:x", f"{did}?page=-1", f"{did}?page_size=1001", f"{did}?after=now"):
            self.is_error(self.daemon_client.ask("GET", f"/public/{path}"), 400, "INVALID_COMMAND")
        for query in ("page=1&page=2", "page_size=0", "before=1e999", "tags=%ff", "channel_id=", "after="):
            self.is_error(self.daemon_client.ask("GET", f"/public/{did}?{query}"), 400, "INVALID_COMMAND")
        self.assertEqual(self.daemon_client.ask("GET", f"/public/{did}").json["events"], [])

    def test_too_large_by_its_length(self) -> None:
        """413 as soon as the length is known, and the connection ends; exactly the limit is read."""
        for headers in ({"Content-Type": JSON}, {"Content-Type": JSON, "X-Odd": "1"}, {"Expect": "100-continue"}):
            head = encode_request("POST", "/", None, {**headers, "Content-Length": str(LIMIT + 1)})
            for body in (b"", b" " * LIMIT):
                (answered,) = self.daemon_client.say(head + body)
                self.is_error(answered, 413, "PAYLOAD_TOO_LARGE")
                self.assertEqual(answered.headers.get("connection"), "close")
        for way in WAYS:
            self.is_error(self.daemon_client.command(b" " * LIMIT, **way), 400, "INVALID_COMMAND")
        for length in ("9" * 30, "1048577"):
            (answered,) = self.daemon_client.say(
                encode_request("POST", "/", None, {"Content-Length": length}) + b"{}"
            )
            self.is_error(answered, 413, "PAYLOAD_TOO_LARGE")

    def test_too_large_in_chunks(self) -> None:
        """413 as soon as there is too much, whatever else is to come."""
        head = encode_request("POST", "/", None, {"Content-Type": JSON, "Transfer-Encoding": "chunked"})
        chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
        (answered,) = self.daemon_client.say(head + chunk * 17)
        self.is_error(answered, 413, "PAYLOAD_TOO_LARGE")
        self.assertEqual(answered.headers.get("connection"), "close")

    def test_a_command_in_chunks(self) -> None:
        """What is small enough is a command however it is sent."""
        alice = self.new_identity("alice")
        raw = alice.command({"type": "SAVE_EVENTS", "events": [alice.event("x" * 100_000)]})
        with contextlib.closing(self.daemon_client.connection()) as connection:
            pieces = (raw[start : start + 999] for start in range(0, len(raw), 999))
            connection.request("POST", "/", pieces, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
            self.assertEqual(connection.getresponse().status, 200)
        self.assertEqual([one["payload"] for one in alice.items("EVENTS", "events")], ["x" * 100_000])

    def test_preflight(self) -> None:
        """A browser may ask before any of it (DCTRL-0004 3.4)."""
        for path in ("/", "/public/did:x:y", "/ws", "/nowhere"):
            answered = self.daemon_client.ask("OPTIONS", path, None, {"Origin": "https://x.example"})
            self.assertEqual((answered.status, answered.body), (204, b""))
            self.assertEqual(answered.headers["access-control-allow-origin"], "*")
            self.assertIn("POST", answered.headers["access-control-allow-methods"])
            self.assertIn("content-type", answered.headers["access-control-allow-headers"].lower())

    def test_too_large_for_an_answer(self) -> None:
        """413 for a page with more in it than anybody should have to keep in memory; smaller ones are served."""
        alice = self.new_identity("alice")
        ballast = "x" * 900_000
        for _ in range(20):
            alice.get("SAVE_EVENTS", events=[alice.event(ballast)])
            alice.publish(ballast)
        query = {"type": "QUERY_EVENTS", "pagination": {"page_size": 1000}}
        self.is_refused(partial(alice.command, query), 413, "PAYLOAD_TOO_LARGE")
        found = alice.get("QUERY_EVENTS", pagination={"page": 1, "page_size": 10})["payload"]
        self.assertEqual((len(found["events"]), found["pagination"]["total"]), (10, 20))
        path = f"/public/{alice.did}?page_size="
        self.is_error(self.daemon_client.ask("GET", f"{path}1000"), 413, "PAYLOAD_TOO_LARGE")
        self.assertEqual(len(self.daemon_client.ask("GET", f"{path}10").json["events"]), 10)

    def test_a_full_mailbox_can_be_read(self) -> None:
        """However much waits, a client that always asks for a hundred events gets them (reference 9)."""
        alice, bob = self.new_identity("alice"), self.new_identity("bob")
        alice.befriend(bob)
        statuses = [bob.tell(alice, "x" * 900_000).status for _ in range(20)]
        self.assertEqual(sorted(set(statuses)), [200, 429])
        found = alice.get("QUERY_PENDING_EVENTS", pagination={"page_size": 100})["payload"]
        self.assertEqual(len(found["pending_events"]), statuses.count(200))

    def test_the_label_of_an_envelope(self) -> None:
        """It takes a body away from Decentrl, which has then not seen its nonce."""
        alice = self.new_identity("alice")
        raw = alice.command({"type": "SAVE_EVENTS", "events": [alice.event("x")]})
        answered = self.daemon_client.command(raw, **{"Content-Type": "application/didcomm-encrypted+json"})
        self.assertEqual(answered.status, 400)
        self.assertIn("problem-report", answered.body.decode())
        self.assertEqual(self.daemon_client.command(raw).status, 200)

"""Refusals of Decentrl commands over HTTP; nothing of a refused command is stored (DCTRL-0004 11, reference 12)."""

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
from tests.integration.refusal_test_case import (
    HTTP_PATH_HEADERS,
    OTHER_MEDIATOR,
    REQUEST,
    RESPOND,
    SAVE,
    SEALED,
    RefusalDaemonTestCase,
)
from tests.protocol.decentrl.mutations import nested, paths_of, replaced, to_json, without

LIMIT = 1 << 20
NONCE = "6f1c1d52-6a0b-4e0e-9a37-0d6f3a1b2c{:02x}"


class CodeTests(RefusalDaemonTestCase):
    """One test for each error code of commands; Bob has a contract with Alice, who has none."""

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
        cls.bob.permit_sender(cls.alice)

    def make_query(self, sender: RawDecentrlClient | None = None, **header: Any) -> bytes:
        """A valid query except for these header members."""
        return (sender or self.alice).command({"type": "QUERY_EVENTS"}, **header)

    def registered_commands(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Commands that only registered identities may send: channel, type and members."""
        asked = "COMMUNICATION_CONTRACT"
        contract = {"signed_communication_contract": self.alice.contract_with(self.bob)}
        yield f"QUERY_PENDING_{asked}_REQUESTS", DIRECT_CHANNEL, {}
        yield f"ACKNOWLEDGE_PENDING_{asked}_REQUESTS", DIRECT_CHANNEL, {"communication_contract_ids": []}
        yield SAVE, DIRECT_CHANNEL, contract
        yield f"QUERY_{asked}S", DIRECT_CHANNEL, {}
        yield "QUERY_PENDING_EVENTS", DIRECT_CHANNEL, {}
        yield "ACKNOWLEDGE_PENDING_EVENTS", DIRECT_CHANNEL, {"event_ids": []}
        yield "SAVE_EVENTS", DIRECT_CHANNEL, {"events": [self.alice.stored_event("sealed", tags=("tag",))]}
        yield "QUERY_EVENTS", DIRECT_CHANNEL, {}
        yield "UPDATE_EVENT_TAGS", DIRECT_CHANNEL, {"events": []}
        yield "PUBLISH_PUBLIC_EVENT", PUBLIC_CHANNEL, self.alice.public_event("news")
        yield "DELETE_PUBLIC_EVENT", PUBLIC_CHANNEL, {"public_event_id": "a"}

    def test_malformed_body(self) -> None:
        """400 INVALID_COMMAND, under any media type (reference 12)."""
        good = json.loads(self.alice.command("sealed", to=self.bob.did, channel=PRIVATE_CHANNEL))
        bodies = [b"", b"{", b"null", b"[]", b'"x"', b"7", b"\xff", b"{}", b"\xef\xbb\xbf{}", b"[" * 100_000]
        bodies += [to_json(without(good, path)) for path in paths_of(good)]
        for path in paths_of(good):
            if path != ("signature",):  # any text is well-formed, if not correct
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
        before = self.daemon_client.read_rows()
        for body in bodies:
            for way in HTTP_PATH_HEADERS:
                self.assert_error(self.daemon_client.post_command(body, **way), 400, "INVALID_COMMAND")
        for label in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x", ""):
            for way in HTTP_PATH_HEADERS:
                self.assert_error(
                    self.daemon_client.post_command(b"{}", **{**way, "Content-Type": label}), 400, "INVALID_COMMAND"
                )
        self.assertEqual(self.daemon_client.read_rows(), before)

    def test_malformed_payload(self) -> None:
        """400 INVALID_COMMAND: any member of any payload missing, or of another type."""
        before = self.daemon_client.read_rows()
        for name, channel, members in self.registered_commands():
            payload = {"type": name, **members}
            for path in paths_of(payload):
                broken = [replaced(payload, path, {"a": 1})]
                if isinstance(path[-1], str):  # a list without one of its elements is still a list
                    broken.append(without(payload, path))
                for one in broken:
                    raw = self.alice.command(one, channel=channel)
                    self.assert_error(self.daemon_client.post_command(raw), 400, "INVALID_COMMAND")
        self.assertEqual(self.daemon_client.read_rows(), before)

    def test_payload_out_of_bounds(self) -> None:
        """400 INVALID_COMMAND: invalid pages, too many items, and commands of another channel."""
        before = self.daemon_client.read_rows()
        event = self.alice.stored_event("x")
        pages: tuple[Any, ...] = ({"page": -1}, {"page_size": 0}, {"page_size": 1001}, {"page": 1.5}, {"page": True})
        payloads: list[dict[str, Any]] = [
            *({"type": "QUERY_EVENTS", "pagination": pagination} for pagination in (*pages, [], None)),
            {"type": "QUERY_EVENTS", "filter": {"after_timestamp": "0"}},
            {"type": "SAVE_EVENTS", "events": [event] * (MANY + 1)},
            {"type": "SAVE_EVENTS", "events": [event, {**event, "timestamp": "now"}]},
            {"type": "SAVE_EVENTS", "events": [self.alice.stored_event("x", tags=("tag",) * (MANY + 1))]},
            {"type": "SAVE_EVENTS", "events": [self.alice.stored_event("x", tags=("t" * 1025,))]},
            {"type": REQUEST, **SEALED, "encrypted_contract_request": "A" * 100_000},
            {"type": REQUEST, **SEALED, "requestor_ephemeral_public_key": "A" * 1025},
            {"type": "QUERY_EVERYTHING"},
            {"type": "PUBLISH_PUBLIC_EVENT", **self.alice.public_event("news")},
        ]
        for payload in payloads:
            self.assert_error(self.daemon_client.post_command(self.alice.command(payload)), 400, "INVALID_COMMAND")
        self.assertEqual(self.daemon_client.read_rows(), before)

    def test_malformed_body_does_not_use_its_nonce(self) -> None:
        """The nonce can be used afterwards (reference 6.1)."""
        nonce = NONCE.format(0)
        for broken in (b"{", to_json(replaced(json.loads(self.make_query(nonce=nonce)), ("payload",), "x"))):
            self.assert_error(self.daemon_client.post_command(broken), 400, "INVALID_COMMAND")
        self.assert_error(
            self.daemon_client.post_command(self.alice.command({"type": "NO_SUCH"}, nonce=nonce)),
            400,
            "INVALID_COMMAND",
        )
        self.assertEqual(self.daemon_client.post_command(self.make_query(nonce=nonce)).status, 200)
        self.assert_error(self.daemon_client.post_command(self.make_query(nonce=nonce)), 401, "DUPLICATE_NONCE")

    def test_inconsistent_request(self) -> None:
        """400 INVALID_COMMAND, and the nonce is used."""
        alice, bob, carol = self.alice, self.bob, self.carol
        other_terms, own_terms = bob.contract_with(carol), alice.contract_with(bob)
        for members, to in (
            ({"type": SAVE, "signed_communication_contract": other_terms}, None),
            ({"type": RESPOND, "signed_communication_contract": other_terms}, None),
            ({"type": RESPOND, "signed_communication_contract": alice.contract_with(carol)}, bob.did),
            ({"type": SAVE, "signed_communication_contract": alice.contract_with(alice)}, None),
            ({"type": SAVE, "signed_communication_contract": {**own_terms, "ballast": "x" * 100_000}}, None),
            ({"type": SAVE, "signed_communication_contract": {**own_terms, "requestor_signature": None}}, None),
            ({"type": REQUEST, **alice.encrypt_contract_request({"no": "contract"})}, None),
            ({"type": REQUEST, **alice.encrypt_contract_request([])}, None),
            ({"type": REQUEST, **alice.registration_request(expires_at=int(unix_time()) - 1)}, None),
            ({"type": REQUEST, **bob.registration_request()}, None),
            ({"type": REQUEST, **alice.registration_request(recipient_did=bob.did)}, None),
            (
                {"type": REQUEST, **alice.registration_request(recipient_signing_key_id=bob.identity.signing_key_id)},
                None,
            ),
            ({"type": REQUEST, **alice.registration_request(expires_at="9999999999")}, None),
            ({"type": REQUEST, **alice.registration_request(), "requestor_ephemeral_public_key": "AAAA"}, None),
            (
                {"type": REQUEST, **alice.registration_request(), "requestor_ephemeral_public_key": "A" * 43 + "="},
                None,
            ),
            ({"type": REQUEST, **alice.registration_request(), "encrypted_contract_request": "?"}, None),
            ({"type": REQUEST, **alice.registration_request(), "encrypted_contract_request": "AAAA"}, None),
            (
                {
                    "type": REQUEST,
                    **alice.registration_request(),
                    "requestor_ephemeral_public_key": encode_base64(generate_key_pair()[1]),
                },
                None,
            ),
        ):
            with self.subTest(members=members):
                self.assert_refused(partial(alice.command, members, to=to), 400, "INVALID_COMMAND")
        nonce = NONCE.format(1)
        requests = alice.command({"type": SAVE, "signed_communication_contract": other_terms}, nonce=nonce)
        self.assert_error(self.daemon_client.post_command(requests), 400, "INVALID_COMMAND")
        self.assert_error(self.daemon_client.post_command(self.make_query(nonce=nonce)), 401, "DUPLICATE_NONCE")

    def test_invalid_signature(self) -> None:
        """401: another key, another text, truncated, or empty; in every channel (DCTRL-0004 6.2)."""
        alice, bob = self.alice, self.bob
        for make in (
            lambda: alice.command({"type": "SAVE_EVENTS", "events": [alice.stored_event("x")]}),
            lambda: alice.command("sealed", to=bob.did, channel=PRIVATE_CHANNEL),
            lambda: alice.command(
                {"type": "PUBLISH_PUBLIC_EVENT", **alice.public_event("news")}, channel=PUBLIC_CHANNEL
            ),
            lambda: alice.command({"type": REQUEST, **alice.registration_request()}),
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
                self.assert_refused(partial(self.alter_signed, make, change), 401, "INVALID_SIGNATURE")

    def alter_signed(self, make: Callable[[], bytes], change: Callable[[Any], Any]) -> bytes:
        """Alter a command after it was signed."""
        return to_json(change(json.loads(make())))

    def test_invalid_contract_signature(self) -> None:
        """401: a contract not signed by both, or whose keys cannot be found (reference 7.3)."""
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
        unknown = {**terms, "requestor_did": OTHER_MEDIATOR, "requestor_signing_key_id": f"{OTHER_MEDIATOR}#signing"}
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
                self.assert_refused(partial(alice.command, {"type": SAVE, **members}), 401, "INVALID_SIGNATURES")
                if signed["communication_contract"]["requestor_did"] == bob.did:
                    respond = partial(alice.command, {"type": RESPOND, **members}, to=bob.did)
                    self.assert_refused(respond, 401, "INVALID_SIGNATURES")
        unsigned = {"communication_contract": alice.contract_terms(alice.mediator), "requestor_signature": "AAAA"}
        foreign = alice.contract_terms(alice.mediator, requestor_signing_key_id=bob.identity.signing_key_id)
        signed_by_bob = {"communication_contract": foreign, "requestor_signature": bob.identity.sign(foreign)}
        for plaintext in (unsigned, signed_by_bob):
            make = partial(alice.command, {"type": REQUEST, **alice.encrypt_contract_request(plaintext)})
            self.assert_refused(make, 401, "INVALID_SIGNATURES")

    def test_unauthorized_command(self) -> None:
        """401 for every command to the mediator that is addressed to another DID or from an unregistered sender."""
        for name, channel, members in self.registered_commands():
            payload = {"type": name, **members}
            with self.subTest(name=name):
                for to in (self.bob.did, self.carol.did, OTHER_MEDIATOR, "nobody"):
                    make = partial(self.alice.command, payload, to=to, channel=channel)
                    self.assert_refused(make, 401, "UNAUTHORIZED_COMMAND")
                make = partial(self.carol.command, payload, channel=channel)
                self.assert_refused(make, 401, "UNAUTHORIZED_COMMAND")

    def test_timestamp_out_of_range(self) -> None:
        """401: more than five minutes before or after its arrival; the nonce is not used (DCTRL-0004 5.1)."""
        nonce = NONCE.format(2)
        for off in (-301_000, 360_000, -(10**13), 10**13):
            make = partial(self.make_query, timestamp_ms=int(unix_time() * 1000) + off, nonce=nonce)
            self.assert_refused(make, 401, "TIMESTAMP_OUT_OF_RANGE")
        for off in (-240_000, 290_000):
            self.assertEqual(
                self.daemon_client.post_command(self.make_query(timestamp_ms=int(unix_time() * 1000) + off)).status,
                200,
            )
        self.assertEqual(self.daemon_client.post_command(self.make_query(nonce=nonce)).status, 200)

    def test_duplicate_nonce(self) -> None:
        """401 for a repeated command, and for any command with the same sender and nonce (DCTRL-0004 5.2)."""
        nonce = NONCE.format(3)
        first = self.alice.command("once", to=self.bob.did, channel=PRIVATE_CHANNEL, nonce=nonce)
        self.assertEqual(self.daemon_client.post_command(first).status, 200)
        self.assert_refused(lambda: first, 401, "DUPLICATE_NONCE")
        self.assert_refused(lambda: self.make_query(nonce=nonce), 401, "DUPLICATE_NONCE")
        self.assert_refused(
            lambda: self.alice.command("other", to=self.bob.did, channel=PRIVATE_CHANNEL, nonce=nonce),
            401,
            "DUPLICATE_NONCE",
        )
        self.assertEqual(self.daemon_client.post_command(self.make_query(self.bob, nonce=nonce)).status, 200)

    def test_failed_authentication_uses_the_nonce(self) -> None:
        """A nonce is used once its timestamp was accepted (DCTRL-0004 5.4)."""
        changes: list[dict[str, Any]] = [{"sender_signing_key_id": "#signing"}, {"recipient_did": OTHER_MEDIATOR}]
        for number, change in enumerate(changes):
            nonce = NONCE.format(10 + number)
            self.assertNotEqual(self.daemon_client.post_command(self.make_query(nonce=nonce, **change)).status, 200)
            self.assert_refused(partial(self.make_query, nonce=nonce), 401, "DUPLICATE_NONCE")

    def test_concurrent_copies_are_carried_out_once(self) -> None:
        """One of many copies that arrive at the same time."""
        dave = self.register_identity("dave")
        dave.permit_sender(self.alice)
        for round_ in range(5):
            raw = self.alice.command(f"round {round_}", to=dave.did, channel=PRIVATE_CHANNEL)
            answers = self.daemon_client.post_concurrently([raw] * 12)
            self.assertEqual(sorted(answer.status for answer in answers), [200] + [401] * 11)
            for answer in answers:
                if answer.status == 401:
                    self.assert_error(answer, 401, "DUPLICATE_NONCE")
        self.assertEqual(
            [one["payload"] for one in dave.pending_events()], [f"round {number}" for number in range(5)]
        )

    def test_concurrent_commands_do_not_interfere(self) -> None:
        """Valid and invalid commands that arrive together are answered and stored independently."""
        dave, eve = self.register_identity("dave"), self.register_identity("eve")
        dave.permit_sender(self.alice)
        for _ in range(5):
            doubled = self.alice.command("twice", to=dave.did, channel=PRIVATE_CHANNEL)
            commands = list(self.mixed_commands(dave, eve))
            responses = [
                response.json
                for response in self.daemon_client.post_concurrently(
                    [*(raw for raw, _ in commands), doubled, doubled]
                )
            ]
            codes = [response["code"] if response["type"] == "ERROR" else "SUCCESS" for response in responses]
            self.assertEqual(codes[:-2], [code for _, code in commands])
            self.assertEqual(sorted(codes[-2:]), ["DUPLICATE_NONCE", "SUCCESS"])
        self.assertEqual(sorted(one["payload"] for one in dave.pending_events()), ["kept"] * 10 + ["twice"] * 5)
        self.assertEqual([one["payload"] for one in dave.query("EVENTS", "events")], ["kept"] * 20)
        self.assertEqual(len(dave.query("COMMUNICATION_CONTRACTS", "communication_contracts")), 6)
        self.assertEqual(len(dave.contract_requests()), 5)
        self.assertEqual(len(self.daemon_client.request("GET", f"/public/{dave.did}").json["events"]), 5)

    def mixed_commands(self, dave: RawDecentrlClient, eve: RawDecentrlClient) -> Iterator[tuple[bytes, str]]:
        """Commands and their outcomes; only Alice may send to Dave."""
        alice, carol = self.alice, self.carol
        save = {"type": "SAVE_EVENTS", "events": [dave.stored_event("kept", tags=("a",)), dave.stored_event("kept")]}
        contract = dave.contract_with(RawDecentrlClient(self.daemon_client, "somebody"))
        yield alice.command("kept", to=dave.did, channel=PRIVATE_CHANNEL), "SUCCESS"
        yield eve.command("never", to=dave.did, channel=PRIVATE_CHANNEL), "COMMUNICATION_CONTRACT_NOT_FOUND"
        yield alice.command("never", to=carol.did, channel=PRIVATE_CHANNEL), "RECIPIENT_NOT_REGISTERED"
        yield alice.command("kept", to=dave.did, channel=PRIVATE_CHANNEL), "SUCCESS"
        yield alice.command("never", to=OTHER_MEDIATOR, channel=PRIVATE_CHANNEL), "RECIPIENT_NOT_FOUND"
        yield dave.command(save), "SUCCESS"
        yield carol.command({"type": "SAVE_EVENTS", "events": [carol.stored_event("never")]}), "UNAUTHORIZED_COMMAND"
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
        """
        404: a sender whose DID cannot be resolved locally, whatever its method; nothing is fetched (reference 2.2).
        """
        parts = self.alice.did.split(":")
        broken = (":".join(parts[:5]), ":".join([*parts, "x"]), self.alice.did.replace(":z6Mk", ":z6LS", 1))
        for did in (
            OTHER_MEDIATOR,
            "did:key:z6MkhaXg",
            "did:decentrl:x",
            "nobody",
            *broken,
            *bad_dids(self.alice.did),
        ):
            make = partial(self.make_query, sender_did=did, sender_signing_key_id=f"{did}#signing")
            self.assert_refused(make, 404, "SENDER_NOT_FOUND")

    def test_sender_signing_key_not_found(self) -> None:
        """404: anything but the full id of the sender's signing key (reference 2.2)."""
        alice = self.alice
        for key_id in (
            "#signing",
            alice.did,
            f"{alice.did}#prekey",
            f"{alice.did}#",
            self.bob.identity.signing_key_id,
            *bad_dids(alice.identity.signing_key_id),
        ):
            make = partial(self.make_query, sender_signing_key_id=key_id)
            self.assert_refused(make, 404, "SENDER_SIGNING_KEY_NOT_FOUND")
        make = partial(
            self.make_query, sender_did=alice.mediator, sender_signing_key_id=alice.identity.signing_key_id
        )
        self.assert_refused(make, 404, "SENDER_SIGNING_KEY_NOT_FOUND")

    def test_recipient_not_found(self) -> None:
        """404: an event for a DID that cannot be resolved locally (DCTRL-0004 7.2)."""
        for did in (OTHER_MEDIATOR, "did:decentrl:x", "nobody", *bad_dids(self.bob.did)):
            make = partial(self.alice.command, "sealed", to=did, channel=PRIVATE_CHANNEL)
            self.assert_refused(make, 404, "RECIPIENT_NOT_FOUND")

    def test_recipient_not_registered(self) -> None:
        """404: an event, request or contract for an unregistered DID, the mediator included."""
        alice, carol = self.alice, self.carol
        for to in (carol.did, alice.mediator):
            make = partial(alice.command, "sealed", to=to, channel=PRIVATE_CHANNEL)
            self.assert_refused(make, 404, "RECIPIENT_NOT_REGISTERED")
        request = {"encrypted_contract_request": "AAAA", "requestor_ephemeral_public_key": "AAAA"}
        for to in (carol.did, OTHER_MEDIATOR, "nobody", *bad_dids(carol.did)):
            self.assert_refused(
                partial(alice.command, {"type": REQUEST, **request}, to=to), 404, "RECIPIENT_NOT_REGISTERED"
            )
        contract = {"type": RESPOND, "signed_communication_contract": carol.contract_with(alice)}
        for to in (carol.did, alice.mediator):
            self.assert_refused(partial(alice.command, contract, to=to), 404, "RECIPIENT_NOT_REGISTERED")

    def test_contract_not_found(self) -> None:
        """404: the recipient has no unexpired contract with the sender; the sender's own contract does not count."""
        alice, dave = self.alice, self.register_identity("dave")
        make = partial(alice.command, "sealed", to=dave.did, channel=PRIVATE_CHANNEL)
        self.assert_refused(make, 404, "COMMUNICATION_CONTRACT_NOT_FOUND")
        alice.permit_sender(dave)
        self.assert_refused(make, 404, "COMMUNICATION_CONTRACT_NOT_FOUND")
        dave.permit_sender(alice, expires_at=int(unix_time()) - 1)
        self.assert_refused(make, 404, "COMMUNICATION_CONTRACT_NOT_FOUND")
        dave.permit_sender(self.bob)
        self.assert_refused(make, 404, "COMMUNICATION_CONTRACT_NOT_FOUND")
        self.assertEqual(dave.pending_events(), [])
        dave.permit_sender(alice)
        self.assertEqual(self.daemon_client.post_command(make()).status, 200)

    def test_invalid_event_signature(self) -> None:
        """401: a published event must be signed completely by the key of the command (reference 10.1)."""
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
            self.assert_refused(make, 401, "INVALID_EVENT_SIGNATURE")
        self.assertEqual(self.daemon_client.request("GET", f"/public/{alice.did}").json["events"], [])

    def test_public_event_not_found(self) -> None:
        """404: an id that is unknown, of another identity, or deleted (reference 10.2)."""
        id_ = self.bob.publish("news")
        payload = {"type": "DELETE_PUBLIC_EVENT", "public_event_id": id_}
        for unknown in (id_, "nothing", "", "\0"):
            make = partial(self.alice.command, {**payload, "public_event_id": unknown}, channel=PUBLIC_CHANNEL)
            self.assert_refused(make, 404, "PUBLIC_EVENT_NOT_FOUND")
        self.assertEqual(
            self.daemon_client.post_command(self.bob.command(payload, channel=PUBLIC_CHANNEL)).status, 200
        )
        self.assert_refused(partial(self.bob.command, payload, channel=PUBLIC_CHANNEL), 404, "PUBLIC_EVENT_NOT_FOUND")

    def test_ignores_ids_of_other_identities(self) -> None:
        """Nothing of theirs changes, and the reply is a success."""
        bob, eve = self.bob, self.register_identity("eve")
        self.assertEqual(self.alice.send_event(bob, "for bob").status, 200)
        self.alice.execute(REQUEST, to=bob.did, **SEALED)
        bob.execute("SAVE_EVENTS", events=[bob.stored_event("mine", sender=self.alice.did, tags=("tag",))])
        (stored,) = bob.query("EVENTS", "events")
        waiting = [one["id"] for one in bob.pending_events()]
        requested = [one["id"] for one in bob.contract_requests()]
        before = self.daemon_client.read_rows()
        eve.execute("ACKNOWLEDGE_PENDING_EVENTS", event_ids=waiting)
        eve.execute("ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS", communication_contract_ids=requested)
        eve.execute("UPDATE_EVENT_TAGS", events=[{"event_id": stored["id"], "encrypted_tags": ["stolen"]}])
        self.assertEqual(self.daemon_client.read_rows(), before)
        for list_ in (eve.pending_events(), eve.contract_requests(), eve.query("EVENTS", "events")):
            self.assertEqual(list_, [])

    def test_connection_stays_open_after_refusals(self) -> None:
        """Refusals and then a success on one connection, each response to its own request."""
        for way in HTTP_PATH_HEADERS:
            with contextlib.closing(self.daemon_client.connection()) as connection:
                for raw, code in (
                    (b"{", "INVALID_COMMAND"),
                    (self.make_query(self.carol), "UNAUTHORIZED_COMMAND"),
                    (self.make_query(sender_signing_key_id="#x"), "SENDER_SIGNING_KEY_NOT_FOUND"),
                    (b"", "INVALID_COMMAND"),
                ):
                    answered = send_request_on(connection, "POST", "/", raw, {"Content-Type": JSON, **way})
                    self.assert_error(answered, answered.status, code)
                self.assertEqual(send_request_on(connection, "POST", "/", self.make_query(), way).status, 200)


class HTTPTests(RefusalDaemonTestCase):
    """Refusals before or without a command (reference 10.3, 12)."""

    def test_not_found(self) -> None:
        """404 at any other path."""
        for path in ("/nowhere", "/ws/x", "/.well-known", "/.well-known/x", "/did/x", "/didcomm.json"):
            for method in ("GET", "POST"):
                body = b"{}" if method == "POST" else None
                self.assert_error(self.daemon_client.request(method, path, body), 404, "NOT_FOUND")

    def test_method_not_allowed(self) -> None:
        """405 with the allowed methods."""
        for method, path, allowed in (
            ("PUT", "/", "GET, HEAD, POST, OPTIONS"),
            ("DELETE", "/", "GET, HEAD, POST, OPTIONS"),
            ("PATCH", "/.well-known/did.json", "GET, HEAD, OPTIONS"),
            ("POST", "/public/did:x:y", "GET, HEAD, OPTIONS"),
            ("POST", "/ws", "GET, OPTIONS"),
            ("HEAD", "/ws", "GET, OPTIONS"),
            ("POST", "/did", "GET, HEAD, OPTIONS"),
        ):
            answered = self.daemon_client.request(method, path, b"{}" if method == "POST" else None)
            self.assertEqual(answered.headers["allow"], allowed)
            if method != "HEAD":
                self.assert_error(answered, 405, "METHOD_NOT_ALLOWED")

    def test_upgrade_required(self) -> None:
        """426 where only WebSockets are served."""
        for headers in ({}, {"Upgrade": "h2c", "Connection": "Upgrade"}):
            answered = self.daemon_client.request("GET", "/ws", None, headers)
            self.assert_error(answered, 426, "UPGRADE_REQUIRED")
            self.assertEqual(answered.headers["upgrade"], "websocket")

    def test_invalid_public_read(self) -> None:
        """400 INVALID_COMMAND for an invalid DID or parameter."""
        did = RawDecentrlClient(self.daemon_client, "carol").did
        for path in ("x", "", "%ff", "DID:x", f"{did}?page=-1", f"{did}?page_size=1001", f"{did}?after=now"):
            self.assert_error(self.daemon_client.request("GET", f"/public/{path}"), 400, "INVALID_COMMAND")
        for query in ("page=1&page=2", "page_size=0", "before=1e999", "tags=%ff", "channel_id=", "after="):
            self.assert_error(self.daemon_client.request("GET", f"/public/{did}?{query}"), 400, "INVALID_COMMAND")
        self.assertEqual(self.daemon_client.request("GET", f"/public/{did}").json["events"], [])

    def test_content_length_over_limit(self) -> None:
        """413 as soon as the length is known, and the connection closes; a body of exactly the limit is read."""
        for headers in ({"Content-Type": JSON}, {"Content-Type": JSON, "X-Odd": "1"}, {"Expect": "100-continue"}):
            head = encode_request("POST", "/", None, {**headers, "Content-Length": str(LIMIT + 1)})
            for body in (b"", b" " * LIMIT):
                (answered,) = self.daemon_client.send_raw(head + body)
                self.assert_error(answered, 413, "PAYLOAD_TOO_LARGE")
                self.assertEqual(answered.headers.get("connection"), "close")
        for way in HTTP_PATH_HEADERS:
            self.assert_error(self.daemon_client.post_command(b" " * LIMIT, **way), 400, "INVALID_COMMAND")
        for length in ("9" * 30, "1048577"):
            (answered,) = self.daemon_client.send_raw(
                encode_request("POST", "/", None, {"Content-Length": length}) + b"{}"
            )
            self.assert_error(answered, 413, "PAYLOAD_TOO_LARGE")

    def test_chunked_body_over_limit(self) -> None:
        """413 as soon as the limit is exceeded."""
        head = encode_request("POST", "/", None, {"Content-Type": JSON, "Transfer-Encoding": "chunked"})
        chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
        (answered,) = self.daemon_client.send_raw(head + chunk * 17)
        self.assert_error(answered, 413, "PAYLOAD_TOO_LARGE")
        self.assertEqual(answered.headers.get("connection"), "close")

    def test_accepts_chunked_command(self) -> None:
        """A small body is a command in any transfer coding."""
        alice = self.register_identity("alice")
        raw = alice.command({"type": "SAVE_EVENTS", "events": [alice.stored_event("x" * 100_000)]})
        with contextlib.closing(self.daemon_client.connection()) as connection:
            pieces = (raw[start : start + 999] for start in range(0, len(raw), 999))
            connection.request("POST", "/", pieces, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
            self.assertEqual(connection.getresponse().status, 200)
        self.assertEqual([one["payload"] for one in alice.query("EVENTS", "events")], ["x" * 100_000])

    def test_answers_cors_preflight(self) -> None:
        """Browsers may send a preflight request for each path (DCTRL-0004 3.4)."""
        for path in ("/", "/public/did:x:y", "/ws", "/nowhere"):
            answered = self.daemon_client.request("OPTIONS", path, None, {"Origin": "https://x.example"})
            self.assertEqual((answered.status, answered.body), (204, b""))
            self.assertEqual(answered.headers["access-control-allow-origin"], "*")
            self.assertIn("POST", answered.headers["access-control-allow-methods"])
            self.assertIn("content-type", answered.headers["access-control-allow-headers"].lower())

    def test_page_over_response_limit(self) -> None:
        """413 for a page too large for one response; smaller ones are served."""
        alice = self.register_identity("alice")
        filler = "x" * 900_000
        for _ in range(20):
            alice.execute("SAVE_EVENTS", events=[alice.stored_event(filler)])
            alice.publish(filler)
        query = {"type": "QUERY_EVENTS", "pagination": {"page_size": 1000}}
        self.assert_refused(partial(alice.command, query), 413, "PAYLOAD_TOO_LARGE")
        found = alice.execute("QUERY_EVENTS", pagination={"page": 1, "page_size": 10})["payload"]
        self.assertEqual((len(found["events"]), found["pagination"]["total"]), (10, 20))
        path = f"/public/{alice.did}?page_size="
        self.assert_error(self.daemon_client.request("GET", f"{path}1000"), 413, "PAYLOAD_TOO_LARGE")
        self.assertEqual(len(self.daemon_client.request("GET", f"{path}10").json["events"]), 10)

    def test_full_queue_can_be_read_by_pages(self) -> None:
        """A client that requests pages of a hundred events gets all of them (reference 9)."""
        alice, bob = self.register_identity("alice"), self.register_identity("bob")
        alice.permit_sender(bob)
        statuses = [bob.send_event(alice, "x" * 900_000).status for _ in range(20)]
        self.assertEqual(sorted(set(statuses)), [200, 429])
        found = alice.execute("QUERY_PENDING_EVENTS", pagination={"page_size": 100})["payload"]
        self.assertEqual(len(found["pending_events"]), statuses.count(200))

    def test_envelope_media_type_is_not_decentrl(self) -> None:
        """A body with that media type is no command, and does not use its nonce."""
        alice = self.register_identity("alice")
        raw = alice.command({"type": "SAVE_EVENTS", "events": [alice.stored_event("x")]})
        answered = self.daemon_client.post_command(raw, **{"Content-Type": "application/didcomm-encrypted+json"})
        self.assertEqual(answered.status, 400)
        self.assertIn("problem-report", answered.body.decode())
        self.assertEqual(self.daemon_client.post_command(raw).status, 200)

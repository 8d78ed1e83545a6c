"""Contracts between identities (DCTRL-0004 8.1 to 8.6, reference section 7)."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol.decentrl.crypto import sign_json
from tests.in_memory_identities import DIRECT, InMemoryIdentity, bad_dids, code_of, register_two_identities
from tests.protocol.json_texts import NO_JSON, NUMBERS, UNREADABLE

REQUEST = "REQUEST_COMMUNICATION_CONTRACT"
RESPONSE = "COMMUNICATION_CONTRACT_RESPONSE"
SAVE = "SAVE_COMMUNICATION_CONTRACT"
SEALED = {"encrypted_contract_request": "c2VhbGVk", "requestor_ephemeral_public_key": "a2V5"}
UPDATED = [{"type": "CONTRACTS_UPDATED"}]


class RequestTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory, self.alice, self.bob = register_two_identities(self)
        self.carol = InMemoryIdentity(self.in_memory, "carol")

    def pending_requests(self, new_identity: InMemoryIdentity) -> list[dict[str, Any]]:
        return new_identity.query(
            "PENDING_COMMUNICATION_CONTRACT_REQUESTS", "pending_communication_contract_requests"
        )

    def test_request_of_unregistered_sender(self) -> None:
        """
        An unregistered sender may ask; the request is queued unchanged, and its recipient's sockets are notified.
        """
        socket = self.bob.connect()
        body = json.loads(self.carol.ask(REQUEST, to=self.bob.did, **SEALED).body)
        self.assertEqual(body, {"type": "SUCCESS", "code": "REQUESTED"})
        (request,) = self.pending_requests(self.bob)
        self.assertEqual({**request, "id": ""}, {"id": "", "sender_did": self.carol.did, **SEALED})
        self.assertEqual(socket.take_frames(), UPDATED)

    def test_request_to_unregistered_recipient(self) -> None:
        """Valid and invalid DIDs alike are not registered."""
        for did in (self.carol.did, "did:web:elsewhere.example", "nonsense", *bad_dids(self.bob.did)):
            reply = self.alice.ask(REQUEST, to=did, **SEALED)
            self.assertEqual(code_of(reply), (404, "RECIPIENT_NOT_REGISTERED"))

    def test_acknowledge(self) -> None:
        """Acknowledged requests are removed; those of others stay, whoever names them."""
        self.alice.ask(REQUEST, to=self.bob.did, **SEALED)
        self.carol.ask(REQUEST, to=self.bob.did, **SEALED)
        first, second = (request["id"] for request in self.pending_requests(self.bob))
        acknowledge = "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS"
        self.alice.answer(acknowledge, communication_contract_ids=[first, second])
        self.bob.answer(acknowledge, communication_contract_ids=[first, "unknown"])
        self.assertEqual([request["id"] for request in self.pending_requests(self.bob)], [second])

    def test_quota(self) -> None:
        """Above the quota requests get 429; nothing is evicted."""
        in_memory, _, bob = register_two_identities(
            self, decentrl={"max_contract_requests": 3, "max_contract_requests_per_sender": 2}
        )
        carol, dave = InMemoryIdentity(in_memory, "carol"), InMemoryIdentity(in_memory, "dave")
        asked = [carol.ask(REQUEST, to=bob.did, **SEALED) for _ in range(3)]
        self.assertEqual([reply.status for reply in asked], [200, 200, 429])
        self.assertEqual(code_of(asked[2]), (429, "RATE_LIMITED"))
        self.assertIsNotNone(asked[2].retry_after)
        self.assertEqual([dave.ask(REQUEST, to=bob.did, **SEALED).status for _ in range(2)], [200, 429])
        requests = self.pending_requests(bob)
        self.assertEqual([request["sender_did"] for request in requests], [carol.did, carol.did, dave.did])
        bob.answer(
            "ACKNOWLEDGE_PENDING_COMMUNICATION_CONTRACT_REQUESTS", communication_contract_ids=[requests[0]["id"]]
        )
        self.assertEqual(dave.ask(REQUEST, to=bob.did, **SEALED).status, 200)


class StoredContractTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory, self.alice, self.bob = register_two_identities(self)
        self.carol = InMemoryIdentity(self.in_memory, "carol")

    def stored_contracts(self, new_identity: InMemoryIdentity, **filter_: Any) -> list[dict[str, Any]]:
        found = new_identity.query("COMMUNICATION_CONTRACTS", "communication_contracts", filter=filter_)
        return [item["signed_communication_contract"] for item in found]

    def respond(self, sender: InMemoryIdentity, signed: Any, to: str) -> tuple[int, str]:
        reply = sender.ask(RESPONSE, to=to, signed_communication_contract=signed)
        return (200, "") if reply.status == 200 else code_of(reply)

    def test_saved_for_sender(self) -> None:
        """The contract is returned unchanged, with unknown members, and the sender's sockets are notified."""
        signed = {**self.bob.contract_with(self.alice), "note": {"x": [1.5, None]}}
        sockets = [self.alice.connect(), self.alice.connect()]
        other = self.bob.connect()
        self.assertEqual(self.alice.save(signed), {"type": "SUCCESS"})
        self.assertEqual(self.stored_contracts(self.alice), [signed])
        self.assertEqual(self.stored_contracts(self.bob), [])
        self.assertEqual([socket.take_frames() for socket in sockets], [UPDATED, UPDATED])
        self.assertEqual(other.take_frames(), [])

    def test_saved_twice(self) -> None:
        """The same contract is stored once, whatever its notation and surrounding members."""
        signed = self.bob.contract_with(self.alice)
        self.alice.save(signed)
        self.alice.save(dict(reversed(signed.items())))
        self.alice.save({**signed, "more": "x"})
        self.assertEqual(self.stored_contracts(self.alice), [signed])

    def test_stored_unchanged(self) -> None:
        """Notation, escapes and white space are kept; both signatures verify."""
        note = f'{{ "n" : [{", ".join(NUMBERS)}],\t"\\u0061":"\\ud834\\udd1e \\/", "b" :{{ }} }}'
        for sender, owner, type_ in ((self.alice, self.alice, SAVE), (self.carol, self.alice, RESPONSE)):
            signed = self.alice.contract_with(self.carol, note=json.loads(note))
            written = json.dumps({**signed, "more": json.loads(note)})
            text = written.replace(json.dumps(json.loads(note)), note)
            self.assertEqual(text.count(note), 2)
            payload = {"type": type_, "signed_communication_contract": {**signed, "more": json.loads(note)}}
            raw = sender.command(payload).replace(written.encode(), text.encode())
            self.assertEqual(self.in_memory.receive_command(raw).status, 200)
            found = owner.ask("QUERY_COMMUNICATION_CONTRACTS").body
            self.assertIn(b'"signed_communication_contract":' + text.encode() + b"}", found)

    def test_unresolvable_dids(self) -> None:
        """Values that are no DID get the same response: no valid signature, and no match of a filter."""
        for did in ("nobody", *bad_dids(self.carol.did)):
            signed = self.alice.contract_with(self.carol, recipient_did=did)
            reply = self.alice.ask(SAVE, signed_communication_contract=signed)
            self.assertEqual(code_of(reply), (401, "INVALID_SIGNATURES"), did)
            self.assertEqual(self.stored_contracts(self.alice, did=did), [])

    def test_unstorable_contract(self) -> None:
        """JSON on which parsers disagree is refused with one error."""
        signed = {**self.alice.contract_with(self.carol), "note": "NOTE"}
        raw = self.alice.command({"type": SAVE, "signed_communication_contract": signed})
        for bad in (*UNREADABLE, *NO_JSON, '{"a":1,"a":2}', '{"a":1,"\\u0061":1}'):
            reply = self.in_memory.receive_command(raw.replace(b'"NOTE"', bad.encode()))
            self.assertEqual(code_of(reply), (400, "INVALID_COMMAND"), bad)
        self.assertEqual(self.stored_contracts(self.alice), [])

    def test_many_surrounding_members(self) -> None:
        """More members than any command has."""
        signed = self.alice.contract_with(self.carol)
        more: dict[str, Any] = {f"x{number}": 0 for number in range(3000)}
        reply = self.alice.ask(SAVE, **more, signed_communication_contract=signed)
        self.assertEqual(code_of(reply), (400, "INVALID_COMMAND"))

    def test_oversized_contract(self) -> None:
        """The members around a contract are bounded, for saving and for responding."""
        signed = {**self.bob.contract_with(self.alice), "more": "x" * 16_384}
        reply = self.alice.ask(SAVE, signed_communication_contract=signed)
        self.assertEqual(code_of(reply), (400, "INVALID_COMMAND"))
        self.assertEqual(self.respond(self.bob, signed, to=self.alice.did), (400, "INVALID_COMMAND"))

    def test_response_is_stored_for_other_participant(self) -> None:
        """A response stores the contract for the other participant, if addressed to it or to the mediator."""
        signed = self.alice.contract_with(self.carol)
        socket = self.alice.connect()
        self.assertEqual(self.respond(self.carol, signed, to=self.alice.did), (200, ""))
        self.assertEqual(self.stored_contracts(self.alice), [signed])
        self.assertEqual(socket.take_frames(), UPDATED)
        self.assertEqual(
            self.respond(self.carol, self.alice.contract_with(self.carol), self.alice.mediator), (200, "")
        )
        self.assertEqual(len(self.stored_contracts(self.alice)), 2)

    def test_sender_is_not_notified(self) -> None:
        """A request or a response notifies the sockets of its recipient only, not those of its sender."""
        alice, bob = self.alice.connect(), self.bob.connect()
        self.alice.answer(REQUEST, to=self.bob.did, **SEALED)
        self.assertEqual((alice.take_frames(), bob.take_frames()), ([], UPDATED))
        signed = self.alice.contract_with(self.bob)
        self.assertEqual(self.respond(self.bob, signed, to=self.alice.did), (200, ""))
        self.assertEqual((alice.take_frames(), bob.take_frames()), (UPDATED, []))

    def test_response_of_non_participant(self) -> None:
        """Only a participant can respond, and only to the other one."""
        signed = self.alice.contract_with(self.bob)
        self.assertEqual(self.respond(self.carol, signed, to=self.alice.did), (400, "INVALID_COMMAND"))
        ours = self.alice.contract_with(self.carol)
        self.assertEqual(self.respond(self.carol, ours, to=self.bob.did), (400, "INVALID_COMMAND"))
        self.assertEqual(self.stored_contracts(self.alice), [])

    def test_response_to_unregistered_participant(self) -> None:
        """The other participant must be registered, which is checked first, whoever is addressed."""
        signed = self.carol.contract_with(self.alice)
        for to in (self.carol.did, self.alice.mediator):
            self.assertEqual(self.respond(self.alice, signed, to=to), (404, "RECIPIENT_NOT_REGISTERED"))
        unsigned = {**signed, "requestor_signature": ""}
        self.assertEqual(self.respond(self.alice, unsigned, self.carol.did), (404, "RECIPIENT_NOT_REGISTERED"))

    def test_signatures(self) -> None:
        """Each participant must have signed these terms."""
        signed = self.bob.contract_with(self.alice)
        terms = signed["communication_contract"]
        other_key = self.carol.contract_with(self.alice)["communication_contract"]["requestor_encryption_public_key"]
        for changes in (
            {"requestor_signature": signed["recipient_signature"]},
            {"recipient_signature": signed["requestor_signature"]},
            {"requestor_signature": ""},
            {"recipient_signature": "AAAA"},
            {"communication_contract": {**terms, "expires_at": terms["expires_at"] + 1}},
            {"communication_contract": {**terms, "timestamp": terms["timestamp"] + 1}},
            {"communication_contract": {**terms, "requestor_encryption_public_key": other_key}},
            {"communication_contract": {**terms, "unknown": 1}},
            {"communication_contract": {**terms, "requestor_signing_key_id": self.carol.key_id}},
            {"communication_contract": {**terms, "requestor_signing_key_id": f"{self.bob.did}#other"}},
            {"communication_contract": {**terms, "recipient_signing_key_id": self.bob.key_id}},
        ):
            forged = {**signed, **changes}
            reply = self.alice.ask(SAVE, signed_communication_contract=forged)
            self.assertEqual(code_of(reply), (401, "INVALID_SIGNATURES"), changes)
            self.assertEqual(self.respond(self.bob, forged, to=self.alice.did), (401, "INVALID_SIGNATURES"))
        self.assertEqual(self.stored_contracts(self.alice), [])

    def test_readings(self) -> None:
        """The requestor may have signed all, or all but one or both of the recipient's keys."""
        keys = ("recipient_encryption_public_key", "recipient_signing_key_id")
        for left_out in ((), keys[:1], keys):
            signed = self.bob.contract_with(self.alice)
            full = signed["communication_contract"]
            reading = {name: value for name, value in full.items() if name not in left_out}
            self.alice.save({**signed, "requestor_signature": sign_json(reading, self.bob.seed)})
        self.assertEqual(len(self.stored_contracts(self.alice)), 3)

    def test_contract_of_others(self) -> None:
        """A sender that is no participant is refused."""
        signed = self.bob.contract_with(self.carol)
        reply = self.alice.ask(SAVE, signed_communication_contract=signed)
        self.assertEqual(code_of(reply), (400, "INVALID_COMMAND"))

    def test_expired_contract(self) -> None:
        """An expired contract may be stored and permits nothing."""
        self.alice.save(self.bob.contract_with(self.alice, expires_at=1))
        self.assertEqual(code_of(self.bob.send_event(self.alice)), (404, "COMMUNICATION_CONTRACT_NOT_FOUND"))

    def test_filters(self) -> None:
        """By either participant, and by expiry with inclusive bounds."""
        now = int(self.in_memory.clock.seconds())
        for after in (100, 200, 300):
            self.alice.save(self.bob.contract_with(self.alice, expires_at=now + after))
        self.alice.save(self.alice.contract_with(self.carol, expires_at=now + 400))

        def expiries(**filter_: Any) -> list[int]:
            return [
                contract["communication_contract"]["expires_at"] - now
                for contract in self.stored_contracts(self.alice, **filter_)
            ]

        self.assertEqual(expiries(), [100, 200, 300, 400])
        self.assertEqual(expiries(did=self.bob.did), [100, 200, 300])
        self.assertEqual(expiries(did=self.carol.did), [400])
        self.assertEqual(expiries(did=self.alice.did), [100, 200, 300, 400])
        self.assertEqual(expiries(did="did:example:nobody"), [])
        self.assertEqual(expiries(expires_at_after=now + 200, expires_at_before=now + 300), [200, 300])

    def test_quota(self) -> None:
        """One peer cannot fill a list with variations of a contract."""
        in_memory, alice, bob = register_two_identities(
            self, decentrl={"max_contracts": 3, "max_contracts_per_peer": 2}
        )
        statuses = [
            bob.in_memory.receive_command(
                bob.command(
                    {"type": RESPONSE, "signed_communication_contract": alice.contract_with(bob)},
                    to=alice.did,
                    channel=DIRECT,
                )
            ).status
            for _ in range(3)
        ]
        self.assertEqual(statuses, [200, 200, 429])
        third = alice.contract_with(InMemoryIdentity(in_memory, "carol"))
        alice.save(third)
        dave = InMemoryIdentity(in_memory, "dave")
        over: dict[str, Any] = {"signed_communication_contract": alice.contract_with(dave)}
        self.assertEqual(code_of(alice.ask(SAVE, **over)), (429, "RATE_LIMITED"))
        self.assertEqual(code_of(dave.ask(RESPONSE, to=alice.did, **over)), (429, "RATE_LIMITED"))
        alice.save(third)  # the same one does not count again

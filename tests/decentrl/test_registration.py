"""Becoming registered (DCTRL-0004 8.1, reference 7.6 and 6.5)."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol import encoding
from mediatord.protocol.decentrl.contracts import verify_contract_signatures
from mediatord.protocol.decentrl.did_decentrl import parse_did
from tests.in_memory_identities import YEAR, InMemoryIdentity, code_of, register_two_identities
from tests.in_memory_mediator import InMemoryMediator
from tests.protocol.json_texts import NUMBERS

REQUEST = "REQUEST_COMMUNICATION_CONTRACT"


class RegistrationTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.alice = InMemoryIdentity(self.in_memory, "alice")

    def key_of(self, did: str, key_id: str) -> bytes | None:
        if did == self.alice.mediator:
            return self.in_memory.base.identity.now.signing_key
        return parse_did(did).signing_key

    def refusal_of(self, members: dict[str, Any]) -> tuple[int, str]:
        """Return how a registration is refused; it registers nobody."""
        code = code_of(self.alice.ask(REQUEST, **members))
        self.assertEqual(code_of(self.alice.ask("QUERY_EVENTS")), (401, "UNAUTHORIZED_COMMAND"))
        return code

    def test_signed_by_both(self) -> None:
        """The mediator adds its key and signature and returns the whole contract."""
        body = self.alice.answer(REQUEST, **self.alice.registration_request())
        self.assertEqual(body["code"], "MEDIATOR_REGISTRATION_SUCCESS")
        signed = body["payload"]["signed_communication_contract"]
        self.assertEqual(set(signed), {"communication_contract", "requestor_signature", "recipient_signature"})
        contract = signed["communication_contract"]
        self.assertEqual(contract["requestor_did"], self.alice.did)
        self.assertEqual(contract["recipient_signing_key_id"], f"{self.alice.mediator}#signing")
        self.assertTrue(verify_contract_signatures(signed, self.key_of))

    def test_registered_identity_may_send_commands(self) -> None:
        """A registered identity may do what it could not before; the registration is logged."""
        self.assertEqual(code_of(self.alice.ask("QUERY_EVENTS")), (401, "UNAUTHORIZED_COMMAND"))
        self.alice.register()
        self.assertEqual(self.alice.query("EVENTS", "events"), [])
        self.assertEqual(len(self.in_memory.events("acct.grant")), 1)

    def test_expires(self) -> None:
        """At the second of `expires_at` the registration ends."""
        self.alice.register(expires_at=int(self.in_memory.clock.seconds()) + 100)
        self.in_memory.clock.advance(99)
        self.alice.answer("QUERY_EVENTS")
        self.in_memory.clock.advance(1)
        self.assertEqual(code_of(self.alice.ask("QUERY_EVENTS")), (401, "UNAUTHORIZED_COMMAND"))

    def test_second_registration(self) -> None:
        """The longer of two registrations counts, in either order."""
        now = int(self.in_memory.clock.seconds())
        self.alice.register(expires_at=now + 200)
        self.alice.register(expires_at=now + 100)
        self.in_memory.clock.advance(150)
        self.alice.answer("QUERY_EVENTS")

    def test_registration_is_not_in_contract_list(self) -> None:
        """The identity's list of contracts does not contain the registration."""
        self.alice.register()
        self.assertEqual(self.alice.query("COMMUNICATION_CONTRACTS", "communication_contracts"), [])

    def test_plaintext_forms(self) -> None:
        """Wrapped under either name, or flat with either name of the signature."""
        terms = self.alice.contract_terms(self.alice.mediator)
        signature = self.alice.request(terms)
        for plaintext in (
            {"communication_contract": terms, "requestor_signature": signature},
            {"communication_contract_request": terms, "requestor_signature": signature},
            {**terms, "requestor_signature": signature},
            {**terms, "signature": signature},
        ):
            self.alice.answer(REQUEST, **self.alice.encrypt_registration(plaintext))

    def test_terms_are_returned_unchanged(self) -> None:
        """The mediator adds its own members and changes no other, in every form of the request."""
        note = f'{{ "n" : [{", ".join(NUMBERS)}],\t"\\u0061":"\\ud834\\udd1e \\/" }}'
        terms = self.alice.contract_terms(self.alice.mediator, note=json.loads(note))
        written = json.dumps(terms).replace(json.dumps(json.loads(note)), note)
        signature = self.alice.request(terms)
        for plaintext in (
            f'{{"requestor_signature":"{signature}", "communication_contract" : {written} }}',
            f'{written[:-1]}, "signature" : "{signature}"}}',
        ):
            self.assertIn(note, plaintext)
            reply = self.alice.ask(
                REQUEST, **self.alice.encrypt_registration(encoding.wrap_json_fragment(plaintext.encode()))
            )
            signed = json.loads(reply.body)["payload"]["signed_communication_contract"]
            self.assertIn(f'"note":{note}'.encode(), reply.body)
            self.assertIn(b'"recipient_signing_key_id":"' + self.alice.mediator.encode(), reply.body)
            self.assertEqual(reply.body.count(b'"recipient_signing_key_id"'), 1)
            self.assertTrue(verify_contract_signatures(signed, self.key_of))

    def test_missing_key_id_of_mediator(self) -> None:
        """The key id is added; the requestor's signature covers the terms without it."""
        terms = self.alice.contract_terms(self.alice.mediator)
        del terms["recipient_signing_key_id"]
        plaintext = {"communication_contract": terms, "requestor_signature": self.alice.request(terms)}
        body = self.alice.answer(REQUEST, **self.alice.encrypt_registration(plaintext))
        signed = body["payload"]["signed_communication_contract"]
        self.assertTrue(verify_contract_signatures(signed, self.key_of))

    def test_undecryptable_requests(self) -> None:
        """Garbage, another secret, a low-order key: one response."""
        good = self.alice.registration_request()
        other = self.alice.registration_request()
        for changes in (
            {"encrypted_contract_request": "AAAA"},
            {"encrypted_contract_request": "not base64!"},
            {"encrypted_contract_request": other["encrypted_contract_request"]},
            {"requestor_ephemeral_public_key": "A" * 43 + "="},
            {"requestor_ephemeral_public_key": "short"},
        ):
            self.assertEqual(self.refusal_of({**good, **changes}), (400, "INVALID_COMMAND"))

    def test_plaintext_is_no_contract(self) -> None:
        """Plaintext that is no contract is refused."""
        plaintexts: list[Any] = [[], "text", {}, {"communication_contract": 1}, {"communication_contract": {}}]
        for plaintext in plaintexts:
            self.assertEqual(self.refusal_of(self.alice.encrypt_registration(plaintext)), (400, "INVALID_COMMAND"))

    def test_oversized_contract(self) -> None:
        """The mediator signs and stores contracts of bounded size only."""
        members = self.alice.registration_request(more="x" * 13_000)
        self.assertEqual(self.refusal_of(members), (400, "INVALID_COMMAND"))

    def test_invalid_terms(self) -> None:
        """The terms must name this sender and this mediator, and expire in the future."""
        now = int(self.in_memory.clock.seconds())
        bob = InMemoryIdentity(self.in_memory, "bob")
        for changes in (
            {"requestor_did": bob.did},
            {"recipient_did": bob.did},
            {"recipient_signing_key_id": f"{self.alice.mediator}#other"},
            {"expires_at": now},
            {"expires_at": now - 1},
            {"expires_at": True},
            {"expires_at": str(now + 100)},
            {"requestor_encryption_public_key": 7},
        ):
            members = self.alice.registration_request(**changes)
            self.assertEqual(self.refusal_of(members), (400, "INVALID_COMMAND"), changes)

    def test_not_signed_by_sender(self) -> None:
        """A wrong signature, and one by a key that is not the sender's."""
        terms = self.alice.contract_terms(self.alice.mediator)
        other = {**terms, "expires_at": terms["expires_at"] + 1}
        forged = {"communication_contract": other, "requestor_signature": self.alice.request(terms)}
        self.assertEqual(self.refusal_of(self.alice.encrypt_registration(forged)), (401, "INVALID_SIGNATURES"))
        strange = self.alice.registration_request(requestor_signing_key_id=f"{self.alice.did}#prekey")
        self.assertEqual(self.refusal_of(strange), (401, "INVALID_SIGNATURES"))

    def test_did_of_other_mediator(self) -> None:
        """A DID that names another mediator may register, unless only own ones are allowed."""
        InMemoryIdentity(self.in_memory, "guest", mediator_did="did:web:elsewhere.example").register()
        strict = InMemoryMediator(self, decentrl={"registration": "own"})
        InMemoryIdentity(strict, "native").register()
        guest = InMemoryIdentity(strict, "guest", mediator_did="did:web:elsewhere.example")
        self.assertEqual(code_of(guest.ask(REQUEST, **guest.registration_request())), (401, "UNAUTHORIZED_COMMAND"))
        self.assertEqual(len(strict.events("acct.deny")), 1)

    def test_allow_list(self) -> None:
        """With an allow-list nobody else can register."""
        strict = InMemoryMediator(self, decentrl={"registration": "allow-list", "allow": [self.alice.did]})
        mallory = InMemoryIdentity(strict, "mallory")
        self.assertEqual(
            code_of(mallory.ask(REQUEST, **mallory.registration_request())), (401, "UNAUTHORIZED_COMMAND")
        )

    def test_longer_than_maximum(self) -> None:
        """A registration is signed as requested and counts for the maximum."""
        in_memory = InMemoryMediator(self, decentrl={"contract_lifetime": "100s"})
        alice = InMemoryIdentity(in_memory, "alice")
        until = int(in_memory.clock.seconds()) + 10 * YEAR
        self.assertEqual(alice.register(expires_at=until)["communication_contract"]["expires_at"], until)
        in_memory.clock.advance(99)
        alice.answer("QUERY_EVENTS")
        in_memory.clock.advance(1)
        self.assertEqual(code_of(alice.ask("QUERY_EVENTS")), (401, "UNAUTHORIZED_COMMAND"))


class LapsedRegistrationTests(SynchronousTestCase):
    def test_queue_survives_lapse(self) -> None:
        """Queued events survive the end of a registration."""
        in_memory, alice, bob = register_two_identities(self)
        bob.save_contract_with(alice)
        alice.send_event(bob, "patience")
        in_memory.clock.advance(YEAR)
        self.assertEqual(code_of(bob.ask("QUERY_PENDING_EVENTS")), (401, "UNAUTHORIZED_COMMAND"))
        self.assertEqual(code_of(alice.send_event(bob)), (404, "RECIPIENT_NOT_REGISTERED"))
        bob.register()
        self.assertEqual([event["payload"] for event in bob.pending()], ["patience"])
        self.assertEqual(json.loads(alice.send_event(bob).body)["code"], "COMMUNICATION_CONTRACT_NOT_FOUND")

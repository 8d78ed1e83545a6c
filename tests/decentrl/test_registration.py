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

    def refused(self, members: dict[str, Any]) -> tuple[int, str]:
        """How a request for registration is refused; it registers nobody."""
        code = code_of(self.alice.ask(REQUEST, **members))
        self.assertEqual(code_of(self.alice.ask("QUERY_EVENTS")), (401, "UNAUTHORIZED_COMMAND"))
        return code

    def test_signed_by_both(self) -> None:
        """The mediator adds its key and its signature and returns the whole contract."""
        body = self.alice.answer(REQUEST, **self.alice.registration())
        self.assertEqual(body["code"], "MEDIATOR_REGISTRATION_SUCCESS")
        signed = body["payload"]["signed_communication_contract"]
        self.assertEqual(set(signed), {"communication_contract", "requestor_signature", "recipient_signature"})
        contract = signed["communication_contract"]
        self.assertEqual(contract["requestor_did"], self.alice.did)
        self.assertEqual(contract["recipient_signing_key_id"], f"{self.alice.mediator}#signing")
        self.assertTrue(verify_contract_signatures(signed, self.key_of))

    def test_registered_from_then_on(self) -> None:
        """What an unregistered identity may not do, a registered one may; it is told in the log."""
        self.assertEqual(code_of(self.alice.ask("QUERY_EVENTS")), (401, "UNAUTHORIZED_COMMAND"))
        self.alice.register()
        self.assertEqual(self.alice.query("EVENTS", "events"), [])
        self.assertEqual(len(self.in_memory.events("acct.grant")), 1)

    def test_expires(self) -> None:
        """At the second of `expires_at` the identity is registered no more."""
        self.alice.register(expires_at=int(self.in_memory.clock.seconds()) + 100)
        self.in_memory.clock.advance(99)
        self.alice.answer("QUERY_EVENTS")
        self.in_memory.clock.advance(1)
        self.assertEqual(code_of(self.alice.ask("QUERY_EVENTS")), (401, "UNAUTHORIZED_COMMAND"))

    def test_again(self) -> None:
        """A second registration adds to the first: the longer one counts, in whichever order they were made."""
        now = int(self.in_memory.clock.seconds())
        self.alice.register(expires_at=now + 200)
        self.alice.register(expires_at=now + 100)
        self.in_memory.clock.advance(150)
        self.alice.answer("QUERY_EVENTS")

    def test_is_no_contract_of_the_identity(self) -> None:
        """A list of contacts does not contain the mediator."""
        self.alice.register()
        self.assertEqual(self.alice.query("COMMUNICATION_CONTRACTS", "communication_contracts"), [])

    def test_plaintexts(self) -> None:
        """Wrapped under either name, or flat with either name of the signature."""
        terms = self.alice.terms(self.alice.mediator)
        signature = self.alice.request(terms)
        for plaintext in (
            {"communication_contract": terms, "requestor_signature": signature},
            {"communication_contract_request": terms, "requestor_signature": signature},
            {**terms, "requestor_signature": signature},
            {**terms, "signature": signature},
        ):
            self.alice.answer(REQUEST, **self.alice.sealed_registration(plaintext))

    def test_terms_stay_as_they_were_written(self) -> None:
        """The mediator adds its own members, and changes no other; that goes for every form of the request."""
        note = f'{{ "n" : [{", ".join(NUMBERS)}],\t"\\u0061":"\\ud834\\udd1e \\/" }}'
        terms = self.alice.terms(self.alice.mediator, note=json.loads(note))
        written = json.dumps(terms).replace(json.dumps(json.loads(note)), note)
        signature = self.alice.request(terms)
        for plaintext in (
            f'{{"requestor_signature":"{signature}", "communication_contract" : {written} }}',
            f'{written[:-1]}, "signature" : "{signature}"}}',
        ):
            self.assertIn(note, plaintext)
            reply = self.alice.ask(
                REQUEST, **self.alice.sealed_registration(encoding.wrap_json_fragment(plaintext.encode()))
            )
            signed = json.loads(reply.body)["payload"]["signed_communication_contract"]
            self.assertIn(f'"note":{note}'.encode(), reply.body)
            self.assertIn(b'"recipient_signing_key_id":"' + self.alice.mediator.encode(), reply.body)
            self.assertEqual(reply.body.count(b'"recipient_signing_key_id"'), 1)
            self.assertTrue(verify_contract_signatures(signed, self.key_of))

    def test_without_key_id_of_the_recipient(self) -> None:
        """Then it is filled in, and the requestor's signature covers what it knew."""
        terms = self.alice.terms(self.alice.mediator)
        del terms["recipient_signing_key_id"]
        plaintext = {"communication_contract": terms, "requestor_signature": self.alice.request(terms)}
        body = self.alice.answer(REQUEST, **self.alice.sealed_registration(plaintext))
        signed = body["payload"]["signed_communication_contract"]
        self.assertTrue(verify_contract_signatures(signed, self.key_of))

    def test_does_not_open(self) -> None:
        """Garbage, somebody else's secret, a low-order key: all look alike."""
        good = self.alice.registration()
        other = self.alice.registration()
        for changes in (
            {"encrypted_contract_request": "AAAA"},
            {"encrypted_contract_request": "not base64!"},
            {"encrypted_contract_request": other["encrypted_contract_request"]},
            {"requestor_ephemeral_public_key": "A" * 43 + "="},
            {"requestor_ephemeral_public_key": "short"},
        ):
            self.assertEqual(self.refused({**good, **changes}), (400, "INVALID_COMMAND"))

    def test_is_no_contract(self) -> None:
        """What opens to something else."""
        plaintexts: list[Any] = [[], "text", {}, {"communication_contract": 1}, {"communication_contract": {}}]
        for plaintext in plaintexts:
            self.assertEqual(self.refused(self.alice.sealed_registration(plaintext)), (400, "INVALID_COMMAND"))

    def test_too_long(self) -> None:
        """The mediator signs and keeps no more than a contract needs."""
        members = self.alice.registration(more="x" * 13_000)
        self.assertEqual(self.refused(members), (400, "INVALID_COMMAND"))

    def test_terms(self) -> None:
        """They have to be those of this sender with this mediator, and ahead."""
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
            members = self.alice.registration(**changes)
            self.assertEqual(self.refused(members), (400, "INVALID_COMMAND"), changes)

    def test_not_signed_by_the_sender(self) -> None:
        """A wrong signature, and a right one by a key that the sender has not."""
        terms = self.alice.terms(self.alice.mediator)
        other = {**terms, "expires_at": terms["expires_at"] + 1}
        forged = {"communication_contract": other, "requestor_signature": self.alice.request(terms)}
        self.assertEqual(self.refused(self.alice.sealed_registration(forged)), (401, "INVALID_SIGNATURES"))
        strange = self.alice.registration(requestor_signing_key_id=f"{self.alice.did}#prekey")
        self.assertEqual(self.refused(strange), (401, "INVALID_SIGNATURES"))

    def test_names_another_mediator(self) -> None:
        """A DID that names another mediator may register, unless only own ones may."""
        InMemoryIdentity(self.in_memory, "guest", mediator_did="did:web:elsewhere.example").register()
        strict = InMemoryMediator(self, decentrl={"registration": "own"})
        InMemoryIdentity(strict, "native").register()
        guest = InMemoryIdentity(strict, "guest", mediator_did="did:web:elsewhere.example")
        self.assertEqual(code_of(guest.ask(REQUEST, **guest.registration())), (401, "UNAUTHORIZED_COMMAND"))
        self.assertEqual(len(strict.events("acct.deny")), 1)

    def test_allow_list(self) -> None:
        """With an allow-list nobody else registers."""
        strict = InMemoryMediator(self, decentrl={"registration": "allow-list", "allow": [self.alice.did]})
        mallory = InMemoryIdentity(strict, "mallory")
        self.assertEqual(code_of(mallory.ask(REQUEST, **mallory.registration())), (401, "UNAUTHORIZED_COMMAND"))

    def test_longer_than_is_served(self) -> None:
        """A registration is signed as asked for, and counts no longer than the mediator serves anybody."""
        in_memory = InMemoryMediator(self, decentrl={"contract_lifetime": "100s"})
        alice = InMemoryIdentity(in_memory, "alice")
        until = int(in_memory.clock.seconds()) + 10 * YEAR
        self.assertEqual(alice.register(expires_at=until)["communication_contract"]["expires_at"], until)
        in_memory.clock.advance(99)
        alice.answer("QUERY_EVENTS")
        in_memory.clock.advance(1)
        self.assertEqual(code_of(alice.ask("QUERY_EVENTS")), (401, "UNAUTHORIZED_COMMAND"))


class LapsedTests(SynchronousTestCase):
    def test_is_there_again(self) -> None:
        """What waits for an identity survives the end of its registration."""
        in_memory, alice, bob = register_two_identities(self)
        bob.befriend(alice)
        alice.tell(bob, "patience")
        in_memory.clock.advance(YEAR)
        self.assertEqual(code_of(bob.ask("QUERY_PENDING_EVENTS")), (401, "UNAUTHORIZED_COMMAND"))
        self.assertEqual(code_of(alice.tell(bob)), (404, "RECIPIENT_NOT_REGISTERED"))
        bob.register()
        self.assertEqual([event["payload"] for event in bob.pending()], ["patience"])
        self.assertEqual(json.loads(alice.tell(bob).body)["code"], "COMMUNICATION_CONTRACT_NOT_FOUND")

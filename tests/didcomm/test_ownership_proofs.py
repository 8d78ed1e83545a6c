"""Proofs that a recipient DID belongs to the holder of an account, and `didcomm.require_ownership`."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.mediation import OWNERSHIP_PROOF
from mediatord.errors import StoreUnavailable
from mediatord.protocol import encoding
from mediatord.protocol.didcomm import json_web_signature
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import anoncrypt, authcrypt, build_attachment, compose_message
from tests.from_prior import FromPriorClaims, make_from_prior
from tests.in_memory_mediator import CM3, MP, PING, InMemoryMediator, InMemoryWallet, from_header, pack_forward
from tests.ratelimit.test_access_control import ReloadableMediator
from tests.wallet_identities import prove_ownership


class OwnershipTestCase(SynchronousTestCase):
    required = True
    in_memory: InMemoryMediator

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, didcomm={"require_ownership": self.required})
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.alias = WalletIdentity.generate()

    def update(self, guest: InMemoryWallet, did: str, *proofs: bytes, action: str = "add") -> str:
        """Send one update and return its result."""
        headers: dict[str, Any] = {"attachments": [build_attachment(proof) for proof in proofs]} if proofs else {}
        updates = [{"recipient_did": did, "action": action}]
        body = guest.answer(f"{CM3}/recipient-update", {"updates": updates}, **headers).body
        return str(body["updated"][0]["result"])

    def proof(self, did: str | None = None, account: str | None = None, owner: WalletIdentity | None = None) -> bytes:
        """Make a proof now, as wallets do."""
        owner = owner or self.alias
        now = self.in_memory.clock.seconds()
        return prove_ownership(owner, did or owner.did, account or self.bob.did, self.in_memory.document, now=now)

    def message(self, **changes: Any) -> dict[str, Any]:
        """Make a proof without packing it."""
        headers = {
            "to": [self.in_memory.did],
            "created_time": int(self.in_memory.clock.seconds()),
            **from_header(self.alias.did),
        }
        body = changes.pop("body", {"account": self.bob.did, "recipient_did": self.alias.did})
        return compose_message(changes.pop("type_", OWNERSHIP_PROOF), body, **{**headers, **changes})


class RequiredTests(OwnershipTestCase):
    def test_no_proof_needed_for_own_did(self) -> None:
        """The account's own DID, registered DIDs and removals need no proof."""
        self.assertEqual(self.update(self.bob, self.bob.did), "no_change")
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof()), "success")
        self.assertEqual(self.update(self.bob, self.alias.did), "no_change")
        self.assertEqual(self.update(self.bob, self.alias.did, action="remove"), "success")
        self.assertEqual(self.update(self.bob, self.alias.did), "client_error")

    def test_other_did_needs_proof(self) -> None:
        """With a proof, messages for another DID are accepted."""
        self.assertEqual(self.update(self.bob, self.alias.did), "client_error")
        forward = pack_forward(self.in_memory, self.alias.did, self.bob.make_payload())
        self.assertEqual(self.in_memory.receive(forward).status, 400)
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof()), "success")
        again = pack_forward(self.in_memory, self.alias.did, self.bob.make_payload())
        self.assertEqual(self.in_memory.receive(again).status, 202)
        self.assertEqual(self.bob.count_queued(), 1)

    def test_proof_covers_all_spellings(self) -> None:
        """A proof is for a DID, under whichever spelling it is registered."""
        with_key = self.alias.agreement.kid
        self.assertEqual(self.update(self.bob, with_key), "client_error")
        self.assertEqual(self.update(self.bob, with_key, self.proof()), "success")
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof(with_key)), "success")

    def test_signature_is_proof(self) -> None:
        """A signature proves as much as authenticated encryption."""
        jws = json_web_signature.sign(
            encoding.dumps(self.message()), self.alias.signing.kid, self.alias.signing.private
        )
        self.assertEqual(
            self.update(self.bob, self.alias.did, anoncrypt(encoding.loads_object(jws), self.in_memory.document)),
            "success",
        )

    def test_invalid_proofs(self) -> None:
        """Of another DID, for another account or mediator, of another time or type, or anonymous."""
        now, eve = int(self.in_memory.clock.seconds()), InMemoryWallet(self.in_memory).enrol()
        bad: dict[str, bytes] = {
            "by another": self.proof(self.alias.did, owner=WalletIdentity.generate()),
            "for another account": self.proof(account=eve.did),
            "of another DID": self.proof(owner=WalletIdentity.generate()),
            "anonymous": anoncrypt(self.message(), self.in_memory.document),
            "unreadable": anoncrypt(self.message(), self.alias.document),
        }
        others: dict[str, dict[str, Any]] = {
            "to another mediator": {"to": ["did:web:elsewhere.example"]},
            "to nobody": {"to": None},
            "too old": {"created_time": now - 301},
            "too new": {"created_time": now + 301},
            "undated": {"created_time": None},
            "over": {"expires_time": now},
            "of another type": {"type_": "https://didcomm.org/empty/1.0/empty"},
            "without an account": {"body": {"recipient_did": self.alias.did}},
            "without a DID": {"body": {"account": self.bob.did}},
            "without a body": {"body": {}},
        }
        for name, changes in others.items():
            bad[name] = authcrypt(self.message(**changes), self.alias, self.in_memory.document)
        for name, proof in bad.items():
            self.assertEqual(self.update(self.bob, self.alias.did, proof), "client_error", name)
        good: list[dict[str, Any]] = [
            {"created_time": now - 300},
            {"created_time": now + 300, "expires_time": now + 301},
        ]
        for changes in good:
            proof = authcrypt(self.message(**changes), self.alias, self.in_memory.document)
            self.assertEqual(self.update(self.bob, self.alias.did, proof), "success")
            self.update(self.bob, self.alias.did, action="remove")

    def test_proof_is_used_once(self) -> None:
        """A recorded proof cannot take back a DID that has moved to another account."""
        proof = self.proof()
        self.assertEqual(self.update(self.bob, self.alias.did, proof), "success")
        self.update(self.bob, self.alias.did, action="remove")
        self.assertEqual(self.update(self.bob, self.alias.did, proof), "client_error")

    def test_refused_update_keeps_proof(self) -> None:
        """If the whole update was refused, the same one may be repeated."""
        updates = [{"recipient_did": self.alias.did, "action": "add"}]
        proofs = [build_attachment(self.proof()), build_attachment(self.proof(owner=WalletIdentity.generate()))]
        update = self.bob.pack(f"{CM3}/recipient-update", {"updates": updates}, attachments=proofs)
        self.in_memory.clock.advance(60)
        for _ in range(598):
            self.assertEqual(self.bob.ask(PING).status, 200)
        self.assertEqual(self.in_memory.receive(update).status, 429)
        self.in_memory.clock.advance(61)
        with self.in_memory.failing("find_owner", StoreUnavailable()):
            other = [*updates, {"recipient_did": WalletIdentity.generate().did, "action": "add"}]
            packed = self.bob.pack(f"{CM3}/recipient-update", {"updates": other}, attachments=proofs[:1])
            self.assertEqual(self.in_memory.receive(packed).status, 503)
        body = self.bob.open(self.in_memory.receive(update).body).body
        self.assertEqual([item["result"] for item in body["updated"]], ["success"])

    def test_update_over_quota_keeps_proof(self) -> None:
        """If there was no room for the addition, the same update may be repeated."""
        self.in_memory = ReloadableMediator(self, didcomm={"require_ownership": True})
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.in_memory.reload("limits", registration_bytes=1)
        update = [{"recipient_did": self.alias.did, "action": "add"}]
        packed = self.bob.pack(
            f"{CM3}/recipient-update", {"updates": update}, attachments=[build_attachment(self.proof())]
        )
        self.assertEqual(self.in_memory.receive(packed).status, 503)
        self.in_memory.reload("limits", registration_bytes=1_000_000)
        body = self.bob.open(self.in_memory.receive(packed).body).body
        self.assertEqual([item["result"] for item in body["updated"]], ["success"])

    def test_each_proof_counts_as_request(self) -> None:
        """Proofs count for the account that sends them."""
        self.in_memory.clock.advance(60)
        proofs = [self.proof(owner=WalletIdentity.generate()) for _ in range(4)]
        answers = 0
        while (
            self.bob.ask(
                f"{CM3}/recipient-update", {"updates": []}, attachments=list(map(build_attachment, proofs))
            ).status
            == 200
        ):
            answers += 1
        self.assertEqual(answers, 600 // 5)


class OwnershipTransferTests(OwnershipTestCase):
    """A proof counts also where none is required."""

    required = False

    def test_owner_takes_over_registration(self) -> None:
        """A proof takes the DID from the account that registered it, whose queued messages stay."""
        eve = InMemoryWallet(self.in_memory).enrol()
        self.assertEqual(self.update(eve, self.alias.did), "success")
        self.in_memory.receive(pack_forward(self.in_memory, self.alias.did, self.bob.make_payload("before")))
        self.assertEqual(self.update(self.bob, self.alias.did), "client_error")
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof()), "success")
        self.in_memory.receive(pack_forward(self.in_memory, self.alias.did, self.bob.make_payload("after")))
        self.assertEqual((eve.count_queued(), self.bob.count_queued()), (1, 1))
        self.assertEqual(self.update(eve, self.alias.did), "client_error")
        self.assertEqual(eve.answer(f"{CM3}/recipient-query").body["dids"], [{"recipient_did": eve.did}])
        events = [(event["n_added"], event["n_removed"]) for event in self.in_memory.events("acct.update")]
        self.assertIn((0, 1), events)

    def test_former_spelling_keeps_messages(self) -> None:
        """An account that now uses another spelling of the DID keeps its messages."""
        alias = InMemoryWallet(self.in_memory, self.alias).enrol(self.alias.did)
        new = InMemoryWallet(self.in_memory)
        claim = FromPriorClaims(self.alias.signing.kid, alias.did, new.did, int(self.in_memory.clock.seconds()))
        token = make_from_prior(claim, self.alias.signing.private)
        self.assertEqual(new.ask(f"{MP}/status-request", {}, from_prior=token).status, 200)
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof()), "client_error")
        self.assertIn({"recipient_did": self.alias.did}, new.answer(f"{CM3}/recipient-query").body["dids"])

    def test_transfer_over_quota(self) -> None:
        """A DID that cannot be added stays where it was."""
        self.in_memory = InMemoryMediator(self, didcomm={"max_recipients": 1})
        self.bob, eve = InMemoryWallet(self.in_memory).enrol(), InMemoryWallet(self.in_memory).enrol()
        self.update(eve, eve.did, action="remove")
        self.assertEqual(self.update(eve, self.alias.did), "success")
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof()), "client_error")
        self.assertEqual(eve.answer(f"{CM3}/recipient-query").body["dids"], [{"recipient_did": self.alias.did}])

    def test_removal_with_proof_takes_nothing_from_others(self) -> None:
        """A proof is for adding."""
        eve = InMemoryWallet(self.in_memory).enrol()
        self.update(eve, self.alias.did)
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof(), action="remove"), "no_change")
        self.assertEqual(self.update(eve, self.alias.did), "no_change")

"""Proofs that a recipient DID belongs to the holder of an account, and `didcomm.require_ownership`."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.protocol import jsontext
from mediatord.protocol.didcomm import signed
from mediatord.protocol.didcomm.ownership import PROOF, proof_body
from mediatord.wallet.identity import Identity
from mediatord.wallet.packing import anoncrypt, attach, authcrypt, compose, prove_ownership
from tests.house import CM3, MP, PING, Guest, House, sealed_forward, sent_by
from tests.test_access import ReloadedHouse


class OwnershipTestCase(SynchronousTestCase):
    required = True
    house: House

    def setUp(self) -> None:
        self.house = House(self, didcomm={"require_ownership": self.required})
        self.bob = Guest(self.house).enrol()
        self.alias = Identity.fresh()

    def update(self, guest: Guest, did: str, *proofs: bytes, action: str = "add") -> str:
        """What becomes of one entry."""
        headers: dict[str, Any] = {"attachments": [attach(proof) for proof in proofs]} if proofs else {}
        updates = [{"recipient_did": did, "action": action}]
        body = guest.answer(f"{CM3}/recipient-update", {"updates": updates}, **headers).body
        return str(body["updated"][0]["result"])

    def proof(self, did: str | None = None, account: str | None = None, owner: Identity | None = None) -> bytes:
        """Made now, as the wallet does."""
        owner = owner or self.alias
        now = self.house.clock.seconds()
        return prove_ownership(owner, did or owner.did, account or self.bob.did, self.house.document, now=now)

    def message(self, **changes: Any) -> dict[str, Any]:
        """A proof before it is packed."""
        headers = {"to": [self.house.did], "created_time": int(self.house.clock.seconds()), **sent_by(self.alias.did)}
        body = changes.pop("body", proof_body(self.bob.did, self.alias.did))
        return compose(changes.pop("type_", PROOF), body, **{**headers, **changes})


class RequiredTests(OwnershipTestCase):
    def test_its_own(self) -> None:
        """The account's own DID needs none; nor does what is registered already, and removal."""
        self.assertEqual(self.update(self.bob, self.bob.did), "no_change")
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof()), "success")
        self.assertEqual(self.update(self.bob, self.alias.did), "no_change")
        self.assertEqual(self.update(self.bob, self.alias.did, action="remove"), "success")
        self.assertEqual(self.update(self.bob, self.alias.did), "client_error")

    def test_another(self) -> None:
        """Needs one, and then mail comes for it."""
        self.assertEqual(self.update(self.bob, self.alias.did), "client_error")
        forward = sealed_forward(self.house, self.alias.did, self.bob.letter())
        self.assertEqual(self.house.receive(forward).status, 400)
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof()), "success")
        again = sealed_forward(self.house, self.alias.did, self.bob.letter())
        self.assertEqual(self.house.receive(again).status, 202)
        self.assertEqual(self.bob.waiting(), 1)

    def test_a_key_of_it(self) -> None:
        """A proof is for a DID, under whichever of its names it is registered."""
        with_key = self.alias.agreement.kid
        self.assertEqual(self.update(self.bob, with_key), "client_error")
        self.assertEqual(self.update(self.bob, with_key, self.proof()), "success")
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof(with_key)), "success")

    def test_a_signature(self) -> None:
        """Proves as much as authenticated encryption."""
        jws = signed.sign(jsontext.dumps(self.message()), self.alias.signing.kid, self.alias.signing.private)
        self.assertEqual(
            self.update(self.bob, self.alias.did, anoncrypt(jsontext.loads_object(jws), self.house.document)),
            "success",
        )

    def test_what_proves_nothing(self) -> None:
        """Somebody else's, for another account or mediator, of another time or kind, or nobody's."""
        now, eve = int(self.house.clock.seconds()), Guest(self.house).enrol()
        bad: dict[str, bytes] = {
            "by another": self.proof(self.alias.did, owner=Identity.fresh()),
            "for another account": self.proof(account=eve.did),
            "of another DID": self.proof(owner=Identity.fresh()),
            "anonymous": anoncrypt(self.message(), self.house.document),
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
            bad[name] = authcrypt(self.message(**changes), self.alias, self.house.document)
        for name, proof in bad.items():
            self.assertEqual(self.update(self.bob, self.alias.did, proof), "client_error", name)
        good: list[dict[str, Any]] = [
            {"created_time": now - 300},
            {"created_time": now + 300, "expires_time": now + 301},
        ]
        for changes in good:
            proof = authcrypt(self.message(**changes), self.alias, self.house.document)
            self.assertEqual(self.update(self.bob, self.alias.did, proof), "success")
            self.update(self.bob, self.alias.did, action="remove")

    def test_once(self) -> None:
        """Whoever has taken its DID elsewhere does not have it taken back by what was recorded."""
        proof = self.proof()
        self.assertEqual(self.update(self.bob, self.alias.did, proof), "success")
        self.update(self.bob, self.alias.did, action="remove")
        self.assertEqual(self.update(self.bob, self.alias.did, proof), "client_error")

    def test_not_used_up_by_what_was_not_done(self) -> None:
        """Where the update was refused as a whole, the very same one may come again."""
        updates = [{"recipient_did": self.alias.did, "action": "add"}]
        proofs = [attach(self.proof()), attach(self.proof(owner=Identity.fresh()))]
        update = self.bob.pack(f"{CM3}/recipient-update", {"updates": updates}, attachments=proofs)
        self.house.clock.advance(60)
        for _ in range(598):
            self.assertEqual(self.bob.ask(PING).status, 200)
        self.assertEqual(self.house.receive(update).status, 429)
        self.house.clock.advance(61)
        with self.house.failing("owner", StoreUnavailable()):
            other = [*updates, {"recipient_did": Identity.fresh().did, "action": "add"}]
            packed = self.bob.pack(f"{CM3}/recipient-update", {"updates": other}, attachments=proofs[:1])
            self.assertEqual(self.house.receive(packed).status, 503)
        body = self.bob.open(self.house.receive(update).body).body
        self.assertEqual([one["result"] for one in body["updated"]], ["success"])

    def test_not_used_up_by_what_was_not_charged(self) -> None:
        """Where there was no room for what the update adds, the very same one may come again."""
        self.house = ReloadedHouse(self, didcomm={"require_ownership": True})
        self.bob = Guest(self.house).enrol()
        self.house.change("limits", registration_bytes=1)
        update = [{"recipient_did": self.alias.did, "action": "add"}]
        packed = self.bob.pack(f"{CM3}/recipient-update", {"updates": update}, attachments=[attach(self.proof())])
        self.assertEqual(self.house.receive(packed).status, 503)
        self.house.change("limits", registration_bytes=1_000_000)
        body = self.bob.open(self.house.receive(packed).body).body
        self.assertEqual([one["result"] for one in body["updated"]], ["success"])

    def test_each_costs_as_much_as_a_request(self) -> None:
        """Of the account that sends them."""
        self.house.clock.advance(60)
        proofs = [self.proof(owner=Identity.fresh()) for _ in range(4)]
        answers = 0
        while (
            self.bob.ask(f"{CM3}/recipient-update", {"updates": []}, attachments=list(map(attach, proofs))).status
            == 200
        ):
            answers += 1
        self.assertEqual(answers, 600 // 5)


class TakingOverTests(OwnershipTestCase):
    """Where no proof is asked for, one counts all the same."""

    required = False

    def test_the_owner_wins(self) -> None:
        """Of who has registered a DID, and who proves that it is theirs; the other's own mail stays the other's."""
        eve = Guest(self.house).enrol()
        self.assertEqual(self.update(eve, self.alias.did), "success")
        self.house.receive(sealed_forward(self.house, self.alias.did, self.bob.letter("before")))
        self.assertEqual(self.update(self.bob, self.alias.did), "client_error")
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof()), "success")
        self.house.receive(sealed_forward(self.house, self.alias.did, self.bob.letter("after")))
        self.assertEqual((eve.waiting(), self.bob.waiting()), (1, 1))
        self.assertEqual(self.update(eve, self.alias.did), "client_error")
        self.assertEqual(eve.answer(f"{CM3}/recipient-query").body["dids"], [{"recipient_did": eve.did}])
        events = [(event["n_added"], event["n_removed"]) for event in self.house.events("acct.update")]
        self.assertIn((0, 1), events)

    def test_a_former_name(self) -> None:
        """Who has lost the keys of a DID, and goes by another one since, does not lose its mail too."""
        alias = Guest(self.house, self.alias).enrol(self.alias.did)
        new = Guest(self.house)
        claim = signed.FromPrior(self.alias.signing.kid, alias.did, new.did, int(self.house.clock.seconds()))
        token = signed.make_from_prior(claim, self.alias.signing.private)
        self.assertEqual(new.ask(f"{MP}/status-request", {}, from_prior=token).status, 200)
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof()), "client_error")
        self.assertIn({"recipient_did": self.alias.did}, new.answer(f"{CM3}/recipient-query").body["dids"])

    def test_no_room(self) -> None:
        """What cannot be added stays where it was, rather than nowhere."""
        self.house = House(self, didcomm={"max_recipients": 1})
        self.bob, eve = Guest(self.house).enrol(), Guest(self.house).enrol()
        self.update(eve, eve.did, action="remove")
        self.assertEqual(self.update(eve, self.alias.did), "success")
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof()), "client_error")
        self.assertEqual(eve.answer(f"{CM3}/recipient-query").body["dids"], [{"recipient_did": self.alias.did}])

    def test_removing_takes_nothing_from_others(self) -> None:
        """A proof is for adding."""
        eve = Guest(self.house).enrol()
        self.update(eve, self.alias.did)
        self.assertEqual(self.update(self.bob, self.alias.did, self.proof(), action="remove"), "no_change")
        self.assertEqual(self.update(eve, self.alias.did), "no_change")

"""A DID has one owner under all its spellings, in every request (reference 4.3, 5.3 and 6)."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol.didcomm.did_methods import derive_did_peer_3
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import build_attachment
from tests.in_memory_mediator import CM3, MP, InMemoryMediator, InMemoryWallet, code_of, pack_forward
from tests.wallet_identities import prove_ownership

CM2 = "https://didcomm.org/coordinate-mediation/2.0"
NOT_ENROLLED = "e.p.req.not_enroll"
WEB = "did:web:wallet.example:bob"
PEER_4 = "did:peer:4zQmd8CpeFPci817KDsbSAKWcXAE2mjvCQSasRewvbSF54Bd"


def spellings(did: str) -> list[str]:
    """Other spellings of a DID."""
    parts = ["#key-1", "#", "/path", "?service=x", ";service=x", "/path?query#key-1"]
    escaped = did[:12] + f"%{ord(did[12]):02x}" + did[13:]
    return [*(did + part for part in parts), escaped, f"{escaped}#key-1"]


class OneOwnerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, limits={"ip_per_minute": 10_000, "account_per_minute": 10_000})
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.eve = InMemoryWallet(self.in_memory).enrol()
        own = derive_did_peer_3(self.bob.did)
        self.names = {
            self.bob.did: [*spellings(self.bob.did), own, f"{own}#key-1"],
            WEB: [*spellings(WEB), "did:web:Wallet.Example:bob", "did:web:wallet.example%3A443:bob#key-1"],
            PEER_4: [*spellings(PEER_4), f"{PEER_4}:z2M1k7h4psgp4CmJ", f"{PEER_4}:z2M1k7h4psgp4CmJ#key-1"],
        }
        for did in (WEB, PEER_4):
            self.assertEqual(self.update(self.bob, did), "success")

    def update(self, guest: InMemoryWallet, did: str, action: str = "add", version: str = CM3, **headers: Any) -> str:
        """Send one update; the response repeats the spelling."""
        kind = "recipient-update" if version == CM3 else "keylist-update"
        updates = [{"recipient_did": did, "action": action}]
        (entry,) = guest.answer(f"{version}/{kind}", {"updates": updates}, **headers).body["updated"]
        self.assertEqual(entry["recipient_did"], did)
        return str(entry["result"])

    def test_nobody_else_registers_a_spelling(self) -> None:
        """No other account can add or remove any spelling, in either version."""
        for did, names in self.names.items():
            for name in (did, *names):
                for version in (CM2, CM3):
                    self.assertEqual(self.update(self.eve, name, version=version), "client_error", name)
                    self.assertIn(self.update(self.eve, name, "remove", version), ("no_change", "client_error"), name)
        self.assertEqual(self.eve.answer(f"{CM3}/recipient-query").body["dids"], [{"recipient_did": self.eve.did}])

    def test_forwards_to_any_spelling(self) -> None:
        """Messages to any spelling are queued for its owner, whoever else tries to register it."""
        for did, names in self.names.items():
            for name in names:
                self.update(self.eve, name)
                forward = pack_forward(self.in_memory, name, self.bob.make_payload())
                self.assertEqual(self.in_memory.receive(forward).status, 202, name)
            status = self.bob.answer(f"{MP}/status-request", {"recipient_did": did})
            self.assertEqual(status.body["message_count"], len(names))
        self.assertEqual(self.eve.count_queued(), 0)

    def test_pickup_by_any_spelling(self) -> None:
        """The owner can use any spelling, which the response repeats; no other account can."""
        for did, names in self.names.items():
            self.in_memory.receive(pack_forward(self.in_memory, did, self.bob.make_payload()))
            for name in names:
                for kind, body in (("status-request", {}), ("delivery-request", {"limit": 5})):
                    asked = {"recipient_did": name, **body}
                    answer = self.bob.answer(f"{MP}/{kind}", asked)
                    self.assertEqual(answer.body["recipient_did"], name)
                    self.assertEqual(code_of(self.eve.ask(f"{MP}/{kind}", asked), self.eve), NOT_ENROLLED, name)
                self.assertEqual(len(answer.message.attachments or ()), 1, name)

    def test_registers_keys_of_own_did(self) -> None:
        """Key ids of one's DID can be added, are listed as spelled, and removed one by one."""
        keys = [f"{self.eve.did}#key-{number}" for number in (1, 2)]
        for key in keys:
            self.assertEqual(self.update(self.eve, key), "success")
        listed = [{"recipient_did": did} for did in (self.eve.did, *keys)]
        self.assertEqual(self.eve.answer(f"{CM3}/recipient-query").body["dids"], listed)
        self.assertEqual(self.eve.answer(f"{CM2}/keylist-query").body["keys"], listed)
        for name in (self.eve.did, keys[0]):
            self.assertEqual(self.update(self.eve, name, "remove"), "success")
        self.assertEqual(self.eve.answer(f"{CM3}/recipient-query").body["dids"], listed[2:])
        for name in (self.eve.did, *keys):
            self.assertEqual(
                self.in_memory.receive(pack_forward(self.in_memory, name, self.eve.make_payload())).status, 202
            )
        self.assertEqual(self.eve.count_queued(), 3)
        self.assertEqual(self.update(self.eve, keys[1], "remove"), "success")
        self.assertEqual(
            self.in_memory.receive(pack_forward(self.in_memory, keys[1], self.eve.make_payload())).status, 400
        )

    def test_mediator_did(self) -> None:
        """No account can register a spelling of the mediator, and a forward to one is a forward to itself."""
        did = self.in_memory.did
        for name in (did, *spellings(did), derive_did_peer_3(did), "did:web:127.0.0.1%3a8080#key-1"):
            self.assertEqual(self.update(self.eve, name), "client_error", name)
            inner = pack_forward(self.in_memory, self.bob.did, self.bob.make_payload())
            self.assertEqual(self.in_memory.receive(pack_forward(self.in_memory, name, inner)).status, 202, name)


class ProofTests(SynchronousTestCase):
    """With `require_ownership`."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, didcomm={"require_ownership": True})
        self.bob, self.eve = InMemoryWallet(self.in_memory).enrol(), InMemoryWallet(self.in_memory).enrol()
        self.alias = WalletIdentity.generate()

    def update(self, guest: InMemoryWallet, did: str, proof: str | None = None) -> str:
        headers: dict[str, Any] = {}
        if proof is not None:
            now = self.in_memory.clock.seconds()
            made = prove_ownership(self.alias, proof, guest.did, self.in_memory.document, now=now)
            headers["attachments"] = [build_attachment(made)]
        updates = [{"recipient_did": did, "action": "add"}]
        (entry,) = guest.answer(f"{CM3}/recipient-update", {"updates": updates}, **headers).body["updated"]
        return str(entry["result"])

    def test_proof_covers_all_spellings(self) -> None:
        """A proof covers all spellings, and takes over those of other accounts."""
        keys = [f"{self.alias.did}#key-{number}" for number in (1, 2)]
        self.assertEqual(self.update(self.eve, keys[0]), "client_error")
        self.assertEqual(self.update(self.eve, keys[0], self.alias.did), "success")
        self.assertEqual(self.update(self.eve, keys[1]), "success")
        self.assertEqual(self.update(self.bob, self.alias.did), "client_error")
        self.assertEqual(self.update(self.bob, self.alias.did, keys[0]), "success")
        self.assertEqual(self.eve.answer(f"{CM3}/recipient-query").body["dids"], [{"recipient_did": self.eve.did}])
        self.assertEqual(
            self.in_memory.receive(pack_forward(self.in_memory, keys[1], self.bob.make_payload())).status, 202
        )
        self.assertEqual(self.bob.count_queued(), 1)

    def test_own_did_needs_no_proof(self) -> None:
        """No spelling of an account's own DID needs a proof."""
        self.assertEqual(self.update(self.bob, f"{self.bob.did}#key-1"), "success")
        self.assertEqual(self.update(self.bob, f"{self.eve.did}#key-1"), "client_error")

    def test_transfer_over_quota(self) -> None:
        """A transfer that does not fit is undone, with all spellings."""
        full = InMemoryMediator(self, didcomm={"require_ownership": True, "max_recipients": 1})
        self.in_memory, self.bob = full, InMemoryWallet(full).enrol()
        self.eve = InMemoryWallet(full)
        self.eve.answer(f"{CM3}/mediate-request")
        self.assertEqual(self.update(self.eve, f"{self.alias.did}#key-1", self.alias.did), "success")
        self.assertEqual(self.update(self.bob, self.alias.did, self.alias.did), "client_error")
        listed = self.eve.answer(f"{CM3}/recipient-query").body["dids"]
        self.assertEqual(listed, [{"recipient_did": f"{self.alias.did}#key-1"}])


class ListTests(SynchronousTestCase):
    def test_denied_did(self) -> None:
        """No spelling of a denied DID can be registered."""
        denied = WalletIdentity.generate().did
        in_memory = InMemoryMediator(self, didcomm={"deny": [denied, WEB]})
        bob = InMemoryWallet(in_memory).enrol()
        for name in (f"{denied}#key-1", derive_did_peer_3(denied), "did:web:WALLET.example:bob#key-1"):
            updates = [{"recipient_did": name, "action": "add"}]
            (entry,) = bob.answer(f"{CM3}/recipient-update", {"updates": updates}).body["updated"]
            self.assertEqual(entry["result"], "client_error", name)

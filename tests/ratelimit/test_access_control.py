"""`allow` and `deny`: who may have an account, and who is refused, in both protocols."""

from __future__ import annotations

import base64
import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.config.settings import Config
from mediatord.protocol.decentrl.did_decentrl import make_did, parse_did
from mediatord.ratelimit.registration import AccessList
from tests.from_prior import FromPriorClaims, make_from_prior
from tests.in_memory_identities import InMemoryDecentrlSocket, InMemoryIdentity
from tests.in_memory_mediator import CM3, MP, PING, InMemoryMediator, InMemoryWallet, code_of, pack_forward

NOT_ENROLLED = "e.p.req.not_enroll"


class AccessListTests(SynchronousTestCase):
    def test_matches_did_and_paths_below(self) -> None:
        """An entry matches its DID and DIDs below it; `deny` precedes `allow`."""
        access = AccessList()
        self.assertTrue(access.allows("did:example:a"))
        access.set_lists(
            ["did:web:a.example:*", "did:example:b"], ["did:web:a.example:bad", "did:web:a.example:worse:*"]
        )
        for did, allowed in {
            "did:example:b": True,
            "did:example:bb": False,
            "did:web:a.example": False,
            "did:web:a.example:user": True,
            "did:web:a.example.org:user": False,
            "did:web:a.example:bad": False,
            "did:web:a.example:bad:2": True,
            "did:web:a.example:worse:2": False,
        }.items():
            self.assertIs(access.allows(did), allowed, did)
        self.assertFalse(access.denies("did:example:c"))
        access.set_lists([], ["did:example:c"])
        self.assertFalse(access.allows("did:example:b"))

    def test_both_forms_of_did_peer_4(self) -> None:
        """Both forms of a did:peer:4 are one DID."""
        did = "did:peer:4zQmd8CpeFPci817KDsbSAKWcXAE2mjvCQSasRewvbSF54Bd:z2M1k7h4psgp4CmJcnQn2Ljp7Pz7ktsd7oBhMU3dWY5s"
        access = AccessList()
        access.set_lists(None, [did])
        self.assertTrue(access.denies(did.rpartition(":")[0]))

    def test_spellings_of_did_web(self) -> None:
        """A did:web leads to the same document in all spellings, and a denial of any holds."""
        access = AccessList()
        access.set_lists(None, ["did:web:A.example:user", "did:web:b.example:*", "did:web:c.example"])
        for did, denied in {
            "did:web:A.example:user": True,
            "did:web:a.EXAMPLE:user": True,
            "did:web:a.example%3A443:%75ser": True,
            "did:web:a.example%3A444:user": False,
            "did:web:a.example:User": False,
            "did:web:B.example:user": True,
            "did:web:b.example%3a443:user": True,
            "did:web:b.example.org:user": False,
            "did:web:c.example:.well-known": True,
            "did:web:c.example:..": False,
        }.items():
            self.assertIs(access.denies(did), denied, did)

    def test_spellings_of_did_decentrl(self) -> None:
        """A did:decentrl may have padding, either alphabet, and prefixes."""
        keys, mediator = (bytes(range(32)), bytes(range(32, 64))), "did:web:mediator.example"
        plain = make_did("eve??>", *keys, mediator)
        raw = make_did("eve??>", *keys, mediator, raw=True)
        alias = plain.split(":")[2]
        padded = plain.replace(alias, base64.b64encode(b"eve??>").decode())
        access = AccessList()
        self.assertEqual(len({plain, raw, padded}), 3)
        for denied in (plain, raw, padded, f"did:decentrl:{alias}:*"):
            access.set_lists(None, [denied])
            self.assertEqual([access.denies(did) for did in (plain, raw, padded)], [True] * 3, denied)
            self.assertFalse(access.denies(make_did("ann", *keys, mediator)))


class ReloadableMediator(InMemoryMediator):
    """Mediator whose settings can be changed while it runs."""

    def reload(self, section: str, **values: Any) -> None:
        """Reload with other settings."""
        dump = self.base.reloader.config.model_dump()
        new = Config.model_validate({**dump, section: {**dump[section], **values}})
        self.base.reloader.reload(lambda: new)


class DIDCommTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = ReloadableMediator(self)
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.eve = InMemoryWallet(self.in_memory)

    def forward(self, wallet: InMemoryWallet, **headers: Any) -> Any:
        """The reply to a forward to Bob that this wallet signed or encrypted."""
        attachments = [{"data": {"json": json.loads(self.bob.make_payload())}}]
        body = {"next": self.bob.did}
        return self.in_memory.receive(
            wallet.pack("https://didcomm.org/routing/2.0/forward", body, attachments=attachments, **headers)
        )

    def test_denied_did_gets_no_account(self) -> None:
        """A denied DID gets no account, and nobody can register it."""
        self.in_memory.reload("didcomm", deny=[self.eve.did])
        self.assertEqual(self.eve.answer(f"{CM3}/mediate-request").message.type.name, "mediatedeny")
        updates = [{"recipient_did": self.eve.did, "action": action} for action in ("add", "remove")]
        results = self.bob.answer(f"{CM3}/recipient-update", {"updates": updates}).body["updated"]
        self.assertEqual([result["result"] for result in results], ["client_error", "no_change"])
        (event,) = self.in_memory.events("acct.deny")
        self.assertEqual((event["reason"], event["proto"]), ("policy", "didcomm"))

    def test_account_denied_later(self) -> None:
        """It is answered as if it had no account; its queued messages are there when it is allowed again."""
        self.eve.enrol()
        self.assertEqual(
            self.in_memory.receive(pack_forward(self.in_memory, self.eve.did, self.eve.make_payload())).status, 202
        )
        self.in_memory.reload("didcomm", deny=[self.eve.did])
        requests: dict[str, dict[str, Any]] = {
            f"{CM3}/recipient-query": {},
            f"{CM3}/recipient-update": {"updates": []},
            f"{MP}/status-request": {},
            f"{MP}/delivery-request": {"limit": 1},
            f"{MP}/messages-received": {"message_id_list": ["1"]},
            f"{MP}/live-delivery-change": {"live_delivery": True},
        }
        for type_, body in requests.items():
            self.assertEqual(code_of(self.eve.ask(type_, body), self.eve), NOT_ENROLLED, type_)
        self.assertEqual(self.eve.ask(PING).status, 200)
        self.assertEqual(self.bob.count_queued(), 0)
        self.in_memory.reload("didcomm", deny=[])
        self.assertEqual(self.eve.count_queued(), 1)

    def test_forwards_of_denied_sender(self) -> None:
        """Its authenticated forwards are refused; anonymous ones cannot be attributed."""
        self.in_memory.reload("didcomm", deny=[self.eve.did])
        self.assertEqual(code_of(self.forward(self.eve), self.eve), NOT_ENROLLED)
        self.assertEqual(self.bob.count_queued(), 0)
        self.assertEqual(self.forward(InMemoryWallet(self.in_memory)).status, 202)
        self.assertEqual(
            self.in_memory.receive(pack_forward(self.in_memory, self.bob.did, self.bob.make_payload())).status, 202
        )

    def test_other_spellings(self) -> None:
        """Other spellings of a host do not help."""
        self.in_memory.reload("didcomm", deny=["did:web:EVE.example:*"])
        updates = [{"recipient_did": "did:web:eve.example%3A443:x", "action": "add"}]
        (result,) = self.bob.answer(f"{CM3}/recipient-update", {"updates": updates}).body["updated"]
        self.assertEqual(result["result"], "client_error")

    def test_sockets_of_denied_did_are_closed(self) -> None:
        """Its live sockets are closed when it is denied; others stay open."""
        self.eve.enrol()
        denied_socket, allowed_socket = self.eve.go_live(), self.bob.go_live()
        self.in_memory.reload("didcomm", deny=[self.eve.did])
        self.assertEqual((denied_socket.codes, allowed_socket.codes), ([1008], []))

    def make_from_prior(self, new: InMemoryWallet) -> str:
        """Token by which Eve's DID announces another DID as its successor."""
        signing = self.eve.identity.signing
        claim = FromPriorClaims(signing.kid, self.eve.did, new.did, int(self.in_memory.clock.seconds()))
        return make_from_prior(claim, signing.private)

    def test_denied_did_cannot_rotate(self) -> None:
        """It can neither move its account to another DID nor move one to itself."""
        self.eve.enrol()
        for denied in ("prior", "new"):
            new = InMemoryWallet(self.in_memory)
            self.in_memory.reload("didcomm", deny=[self.eve.did if denied == "prior" else new.did])
            token = self.make_from_prior(new)
            answer = new.ask(f"{MP}/status-request", {}, from_prior=token)
            self.assertEqual(code_of(answer, new), NOT_ENROLLED, denied)
        self.in_memory.reload("didcomm", deny=[])
        self.assertEqual(self.eve.count_queued(), 0)

    def test_reloads_allow_list(self) -> None:
        """`allow` is reloaded with `registration`: existing accounts stay."""
        self.in_memory.reload("didcomm", registration="allow-list", allow=[self.eve.did])
        self.assertEqual(self.eve.answer(f"{CM3}/mediate-request").message.type.name, "mediategrant")
        other = InMemoryWallet(self.in_memory)
        self.assertEqual(other.answer(f"{CM3}/mediate-request").message.type.name, "mediatedeny")
        self.assertEqual(self.bob.count_queued(), 0)
        self.in_memory.reload("didcomm", registration="open", allow=[])
        self.assertEqual(other.answer(f"{CM3}/mediate-request").message.type.name, "mediategrant")


class DecentrlTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = ReloadableMediator(self)
        self.ann, self.eve = InMemoryIdentity(self.in_memory, "ann"), InMemoryIdentity(self.in_memory, "eve")
        self.ann.register()

    def deny(self) -> None:
        """Deny Eve from now on."""
        self.in_memory.reload("decentrl", deny=[self.eve.did])

    def is_refused(self, reply: Any) -> None:
        """Whether the command was refused as unauthorized."""
        self.assertEqual((reply.status, json.loads(reply.body)["code"]), (401, "UNAUTHORIZED_COMMAND"))

    def test_denied_did_cannot_register(self) -> None:
        """A denied DID cannot register."""
        self.deny()
        self.is_refused(self.eve.ask("REQUEST_COMMUNICATION_CONTRACT", **self.eve.registration_request()))
        (event,) = self.in_memory.events("acct.deny")
        self.assertEqual((event["reason"], event["proto"]), ("policy", "decentrl"))

    def test_other_spelling(self) -> None:
        """Nor can another spelling of the same keys."""
        eve = parse_did(self.eve.did)
        other = make_did(eve.alias, eve.signing_key, eve.prekey, eve.mediator_did, raw=True)
        self.assertNotEqual(other, self.eve.did)
        self.in_memory.reload("decentrl", deny=[other])
        self.is_refused(self.eve.ask("REQUEST_COMMUNICATION_CONTRACT", **self.eve.registration_request()))

    def test_denied_did_cannot_send_commands(self) -> None:
        """Nor can it send commands if it is registered; a command repeated afterwards is a duplicate."""
        self.eve.register()
        self.ann.save_contract_with(self.eve)
        self.assertEqual(self.eve.send_event(self.ann).status, 200)
        self.deny()
        self.is_refused(self.eve.send_event(self.ann))
        query = self.eve.command({"type": "QUERY_COMMUNICATION_CONTRACTS", "pagination": {"page": 0, "page_size": 1}})
        self.is_refused(self.in_memory.receive_command(query))
        self.in_memory.reload("decentrl", deny=[])
        self.assertEqual(json.loads(self.in_memory.receive_command(query).body)["code"], "DUPLICATE_NONCE")

    def test_sockets_of_denied_did_are_closed(self) -> None:
        """Its open socket is closed, and none is opened."""
        self.eve.register()
        denied_socket, allowed_socket = self.eve.connect(), self.ann.connect()
        self.deny()
        self.assertEqual((denied_socket.socket.codes, allowed_socket.socket.codes), ([1008], []))
        new_socket = InMemoryDecentrlSocket(self.in_memory)
        new_socket.send(self.eve.authentication_frame())
        self.assertEqual(new_socket.take_frames(), [{"type": "AUTH_FAILED", "code": "NOT_REGISTERED"}])

    def test_reloads_registration_mode(self) -> None:
        """`own` and `allow-list` are reloaded too."""
        wallet = InMemoryIdentity(self.in_memory, "guest", mediator_did="did:web:elsewhere.example")
        self.in_memory.reload("decentrl", registration="own")
        self.is_refused(wallet.ask("REQUEST_COMMUNICATION_CONTRACT", **wallet.registration_request()))
        self.in_memory.reload("decentrl", registration="allow-list", allow=[wallet.did])
        wallet.register()
        self.is_refused(self.eve.ask("REQUEST_COMMUNICATION_CONTRACT", **self.eve.registration_request()))

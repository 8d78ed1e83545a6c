"""`allow` and `deny`: who may have an account, and who is not served at all, in both protocols."""

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
    def test_names_and_what_is_below_them(self) -> None:
        """Exactly those, whichever list is longer; `deny` goes before `allow`."""
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

    def test_one_spelling(self) -> None:
        """Both forms of a did:peer:4 are one DID."""
        did = "did:peer:4zQmd8CpeFPci817KDsbSAKWcXAE2mjvCQSasRewvbSF54Bd:z2M1k7h4psgp4CmJcnQn2Ljp7Pz7ktsd7oBhMU3dWY5s"
        access = AccessList()
        access.set_lists(None, [did])
        self.assertTrue(access.denies(did.rpartition(":")[0]))

    def test_one_host(self) -> None:
        """A did:web leads to the same document however it is spelled, and both ways of denying it hold."""
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

    def test_one_pair_of_keys(self) -> None:
        """A did:decentrl may be written with padding, in either alphabet, with prefixes or without."""
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
    """A house whose settings can be changed while it stands."""

    def change(self, section: str, **values: Any) -> None:
        """Reload with other settings."""
        dump = self.base.reloader.config.model_dump()
        new = Config.model_validate({**dump, section: {**dump[section], **values}})
        self.base.reloader.reload(lambda: new)


class DIDCommTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = ReloadableMediator(self)
        self.bob = InMemoryWallet(self.in_memory).enrol()
        self.eve = InMemoryWallet(self.in_memory)

    def forward(self, guest: InMemoryWallet, **headers: Any) -> Any:
        """The reply to a forward to Bob that is proven to be this guest's."""
        attachments = [{"data": {"json": json.loads(self.bob.letter())}}]
        body = {"next": self.bob.did}
        return self.in_memory.receive(
            guest.pack("https://didcomm.org/routing/2.0/forward", body, attachments=attachments, **headers)
        )

    def test_no_grant(self) -> None:
        """A denied DID gets none, and nobody can register it for it."""
        self.in_memory.change("didcomm", deny=[self.eve.did])
        self.assertEqual(self.eve.answer(f"{CM3}/mediate-request").message.type.name, "mediatedeny")
        updates = [{"recipient_did": self.eve.did, "action": action} for action in ("add", "remove")]
        results = self.bob.answer(f"{CM3}/recipient-update", {"updates": updates}).body["updated"]
        self.assertEqual([one["result"] for one in results], ["client_error", "no_change"])
        (event,) = self.in_memory.events("acct.deny")
        self.assertEqual((event["reason"], event["proto"]), ("policy", "didcomm"))

    def test_an_account_that_is_denied_later(self) -> None:
        """Is answered as if it had none, whatever it asks; and what waits is there when it is served again."""
        self.eve.enrol()
        self.assertEqual(
            self.in_memory.receive(pack_forward(self.in_memory, self.eve.did, self.eve.letter())).status, 202
        )
        self.in_memory.change("didcomm", deny=[self.eve.did])
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
        self.assertEqual(self.bob.waiting(), 0)
        self.in_memory.change("didcomm", deny=[])
        self.assertEqual(self.eve.waiting(), 1)

    def test_its_forwards(self) -> None:
        """None that is proven to be its own is taken; nothing tells whose an anonymous one is."""
        self.in_memory.change("didcomm", deny=[self.eve.did])
        self.assertEqual(code_of(self.forward(self.eve), self.eve), NOT_ENROLLED)
        self.assertEqual(self.bob.waiting(), 0)
        self.assertEqual(self.forward(InMemoryWallet(self.in_memory)).status, 202)
        self.assertEqual(
            self.in_memory.receive(pack_forward(self.in_memory, self.bob.did, self.bob.letter())).status, 202
        )

    def test_other_spellings(self) -> None:
        """Of a host do not help."""
        self.in_memory.change("didcomm", deny=["did:web:EVE.example:*"])
        updates = [{"recipient_did": "did:web:eve.example%3A443:x", "action": "add"}]
        (result,) = self.bob.answer(f"{CM3}/recipient-update", {"updates": updates}).body["updated"]
        self.assertEqual(result["result"], "client_error")

    def test_its_sockets(self) -> None:
        """Those that are live when it is denied are closed; others stay."""
        self.eve.enrol()
        theirs, ours = self.eve.go_live(), self.bob.go_live()
        self.in_memory.change("didcomm", deny=[self.eve.did])
        self.assertEqual((theirs.codes, ours.codes), ([1008], []))

    def token(self, new: InMemoryWallet) -> str:
        """By which Eve proves that she is somebody else from now on."""
        signing = self.eve.identity.signing
        claim = FromPriorClaims(signing.kid, self.eve.did, new.did, int(self.in_memory.clock.seconds()))
        return make_from_prior(claim, signing.private)

    def test_another_name(self) -> None:
        """It cannot take its account to another DID, nor take one to itself."""
        self.eve.enrol()
        for denied in ("prior", "new"):
            new = InMemoryWallet(self.in_memory)
            self.in_memory.change("didcomm", deny=[self.eve.did if denied == "prior" else new.did])
            token = self.token(new)
            answer = new.ask(f"{MP}/status-request", {}, from_prior=token)
            self.assertEqual(code_of(answer, new), NOT_ENROLLED, denied)
        self.in_memory.change("didcomm", deny=[])
        self.assertEqual(self.eve.waiting(), 0)

    def test_allow_is_read_again(self) -> None:
        """With `registration`: those who have an account keep it."""
        self.in_memory.change("didcomm", registration="allow-list", allow=[self.eve.did])
        self.assertEqual(self.eve.answer(f"{CM3}/mediate-request").message.type.name, "mediategrant")
        stranger = InMemoryWallet(self.in_memory)
        self.assertEqual(stranger.answer(f"{CM3}/mediate-request").message.type.name, "mediatedeny")
        self.assertEqual(self.bob.waiting(), 0)
        self.in_memory.change("didcomm", registration="open", allow=[])
        self.assertEqual(stranger.answer(f"{CM3}/mediate-request").message.type.name, "mediategrant")


class DecentrlTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = ReloadableMediator(self)
        self.ann, self.eve = InMemoryIdentity(self.in_memory, "ann"), InMemoryIdentity(self.in_memory, "eve")
        self.ann.register()

    def deny(self) -> None:
        """Eve, from now on."""
        self.in_memory.change("decentrl", deny=[self.eve.did])

    def refused(self, reply: Any) -> None:
        """Whether it is, as not being allowed to."""
        self.assertEqual((reply.status, json.loads(reply.body)["code"]), (401, "UNAUTHORIZED_COMMAND"))

    def test_no_registration(self) -> None:
        """A denied DID cannot register."""
        self.deny()
        self.refused(self.eve.ask("REQUEST_COMMUNICATION_CONTRACT", **self.eve.registration()))
        (event,) = self.in_memory.events("acct.deny")
        self.assertEqual((event["reason"], event["proto"]), ("policy", "decentrl"))

    def test_another_spelling(self) -> None:
        """Of the same keys and names cannot either."""
        eve = parse_did(self.eve.did)
        other = make_did(eve.alias, eve.signing_key, eve.prekey, eve.mediator_did, raw=True)
        self.assertNotEqual(other, self.eve.did)
        self.in_memory.change("decentrl", deny=[other])
        self.refused(self.eve.ask("REQUEST_COMMUNICATION_CONTRACT", **self.eve.registration()))

    def test_no_command(self) -> None:
        """Nor may it do anything if it is registered; a command that is repeated afterwards is a repetition."""
        self.eve.register()
        self.ann.befriend(self.eve)
        self.assertEqual(self.eve.tell(self.ann).status, 200)
        self.deny()
        self.refused(self.eve.tell(self.ann))
        query = self.eve.command({"type": "QUERY_COMMUNICATION_CONTRACTS", "pagination": {"page": 0, "page_size": 1}})
        self.refused(self.in_memory.obey(query))
        self.in_memory.change("decentrl", deny=[])
        self.assertEqual(json.loads(self.in_memory.obey(query).body)["code"], "DUPLICATE_NONCE")

    def test_no_socket(self) -> None:
        """One that is open is closed, and none is opened."""
        self.eve.register()
        theirs, ours = self.eve.connect(), self.ann.connect()
        self.deny()
        self.assertEqual((theirs.socket.codes, ours.socket.codes), ([1008], []))
        late = InMemoryDecentrlSocket(self.in_memory)
        late.say(self.eve.greeting())
        self.assertEqual(late.heard(), [{"type": "AUTH_FAILED", "code": "NOT_REGISTERED"}])

    def test_registration_is_read_again(self) -> None:
        """`own` and `allow-list` as well."""
        guest = InMemoryIdentity(self.in_memory, "guest", mediator_did="did:web:elsewhere.example")
        self.in_memory.change("decentrl", registration="own")
        self.refused(guest.ask("REQUEST_COMMUNICATION_CONTRACT", **guest.registration()))
        self.in_memory.change("decentrl", registration="allow-list", allow=[guest.did])
        guest.register()
        self.refused(self.eve.ask("REQUEST_COMMUNICATION_CONTRACT", **self.eve.registration()))

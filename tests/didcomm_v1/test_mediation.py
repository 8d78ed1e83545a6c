"""Coordinate Mediation 1.0: grants, recipient keys in every spelling, who owns them, and hostile requests."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.protocol.didcomm_v1.envelope import pack_anoncrypt
from mediatord.protocol.didcomm_v1.keys import SigningKey, encode_base58_key
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, OLD_PREFIX, V1Message
from mediatord.wallet.didcomm_messages import build_attachment
from tests.did_factories import make_did_key
from tests.didcomm_v1.in_memory_wallet import InMemoryV1Wallet, compose, get_identity, make_key
from tests.in_memory_mediator import CM3, InMemoryMediator, InMemoryWallet, code_of, pack_forward
from tests.ratelimit.test_access_control import ReloadableMediator
from tests.wallet_identities import generate_identity, prove_ownership

MEDIATE_REQUEST = "coordinate-mediation/1.0/mediate-request"
KEYLIST_UPDATE = "coordinate-mediation/1.0/keylist-update"
KEYLIST_QUERY = "coordinate-mediation/1.0/keylist-query"
KEY = make_key("recipient").did_key
BASE58 = encode_base58_key(KEY)
WITH_FRAGMENT = f"{KEY}#{KEY.removeprefix('did:key:')}"


class MediationTestCase(SynchronousTestCase):
    settings: dict[str, Any] = {}

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, **self.settings)
        self.alice = InMemoryV1Wallet(self.in_memory, "alice")
        self.eve = InMemoryV1Wallet(self.in_memory, "eve")

    def grant(self, *wallets: InMemoryV1Wallet) -> None:
        """Request mediation, which must be granted."""
        for wallet in wallets:
            self.assertEqual(wallet.answer(MEDIATE_REQUEST).type.name, "mediate-grant")

    def update(self, wallet: InMemoryV1Wallet, *updates: tuple[str, str]) -> list[str]:
        """Send updates; their results. The response repeats keys and actions as sent, in order."""
        entries = [{"recipient_key": key, "action": action} for key, action in updates]
        response = wallet.answer(KEYLIST_UPDATE, updates=entries)
        self.assertEqual(response.type.name, "keylist-update-response")
        updated = response.members["updated"]
        self.assertEqual([{name: one[name] for name in ("recipient_key", "action")} for one in updated], entries)
        return [one["result"] for one in updated]

    def add(self, wallet: InMemoryV1Wallet, key: str) -> str:
        """Add one key; the result."""
        (result,) = self.update(wallet, (key, "add"))
        return result

    def list_keys(self, wallet: InMemoryV1Wallet) -> list[str]:
        """All keys, as the wallet is told."""
        keylist = wallet.answer(KEYLIST_QUERY)
        self.assertNotIn("pagination", keylist.members)
        return [one["recipient_key"] for one in keylist.members["keys"]]

    def find_owner(self, name: str) -> str | None:
        """The account that a message to this name is queued for."""
        owner: str | None = self.successResultOf(self.in_memory.store.find_owner(name))
        return owner

    def report_of(self, wallet: InMemoryV1Wallet, type_: str, status: int = 200, **members: Any) -> str:
        """Problem code of a refused request of coordinate mediation, whose report must name the request."""
        reply = wallet.ask(type_, **members)
        self.assertEqual(reply.status, status)
        report = wallet.open(reply.body)
        self.assertEqual((report.type.family, report.type.name), ("coordinate-mediation", "problem-report"))
        self.assertEqual(report.pthid, report.thid)
        code: str = report.members["description"]["code"]
        return code


class GrantTests(MediationTestCase):
    def test_grant(self) -> None:
        """Endpoint and routing key, in the thread and with the prefix of the request; and again."""
        for prefix in (DIDCOMM_ORG, OLD_PREFIX):
            plaintext = compose(MEDIATE_REQUEST, prefix, **{"~transport": {"return_route": "all"}})
            grant = self.alice.open(self.in_memory.receive(self.alice.pack(plaintext)).body)
            self.assertEqual((grant.type.prefix, grant.type.name), (prefix, "mediate-grant"))
            members = {name: value for name, value in grant.members.items() if not name.startswith(("@", "~"))}
            endpoint = f"{self.in_memory.config.public_url}/didcomm"
            routing_key = get_identity(self.in_memory).routing_key.did_key
            self.assertEqual(members, {"endpoint": endpoint, "routing_keys": [routing_key]})
        account = self.successResultOf(self.in_memory.store.get_account(self.alice.key.did_key))
        self.assertIsNotNone(account)
        self.assertEqual({event["proto"] for event in self.in_memory.events("acct.grant")}, {"didcomm_v1"})

    def test_thread(self) -> None:
        """The answer is in the thread of the request."""
        grant = self.alice.answer(MEDIATE_REQUEST, **{"~thread": {"thid": "thread-0001"}})
        self.assertEqual(grant.thid, "thread-0001")

    def test_not_granted(self) -> None:
        """Without a grant, keys cannot be registered or listed."""
        self.assertEqual(self.report_of(self.eve, KEYLIST_UPDATE, updates=[]), "mediation_not_granted")
        self.assertEqual(self.report_of(self.eve, KEYLIST_QUERY), "mediation_not_granted")

    def test_same_account_as_of_v2(self) -> None:
        """A v2 wallet whose DID is the key of the connection is the same wallet, with the same recipients."""
        identity = generate_identity("did:key")
        key = SigningKey.from_seed(identity.signing.private.secret)
        v1 = InMemoryV1Wallet(self.in_memory, "both", key=key)
        v2 = InMemoryWallet(self.in_memory, identity).enrol(KEY)
        self.assertEqual(self.list_keys(v1), [KEY])
        self.assertEqual(self.add(v1, BASE58), "no_change")
        self.assertEqual(self.update(v1, (BASE58, "remove")), ["success"])
        self.assertEqual(v2.answer(f"{CM3}/recipient-query").body["dids"], [])


class PolicyTests(MediationTestCase):
    def assert_denied(self, wallet: InMemoryV1Wallet) -> None:
        """Mediation is denied, and the wallet has no account."""
        denial = wallet.answer(MEDIATE_REQUEST)
        self.assertEqual(denial.type.name, "mediate-deny")
        self.assertEqual({name for name in denial.members if not name.startswith(("@", "~"))}, set())
        self.assertIsNone(self.successResultOf(self.in_memory.store.get_account(wallet.key.did_key)))

    def test_lists(self) -> None:
        """The lists of v2 hold for keys: denied ones get no account, and none of them is registered by others."""
        self.in_memory = ReloadableMediator(self, didcomm={"deny": [make_key("eve").did_key]})
        alice, eve = (InMemoryV1Wallet(self.in_memory, name) for name in ("alice", "eve"))
        self.assert_denied(eve)
        self.grant(alice)
        self.assertEqual(self.add(alice, encode_base58_key(eve.key.did_key)), "client_error")
        (event,) = self.in_memory.events("acct.deny")
        self.assertEqual((event["proto"], event["reason"]), ("didcomm_v1", "policy"))

    def test_allow_list(self) -> None:
        """Only listed keys get an account."""
        didcomm = {"registration": "allow-list", "allow": [make_key("alice").did_key]}
        self.in_memory = InMemoryMediator(self, didcomm=didcomm)
        self.grant(InMemoryV1Wallet(self.in_memory, "alice"))
        self.assert_denied(InMemoryV1Wallet(self.in_memory, "eve"))

    def test_retired(self) -> None:
        """A key whose account was moved to another DID gets none again."""
        self.grant(self.alice)
        moving = self.in_memory.store.move_account(self.alice.key.did_key, "did:web:new.example")
        self.assertTrue(self.successResultOf(moving))
        self.assert_denied(InMemoryV1Wallet(self.in_memory, "alice"))
        (event,) = self.in_memory.events("acct.deny")
        self.assertEqual(event["reason"], "rotated")

    def test_ownership_required(self) -> None:
        """As there is no proof in v1, mediation is denied where proofs are required; accounts that exist stay."""
        self.in_memory = InMemoryMediator(self, didcomm={"require_ownership": True})
        self.assert_denied(InMemoryV1Wallet(self.in_memory, "eve"))
        known = InMemoryV1Wallet(self.in_memory, "alice").enrol()
        self.grant(known)
        other = make_key("other").did_key
        names = (other, known.recipient.did_key, known.key.did_key)
        self.assertEqual([self.add(known, name) for name in names], ["client_error", "no_change", "success"])
        self.assertIsNone(self.find_owner(other))


class QuotaTests(MediationTestCase):
    settings = {"limits": {"accounts_per_address_per_day": 1, "registration_bytes_per_address_per_day": 170}}

    def test_accounts(self) -> None:
        """Only the first grant is charged to the address; one more account is refused."""
        self.grant(self.alice, self.alice, self.alice)
        self.assertEqual(self.report_of(self.eve, MEDIATE_REQUEST, 429), "e.m.req.registration-limited")
        self.assertIsNone(self.successResultOf(self.in_memory.store.get_account(self.eve.key.did_key)))

    def test_failed_grant_is_not_charged(self) -> None:
        """After a failure of the store, the address may still get its account."""
        with self.in_memory.failing("grant", StoreUnavailable()):
            self.assertEqual(self.alice.ask(MEDIATE_REQUEST).status, 503)
        self.grant(self.alice)

    def test_bytes(self) -> None:
        """What is registered is charged once, and nothing else: the account and two keys fit."""
        self.grant(self.alice)
        first, second, third = (make_key(name).did_key for name in "123")
        size = sum(map(len, (self.alice.key.did_key, first, second)))
        self.assertLessEqual(size, 170)
        self.assertGreater(size + len(third), 170)
        self.assertEqual(self.update(self.alice, (first, "add"), (first, "no action")), ["success", "client_error"])
        for key in (first, encode_base58_key(first), f"{first}#key"):
            self.assertEqual(self.add(self.alice, key), "no_change")
        with self.in_memory.failing("update_recipients", StoreUnavailable()):
            self.assertEqual(self.add(self.alice, second), "server_error")
        self.assertEqual(self.add(self.alice, second), "success")
        entries = [{"recipient_key": third, "action": "add"}]
        report = self.report_of(self.alice, KEYLIST_UPDATE, 429, updates=entries)
        self.assertEqual(report, "e.m.req.registration-limited")
        self.assertEqual(self.list_keys(self.alice), [first, second])


class KeylistTests(MediationTestCase):
    settings = {"didcomm": {"max_recipients": 3}}

    def setUp(self) -> None:
        super().setUp()
        self.grant(self.alice, self.eve)

    def test_spellings(self) -> None:
        """A key is one key in every spelling, and is stored as its did:key."""
        for spelling in (KEY, WITH_FRAGMENT, BASE58):
            self.assertEqual(self.add(self.alice, spelling), "success", spelling)
            for other in (KEY, WITH_FRAGMENT, BASE58):
                self.assertEqual(self.add(self.alice, other), "no_change", other)
            self.assertEqual(self.find_owner(KEY), self.alice.key.did_key)
            self.assertEqual(self.successResultOf(self.in_memory.store.list_spellings(KEY)), [KEY])
            self.assertEqual(
                self.update(self.alice, (BASE58, "remove"), (spelling, "remove")), ["success", "no_change"]
            )
            self.assertIsNone(self.find_owner(KEY))

    def test_listed_as_the_wallet_spells(self) -> None:
        """In the spelling that it used last; DIDs without a key of v1 as they are."""
        did = "did:web:wallet.example"
        self.assertEqual(self.update(self.alice, (KEY, "add"), (did, "add")), ["success"] * 2)
        self.assertEqual(self.list_keys(self.alice), [KEY, did])
        self.add(self.alice, BASE58)
        self.assertEqual(self.list_keys(self.alice), [BASE58, did])
        self.add(self.alice, WITH_FRAGMENT)
        self.assertEqual(self.list_keys(self.alice), [KEY, did])

    def test_spelling_need_not_be_stored(self) -> None:
        """Keys are registered, even if the store cannot keep how the wallet spells them."""
        self.add(self.alice, KEY)

        def fail_to_store(*args: object, **options: object) -> Any:
            raise StoreUnavailable

        self.patch(self.in_memory.store.v1_connections, "put_connection", fail_to_store)
        other = encode_base58_key(make_key("other").did_key)
        self.assertEqual(self.add(self.alice, other), "success")

    def test_in_order(self) -> None:
        """One result an entry, in order, of mixed updates."""
        other = make_key("other").did_key
        updates = [
            (KEY, "add"),
            (BASE58, "remove"),
            ("no key", "add"),
            (WITH_FRAGMENT, "add"),
            (other, "remove"),
            (other, "replace"),
        ]
        results = ["success", "success", "client_error", "success", "no_change", "client_error"]
        self.assertEqual(self.update(self.alice, *updates), results)
        self.assertEqual(self.list_keys(self.alice), [KEY])
        (event,) = [event for event in self.in_memory.events("acct.update") if event["n_added"] == 2]
        self.assertEqual((event["proto"], event["n_removed"]), ("didcomm_v1", 1))

    def test_store_failure(self) -> None:
        """What the store could not do is told apart from what is wrong."""
        with self.in_memory.failing("update_recipients", StoreUnavailable()):
            results = self.update(self.alice, (KEY, "add"), ("no key", "add"))
        self.assertEqual(results, ["server_error", "client_error"])
        self.assertEqual(self.list_keys(self.alice), [])

    def test_too_many(self) -> None:
        """No more keys than an account may have."""
        keys = [make_key(f"key {number}").did_key for number in range(5)]
        results = self.update(self.alice, *((key, "add") for key in keys))
        self.assertEqual(results, ["success"] * 3 + ["client_error"] * 2)
        self.assertEqual(self.list_keys(self.alice), keys[:3])

    def test_dids_of_v2(self) -> None:
        """Senders of v2 may know the wallet by a DID, or by the did:key of its X25519 key."""
        agreement = make_did_key(PrivateKey.generate("X25519").public)
        names = ["did:web:wallet.example:alice", agreement]
        self.assertEqual([self.add(self.alice, name) for name in names], ["success"] * 2)
        self.assertEqual(self.list_keys(self.alice), names)

    def test_pages(self) -> None:
        """A page, and what is outside of it."""
        keys = [make_key(f"key {number}").did_key for number in range(3)]
        self.update(self.alice, *((key, "add") for key in keys))
        for paginate, listed, pagination in (
            ({"limit": 2, "offset": 0}, keys[:2], {"count": 2, "offset": 0, "remaining": 1}),
            ({"limit": 2, "offset": 2}, keys[2:], {"count": 1, "offset": 2, "remaining": 0}),
            ({"limit": 1}, keys[:1], {"count": 1, "offset": 0, "remaining": 2}),
            ({"limit": 0, "offset": 0}, [], {"count": 0, "offset": 0, "remaining": 3}),
            ({"offset": 9}, [], {"count": 0, "offset": 9, "remaining": 0}),
            ({"limit": -1, "offset": 0}, keys, None),
            ({"limit": None, "offset": None}, keys, None),
            ({}, keys, None),
            (None, keys, None),
        ):
            members = self.alice.answer(KEYLIST_QUERY, paginate=paginate).members
            self.assertEqual([one["recipient_key"] for one in members["keys"]], listed, paginate)
            self.assertEqual(members.get("pagination"), pagination, paginate)


class OwnershipTests(MediationTestCase):
    """A key belongs to the account that has registered it first, until its owner proves that it is its own."""

    def setUp(self) -> None:
        super().setUp()
        self.grant(self.alice, self.eve)
        self.identity = generate_identity("did:key")
        self.key = self.identity.did

    def take_back(self, wallet: InMemoryWallet) -> str:
        """Register the key in v2 with a proof of ownership; the result."""
        now, mediator = self.in_memory.clock.seconds(), self.in_memory.document
        proof = build_attachment(prove_ownership(self.identity, self.key, wallet.did, mediator, now=now))
        updates = [{"recipient_did": self.key, "action": "add"}]
        body = wallet.answer(f"{CM3}/recipient-update", {"updates": updates}, attachments=[proof]).body
        result: str = body["updated"][0]["result"]
        return result

    def test_key_of_another_account(self) -> None:
        """Nobody else can add or remove it, in any spelling and either version; and its owner keeps its mail."""
        self.assertEqual(self.add(self.alice, KEY), "success")
        v2 = InMemoryWallet(self.in_memory).enrol()
        for spelling in (KEY, WITH_FRAGMENT, BASE58):
            self.assertEqual(
                self.update(self.eve, (spelling, "add"), (spelling, "remove")), ["client_error", "no_change"]
            )
        for name in (KEY, WITH_FRAGMENT):
            updates = [{"recipient_did": name, "action": "add"}]
            answer = v2.answer(f"{CM3}/recipient-update", {"updates": updates})
            self.assertEqual(answer.body["updated"][0]["result"], "client_error")
        self.assertEqual((self.list_keys(self.eve), self.find_owner(KEY)), ([], self.alice.key.did_key))

    def test_key_of_a_v2_account(self) -> None:
        """The recipient DIDs of v2 accounts are theirs."""
        bob = InMemoryWallet(self.in_memory).enrol(self.key)
        for name in (self.key, encode_base58_key(self.key), f"{self.key}#key"):
            self.assertEqual(self.add(self.eve, name), "client_error")
        self.assertEqual(self.find_owner(self.key), bob.did)

    def test_stolen_key(self) -> None:
        """The proof of v2 wins over a registration of v1, for good."""
        self.assertEqual(self.add(self.eve, self.key), "success")
        bob = InMemoryWallet(self.in_memory).enrol()
        self.assertEqual(self.take_back(bob), "success")
        self.assertEqual(self.list_keys(self.eve), [])
        for name in (self.key, encode_base58_key(self.key), f"{self.key}#key"):
            self.assertEqual(self.update(self.eve, (name, "remove"), (name, "add")), ["no_change", "client_error"])
        forward = pack_forward(self.in_memory, self.key, bob.make_payload())
        self.assertEqual(self.in_memory.receive(forward).status, 202)
        self.assertEqual(bob.count_queued(), 1)

    def test_keys_of_the_mediator(self) -> None:
        """Nobody can have the mail of the mediator."""
        identity = get_identity(self.in_memory)
        for key in (identity.invitation_key, identity.routing_key, self.eve.own_key):
            for name in (key.did_key, encode_base58_key(key.did_key)):
                self.assertEqual(self.add(self.eve, name), "client_error")
            self.assertIsNone(self.find_owner(key.did_key))
        self.assertEqual(self.add(self.eve, self.in_memory.did), "client_error")

    def test_keys_of_the_mediator_in_v2(self) -> None:
        """Nor can accounts of v2; and a forward of v2 for such a key is one for nobody."""
        identity, v2 = get_identity(self.in_memory), InMemoryWallet(self.in_memory).enrol()
        for key in (identity.invitation_key, identity.routing_key, self.alice.own_key):
            for name in (key.did_key, f"{key.did_key}#{key.did_key[8:]}"):
                updates = [{"recipient_did": name, "action": "add"}]
                answer = v2.answer(f"{CM3}/recipient-update", {"updates": updates})
                self.assertEqual(answer.body["updated"][0]["result"], "client_error")
            forward = pack_forward(self.in_memory, key.did_key, v2.make_payload())
            self.assertEqual(code_of(self.in_memory.receive(forward)), "e.p.me.res.not-found")

    def test_key_of_another_connection(self) -> None:
        """The mediator's key for another wallet is not to be had either."""
        self.assertEqual(self.add(self.eve, self.alice.own_key.did_key), "client_error")

    def test_stolen_key_of_the_connection(self) -> None:
        """A wallet that registers the key of its connection gets it from whoever has it: its request proves it."""
        key = self.alice.key.did_key
        v2 = InMemoryWallet(self.in_memory).enrol()
        updates = [{"recipient_did": key, "action": "add"}]
        self.assertEqual(self.add(self.eve, key), "success")
        self.assertEqual(self.add(self.alice, key), "success")
        self.assertEqual((self.find_owner(key), self.list_keys(self.eve)), (key, []))
        self.assertEqual(self.update(self.eve, (key, "remove"), (key, "add")), ["no_change", "client_error"])
        self.assertEqual(
            v2.answer(f"{CM3}/recipient-update", {"updates": updates}).body["updated"][0]["result"], "client_error"
        )


class HostileRequestTests(MediationTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.grant(self.alice)

    def test_most_updates(self) -> None:
        """A thousand updates are served, one more is refused as a whole."""
        keys = [make_key(f"key {number}").did_key for number in range(1000)]
        results = self.update(self.alice, *((key, "add") for key in keys))
        self.assertEqual(results, ["success"] * 1000)
        entries = [{"recipient_key": key, "action": "remove"} for key in (*keys, KEY)]
        self.assertEqual(self.report_of(self.alice, KEYLIST_UPDATE, updates=entries), "e.p.msg.bad-updates")
        self.assertEqual(len(self.list_keys(self.alice)), 1000)
        self.assertEqual(self.add(self.alice, KEY), "client_error")

    def test_malformed_updates(self) -> None:
        """What is no list of updates is refused as a whole."""
        nested: Any = "x"
        for _ in range(50):
            nested = [nested]
        malformed: list[Any] = [
            None,
            "add",
            {},
            7,
            [KEY],
            [[]],
            [None],
            [{}],
            [{"recipient_key": KEY}],
            [{"recipient_key": KEY, "action": None}],
            [{"recipient_key": KEY, "action": ["add"]}],
            [{"recipient_key": {"key": KEY}, "action": "add"}],
            [{"recipient_key": nested, "action": "add"}],
            [{"recipient_key": KEY, "action": "add"}, 1],
        ]
        for updates in malformed:
            code = self.report_of(self.alice, KEYLIST_UPDATE, updates=updates)
            self.assertEqual(code, "e.p.msg.bad-updates", updates)
        self.assertEqual(self.report_of(self.alice, KEYLIST_UPDATE), "e.p.msg.bad-updates")
        self.assertEqual(self.list_keys(self.alice), [])

    def test_malformed_keys(self) -> None:
        """What names no recipient is refused, entry by entry."""
        names = [
            "",
            " ",
            BASE58[:-3],
            BASE58 + "1",
            BASE58.replace(BASE58[5], "0"),
            KEY[:-1],
            KEY.upper(),
            f" {KEY}",
            f"{KEY}\n",
            f"{KEY}/path",
            make_did_key(PrivateKey.generate("P-256").public),
            "did:key:",
            "did:",
            "did:web:",
            "did:web:wallet.example#" + "x" * 300,
            "did:web:" + "x" * 20_000,
            "z" * 100_000,
            "\U0001f600",
            "urn:uuid:0",
        ]
        results = self.update(self.alice, *((name, "add") for name in names))
        self.assertEqual(dict(zip(names, results, strict=True)), dict.fromkeys(names, "client_error"))
        self.assertEqual(self.list_keys(self.alice), [])

    def test_malformed_pages(self) -> None:
        """What is no page is refused."""
        malformed: list[Any] = [
            [],
            "all",
            1,
            True,
            {"limit": "1"},
            {"limit": 1.5},
            {"limit": True},
            {"limit": [1]},
            {"limit": 2**31},
            {"limit": 2**63},
            {"limit": 1, "offset": -1},
            {"offset": {}},
            {"offset": 2**63},
        ]
        for paginate in malformed:
            code = self.report_of(self.alice, KEYLIST_QUERY, paginate=paginate)
            self.assertEqual(code, "e.p.msg.bad-paginate", paginate)

    def test_unknown_members_are_ignored(self) -> None:
        """A request may have members of later versions."""
        grant: V1Message = self.alice.answer(MEDIATE_REQUEST, mediator_terms=["x"], recipient_terms={"a": [1]})
        self.assertEqual(grant.type.name, "mediate-grant")

    def test_anonymous_request(self) -> None:
        """A grant is for the key that authenticates the request only."""
        raw = pack_anoncrypt(compose(MEDIATE_REQUEST), self.eve.own_key.did_key)
        reply = self.in_memory.receive(raw)
        self.assertEqual((reply.status, reply.body), (400, b""))
        self.assertIsNone(self.successResultOf(self.in_memory.store.get_account(self.eve.key.did_key)))

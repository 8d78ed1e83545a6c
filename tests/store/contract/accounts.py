"""Contract for accounts and their recipient DIDs."""

from __future__ import annotations

from mediatord.errors import MediationNotGranted, UnknownRecipient
from mediatord.protocol.didcomm.did_methods import derive_did_peer_3
from mediatord.store.interfaces.decentrl import CommandGuard, Contract
from mediatord.store.interfaces.store import Account, ExpiredAccount, RecipientUpdateAction
from mediatord.store.registered_spellings import MAX_REGISTERED_SPELLINGS
from tests.store.builders import ALICE, BOB, NOON
from tests.store.contract.base import INBOX, OTHER, StoreContract

CAROL = "did:example:carol"
DAY = 86_400.0
_PEER_2 = "did:peer:2.Ez6LSbysY2xFMRpGMhb7tFTLMpeuPRaqaWM1yECx2AtzE3KCc"
# Each line is one DID.
EQUIVALENT = (
    (OTHER, f"{OTHER}#key-1", f"{OTHER}/path", f"{OTHER}?query", f"{OTHER};service=a", OTHER.replace("z", "%7A")),
    (_PEER_2, derive_did_peer_3(_PEER_2), f"{_PEER_2}#key-1", f"{derive_did_peer_3(_PEER_2)}#key-1"),
    ("did:peer:4zQmShort", "did:peer:4zQmShort:zLong", "did:peer:4zQmShort:zOther#key-1"),
    ("did:web:wallet.example:a", "did:web:Wallet.EXAMPLE:a", "did:web:wallet.example%3A443:%61#key-1"),
    ("did:example:x-1", "did:example:x%2D1", "did:example:x%2d1?a=b#c"),
)


class AccountContract(StoreContract):
    """Contract of `IAccountStore`."""

    async def test_grant_is_idempotent(self) -> None:
        """A grant creates an account; a second grant returns the same account (reference 5.3)."""
        self.assertIsNone(await self.store.get_account(CAROL))
        granted = await self.store.grant(CAROL)
        self.assertEqual(granted, Account(CAROL, NOON, draft03=False))
        self.clock.advance(5)
        self.assertEqual(await self.store.grant(CAROL), granted)
        self.assertEqual(await self.store.get_account(CAROL), granted)
        self.assertIsNone(await self.store.get_account(CAROL[:-1]))

    async def test_remembers_accounts_of_older_draft(self) -> None:
        """The store records which accounts use the older draft of the protocol (reference 1.10)."""
        await self.store.mark_draft03(ALICE)
        await self.store.mark_draft03(CAROL)
        self.assertEqual(await self.store.get_account(ALICE), Account(ALICE, NOON, draft03=True))
        self.assertEqual(await self.store.get_account(BOB), Account(BOB, NOON, draft03=False))
        self.assertIsNone(await self.store.get_account(CAROL))

    async def test_finds_owner_by_any_form_of_did(self) -> None:
        """The owner of a DID is the account that registered it, whichever form of the DID is looked up."""
        self.assertEqual(await self.store.find_owner(INBOX), ALICE)
        self.assertEqual(await self.store.find_owner(INBOX), ALICE)
        self.assertEqual(await self.store.find_owner(INBOX + "#key-1"), ALICE)
        for other_did in (OTHER, ALICE, INBOX[:-1], INBOX + "x"):
            self.assertIsNone(await self.store.find_owner(other_did))

    async def test_owner_lookup_follows_updates(self) -> None:
        """The owner is correct as soon as an update is done, for additions and removals."""
        self.assertIsNone(await self.store.find_owner(OTHER))
        await self.register(BOB, OTHER)
        self.assertEqual(await self.store.find_owner(OTHER), BOB)
        await self.update_recipients(BOB, (OTHER, "remove"))
        self.assertIsNone(await self.store.find_owner(OTHER))
        await self.register(ALICE, OTHER)
        self.assertEqual(await self.store.find_owner(OTHER), ALICE)

    async def test_reports_result_of_each_update(self) -> None:
        """Each update has its own result, in order (reference 5.3)."""
        results = await self.update_recipients(
            BOB,
            (OTHER, "add"),
            (OTHER, "add"),
            (INBOX, "add"),
            (INBOX, "remove"),
            ("did:key:unknown", "remove"),
            (OTHER, "remove"),
            (OTHER, "remove"),
            (OTHER, "add"),
        )
        expected = [
            "success",
            "no_change",
            "client_error",
            "no_change",
            "no_change",
            "success",
            "no_change",
            "success",
        ]
        self.assertEqual(results, expected)
        self.assertEqual(await self.store.list_recipients(BOB, offset=0, limit=9), ([OTHER], 1))
        self.assertEqual(await self.store.find_owner(INBOX), ALICE)

    async def test_refuses_more_than_max_recipients(self) -> None:
        """A DID beyond the limit is refused; one that is registered already does not exceed it (reference 5.3)."""
        results = await self.update_recipients(
            ALICE,
            ("did:a", "add"),
            ("did:b", "add"),
            (INBOX, "add"),
            (INBOX, "remove"),
            ("did:b", "add"),
            max_recipients=2,
        )
        self.assertEqual(results, ["success", "client_error", "no_change", "success", "success"])
        self.assertEqual(await self.store.list_recipients(ALICE, offset=0, limit=9), (["did:a", "did:b"], 2))

    async def test_refuses_update_without_account(self) -> None:
        """Recipient DIDs cannot be registered without a grant (reference 5.3)."""
        with self.assertRaises(MediationNotGranted):
            await self.update_recipients(CAROL, (OTHER, "add"))
        self.assertIsNone(await self.store.find_owner(OTHER))

    async def test_lists_recipients_in_pages(self) -> None:
        """Recipient DIDs are listed in order of registration, in pages, with the total (reference 5.3)."""
        await self.register(ALICE, "did:z", "did:a", "did:m")
        await self.update_recipients(ALICE, ("did:a", "remove"))
        await self.register(ALICE, "did:b", "did:a")
        everything = [INBOX, "did:z", "did:m", "did:b", "did:a"]
        for offset, limit in ((0, 99), (0, 2), (2, 2), (4, 2), (5, 2), (9, 9), (0, 0)):
            found = await self.store.list_recipients(ALICE, offset=offset, limit=limit)
            self.assertEqual(found, (everything[offset : offset + limit], 5))
        self.assertEqual(await self.store.list_recipients(BOB, offset=0, limit=9), ([], 0))
        self.assertEqual(await self.store.list_recipients(CAROL, offset=0, limit=9), ([], 0))

    async def test_removal_keeps_queued_messages(self) -> None:
        """After a removal nothing more is accepted, but queued messages stay for the account (reference 5.3)."""
        await self.enqueue_ids("a", "b")
        await self.update_recipients(ALICE, (INBOX, "remove"))
        with self.assertRaises(UnknownRecipient):
            await self.enqueue_ids("c")
        self.assertEqual(await self.list_waiting(ALICE), ["a", "b"])
        self.assertEqual(await self.list_waiting(ALICE, INBOX), ["a", "b"])
        self.assertEqual(await self.store.list_recipients(ALICE, offset=0, limit=9), ([], 0))
        removed = await self.store.acknowledge(ALICE, ["a", "b"])
        self.assertEqual([message.recipient_did for message in removed], [INBOX, INBOX])
        self.assertEqual(await self.store.queue_sizes(9), ([], 0))

    async def test_new_owner_gets_new_messages_only(self) -> None:
        """An account that registers a DID which another has removed gets new messages only (reference 5.3)."""
        await self.enqueue_ids("a")
        await self.update_recipients(ALICE, (INBOX, "remove"))
        await self.register(BOB, INBOX)
        enqueued = await self.enqueue_ids("b", "c", "d")
        self.assertEqual((enqueued.evicted, {message.account for message in enqueued.messages}), ((), {BOB}))
        self.assertEqual(await self.list_waiting(ALICE, INBOX), ["a"])
        self.assertEqual(await self.list_waiting(BOB, INBOX), ["b", "c", "d"])
        self.assertEqual([gone.account for gone in await self.store.acknowledge(ALICE, ["a", "b"])], [ALICE])
        self.assertEqual(await self.list_waiting(BOB), ["b", "c", "d"])

    async def test_registering_again_restores_queue(self) -> None:
        """An account that registers a DID again has the messages still queued for it, within the same limits."""
        await self.enqueue_ids("a", "b")
        await self.update_recipients(ALICE, (INBOX, "remove"), (INBOX, "add"))
        enqueued = await self.enqueue_ids("c", "d")
        self.assertEqual([message.id for message in enqueued.evicted], ["a"])
        self.assertEqual(await self.list_waiting(ALICE, INBOX), ["b", "c", "d"])

    async def test_did_has_one_owner_in_all_forms(self) -> None:
        """Another account can register or remove a DID under none of its forms and DID URLs."""
        for first, *others in EQUIVALENT:
            await self.register(BOB, first)
            for other in others:
                self.assertEqual(await self.store.find_owner(other), BOB, other)
                self.assertEqual(await self.update_recipients(ALICE, (other, "add")), ["client_error"], other)
                self.assertEqual(await self.update_recipients(ALICE, (other, "remove")), ["no_change"], other)
                self.assertEqual(await self.store.list_spellings(other), [first])
            await self.update_recipients(BOB, (first, "remove"))
            for other in others:
                self.assertIsNone(await self.store.find_owner(other), other)
                self.assertEqual(await self.store.list_spellings(other), [])
                await self.register(ALICE, other)
                self.assertEqual(await self.update_recipients(BOB, (first, "add")), ["client_error"], other)
                self.assertEqual(await self.store.find_owner(first), ALICE, other)
                await self.update_recipients(ALICE, (other, "remove"))

    async def test_delivers_to_any_form_of_did(self) -> None:
        """A message to any form of a DID goes to its owner, who finds it under each form."""
        for first, *others in EQUIVALENT:
            await self.register(BOB, others[0])
            for number, name in enumerate((first, *others[:2])):
                (message,) = (await self.enqueue_ids(f"{first} {number}", to=name)).messages
                self.assertEqual(message.account, BOB)
            waiting = [f"{first} {number}" for number in range(len((first, *others[:2])))]
            for name in (first, *others):
                self.assertEqual(await self.list_waiting(BOB, name), waiting, name)
                self.assertEqual(await self.list_waiting(ALICE, name), [])
            await self.store.acknowledge(BOB, waiting)
            await self.update_recipients(BOB, (others[0], "remove"))

    async def test_spellings_are_registered_separately(self) -> None:
        """Spellings of a DID are registered and removed one by one, and listed in order, as they were spelled."""
        keys = [f"{OTHER}#key-{number}" for number in (1, 2)]
        results = await self.update_recipients(
            BOB, (keys[0], "add"), ("did:a", "add"), (OTHER, "add"), (keys[1], "add")
        )
        self.assertEqual(results, ["success"] * 4)
        everything = [keys[0], "did:a", OTHER, keys[1]]
        for offset, limit in ((0, 9), (0, 2), (1, 2), (2, 9), (4, 1), (0, 0)):
            found = await self.store.list_recipients(BOB, offset=offset, limit=limit)
            self.assertEqual(found, (everything[offset : offset + limit], 4))
        self.assertEqual(await self.store.list_spellings(OTHER), [keys[0], OTHER, keys[1]])
        results = await self.update_recipients(
            BOB, (keys[0], "remove"), (keys[0], "remove"), (OTHER + "#key-3", "remove"), (keys[1], "add")
        )
        self.assertEqual(results, ["success", "no_change", "no_change", "no_change"])
        self.assertEqual(await self.store.list_recipients(BOB, offset=0, limit=9), (["did:a", OTHER, keys[1]], 3))
        await self.enqueue_ids("a", to=OTHER)
        self.assertEqual(await self.update_recipients(BOB, (OTHER, "remove")), ["success"])
        self.assertEqual(await self.store.find_owner(OTHER), BOB)
        self.assertEqual(await self.update_recipients(BOB, (keys[1], "remove")), ["success"])
        self.assertIsNone(await self.store.find_owner(OTHER))
        self.assertEqual(await self.list_waiting(BOB, OTHER), ["a"])
        await self.register(BOB, keys[1])
        self.assertEqual(await self.list_waiting(BOB, keys[0]), ["a"])
        self.assertEqual(await self.store.list_recipients(BOB, offset=0, limit=9), (["did:a", keys[1]], 2))

    async def test_limits_spellings(self) -> None:
        """Spellings of one DID count against the limit like DIDs, and one DID has a limit of its own."""
        names = [f"{OTHER}#{number}" for number in range(MAX_REGISTERED_SPELLINGS + 1)]
        adding: list[tuple[str, RecipientUpdateAction]] = [(name, "add") for name in names]
        results = await self.update_recipients(BOB, *adding[:3], max_recipients=2)
        self.assertEqual(results, ["success", "success", "client_error"])
        results = await self.update_recipients(BOB, *adding)
        self.assertEqual(results[-2:], ["success", "client_error"])
        self.assertEqual((await self.store.list_recipients(BOB, offset=0, limit=1))[1], MAX_REGISTERED_SPELLINGS)

    async def test_moves_account_to_new_did(self) -> None:
        """An account moves with all its data to its new DID (reference 2.3)."""
        await self.enqueue_ids("a")
        await self.store.mark_draft03(ALICE)
        self.assertEqual(await self.store.find_owner(INBOX), ALICE)
        self.assertTrue(await self.store.move_account(ALICE, CAROL))
        self.assertEqual(await self.store.get_account(CAROL), Account(CAROL, NOON, draft03=True))
        self.assertEqual(await self.store.find_owner(INBOX), CAROL)
        self.assertEqual(await self.list_waiting(CAROL, INBOX), ["a"])
        self.assertEqual((await self.enqueue_ids("b")).messages[0].account, CAROL)
        self.assertEqual(await self.store.list_recipients(CAROL, offset=0, limit=9), ([INBOX], 1))
        found = await self.store.fetch_messages(CAROL, None, limit=1, max_bytes=1000)
        self.assertEqual(found[0].account, CAROL)
        self.assertEqual([message.account for message in await self.store.acknowledge(CAROL, ["a"])], [CAROL])

    async def test_refuses_prior_did_after_move(self) -> None:
        """A DID that was rotated away from has nothing and can register nothing (reference 2.3)."""
        await self.enqueue_ids("a")
        await self.store.move_account(ALICE, CAROL)
        self.assertIsNone(await self.store.get_account(ALICE))
        self.assertEqual(await self.list_waiting(ALICE), [])
        with self.assertRaises(MediationNotGranted):
            await self.store.grant(ALICE)
        self.assertFalse(await self.store.move_account(CAROL, ALICE))
        self.assertIsNone(await self.store.get_account(ALICE))
        self.assertEqual(await self.list_waiting(CAROL), ["a"])

    async def test_impossible_moves_change_nothing(self) -> None:
        """A move from an unknown account, or onto an existing one, changes nothing (reference 2.3)."""
        self.assertFalse(await self.store.move_account(CAROL, "did:example:dave"))
        self.assertFalse(await self.store.move_account(ALICE, BOB))
        self.assertFalse(await self.store.move_account(ALICE, ALICE))
        self.assertEqual(await self.store.find_owner(INBOX), ALICE)
        self.assertEqual(await self.store.grant(CAROL), Account(CAROL, NOON))
        self.assertEqual(await self.store.grant(ALICE), Account(ALICE, NOON))

    async def test_moves_repeatedly(self) -> None:
        """An account can move again and again; every earlier DID stays refused."""
        await self.store.move_account(ALICE, CAROL)
        self.assertTrue(await self.store.move_account(CAROL, "did:example:dave"))
        self.assertEqual(await self.store.find_owner(INBOX), "did:example:dave")
        for prior in (ALICE, CAROL):
            self.assertTrue(await self.store.is_retired(prior))
            with self.assertRaises(MediationNotGranted):
                await self.store.grant(prior)
        for other in (BOB, INBOX, "did:example:dave"):
            self.assertFalse(await self.store.is_retired(other))

    async def test_stores_long_forms(self) -> None:
        """The long form of a did:peer:4 is kept once it was seen (reference 8.4)."""
        self.assertIsNone(await self.store.recall_did("did:peer:4zQm"))
        await self.store.remember_did("did:peer:4zQm", "did:peer:4zQm:zLong")
        await self.store.remember_did("did:peer:4zQm", "did:peer:4zQm:zLong")
        self.assertEqual(await self.store.recall_did("did:peer:4zQm"), "did:peer:4zQm:zLong")
        self.assertIsNone(await self.store.recall_did("did:peer:4zQ"))


class AccountExpiryContract(StoreContract):
    """Contract for the expiry of unused and idle accounts."""

    async def expire_accounts(
        self, unused: float | None = 7 * DAY, idle: float | None = None, limit: int = 9
    ) -> list[str]:
        """Expire accounts created or last seen so many seconds ago; return their DIDs."""
        now = self.clock.seconds()
        before = [None if age is None else now - age for age in (unused, idle)]
        expired = await self.store.expire_accounts(limit, unused_before=before[0], idle_before=before[1])
        return [item.did for item in expired]

    async def test_expires_unused_account(self) -> None:
        """
        An account that never received a message and was not seen after its first day expires with its recipients.
        """
        self.clock.advance(0.9 * DAY)
        await self.store.record_contact(ALICE)
        self.clock.advance(6 * DAY)
        self.assertEqual(await self.expire_accounts(), [])
        self.clock.advance(0.2 * DAY)
        await self.store.grant(CAROL)
        before = self.clock.seconds() - 7 * DAY
        expired = await self.store.expire_accounts(9, unused_before=before, idle_before=None)
        self.assertEqual(
            sorted(expired, key=lambda one: one.did),
            [ExpiredAccount(ALICE, 1, "unused"), ExpiredAccount(BOB, 0, "unused")],
        )
        self.assertEqual([await self.store.get_account(did) for did in (ALICE, BOB)], [None, None])
        self.assertIsNone(await self.store.find_owner(INBOX))
        self.assertEqual(await self.store.list_recipients(ALICE, offset=0, limit=9), ([], 0))
        with self.assertRaises(UnknownRecipient):
            await self.enqueue_ids("a")
        await self.register(CAROL, INBOX)
        self.assertEqual((await self.store.grant(ALICE)).created_at, self.clock.seconds())

    async def test_keeps_used_account(self) -> None:
        """An account that has received a message, or was seen after its first day, stays."""
        await self.enqueue_ids("a")
        await self.store.acknowledge(ALICE, ["a"])
        await self.update_recipients(ALICE, (INBOX, "remove"))
        self.clock.advance(1.1 * DAY)
        await self.store.record_contact(BOB)
        self.assertEqual((await self.store.get_account(BOB) or Account("", 0)).seen_at, self.clock.seconds())
        self.clock.advance(99 * DAY)
        self.assertEqual(await self.expire_accounts(), [])
        self.assertIsNotNone(await self.store.get_account(ALICE))

    async def test_keeps_account_with_queued_messages(self) -> None:
        """An account with queued messages stays even if idle for long; others expire if idle expiry is on."""
        await self.enqueue_ids("a", ttl=99 * DAY)
        self.clock.advance(30 * DAY)
        self.assertEqual(await self.expire_accounts(None, None), [])
        self.assertEqual(await self.expire_accounts(None, 31 * DAY), [])
        self.assertEqual(await self.expire_accounts(None, 30 * DAY), [BOB])
        self.assertEqual(await self.list_waiting(), ["a"])
        await self.store.acknowledge(ALICE, ["a"])
        await self.store.record_contact(ALICE)
        self.clock.advance(20 * DAY)
        self.assertEqual(await self.expire_accounts(7 * DAY, 21 * DAY), [])
        self.assertEqual(await self.expire_accounts(7 * DAY, 20 * DAY), [ALICE])

    async def test_accounts_with_messages_do_not_block_others(self) -> None:
        """Any number of idle accounts with queued messages does not keep younger ones from expiring."""
        for number in range(3):
            await self.store.grant(f"did:example:{number}")
            await self.register(f"did:example:{number}", f"did:web:example:{number}")
            await self.enqueue_ids(f"m{number}", to=f"did:web:example:{number}", ttl=99 * DAY)
        self.clock.advance(DAY)
        for did in (ALICE, BOB, CAROL):
            await self.store.grant(did)
            await self.store.record_contact(did)
        self.clock.advance(30 * DAY)
        expired = [await self.expire_accounts(None, 20 * DAY, limit=2) for _ in range(2)]
        self.assertEqual({did for some in expired for did in some}, {ALICE, BOB, CAROL})
        self.assertEqual(await self.expire_accounts(None, 20 * DAY, limit=2), [])

    async def test_used_accounts_do_not_block_others(self) -> None:
        """Any number of older, used accounts does not keep unused ones from expiring."""
        self.assertEqual(len(await self.expire_accounts(0, None)), 2)
        for number in range(5):
            await self.store.grant(f"did:example:{number}")
            await self.register(f"did:example:{number}", f"did:web:example:{number}")
            await self.enqueue_ids(f"m{number}", to=f"did:web:example:{number}", ttl=99 * DAY)
        self.clock.advance(1)
        await self.store.grant(CAROL)
        self.clock.advance(8 * DAY)
        self.assertEqual(await self.expire_accounts(7 * DAY, None, limit=2), [CAROL])

    async def test_expires_at_most_limit(self) -> None:
        """At most `limit` accounts expire at once, the longest idle first."""
        self.clock.advance(DAY)
        for number in range(3):
            await self.store.grant(f"did:example:{number}")
        self.clock.advance(7 * DAY)
        self.assertEqual(set(await self.expire_accounts(limit=2)), {ALICE, BOB})
        self.assertEqual(len(await self.expire_accounts(limit=2)), 2)
        self.assertEqual(len(await self.expire_accounts(limit=2)), 1)
        self.assertEqual(await self.expire_accounts(limit=2), [])

    async def test_usage_counts_registrations_and_long_forms(self) -> None:
        """Registrations of identities and long forms count as usage; contracts between identities do not."""
        before = await self.store.get_account_usage()
        text = b'{"x": "%b"}' % (b"x" * 5_000)
        until = self.clock.seconds() + DAY
        wallet = "did:example:wallet"
        registration = Contract("r", None, wallet, until, b"1" * 32, text)
        await self.store.decentrl.save_contract(CommandGuard(b"1", until), registration)
        await self.store.remember_did("did:peer:4zQm", "did:peer:4zQm:z" + "x" * 5_000)
        usage = await self.store.get_account_usage()
        self.assertTrue(before.bytes + 10_000 <= usage.bytes < before.bytes + 12_000, usage)
        contract = Contract("c", wallet, BOB, until, b"2" * 32, text)
        await self.store.decentrl.save_contract(CommandGuard(b"2", until, sender=wallet), contract)
        self.assertEqual(await self.store.get_account_usage(), usage)

    async def test_usage_counts_accounts_and_recipients(self) -> None:
        """Usage counts accounts and their recipients until they are removed."""
        before = await self.store.get_account_usage()
        self.assertEqual(before.accounts, 2)
        await self.store.grant(CAROL)
        await self.register(CAROL, "did:example:" + "x" * 1000, OTHER, OTHER + "#key-1")
        usage = await self.store.get_account_usage()
        self.assertEqual(usage.accounts, 3)
        self.assertGreaterEqual(usage.bytes, before.bytes + 1000)
        self.assertLess(usage.bytes, before.bytes + 3000)
        self.clock.advance(8 * DAY)
        await self.enqueue_ids("a")
        await self.expire_accounts()
        after = await self.store.get_account_usage()
        self.assertEqual(after.accounts, 1)
        self.assertLess(after.bytes, before.bytes)

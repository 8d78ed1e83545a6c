"""Contract of connections of DIDComm v1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from zope.interface.verify import verifyObject

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.v1_connections import MAX_REPLACED_CONNECTIONS, IV1ConnectionStore, V1Connection
from tests.store.contract.base import StoreContract

WALLET = "did:key:z6MkWallet"
MAX_PENDING = 20


def make_connection(account: str = WALLET, own_key: str | None = None, **more: Any) -> V1Connection:
    """A connection whose key of the mediator follows from the account."""
    key = account.replace("z6Mk", "z6MkOwn") if own_key is None else own_key
    return V1Connection(account, key, f"request of {account}", **more)


def name_wallet(number: int) -> str:
    return f"did:key:z6Mk{number:04}"


class V1ConnectionContract(StoreContract):
    """An open store without connections, in which the wallets have no accounts."""

    connections: IV1ConnectionStore

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        self.connections = self.store.v1_connections
        verifyObject(IV1ConnectionStore, self.connections)

    async def put(self, *connections: V1Connection, max_pending: int = MAX_PENDING) -> None:
        for connection in connections:
            await self.connections.put_connection(connection, max_pending=max_pending)

    async def put_pending(self, number: int) -> list[str]:
        """Store connections without account, a second after one another; the keys of their wallets."""
        wallets = [name_wallet(index) for index in range(number)]
        for wallet in wallets:
            await self.put(make_connection(wallet))
            self.clock.advance(1.0)
        return wallets

    async def scan(self, limit: int = 100) -> list[V1Connection]:
        """All connections, read in slices."""
        found: list[V1Connection] = []
        while some := await self.connections.scan_connections(found[-1].account if found else "", limit):
            self.assertLessEqual(len(some), limit)
            found += some
        return found

    async def expire(self, age: float = 0.0, limit: int = 100) -> int:
        """Remove all connections of an age, in as many steps as it takes; their number."""
        expired = 0
        while number := await self.connections.expire_connections(self.clock.seconds() - age, limit):
            self.assertLessEqual(number, limit)
            expired += number
        return expired

    async def count_bytes(self) -> int:
        usage = await self.store.get_account_usage()
        return usage.bytes

    async def test_stores_all_that_is_known(self) -> None:
        """A connection is found by either key with all that was stored, and the time of that."""
        self.clock.advance(0.25)
        now = self.clock.seconds()
        full = make_connection(
            endpoint="https://wallet.example/ä",
            routing_keys=("did:key:z6MkFirst", "did:key:z6MkLast"),
            has_base58_keys=True,
            implicit_pickup="raw",
            created_at=1.0,
        )
        plain = make_connection("did:key:z6MkPlain")
        self.assertEqual(
            await self.connections.put_connection(full, max_pending=MAX_PENDING), replace(full, created_at=now)
        )
        await self.put(plain)
        for connection in (full, plain):
            stored = replace(connection, created_at=now)
            self.assertEqual(await self.connections.find_connection(connection.own_key), stored)
            self.assertEqual(await self.connections.get_connection(connection.account), stored)

    async def test_finds_nothing_by_other_keys(self) -> None:
        """A connection is not found by the wallet's key where the mediator's is meant, nor the other way round."""
        await self.put(make_connection())
        self.assertIsNone(await self.connections.find_connection(WALLET))
        self.assertIsNone(await self.connections.get_connection(make_connection().own_key))
        self.assertIsNone(await self.connections.find_connection(""))
        self.assertIsNone(await self.connections.get_connection(""))

    async def test_replaces_connection_of_account(self) -> None:
        """A connection replaces the one of the same account, which keeps the time of its creation."""
        began = self.clock.seconds()
        first = make_connection(endpoint="https://wallet.example", routing_keys=("did:key:z6MkRouting",))
        await self.put(first)
        self.assertIsNotNone(await self.connections.find_connection(first.own_key))
        self.clock.advance(10.0)
        second = replace(make_connection(own_key="did:key:z6MkNew"), request_id="again")
        expected = replace(second, created_at=began)
        self.assertEqual(await self.connections.put_connection(second, max_pending=MAX_PENDING), expected)
        self.assertEqual(await self.connections.get_connection(WALLET), expected)
        self.assertEqual(await self.connections.find_connection("did:key:z6MkNew"), expected)
        self.assertIsNone(await self.connections.find_connection(first.own_key))
        self.assertEqual(await self.connections.count_connections(), (0, 1))

    async def test_replacement_keeps_what_was_changed(self) -> None:
        """What was learnt of a wallet since its connection was read is left as it is when that is replaced."""
        first = make_connection()
        await self.put(first)
        await self.connections.change_connection(WALLET, has_base58_keys=True, implicit_pickup="raw")
        stored = await self.connections.put_connection(replace(first, request_id="again"), max_pending=MAX_PENDING)
        self.assertEqual((stored.request_id, stored.has_base58_keys, stored.implicit_pickup), ("again", True, "raw"))
        self.assertEqual(await self.connections.get_connection(WALLET), stored)

    async def test_shows_change_of_found_connection(self) -> None:
        """A connection that was found before is found as it was changed since."""
        first = make_connection()
        await self.put(first)
        self.assertIsNotNone(await self.connections.find_connection(first.own_key))
        await self.put(replace(first, endpoint="https://wallet.example"))
        found = await self.connections.find_connection(first.own_key)
        self.assertTrue(found is not None and found.endpoint == "https://wallet.example")

    async def test_changes_what_is_given(self) -> None:
        """A change leaves everything else as it is; one of a connection that does not exist makes none."""
        first = make_connection(endpoint="https://wallet.example")
        await self.put(first)
        stored = await self.connections.find_connection(first.own_key)
        assert stored is not None
        self.assertTrue(await self.connections.change_connection(WALLET, has_base58_keys=True))
        self.assertTrue(await self.connections.change_connection(WALLET, implicit_pickup="raw"))
        expected = replace(stored, has_base58_keys=True, implicit_pickup="raw")
        self.assertEqual(await self.connections.find_connection(first.own_key), expected)
        self.assertEqual(await self.connections.get_connection(WALLET), expected)
        self.assertTrue(await self.connections.change_connection(WALLET, has_base58_keys=False))
        changed = await self.connections.get_connection(WALLET)
        self.assertEqual(changed, replace(expected, has_base58_keys=False))
        self.assertFalse(await self.connections.change_connection("did:key:z6MkOther", implicit_pickup="raw"))
        self.assertEqual(await self.connections.count_connections(), (0, 1))

    async def test_refuses_key_of_another_connection(self) -> None:
        """A key of the mediator belongs to one connection: another one with it is not stored."""
        await self.put(make_connection())
        other = make_connection("did:key:z6MkOther", make_connection().own_key)
        with self.assertRaises(StoreUnavailable):
            await self.put(other)
        self.flushLoggedErrors()
        self.assertIsNone(await self.connections.get_connection(other.account))
        self.assertEqual([one.account for one in await self.scan()], [WALLET])
        self.assertEqual(await self.connections.count_connections(), (0, 1))

    async def test_limits_pending_connections(self) -> None:
        """One connection without account too many replaces the oldest of those, not one with an account."""
        granted, first, second, third = await self.put_pending(4)
        await self.store.grant(granted)
        self.assertIsNotNone(await self.connections.find_connection(make_connection(first).own_key))
        await self.put(make_connection(), max_pending=3)
        self.assertIsNone(await self.connections.find_connection(make_connection(first).own_key))
        self.assertEqual([one.account for one in await self.scan()], [granted, second, third, WALLET])
        self.assertEqual(await self.connections.count_connections(), (1, 3))
        await self.put(make_connection(first), max_pending=4)
        self.assertEqual(await self.connections.count_connections(), (1, 4))

    async def test_lowered_limit_of_pending_connections(self) -> None:
        """Below the number of pending connections, each new one replaces a few, and no others are touched."""
        number = MAX_REPLACED_CONNECTIONS + 4
        wallets = await self.put_pending(number)
        await self.put(make_connection(), max_pending=2)
        self.assertEqual([one.account for one in await self.scan()], [*wallets[-4:], WALLET])
        self.clock.advance(1.0)
        await self.put(make_connection("did:key:z6MkYoung"), max_pending=2)
        self.assertEqual([one.account for one in await self.scan()], [WALLET, "did:key:z6MkYoung"])

    async def test_replaces_connection_above_limit(self) -> None:
        """A pending connection can be replaced when there are as many as there may be, or more."""
        first, *_ = await self.put_pending(3)
        for max_pending in (3, 1):
            await self.put(replace(make_connection(first), request_id=f"{max_pending}"), max_pending=max_pending)
            found = await self.connections.get_connection(first)
            self.assertTrue(found is not None and found.request_id == f"{max_pending}")

    async def test_connections_with_account_are_not_limited(self) -> None:
        """A connection with an account is not pending, whether the account or the connection was first."""
        pending, *_ = await self.put_pending(2)
        await self.store.grant(WALLET)
        await self.put(make_connection(), max_pending=2)
        self.assertEqual(await self.connections.count_connections(), (1, 2))
        await self.store.grant(pending)
        await self.store.grant(pending)
        self.assertEqual(await self.connections.count_connections(), (2, 1))
        await self.put(make_connection("did:key:z6MkMore"), max_pending=2)
        await self.put(replace(make_connection(pending), request_id="again"), max_pending=0)
        self.assertEqual(await self.connections.count_connections(), (2, 2))

    async def test_removes_connection(self) -> None:
        """A connection is removed once, and leaves the account."""
        connection = make_connection()
        await self.store.grant(WALLET)
        await self.put(connection, make_connection("did:key:z6MkOther"))
        self.assertIsNotNone(await self.connections.find_connection(connection.own_key))
        self.assertTrue(await self.connections.remove_connection(WALLET))
        self.assertFalse(await self.connections.remove_connection(WALLET))
        self.assertIsNone(await self.connections.find_connection(connection.own_key))
        self.assertIsNone(await self.connections.get_connection(WALLET))
        self.assertIsNotNone(await self.store.get_account(WALLET))
        self.assertEqual(await self.connections.count_connections(), (0, 1))
        self.assertEqual([one.account for one in await self.scan()], ["did:key:z6MkOther"])

    async def test_connection_is_removed_with_account(self) -> None:
        """A connection is removed with its account, however that is removed, and with no other one."""
        removed, expired, kept = wallets = await self.put_pending(3)
        for wallet in wallets:
            await self.store.grant(wallet)
            self.assertIsNotNone(await self.connections.find_connection(make_connection(wallet).own_key))
            self.clock.advance(1.0)
        self.assertTrue(await self.store.administration.remove_account(removed))
        self.assertIsNone(await self.connections.find_connection(make_connection(removed).own_key))
        idle_before = self.clock.seconds() - 1.5
        await self.store.expire_accounts(10, unused_before=None, idle_before=idle_before)
        self.assertIsNone(await self.store.get_account(expired))
        self.assertIsNone(await self.connections.find_connection(make_connection(expired).own_key))
        self.assertEqual([one.account for one in await self.scan()], [kept])
        self.assertEqual(await self.connections.count_connections(), (1, 0))

    async def test_connection_of_new_account_is_pending(self) -> None:
        """A wallet that connects again after the removal of its account is pending."""
        await self.store.grant(WALLET)
        await self.put(make_connection())
        self.assertTrue(await self.store.administration.remove_account(WALLET))
        await self.put(make_connection())
        self.assertEqual(await self.connections.count_connections(), (0, 1))

    async def test_moved_account_has_no_connection(self) -> None:
        """The connection of a DID that an account is moved away from is removed; that of the new DID stays."""
        other = "did:key:z6MkOther"
        await self.store.grant(WALLET)
        await self.put(make_connection(), make_connection(other))
        self.assertTrue(await self.store.move_account(WALLET, other))
        self.assertIsNone(await self.connections.find_connection(make_connection().own_key))
        self.assertIsNone(await self.connections.get_connection(WALLET))
        self.assertEqual(await self.connections.count_connections(), (1, 0))
        self.assertEqual(await self.expire(age=-1.0), 0)
        self.assertIsNotNone(await self.connections.get_connection(other))

    async def test_expires_pending_connections(self) -> None:
        """Connections without account expire by the time of their creation, and those with one never."""
        wallets = await self.put_pending(4)
        await self.store.grant(wallets[1])
        await self.put(replace(make_connection(wallets[0]), request_id="again"))
        self.assertIsNotNone(await self.connections.find_connection(make_connection(wallets[0]).own_key))
        self.assertEqual(await self.expire(age=4.0), 0)
        self.assertEqual(await self.expire(age=1.5), 2)
        self.assertIsNone(await self.connections.find_connection(make_connection(wallets[0]).own_key))
        self.assertEqual([one.account for one in await self.scan()], [wallets[1], wallets[3]])
        self.assertEqual(await self.connections.count_connections(), (1, 1))
        await self.put(make_connection(), max_pending=2)

    async def test_expires_at_most_limit(self) -> None:
        """At most `limit` connections expire at once, the oldest first."""
        wallets = await self.put_pending(5)
        now = self.clock.seconds()
        self.assertEqual(await self.connections.expire_connections(now, 0), 0)
        self.assertEqual(await self.connections.expire_connections(now, 2), 2)
        self.assertEqual([one.account for one in await self.scan()], wallets[2:])
        self.assertEqual(await self.connections.expire_connections(now, 2), 2)
        self.assertEqual(await self.connections.expire_connections(now, 2), 1)
        self.assertEqual(await self.connections.expire_connections(now, 2), 0)

    async def test_scans_connections(self) -> None:
        """Connections with and without account are read in slices, in the order of their accounts."""
        accounts = [name_wallet(number) for number in (3, 0, 4, 1, 2)]
        await self.put(*map(make_connection, accounts))
        await self.store.grant(accounts[0])
        self.assertEqual([one.account for one in await self.scan(limit=2)], sorted(accounts))
        self.assertEqual(await self.connections.scan_connections("", 0), [])
        self.assertEqual(
            [one.own_key for one in await self.scan()],
            [make_connection(account).own_key for account in sorted(accounts)],
        )

    async def test_usage_counts_connections(self) -> None:
        """What is stored of connections counts as usage until they are removed."""
        before = await self.count_bytes()
        long = make_connection(endpoint="https://wallet.example/" + "x" * 5_000)
        await self.put(long, make_connection("did:key:z6MkOther", endpoint="https://" + "x" * 5_000))
        stored = await self.count_bytes()
        self.assertTrue(before + 10_000 <= stored < before + 13_000, (before, stored))
        await self.put(make_connection())
        replaced = await self.count_bytes()
        self.assertTrue(before + 5_000 <= replaced < before + 8_000, (before, replaced))
        await self.connections.remove_connection(WALLET)
        self.assertEqual(await self.expire(age=-1.0), 1)
        self.assertEqual(await self.count_bytes(), before)
        await self.put(long)
        await self.store.grant(WALLET)
        await self.store.administration.remove_account(WALLET)
        self.assertEqual(await self.count_bytes(), before)

    async def test_concurrent_connections_of_one_account(self) -> None:
        """Connections of one account that are stored concurrently are one, as one of them says."""
        some = [replace(make_connection(), request_id=f"request {number}") for number in range(8)]
        stored = await gatherResults(
            [self.connections.put_connection(one, max_pending=MAX_PENDING) for one in some], consumeErrors=True
        )
        (found,) = await self.scan()
        self.assertIn(found, stored)
        self.assertEqual(await self.connections.count_connections(), (0, 1))

    async def test_concurrent_grants(self) -> None:
        """A connection is not pending if its account is created at the same time, and so keeps from expiring."""
        wallets = [name_wallet(number) for number in range(8)]
        steps: list[Deferred[Any]] = []
        for wallet in wallets:
            steps.append(self.connections.put_connection(make_connection(wallet), max_pending=MAX_PENDING))
            steps.append(self.store.grant(wallet))
        await gatherResults(steps, consumeErrors=True)
        self.assertEqual(await self.connections.count_connections(), (8, 0))
        self.assertEqual(await self.expire(age=-1.0), 0)
        self.assertEqual(len(await self.scan()), 8)

    async def test_concurrent_removals(self) -> None:
        """A connection that is stored while its account is removed is gone, or pending and expires."""
        wallets = [name_wallet(number) for number in range(8)]
        for wallet in wallets:
            await self.store.grant(wallet)
        steps: list[Deferred[Any]] = []
        for wallet in wallets:
            steps.append(self.store.administration.remove_account(wallet))
            steps.append(self.connections.put_connection(make_connection(wallet), max_pending=MAX_PENDING))
        await gatherResults(steps, consumeErrors=True)
        with_account, pending = await self.connections.count_connections()
        self.assertEqual((with_account, pending), (0, len(await self.scan())))
        self.assertEqual(await self.expire(age=-1.0), pending)
        self.assertEqual((await self.connections.count_connections(), await self.scan()), ((0, 0), []))

    async def test_connections_survive_restart(self) -> None:
        """Connections are known to other processes, and their number as well."""
        stored = await self.connections.put_connection(make_connection(), max_pending=1)
        other = self.make_second_store()
        await other.open()
        self.assertEqual(await other.v1_connections.find_connection(stored.own_key), stored)
        await other.v1_connections.put_connection(make_connection("did:key:z6MkOther"), max_pending=1)
        self.assertEqual([one.account for one in await self.scan()], ["did:key:z6MkOther"])
        await other.close()

    async def test_fails_after_close(self) -> None:
        """All operations fail after close, even for what is cached."""
        await self.put(make_connection())
        self.assertIsNotNone(await self.connections.find_connection(make_connection().own_key))
        await self.store.close()
        calls: list[Deferred[Any]] = [
            self.connections.put_connection(make_connection(), max_pending=1),
            self.connections.find_connection(make_connection().own_key),
            self.connections.get_connection(WALLET),
            self.connections.remove_connection(WALLET),
            self.connections.expire_connections(self.clock.seconds(), 1),
            self.connections.count_connections(),
            self.connections.scan_connections("", 1),
        ]
        for failing in calls:
            with self.assertRaises(StoreUnavailable):
                await failing

"""
Contract tests of what the memory store does not share with the SQLite store: batches, failures, opening and closing.

Its statements are those of the SQLite store, which `test_contract` checks completely.
"""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import IStore
from mediatord.store.sqlite.memory_store import MemoryStore
from tests.store import contract
from tests.store.builders import ALICE, ImmediateClock


class MemoryBackend:
    """Other processes are daemons that share the store."""

    store: IStore

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: DecentrlQuotas, max_nonces: int) -> IStore:
        return MemoryStore(clock, limits, caps=caps, max_nonces=max_nonces)

    def make_second_store(self) -> IStore:
        return self.store


class MemoryEnqueueTests(MemoryBackend, contract.EnqueueContract, TestCase): ...


class MemoryLifecycleTests(MemoryBackend, contract.LifecycleContract, TestCase): ...


class MemoryDecentrlGuardTests(MemoryBackend, contract.DecentrlGuardContract, TestCase): ...


class MemoryDecentrlLifecycleTests(MemoryBackend, contract.DecentrlLifecycleContract, TestCase): ...


class MemoryClusterTests(MemoryBackend, contract.ClusterContract, TestCase): ...


class MemoryDeviceTests(MemoryBackend, contract.DeviceContract, TestCase): ...


class MemoryWakeupTests(MemoryBackend, contract.WakeupContract, TestCase): ...


class MemoryOwedWakeupTests(MemoryBackend, contract.OwedWakeupContract, TestCase): ...


class MemoryV1ConnectionTests(MemoryBackend, contract.V1ConnectionContract, TestCase): ...


class SharedMemoryTests(SynchronousTestCase):
    """A store that several daemons of one process have open."""

    def test_last_close_deletes_data(self) -> None:
        """Data is kept until the last daemon closes the store, and then deleted."""
        store = MemoryStore(ImmediateClock(), QueueLimits())
        for _ in range(2):
            self.successResultOf(store.open())
        self.successResultOf(store.grant(ALICE))
        self.successResultOf(store.close())
        self.assertIsNotNone(self.successResultOf(store.get_account(ALICE)))
        self.successResultOf(store.close())
        self.failureResultOf(store.get_account(ALICE), StoreUnavailable)
        self.successResultOf(store.close())
        self.successResultOf(store.open())
        self.assertIsNone(self.successResultOf(store.get_account(ALICE)))
        self.successResultOf(store.close())

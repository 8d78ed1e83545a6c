"""The memory store keeps the contract."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime
from twisted.trial.unittest import TestCase

from mediatord.interfaces import IStore, QueueLimits
from mediatord.store.memory import MemoryStore
from tests.store import contract
from tests.store.contract.nonces import CAPACITY


class MakesMemory:
    def make_store(self, clock: IReactorTime, limits: QueueLimits) -> IStore:
        return MemoryStore(clock, limits, max_nonces=CAPACITY)


class MemoryDepositTests(MakesMemory, contract.DepositContract, TestCase): ...


class MemoryPickupTests(MakesMemory, contract.PickupContract, TestCase): ...


class MemoryTimingTests(MakesMemory, contract.TimingContract, TestCase): ...


class MemoryAccountTests(MakesMemory, contract.AccountContract, TestCase): ...


class MemoryNonceTests(MakesMemory, contract.NonceContract, TestCase): ...


class MemoryLifecycleTests(MakesMemory, contract.LifecycleContract, TestCase): ...

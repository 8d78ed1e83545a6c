"""The memory store keeps the contract."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime
from twisted.trial.unittest import TestCase

from mediatord.interfaces import IStore, QueueLimits
from mediatord.interfaces.decentrl import Caps
from mediatord.store.memory import MemoryStore
from tests.store import contract


class MakesMemory:
    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: Caps, max_nonces: int) -> IStore:
        return MemoryStore(clock, limits, caps=caps, max_nonces=max_nonces)


class MemoryDepositTests(MakesMemory, contract.DepositContract, TestCase): ...


class MemoryPickupTests(MakesMemory, contract.PickupContract, TestCase): ...


class MemoryTimingTests(MakesMemory, contract.TimingContract, TestCase): ...


class MemoryAccountTests(MakesMemory, contract.AccountContract, TestCase): ...


class MemoryNonceTests(MakesMemory, contract.NonceContract, TestCase): ...


class MemoryLifecycleTests(MakesMemory, contract.LifecycleContract, TestCase): ...


class MemoryDecentrlGuardTests(MakesMemory, contract.DecentrlGuardContract, TestCase): ...


class MemoryDecentrlRegistrationTests(MakesMemory, contract.DecentrlRegistrationContract, TestCase): ...


class MemoryDecentrlCommunicationTests(MakesMemory, contract.DecentrlCommunicationContract, TestCase): ...


class MemoryDecentrlRequestTests(MakesMemory, contract.DecentrlRequestContract, TestCase): ...


class MemoryDecentrlDeliveryTests(MakesMemory, contract.DecentrlDeliveryContract, TestCase): ...


class MemoryDecentrlPendingTests(MakesMemory, contract.DecentrlPendingContract, TestCase): ...


class MemoryDecentrlEventTests(MakesMemory, contract.DecentrlEventContract, TestCase): ...


class MemoryDecentrlFilterTests(MakesMemory, contract.DecentrlFilterContract, TestCase): ...


class MemoryDecentrlTagTests(MakesMemory, contract.DecentrlTagContract, TestCase): ...


class MemoryDecentrlArchiveCapTests(MakesMemory, contract.DecentrlArchiveCapContract, TestCase): ...


class MemoryDecentrlPublicTests(MakesMemory, contract.DecentrlPublicContract, TestCase): ...


class MemoryDecentrlLifecycleTests(MakesMemory, contract.DecentrlLifecycleContract, TestCase): ...

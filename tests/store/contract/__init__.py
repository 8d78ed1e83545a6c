"""
What every backend promises (the docstrings of interfaces.py), as tests that any of them must pass.

A backend's test cases are `class XTests(MakesX, DepositContract, TestCase)` and so on, one for each mixin, where
`MakesX` has the method `make_store`.
"""

from tests.store.contract.accounts import AccountContract
from tests.store.contract.deposits import DepositContract
from tests.store.contract.lifecycle import LifecycleContract
from tests.store.contract.nonces import NonceContract
from tests.store.contract.pickup import PickupContract
from tests.store.contract.timing import TimingContract

__all__ = [
    "AccountContract",
    "DepositContract",
    "LifecycleContract",
    "NonceContract",
    "PickupContract",
    "TimingContract",
]

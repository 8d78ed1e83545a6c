"""Devices after a rotation of the mediator's keys."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.current_identity import load_identity
from mediatord.identity.key_file import retire_keys, rotate_keys
from mediatord.push.devices import FCMDevice
from tests.in_memory_mediator import InMemoryMediator, InMemoryWallet
from tests.push.scripted_service import ScriptedService


class KeyRotationTests(SynchronousTestCase):
    """A mediator with two wallets, each with a device."""

    def setUp(self) -> None:
        self.mediator = InMemoryMediator(self, push_service=ScriptedService("fcm"))
        push = self.mediator.base.push
        assert push is not None
        self.push = push
        assert self.push.registry is not None
        self.registry = self.push.registry
        self.push.housekeeping.startService()
        self.addCleanup(self.push.housekeeping.stopService)
        self.wallets = [InMemoryWallet(self.mediator).enrol().did for _ in range(2)]
        for did in self.wallets:
            self.mediator.run(self.registry.set_device(did, FCMDevice(f"token of {did}", "android"), "192.0.2.1"))

    def reload(self) -> None:
        self.mediator.base.identity.switch_to(load_identity(self.mediator.config))

    def test_devices_survive_retirement(self) -> None:
        """An hour after a rotation the former keys can be retired without a loss of devices."""
        path = self.mediator.config.identity.keys
        rotate_keys(path, str)
        self.reload()
        self.mediator.clock.advance(3_600.0)
        retire_keys(path, "prekey", str)
        self.reload()
        for did in self.wallets:
            (device,) = self.mediator.run(self.registry.get_devices(did))
            self.assertEqual(device, FCMDevice(f"token of {did}", "android"))

"""Test cases that share a daemon."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from twisted.trial.unittest import SynchronousTestCase

from tests.integration.daemon import Daemon
from tests.integration.message_load import prepare_daemon
from tests.integration.raw_decentrl_client import DaemonClient


class DaemonTestCase(SynchronousTestCase):
    """Tests with a daemon that is started and stopped explicitly."""

    daemon: ClassVar[Daemon]
    daemon_client: ClassVar[DaemonClient]

    @classmethod
    def start_daemon(cls, settings: Mapping[str, Any] | None = None) -> None:
        """Start a daemon."""
        cls.daemon = prepare_daemon(settings)
        cls.daemon.__enter__()
        try:
            cls.daemon_client = DaemonClient(cls.daemon)
        except BaseException:
            cls.daemon.__exit__(*sys.exc_info())
            raise

    @classmethod
    def stop_daemon(cls) -> None:
        """Stop the daemon, which must end cleanly."""
        cls.daemon.__exit__(None, None, None)

    def tearDown(self) -> None:
        """The daemon has logged no traceback."""
        self.assertNotIn("Traceback", self.daemon.output())


class SharedDaemonTestCase(DaemonTestCase):
    """
    Tests of a class, with a daemon for the class.

    :cvar settings: configuration of the daemon.
    """

    settings: ClassVar[dict[str, Any]] = {}

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.start_daemon(cls.settings)
        cls.addClassCleanup(cls.stop_daemon)

"""A daemon that the tests of a class share."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from twisted.trial.unittest import SynchronousTestCase

from tests.integration.daemon import Daemon
from tests.integration.message_load import prepare_daemon
from tests.integration.raw_decentrl_client import DaemonClient


class DaemonTestCase(SynchronousTestCase):
    """Tests that share a daemon, which somebody has to start and to end."""

    daemon: ClassVar[Daemon]
    daemon_client: ClassVar[DaemonClient]

    @classmethod
    def start(cls, settings: Mapping[str, Any] | None = None) -> None:
        """Have a daemon."""
        cls.daemon = prepare_daemon(settings)
        cls.daemon.__enter__()
        try:
            cls.daemon_client = DaemonClient(cls.daemon)
        except BaseException:
            cls.daemon.__exit__(*sys.exc_info())
            raise

    @classmethod
    def finish(cls) -> None:
        """Have it end, in an orderly way and without complaints."""
        cls.daemon.__exit__(None, None, None)

    def tearDown(self) -> None:
        """Nothing has gone wrong inside."""
        self.assertNotIn("Traceback", self.daemon.output())


class SharedDaemonTestCase(DaemonTestCase):
    """
    The tests of one class, and a daemon for them.

    :cvar settings: of it.
    """

    settings: ClassVar[dict[str, Any]] = {}

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.start(cls.settings)
        cls.addClassCleanup(cls.finish)

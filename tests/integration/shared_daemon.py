"""A daemon that the tests of a class share."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from twisted.trial.unittest import SynchronousTestCase

from tests.integration.daemon import Daemon
from tests.integration.residents import Door
from tests.integration.traffic import prepared


class SharedDaemonTestCase(SynchronousTestCase):
    """
    Tests that share a daemon, whose end has to be orderly.

    :cvar settings: of it.
    """

    settings: ClassVar[dict[str, Any]] = {}
    daemon: ClassVar[Daemon]
    door: ClassVar[Door]

    @classmethod
    def setUpClass(cls) -> None:
        cls.daemon = prepared(cls.settings)
        cls.daemon.__enter__()
        try:
            cls.door = Door(cls.daemon)
        except BaseException:
            cls.daemon.__exit__(*sys.exc_info())
            raise

    @classmethod
    def tearDownClass(cls) -> None:
        cls.daemon.__exit__(None, None, None)

    def tearDown(self) -> None:
        """Nothing has gone wrong inside."""
        self.assertNotIn("Traceback", self.daemon.output())

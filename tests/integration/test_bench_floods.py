"""Every flood of the benchmark reaches a real daemon and reports its results."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from mediatord.bench.flood_scenario import FloodGenerator
from tests.integration.daemon import Daemon


class FloodTests(SynchronousTestCase):
    def test_every_flood_reports_responses(self) -> None:
        """Requests are limited by address; connections and sockets stay open."""
        daemon = Daemon({"limits": {"ip_per_minute": 6, "did_per_minute": 1000}})
        self.addCleanup(daemon.clean)
        daemon.start()
        floods = FloodGenerator(daemon.url, 40, 40, 300)
        flooded = floods.run("address", 1.0, 40.0)
        self.assertTrue(flooded["sent"])
        self.assertEqual(flooded["202"], 6)
        self.assertEqual(set(flooded), {"sent", "202", "429"})
        for do in ("did", "fresh"):
            self.assertIn("202", floods.run(do, 0.5, 40.0), do)
        self.assertTrue(floods.run("loris", 0.5, 40.0)["kept"])
        self.assertTrue(floods.run("deaf", 0.5, 40.0)["sent"])

"""Every metric that an alert or a panel names, as a real Prometheus scrapes it from real daemons."""

from __future__ import annotations

import shutil
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemons are child processes, their sockets are real
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from analytics.report.outputs import make_registry
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.wallet.didcomm_client import DIDCommWallet, discover_mediator, open_http
from mediatord.wallet.didcomm_socket import connect_didcomm_socket
from tests.analytics.busy_day import BUSY_ROWS, make_report_data
from tests.certificate_authority import CertificateAuthority
from tests.external_programs import find_program
from tests.integration.cluster import send_to_peer_listener, wallet_at_node
from tests.integration.cluster_test_case import ClusterTestCase
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS, prepare_forwards
from tests.monitoring.prometheus import Prometheus
from tests.monitoring.promql_expressions import load_alert_rules, metric_names, panel_queries

reactor: Any = _reactor

# What is counted only once it has gone wrong; the family is in a scrape all the same.
ONLY_IN_TROUBLE = ('outcome="failed"', "mediator_ready_failures_total")
BETWEEN_NODES = "Cluster and workers"
# Once a minute the daemon looks what waits.
LOOKED_SECONDS = 300.0


def request(url: str, body: bytes | None = None, kind: str = ENCRYPTED_MEDIA_TYPE) -> int:
    """The status of the answer."""
    try:
        with urlopen(Request(url, data=body, headers={"Content-Type": kind}), timeout=PATIENCE_SECONDS) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code


def families(daemon: Daemon) -> set[str]:
    """The metrics of one scrape by all names that they may be asked for by."""
    with urlopen(f"{daemon.url}/metrics", timeout=PATIENCE_SECONDS) as response:
        found = list(text_string_to_metric_families(response.read().decode()))
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
    shown = {sample.name for family in found for sample in family.samples}
    return shown | {family.name + suffix for family in found for suffix in suffixes.get(family.type, ("",))}


async def converse(bobs: list[DIDCommWallet], keep: int) -> None:
    """Letters at the first of `bobs`, pushed on a socket of the last and fetched, some of them left to wait."""
    await bobs[0].enrol()
    await bobs[0].register()
    socket = await connect_didcomm_socket(reactor, bobs[-1])
    await socket.live()
    for letter in prepare_forwards(bobs[0], "pushed", 3):
        assert (await bobs[0].post(letter.body)).status == 202
        came = await socket.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
        await socket.acknowledge([came])
    await socket.close()
    for letter in prepare_forwards(bobs[0], "kept", 1 + keep):
        assert (await bobs[0].post(letter.body)).status == 202
    await bobs[-1].acknowledge((await bobs[-1].fetch(1))[:1])


class NightFile(BaseHTTPRequestHandler):
    """What a node exporter shows of the file of a night."""

    def do_GET(self) -> None:  # noqa: N802  named by the base class
        self.send_response(200)
        self.end_headers()
        self.wfile.write(generate_latest(make_registry(make_report_data(BUSY_ROWS))))

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nobody reads it."""


@pytest.mark.exhaustive
class SingleDaemonTests(TestCase):
    """A daemon over SQLite with TLS, one with workers, and the file of a night."""

    timeout = 1200

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        find_program("prometheus")
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        keys = CertificateAuthority(directory).issue("localhost", ["127.0.0.1"])
        self.daemon = self._started({}, f"ssl:0:interface=127.0.0.1:privateKey={keys}:certKey={keys}")
        self.several = self._started({"workers": 2})
        self.night = ThreadingHTTPServer(("127.0.0.1", 0), NightFile)
        threading.Thread(target=self.night.serve_forever, daemon=True).start()
        self.addCleanup(self.night.server_close)
        self.addCleanup(self.night.shutdown)

    def _started(self, settings: dict[str, Any], *listen: str) -> Daemon:
        daemon = Daemon(settings)
        self.addCleanup(daemon.clean)
        daemon.initialise()
        if listen:
            configuration = daemon.configuration()
            configuration["listen"] += list(listen)
            daemon.config.write_text(yaml.safe_dump(configuration), encoding="utf-8")
        daemon.start()
        return daemon

    async def test_every_expression(self) -> None:
        """
        Each is evaluated without an error; each panel shows something, and each alert is about something, but for
        what needs several nodes, or trouble.
        """
        http = open_http(reactor)
        bob = DIDCommWallet.generate(await discover_mediator(http, self.daemon.url), http, reactor)
        await converse([bob], keep=2)
        for daemon in (self.daemon, self.several):
            self.assertGreaterEqual(await deferToThread(request, f"{daemon.url}/didcomm", b"{}"), 400)
        targets = {
            "mediatord": [f"127.0.0.1:{each.port}" for each in (self.daemon, self.several)],
            "node": [f"127.0.0.1:{self.night.server_address[1]}"],
        }
        with Prometheus(targets) as prometheus:
            await deferToThread(self._look, prometheus)

    def _look(self, prometheus: Prometheus) -> None:
        wanted = [each for each in panel_queries() if each not in panel_queries(BETWEEN_NODES)]
        wanted = [each for each in wanted if not any(trouble in each for trouble in ONLY_IN_TROUBLE)]
        wanted += [f"mediator_workers{end}" for end in ("", "_answered")]
        # A name of an alert by itself: whether it has a value, whatever that is.
        asked = {name for rule in load_alert_rules().values() for name in metric_names(rule["expr"])}
        wanted += sorted(asked - {name for name in asked if "_cluster_" in name})
        missing = wanted

        def all_there() -> bool:
            nonlocal missing
            # While somebody goes on to be refused: rates need two scrapes with a change in between.
            request(f"{self.daemon.url}/didcomm", b"{}")
            missing = [each for each in missing if not prometheus.query(each)]
            return not missing

        try:
            prometheus.await_true(all_there, "all there", LOOKED_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"without data: {missing}") from error
        self.assertEqual(prometheus.query("mediator_messages_that_nobody_counts"), [])
        for expression in panel_queries():
            prometheus.query(expression)
        self._rules_are_well(prometheus)
        named = {
            name
            for each in [*panel_queries(), *(rule["expr"] for rule in load_alert_rules().values())]
            for name in metric_names(each)
        }
        ours = {name for name in named if not name.startswith(("mediatord_", "mediator_workers"))}
        self.assertLessEqual(ours, families(self.daemon))

    def _rules_are_well(self, prometheus: Prometheus) -> None:
        """All were evaluated; nothing fires of a daemon that was just started and is asked nonsense."""
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        self.assertEqual({rule["name"] for rule in rules}, set(load_alert_rules()))
        self.assertEqual({rule["health"]: rule.get("lastError", "") for rule in rules}, {"ok": ""})
        # The certificate of a test is good for a day.
        expected = {"MediatordCertificateEnding", "MediatordCertificateExpiring"}
        firing: set[str] = set()

        def all_fire() -> bool:
            nonlocal firing
            firing = {name for name in self._firing(prometheus) if not self._is_of_the_night(name)}
            return expected <= firing

        prometheus.await_true(all_fire, "firing")
        self.assertEqual(firing, expected)

    @staticmethod
    def _firing(prometheus: Prometheus) -> set[str]:
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        return {rule["name"] for rule in rules if rule["state"] == "firing"}

    @staticmethod
    def _is_of_the_night(alert: str) -> bool:
        return all(name.startswith("mediatord_") for name in metric_names(load_alert_rules()[alert]["expr"]))


class NodesTests(ClusterTestCase):
    """Three nodes on MongoDB."""

    async def test_every_expression_about_nodes(self) -> None:
        """Each panel about them shows something once one has pushed for another and turned a stranger away."""
        find_program("prometheus")
        a, b, _ = self.cluster.nodes
        http = open_http(reactor)
        bob = DIDCommWallet.generate(await discover_mediator(http, a.url), http, reactor)
        bobs = [wallet_at_node(bob, node.port, reactor) for node in (a, b)]
        await converse(bobs, keep=0)
        self.assertEqual(
            await deferToThread(send_to_peer_listener, self.cluster.port_of(a), b"who is there"), bytes(4)
        )
        wanted = [each for each in panel_queries(BETWEEN_NODES) if "mediator_workers" not in each]
        asked = {name for rule in load_alert_rules().values() for name in metric_names(rule["expr"])}
        wanted += sorted(name for name in asked if "_cluster_" in name)
        missing = wanted

        with Prometheus({"mediatord": [f"127.0.0.1:{node.port}" for node in self.cluster.nodes]}) as prometheus:

            def all_there() -> bool:
                nonlocal missing
                missing = [each for each in missing if not prometheus.query(each)]
                return not missing

            try:
                await deferToThread(prometheus.await_true, all_there, "all there")
            except AssertionError as error:
                raise AssertionError(f"without data: {missing}") from error

            def all_met() -> bool:
                return prometheus.values("min(mediator_cluster_nodes)") == ["3"]

            await deferToThread(prometheus.await_true, all_met, "all met")

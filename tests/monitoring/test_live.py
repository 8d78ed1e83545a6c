"""All metrics of alerts and panels, scraped by a Prometheus server from running daemons."""

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
from mediatord.cli.push import make_vapid_key
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.runtime.secret_files import create_secret_file
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
from tests.monitoring.promql_expressions import find_metric_names, list_panel_queries, load_alert_rules

reactor: Any = _reactor

# Metrics that have series only after a failure; their families are always exported.
FAILURE_METRICS = ('outcome="failed"', "mediator_ready_failures_total")
# Has series only after a wake-up.
WAKEUP_METRIC = "mediator_push_request_duration_seconds"
CLUSTER_ROW = "Cluster and workers"
# The daemon measures the backlog once a minute.
BACKLOG_TIMEOUT_SECONDS = 300.0


def request_status(url: str, body: bytes | None = None, kind: str = ENCRYPTED_MEDIA_TYPE) -> int:
    """Send a request; return the status of the response."""
    try:
        with urlopen(Request(url, data=body, headers={"Content-Type": kind}), timeout=PATIENCE_SECONDS) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code


def list_series_names(daemon: Daemon) -> set[str]:
    """Names of all series and families of one scrape, with the suffixes of their types."""
    with urlopen(f"{daemon.url}/metrics", timeout=PATIENCE_SECONDS) as response:
        found = list(text_string_to_metric_families(response.read().decode()))
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
    sample_names = {sample.name for family in found for sample in family.samples}
    return sample_names | {family.name + suffix for family in found for suffix in suffixes.get(family.type, ("",))}


async def exchange_messages(wallets: list[DIDCommWallet], keep: int) -> None:
    """Push forwards from the first wallet to a socket of the last, fetch one, and leave `keep` queued."""
    await wallets[0].enrol()
    await wallets[0].register()
    socket = await connect_didcomm_socket(reactor, wallets[-1])
    await socket.live()
    for forward in prepare_forwards(wallets[0], "pushed", 3):
        assert (await wallets[0].post(forward.body)).status == 202
        pushed_id = await socket.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
        await socket.acknowledge([pushed_id])
    await socket.close()
    for forward in prepare_forwards(wallets[0], "kept", 1 + keep):
        assert (await wallets[0].post(forward.body)).status == 202
    await wallets[-1].acknowledge((await wallets[-1].fetch(1))[:1])


class MetricsFileHandler(BaseHTTPRequestHandler):
    """Serves the metrics file of the analysis, like a node exporter."""

    def do_GET(self) -> None:  # noqa: N802  named by the base class
        self.send_response(200)
        self.end_headers()
        self.wfile.write(generate_latest(make_registry(make_report_data(BUSY_ROWS))))

    def log_message(self, format: str, *arguments: Any) -> None:
        """Ignore."""


@pytest.mark.exhaustive
class SingleDaemonTests(TestCase):
    """A daemon with SQLite and TLS, one with workers, and the metrics file of the analysis."""

    timeout = 1200

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        find_program("prometheus")
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        keys = CertificateAuthority(directory).issue("localhost", ["127.0.0.1"])
        vapid = directory / "vapid.pem"
        create_secret_file(vapid, make_vapid_key()[0])
        web_push = {"key_file": str(vapid), "contact": "mailto:ops@mediator.example"}
        self.daemon = self._start_daemon(
            {"push": {"web_push": web_push}}, f"ssl:0:interface=127.0.0.1:privateKey={keys}:certKey={keys}"
        )
        self.with_workers = self._start_daemon({"workers": 2})
        self.exporter = ThreadingHTTPServer(("127.0.0.1", 0), MetricsFileHandler)
        threading.Thread(target=self.exporter.serve_forever, daemon=True).start()
        self.addCleanup(self.exporter.server_close)
        self.addCleanup(self.exporter.shutdown)

    def _start_daemon(self, settings: dict[str, Any], *listen: str) -> Daemon:
        daemon = Daemon(settings)
        self.addCleanup(daemon.clean)
        daemon.initialise()
        if listen:
            configuration = daemon.configuration()
            configuration["listen"] += list(listen)
            daemon.config.write_text(yaml.safe_dump(configuration), encoding="utf-8")
        daemon.start()
        return daemon

    async def test_every_expression_has_data(self) -> None:
        """Without errors. Excepted are expressions that need several nodes or failures."""
        http = open_http(reactor)
        bob = DIDCommWallet.generate(await discover_mediator(http, self.daemon.url), http, reactor)
        await exchange_messages([bob], keep=2)
        for daemon in (self.daemon, self.with_workers):
            self.assertGreaterEqual(await deferToThread(request_status, f"{daemon.url}/didcomm", b"{}"), 400)
        targets = {
            "mediatord": [f"127.0.0.1:{daemon.port}" for daemon in (self.daemon, self.with_workers)],
            "node": [f"127.0.0.1:{self.exporter.server_address[1]}"],
        }
        with Prometheus(targets) as prometheus:
            await deferToThread(self._check_expressions, prometheus)

    def _check_expressions(self, prometheus: Prometheus) -> None:
        expected = [
            expression for expression in list_panel_queries() if expression not in list_panel_queries(CLUSTER_ROW)
        ]
        expected = [
            expression
            for expression in expected
            if not any(trouble in expression for trouble in (*FAILURE_METRICS, WAKEUP_METRIC))
        ]
        expected += [f"mediator_workers{end}" for end in ("", "_answered")]
        # Of alerts only the metrics: they must have a value, whatever it is.
        names = {name for rule in load_alert_rules().values() for name in find_metric_names(rule["expr"])}
        expected += sorted(names - {name for name in names if "_cluster_" in name})
        missing = expected

        def has_all_data() -> bool:
            nonlocal missing
            # Cause refusals: rates need two scrapes with a change in between.
            request_status(f"{self.daemon.url}/didcomm", b"{}")
            missing = [expression for expression in missing if not prometheus.query(expression)]
            return not missing

        try:
            prometheus.await_true(has_all_data, "all there", BACKLOG_TIMEOUT_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"without data: {missing}") from error
        self.assertEqual(prometheus.query("mediator_messages_that_nobody_counts"), [])
        for expression in list_panel_queries():
            prometheus.query(expression)
        self._check_rules(prometheus)
        used = {
            name
            for expression in [*list_panel_queries(), *(rule["expr"] for rule in load_alert_rules().values())]
            for name in find_metric_names(expression)
        }
        mediator_metrics = {name for name in used if not name.startswith(("mediatord_", "mediator_workers"))}
        self.assertLessEqual(mediator_metrics, list_series_names(self.daemon))

    def _check_rules(self, prometheus: Prometheus) -> None:
        """All are evaluated; only expected alerts fire for a new daemon that refuses requests."""
        rules = [rule for group in prometheus.request_api("rules")["groups"] for rule in group["rules"]]
        self.assertEqual({rule["name"] for rule in rules}, set(load_alert_rules()))
        self.assertEqual({rule["health"]: rule.get("lastError", "") for rule in rules}, {"ok": ""})
        # Test certificates are valid for a day.
        expected = {"MediatordCertificateEnding", "MediatordCertificateExpiring"}
        firing: set[str] = set()

        def all_fire() -> bool:
            nonlocal firing
            firing = {name for name in self._list_firing_alerts(prometheus) if not self._is_analysis_alert(name)}
            return expected <= firing

        prometheus.await_true(all_fire, "firing")
        self.assertEqual(firing, expected)

    @staticmethod
    def _list_firing_alerts(prometheus: Prometheus) -> set[str]:
        rules = [rule for group in prometheus.request_api("rules")["groups"] for rule in group["rules"]]
        return {rule["name"] for rule in rules if rule["state"] == "firing"}

    @staticmethod
    def _is_analysis_alert(alert: str) -> bool:
        return all(name.startswith("mediatord_") for name in find_metric_names(load_alert_rules()[alert]["expr"]))


class ClusterTests(ClusterTestCase):
    """Three nodes with MongoDB."""

    async def test_every_cluster_expression_has_data(self) -> None:
        """After a push through another node and a refused peer connection."""
        find_program("prometheus")
        a, b, _ = self.cluster.nodes
        http = open_http(reactor)
        bob = DIDCommWallet.generate(await discover_mediator(http, a.url), http, reactor)
        wallets = [wallet_at_node(bob, node.port, reactor) for node in (a, b)]
        await exchange_messages(wallets, keep=0)
        self.assertEqual(
            await deferToThread(send_to_peer_listener, self.cluster.port_of(a), b"who is there"), bytes(4)
        )
        expected = [
            expression for expression in list_panel_queries(CLUSTER_ROW) if "mediator_workers" not in expression
        ]
        names = {name for rule in load_alert_rules().values() for name in find_metric_names(rule["expr"])}
        expected += sorted(name for name in names if "_cluster_" in name)
        missing = expected

        with Prometheus({"mediatord": [f"127.0.0.1:{node.port}" for node in self.cluster.nodes]}) as prometheus:

            def has_all_data() -> bool:
                nonlocal missing
                missing = [expression for expression in missing if not prometheus.query(expression)]
                return not missing

            try:
                await deferToThread(prometheus.await_true, has_all_data, "all there")
            except AssertionError as error:
                raise AssertionError(f"without data: {missing}") from error

            def has_all_nodes() -> bool:
                return prometheus.values("min(mediator_cluster_nodes)") == ["3"]

            await deferToThread(prometheus.await_true, has_all_nodes, "all met")

"""Alerts fired by a Prometheus server: on results of the analysis as installed, and for an unreachable mediator."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest

from analytics.report.outputs import make_registry, replace_textfile
from mediatord.wallet.temporary_daemon import find_free_port
from tests.analytics.busy_day import BUSY_ROWS, make_report_data
from tests.analytics.test_units import read_unit
from tests.monitoring.prometheus import Prometheus

# Debian's default directory for the node exporter's text files.
COLLECTOR = "/var/lib/prometheus/node-exporter"
READABLE_BY_ALL, LISTABLE_BY_ALL = 0o004, 0o005


def run_install_commands(root: Path) -> Path:
    """Run the unit's root commands below `root`; the file that the analysis is configured to write."""
    service = read_unit("mediatord-analytics.service")
    for command in service["ExecStartPre"]:
        if command.startswith("+-"):
            local_command = command[2:].replace("/var/lib/", f"{root}/var/lib/")
            local_command = local_command.replace("-o mediatord-analytics -g mediatord ", "")
            subprocess.run(["/bin/sh", "-c", local_command], check=True)
    (command_line,) = service["ExecStart"]
    words = command_line.split()
    return root / words[words.index("--textfile") + 1].removeprefix("/")


def write_metrics_file(path: Path) -> None:
    """Write metrics of a day with errors, with the umask of the service."""
    (umask,) = read_unit("mediatord-analytics.service")["UMask"]
    before = os.umask(int(umask, 8))
    try:
        replace_textfile(path, generate_latest(make_registry(make_report_data(BUSY_ROWS))))
    finally:
        os.umask(before)


@contextmanager
def serve_text_files(directory: Path) -> Iterator[str]:
    """Serve a directory as the node exporter's textfile collector. Yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802  named by the base class
            self.send_response(200)
            self.end_headers()
            for path in sorted(directory.glob("*.prom")):
                self.wfile.write(path.read_bytes())

        def log_message(self, format: str, *arguments: Any) -> None:
            """Ignore."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_alerts_fire_for_errors_and_unreachable_mediator(tmp_path: Path) -> None:
    """With the metrics file as installed."""
    collector = tmp_path / COLLECTOR.removeprefix("/")
    collector.mkdir(parents=True)
    for _ in range(2):
        path = run_install_commands(tmp_path)
        write_metrics_file(path)
    (link,) = collector.iterdir()
    assert link.resolve() == path
    assert path.stat().st_mode & READABLE_BY_ALL and path.parent.stat().st_mode & LISTABLE_BY_ALL
    assert [file.name for file in path.parent.iterdir()] == ["mediatord-analytics.prom"]
    expected = {"MediatordLedgerBroken", "MediatordNotReady"}
    firing: set[str] = set()

    def all_fire() -> bool:
        firing.update(file["metric"]["alertname"] for file in prometheus.query('ALERTS{alertstate="firing"}'))
        return expected <= firing

    with serve_text_files(collector) as exporter:
        targets = {"node": [exporter], "mediatord": [f"127.0.0.1:{find_free_port()}"]}
        with Prometheus(targets, at_once=True) as prometheus:
            prometheus.await_true(all_fire, "firing")
            missing = 'ALERTS{alertname="MediatordAnalyticsMissing", alertstate="firing"}'
            prometheus.await_true(lambda: not prometheus.query(missing), "over what was before the first scrape")
            prometheus.await_true(lambda: prometheus.values("mediatord_analytics_ledger_vanished") == ["1"], "there")


def test_writes_metrics_file_without_node_exporter(tmp_path: Path) -> None:
    path = run_install_commands(tmp_path)
    write_metrics_file(path)
    assert path.exists() and not (tmp_path / COLLECTOR.removeprefix("/")).exists()

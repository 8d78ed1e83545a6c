"""A Prometheus server for one test, with the shipped rules and a scrape interval of two seconds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from mediatord.wallet.temporary_daemon import find_free_port
from tests.external_programs import find_program

ETC = Path(__file__).parents[2] / "etc"
CONFIGURATION = ETC / "prometheus" / "prometheus.yml"
_TIMEOUT_SECONDS = 180.0
_POLL_SECONDS = 0.2


class Prometheus:
    """
    A server with the settings of `etc/prometheus/prometheus.yml`, except targets and intervals; runs as a context
    manager.

    The test is skipped if Prometheus is not installed.

    :param targets: `host:port` by name of the job.
    :param at_once: alerts fire as soon as their expression is true.
    """

    def __init__(self, targets: Mapping[str, Sequence[str]], *, at_once: bool = False) -> None:
        self._program = find_program("prometheus")
        self._directory = Path(tempfile.mkdtemp(prefix="mediatord-prometheus-"))
        for rules in CONFIGURATION.parent.glob("*.rules.yml"):
            text = rules.read_text("utf-8")
            text = re.sub(r"(?m)^        for: .*$", "        for: 0s", text) if at_once else text
            (self._directory / rules.name).write_text(text, encoding="utf-8")
        settings: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text("utf-8"))
        # The scrape timeout is the scrape interval.
        settings["global"] = {"scrape_interval": "2s", "evaluation_interval": "1s"}
        for job in settings["scrape_configs"]:
            job["static_configs"] = [{"targets": list(targets.get(job["job_name"], ()))}]
        (self._directory / "prometheus.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{find_free_port()}"

    def __enter__(self) -> Prometheus:
        with (self._directory / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [
                    self._program,
                    "--config.file=prometheus.yml",
                    f"--storage.tsdb.path={self._directory / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                cwd=self._directory,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.await_true(lambda: self._is_ready(), "ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._directory)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """
        The present samples of an expression.

        :raise AssertionError: Prometheus cannot evaluate it.
        """
        data = self.request_api("query", query=expression)
        return list(data["result"])

    def values(self, expression: str) -> list[str]:
        """
        The values of the present samples of an expression; none after a failed scrape, as on a busy machine.

        :raise AssertionError: Prometheus cannot evaluate it.
        """
        return [sample["value"][1] for sample in self.query(expression)]

    def request_api(self, path: str, **arguments: str) -> Any:
        """
        The `data` of a response of the API.

        :raise AssertionError: it is an error.
        """
        try:
            with urlopen(f"{self.url}/api/v1/{path}?{urlencode(arguments)}", timeout=_TIMEOUT_SECONDS) as response:
                return json.load(response)["data"]
        except URLError as error:
            raise AssertionError(f"{error} of {path} with {arguments}:\n{self._read_output()}") from None

    def await_true(self, is_reached: Any, condition: str, seconds: float = _TIMEOUT_SECONDS) -> None:
        """
        Wait until `is_reached()` is true.

        :raise AssertionError: it was not in time.
        """
        deadline = time.monotonic() + seconds
        while not is_reached():
            assert time.monotonic() < deadline, f"not {condition} after {seconds:.0f} s:\n{self._read_output()}"
            time.sleep(_POLL_SECONDS)

    def _is_ready(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self._read_output()
        try:
            with urlopen(f"{self.url}/-/ready", timeout=_TIMEOUT_SECONDS) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _read_output(self) -> str:
        return (self._directory / "output").read_text("utf-8", errors="replace")[-3000:]

"""Servers of S3 and HDFS, and what Spark needs to reach them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from analytics.files import FileSystem
from analytics.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROOT = Path(__file__).parents[3]
_START_TIMEOUT_S = 120.0
_BUCKET = "night"
# Any value: the server does not check them.
_KEYS = {"fs.s3a.access.key": "anybody", "fs.s3a.secret.key": "secret", "fs.s3a.endpoint.region": "us-east-1"}


@dataclass(frozen=True, slots=True)
class Store:
    """
    :param url: of a directory for everything.
    :param settings: of Hadoop.
    :param jars: that Spark lacks.
    """

    url: str
    settings: Mapping[str, str]
    jars: tuple[Path, ...] = ()

    def list_options(self) -> list[str]:
        """Options of `mediatord-analytics` and `spark-submit`."""
        settings = {f"spark.hadoop.{name}": value for name, value in self.settings.items()}
        if self.jars:
            settings["spark.jars"] = ",".join(map(str, self.jars))
        return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]

    def open_files(self, spark: SparkSession) -> FileSystem:
        """Files of this store, in a session that was started without its settings and jars."""
        java: Any = spark.sparkContext._gateway.jvm  # type: ignore[union-attr]
        configuration = java.org.apache.hadoop.conf.Configuration(spark._jsc.hadoopConfiguration())
        for name, value in self.settings.items():
            configuration.set(name, value)
        urls = spark.sparkContext._gateway.new_array(java.java.net.URL, len(self.jars))  # type: ignore[union-attr]
        for number, jar in enumerate(self.jars):
            urls[number] = java.java.net.URL(jar.as_uri())
        configuration.setClassLoader(java.java.net.URLClassLoader(urls, configuration.getClassLoader()))
        files = FileSystem(spark)
        files._configuration = configuration
        return files


@dataclass(frozen=True, slots=True)
class S3Server:
    """See :mod:`tests.analytics.stores.s3_server`."""

    endpoint: str
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        settings = {"fs.s3a.endpoint": self.endpoint, "fs.s3a.path.style.access": "true", **_KEYS}
        jars = tuple(sorted((_ROOT / ".s3/jars").glob("*.jar")))
        object.__setattr__(self, "store", Store(f"s3a://{_BUCKET}", settings, jars))

    def stop_after(self, trigger: str, changes: int, hang: bool = False) -> None:
        """After a PUT of a path with this end, carry out so many further changes, and nothing more."""
        self._request("PUT", "-/stop", {"trigger": trigger, "changes": changes, "hang": hang})

    def go_on(self) -> None:
        """Carry out all requests again, except those that came meanwhile."""
        self._request("DELETE", "-/stop")

    def has_stopped(self) -> bool:
        """Whether it has carried out the last change."""
        return bool(json.loads(self._request("GET", "-/stop")))

    def create_bucket(self) -> None:
        self._request("PUT", _BUCKET)

    def _request(self, method: str, path: str, content: object = None) -> bytes:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self.endpoint}/{path}", data, method=method)  # noqa: S310
        with urllib.request.urlopen(request) as response:  # noqa: S310
            body: bytes = response.read()
        return body


@contextmanager
def start_s3() -> Iterator[S3Server]:
    """A server with an empty bucket; without `make .s3` the test is skipped."""
    if not (_ROOT / ".s3/.installed").exists():
        pytest.skip("there is no S3 server: make .s3")
    program = Path(__file__).with_name("s3_server.py")
    process = subprocess.Popen(
        [_ROOT / ".s3/bin/python", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    try:
        server = S3Server(f"http://127.0.0.1:{int(process.stdout.readline())}")
        server.create_bucket()
        yield server
    finally:
        process.stdin.close()
        process.wait()


@contextmanager
def start_hdfs(directory: Path) -> Iterator[Store]:
    """
    HDFS of one data node; without `make .hdfs` the test is skipped.

    :param directory: for its files.
    """
    if not (_ROOT / ".hdfs/.installed").exists():
        pytest.skip("there is no HDFS: make .hdfs")
    import pyspark

    jars = f"{_ROOT}/.hdfs/jars/*:{Path(pyspark.__file__).parent}/jars/*"
    details, log = directory / "details.json", directory / "log"
    java = [str(find_java().home / "bin/java"), "-Xmx256m", f"-Dtest.build.data={directory}/data", "-cp", jars]
    options = ["-format", "-writeDetails", str(details)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*java, "org.apache.hadoop.test.MiniDFSClusterManager", *options],
            cwd=directory,
            stdout=output,
            stderr=output,
        )
        try:
            port = _wait_for_port(details, process, log)
            # The default of three copies needs three data nodes.
            yield Store(f"hdfs://127.0.0.1:{port}", {"dfs.replication": "1"})
        finally:
            process.kill()
            process.wait()


def _wait_for_port(details: Path, process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if details.exists() and (text := details.read_text()).endswith("}"):
            return int(json.loads(text)["namenode_port"])
        time.sleep(0.1)
    sys.stderr.write(log.read_text("utf-8", "replace")[-4000:])
    pytest.fail("HDFS does not start")

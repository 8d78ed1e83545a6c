"""What the example for Kubernetes asks a cluster for; its API server is a stub, nothing runs."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.analytics.test_analytics_cluster import find_spark_home, make_environment

SCRIPT = Path(__file__).parents[2] / "etc/spark/nightly-on-kubernetes.sh"
PROGRAM = "local:///opt/mediatord/analytics/__main__.py"
OPTIONS = ["--logs", "s3a://logs/mediator", "--out", "s3a://analysis/mediator"]
OPTIONS += ["--keys", "/keys/pseudonyms.keys", "--day", "2026-11-16"]
IMAGE = "registry.example/mediatord-analytics:1"


@dataclass
class KubernetesStub:
    """
    API server that accepts everything.

    :ivar url: of the API.
    :ivar objects: kind to the object that was created.
    """

    url: str = ""
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)

    @contextmanager
    def serve(self) -> Iterator[None]:
        """Serve on loopback."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        objects = self.objects

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                objects[made["kind"]] = made
                # Spark makes the pod the owner of everything else.
                made["metadata"].update(uid="1", namespace="analytics")
                body = json.dumps(made).encode()
                self.send_response(201 if self.command == "POST" else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_PATCH(self) -> None:
                self.do_POST()

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        return Handler


def test_driver_pod_runs_the_night() -> None:
    """With the arguments, the volume of the pseudonym keys and the keys of S3, and memory for Python and DuckDB."""
    kubernetes = KubernetesStub()
    with kubernetes.serve():
        completed = subprocess.run(
            [SCRIPT, *OPTIONS],
            capture_output=True,
            text=True,
            env={
                **make_environment(),
                "API": kubernetes.url,
                "IMAGE": IMAGE,
                "REGION": "eu-central-1",
                "SPARK_HOME": str(find_spark_home()),
                "SPARK_LOCAL_IP": "127.0.0.1",
            },
            check=False,
        )
    assert completed.returncode == 0, completed.stderr
    pod = kubernetes.objects["Pod"]["spec"]
    [driver] = pod["containers"]
    assert driver["args"][-len(OPTIONS) - 2 :] == [PROGRAM, "nightly", *OPTIONS]
    assert (driver["image"], pod["serviceAccountName"]) == (IMAGE, "analytics")
    assert driver["resources"]["limits"] == {"memory": "2048Mi"}
    secrets = {
        one["name"]: one["valueFrom"]["secretKeyRef"] for one in driver["env"] if one["name"].startswith("AWS_")
    }
    assert secrets == {
        "AWS_ACCESS_KEY_ID": {"name": "analytics-s3", "key": "id"},
        "AWS_SECRET_ACCESS_KEY": {"name": "analytics-s3", "key": "key"},
    }
    [mount] = [one for one in driver["volumeMounts"] if one["name"] == "keys"]
    # The analysis adds keys to the file.
    assert (mount["mountPath"], mount.get("readOnly", False)) == ("/keys", False)
    [claim] = [one["persistentVolumeClaim"] for one in pod["volumes"] if one["name"] == "keys"]
    assert claim["claimName"] == "analytics-keys"
    # The driver reads the rest, among it what concerns executors, from a file.
    properties = kubernetes.objects["ConfigMap"]["data"]["spark.properties"].splitlines()
    for setting in ("executor.memory=2g", "executor.instances=2", "hadoop.fs.s3a.endpoint.region=eu-central-1"):
        assert f"spark.{setting}" in properties

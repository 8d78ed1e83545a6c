"""
The container and compose files, without a container engine: their programs run on loopback with the same
configuration files and other addresses.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from configparser import ConfigParser
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from mediatord.config.file import load_config
from mediatord.wallet.temporary_daemon import find_free_port
from tests.external_programs import find_program
from tests.packaging.health_checks import PRIVATE_PATHS, await_health, request_status
from tests.replica_set import Credentials, ReplicaSet

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "etc/compose"
PROGRAMS = Path(sys.executable).parent
# From compose-spec/compose-go v2.16.2, schema/compose-spec.json (Apache-2.0).
SCHEMA = Path(__file__).with_name("compose-spec.json")


def composition() -> dict[str, Any]:
    """The compose file with merged anchors."""
    return dict(yaml.safe_load((COMPOSE / "compose.yaml").read_text("utf-8")))


def test_compose_file_is_valid() -> None:
    """The compose file matches the schema of the specification, which rejects unknown keys."""
    validator = jsonschema_rs.validator_for(json.loads(SCHEMA.read_text("utf-8")))
    assert [error.message for error in validator.iter_errors(composition())] == []
    misspelled = {**composition(), "services": {"m1": {"imagge": "x"}}}
    assert not validator.is_valid(misspelled)


def test_compose_file_references_exist() -> None:
    """Mounted files exist, volumes are declared, services known; the environment contains no secret."""
    compose = composition()
    for name, service in compose["services"].items():
        for source in (volume.partition(":")[0] for volume in service.get("volumes", ())):
            assert (COMPOSE / source).exists() if source.startswith(".") else source in compose["volumes"], (
                name,
                source,
            )
        for other in service.get("depends_on", ()):
            assert other in compose["services"]
        assert not re.search("password|secret|uri", json.dumps(service.get("environment", {})), re.IGNORECASE)
    build = compose["services"]["secrets"]["build"]
    assert (COMPOSE / build["context"] / build["dockerfile"]).resolve() == ROOT / "Containerfile"


def test_container_file_copies_what_packages_need() -> None:
    """Copied files exist, are not ignored, and include all packages; the final user is not root."""
    text = (ROOT / "Containerfile").read_text("utf-8")
    lines = [line.split() for line in text.replace("\\\n", " ").splitlines() if line and line[0] != "#"]
    copied = [source for word, *rest in lines if word == "COPY" and "--from" not in rest[0] for source in rest[:-1]]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line[:1] == "!"}
    assert {*copied} == allowed
    assert all((ROOT / name).exists() for name in copied)
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", "utf-8")
    tops = {line.split(".")[0] for line in setup["options.packages.find"]["include"].split()}
    assert tops <= {*copied}
    instructions = {word: rest for word, *rest in lines}
    assert instructions["USER"] == ["10001:10001"]
    assert instructions["STOPSIGNAL"] == ["SIGTERM"]
    check = text.replace("\\\n", " ").partition("HEALTHCHECK")[2].partition("CMD ")[2].partition("\n")[0]
    interpreter, *arguments = json.loads(check)
    assert interpreter == "python" and "/health" in arguments[-1]
    # A refused connection and an unhealthy answer are failures; an error of the check itself is another status.
    compile(arguments[-1], "HEALTHCHECK", "exec")


def test_promtool_accepts_configuration(tmp_path: Path) -> None:
    """promtool accepts prometheus.yml and the mounted rules."""
    promtool = find_program("promtool")
    text = (COMPOSE / "prometheus.yml").read_text("utf-8")
    path = tmp_path / "prometheus.yml"
    path.write_text(text.replace("/etc/prometheus/rules", str(ROOT / "etc/prometheus")), "utf-8")
    result = subprocess.run([promtool, "check", "config", path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    # The analysis does not run there: its rules would alert for ever.
    assert "1 rule files found" in result.stdout


def test_haproxy_accepts_configuration() -> None:
    """HAProxy starts before the nodes do."""
    command = [str(find_program("haproxy")), "-c", "-f", str(COMPOSE / "haproxy.cfg")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


class ComposeDeployment:
    """Two nodes and HAProxy on loopback, configured by the container files, on the given servers."""

    def __init__(self, servers: ReplicaSet, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.proxy_port = find_free_port()
        self.url = f"http://127.0.0.1:{self.proxy_port}"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = {name: (find_free_port(), find_free_port()) for name in ("m1", "m2")}
        self.prepare(servers)

    def prepare(self, servers: ReplicaSet) -> None:
        """Create secrets and settings with prepare.sh, twice: the second run changes no secret."""
        for name in ("etc", "secrets"):
            (self._directory / name).mkdir()
        user = f"{os.getuid()}:{os.getgid()}"
        environ = {
            "PATH": f"{PROGRAMS}:/usr/bin:/bin",
            "PUBLIC_URL": self.url,
            "ETC": str(self._directory / "etc"),
            "SECRETS": str(self._directory / "secrets"),
            "TEMPLATE": str(COMPOSE / "mediator.yaml"),
            "SERVER_USER": user,
            "NODE_USER": user,
        }
        contents = []
        for _ in range(2):
            subprocess.run(["sh", COMPOSE / "prepare.sh"], env=environ, check=True)
            kept = ("etc/keys.jwks", "etc/log.key", "etc/cluster.secret", "secrets/keyfile")
            contents.append([(self._directory / name).read_bytes() for name in kept])
        assert contents[0] == contents[1]
        password = (self._directory / "secrets/mediatord-password").read_text("ascii")
        roles = [{"role": "readWrite", "db": "mediatord"}]
        database = servers.client["mediatord"]
        database.command("createUser", "mediatord", pwd=password, roles=roles, mechanisms=["SCRAM-SHA-1"])
        self.replace_addresses(
            "etc/mediator.yaml", {"mongo1:27017,mongo2:27017,mongo3:27017": ",".join(servers.hosts)}
        )
        self.replace_addresses(
            "etc/mediator.yaml", {"172.28.5.10/32": "127.0.0.1/32", "/var/log/mediatord": "../log"}
        )

    def replace_addresses(self, name: str, replacements: dict[str, str]) -> None:
        """Replace addresses in a file, each of which must occur."""
        path = self._directory / name
        text = path.read_text("utf-8")
        for container_address, address in replacements.items():
            assert container_address in text, container_address
            text = text.replace(container_address, address)
        path.write_text(text, "utf-8")

    def start_node(self, name: str) -> None:
        """Start a node with the environment of its service in the compose file."""
        public_port, cluster_port = self.ports[name]
        environment = composition()["services"][name]["environment"]
        assert environment == {"MEDIATORD_NODE": name, "MEDIATORD_CLUSTER__ADVERTISE": f"{name}:7070"}
        environ = {
            "PATH": f"{PROGRAMS}:/usr/bin:/bin",
            "MEDIATORD_NODE": name,
            "MEDIATORD_CLUSTER__ADVERTISE": f"127.0.0.1:{cluster_port}",
            "MEDIATORD_CLUSTER__LISTEN": f"tcp:{cluster_port}:interface=127.0.0.1",
            "MEDIATORD_LISTEN": json.dumps([f"tcp:{public_port}:interface=127.0.0.1"]),
            "MEDIATORD_LOG__DIRECTORY": str(self._directory / f"log-{name}"),
            # Each node has its own /tmp.
            "MEDIATORD_CONTROL_SOCKET": str(self._directory / f"control-{name}.sock"),
        }
        command = ["mediatord", "run", "--config", str(self._directory / "etc/mediator.yaml")]
        process = self._run(name, [PROGRAMS / command[0], *command[1:]], environ)
        self.nodes[name] = process
        await_health(f"http://127.0.0.1:{public_port}/health", process)

    def start_proxy(self) -> None:
        """Start HAProxy with the ports of the nodes; return when a node answers through it."""
        (self._directory / "haproxy.cfg").write_text((COMPOSE / "haproxy.cfg").read_text("utf-8"), "utf-8")
        nodes = {f"{name}:8080": f"127.0.0.1:{public_port}" for name, (public_port, _) in self.ports.items()}
        self.replace_addresses("haproxy.cfg", {"bind :8080": f"bind 127.0.0.1:{self.proxy_port}", **nodes})
        command = [find_program("haproxy"), "-db", "-f", self._directory / "haproxy.cfg"]
        await_health(f"{self.url}/health", self._run("haproxy", command, {"PATH": "/usr/bin:/bin"}))

    def _run(self, name: str, command: list[Any], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        output = self._stack.enter_context((self._directory / f"{name}.out").open("wb"))
        process = subprocess.Popen(command, env=environ, cwd=self._directory, stdout=output, stderr=output)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def run_demo(self) -> str:
        """Run the demo through the proxy."""
        command = [str(PROGRAMS / "mediatord"), "demo", "--url", self.url]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def outputs(self) -> str:
        """Output of all processes, for failure messages."""
        return "\n".join(f"{path.name}:\n{path.read_text('utf-8')}" for path in self._directory.glob("*.out"))


@pytest.fixture
def deployment() -> Iterator[ComposeDeployment]:
    """The running deployment."""
    find_program("haproxy")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = stack.enter_context(ReplicaSet(3, auth=Credentials("root", "of all")))
        deployment = ComposeDeployment(servers, directory, stack)
        for name in deployment.ports:
            deployment.start_node(name)
        deployment.start_proxy()
        yield deployment


@pytest.mark.exhaustive
def test_nodes_serve_through_haproxy(deployment: ComposeDeployment) -> None:
    """Wallets reach the other node when one stops. HAProxy does not serve private paths."""
    assert "All steps succeeded." in deployment.run_demo(), deployment.outputs()
    for path in PRIVATE_PATHS:
        assert request_status(f"{deployment.url}{path}") == 404, path
    node = deployment.nodes["m1"]
    node.terminate()
    assert node.wait(60) == 0, deployment.outputs()
    assert "All steps succeeded." in deployment.run_demo(), deployment.outputs()


def test_only_prometheus_reads_metrics() -> None:
    """Metrics are served to Prometheus only; other clients reach the nodes from the host's address."""
    compose, settings = composition(), yaml.safe_load((COMPOSE / "mediator.yaml").read_text("utf-8"))
    (network,) = compose["networks"]["inside"]["ipam"]["config"]
    address = {
        name: compose["services"][name]["networks"]["inside"]["ipv4_address"] for name in ("proxy", "prometheus")
    }
    assert settings["trusted_proxies"] == [f"{address['proxy']}/32"]
    assert settings["metrics"]["allow"] == ["127.0.0.0/8", f"{address['prometheus']}/32"]
    assert f"unless {{ src {network['gateway']} }}" in (COMPOSE / "haproxy.cfg").read_text("utf-8")


def test_node_settings_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a node, those from its environment included, are valid."""
    path = tmp_path / "mediator.yaml"
    text = (COMPOSE / "mediator.yaml").read_text("utf-8")
    path.write_text(text.replace("@PUBLIC_URL@", "https://m.example").replace("@PASSWORD@", "abc"), "utf-8")
    for name, value in composition()["services"]["m1"]["environment"].items():
        monkeypatch.setenv(name, value)
    config = load_config(path)
    assert (config.node, config.cluster.advertise) == ("m1", "m1:7070")
    assert config.storage.mongodb.uri.startswith("mongodb://mediatord:abc@mongo1:27017,")

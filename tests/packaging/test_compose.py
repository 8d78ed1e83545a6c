"""
The container and compose files. No container engine is needed: what they start is started on loopback instead, from
the same files with other addresses in them.
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
from tests.packaging.health_checks import OTHERS, await_health, request_status
from tests.replica_set import Credentials, ReplicaSet

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "etc/compose"
PROGRAMS = Path(sys.executable).parent
# That of compose-spec/compose-go v2.16.2, schema/compose-spec.json (Apache-2.0).
SCHEMA = Path(__file__).with_name("compose-spec.json")


def composition() -> dict[str, Any]:
    """The compose file, with its merges resolved."""
    return dict(yaml.safe_load((COMPOSE / "compose.yaml").read_text("utf-8")))


def test_the_compose_file() -> None:
    """It is one, by the specification."""
    validator = jsonschema_rs.validator_for(json.loads(SCHEMA.read_text("utf-8")))
    assert [error.message for error in validator.iter_errors(composition())] == []
    wrong = {**composition(), "services": {"m1": {"imagge": "x"}}}
    assert not validator.is_valid(wrong)


def test_what_the_compose_file_names() -> None:
    """Files that are mounted are there, volumes declared, services known; no secret is in the environment."""
    told = composition()
    for name, service in told["services"].items():
        for source in (one.partition(":")[0] for one in service.get("volumes", ())):
            assert (COMPOSE / source).exists() if source.startswith(".") else source in told["volumes"], (
                name,
                source,
            )
        for other in service.get("depends_on", ()):
            assert other in told["services"]
        assert not re.search("password|secret|uri", json.dumps(service.get("environment", {})), re.IGNORECASE)
    build = told["services"]["secrets"]["build"]
    assert (COMPOSE / build["context"] / build["dockerfile"]).resolve() == ROOT / "Containerfile"


def test_the_container_file() -> None:
    """What it copies is there and let through, and is all that packages are made of; nobody is root in the end."""
    text = (ROOT / "Containerfile").read_text("utf-8")
    lines = [line.split() for line in text.replace("\\\n", " ").splitlines() if line and line[0] != "#"]
    copied = [source for word, *rest in lines if word == "COPY" and "--from" not in rest[0] for source in rest[:-1]]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line[:1] == "!"}
    assert {*copied} == allowed
    assert all((ROOT / name).exists() for name in copied)
    found = ConfigParser()
    found.read(ROOT / "setup.cfg", "utf-8")
    tops = {line.split(".")[0] for line in found["options.packages.find"]["include"].split()}
    assert tops <= {*copied}
    told = {word: rest for word, *rest in lines}
    assert told["USER"] == ["10001:10001"]
    assert told["STOPSIGNAL"] == ["SIGTERM"]
    check = text.replace("\\\n", " ").partition("HEALTHCHECK")[2].partition("CMD ")[2].partition("\n")[0]
    interpreter, *arguments = json.loads(check)
    assert interpreter == "python" and "/health" in arguments[-1]
    # Nobody answers there, or what does is not well: either is a failure, and a mistake of the program is another.
    compile(arguments[-1], "HEALTHCHECK", "exec")


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    """And the rules that are mounted for it."""
    promtool = find_program("promtool")
    text = (COMPOSE / "prometheus.yml").read_text("utf-8")
    here = tmp_path / "prometheus.yml"
    here.write_text(text.replace("/etc/prometheus/rules", str(ROOT / "etc/prometheus")), "utf-8")
    done = subprocess.run([promtool, "check", "config", here], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Nobody runs the analysis there: that it is missing would be told for ever.
    assert "1 rule files found" in done.stdout


def test_haproxy_takes_its_configuration() -> None:
    """Nodes that are not there yet do not keep it from starting."""
    command = [str(find_program("haproxy")), "-c", "-f", str(COMPOSE / "haproxy.cfg")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class ComposeDeployment:
    """Two nodes and HAProxy on loopback, out of the files for containers, on the given servers."""

    def __init__(self, servers: ReplicaSet, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.front = find_free_port()
        self.url = f"http://127.0.0.1:{self.front}"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = {name: (find_free_port(), find_free_port()) for name in ("m1", "m2")}
        self.prepare(servers)

    def prepare(self, servers: ReplicaSet) -> None:
        """Secrets and settings by prepare.sh, twice: the second time changes no secret."""
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
        made = []
        for _ in range(2):
            subprocess.run(["sh", COMPOSE / "prepare.sh"], env=environ, check=True)
            kept = ("etc/keys.jwks", "etc/log.key", "etc/cluster.secret", "secrets/keyfile")
            made.append([(self._directory / name).read_bytes() for name in kept])
        assert made[0] == made[1]
        password = (self._directory / "secrets/mediatord-password").read_text("ascii")
        roles = [{"role": "readWrite", "db": "mediatord"}]
        database = servers.client["mediatord"]
        database.command("createUser", "mediatord", pwd=password, roles=roles, mechanisms=["SCRAM-SHA-1"])
        self.move("etc/mediator.yaml", {"mongo1:27017,mongo2:27017,mongo3:27017": ",".join(servers.hosts)})
        self.move("etc/mediator.yaml", {"172.28.5.10/32": "127.0.0.1/32", "/var/log/mediatord": "../log"})

    def move(self, name: str, others: dict[str, str]) -> None:
        """Other addresses in a file, each of which has to be in it."""
        path = self._directory / name
        text = path.read_text("utf-8")
        for container, here in others.items():
            assert container in text, container
            text = text.replace(container, here)
        path.write_text(text, "utf-8")

    def start_node(self, name: str) -> None:
        """As its service in the compose file is, by its environment."""
        public, inside = self.ports[name]
        told = composition()["services"][name]["environment"]
        assert told == {"MEDIATORD_NODE": name, "MEDIATORD_CLUSTER__ADVERTISE": f"{name}:7070"}
        environ = {
            "PATH": f"{PROGRAMS}:/usr/bin:/bin",
            "MEDIATORD_NODE": name,
            "MEDIATORD_CLUSTER__ADVERTISE": f"127.0.0.1:{inside}",
            "MEDIATORD_CLUSTER__LISTEN": f"tcp:{inside}:interface=127.0.0.1",
            "MEDIATORD_LISTEN": json.dumps([f"tcp:{public}:interface=127.0.0.1"]),
            "MEDIATORD_LOG__DIRECTORY": str(self._directory / f"log-{name}"),
            # The directory /tmp of a node is its own.
            "MEDIATORD_CONTROL_SOCKET": str(self._directory / f"control-{name}.sock"),
        }
        command = ["mediatord", "run", "--config", str(self._directory / "etc/mediator.yaml")]
        process = self._run(name, [PROGRAMS / command[0], *command[1:]], environ)
        self.nodes[name] = process
        await_health(f"http://127.0.0.1:{public}/health", process)

    def start_proxy(self) -> None:
        """With the ports of the nodes instead of their names; ready as soon as a node is."""
        (self._directory / "haproxy.cfg").write_text((COMPOSE / "haproxy.cfg").read_text("utf-8"), "utf-8")
        nodes = {f"{name}:8080": f"127.0.0.1:{public}" for name, (public, _) in self.ports.items()}
        self.move("haproxy.cfg", {"bind :8080": f"bind 127.0.0.1:{self.front}", **nodes})
        command = [find_program("haproxy"), "-db", "-f", self._directory / "haproxy.cfg"]
        await_health(f"{self.url}/health", self._run("haproxy", command, {"PATH": "/usr/bin:/bin"}))

    def _run(self, name: str, command: list[Any], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        output = self._stack.enter_context((self._directory / f"{name}.out").open("wb"))
        process = subprocess.Popen(command, env=environ, cwd=self._directory, stdout=output, stderr=output)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def demonstrate(self) -> str:
        """Wallets of both kinds write to each other through the proxy, over requests and sockets."""
        command = [str(PROGRAMS / "mediatord"), "demo", "--url", self.url]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def outputs(self) -> str:
        """Of all processes, for messages about failures."""
        return "\n".join(f"{path.name}:\n{path.read_text('utf-8')}" for path in self._directory.glob("*.out"))


@pytest.fixture
def deployment() -> Iterator[ComposeDeployment]:
    """Everything runs."""
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
def test_two_nodes_behind_the_proxy(deployment: ComposeDeployment) -> None:
    """Wallets talk through it; when a node is gone they go on at the other. What is not theirs is not there."""
    assert "All steps succeeded." in deployment.demonstrate(), deployment.outputs()
    for place in OTHERS:
        assert request_status(f"{deployment.url}{place}") == 404, place
    node = deployment.nodes["m1"]
    node.terminate()
    assert node.wait(60) == 0, deployment.outputs()
    assert "All steps succeeded." in deployment.demonstrate(), deployment.outputs()


def test_who_is_who_in_the_network() -> None:
    """Metrics are for Prometheus, and not for the address that everybody has who comes by way of this host."""
    told, settings = composition(), yaml.safe_load((COMPOSE / "mediator.yaml").read_text("utf-8"))
    (network,) = told["networks"]["inside"]["ipam"]["config"]
    address = {name: told["services"][name]["networks"]["inside"]["ipv4_address"] for name in ("proxy", "prometheus")}
    assert settings["trusted_proxies"] == [f"{address['proxy']}/32"]
    assert settings["metrics"]["allow"] == ["127.0.0.0/8", f"{address['prometheus']}/32"]
    assert f"unless {{ src {network['gateway']} }}" in (COMPOSE / "haproxy.cfg").read_text("utf-8")


def test_the_settings_of_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are settings, with what the environment of the nodes adds."""
    path = tmp_path / "mediator.yaml"
    text = (COMPOSE / "mediator.yaml").read_text("utf-8")
    path.write_text(text.replace("@PUBLIC_URL@", "https://m.example").replace("@PASSWORD@", "abc"), "utf-8")
    for name, value in composition()["services"]["m1"]["environment"].items():
        monkeypatch.setenv(name, value)
    config = load_config(path)
    assert (config.node, config.cluster.advertise) == ("m1", "m1:7070")
    assert config.storage.mongodb.uri.startswith("mongodb://mediatord:abc@mongo1:27017,")

"""Caddy in front of one mediatord, by the configuration in docs/how-to/run-behind-a-proxy.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.console_blocks import PROJECT, read_blocks
from tests.external_programs import find_program
from tests.integration.daemon import Daemon
from tests.packaging.health_checks import PRIVATE_PATHS, await_health, request_status

PAGE = PROJECT / "docs/how-to/run-behind-a-proxy.md"


def read_site() -> str:
    """The configuration on the page."""
    (site,) = (block.body for block in read_blocks(PAGE) if "reverse_proxy" in block.body)
    return site


def caddy_environment(directory: Path) -> dict[str, str]:
    """Variables with which Caddy stores everything below a directory."""
    return {"PATH": os.defpath, "HOME": str(directory), "XDG_DATA_HOME": str(directory)}


def test_caddy_accepts_the_site(tmp_path: Path) -> None:
    """Caddy accepts the site of the page."""
    path = tmp_path / "Caddyfile"
    path.write_text(read_site(), "utf-8")
    command = [str(find_program("caddy")), "adapt", "--config", str(path), "--adapter", "caddyfile"]
    result = subprocess.run(command, env=caddy_environment(tmp_path), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_wallets_connect_through_caddy(tmp_path: Path) -> None:
    """Requests and sockets pass; private paths are served by the daemon only."""
    caddy = find_program("caddy")
    with Daemon({"trusted_proxies": ["127.0.0.1/32"]}) as daemon:
        proxy = Daemon()
        site = read_site()
        for name, other in {
            "mediator.example.org {": f"http://:{proxy.port} {{\n    bind 127.0.0.1",
            "127.0.0.1:8080": f"127.0.0.1:{daemon.port}",
        }.items():
            assert name in site
            site = site.replace(name, other)
        path = tmp_path / "Caddyfile"
        path.write_text("{\n    admin off\n}\n" + site, "utf-8")
        process = subprocess.Popen(
            [caddy, "run", "--config", path, "--adapter", "caddyfile"],
            env=caddy_environment(tmp_path),
            stderr=subprocess.DEVNULL,
        )
        try:
            await_health(f"{proxy.url}/health", process)
            for private_path in PRIVATE_PATHS:
                assert request_status(f"{proxy.url}{private_path}") == 404, private_path
            assert request_status(f"{daemon.url}/metrics") == 200
            command = [sys.executable, "-m", "mediatord", "demo", "--url", proxy.url]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            assert "All steps succeeded." in result.stdout, result.stdout
        finally:
            process.terminate()
            process.wait()
            proxy.clean()

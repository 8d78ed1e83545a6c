"""nginx in front of one mediatord, with the configuration for operators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.external_programs import find_program
from tests.integration.daemon import Daemon
from tests.packaging.health_checks import PRIVATE_PATHS, await_health, request_status

SITE = Path(__file__).parents[2] / "etc/nginx/mediatord.conf"
SURROUNDING_CONFIGURATION = """\
daemon off;
pid {directory}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    include {directory}/site.conf;
}}
"""


def write_configuration(directory: Path, **others: str) -> Path:
    """
    Write a complete configuration that includes the site.

    :param others: replaced lines, by directive.
    """
    text = SITE.read_text("utf-8")
    for line, other in others.items():
        before = {"server": "server 127.0.0.1:8080;", "listen": "listen 80;", "six": "    listen [::]:80;\n"}[line]
        assert before in text
        text = text.replace(before, other)
    (directory / "site.conf").write_text(text, "utf-8")
    path = directory / "nginx.conf"
    path.write_text(SURROUNDING_CONFIGURATION.format(directory=directory), "utf-8")
    return path


def test_nginx_accepts_the_site(tmp_path: Path) -> None:
    """nginx accepts the unchanged site."""
    command = [str(find_program("nginx")), "-t", "-e", "stderr", "-c", str(write_configuration(tmp_path))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    # Directives that need root are not tested here.
    assert "syntax is ok" in result.stderr, result.stderr


def test_wallets_connect_through_nginx(tmp_path: Path) -> None:
    """Requests and sockets pass; private paths are not served; each client has its own limits."""
    nginx = find_program("nginx")
    with Daemon({"trusted_proxies": ["127.0.0.1/32"]}) as daemon:
        proxy = Daemon()
        settings = write_configuration(
            tmp_path,
            server=f"server 127.0.0.1:{daemon.port};",
            listen=f"listen 127.0.0.1:{proxy.port};",
            six="",
        )
        process = subprocess.Popen([nginx, "-e", "stderr", "-c", settings], stderr=subprocess.DEVNULL)
        try:
            await_health(f"{proxy.url}/health", process)
            for path in PRIVATE_PATHS:
                assert request_status(f"{proxy.url}{path}") == 404, path
            assert request_status(f"{daemon.url}/metrics") == request_status(f"{daemon.url}/%6detrics/") == 200
            command = [sys.executable, "-m", "mediatord", "demo", "--url", proxy.url]
            output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            assert "All steps succeeded." in output, output
        finally:
            process.terminate()
            process.wait()
            proxy.clean()


@pytest.mark.parametrize("line", ["X-Forwarded-For $remote_addr;", "Upgrade $http_upgrade;"])
def test_site_passes_required_headers(line: str) -> None:
    """The site passes the client's address, which clients cannot set, and the upgrade to WebSocket."""
    assert f"proxy_set_header {line}" in SITE.read_text("utf-8")

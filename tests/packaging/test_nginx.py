"""nginx in front of one mediatord, by the file for operators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.external_programs import find_program
from tests.integration.daemon import Daemon
from tests.packaging.health_checks import OTHERS, await_health, request_status

SITE = Path(__file__).parents[2] / "etc/nginx/mediatord.conf"
AROUND = """\
daemon off;
pid {here}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {here}/body;
    proxy_temp_path {here}/proxy;
    fastcgi_temp_path {here}/fastcgi;
    uwsgi_temp_path {here}/uwsgi;
    scgi_temp_path {here}/scgi;
    include {here}/site.conf;
}}
"""


def placed(directory: Path, **others: str) -> Path:
    """A whole configuration around the site. :param others: what stands in place of what, by the name of its line."""
    text = SITE.read_text("utf-8")
    for line, other in others.items():
        before = {"server": "server 127.0.0.1:8080;", "listen": "listen 80;", "six": "    listen [::]:80;\n"}[line]
        assert before in text
        text = text.replace(before, other)
    (directory / "site.conf").write_text(text, "utf-8")
    path = directory / "nginx.conf"
    path.write_text(AROUND.format(here=directory), "utf-8")
    return path


def test_nginx_takes_the_site(tmp_path: Path) -> None:
    """As it is."""
    command = [str(find_program("nginx")), "-t", "-e", "stderr", "-c", str(placed(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # What only root may is not what is asked here.
    assert "syntax is ok" in done.stderr, done.stderr


def test_wallets_behind_nginx(tmp_path: Path) -> None:
    """Requests and sockets pass; what is for others is not there; each client has limits of its own."""
    nginx = find_program("nginx")
    with Daemon({"trusted_proxies": ["127.0.0.1/32"]}) as daemon:
        behind = Daemon()
        settings = placed(
            tmp_path,
            server=f"server 127.0.0.1:{daemon.port};",
            listen=f"listen 127.0.0.1:{behind.port};",
            six="",
        )
        process = subprocess.Popen([nginx, "-e", "stderr", "-c", settings], stderr=subprocess.DEVNULL)
        try:
            await_health(f"{behind.url}/health", process)
            for place in OTHERS:
                assert request_status(f"{behind.url}{place}") == 404, place
            assert request_status(f"{daemon.url}/metrics") == request_status(f"{daemon.url}/%6detrics/") == 200
            command = [sys.executable, "-m", "mediatord", "demo", "--url", behind.url]
            told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            assert "All steps succeeded." in told, told
        finally:
            process.terminate()
            process.wait()
            behind.clean()


@pytest.mark.parametrize("line", ["X-Forwarded-For $remote_addr;", "Upgrade $http_upgrade;"])
def test_what_must_be_passed_on(line: str) -> None:
    """The address of the client, which nobody else may name; and that a socket is wanted."""
    assert f"proxy_set_header {line}" in SITE.read_text("utf-8")

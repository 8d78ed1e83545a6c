"""`mediatord init`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from mediatord.cli.options import LOCAL_URL, answer, json_option

if TYPE_CHECKING:
    from mediatord.config import Config

# What to do, and the commands for it.
Step = tuple[str, tuple[str, ...]]

_CERTIFICATES = "/etc/letsencrypt/live"
_CERTIFICATE = "tls.pem"
_UNIT = "mediatord.service"
_UNIT_PLACES = (Path("/etc/systemd/system"), Path("/usr/lib/systemd/system"), Path("/lib/systemd/system"))


@click.command()
@click.option(
    "--dir",
    "directory",
    default=".",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write; made if it is not there. Default: here.",
)
@click.option("--public-url", default=LOCAL_URL, metavar="URL", show_default=True, help="What DIDs will name.")
@json_option
def init(directory: Path, public_url: str, as_json: bool) -> None:
    """
    Write mediator.yaml and fresh keys. Overwrites nothing.

    With an http:// URL of this machine the mediator listens there; with any other one on 127.0.0.1:8080, where a
    proxy reaches it. In /etc/mediatord state and logs are set to be in /var/lib/mediatord and /var/log/mediatord,
    and the files belong to the user mediatord if there is one.
    """
    from mediatord.cli.files import set_up
    from mediatord.cli.mediator import identity_of
    from mediatord.wiring.base import log_key

    try:
        config, path = set_up(directory, public_url)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--public-url") from None
    identity = identity_of(config)
    steps = list(next_steps(config, path))
    written = {"config": str(path), "keys": str(config.identity.keys), "log_key": str(log_key(config))}
    value = {
        **written,
        "did": identity.did,
        "web_did": identity.web_did,
        "listen": list(config.listen),
        "next": [{"what": what, "commands": list(commands)} for what, commands in steps],
    }
    made = f"{path} and keys.jwks" if config.log.key_file else f"{path}, keys.jwks and log.key"
    text = f"wrote {made}\n\n{identity.did}\n{identity.web_did}\n\nnext:\n{_numbered(steps)}"
    answer(as_json, value, text)


def next_steps(config: Config, path: Path) -> Iterator[Step]:
    """What is left to be done, in order, for a fresh configuration. :param path: where that is."""
    from mediatord.cli.files import is_system
    from mediatord.cli.running import program

    system = is_system(path.parent)
    if system:
        yield from _make_user()
    if urlsplit(config.public_url).scheme == "https":
        yield from _have_tls(config, path)
    typed = shlex.quote(str(path))
    yield "look whether everything is right", (f"{program()} check-config --config {typed}",)
    if system:
        yield (
            "start it, now and at every start of the system",
            (*_place_unit(), "systemctl enable --now mediatord.service"),
        )
    else:
        yield "start it, until Ctrl-C", (f"{program()} run --config {typed}",)
    what = "see how it is, and let two wallets talk" + ("" if system else ", in another terminal")
    inside, trusting = _inside(config), ""
    if _is_tried_with_tls(config):
        inside, trusting = config.public_url, f" --ca {shlex.quote(str(path.with_name(_CERTIFICATE)))}"
    yield (
        what,
        (f"{program()} status --url {inside}{trusting}", f"{program()} demo --url {config.public_url}{trusting}"),
    )


def shared_units() -> Path:
    """Where pip puts the units of systemd, which is no place where systemd looks."""
    return Path(sys.prefix, "share/mediatord/systemd")


def _place_unit() -> Iterator[str]:
    if not any((place / _UNIT).exists() for place in _UNIT_PLACES) and (shared_units() / _UNIT).exists():
        yield f"cp {shlex.quote(str(shared_units()))}/mediatord.* {_UNIT_PLACES[0]}/"


def _is_tried_with_tls(config: Config) -> bool:
    parts = urlsplit(config.public_url)
    return parts.scheme == "https" and parts.hostname in ("localhost", "127.0.0.1")


def _make_user() -> Iterator[Step]:
    from mediatord.cli.files import LOGS, STATE, SYSTEM, USER, system_owner

    if system_owner() is None:
        yield (
            "make its user, to whom files and directories belong",
            (
                f"useradd --system --home-dir {STATE} --shell /usr/sbin/nologin {USER}",
                f"install -d -o {USER} -g {USER} -m 700 {STATE}",
                f"install -d -o {USER} -g {USER} -m 750 {LOGS}",
                f"chown {USER}:{USER} {SYSTEM}/keys.jwks",
                f"chown root:{USER} {SYSTEM} {SYSTEM}/mediator.yaml",
            ),
        )


def _have_tls(config: Config, path: Path) -> Iterator[Step]:
    from mediatord.cli.files import is_system

    parts = urlsplit(config.public_url)
    host, port = parts.hostname or "", parts.port or 443
    if _is_tried_with_tls(config):
        yield from _try_tls(host, port, path)
        return
    proxied = (
        f"have a proxy answer at {config.public_url} and pass everything on to {_inside(config)}, WebSockets included"
    )
    if is_system(path.parent):
        # The system's daemon may neither open a port below 1024 nor read there.
        yield proxied, ()
        return
    files = f"{_CERTIFICATES}/{host}"
    chain = f"certKey={files}/cert.pem:extraCertChain={files}/chain.pem"
    yield (
        f"{proxied}; or let the mediator do it itself, by this line in {path}",
        (f'listen: ["ssl:{port}:privateKey={files}/privkey.pem:{chain}"]',),
    )


def _try_tls(host: str, port: int, path: Path) -> Iterator[Step]:
    """With a certificate that nobody else believes."""
    key, certificate = path.absolute().with_name("tls.key"), path.absolute().with_name(_CERTIFICATE)
    name = f"IP:{host}" if host[0].isdigit() else f"DNS:{host}"
    yield (
        "make a certificate for trying out",
        (
            f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN={host} "
            f"-addext subjectAltName={name} -keyout {shlex.quote(str(key))} -out {shlex.quote(str(certificate))}",
        ),
    )
    endpoint = f"ssl:{port}:interface=127.0.0.1:privateKey={key}:certKey={certificate}"
    yield f"let the mediator show it, by this line in {path}", (f'listen: ["{endpoint}"]',)


def _inside(config: Config) -> str:
    """What reaches it from this machine."""
    return f"http://127.0.0.1:{config.listen[0].split(':')[1]}"


def _numbered(steps: list[Step]) -> str:
    lines = []
    for number, (what, commands) in enumerate(steps, start=1):
        lines += [f"  {number}. {what}{':' if commands else ''}", *(f"     {command}" for command in commands)]
    return "\n".join(lines)

"""`mediatord init`: writes the configuration and the keys of a new mediator, and lists the next steps."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import click
from pydantic import ValidationError

from mediatord.cli.console import LOCAL_URL, find_program_name, json_option, print_result
from mediatord.cli.keys import read_identity
from mediatord.config.file import render_config
from mediatord.config.settings import Config
from mediatord.errors import StartupError
from mediatord.identity.key_file import create_keys
from mediatord.observability.pseudonyms import create_pseudonym_key

# Directories and user of the system's daemon.
SYSTEM = Path("/etc/mediatord")
STATE, LOGS = Path("/var/lib/mediatord"), Path("/var/log/mediatord")
USER = "mediatord"

_LOOPBACK_HOSTS = ("127.0.0.1", "localhost")
# A proxy on this machine.
_LOCAL_PROXY = ("127.0.0.0/8", "::1/128")


def write_initial_files(directory: Path, public_url: str) -> tuple[Config, Path]:
    """
    Write mediator.yaml, keys.jwks and log.key; returns the configuration, with its paths resolved, and its path.

    In the system directory, state and logs are configured to be below /var, and the files are readable for the
    system's daemon, which makes log.key itself.

    :raise ValueError: `public_url` cannot be used; nothing was written.
    :raise StartupError: one of the files exists; nothing was written.
    :raise SecretFileError: a file with keys could not be written.
    :raise OSError: the configuration could not be written.
    """
    config = _make_default_config(public_url)
    if is_system_directory(directory):
        config = _use_system_paths(config)
    path = directory / "mediator.yaml"
    keys, log_key = directory / config.identity.keys, directory / "log.key"
    made = (path, keys) if config.log.key_file else (path, keys, log_key)
    if existing := [file for file in made if file.exists()]:
        raise StartupError(f"{existing[0]} already exists and will not be overwritten")
    owner = find_file_owner(directory)
    if not directory.exists():
        directory.mkdir(mode=0o750, parents=True)
        if owner is not None:
            os.chown(directory, 0, owner[1])
    create_keys(keys)
    if log_key in made:
        create_pseudonym_key(log_key)
    if owner is not None:
        os.chown(keys, *owner)
    # Last, so that it exists only if all others do. It may come to hold the password of a database.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640), "w", encoding="utf-8") as written:
        written.write(render_config(config))
        if owner is not None:
            os.fchown(written.fileno(), 0, owner[1])
    return config.resolved(directory.absolute()), path


def is_system_directory(directory: Path) -> bool:
    """Whether it is the directory of the system's daemon."""
    return directory.resolve() == SYSTEM


def find_file_owner(directory: Path) -> tuple[int, int] | None:
    """Ids of user and group that secrets in a directory belong to; None for those of the process."""
    return system_owner() if is_system_directory(directory) and os.geteuid() == 0 else None


def system_owner() -> tuple[int, int] | None:
    """Ids of user and group of the system's daemon, if the user exists."""
    try:
        return pwd.getpwnam(USER).pw_uid, grp.getgrnam(USER).gr_gid
    except KeyError:
        return None


def _make_default_config(public_url: str) -> Config:
    """
    The defaults for a public URL: a URL of this machine is listened on; https:// is assumed to be served by a proxy
    on the same machine.
    """
    try:
        config = Config(public_url=public_url)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    parts = urlsplit(config.public_url)
    if parts.scheme == "https":
        return Config.model_validate({"public_url": public_url, "trusted_proxies": _LOCAL_PROXY})
    if parts.hostname in _LOOPBACK_HOSTS:
        return Config(public_url=public_url, listen=(f"tcp:{parts.port or 80}:interface=127.0.0.1",))
    return config


def _use_system_paths(config: Config) -> Config:
    sqlite = config.storage.sqlite.model_copy(update={"path": STATE / config.storage.sqlite.path})
    storage = config.storage.model_copy(update={"sqlite": sqlite})
    log = config.log.model_copy(update={"directory": LOGS, "key_file": STATE / "log.key"})
    control_socket = config.control_socket and STATE / config.control_socket
    return config.model_copy(update={"storage": storage, "log": log, "control_socket": control_socket})


# Description and commands.
SetupStep = tuple[str, tuple[str, ...]]

_CERTIFICATE_DIRECTORY = "/etc/letsencrypt/live"
_UNIT_FILE = "mediatord.service"
_UNIT_PLACES = (Path("/etc/systemd/system"), Path("/usr/lib/systemd/system"), Path("/lib/systemd/system"))


@click.command()
@click.option(
    "--dir",
    "directory",
    default=".",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory to write to; created if missing. Default: the current directory.",
)
@click.option(
    "--public-url", default=LOCAL_URL, metavar="URL", show_default=True, help="Base URL in the mediator's DIDs."
)
@json_option
def init(directory: Path, public_url: str, as_json: bool) -> None:
    """
    Write mediator.yaml and new keys without overwriting anything.

    The mediator listens on the host and port of the public URL if that is an http:// URL of this machine, otherwise
    on 127.0.0.1:8080, behind a proxy. With --dir /etc/mediatord, state and logs go to /var/lib/mediatord and
    /var/log/mediatord, and the files belong to the user mediatord if it exists.
    """
    try:
        config, path = write_initial_files(directory, public_url)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--public-url'") from None
    identity = read_identity(config)
    steps = list(list_next_steps(config, path))
    written = {"config": str(path), "keys": str(config.identity.keys), "log_key": str(config.log_key_path)}
    value = {
        **written,
        "did": identity.did,
        "web_did": identity.web_did,
        "listen": list(config.listen),
        "next": [{"what": what, "commands": list(commands)} for what, commands in steps],
    }
    made = f"{path} and keys.jwks" if config.log.key_file else f"{path}, keys.jwks and log.key"
    text = f"wrote {made}\n\n{identity.did}\n{identity.web_did}\n\nnext:\n{_format_steps(steps)}"
    print_result(as_json, value, text)


def list_next_steps(config: Config, path: Path) -> Iterator[SetupStep]:
    """Steps from a fresh configuration to a running daemon. :param path: of the configuration."""
    system, parts, program = is_system_directory(path.parent), urlsplit(config.public_url), find_program_name()
    is_local_https = parts.scheme == "https" and parts.hostname in _LOOPBACK_HOSTS
    typed, certificate = shlex.quote(str(path)), path.absolute().with_name("tls.pem")
    if system and system_owner() is None:
        yield (
            "create the system user and directories",
            (
                f"useradd --system --home-dir {STATE} --shell /usr/sbin/nologin {USER}",
                f"install -d -o {USER} -g {USER} -m 700 {STATE}",
                f"install -d -o {USER} -g {USER} -m 750 {LOGS}",
                f"chown {USER}:{USER} {SYSTEM}/keys.jwks",
                f"chown root:{USER} {SYSTEM} {SYSTEM}/mediator.yaml",
            ),
        )
    if is_local_https:
        yield from _list_test_certificate_steps(parts.hostname or "", parts.port or 443, path, certificate)
    elif parts.scheme == "https":
        yield _describe_tls_step(config, path, system)
    yield "check the configuration", (f"{program} check-config --config {typed}",)
    if system:
        yield "start it now and at boot", (*_list_unit_commands(), "systemctl enable --now mediatord.service")
    else:
        yield "start it (Ctrl-C stops it)", (f"{program} run --config {typed}",)
    inside, trusting = make_local_url(config), ""
    if is_local_https:
        inside, trusting = config.public_url, f" --ca {shlex.quote(str(path.with_name(certificate.name)))}"
    yield (
        "show its status, and run a demo with temporary wallets" + ("" if system else ", in another terminal"),
        (f"{program} status --url {inside}{trusting}", f"{program} demo --url {config.public_url}{trusting}"),
    )


def find_installed_units() -> Path:
    """Where pip installs the systemd units; systemd does not read them there."""
    return Path(sys.prefix, "share/mediatord/systemd")


def _list_unit_commands() -> Iterator[str]:
    installed = any((place / _UNIT_FILE).exists() for place in _UNIT_PLACES)
    if not installed and (find_installed_units() / _UNIT_FILE).exists():
        yield f"cp {shlex.quote(str(find_installed_units()))}/mediatord.* {_UNIT_PLACES[0]}/"


def _describe_tls_step(config: Config, path: Path, system: bool) -> SetupStep:
    proxied = (
        f"configure a reverse proxy to pass {config.public_url} to {make_local_url(config)}, including WebSockets"
    )
    if system:
        # The system's daemon may not bind ports below 1024, nor read the files of an ACME client.
        return proxied, ()
    parts = urlsplit(config.public_url)
    files = f"{_CERTIFICATE_DIRECTORY}/{parts.hostname}"
    chain = f"certKey={files}/cert.pem:extraCertChain={files}/chain.pem"
    return (
        f"{proxied}; or serve TLS directly, with this line in {path}",
        (f'listen: ["ssl:{parts.port or 443}:privateKey={files}/privkey.pem:{chain}"]',),
    )


def _list_test_certificate_steps(host: str, port: int, path: Path, certificate: Path) -> Iterator[SetupStep]:
    """With a self-signed certificate."""
    key = certificate.with_suffix(".key")
    name = f"IP:{host}" if host[0].isdigit() else f"DNS:{host}"
    yield (
        "create a self-signed certificate for tests",
        (
            f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN={host} "
            f"-addext subjectAltName={name} -keyout {shlex.quote(str(key))} -out {shlex.quote(str(certificate))}",
        ),
    )
    endpoint = f"ssl:{port}:interface=127.0.0.1:privateKey={key}:certKey={certificate}"
    yield f"configure it with this line in {path}", (f'listen: ["{endpoint}"]',)


def make_local_url(config: Config) -> str:
    """URL of the first listener on this machine."""
    return f"http://127.0.0.1:{config.listen[0].split(':')[1]}"


def _format_steps(steps: list[SetupStep]) -> str:
    lines = []
    for number, (what, commands) in enumerate(steps, start=1):
        lines += [f"  {number}. {what}{':' if commands else ''}", *(f"     {command}" for command in commands)]
    return "\n".join(lines)

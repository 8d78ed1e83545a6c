"""`mediatord init` and `mediatord check-config`."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import click
from pydantic import ValidationError

from mediatord.admin.site import read_admin_token
from mediatord.app.lifecycle import check_setting_combinations
from mediatord.app.reload import load_identity
from mediatord.cli.console import LOCAL_URL, config_option, find_program_name, json_option, print_result
from mediatord.cli.keys import read_identity
from mediatord.cluster.peer_connection import read_cluster_keys
from mediatord.config.file import KeyPart, examine_config, render_config
from mediatord.config.settings import Config
from mediatord.errors import OperatorError, StartupError
from mediatord.identity.encrypted_file import make_passphrase_source
from mediatord.identity.key_file import create_keys, load_keys
from mediatord.net.listeners import ListenerCertificate, find_certificate_files
from mediatord.observability.pseudonyms import create_pseudonym_key, read_pseudonym_keys
from mediatord.store.sqlite.database_file import APPLICATION_ID, describe_database_loss, read_schema_steps

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
        raise StartupError(f"{existing[0]} exists and is not overwritten")
    owner = system_owner() if is_system_directory(directory) and os.geteuid() == 0 else None
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
    help="Where to write; created if missing. Default: here.",
)
@click.option(
    "--public-url", default=LOCAL_URL, metavar="URL", show_default=True, help="The URL in the mediator's DIDs."
)
@json_option
def init(directory: Path, public_url: str, as_json: bool) -> None:
    """
    Write mediator.yaml and fresh keys. Overwrites nothing.

    With an http:// URL of this machine the mediator listens there; otherwise on 127.0.0.1:8080, for a proxy. In
    /etc/mediatord state and logs are configured to be in /var/lib/mediatord and /var/log/mediatord, and the files
    are given to the user mediatord if it exists.
    """
    try:
        config, path = write_initial_files(directory, public_url)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--public-url") from None
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
            "create its user and directories",
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
        yield "start it now and at every boot", (*_list_unit_commands(), "systemctl enable --now mediatord.service")
    else:
        yield "start it, until Ctrl-C", (f"{program} run --config {typed}",)
    inside, trusting = _make_local_url(config), ""
    if is_local_https:
        inside, trusting = config.public_url, f" --ca {shlex.quote(str(path.with_name(certificate.name)))}"
    yield (
        "show its status, and run a demo with two wallets" + ("" if system else ", in another terminal"),
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
        f"have a proxy answer at {config.public_url} and pass everything on to {_make_local_url(config)}, "
        "WebSockets included"
    )
    if system:
        # The system's daemon may not bind ports below 1024, nor read the files of an ACME client.
        return proxied, ()
    parts = urlsplit(config.public_url)
    files = f"{_CERTIFICATE_DIRECTORY}/{parts.hostname}"
    chain = f"certKey={files}/cert.pem:extraCertChain={files}/chain.pem"
    return (
        f"{proxied}; or let the mediator serve TLS itself, with this line in {path}",
        (f'listen: ["ssl:{parts.port or 443}:privateKey={files}/privkey.pem:{chain}"]',),
    )


def _list_test_certificate_steps(host: str, port: int, path: Path, certificate: Path) -> Iterator[SetupStep]:
    """With a self-signed certificate."""
    key = certificate.with_suffix(".key")
    name = f"IP:{host}" if host[0].isdigit() else f"DNS:{host}"
    yield (
        "make a certificate for tests",
        (
            f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN={host} "
            f"-addext subjectAltName={name} -keyout {shlex.quote(str(key))} -out {shlex.quote(str(certificate))}",
        ),
    )
    endpoint = f"ssl:{port}:interface=127.0.0.1:privateKey={key}:certKey={certificate}"
    yield f"let the mediator use it, with this line in {path}", (f'listen: ["{endpoint}"]',)


def _make_local_url(config: Config) -> str:
    """URL of the first listener on this machine."""
    return f"http://127.0.0.1:{config.listen[0].split(':')[1]}"


def _format_steps(steps: list[SetupStep]) -> str:
    lines = []
    for number, (what, commands) in enumerate(steps, start=1):
        lines += [f"  {number}. {what}{':' if commands else ''}", *(f"     {command}" for command in commands)]
    return "\n".join(lines)


# Key of the configuration, and text of the finding.
KeyPath = tuple[KeyPart, ...]
Finding = tuple[KeyPath, str]


def check_environment(config: Config, path: Path) -> Iterator[Finding]:
    """
    Find what would keep the daemon of a configuration from starting or working: files, keys, directories, database.

    :param path: of the configuration.
    """
    yield from _check(("cluster", "listen"), check_setting_combinations, config)
    passphrase = make_passphrase_source(config.identity.passphrase_file)
    unusable = list(_check(("identity", "keys"), load_keys, config.identity.keys, passphrase))
    yield from unusable or _check(("identity",), load_identity, config)
    yield from _check_log(config)
    if config.control_socket is not None and (reason := _explain_unusable(config.control_socket.parent)):
        yield ("control_socket",), reason
    if config.storage.backend == "sqlite":
        found = _check_database(config.storage.sqlite.path, config.log.directory)
        yield from ((("storage", "sqlite", "path"), text) for text in found)
    elif config.storage.backend == "mongodb":
        yield from ((("storage", "mongodb", "uri"), text) for text in _check_mongodb(config.storage.mongodb.uri))
    if urlsplit(config.storage.mongodb.uri).password and path.stat().st_mode & 0o004:
        yield (
            ("storage", "mongodb", "uri"),
            f"the password in {path} is readable for everybody; type: chmod o= {path}",
        )
    yield from _check_listeners(config)


def _check(key: KeyPath, function: Callable[..., object], *arguments: object) -> Iterator[Finding]:
    try:
        function(*arguments)
    except OperatorError as error:
        yield key, str(error)


def _check_listeners(config: Config) -> Iterator[Finding]:
    for place, endpoint in enumerate(config.listen):
        yield from ((("listen", place), text) for text in _check_tls_files(endpoint))
    if config.cluster.listen is not None and config.cluster.secret_file is not None:
        yield from _check(("cluster", "secret_file"), read_cluster_keys, config.cluster.secret_file)
    if config.admin.listen is not None:
        yield from ((("admin", "listen"), text) for text in _check_tls_files(config.admin.listen))
        if config.admin.token_file is not None:
            yield from _check(("admin", "token_file"), read_admin_token, config.admin.token_file)


def _check_log(config: Config) -> Iterator[Finding]:
    path = config.log_key_path
    key: KeyPath = ("identity", "keys") if config.log.key_file is None else ("log", "key_file")
    if path.exists():
        yield from _check(key, read_pseudonym_keys, path)
    elif (reason := _explain_unusable(path.parent)) is not None:
        yield key, f"{path} is not there and cannot be made: {reason}" if path.parent.is_dir() else reason
    if (reason := _explain_unwritable(config.log.directory)) is not None:
        yield ("log", "directory"), reason


def _check_database(path: Path, logs: Path) -> Iterator[str]:
    if reason := _explain_unusable(path.parent):
        yield reason
    elif loss := describe_database_loss(path, logs):
        yield f"{path} cannot be used: {loss}"
    elif path.exists():
        if not os.access(path, os.R_OK | os.W_OK):
            yield f"{path} cannot be read and written by this user"
            return
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                yield from _check_schema(path, connection)
        except sqlite3.Error as error:
            yield f"{path} cannot be used: {error}"


def _check_schema(path: Path, connection: sqlite3.Connection) -> Iterator[str]:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if tables and application != APPLICATION_ID:
        yield f"{path} is a database of another program"
    elif version > len(read_schema_steps()):
        known = len(read_schema_steps())
        yield f"{path} is of a newer mediatord: its schema is version {version}, this one knows {known}"


def _check_mongodb(uri: str) -> Iterator[str]:
    try:
        import txmongo  # noqa: F401  looked for only
    except ImportError:
        yield 'storage.backend mongodb needs pip install "mediatord[mongodb]"'
        return
    from mediatord.store.mongo.driver.uri import parse_mongo_uri

    try:
        parse_mongo_uri(uri)
    except ValueError as error:
        yield str(error)


def _check_tls_files(endpoint: str) -> Iterator[str]:
    """Problems of the files of an `ssl:` endpoint."""
    if not endpoint.startswith("ssl:"):
        return
    unreadable = False
    for name, path in find_certificate_files(endpoint).items():
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
        except OSError as error:
            unreadable = True
            yield f"{name}: {path}: {error.strerror}"
            continue
        if name == "privateKey" and stat.S_IMODE(mode) & 0o007:
            yield f"{name}: {path} is open to everybody; type: chmod o= {path}"
    if unreadable:
        return
    try:
        expiry = ListenerCertificate(endpoint, None).expiry
    except Exception:  # the texts of OpenSSL are lists of its functions
        yield "key and certificate cannot be used, or do not belong together"
        return
    if expiry <= datetime.now(UTC):
        yield f"the certificate has expired on {expiry:%Y-%m-%d}"


def _explain_unusable(directory: Path) -> str | None:
    """Why this user can create no files in a directory, which has to exist; None if it can."""
    if not directory.is_dir():
        return f"{directory} is not there; type: install -d -m 700 {directory}"
    return _explain_unwritable(directory)


def _explain_unwritable(directory: Path) -> str | None:
    """Why this user can create no files in a directory; None if it can, or can create the directory."""
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return f"{there} is no directory"
    if not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written to" if there == directory else f"is not there, and {there} cannot be written to,"
        return f"{directory} {what} by this user"
    return None


@click.command("check-config")
@config_option
@json_option
def check_config(path: Path, as_json: bool) -> int:
    """
    Validate a configuration file and the files that it names.

    Prints one line for each problem. Keys, certificates, database and directories are checked with the permissions of
    the calling user. Nothing is changed, and no connection is made. Exits with 2 if the configuration is invalid,
    with 1 if only files are.
    """
    draft = examine_config(path)
    findings = [] if draft.config is None else check_environment(draft.config, path)
    # Not of defaults that stand in for invalid values.
    around = [draft.problem(where, text) for where, text in findings if not draft.is_wrong(where)]
    lines = draft.lines(around)
    if as_json:
        print_result(True, {"file": str(path), "ok": not lines, "problems": lines}, "")
    else:
        for line in lines:
            click.echo(line, err=True)
        if not lines:
            click.echo(f"{path}: ok")
    return 2 if draft.problems else 1 if around else 0

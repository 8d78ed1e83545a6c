"""Runs Affinidi's mediator with its embedded store: its keys, its configuration, its process."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from mediatord.bench.affinidi_mediator import find_affinidi_mediator
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.protocol.encoding import dumps, encode_base64url
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.temporary_daemon import find_free_port, stop_process
from tests.peers.driver_processes import PROJECT, DriverUnavailable

_CRATE = "affinidi-messaging-mediator"
# Names a binary that is there already.
_PROGRAM_VARIABLE = "AFFINIDI_MEDIATOR"
_START_SECONDS = 60.0
_POLL_SECONDS = 0.05
# An Ed25519 key in PKCS #8, version 2 (RFC 8410): what is before the private, and the public key.
_PKCS8_PRIVATE = bytes.fromhex("3051020101300506032b657004220420")
_PKCS8_PUBLIC = bytes.fromhex("812100")


def find_program() -> Path:
    """
    The mediator's binary.

    :raise DriverUnavailable: it is not installed.
    """
    if named := os.environ.get(_PROGRAM_VARIABLE):
        if os.access(named, os.X_OK):
            return Path(named)
        raise DriverUnavailable(f"{_PROGRAM_VARIABLE} names no program")
    program = PROJECT / ".affinidi" / "bin" / "mediator"
    if not program.exists():
        raise DriverUnavailable(
            f"`make .affinidi` compiles it with cargo, in an hour; {_PROGRAM_VARIABLE}=PATH names one that is there"
        )
    return program


def read_version(program: Path) -> str:
    """Version of the crate, as cargo recorded it beside the binary's directory."""
    try:
        recorded = (program.parents[1] / ".crates.toml").read_text("utf-8")
    except (OSError, IndexError):
        recorded = ""
    found = re.search(rf'"{_CRATE} (\S+) ', recorded)
    return found[1] if found else "of unknown version"


def write_configuration(directory: Path, port: int) -> Path:
    """
    Create keys, and a configuration without rate limits and limits of queues.

    :return: the configuration file.
    """
    identity = WalletIdentity.generate(endpoint=f"http://127.0.0.1:{port}/mediator/v1")
    token_key = PrivateKey.generate("Ed25519")
    keys = [
        {"id": key.kid, "type": "JsonWebKey2020", "privateKeyJwk": key.private.jwk()}
        for key in (identity.agreement, identity.signing)
    ]
    token_secret = list(_PKCS8_PRIVATE + token_key.secret + _PKCS8_PUBLIC + token_key.public.raw)
    entries = {
        "mediator_operating_secrets": _wrap_secret("operating-secrets", keys),
        "mediator_jwt_secret": _wrap_secret("jwt-secret", token_secret),
    }
    secrets_file, configuration = directory / "secrets.json", directory / "mediator.toml"
    secrets_file.write_bytes(dumps({"entries": entries}))
    settings = {
        "": {"log_level": "warn", "log_json": "false", "mediator_did": f"did://{identity.did}"},
        "server": {
            "listen_address": f"127.0.0.1:{port}",
            "api_prefix": "/mediator/v1/",
            "admin_did": f"did://{WalletIdentity.generate().did}",
        },
        "secrets": {"backend": f"file://{secrets_file}"},
        "storage": {"backend": "fjall", "data_dir": str(directory / "data")},
        **_SETTINGS,
    }
    configuration.write_text("\n".join(_format_section(*section) for section in settings.items()), "utf-8")
    return configuration


# Its defaults, except for access, limits, and room for bursts of pushes, which it would drop.
_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "database": {"functions_file": "", "database_url": "", "database_timeout": "2"},
    "security": {
        "mediator_acl_mode": "explicit_deny",
        "global_acl_default": "ALLOW_ALL",
        "local_direct_delivery_allowed": "true",
        "local_direct_delivery_allow_anon": "true",
        "use_ssl": "false",
        "jwt_access_expiry": "43200",
        "jwt_refresh_expiry": "86400",
        "block_anonymous_outer_envelope": "false",
        "force_session_did_match": "false",
        "block_remote_admin_msgs": "true",
        "admin_messages_expiry": "3",
        "enable_inter_mediator_relay": "true",
    },
    "streaming": {"enabled": "true", "uuid": "string://peers"},
    "did_resolver": {
        "cache_capacity": "1000",
        "cache_ttl": "300",
        "network_timeout": "5000",
        "network_limit": "100",
    },
    "limits": {
        "attachments_max_count": "20",
        "crypto_operations_per_message": "1000",
        "deleted_messages": "100",
        "forward_task_queue": "50000",
        "http_size": "10485760",
        "listed_messages": "100",
        "local_max_acl": "1000",
        "message_expiry_seconds": "604800",
        "message_size": "1048576",
        "queued_send_messages_soft": "-1",
        "queued_send_messages_hard": "-1",
        "queued_receive_messages_soft": "-1",
        "queued_receive_messages_hard": "-1",
        "to_keys_per_recipient": "100",
        "to_recipients": "100",
        "ws_size": "10485760",
        "access_list_limit": "1000",
        "oob_invite_ttl": "86400",
        "rate_limit_per_ip": "0",
        "did_rate_limit_per_second": "0",
        "pubsub_buffer": str(1 << 30),
    },
    "processors.forwarding": {
        "enabled": "true",
        "future_time_limit": "86400",
        "external_forwarding": "true",
        "report_errors": "true",
        "blocked_forwarding_dids": "[]",
    },
    "processors.message_expiry_cleanup": {"enabled": "true"},
}


def _wrap_secret(kind: str, data: Any) -> str:
    return encode_base64url(dumps({"version": 1, "kind": kind, "data": data}))


def _format_section(name: str, settings: Mapping[str, str]) -> str:
    lines = [f"[{name}]"] if name else []
    return "\n".join([*lines, *(f'{setting} = "{value}"' for setting, value in settings.items()), ""])


@dataclass(frozen=True, slots=True)
class AffinidiServer:
    """A running mediator; the URL is that of its API."""

    url: str
    pid: int


@contextmanager
def run_affinidi_mediator(program: Path, directory: Path) -> Iterator[AffinidiServer]:
    """
    Run a mediator within this context.

    :param directory: for its keys, configuration, data and log.
    :raise RuntimeError: it did not start; the text is the last line of its output.
    """
    port = find_free_port()
    configuration = write_configuration(directory, port)
    with open(directory / "output.txt", "wb") as output:
        # Variables of the calling shell would override the configuration.
        process = subprocess.Popen(
            [str(program), "--config", str(configuration)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=directory,
            env={},
        )
    url = f"http://127.0.0.1:{port}/mediator/v1"
    try:
        end = monotonic() + _START_SECONDS
        while find_affinidi_mediator(url) is None:
            if process.poll() is not None or monotonic() > end:
                lines = (directory / "output.txt").read_text("utf-8", "replace").split("\n")
                raise RuntimeError(next((line for line in reversed(lines) if line.strip()), "no output"))
            sleep(_POLL_SECONDS)
        yield AffinidiServer(url, process.pid)
    finally:
        stop_process(process)

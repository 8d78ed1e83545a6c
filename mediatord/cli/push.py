"""`mediatord push`: tests push notifications, and makes the keys that the configuration names."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import click

from mediatord.cli.console import (
    config_option,
    format_plural,
    group_config_option,
    json_option,
    print_json,
    print_result,
    print_table,
    shorten_did,
)
from mediatord.runtime.progress_bar import progress_bar
from mediatord.runtime.secret_files import create_secret_file

_SECRET_BYTES = 32


@click.group()
@group_config_option
def push() -> None:
    """
    Test push notifications and make keys.

    DID can be a full DID, or a shortened DID or pseudonym from the event log. No command prints what identifies a
    device at its push service.
    """


@push.command("test")
@click.option("--account", "did", required=True, metavar="DID", help="DID of the account or Decentrl identity.")
@config_option
@json_option
def send_test(did: str, path: Path, as_json: bool) -> int:
    """
    Wake all devices of an account now, and print what the push services answer.

    The running daemon sends the wake-ups, whether or not messages wait, and calls the webhook. They delay no later
    one. Devices that their service does not know are removed, as always. Exits with 1 if a wake-up was not sent.
    """
    from mediatord.cli.store_access import open_daemon_access
    from mediatord.config.file import load_config

    with open_daemon_access(load_config(path)) as daemon, progress_bar("waking"):
        owner = daemon.find_device_owner(did)
        results = daemon.wake_account(owner)
    if not results:
        raise click.ClickException(f"{shorten_did(owner)} has no device; its wallet has to register one")
    sent = sum(one["outcome"] == "sent" for one in results)
    if as_json:
        print_json({"did": owner, "sent": sent, "results": results})
    else:
        print_table(("service", "outcome", "status #", "reason", "duration #"), list(map(_format_result, results)))
        click.echo(f"{sent} of {format_plural(len(results), 'wake-up')} sent for {shorten_did(owner)}")
    return 0 if sent == len(results) else 1


def _format_result(result: dict[str, Any]) -> tuple[str, ...]:
    reason = result["reason"]
    if result["retry_after"] is not None:
        reason += f"{', ' * bool(reason)}retry after {result['retry_after']:.0f} s"
    status = "" if result["status"] is None else str(result["status"])
    return result["service"], result["outcome"], status, reason, f"{result['seconds']:.2f} s"


@push.command("generate-key")
@click.argument("kind", type=click.Choice(["web-push", "webhook"]), metavar="web-push|webhook")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def generate_key(kind: str, file: Path, as_json: bool) -> None:
    """
    Write a new key to a file of mode 0600, without overwriting anything.

    For push.web_push.key_file, a VAPID key; for push.webhook.secret_file, a random secret. In /etc/mediatord, the
    file belongs to the user mediatord if it exists.
    """
    from mediatord.cli.init import find_file_owner

    public_key = None
    if kind == "web-push":
        content, public_key = make_vapid_key()
    else:
        content = secrets.token_hex(_SECRET_BYTES).encode() + b"\n"
    create_secret_file(file, content, find_file_owner(file.parent))
    setting = "push.web_push.key_file" if kind == "web-push" else "push.webhook.secret_file"
    lines = [f"wrote {file}; set {setting} to it"]
    if public_key is not None:
        lines.append(f"public key: {public_key}")
    print_result(as_json, {"file": str(file), "setting": setting, "public_key": public_key}, "\n".join(lines))


def make_vapid_key() -> tuple[bytes, str]:
    """A private key as PEM, and its public key: uncompressed point, base64url without padding."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
    from pybase64 import urlsafe_b64encode

    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    point = key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    return private, urlsafe_b64encode(point).rstrip(b"=").decode()

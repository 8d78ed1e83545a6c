"""Who the mediator of a configuration is: its DIDs and its invitation."""

from __future__ import annotations

from pathlib import Path

import click

from mediatord.cli.options import answer, config_option, json_option
from mediatord.cli.unlocking import passphrase_of
from mediatord.config import Config, load
from mediatord.identity import Identity
from mediatord.invitation import invitation_url, qr_terminal
from mediatord.keyfile import load_keys


@click.command()
@config_option
@json_option
def did(path: Path, as_json: bool) -> None:
    """Print the mediator's DIDs: the did:peer:2, then the did:web."""
    identity = identity_of(load(path))
    answer(as_json, {"did": identity.did, "web_did": identity.web_did}, f"{identity.did}\n{identity.web_did}")


@click.command()
@config_option
@json_option
def invitation(path: Path, as_json: bool) -> None:
    """Print the invitation as a URL and as a QR code."""
    config = load(path)
    identity = identity_of(config)
    url = invitation_url(config.public_url, identity.did)
    answer(as_json, {"url": url, "did": identity.did}, f"{url}\n\n{qr_terminal(url)}")


def identity_of(config: Config) -> Identity:
    """
    Who the mediator of this configuration is.

    :raise PrivateFileError: its key file cannot be used.
    :raise IdentityError: keys and DIDs do not fit together.
    """
    return Identity(
        load_keys(config.identity.keys, passphrase_of(config)),
        config.public_url,
        config.identity.former_dids,
        raw_keys=config.decentrl.raw_keys,
    )

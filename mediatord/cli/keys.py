"""The mediator's own keys: which there are, new ones, and the end of old ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from mediatord.cli.options import answer, config_option, group_config_option, json_option
from mediatord.cli.unlocking import new_passphrase, passphrase_of
from mediatord.config import Config, load
from mediatord.identity import Identity, IdentityError, peer_did
from mediatord.keyfile import (
    Generation,
    KeySet,
    decrypt_keys,
    encrypt_keys,
    load_keys,
    retire_keys,
    rotate_keys,
)

_RELOAD = "systemctl reload mediatord, or kill -HUP PID"

State = Literal["current", "prepared", "former"]


@click.group()
@group_config_option
def keys() -> None:
    """Show, rotate, retire and encrypt the keys that the mediator's DIDs are made of."""


@keys.command("list")
@config_option
@json_option
def list_keys(path: Path, as_json: bool) -> None:
    """Print which keys there are and the did:peer:2 of each pair, latest first; nothing of it is secret."""
    config = load(path)
    listed = _listed(config, load_keys(config.identity.keys, passphrase_of(config)))
    value = {"file": str(config.identity.keys), "generations": [one.value() for one in listed]}
    answer(as_json, value, "\n".join(one.text() for one in listed))


@keys.command("rotate")
@config_option
@click.option("--prepare", is_flag=True, help="Only have new keys accepted; the next rotate makes them current.")
@json_option
def rotate(path: Path, prepare: bool, as_json: bool) -> None:
    """
    Make new keys the current ones: a new DID, beside which those of before stay accepted.

    A running daemon goes by it after a SIGHUP, with no socket dropped. A cluster needs two rounds, so that no node
    hands out a DID that another cannot open yet: rotate --prepare, copy the file to all, reload all; rotate, copy the
    file, reload all. Without --prepare, keys that were prepared become the current ones.
    """
    config = load(path)
    rotated = rotate_keys(
        config.identity.keys, partial(_identity, config), prepare=prepare, passphrase=passphrase_of(config)
    )
    identity = _identity(config, rotated)
    first = rotated.prepared_generations[0] if prepare else rotated.generations[0]
    value = {
        "file": str(config.identity.keys),
        "kids": list(first.kids),
        "did": identity.did,
        "web_did": identity.web_did,
        "former_dids": list(identity.former_peer_dids),
        "prepared_dids": list(identity.prepared_dids),
        "next": _RELOAD,
    }
    lines = [f"wrote {config.identity.keys}: {', '.join(first.kids)}", "", f"DID       {identity.did}"]
    lines += [f"          {identity.web_did}"]
    lines += [f"prepared  {did}" for did in identity.prepared_dids]
    lines += [f"former    {did}" for did in identity.former_peer_dids]
    after = f"; once every node has done so, mediatord keys rotate --config {path}" if prepare else ""
    answer(as_json, value, "\n".join([*lines, "", f"next: {_RELOAD}{after}"]))


@keys.command("retire")
@click.argument("kid")
@config_option
@click.option("--yes", is_flag=True, help="Do it; without this, say what would be done.")
@json_option
def retire(kid: str, path: Path, yes: bool, as_json: bool) -> None:
    """
    Delete the former keys that were made together with KID, one of them.

    The DID that they belong to is not accepted any more once the daemon has reloaded, and nobody can open what was
    encrypted to it. The current keys cannot be retired.
    """
    config = load(path)
    gone, left = retire_keys(
        config.identity.keys, kid, partial(_identity, config), really=yes, passphrase=passphrase_of(config)
    )
    did = _did(config, gone)
    value = {"file": str(config.identity.keys), "kids": list(gone.kids), "did": did, "done": yes}
    value["left"] = [kid for kid, _ in left]
    what = f"{', '.join(gone.kids)} {'are' if yes else 'would be'} deleted"
    accepted = f"no longer accepted{'' if yes else ' then'}: {did or 'messages to these keys by name'}"
    end = f"next: {_RELOAD}" if yes else "nothing was done; add --yes to do it"
    answer(as_json, value, "\n".join((what, accepted, "", end)))


@keys.command("encrypt")
@config_option
@json_option
def encrypt(path: Path, as_json: bool) -> None:
    """
    Encrypt the file of the keys with a passphrase.

    That is what identity.passphrase_file holds, where the daemon has it from as well; or it is typed. Whoever loses
    it has lost the mediator's DIDs. Copies of the file in the clear, as in former backups and in free blocks of the
    disk, stay what they are: only new keys have never been there.
    """
    config = load(path)
    encrypt_keys(config.identity.keys, new_passphrase(config.identity.passphrase_file))
    after = "" if config.identity.passphrase_file else f"; the daemon needs identity.passphrase_file in {path}"
    text = f"encrypted {config.identity.keys}{after}"
    answer(as_json, {"file": str(config.identity.keys), "encrypted": True}, text)


@keys.command("decrypt")
@config_option
@json_option
def decrypt(path: Path, as_json: bool) -> None:
    """Have the file of the keys in the clear again, as before `keys encrypt`."""
    config = load(path)
    decrypt_keys(config.identity.keys, passphrase_of(config))
    text = f"{config.identity.keys} is in the clear, readable for its owner"
    answer(as_json, {"file": str(config.identity.keys), "encrypted": False}, text)


@dataclass(frozen=True, slots=True)
class _Listed:
    """:param did: None where there is no such pair of keys."""

    state: State
    kids: tuple[str, ...]
    did: str | None

    def value(self) -> dict[str, Any]:
        """For programs."""
        return {"state": self.state, "kids": list(self.kids), "did": self.did}

    def text(self) -> str:
        """For people."""
        return f"{self.state:<8}  {' '.join(self.kids)}\n          {self.did or 'no did:peer:2'}"


def _listed(config: Config, found: KeySet) -> list[_Listed]:
    current, *former = found.generations
    states: list[tuple[State, Generation]] = [("prepared", one) for one in found.prepared_generations]
    states += [("current", current), *(("former", one) for one in former)]
    return [_Listed(state, one.kids, _did(config, one)) for state, one in states]


def _did(config: Config, generation: Generation) -> str | None:
    agreement, signing = generation.key("X25519"), generation.key("Ed25519")
    return peer_did(agreement.public, signing.public, config.public_url) if agreement and signing else None


def _identity(config: Config, found: KeySet) -> Identity:
    """
    The identity with these keys.

    :raise IdentityError: the configuration lists a former DID that none of them belongs to.
    """
    try:
        return Identity(found, config.public_url, config.identity.former_dids)
    except IdentityError as error:
        raise IdentityError(f"{error}; take it out of identity.former_dids first") from None

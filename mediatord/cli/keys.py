"""`mediatord did`, `invitation`, `keys`, `log-keys` and `whois`: identity, keys and pseudonyms."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from mediatord.cli.console import config_option, group_config_option, json_option, open_store, print_result
from mediatord.config.file import load_config
from mediatord.config.settings import Config
from mediatord.identity.encrypted_file import PassphraseSource, check_passphrase, make_passphrase_source
from mediatord.identity.invitation import (
    build_invitation_url,
    build_short_invitation_url,
    make_v1_invitation,
    render_qr_terminal,
)
from mediatord.identity.key_file import (
    KeyGeneration,
    KeySet,
    decrypt_keys,
    encrypt_keys,
    load_keys,
    retire_keys,
    retire_root_secret,
    rotate_keys,
)
from mediatord.identity.mediator_identity import IdentityError, MediatorIdentity, make_mediator_peer_did
from mediatord.observability.pseudonyms import delete_epoch_key, is_full_did, read_pseudonym_keys, start_key_epoch
from mediatord.runtime.progress_bar import progress_bar
from mediatord.runtime.secret_files import SecretFileError, read_secret_file


def make_passphrase_reader(config: Config) -> PassphraseSource:
    """Source of the passphrase of the mediator's keys: the configured file, or a prompt."""
    return make_passphrase_source(config.identity.passphrase_file, _ask_passphrase)


def ask_new_passphrase(file: Path | None) -> bytes:
    """
    Read a new passphrase from a file, or prompt for it twice.

    :raise SecretFileError: it is too short, or standard input is no terminal.
    """
    if file is not None:
        return check_passphrase(read_secret_file(file).rstrip(b"\r\n"), file)
    _require_terminal("no passphrase given: set identity.passphrase_file")
    typed: str = click.prompt("new passphrase", hide_input=True, confirmation_prompt=True, err=True)
    return check_passphrase(typed.encode(), "the passphrase")


def _ask_passphrase(path: Path) -> bytes:
    _require_terminal(f"{path} is encrypted; set identity.passphrase_file")
    typed: str = click.prompt(f"passphrase of {path}", hide_input=True, err=True)
    return typed.encode()


def _require_terminal(otherwise: str) -> None:
    if not sys.stdin.isatty():
        raise SecretFileError(f"{otherwise}, or run the command in a terminal")


@click.command()
@config_option
@json_option
def did(path: Path, as_json: bool) -> None:
    """Print the mediator's DIDs: did:peer:2, then did:web."""
    identity = read_identity(load_config(path))
    print_result(as_json, {"did": identity.did, "web_did": identity.web_did}, f"{identity.did}\n{identity.web_did}")


@click.command()
@config_option
@json_option
def invitation(path: Path, as_json: bool) -> None:
    """
    Print the invitation: short URL, QR code and long URL.

    With didcomm_v1.enabled, the one for DIDComm v1 follows, with a Connections 1.0 URL for older wallets.
    """
    config = load_config(path)
    identity = read_identity(config)
    short_url = build_short_invitation_url(config.public_url)
    url = build_invitation_url(config.public_url, identity.did)
    result: dict[str, Any] = {"short_url": short_url, "url": url, "did": identity.did}
    text = f"{short_url}\n\n{render_qr_terminal(short_url)}\n{url}"
    if config.didcomm_v1.enabled:
        v1 = make_v1_invitation(config.public_url, identity.root_secret, config.didcomm_v1.label)
        result["v1"] = {"short_url": v1.short_url, "url": v1.url, "connection_url": v1.connection_url}
        text += f"\n\nDIDComm v1\n\n{v1.short_url}\n\n{render_qr_terminal(v1.short_url)}\n{v1.url}"
        text += f"\n\nolder wallets (Connections 1.0)\n\n{v1.connection_url}"
    print_result(as_json, result, text)


def read_identity(config: Config) -> MediatorIdentity:
    """
    Load the identity of the mediator of a configuration.

    :raise SecretFileError: its key file cannot be used.
    :raise IdentityError: keys and DIDs do not match.
    """
    return MediatorIdentity(
        load_keys(config.identity.keys, make_passphrase_reader(config)),
        config.public_url,
        config.identity.former_dids,
        raw_keys=config.decentrl.raw_keys,
    )


# Names the root secret, among the ids of keys.
_ROOT = "root"
_RELOAD_HINT = "systemctl reload mediatord, or kill -HUP PID"


@click.group()
@group_config_option
def keys() -> None:
    """List, rotate, retire and encrypt the mediator's keys."""


@keys.command("list")
@config_option
@json_option
def list_keys(path: Path, as_json: bool) -> None:
    """List the keys and the did:peer:2 of each pair, newest first."""
    config = load_config(path)
    found = load_keys(config.identity.keys, make_passphrase_reader(config))
    states = ["prepared"] * len(found.prepared_generations) + ["current"] + ["former"] * len(found.generations[1:])
    listed, lines = [], []
    for state, one in zip(states, (*found.prepared_generations, *found.generations), strict=True):
        did = _derive_peer_did(config, one)
        listed.append({"state": state, "kids": list(one.kids), "did": did})
        lines.append(f"{state:<8}  {' '.join(one.kids)}\n          {did or 'no did:peer:2'}")
    print_result(as_json, {"file": str(config.identity.keys), "generations": listed}, "\n".join(lines))


@keys.command("rotate")
@config_option
@click.option("--prepare", is_flag=True, help="Only add and accept new keys; the next rotate makes them current.")
@json_option
def rotate(path: Path, prepare: bool, as_json: bool) -> None:
    """
    Create new current keys and with them a new DID.

    Former DIDs remain accepted. A running daemon uses the new keys after SIGHUP, without closing sockets. In a
    cluster, run `keys rotate --prepare`, copy the file to all nodes and reload all of them; then do the same with
    `keys rotate`, which makes the prepared keys current.
    """
    config = load_config(path)
    rotated = rotate_keys(
        config.identity.keys,
        partial(_build_identity, config),
        prepare=prepare,
        passphrase=make_passphrase_reader(config),
    )
    identity = _build_identity(config, rotated)
    first = rotated.prepared_generations[0] if prepare else rotated.generations[0]
    value = {
        "file": str(config.identity.keys),
        "kids": list(first.kids),
        "did": identity.did,
        "web_did": identity.web_did,
        "former_dids": list(identity.former_peer_dids),
        "prepared_dids": list(identity.prepared_dids),
        "next": _RELOAD_HINT,
    }
    lines = [f"wrote {config.identity.keys}: {', '.join(first.kids)}", "", f"DID       {identity.did}"]
    lines += [f"          {identity.web_did}"]
    lines += [f"prepared  {did}" for did in identity.prepared_dids]
    lines += [f"former    {did}" for did in identity.former_peer_dids]
    after = f"; then, once every node has reloaded: mediatord keys rotate --config {path}" if prepare else ""
    print_result(as_json, value, "\n".join([*lines, "", f"next: {_RELOAD_HINT}{after}"]))


@keys.command("retire")
@click.argument("kid")
@config_option
@click.option("--yes", is_flag=True, help="Delete; default: only show what would be deleted.")
@json_option
def retire(kid: str, path: Path, yes: bool, as_json: bool) -> None:
    """
    Delete the pair of former keys that KID belongs to.

    After a reload the daemon rejects their DID and cannot decrypt messages to it. Current keys cannot be retired.

    The keys of DIDComm v1 and the ids of push devices do not change: they depend on a secret that is kept. To delete
    it as well, after a key has leaked, give root as KID; then wallets of DIDComm v1 have to connect again.
    """
    config = load_config(path)
    if kid == _ROOT:
        _retire_root_secret(config, yes, as_json)
        return
    gone, left = retire_keys(
        config.identity.keys,
        kid,
        partial(_build_identity, config),
        dry_run=not yes,
        passphrase=make_passphrase_reader(config),
    )
    did = _derive_peer_did(config, gone)
    value = {"file": str(config.identity.keys), "kids": list(gone.kids), "did": did, "done": yes}
    value["left"] = [kid for kid, _ in left]
    what = f"{', '.join(gone.kids)} {'were' if yes else 'would be'} deleted"
    verb = "no longer accepted" if yes else "would no longer be accepted"
    accepted = f"{verb}: {did or 'messages addressed to these key ids'}"
    end = f"next: {_RELOAD_HINT}" if yes else "nothing was deleted; add --yes to delete"
    print_result(as_json, value, "\n".join((what, accepted, "", end)))


def _retire_root_secret(config: Config, yes: bool, as_json: bool) -> None:
    file, reader = config.identity.keys, make_passphrase_reader(config)
    retire_root_secret(file, partial(_build_identity, config), dry_run=not yes, passphrase=reader)
    what = f"the root secret {'was' if yes else 'would be'} deleted"
    effect = "wallets of DIDComm v1 have to connect again, by a new invitation; push devices get new ids"
    end = f"next: {_RELOAD_HINT}" if yes else "nothing was deleted; add --yes to delete"
    print_result(as_json, {"file": str(file), "kids": [_ROOT], "done": yes}, "\n".join((what, effect, "", end)))


@keys.command("encrypt")
@config_option
@json_option
def encrypt(path: Path, as_json: bool) -> None:
    """
    Encrypt keys.jwks with a passphrase.

    Reads the passphrase from identity.passphrase_file, or prompts for it. If you lose it, the mediator's DIDs are
    lost. Unencrypted copies remain in old backups and in free disk blocks; rotate the keys to make them worthless.
    """
    config = load_config(path)
    encrypt_keys(config.identity.keys, ask_new_passphrase(config.identity.passphrase_file))
    after = "" if config.identity.passphrase_file else f"; the daemon needs identity.passphrase_file in {path}"
    text = f"encrypted {config.identity.keys}{after}"
    print_result(as_json, {"file": str(config.identity.keys), "encrypted": True}, text)


@keys.command("decrypt")
@config_option
@json_option
def decrypt(path: Path, as_json: bool) -> None:
    """Decrypt keys.jwks (undoes `keys encrypt`)."""
    config = load_config(path)
    decrypt_keys(config.identity.keys, make_passphrase_reader(config))
    text = f"decrypted {config.identity.keys}, readable by its owner only"
    print_result(as_json, {"file": str(config.identity.keys), "encrypted": False}, text)


def _derive_peer_did(config: Config, generation: KeyGeneration) -> str | None:
    agreement, signing = generation.key("X25519"), generation.key("Ed25519")
    return (
        make_mediator_peer_did(agreement.public, signing.public, config.public_url) if agreement and signing else None
    )


def _build_identity(config: Config, found: KeySet) -> MediatorIdentity:
    """
    The identity with these keys.

    :raise IdentityError: the configuration lists a former DID without a key.
    """
    try:
        return MediatorIdentity(found, config.public_url, config.identity.former_dids)
    except IdentityError as error:
        raise IdentityError(f"{error}; remove it from identity.former_dids first") from None


@click.group("log-keys")
@group_config_option
def log_keys() -> None:
    """List, rotate and delete the pseudonym keys of the event log."""


@log_keys.command("list")
@config_option
@json_option
def list_pseudonym_keys(path: Path, as_json: bool) -> None:
    """List key epochs with their first day (UTC)."""
    file = load_config(path).log_key_path
    keys = read_pseudonym_keys(file)
    epochs = [{"epoch": key.epoch, "since": str(key.since)} for key in keys]
    text = "\n".join(f"epoch {key.epoch}, from {key.since}" for key in keys)
    print_result(as_json, {"file": str(file), "epochs": epochs}, text)


@log_keys.command("rotate")
@config_option
@json_option
def rotate_pseudonym_key(path: Path, as_json: bool) -> None:
    """Start a new key epoch. A running daemon uses it after SIGHUP or from the next midnight UTC."""
    file = load_config(path).log_key_path
    key = start_key_epoch(file, datetime.now(UTC).date())
    value = {"file": str(file), "epoch": key.epoch, "since": str(key.since), "next": _RELOAD_HINT}
    print_result(as_json, value, f"started epoch {key.epoch}; next: {_RELOAD_HINT}")


@log_keys.command("forget")
@click.argument("epoch", type=int)
@config_option
@json_option
def forget_pseudonym_key(epoch: int, path: Path, as_json: bool) -> None:
    """
    Delete the key of an epoch.

    Its pseudonyms can no longer be resolved. A running daemon keeps a key in use until SIGHUP or midnight UTC.
    """
    file = load_config(path).log_key_path
    delete_epoch_key(file, epoch)
    text = f"deleted the key of epoch {epoch}; a running daemon keeps it until SIGHUP or midnight UTC"
    print_result(as_json, {"file": str(file), "epoch": epoch, "next": _RELOAD_HINT}, text)


@click.command()
@click.argument("name", metavar="PSEUDONYM|DID")
@config_option
@json_option
def whois(name: str, path: Path, as_json: bool) -> None:
    """
    Print the registered DIDs that match a pseudonym, or the pseudonyms of a DID.

    Prints each with its key epoch. Exits with 1 if no registered DID matches a pseudonym.
    """
    read_pseudonym_keys(load_config(path).log_key_path)  # a file that cannot be used is reported first
    with open_store(path) as store, progress_bar("searching"):
        if is_full_did(name):
            made = store.list_pseudonyms(name)
            pseudonyms = [{"epoch": epoch, "pseudonym": pseudonym} for epoch, pseudonym in made]
            print_result(as_json, {"did": name, "pseudonyms": pseudonyms}, _format_epochs(made))
            return
        found = sorted(set(store.find_pseudonyms(name)))
    if not found:
        raise click.ClickException(f"no registered DID has the pseudonym {name}")
    dids = [{"epoch": epoch, "did": did} for epoch, did in found]
    print_result(as_json, {"pseudonym": name, "dids": dids}, _format_epochs(found))


def _format_epochs(found: Iterable[tuple[int, str]]) -> str:
    return "\n".join(f"{epoch}  {text}" for epoch, text in found)

"""
Envelopes of mediatord opened by other people's libraries, and theirs opened by mediatord (reference 10.2).

A foreign program gets ``{"parties": [{"kid", "jwk", "multikey"}], "open": [envelope, …], "seal": [{"message", "to",
"kids", "from", "enc"}, …]}`` and answers ``{"opened": [{"message", "sender"}, …], "sealed": [envelope, …]}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import pytest

from mediatord.protocol.didcomm.jwe import Enc, decrypt_envelope, encrypt_anoncrypt, encrypt_authcrypt, parse_envelope
from mediatord.protocol.didcomm.keys import Curve, PrivateKey
from tests.foreign.environments import run_driver

LIBRARIES = {
    "sicpa": (".venv-sicpa", "sicpa_envelopes.py"),
    "indicio-askar": (".venv-indicio", "indicio_envelopes.py", "askar"),
    "indicio-authlib": (".venv-indicio", "indicio_envelopes.py", "authlib"),
}
CURVES: dict[str, tuple[Curve, ...]] = {
    "sicpa": ("X25519", "P-256", "P-384", "P-521"),
    "indicio-askar": ("X25519",),
    "indicio-authlib": ("X25519",),
}


@dataclass(frozen=True)
class Case:
    """One kind of envelope: for Bob's only key on `curve`, or for both of Carol's."""

    curve: Curve
    enc: Enc
    authenticated: bool
    recipients: int

    @property
    def kids(self) -> list[str]:
        return [f"did:example:{self.curve.lower()}-{self.recipients}#{n}" for n in range(1, self.recipients + 1)]

    @property
    def sender(self) -> str | None:
        return f"did:example:{self.curve.lower()}-alice#1" if self.authenticated else None

    @property
    def message(self) -> dict[str, Any]:
        return {
            "id": str(self),
            "typ": "application/didcomm-plain+json",
            "type": "https://didcomm.org/basicmessage/2.0/message",
            "to": [self.kids[0].partition("#")[0]],
            "body": {"content": "grüße ✓" * 20},
            **({"from": self.sender.partition("#")[0]} if self.sender else {}),
        }

    def __str__(self) -> str:
        kind = "authcrypt" if self.authenticated else "anoncrypt"
        return f"{kind}-{self.curve}-{self.enc}-for-{self.recipients}"


def cases(library: str, *, theirs: bool) -> Iterator[Case]:
    """
    What `library` can read, or `theirs`: what it can write.

    Indicio writes XC20P and no other enc for anoncrypt, and for one recipient only through its interface.
    """
    for curve in CURVES[library]:
        for recipients in (1, 2):
            yield Case(curve, "A256CBC-HS512", True, recipients)
            for enc in get_args(Enc):
                if not theirs or library == "sicpa" or enc == "XC20P":
                    yield Case(curve, enc, False, recipients)


@cache
def keys() -> dict[str, PrivateKey]:
    """Alice's key, Bob's, and Carol's two, on every curve, by kid."""
    found = {}
    for curve in CURVES["sicpa"]:
        kids = [Case(curve, "XC20P", True, n).kids for n in (1, 2)]
        for kid in [f"did:example:{curve.lower()}-alice#1", *kids[0], *kids[1]]:
            found[kid] = PrivateKey.generate(curve)
    return found


def seal(case: Case) -> str:
    """An envelope of ours."""
    plaintext = json.dumps(case.message).encode()
    recipients = [(kid, keys()[kid].public) for kid in case.kids]
    if case.sender:
        return encrypt_authcrypt(plaintext, (case.sender, keys()[case.sender]), recipients).decode()
    return encrypt_anoncrypt(plaintext, recipients, enc=case.enc).decode()


@cache
def results(library: str) -> dict[str, Any]:
    """What the foreign program made of all cases of `library`, in one run."""
    mine = {kid: key for kid, key in keys().items() if key.curve in CURVES[library]}
    parties = [{"kid": kid, "jwk": key.jwk(), "multikey": key.public.multibase()} for kid, key in mine.items()]
    jobs = {
        "parties": parties,
        "open": [seal(case) for case in cases(library, theirs=False)],
        "seal": [
            {
                "message": case.message,
                "to": case.kids[0].partition("#")[0],
                "kids": case.kids,
                "from": case.sender,
                "enc": case.enc,
            }
            for case in cases(library, theirs=True)
        ],
    }
    environment, program, *arguments = LIBRARIES[library]
    ran = run_driver(environment, program, *arguments, given=json.dumps(jobs))
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


def every(*, theirs: bool) -> Callable[..., Any]:
    """Each library with each of its cases."""
    pairs = [(library, case) for library in LIBRARIES for case in cases(library, theirs=theirs)]
    return pytest.mark.parametrize(("library", "case"), pairs, ids=lambda value: str(value))


@every(theirs=False)
def test_they_open_ours(library: str, case: Case) -> None:
    """An envelope of mediatord opens in the library, which sees the sender we named (reference 10.2)."""
    opened = results(library)["opened"][list(cases(library, theirs=False)).index(case)]
    assert opened["sender"] == case.sender
    assert case.message.items() <= opened["message"].items()


@every(theirs=True)
def test_we_open_theirs(library: str, case: Case) -> None:
    """An envelope of the library opens with every key it was sealed for (reference 10.3)."""
    sealed = results(library)["sealed"][list(cases(library, theirs=True)).index(case)]
    envelope = parse_envelope(sealed.encode())
    found = (bool(envelope.sender_kid), envelope.header["enc"], envelope.curve)
    assert found == (case.authenticated, case.enc, case.curve)
    assert (envelope.sender_kid, sorted(envelope.encrypted_keys)) == (case.sender, sorted(case.kids))
    sender = keys()[case.sender].public if case.sender else None
    for kid in case.kids:
        message = json.loads(decrypt_envelope(envelope, kid, keys()[kid], sender))
        assert case.message.items() <= message.items()

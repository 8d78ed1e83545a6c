"""
Envelopes of mediatord opened by third-party libraries, and the reverse (reference 10.2).

A driver gets ``{"parties": [{"kid", "jwk", "multikey"}], "open": [envelope, …], "seal": [{"message", "to", "kids",
"from", "enc"}, …]}`` and returns ``{"opened": [{"message", "sender"}, …], "sealed": [envelope, …]}``.
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
    """A kind of envelope: for Bob's only key on `curve`, or for both keys of Carol."""

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


def cases(library: str, *, sealed_by_library: bool) -> Iterator[Case]:
    """
    What `library` can read, or with `sealed_by_library` what it can write.

    Indicio writes only XC20P for anoncrypt, and only for one recipient through its interface.
    """
    for curve in CURVES[library]:
        for recipients in (1, 2):
            yield Case(curve, "A256CBC-HS512", True, recipients)
            for enc in get_args(Enc):
                if not sealed_by_library or library == "sicpa" or enc == "XC20P":
                    yield Case(curve, enc, False, recipients)


@cache
def keys() -> dict[str, PrivateKey]:
    """Keys of Alice, Bob, and two of Carol, on every curve, by kid."""
    keys_by_kid = {}
    for curve in CURVES["sicpa"]:
        kids = [Case(curve, "XC20P", True, n).kids for n in (1, 2)]
        for kid in [f"did:example:{curve.lower()}-alice#1", *kids[0], *kids[1]]:
            keys_by_kid[kid] = PrivateKey.generate(curve)
    return keys_by_kid


def seal(case: Case) -> str:
    """Seal the message of a case with mediatord."""
    plaintext = json.dumps(case.message).encode()
    recipients = [(kid, keys()[kid].public) for kid in case.kids]
    if case.sender:
        return encrypt_authcrypt(plaintext, (case.sender, keys()[case.sender]), recipients).decode()
    return encrypt_anoncrypt(plaintext, recipients, enc=case.enc).decode()


@cache
def library_results(library: str) -> dict[str, Any]:
    """Results of the driver for all cases of `library`, in one run."""
    library_keys = {kid: key for kid, key in keys().items() if key.curve in CURVES[library]}
    parties = [
        {"kid": kid, "jwk": key.jwk(), "multikey": key.public.multibase()} for kid, key in library_keys.items()
    ]
    jobs = {
        "parties": parties,
        "open": [seal(case) for case in cases(library, sealed_by_library=False)],
        "seal": [
            {
                "message": case.message,
                "to": case.kids[0].partition("#")[0],
                "kids": case.kids,
                "from": case.sender,
                "enc": case.enc,
            }
            for case in cases(library, sealed_by_library=True)
        ],
    }
    environment, program, *arguments = LIBRARIES[library]
    result = run_driver(environment, program, *arguments, given=json.dumps(jobs))
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


def parametrize_cases(*, sealed_by_library: bool) -> Callable[..., Any]:
    """Run a test for each library and each of its cases."""
    pairs = [(library, case) for library in LIBRARIES for case in cases(library, sealed_by_library=sealed_by_library)]
    return pytest.mark.parametrize(("library", "case"), pairs, ids=lambda value: str(value))


@parametrize_cases(sealed_by_library=False)
def test_library_opens_our_envelopes(library: str, case: Case) -> None:
    """The library opens envelopes of mediatord and reports their sender (reference 10.2)."""
    opened = library_results(library)["opened"][list(cases(library, sealed_by_library=False)).index(case)]
    assert opened["sender"] == case.sender
    assert case.message.items() <= opened["message"].items()


@parametrize_cases(sealed_by_library=True)
def test_opens_envelopes_of_library(library: str, case: Case) -> None:
    """mediatord opens envelopes of the library with every key that they are encrypted for (reference 10.3)."""
    sealed = library_results(library)["sealed"][list(cases(library, sealed_by_library=True)).index(case)]
    envelope = parse_envelope(sealed.encode())
    properties = (bool(envelope.sender_kid), envelope.header["enc"], envelope.curve)
    assert properties == (case.authenticated, case.enc, case.curve)
    assert (envelope.sender_kid, sorted(envelope.encrypted_keys)) == (case.sender, sorted(case.kids))
    sender = keys()[case.sender].public if case.sender else None
    for kid in case.kids:
        message = json.loads(decrypt_envelope(envelope, kid, keys()[kid], sender))
        assert case.message.items() <= message.items()

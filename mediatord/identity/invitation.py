"""
Out-of-band 2.0 invitation to request mediation: message, URLs, QR code and web page (reference 7.4).

It depends only on the mediator's DID and public URL, so a printed invitation stays valid. The short URL and its QR
code depend on the public URL alone, and lead to the current DID after a key rotation.
"""

from __future__ import annotations

import uuid
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from io import StringIO
from string import Template
from typing import Any
from urllib.parse import urlsplit

import segno

from mediatord.protocol import encoding

_INVITATION_TYPE = "https://didcomm.org/out-of-band/2.0/invitation"


@dataclass(frozen=True, slots=True)
class InvitationPage:
    """
    A web page.

    :param body: self-contained HTML in UTF-8.
    :param security_policy: value of its Content-Security-Policy header.
    """

    body: bytes
    security_policy: str


def derive_invitation_id(public_url: str) -> str:
    """The id of the invitation of the mediator at a URL; the same after a key rotation."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, public_url))


def build_invitation(public_url: str, did: str) -> dict[str, Any]:
    """The invitation as a plaintext message."""
    return {
        "type": _INVITATION_TYPE,
        "id": derive_invitation_id(public_url),
        "from": did,
        "body": {"goal_code": "request-mediate", "goal": "RequestMediate", "accept": ["didcomm/v2"]},
    }


def build_invitation_url(public_url: str, did: str) -> str:
    """The URL that contains the invitation."""
    return f"{public_url}/invitation?{_build_oob_query(public_url, did)}"


def build_short_invitation_url(public_url: str) -> str:
    """The URL that leads to the invitation, which wallets scan as a QR code and browsers open."""
    return f"{public_url}/oob?_oobid={derive_invitation_id(public_url)}"


def build_wallet_url(public_url: str, did: str) -> str:
    """The URL with the scheme that wallets register on their device."""
    return f"didcomm://?{_build_oob_query(public_url, did)}"


def render_qr_terminal(text: str) -> str:
    """QR code in block characters, two modules per character, for dark terminals."""
    drawn = StringIO()
    segno.make_qr(text, error="l").terminal(drawn, compact=True)
    return drawn.getvalue()


def render_qr_svg(text: str) -> str:
    """QR code as an unstyled `svg` element that fills its container."""
    code = segno.make_qr(text, error="l")
    return code.svg_inline(omitsize=True, light="#fff", svgclass=None, lineclass=None)


def render_invitation_page(public_url: str, did: str) -> InvitationPage:
    """Web page with explanation, button, QR code, link and DID. It contains no script and loads nothing."""
    template = _load_invitation_template()
    short_url = build_short_invitation_url(public_url)
    body = template.substitute(
        qr=render_qr_svg(short_url),
        short_url=escape(short_url),
        url=escape(build_invitation_url(public_url, did)),
        app=escape(build_wallet_url(public_url, did)),
        did=escape(did),
        host=escape(urlsplit(public_url).netloc),
        public_url=escape(public_url),
    )
    style = template.template.partition("<style>")[2].partition("</style>")[0]
    digest = b64encode(sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return InvitationPage(body.encode(), policy)


def _build_oob_query(public_url: str, did: str) -> str:
    return f"_oob={encoding.encode_base64url(encoding.dumps(build_invitation(public_url, did)))}"


@cache
def _load_invitation_template() -> Template:
    return Template(files("mediatord.identity").joinpath("invitation.html").read_text("utf-8"))

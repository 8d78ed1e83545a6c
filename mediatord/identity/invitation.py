"""
Invitations to request mediation: messages, URLs, QR codes and their web page (reference 7.4).

The one of DIDComm v2 (Out-of-Band 2.0) depends only on the mediator's DID and public URL, so a printed invitation
stays valid. Its short URL and QR code depend on the public URL alone, and lead to the current DID after a key
rotation. The one of DIDComm v1 stays the same after a key rotation, in all its forms.
"""

from __future__ import annotations

import re
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

from mediatord.identity.mediator_identity import list_services
from mediatord.identity.v1_identity import V1Identity
from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1 import out_of_band

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


@dataclass(frozen=True, slots=True)
class V1Invitation:
    """
    The invitation of DIDComm v1.

    :param message: Out-of-Band 1.1.
    :param url: contains the message; wallets that are started offline need this one.
    :param short_url: leads to the message, which wallets scan as a QR code and browsers open.
    :param app_url: contains the message, with the scheme that wallets register on their device.
    :param connection_url: contains the Connections 1.0 invitation, for older wallets.
    """

    message: dict[str, Any]
    url: str
    short_url: str
    app_url: str
    connection_url: str


def make_v1_invitation(public_url: str, root_secret: bytes, label: str) -> V1Invitation:
    """
    The invitation of DIDComm v1.

    :param root_secret: as of :class:`~mediatord.identity.v1_identity.V1Identity`.
    :param label: name of the mediator, for humans.
    """
    (_, endpoint), _ = list_services(public_url)
    key = V1Identity(root_secret).invitation_key.did_key
    message = out_of_band.build_invitation(public_url, endpoint, key, label)
    connection = out_of_band.build_connection_invitation(public_url, endpoint, key, label)
    address = f"{public_url}/invitation/v1"
    return V1Invitation(
        message,
        out_of_band.build_url(address, out_of_band.OOB_PARAMETER, message),
        address,
        out_of_band.build_url("didcomm://", out_of_band.OOB_PARAMETER, message),
        out_of_band.build_url(address, out_of_band.CONNECTION_PARAMETER, connection),
    )


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


def render_invitation_page(public_url: str, did: str, v1: V1Invitation | None = None) -> InvitationPage:
    """
    Web page with explanation, button, QR code, link and DID. It contains no script and loads nothing.

    :param v1: the invitation of DIDComm v1; None if that is not served.
    """
    template = _load_invitation_template(v1 is not None)
    short_url = build_short_invitation_url(public_url)
    v1_texts = {}
    if v1 is not None:
        v1_texts = {
            "v1_qr": render_qr_svg(v1.short_url),
            "v1_short_url": escape(v1.short_url),
            "v1_url": escape(v1.url),
            "v1_app": escape(v1.app_url),
            "v1_connection_url": escape(v1.connection_url),
        }
    body = template.substitute(
        v1_texts,
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


# What is between these stands in the page only if DIDComm v1 is served, or only if it is not.
_V1_PART = re.compile(r"<!-- v1 -->\n(.*?)(?:<!-- only v2 -->\n(.*?))?<!-- end -->\n", re.DOTALL)


@cache
def _load_invitation_template(has_v1: bool) -> Template:
    text = files("mediatord.identity").joinpath("invitation.html").read_text("utf-8")
    return Template(_V1_PART.sub(lambda match: (match[1] if has_v1 else match[2]) or "", text))

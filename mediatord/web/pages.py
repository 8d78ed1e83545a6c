"""What is the same for everybody: DIDs, documents and the invitation, rendered once at most (contract section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from twisted.web.server import Request

from mediatord.invitation import invitation, invitation_page, invitation_url
from mediatord.protocol import jsontext
from mediatord.web.openapi import OPENAPI
from mediatord.web.render import Answer

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
HTML = b"text/html; charset=utf-8"


class Pages:
    """
    The public pages.

    :param did: our did:peer:2.
    :param web_document: document of our did:web.
    """

    def __init__(self, did: str, web_document: Mapping[str, Any], public_url: str) -> None:
        self._public_url = public_url
        self._openapi = Answer(200, OPENAPI, JSON)
        self.show(did, web_document)

    def show(self, did: str, web_document: Mapping[str, Any]) -> None:
        """Tell another DID and document from now on."""
        public_url = self._public_url
        self._invited = (public_url, did)
        self.__dict__.pop("_html", None)
        self._did = Answer(200, did.encode("ascii"), TEXT)
        self._document = Answer(200, jsontext.dumps(dict(web_document)), JSON)
        self._url = Answer(200, invitation_url(public_url, did).encode("ascii"), TEXT)
        self._json = Answer(200, jsontext.dumps(invitation(did)), JSON, _VARIES)

    @cached_property
    def _html(self) -> Answer:
        """Made when somebody asks for it: its QR code takes longer than all else that is done at the start."""
        page = invitation_page(*self._invited)
        return Answer(
            200,
            page.body,
            HTML,
            (
                *_VARIES,
                (b"Content-Security-Policy", page.security_policy.encode("ascii")),
                (b"X-Content-Type-Options", b"nosniff"),
                (b"Referrer-Policy", b"no-referrer"),
            ),
        )

    def did(self, request: Request) -> Answer:
        """`/did`: the did:peer:2 as text."""
        return self._did

    def did_document(self, request: Request) -> Answer:
        """`/.well-known/did.json`: the document of the did:web."""
        return self._document

    def root(self, request: Request) -> Answer:
        """`/`: the same; with `?_oob=` it is an invitation that somebody opened in a browser."""
        if b"_oob" in (request.args or {}):
            return self.invitation(request)
        return self._document

    def invitation(self, request: Request) -> Answer:
        """`/invitation`: a page for people, JSON for programs, by what they accept."""
        return self._html if _wants_html(request) else self._json

    def openapi(self, request: Request) -> Answer:
        """`/openapi.json`: what programs are told about the commands."""
        return self._openapi

    def invitation_url(self, request: Request) -> Answer:
        """`/invitationOOB`: the invitation's URL as text."""
        return self._url


_VARIES = ((b"Vary", b"Accept"),)


def _wants_html(request: Request) -> bool:
    """Whether a browser asks: it names HTML before anything JSON."""
    accept = (request.getHeader(b"accept") or b"").lower()
    html, json = accept.find(b"text/html"), accept.find(b"json")
    return html >= 0 and (json < 0 or html < json)

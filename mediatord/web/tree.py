"""The resource tree of the public listener (contract section 3)."""

from __future__ import annotations

from twisted.web.resource import IResource, Resource
from twisted.web.server import Request

from mediatord.web.posting import half_by_label
from mediatord.web.resources import (
    NOT_FOUND,
    PREFLIGHT_ANSWER,
    Front,
    Leaf,
    MessagePath,
    Page,
    PublicPath,
    SocketPath,
    finish,
    wants_upgrade,
)
from mediatord.web.vitals import Health, MetricsPath, Ready


class Root(Leaf):
    """`/`: the DID document by GET, either half by POST, a socket by upgrade, and the parent of everything else."""

    isLeaf = False
    methods = (b"GET", b"HEAD", b"POST", b"OPTIONS")

    def __init__(self, front: Front) -> None:
        super().__init__(front)
        pages = front.pages
        well_known = _Folder()
        well_known.putChild(b"did.json", Page(front, pages.did_document))
        children: dict[bytes, IResource] = {
            b"didcomm": MessagePath(front),
            b"ws": SocketPath(front),
            b"public": PublicPath(front),
            b"did": Page(front, pages.did),
            b"invitation": Page(front, pages.invitation),
            b"invitationOOB": Page(front, pages.invitation_url),
            b"openapi.json": Page(front, pages.openapi),
            b"health": Health(front),
            b"ready": Ready(front),
            b"metrics": MetricsPath(front),
            b".well-known": well_known,
            # Where the document of a did:web with a path is, behind a proxy that takes the path off.
            b"did.json": Page(front, pages.did_document),
        }
        for name, child in children.items():
            self.putChild(name, child)

    def getChild(self, path: bytes, request: Request) -> IResource:
        """The root itself, or nothing."""
        return self if path == b"" and not request.postpath else _Nothing()

    def get(self, request: Request) -> int | bytes:
        """The DID document, or a socket."""
        if wants_upgrade(request):
            return self.upgrade(request)
        return finish(request, self._front.pages.root(request))

    def post(self, request: Request) -> int | bytes:
        """A command, or an envelope by its label."""
        return self.take(request, half_by_label(request.getHeader(b"content-type") or b""))


class _Nothing(Resource):
    isLeaf = True

    def render(self, request: Request) -> int | bytes:
        """404, in the form that programs read; a page may ask for it too."""
        return finish(request, PREFLIGHT_ANSWER if request.method == b"OPTIONS" else NOT_FOUND["decentrl"])


class _Folder(Resource):
    def getChild(self, path: bytes, request: Request) -> IResource:
        """Nothing but what was put here."""
        return _Nothing()

    def render(self, request: Request) -> int | bytes:
        """A folder has no page."""
        return _Nothing().render(request)

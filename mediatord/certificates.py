"""The certificate of an `ssl:` listener, which may be another one while the daemon runs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from OpenSSL import SSL, crypto
from twisted.internet.endpoints import serverFromString
from twisted.internet.interfaces import IOpenSSLContextFactory
from twisted.internet.protocol import Factory
from zope.interface import implementer

from mediatord.endpoint_strings import PROXIED, take_apart
from mediatord.listener_layers import TLSFactory

# Of TLS 1.2: only suites with forward secrecy and authenticated encryption. Those of TLS 1.3 are all of that kind.
CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20:DHE+AESGCM:DHE+CHACHA20:!aNULL:!PSK"

FILES = ("privateKey", "certKey", "extraCertChain", "dhParameters")


def named_files(endpoint: str) -> dict[str, Path]:
    """The files that an `ssl:` endpoint names, by the names in :data:`FILES`."""
    _, given, named = take_apart(endpoint.removeprefix(PROXIED))
    # Without names the port comes first, then key and certificate.
    found = dict(zip(FILES[:2], given[1:], strict=False)) | named
    return {name: Path(found[name]) for name in FILES if name in found}


@implementer(IOpenSSLContextFactory)
class Certificate:
    """
    Stands in for the reactor where the endpoint begins to listen, and says which certificate each connection gets.

    Certificates that follow the first one in its file are shown as well, as every other server does with what ACME
    clients call `fullchain.pem`; Twisted by itself leaves them out, unless `extraCertChain` names a file for them.

    :param endpoint: a Twisted endpoint string that begins with `ssl:`, perhaps after `haproxy:`.
    :param reactor: listens.
    :raise Exception: of whichever kind Twisted and OpenSSL like; the files cannot be used.
    :ivar name: interface and port of the listener, `*:443` for all interfaces.
    :ivar expiry: when the first of the certificates ends that are shown to clients.
    """

    def __init__(self, endpoint: str, reactor: Any) -> None:
        self._endpoint = endpoint
        self._reactor = reactor
        self.name = ""
        self.expiry: datetime
        self._options: Any
        self.read()

    def read(self) -> bool:
        """
        Read the files; connections that are open go on with what they have.

        :return: whether there is another certificate than before.
        :raise Exception: as above; nothing has changed.
        """
        seen = _Seen()
        serverFromString(seen, self._endpoint).listen(Factory())
        if not seen.options.extraCertChain:
            seen.options.extraCertChain = self._following(seen.options.certificate)
        # What OpenSSL does not take is to be known now, not when somebody connects.
        seen.options.getContext().set_cipher_list(CIPHERS)
        shown = [one.to_cryptography() for one in (seen.options.certificate, *(seen.options.extraCertChain or ()))]
        before = getattr(self, "_shown", None)
        self.name, self._options, self._shown = seen.name, seen.options, shown
        self.expiry = min(one.not_valid_after_utc for one in shown)
        return shown != before

    def _following(self, first: crypto.X509) -> list[crypto.X509]:
        """
        What comes after it in its file.

        :raise ValueError: the file begins with another one by now.
        """
        files = named_files(self._endpoint)
        path = files.get("certKey") or files.get("privateKey")
        found = [] if path is None else x509.load_pem_x509_certificates(path.read_bytes())
        if found and found[0] != first.to_cryptography():
            raise ValueError("changed while it was read")
        return [crypto.X509.from_cryptography(one) for one in found[1:]]

    def getContext(self) -> SSL.Context:  # noqa: N802  Twisted's name
        """Called for every connection."""
        context: SSL.Context = self._options.getContext()
        return context

    def listenSSL(  # noqa: N802  Twisted's name
        self,
        port: int,
        factory: Any,
        contextFactory: Any,  # noqa: N803  Twisted's name
        backlog: int = 50,
        interface: str = "",
    ) -> Any:
        """Called by the endpoint, which has read the files once more."""
        factory = TLSFactory(self, factory, self._reactor)
        return self._reactor.listenTCP(port, factory, backlog=backlog, interface=interface)


class _Seen:
    """What an endpoint would listen with."""

    name = ""
    options: Any = None

    def listenSSL(  # noqa: N802  Twisted's name
        self,
        port: int,
        factory: Any,
        contextFactory: Any,  # noqa: N803  Twisted's name
        backlog: int = 50,
        interface: str = "",
    ) -> None:
        """Called by the endpoint."""
        self.name = f"{interface or '*'}:{port}"
        self.options = contextFactory

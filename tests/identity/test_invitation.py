"""The out-of-band invitation in its forms (reference 7.4)."""

from __future__ import annotations

import re
import uuid
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from urllib.parse import parse_qs, urlsplit

import pytest
import segno

from mediatord.identity.invitation import (
    V1Invitation,
    build_invitation,
    build_invitation_url,
    build_short_invitation_url,
    build_wallet_url,
    make_v1_invitation,
    render_invitation_page,
    render_qr_svg,
    render_qr_terminal,
)
from mediatord.protocol import encoding

DID = "did:peer:2.Ez6LSc1YK7J47otkPx5smthWsH492pKyRthNs7XYiXo1GCnpR"
URL = "https://m.example"


class PageParser(HTMLParser):
    """Tags with their attributes, and the text outside the style."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.style = ""
        self._in_style = False
        self.feed(body.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.style += data
        else:
            self.text += data


def test_message() -> None:
    """The message is the one that wallets and onboarding scripts expect."""
    message = build_invitation(URL, DID)
    assert uuid.UUID(message.pop("id"))
    assert message == {
        "type": "https://didcomm.org/out-of-band/2.0/invitation",
        "from": DID,
        "body": {"goal_code": "request-mediate", "goal": "RequestMediate", "accept": ["didcomm/v2"]},
    }


def test_id_is_stable() -> None:
    """The id is the same after a restart and a key rotation, and differs for another mediator."""
    id_ = build_invitation(URL, DID)["id"]
    assert id_ == build_invitation(URL, DID + "x")["id"] == str(uuid.uuid5(uuid.NAMESPACE_URL, URL))
    assert id_ != build_invitation(URL + "/x", DID)["id"]


def test_short_url() -> None:
    """The short URL names the invitation by its id."""
    parts = urlsplit(build_short_invitation_url(URL))
    assert f"{parts.scheme}://{parts.netloc}{parts.path}" == "https://m.example/oob"
    assert parse_qs(parts.query, strict_parsing=True) == {"_oobid": [build_invitation(URL, DID)["id"]]}


def test_qr_code_is_small() -> None:
    """The code of a usual host can be scanned from a screen at one metre: at most 41 modules a side."""
    for host in ("mediator.example.com", "mediator.some-department.example-organisation.example.org:8443"):
        code = segno.make_qr(build_short_invitation_url(f"https://{host}"), error="l")
        assert code.symbol_size(border=0)[0] <= 41


def test_url() -> None:
    """The URL has the message as base64url without padding."""
    parts = urlsplit(build_invitation_url(URL, DID))
    assert f"{parts.scheme}://{parts.netloc}{parts.path}" == "https://m.example/invitation"
    (encoded,) = parse_qs(parts.query, strict_parsing=True)["_oob"]
    assert "=" not in encoded
    assert encoding.loads_object(encoding.decode_base64url(encoded)) == build_invitation(URL, DID)


def test_wallet_url() -> None:
    """The same message with the scheme of wallets, without a host."""
    there, ours = urlsplit(build_wallet_url(URL, DID)), urlsplit(build_invitation_url(URL, DID))
    assert (there.scheme, there.netloc, there.path, there.fragment) == ("didcomm", "", "", "")
    assert there.query == ours.query


def modules_of_svg(svg: str, size: int) -> list[list[bool]]:
    """The dark modules that the path of a QR code draws: strokes of width 1, at half heights."""
    grid = [[False] * size for _ in range(size)]
    path = re.findall(r'stroke="#000" d="([^"]+)"', svg)[0]
    x = y = 0.0
    for command, first, second in re.findall(r"([Mmh])(-?[\d.]+)(?: (-?[\d.]+))?", path):
        if command == "h":
            for column in range(int(x), int(x) + int(first)):
                grid[int(y)][column] = True
            x += int(first)
        elif command == "M":
            x, y = float(first), float(second)
        else:
            x, y = x + float(first), y + float(second)
    return grid


def test_svg_is_code_of_url() -> None:
    """The drawing has exactly the modules of the URL's QR code, in black on white, with a quiet zone of 4 modules."""
    url = build_short_invitation_url(URL)
    svg = render_qr_svg(url)
    code = segno.make_qr(url, error="l")
    size = int(code.symbol_size(border=4)[0])
    assert f'viewBox="0 0 {size} {size}"' in svg
    assert f'fill="#fff" d="M0 0h{size}v{size}h-{size}z"' in svg
    assert modules_of_svg(svg, size) == [[bool(module) for module in row] for row in code.matrix_iter(border=4)]


def test_terminal() -> None:
    """In the terminal two modules share a character, and light ones are drawn."""
    url = build_short_invitation_url(URL)
    rows = render_qr_terminal(url).splitlines()
    matrix = list(segno.make_qr(url, error="l").matrix_iter(border=4))
    assert len(rows) == (len(matrix) + 1) // 2
    for number, row in enumerate(rows):
        upper = matrix[2 * number]
        assert [character in " ▄" for character in row] == [bool(module) for module in upper]


def test_page_content() -> None:
    """The page has the QR code, the invitation as button, link and text, and the DID."""
    body = render_invitation_page(URL, DID).body
    page = PageParser(body)
    short_url = build_short_invitation_url(URL)
    assert render_qr_svg(short_url).encode() in body
    assert [attributes["href"] for tag, attributes in page.tags if tag == "a"] == [
        build_wallet_url(URL, DID),
        short_url,
    ]
    assert short_url in page.text
    assert build_invitation_url(URL, DID) in page.text
    assert DID in page.text
    assert "mediator" in page.text
    assert "m.example" in page.text
    assert "$" not in page.text


def test_v1_urls() -> None:
    """They contain the message, or lead to it; they depend on nothing that a key rotation changes."""
    v1 = make_v1_invitation(URL, b"\1" * 32, "A label")
    assert v1.short_url == "https://m.example/invitation/v1"
    for url, parameter in ((v1.url, "oob"), (v1.connection_url, "c_i"), (v1.app_url, "oob")):
        (encoded,) = parse_qs(urlsplit(url).query, strict_parsing=True)[parameter]
        message = encoding.loads_object(encoding.decode_base64url(encoded))
        assert (message["@id"], message["label"]) == (v1.message["@id"], "A label")
        assert (message == v1.message) == (parameter == "oob")
    assert urlsplit(v1.url).path == urlsplit(v1.connection_url).path == "/invitation/v1"
    assert urlsplit(v1.app_url).scheme == "didcomm"
    other = make_v1_invitation(URL, b"\2" * 32, "A label")
    assert (other.message["@id"], other.message == v1.message) == (v1.message["@id"], False)


def test_page_with_v1() -> None:
    """The invitation of DIDComm v1 is beside that of v2: code, button, both links, and the one for older wallets."""
    v1 = make_v1_invitation(URL, b"\1" * 32, '"><script>')
    body = render_invitation_page(URL, DID, v1).body
    page = PageParser(body)
    assert render_qr_svg(v1.short_url).encode() in body
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    short_url = build_short_invitation_url(URL)
    assert links == [build_wallet_url(URL, DID), short_url, v1.app_url, v1.connection_url]
    assert v1.url in page.text and v1.short_url in page.text
    assert "script" not in {tag for tag, _ in page.tags}
    names = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(names) == len(set(names))
    assert "$" not in page.text and b"<!--" not in body


def test_page_without_v1() -> None:
    """Nothing on the page speaks of DIDComm v1."""
    body = render_invitation_page(URL, DID).body
    assert b"v1" not in body and b"Aries" not in body and b"<!--" not in body


@pytest.mark.parametrize("v1", [None, make_v1_invitation(URL, b"\1" * 32, "label")], ids=["v2", "both"])
def test_page_is_self_contained(v1: V1Invitation | None) -> None:
    """No script, image, font, inline style or other resource."""
    page = PageParser(render_invitation_page(URL, DID, v1).body)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "link", "iframe", "object", "form", "base"})
    names = {name for _, attributes in page.tags for name in attributes}
    assert "style" not in names
    assert not {name for name in names if name.startswith("on") or name == "src"}
    assert "url(" not in page.style
    assert "@import" not in page.style


def test_security_policy() -> None:
    """The policy forbids everything but the one style element, which it names by its hash."""
    page = render_invitation_page(URL, DID)
    style = PageParser(page.body).style
    digest = b64encode(sha256(style.encode()).digest()).decode()
    policy = dict(part.strip().partition(" ")[::2] for part in page.security_policy.split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["style-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in page.security_policy


def test_page_adapts_to_device() -> None:
    """It fits small screens and follows the colour scheme of the device."""
    page = PageParser(render_invitation_page(URL, DID).body)
    viewport = [attributes["content"] for _, attributes in page.tags if attributes.get("name") == "viewport"]
    assert viewport == ["width=device-width, initial-scale=1"]
    assert "prefers-color-scheme: dark" in page.style
    assert "overflow-wrap: anywhere" in page.style


def test_page_escapes_configuration() -> None:
    """Values of the configuration cannot become markup."""
    body = render_invitation_page('https://m.example/"><script>', "did:x:<b>&").body
    assert {"script", "b"}.isdisjoint(tag for tag, _ in PageParser(body).tags)

"""
The short way for what nearly all traffic is: an anoncrypt to one of our X25519 keys with one forward in it.

What these mean is decided by :mod:`~mediatord.protocol.didcomm.jwe`, :mod:`~mediatord.protocol.didcomm.envelope`,
:mod:`~mediatord.protocol.didcomm.message` and :mod:`~mediatord.protocol.didcomm.forward`: the long way. Whatever is
unusual in any respect, or wrong, is left to them; what is read here, they read in just the same way.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from secrets import token_bytes
from typing import Any, Literal, NamedTuple

import orjson
import pybase64
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap

from mediatord.errors import MediatorError
from mediatord.protocol.didcomm.agreement import Exchange, prepared
from mediatord.protocol.didcomm.content import CIPHERS, Enc, Opening
from mediatord.protocol.didcomm.forward import FORWARD, MAX_NEXT, Opaque, is_payload, read_payload
from mediatord.protocol.didcomm.jwe import MAX_PROTECTED
from mediatord.protocol.didcomm.kdf import ANONCRYPT, apv_of, kek, other_info
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.protocol.didcomm.message import MAX_ID, read_time
from mediatord.protocol.json_source import MAX_MEMBERS
from mediatord.protocol.jsontext import (
    MAX_VALUES,
    b64url_decode,
    b64url_decode_ascii,
    b64url_encode,
    loads_unique,
    refuse_excess,
)

_MAX_NAMES = 1024
_CIPHERTEXT = b'"ciphertext":'
# Stands for the ciphertext, which is not worth parsing. Nobody knows it, so what has this value is what was replaced.
_STAND_IN = secrets.token_hex(16)
_STAND_IN_BYTES = _STAND_IN.encode()
# The same for the whole payload.
_PLACEHOLDER = secrets.token_hex(16)
_PLACEHOLDER_JSON = orjson.dumps(_PLACEHOLDER)
# Members of a JWE for one recipient. Where there are so many, and each is read, there are no others.
_GENERAL, _FLATTENED = 5, 6

# What the payload looks like where it is the usual envelope: an object with objects in it, and some in these. One
# object at a time and nothing twice, so that the time it takes is proportional to the length, whatever is there.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OBJECT = rb"\{(?:[^\"{}]++|%b)*+\}" % _STRING
for _ in range(4):
    _OBJECT = rb"\{(?:[^\"{}]++|%b|%b)*+\}" % (_STRING, _OBJECT)
_JSON_MEMBER = re.compile(rb'"json"[ \t\n\r]*+:[ \t\n\r]*+(%b)' % _OBJECT, re.DOTALL).match

# Bytes of a plaintext from which on it is worth the while to leave the ciphertext in it alone as well.
_LONG = 4096
_X = 32
_WRAPPING = 8
_ANY = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
# By the number of bytes modulo 3: what unpadded base64url may end with, and what makes it a multiple of four.
_LAST = (_ANY, "AQgw", "AEIMQUYcgkosw048")
_FILL = ("", "AA", "A")

# What JSON of another shape makes of the code here, and what does not open.
_UNUSUAL = (ValueError, TypeError, LookupError, AttributeError, InvalidUnwrap, MediatorError)


class UsualForward(NamedTuple):
    """
    What a forward says that nobody claims or is proven to have sent.

    :param next: `body.next`.
    :param payload: to be stored, and the form it came in.
    :param id: of the message; `thread` is what an answer would refer to.
    :param expires_time: seconds since the epoch, if it has any.
    :param kid: our key that it was opened with, as its sender wrote it.
    """

    next: str
    payload: bytes
    form: Literal["json", "base64"]
    id: str
    thread: str
    expires_time: float | None
    kid: str

    def __repr__(self) -> str:
        """Nothing of the content."""
        return f"UsualForward(next={self.next!r}, form={self.form!r})"


class UsualForwards:
    """
    Reads usual forwards to us.

    :param keys_for: our private keys that a kid may denote, the likeliest first; as long as it gives the very same
        object for a kid, that must not change.
    """

    def __init__(self, keys_for: Callable[[str], Sequence[PrivateKey]]) -> None:
        self._keys_for = keys_for
        self._own: dict[str, _OwnKey] = {}

    def read(self, raw: bytes) -> UsualForward | None:
        """None for everything else; never raises. No key is used unless the form is the usual one."""
        try:
            return self._read(raw)
        except _UNUSUAL:
            return None

    def forget(self) -> None:
        """Hold on to no key, as when some are retired."""
        self._own.clear()

    def _read(self, raw: bytes) -> UsualForward | None:
        start = raw.index(b'"', raw.index(_CIPHERTEXT) + len(_CIPHERTEXT)) + 1
        end = raw.index(b'"', start)
        rest = b"".join((raw[:start], _STAND_IN_BYTES, raw[end:]))
        if len(rest) > MAX_VALUES:
            return None
        jwe = orjson.loads(rest)
        protected = jwe["protected"]
        if jwe["ciphertext"] != _STAND_IN or len(protected) > MAX_PROTECTED:
            return None
        (entry,) = jwe["recipients"] if len(jwe) == _GENERAL else (jwe,)
        if entry is jwe and len(jwe) != _FLATTENED:
            return None
        text = b64url_decode(protected)
        shared, more = orjson.loads(text), entry["header"]
        if orjson.dumps(shared) != text:
            shared = loads_unique(text)
        header = shared | more
        own = self._own_key(header["kid"])
        if own is None or len(header) != len(shared) + len(more):
            return None
        info = own.info_for(header)
        if info is None:
            return None
        layout = _LAYOUTS[header["enc"]]
        small = layout.decoded(header["epk"]["x"], jwe["tag"], jwe["iv"], entry["encrypted_key"])
        data = b64url_decode_ascii(raw[start:end])
        wrapping, wrapped = kek(own.exchange(small[:_X]), info), small[layout.key_at]
        try:
            cek = aes_key_unwrap(wrapping, wrapped)
        except InvalidUnwrap:  # as much work as a wrong tag, see envelope.unwrapped
            cek = token_bytes(len(wrapped) - _WRAPPING)
        plaintext = layout.opening(cek, small[layout.iv_at], data, small[layout.tag_at], protected.encode())
        return _forward(plaintext, own.kid)

    def _own_key(self, kid: str) -> _OwnKey | None:
        keys, own = self._keys_for(kid), self._own.get(kid)
        if own is not None and own.keys is keys:
            return own
        if own is not None or len(self._own) >= _MAX_NAMES:
            self._own.clear()
        agreeing = [key for key in keys if key.curve == "X25519"]
        if len(agreeing) != 1:
            return None
        own = self._own[kid] = _OwnKey(kid, keys, prepared(agreeing[0].secret))
        return own


class _OwnKey:
    """A name of one of our X25519 keys, and what is the same in all envelopes to it."""

    __slots__ = ("_apv", "_info", "_info_without_apv", "exchange", "keys", "kid")

    def __init__(self, kid: str, keys: Sequence[PrivateKey], exchange: Exchange) -> None:
        digest = apv_of((kid,))
        self.kid = kid
        self.keys = keys
        self.exchange = exchange
        self._apv = b64url_encode(digest)
        self._info = other_info(ANONCRYPT, b"", digest)
        self._info_without_apv = other_info(ANONCRYPT, b"", b"")

    def info_for(self, header: Mapping[str, Any]) -> bytes | None:
        """What goes into the key derivation of an anoncrypt on our curve; None for any other header."""
        epk = header["epk"]
        if header["alg"] != ANONCRYPT or epk["crv"] != "X25519" or epk["kty"] != "OKP":
            return None
        if "crit" in header or "zip" in header or "apu" in header:
            return None
        if "apv" not in header:
            return self._info_without_apv
        return self._info if header["apv"] == self._apv else None


class _Layout(NamedTuple):
    """
    The small parts of an envelope as base64url without padding: how long each is and what it may end with; what goes
    behind each, so that they decode together; where each is then, behind the ephemeral key.
    """

    lengths: tuple[int, ...]
    ends: tuple[str, ...]
    fills: tuple[str, ...]
    tag_at: slice
    iv_at: slice
    key_at: slice
    opening: Opening

    @classmethod
    def of(cls, enc: Enc) -> _Layout:
        cipher = CIPHERS[enc]
        sizes = (_X, cipher.tag_size, cipher.iv_size, cipher.key_size + _WRAPPING)
        places, start = [], 0
        for size in sizes:
            places.append(slice(start, start + size))
            start += -(-size // 3) * 3
        _, tag_at, iv_at, key_at = places
        lengths = tuple(-(-size * 4 // 3) for size in sizes)
        ends, fills = tuple(_LAST[size % 3] for size in sizes), tuple(_FILL[size % 3] for size in sizes)
        return cls(lengths, ends, fills, tag_at, iv_at, key_at, cipher.opening)

    def decoded(self, x: str, tag: str, iv: str, wrapped: str) -> bytes:
        """:raise ValueError: one of them has another length, or is not strict base64url without padding."""
        x_end, tag_end, iv_end, wrapped_end = self.ends
        x_fill, tag_fill, iv_fill, wrapped_fill = self.fills
        text = "".join((x, x_fill, tag, tag_fill, iv, iv_fill, wrapped, wrapped_fill))
        if (
            (len(x), len(tag), len(iv), len(wrapped)) != self.lengths
            or x[-1] not in x_end
            or tag[-1] not in tag_end
            or iv[-1] not in iv_end
            or wrapped[-1] not in wrapped_end
            or "+" in text
            or "/" in text
        ):
            raise ValueError("another spelling")
        return pybase64.b64decode(text, b"-_", validate=True)


_LAYOUTS: dict[Any, _Layout] = {enc: _Layout.of(enc) for enc in CIPHERS}


def _without_ciphertext(plaintext: bytes) -> tuple[bytes, bytes]:
    """
    A message that carries a long envelope with :data:`_STAND_IN` in place of the ciphertext, and the ciphertext: that
    it is one string without escapes is easier to see than to read. The message as it is where there is none.
    """
    try:
        start = plaintext.index(b'"', plaintext.index(_CIPHERTEXT) + len(_CIPHERTEXT)) + 1
        end = plaintext.index(b'"', start)
        ciphertext = plaintext[start:end]
        if ciphertext and len(orjson.dumps(ciphertext.decode("ascii"))) == end - start + 2:
            return b"".join((plaintext[:start], _STAND_IN_BYTES, plaintext[end:])), ciphertext
    except ValueError:
        pass
    return plaintext, b""


class _Guess(NamedTuple):
    """What may be the payload: its text, what that is, and the ciphertext that there is a stand-in for in both."""

    text: bytes
    envelope: Any
    ciphertext: bytes


def _taken_apart(plaintext: bytes) -> tuple[bytes, _Guess | None]:
    """
    A message with a placeholder for its `json`, and that payload. Where it ends is a guess: most often at the last
    braces, or after as many objects as an envelope has. It is right if what is around it is a message, with the
    placeholder in its place.

    :raise ValueError: there is no such guess, or there are more values than are read.
    """
    text, ciphertext = (plaintext, b"") if len(plaintext) < _LONG else _without_ciphertext(plaintext)
    if len(text) > MAX_VALUES:
        refuse_excess(text)
    at = text.find(b'"json"')
    if at < 0:
        return plaintext, None
    start, end = text.find(b"{", at), text.rfind(b"}}}", at) + 1
    try:
        envelope = orjson.loads(text[start:end])
    except orjson.JSONDecodeError:
        start, end = _object_at(text, at)
        envelope = orjson.loads(text[start:end])
    around = b"".join((text[:start], _PLACEHOLDER_JSON, text[end:]))
    if around.count(b",") >= MAX_MEMBERS:
        raise ValueError("many members")
    return around, _Guess(text[start:end], envelope, ciphertext)


def _object_at(text: bytes, at: int) -> tuple[int, int]:
    """:raise ValueError: the value of the member there has not the form of an envelope."""
    found = _JSON_MEMBER(text, at)
    if found is None:
        raise ValueError("another layout")
    return found.span(1)


def _payload(data: Any, guess: _Guess | None) -> Opaque:
    """
    The payload of an attachment, if the guess was right.

    :raise ValueError: it was not, or this is no envelope; likewise LookupError and TypeError.
    """
    if guess is None:
        return read_payload(data, None, True)
    text, envelope, ciphertext = guess
    if data["json"] != _PLACEHOLDER or type(envelope) is not dict or not is_payload(envelope, text, True):
        raise ValueError("another layout")
    if not ciphertext:
        return text, "json"
    if envelope["ciphertext"] != _STAND_IN:
        raise ValueError("another ciphertext")
    return text.replace(_STAND_IN_BYTES, ciphertext), "json"


def _forward(plaintext: bytes, kid: str) -> UsualForward | None:
    around, guess = _taken_apart(plaintext)
    message = orjson.loads(around)
    has = message.get
    id_, next_, attachments = message["id"], message["body"]["next"], message["attachments"]
    to, thread, expires_time = has("to"), has("thid"), has("expires_time")
    if message["type"] != FORWARD or "ciphertext" in message or "payload" in message:
        return None
    if has("from") is not None or has("delay_milli"):
        return None
    if type(id_) is not str or not 0 < len(id_) <= MAX_ID or type(next_) is not str or not 0 < len(next_) <= MAX_NEXT:
        return None
    if to is not None and (type(to) is not list or len(to) != 1 or type(to[0]) is not str):
        return None
    if type(attachments) is not list:
        return None
    (attachment,) = attachments
    payload, form = _payload(attachment["data"], guess)
    if thread is None or type(thread) is not str or not 0 < len(thread) <= MAX_ID:
        thread = id_
    if expires_time is not None:
        expires_time = read_time(expires_time)
    return UsualForward(next_, payload, form, id_, thread, expires_time, kid)

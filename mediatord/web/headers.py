"""Headers that every answer has."""

from __future__ import annotations

# Browser wallets preflight every message, because of its Content-Type (reference 3.1).
CORS = [
    ("Access-Control-Allow-Origin", "*"),
    ("Access-Control-Allow-Methods", "GET, POST, OPTIONS"),
    ("Access-Control-Allow-Headers", "Content-Type"),
    ("Access-Control-Max-Age", "86400"),
    ("Access-Control-Expose-Headers", "Retry-After"),
]

SERVER = b"mediatord"

"""Headers that every answer has."""

from __future__ import annotations

# Every answer may be read by a page of any origin; what only a preflight asks for is told only there. Browser wallets
# preflight every message, because of its Content-Type (reference 3.1).
CORS = [("Access-Control-Allow-Origin", "*")]
PREFLIGHT = [
    ("Access-Control-Allow-Methods", "GET, POST, OPTIONS"),
    ("Access-Control-Allow-Headers", "Content-Type"),
    ("Access-Control-Max-Age", "86400"),
]
EXPOSE_RETRY_AFTER = ("Access-Control-Expose-Headers", "Retry-After")

SERVER = b"mediatord"

"""What operators ask: whether the daemon is well, whether messages get through, and the metrics."""

from __future__ import annotations

from contextlib import suppress

from twisted.web.server import Request

from mediatord.errors import ShuttingDown, StoreUnavailable
from mediatord.metrics import CONTENT_TYPE
from mediatord.protocol import jsontext
from mediatord.web.peers import is_within
from mediatord.web.posting import JSON, retry
from mediatord.web.render import Answer
from mediatord.web.resources import Leaf, addresses, finish


class Health(Leaf):
    """`/health`: whether the store answers, and nothing else is in the way."""

    def get(self, request: Request) -> int | bytes:
        """200, or 503 with what is wrong."""

        async def asked() -> Answer:
            try:
                await self._front.ping_store()
            except (StoreUnavailable, ShuttingDown) as error:
                self._front.metrics.storage_up(False)
                stopping = isinstance(error, ShuttingDown)
                return _unwell("stopping" if stopping else self._front.store_trouble() or "store unavailable")
            self._front.metrics.storage_up(True)
            trouble = self._front.store_trouble() or self._front.trouble()
            return _unwell(trouble) if trouble else Answer(200, b'{"status":"ok"}', JSON)

        return self.later(request, asked(), "didcomm")


class Ready(Leaf):
    """`/ready`: whether a message that comes in by this listener is stored, pushed and acknowledged."""

    def get(self, request: Request) -> int | bytes:
        """200, or 503 with what does not work; both say how long ago it did."""

        async def asked() -> Answer:
            verdict = await self._front.ready()
            age = {} if verdict.age is None else {"age_ms": round(verdict.age * 1000)}
            if verdict.trouble or verdict.cycle is None:
                return _unwell(verdict.trouble, **age)
            body = {"status": "ok", "cycle_ms": round(verdict.cycle * 1000), **age}
            return Answer(200, jsontext.dumps(body), JSON)

        return self.later(request, asked(), "didcomm")


def _unwell(detail: str, **more: int) -> Answer:
    return Answer(503, jsontext.dumps({"status": "error", "detail": detail, **more}), JSON, retry(5))


class MetricsPath(Leaf):
    """`/metrics`: Prometheus text, for those who may see it; with `?ready=1` asking for it asks `/ready` as well."""

    def get(self, request: Request) -> int | bytes:
        """The metrics, or 403: they name recipients."""
        client = self._front.peers.client(*addresses(request))
        if not is_within(client, self._front.metrics_allow()):
            return finish(request, Answer(403, b'{"status":"error","detail":"forbidden"}', JSON))

        async def scraped() -> Answer:
            if b"ready" in request.args:
                await self._front.ready()
            try:
                await self._front.statistics()
            except StoreUnavailable:
                # The store, or only so many queues; whoever is asked for a sign of life tells.
                with suppress(StoreUnavailable, ShuttingDown):
                    await self._front.ping_store()
            try:
                text = await self._front.figures()
            except TimeoutError:
                return Answer(503, b'{"status":"error","detail":"workers do not answer"}', JSON, retry(5))
            # A page in the operator's browser is on an address that may see this; the page itself may not.
            return Answer(200, text, CONTENT_TYPE.encode("ascii"), shared=False)

        return self.later(request, scraped(), "didcomm")

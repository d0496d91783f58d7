"""HTTP connections: refusals below the routes are JSON too, and a connection without a complete request is closed."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from generate.server.errors import ApiError, envelope
from generate.server.wire import dumps

PATIENCE = 60.0  # seconds for the headers of a request, and between the parts of its body


class Connection(H11Protocol):
    """A connection of uvicorn, closed after PATIENCE seconds in which no request arrives and no answer is read."""

    _timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Check after PATIENCE seconds whether a request has arrived, or an answer is still written or read."""
        before, left = self.cycle, self.transport.get_write_buffer_size()

        def look() -> None:
            is_idle = self.cycle is before and (before is None or before.response_complete)
            if (is_idle or self.transport.is_closing()) and self.transport.get_write_buffer_size() in (0, left):
                self.transport.abort()  # closing would wait for a client that reads nothing
            else:
                self._watch()

        self._timer = self.loop.call_later(PATIENCE, look)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that are not HTTP; after the beginning of an answer, only close the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = dumps(envelope(ApiError(400, msg), "openai", ""))
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        events = h11.Response(status_code=400, headers=head, reason=b"Bad Request"), h11.Data(body), h11.EndOfMessage()
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

"""Finished responses, kept for requests that continue them: bounded in number and bytes; the oldest are dropped."""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from generate.server.errors import ApiError

MOST = 256
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Stored:
    """A response: its body, and the conversation up to and with its reply, without instructions."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]
    size: int


class Store:
    """Responses by id, for several threads: requests are parsed beside the event loop."""

    def __init__(self, max_responses: int = MOST, max_bytes: int = MOST_BYTES):
        self._max_responses, self._max_bytes, self._bytes = max_responses, max_bytes, 0
        self._held: OrderedDict[str, Stored] = OrderedDict()
        self._response_of: dict[str, str] = {}  # the id of an output item to that of its response
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, id: str) -> Stored:
        """Return a response; raises ApiError for one that was never stored or has been dropped."""
        with self._lock:
            if id in self._held:
                self._held.move_to_end(id)
                return self._held[id]
        raise self._missing(id)

    def item(self, id: str) -> dict[str, Any] | None:
        """Return an output item of a response that is kept."""
        with self._lock:
            if (response := self._response_of.get(id)) is None:
                return None
            self._held.move_to_end(response)
            return next(item for item in self._held[response].body["output"] if item["id"] == id)

    def _missing(self, id: str) -> ApiError:
        return ApiError(
            404, f"response {id!r:.80} is not found; the last {self._max_responses} are kept while the server runs"
        )

    def put(self, id: str, stored: Stored) -> None:
        """Keep a response, and drop the oldest beyond the bounds."""
        with self._lock:
            self._held[id] = stored
            self._bytes += stored.size
            self._response_of |= dict.fromkeys(_items(stored), id)
            while self._held and (len(self._held) > self._max_responses or self._bytes > self._max_bytes):
                self._forget(self._held.popitem(last=False)[1])

    def delete(self, id: str) -> None:
        """Drop a response; raises ApiError if there is none."""
        with self._lock:
            if (stored := self._held.pop(id, None)) is None:
                raise self._missing(id)
            self._forget(stored)

    def _forget(self, stored: Stored) -> None:
        self._bytes -= stored.size
        for item in _items(stored):
            self._response_of.pop(item, None)


def _items(stored: Stored) -> list[str]:
    return [item["id"] for item in stored.body.get("output", ())]

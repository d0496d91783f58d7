"""What a client sent and what it was answered: recorded while the client runs, replayed without it.

A recording is a JSON object: `client` (name and version), `model` ("scripted" or "demo") and `exchanges`, in the order
in which the requests came. Requests are stored without paths, names and ids of the machine, and with long texts cut;
answers are stored with every id and time replaced, and with counts of prompt tokens left out where a text may be cut.
"""

import json
import re
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripted import WRITTEN

FOLDER = Path(__file__).parent / "recorded"
HEADERS = ("accept", "content-type", "anthropic-version", "anthropic-beta", "openai-beta")
LONGEST, KEPT = 80, 40  # characters of a text that is stored whole, and of the beginning of one that is cut
PATHS = re.compile(r"(?<![\w.:/-])/(?:tmp|root|home|work|var|usr|private|Users)(?:/[\w.+@~-]+)*")
MACHINE = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{32,}\b")
IDS = re.compile(r"\b([a-z]+[-_])[0-9a-f]{24}\b")
VOLATILE = {"created", "created_at", "completed_at", "modified_at", "bimetal", "build_info"}
COUNTS = {"prompt_tokens", "input_tokens", "total_tokens", "prompt_eval_count", "prompt_n", "prompt_per_second"}


@dataclass
class Exchange:
    """One request and its answer, as they crossed the connection."""

    method: str
    path: str
    headers: dict[str, str]
    sent: bytes = b""
    status: int = 0
    media: str = ""
    answered: bytes = b""
    written: list[str] = field(default_factory=list)


class Recorder:
    """An ASGI application around another, which keeps each exchange in `exchanges`."""

    def __init__(self, app: Any):
        self.app, self.exchanges = app, list[Exchange]()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        query = scope["query_string"].decode()
        exchange = Exchange(scope["method"], scope["path"] + (f"?{query}" if query else ""), headers)
        self.exchanges.append(exchange)

        async def read() -> Any:
            message = await receive()
            exchange.sent += message.get("body", b"")
            return message

        async def write(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                exchange.media = media_of({k.decode(): v.decode("latin-1") for k, v in message["headers"]})
            exchange.answered += message.get("body", b"")
            await send(message)

        WRITTEN.set(exchange.written)
        await self.app(scope, read, write)

    def save(self, name: str, client: str, model: str) -> Path:
        """Write the recording `name`, of a client's name and version, and return its path."""
        FOLDER.mkdir(exist_ok=True)
        path, ids = FOLDER / f"{name}.json", Ids()
        stored = [_stored(exchange, ids, model) for exchange in self.exchanges]
        lines = ",\n  ".join(json.dumps(each, ensure_ascii=False) for each in stored)
        head = json.dumps({"client": client, "model": model})[1:-1]
        path.write_text(f'{{{head}, "exchanges": [\n  {lines}\n]}}\n', encoding="utf-8")
        return path


def _stored(exchange: Exchange, ids: "Ids", model: str) -> dict[str, Any]:
    sent = ids.known(scrub(json.loads(exchange.sent))) if exchange.sent else None
    return {
        "method": exchange.method,
        "path": ids.known(scrub(exchange.path)),
        "headers": {name: exchange.headers[name] for name in HEADERS if name in exchange.headers},
        "sent": sent,
        "written": exchange.written,
        "status": exchange.status,
        "media": exchange.media,
        "answered": shown(parsed(exchange.media, exchange.answered), sent, ids, model),
    }


def shown(answer: Any, sent: Any, ids: "Ids", model: str) -> Any:
    """What a recording keeps of an answer to the stored request `sent`; tools that it repeats are not kept twice."""
    tools = sent.get("tools") if isinstance(sent, dict) else None
    return _without(scrub(masked(answer, ids, model == "scripted")), tools)


def _without(value: Any, tools: Any) -> Any:
    if isinstance(value, list):
        return [_without(item, tools) for item in value]
    if not isinstance(value, dict):
        return value
    same = bool(tools) and value.get("tools") == tools
    kept = {name: _without(item, tools) for name, item in value.items()}
    return kept | ({"tools": "as sent"} if same else {})


def media_of(headers: Mapping[str, str]) -> str:
    """The media type of an answer, without parameters."""
    return headers.get("content-type", "").partition(";")[0]


def scrub(value: Any) -> Any:
    """Replace what belongs to a machine or a user in the texts of a JSON value, and cut the long ones."""
    if isinstance(value, dict):
        return {key: scrub(item) for key, item in value.items()}
    if isinstance(value, list):
        return [scrub(item) for item in value]
    if not isinstance(value, str):
        return value
    text = MACHINE.sub(lambda found: re.sub("[0-9a-f]", "0", found[0]), PATHS.sub("/path", value))
    return text if len(text) <= LONGEST else text[:KEPT] + "…"


def parsed(media: str, body: bytes) -> Any:
    """The JSON values of an answer: one, or a list of them (with the names of events, where events have names)."""
    text = body.decode()
    if media == "application/json":
        return json.loads(text) if text else None
    if media == "application/x-ndjson":
        return [json.loads(line) for line in text.splitlines()]
    if media != "text/event-stream":
        return text
    return list(_events(text))


def _events(text: str) -> Iterable[Any]:
    for block in text.split("\n\n"):
        lines = [line.partition(": ") for line in block.splitlines() if not line.startswith(":")]
        fields = {name: value for name, _, value in lines}
        if data := fields.get("data"):
            value = data if data == "[DONE]" else json.loads(data)
            yield [fields["event"], value] if "event" in fields else value


class Ids:
    """Numbers the ids that a server makes, in the order in which a client meets them."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}

    def number(self, text: str) -> str:
        """Replace each id of a text by its prefix and number, and number the new ones."""
        return IDS.sub(lambda m: self._numbers.setdefault(m[0], f"{m[1]}#{len(self._numbers) + 1}"), text)

    def known(self, value: Any) -> Any:
        """Replace the ids in a JSON value that are numbered already."""
        return self._replaced(value, self._numbers)

    def restored(self, value: Any) -> Any:
        """Put ids back in the place of their numbers."""
        return self._replaced(value, {number: id for id, number in self._numbers.items()})

    def _replaced(self, value: Any, names: Mapping[str, str]) -> Any:
        text = json.dumps(value)
        for old in sorted(names, key=len, reverse=True):
            text = text.replace(json.dumps(old)[1:-1], json.dumps(names[old])[1:-1])
        return json.loads(text)


def masked(value: Any, ids: Ids, counts: bool, key: str = "") -> Any:
    """Replace ids and times in an answer, and with `counts` the counts of prompt tokens."""
    if isinstance(value, dict):
        return {name: masked(item, ids, counts, name) for name, item in value.items()}
    if isinstance(value, list):
        return [masked(item, ids, counts) for item in value]
    if isinstance(value, str):
        return "*" if key in VOLATILE else ids.number(value)
    is_hidden = (key in VOLATILE or (counts and key in COUNTS)) and isinstance(value, int | float)
    return 0 if is_hidden or key.endswith(("_duration", "_ms", "per_second")) else value

"""`python -m generate batch IN OUT`: answer the requests of a JSON Lines file, or resume a stopped run.

Requests are numbered in the order of IN. The id of an answer contains the number of its request and a checksum of its
line. Answers are written as they are finished, in any order; a later run finds the remaining requests by these ids.
"""

import argparse
import asyncio
import fcntl
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from tqdm.auto import tqdm

from common.amounts import counted
from common.errors import BimetalError, UsageError, shown
from common.files import naming
from generate.llm import AHEAD, LLM
from generate.server import chat, completions
from generate.server.errors import ApiError, envelope, failure, refusal
from generate.server.facts import Facts, facts_of
from generate.server.fields import OBJECT, TEXT, Fields
from generate.server.json_object import MOST_BYTES, parse_json
from generate.server.task import events, finished_replies, prepare
from generate.server.wire import dumps, new_id

QUEUE = 1 << 16  # replies that may wait: a request may ask for 128, and AHEAD times as many are read as run
DIALECTS = {"/v1/chat/completions": chat.parse, "/v1/completions": completions.parse}
DEFAULT_NAME = re.compile(r"line-[1-9]\d{0,14}")
ID = re.compile(r"batch_req_(\d{1,15})_([0-9a-f]{8})")


@dataclass(frozen=True)
class Request:
    """A line of IN.

    number  counts from 0, without empty lines
    line    in the file, from 1
    """

    number: int
    line: int
    data: bytes

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.data)

    @property
    def id(self) -> str:
        return f"batch_req_{self.number}_{self.checksum:08x}"

    @property
    def default_name(self) -> str:
        """Name the answer to a request that has no `custom_id`."""
        return f"line-{self.line}"

    def custom_id(self) -> str | None:
        """Return the name that the line gives; None where it gives none, or cannot be read."""
        try:
            name = self.values().get("custom_id")
        except ApiError:
            return None
        return name if isinstance(name, str) else None

    def values(self) -> dict[str, Any]:
        """Parse the line; raises ApiError."""
        try:
            if len(self.data) > MOST_BYTES:
                raise ApiError(413, f"the line has more than {MOST_BYTES} bytes, which is the most supported")
            return parse_json(self.data)
        except ApiError as error:
            raise replace(error, message=error.message.replace("the body", "it"), code="invalid_json_line") from None


@dataclass
class Answered:
    """Requests to which OUT has answers.

    below   all requests with a lower number have one
    beyond  numbers of the other requests that have one
    count   of answers
    errors  how many of the answers are errors
    sum     of the checksums of all these requests
    """

    below: int = 0
    beyond: set[int] = field(default_factory=set)
    count: int = 0
    errors: int = 0
    sum: int = 0

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.beyond

    def add(self, number: int, checksum: int, is_error: bool) -> None:
        self.beyond.add(number)
        self.count += 1
        self.errors += is_error
        self.sum += checksum
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1


def run(args: argparse.Namespace) -> int:
    """Answer the requests without an answer in OUT; raises BimetalError at the end if OUT has errors."""
    requests, out = Path(args.requests), Path(args.answers)
    with naming(out):
        return _run(args, requests, out)


def _run(args: argparse.Namespace, requests: Path, out: Path) -> int:
    with opened(requests, out) as file:
        answered = read_answers(file, out)
        total = check_requests(requests, out, answered)
        if answered.count < total:
            load = replace(args.load, queue=QUEUE)
            with (
                LLM(args.model, load, window=args.window) as llm,
                tqdm(total=total, initial=answered.count, desc="requests", disable=None) as bar,
            ):
                batch = Batch(llm, facts_of(llm, args.model), args.options, file, answered, bar)
                asyncio.run(batch.run(requests))
    if answered.errors:
        raise BimetalError(f"{answered.errors} of {total} answers in {out} are errors")
    print(f"{out}: {counted(total, 'answer')}", file=sys.stderr)
    return 0


def opened(requests: Path, out: Path) -> IO[bytes]:
    """Open OUT for reading and appending, for this process alone; raises UsageError, BimetalError and OSError."""
    if not requests.is_file() and requests.exists():
        raise UsageError(f"{requests} is not a regular file, and the requests are read twice; give a file")
    requests.open("rb").close()
    if out.exists() and (not out.is_file() or out.samefile(requests)):
        what = "has the requests" if out.is_file() else "is not a regular file"
        raise UsageError(f"{out} {what}; give OUT the name of a file for the answers")
    file = out.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BimetalError(f"{out} is in use: another process writes answers to it") from None
    return file


def read_answers(file: IO[bytes], out: Path) -> Answered:
    """Read the answers in OUT, and drop an incomplete last line of a killed run; raises UsageError."""
    answered, end = Answered(), 0
    file.seek(0)
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            file.truncate(end)
            break
        end += len(line)
        try:
            answer = json.loads(line)
            found = ID.fullmatch(answer["id"])
            is_error = answer["error"] is not None or answer["response"]["status_code"] != 200
        except (ValueError, KeyError, TypeError, RecursionError):
            found = None
        if found is None or int(found[1]) in answered:
            raise UsageError(
                f"line {number} of {out} is no answer of a batch, or answers a request again; give another OUT"
            )
        answered.add(int(found[1]), int(found[2], 16), is_error)
    return answered


def check_requests(requests: Path, out: Path, answered: Answered) -> int:
    """Count the requests; raises UsageError if OUT has answers to others, or would have two of one name."""
    total = known = checksums = 0
    named: dict[str, int] = {}  # lines by the custom_id that they give
    for request in read_requests(requests):
        total += 1
        name = request.custom_id() if b'"custom_id"' in request.data else None
        if name is not None and (first := named.setdefault(name, request.line)) != request.line:
            raise UsageError(
                f"lines {first} and {request.line} of {requests} have one custom_id, {shown(name)}, by which their "
                "answers are named; give each another"
            )
        if request.number in answered:
            known += 1
            checksums += request.checksum
    if (known, checksums) != (answered.count, answered.sum):
        raise UsageError(f"{out} has answers to other requests than those in {requests}; give another OUT")
    for request in read_requests(requests) if any(DEFAULT_NAME.fullmatch(name) for name in named) else ():
        if (name := request.default_name) in named and request.custom_id() is None:
            raise UsageError(
                f"line {named[name]} of {requests} has the custom_id {name!r}, by which the answer to line "
                f"{request.line} is named, because that line has none; give another custom_id"
            )
    return total


def read_requests(path: Path) -> Iterator[Request]:
    """Yield the lines that are not empty; a line of more than MOST_BYTES bytes is cut after one byte more."""
    number = line = 0
    with path.open("rb") as file:
        while data := file.readline(MOST_BYTES + 1):
            line += 1
            rest = data
            while len(rest) > MOST_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MOST_BYTES + 1)
            if data := data.strip():
                yield Request(number, line, data)
                number += 1


class Batch:
    """Answers requests with one model.

    options  of replies to requests that leave them out
    """

    def __init__(
        self, llm: LLM, facts: Facts, options: Mapping[str, Any], file: IO[bytes], answered: Answered, bar: tqdm
    ):
        self.llm, self.facts, self.file, self.answered, self.bar = llm, facts, file, answered, bar
        self.options = {"on_prefill": lambda read, total: None} | dict(options)  # no bar beside that of requests

    async def run(self, requests: Path) -> None:
        """Answer the remaining requests; a few more requests are in memory than replies run at once."""
        most, running = AHEAD * self.llm.parallel, set[asyncio.Task[None]]()
        try:
            for request in read_requests(requests):
                if request.number in self.answered:
                    continue
                running.add(asyncio.create_task(self._answer(request)))
                if len(running) >= most:
                    running = await _one_done(running)
            while running:
                running = await _one_done(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, request: Request) -> None:
        """Write the answer to a request."""
        named = request.default_name
        response = refused = None
        try:
            values = request.values()
            named = values["custom_id"] if isinstance(values.get("custom_id"), str) else named
            url, fields = parse(values)
        except ApiError as error:
            refused = {
                "code": error.code or "invalid_request",
                "message": f"line {request.line} of the requests: {error}",
            }
        else:
            try:
                status, body = 200, await self._reply(url, fields)
            except ApiError as error:
                status, body = error.status, envelope(error, "openai", "")
            response = {"status_code": status, "request_id": new_id("req_"), "body": body}
        answer = {"id": request.id, "custom_id": named, "response": response, "error": refused}
        self.file.write(dumps(answer) + b"\n")
        self.file.flush()
        is_error = response is None or response["status_code"] != 200
        self.answered.add(request.number, request.checksum, is_error)
        self.bar.update()

    async def _reply(self, url: str, fields: Fields) -> dict[str, Any]:
        """Return the body of the reply to a request; raises ApiError."""
        if fields.flag("stream", False):
            raise fields.refuse("stream", "answers of a batch are written whole")
        parsed = DIALECTS[url](fields, self.facts)
        task = replace(parsed.task, options=self.options | dict(parsed.task.options))
        try:
            prompts = await asyncio.to_thread(prepare, self.llm, self.facts, task)
        except BimetalError as error:
            raise refusal(error) or failure(error) from None
        async with aclosing(events(self.llm, prompts, task)) as found:
            return parsed.whole(await finished_replies(found, len(prompts) * task.n))


async def _one_done(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait until a task is done, and return the others; raises its exception."""
    done, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return left


def parse(values: dict[str, Any]) -> tuple[str, Fields]:
    """Find the endpoint that a line names, and the fields of its body; raises ApiError with OpenAI's code.

    A line without `url` and `body` is a body itself, by its entry `messages` or `prompt`.
    """
    line = Fields(values)
    if "url" not in values and "body" not in values and ("messages" in values or "prompt" in values):
        line.text("custom_id")
        return "/v1/chat/completions" if "messages" in values else "/v1/completions", line
    for key, rule in {"custom_id": TEXT, "method": TEXT, "url": TEXT, "body": OBJECT}.items():
        if not line.has(key):
            words = f"{key} is missing; a request has custom_id, method, url and body, or messages, or prompt"
            raise ApiError(400, words, "missing_required_parameter")
        line.need(key, rule)
    if values["method"] != "POST":
        raise replace(line.refuse("method", "it must be POST"), code="invalid_method")
    if values["url"] not in DIALECTS:
        raise replace(line.refuse("url", f"it must be {' or '.join(DIALECTS)}"), code="invalid_url")
    return values["url"], Fields(values["body"])

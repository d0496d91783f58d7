"""Harmony, the format of gpt-oss's chats: a reply is a series of messages, each with a header that names its channel.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>ANSWER<|return|>

A recipient makes a message a tool call, and may also stand before the channel. Messages of the commentary channel
without a recipient announce what follows, and are part of the answer.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

from common.reply import Parser, Parts, ReplyParser, Tags, call_object, overlap
from common.tools import HARMONY, is_harmony, plain_text, read_call, read_cut_call, schemas
from common.tools import HARMONY_CHANNEL as CHANNEL
from common.tools import HARMONY_MESSAGE as MESSAGE
from common.tools import HARMONY_START as START

END = "<|end|>"
ENDS = (END, "<|call|>", "<|return|>")
ANSWER = f"{START}assistant{CHANNEL}final{MESSAGE}"  # header of the answer, after other messages
CUTS = (*ENDS, START, CHANNEL)  # after which a message does not go on
OPENERS = (START, CHANNEL, MESSAGE, "to=")  # with which a message's header can begin
MOST_HEADER = 512  # characters
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.:/-]+)")
NO_TOOLS = ("all", "assistant", "user")  # recipients
BETWEEN = "\n\n"  # messages of a reply whose texts are joined
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # other than low, medium and high


class HarmonyParser:
    """Parser of one reply, with the methods and the promises of `ReplyParser`: the parts do not depend on the pieces.

    Text outside of messages is part of the answer. Calls are parsed if there are tools; a malformed call is text,
    including its header, but on the channel of the reasoning a call of another tool is reasoning; where the tokens of
    the reply were used up, a call ends with it.
    """

    def __init__(self, prompt: str, tools: Sequence[Any] | None = None, begun: str = ""):
        """prompt: text that ends with the first header, or its beginning; the others: as ReplyParser's."""
        self._schemas = schemas(tools or ())
        self._state: Callable[[Parts, bool], bool] = self._header
        self._held = ""  # read, but not shown yet
        self._raw = self._name = ""  # header of the message, and the tool that it calls
        self._scan = 0  # position up to which the end of a call has been searched
        self._between = ""  # what precedes the text of the message
        self._shown = set[str]()  # the kinds of the messages so far
        self._reasons, self._is_cut = True, False
        self.calls = 0
        _, start, opened = prompt.rpartition(START)
        self.push((opened.removeprefix("assistant") if start else "") + begun, Parts())
        if begun:
            self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """Test whether what was read so far ends in the reasoning, or in headers before anything else."""
        return self._reasons

    @property
    def takes_calls(self) -> bool:
        return bool(self._schemas)

    def push(self, text: str, parts: Parts) -> None:
        """Read more of the reply, and add the parts that can no longer change to `parts`."""
        self._held += text
        while self._state(parts, False):
            pass

    def finish(self, parts: Parts, is_cut: bool = False) -> None:
        """Add the held text to `parts`, after the end of the reply; `is_cut` as in ReplyParser."""
        self._is_cut = is_cut
        while self._state(parts, True):
            pass

    # The states; as in ReplyParser each returns whether the next one can continue.

    def _header(self, parts: Parts, is_last: bool) -> bool:
        begun, at = self._held.lstrip(), self._held.find(MESSAGE)
        is_header = any(tag.startswith(begun[: len(tag)]) for tag in OPENERS)
        if not is_header or (at < 0 and len(begun) > MOST_HEADER):
            self._begin("text")
            return True
        if at >= 0:
            self._raw, self._held = self._held[: at + len(MESSAGE)], self._held[at + len(MESSAGE) :]
            self._read_header(parts)
            return True
        if is_last and begun and not (self._is_cut or any(tag in begun for tag in OPENERS)):
            self._begin("text")
            return True
        self._held = "" if is_last else self._held
        return False

    def _read_header(self, parts: Parts) -> None:
        recipient = RECIPIENT.search(self._raw)
        channel = self._raw.partition(CHANNEL)[2].lstrip()
        self._name = recipient[1] if recipient and recipient[1] not in NO_TOOLS else ""
        if self._schemas and (self._name in self._schemas or (self._name and not channel.startswith("analysis"))):
            self._state, self._scan, self._reasons = self._call, 0, False
            return
        self._begin("reasoning" if channel.startswith("analysis") else "text")
        if self._name and not self._reasons:  # nobody takes the call
            self._add(parts, self._raw)

    def _begin(self, kind: str) -> None:
        """Begin a message whose text is of that kind: "text" or "reasoning"."""
        self._state, self._reasons = self._body, kind == "reasoning"
        self._between = BETWEEN if kind in self._shown else ""

    def _body(self, parts: Parts, is_last: bool) -> bool:
        """Show a message up to its end, or to the header of the next one."""
        found = [(at, tag) for tag in CUTS if (at := self._held.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._add(parts, self._held[:at])
            self._held = self._held[at + len(tag) if tag in ENDS else at :]
            self._state = self._header
            return True
        begun = 0 if is_last and not self._is_cut else max(overlap(self._held, tag) for tag in CUTS)
        until = len(self._held) - begun
        self._add(parts, self._held[:until])
        self._held = "" if is_last else self._held[until:]
        return False

    def _call(self, parts: Parts, is_last: bool) -> bool:
        found = [(at, tag) for tag in ENDS if (at := self._held.find(tag, self._scan)) >= 0]
        if not found and not is_last:
            self._scan = max(self._scan, len(self._held) - max(map(len, ENDS)) + 1)
            return False
        at, tag = min(found) if found else (len(self._held), "")
        function, body = None, f"{self._name}{MESSAGE}{self._held[:at]}"
        is_cut = self._is_cut and not found
        try:
            if self._held[:at].strip() or not is_cut:
                function = read_call(HARMONY, body, self._schemas)
            if function is None and found:  # the tag belongs to a string
                self._scan = at + len(tag)
                return True
        except ValueError:
            pass  # no call, but text
        if is_cut and function is None:
            function = read_cut_call(HARMONY, body, self._schemas)
        if function is not None:
            parts.tool_calls.append(call_object(self.calls, function))
            self.calls += 1
        elif not is_cut:
            self._begin("text")
            self._add(parts, self._raw + self._held[: at + len(tag)])
        self._held, self._state = self._held[at + len(tag) :], self._header
        return True

    def _add(self, parts: Parts, text: str) -> None:
        """Add to the text of the message."""
        if not text:
            return
        text, self._between = self._between + text, ""
        if self._reasons:
            parts.reasoning += text
        else:
            parts.text += text
        self._shown.add("reasoning" if self._reasons else "text")


def reply_parser(template: str, prompt: str, tools: Sequence[Any] | None = None, begun: str = "") -> Parser:
    """Return a parser of one reply in the format of a chat template; arguments as of ReplyParser."""
    if is_harmony(template):
        return HarmonyParser(prompt, tools, begun)
    return ReplyParser(template, prompt, tools, begun)


def reasoning_tags(constrained: bool, calls: bool) -> Tags:
    """Return the tags of reasoning, for guides.

    constrained  a guide chooses how the reply goes on after the reasoning
    calls        the reply may go on with a call; else reasoning that is closed early is followed by the answer
    """
    early = END if constrained else f"{END}{START}assistant" if calls else f"{END}{ANSWER}"
    return Tags(f"{CHANNEL}analysis{MESSAGE}", END, early, begins=True)


class Ids(Protocol):
    """The part of a tokenizer that finds control tokens."""

    end_ids: frozenset[int]

    def token_to_id(self, token: str) -> int | None: ...


def turn_ends(template: str, tokenizer: Ids) -> frozenset[int]:
    """Return the tokens that end a reply in a prompt of a chat template; harmony's are followed by another message."""
    named = (tokenizer.token_to_id(tag) for tag in ENDS if is_harmony(template))
    return tokenizer.end_ids | {id for id in named if id is not None}


def arranged(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation as gpt-oss's template reads it: one call in a message, and its result after it.

    The template shows only the first call of a message, takes a result for one of the latest call, and refuses
    reasoning beside a text that precedes a call; such a text is appended to the reasoning.
    """
    out, at = list[dict[str, Any]](), 0
    while at < len(messages):
        message, at = dict(messages[at]), at + 1
        calls = message.pop("tool_calls", None) or []
        if not calls:
            out.append(message)
            continue
        results = list(takewhile(lambda each: each["role"] == "tool", messages[at:]))
        at += len(results)
        if message.get("thinking") and message.get("content"):
            message |= {"thinking": f"{message['thinking']}{BETWEEN}{plain_text(message['content'])}", "content": ""}
        for number, call in enumerate(calls):
            out.append(message | {"tool_calls": [call]})
            message = {"role": "assistant", "content": ""}
            out += [dict(each) for each in _results(results, call, number == len(calls) - 1)]
    return out


def _results(results: list[Mapping[str, Any]], call: Mapping[str, Any], is_last: bool) -> list[Mapping[str, Any]]:
    """Take the results of a call out of `results`: those with its id, else the next one; the last call takes all."""
    own = [each for each in results if each.get("tool_call_id") == call.get("id")] if call.get("id") else []
    taken = results[:] if is_last else own or results[:1]
    results[:] = [each for each in results if all(each is not other for other in taken)]
    return taken


def described(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as gpt-oss's template reads them: as functions, each with a description."""
    return [{"type": "function", "function": {"description": "", **tool.get("function", tool)}} for tool in tools]

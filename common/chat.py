"""Turn conversations into prompts by a model's own Jinja chat template, as transformers' `apply_chat_template` does.

What a message holds never becomes a control token. A prompt is rendered twice, the second time with other punctuation
in everything that the conversation brings; a control token counts where both texts have it, so that each of its
characters came from the template. Other occurrences are encoded as plain text.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from common.errors import BimetalError, UsageError, shown
from common.harmony import arranged, described
from common.rules import ITEMS
from common.template import TemplateStoppedError, run
from common.tools import is_harmony, lacks_tools, schemas, spelled_out

Message = Mapping[str, Any]

ROLE = re.compile(r"\w[\w .-]*")
# Tags that templates look for in messages, by role. No turn begins or ends with one.
_READ = {"assistant": "</?think>", "user": "</?tool_response>", "tool": "</?tool_response>"}
_STAND_INS = "~^*!;?="  # the first that no control token has replaces their punctuation


class Vocabulary(Protocol):
    """The part of a tokenizer that a chat prompt needs."""

    bos_id: int | None
    eos_id: int | None
    chat_templates: dict[str, str]

    @property
    def control_tokens(self) -> Sequence[str]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def check_fits(self, text: str, context: int) -> None: ...

    def encode_plain(self, text: str) -> list[int]: ...

    def encode_and_find(self, text: str) -> tuple[list[int], list[tuple[int, int, int]]]: ...


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation: its text, its token ids, and the source of the template that wrote it."""

    text: str
    tokens: list[int]
    template: str


def chat_prompt(
    vocabulary: Vocabulary,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    think: bool | None = None,
    parse_special: bool = False,
    context: int | None = None,
    **template: Any,
) -> ChatPrompt:
    """Return the prompt of `messages`, up to where the assistant's reply begins.

    think          whether the assistant reasons before it answers; None: the template's default
    parse_special  control tokens that are spelled out in the conversation count as such
    context        maximum tokens: a text that is certainly longer is refused before it is encoded; None: no maximum
    template       further variables of the template; add_generation_prompt=False ends after the last message
    """
    source = _source(vocabulary, tools)
    special = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
    more: dict[str, Any] = {name: vocabulary.decode([id]) for name, id in special.items() if id is not None}
    more |= template | ({} if think is None else _thinking(source, think))
    inputs = _inputs(source, messages, tools, **more)
    text = run(source, inputs)
    if context is not None:
        vocabulary.check_fits(text, context)
    if parse_special:
        return ChatPrompt(text, vocabulary.encode(text, add_special_tokens=False), source)
    ids, control = vocabulary.encode_and_find(text)
    own = control and _templates_own(vocabulary, source, inputs, text, control)
    # A tokenizer's normalizer can make a control token of other characters, which no template writes.
    own = [(start, end, id) for start, end, id in own if vocabulary.decode([id]) in text[start:end]]
    if len(own) == len(control):
        return ChatPrompt(text, ids, source)
    tokens, at = list[int](), 0
    for start, end, token in own:
        tokens += [*vocabulary.encode_plain(text[at:start]), token]
        at = end
    return ChatPrompt(text, tokens + vocabulary.encode_plain(text[at:]), source)


def _templates_own(
    vocabulary: Vocabulary,
    source: str,
    inputs: Mapping[str, Any],
    text: str,
    control: list[tuple[int, int, int]],
) -> list[tuple[int, int, int]]:
    """Select the `control` tokens of `text` that the template wrote: start, end and id of each.

    Raises BimetalError if a template takes the punctuation of messages as its own syntax, so that control tokens of
    the template cannot be distinguished from text of the messages.
    """
    marks = {c for token in vocabulary.control_tokens for c in token if not (c.isalnum() or c.isspace() or c == "_")}
    other = next(c for c in _STAND_INS if c not in marks)
    plain = _replacing(marks, other)
    for read in ({}, _READ):  # the second time with tags that the template may look for left as they are
        masked = _masked(inputs, lambda role, value, read=read: _mask(value, plain, read.get(role)))  # type: ignore[misc]
        if masked == inputs:
            return control
        try:
            shadow = run(source, masked)
        except TemplateStoppedError:
            raise
        except BimetalError:
            continue
        if plain(shadow) == plain(text):
            return [(start, end, id) for start, end, id in control if shadow[start:end] == text[start:end]]
        if [id for *_, id in vocabulary.encode_and_find(shadow)[1]] == [id for *_, id in control]:
            return control
    raise BimetalError(
        "the chat template takes punctuation of the messages as its own syntax, so that control tokens in them cannot "
        "be told from its own; parse_special takes them all as control tokens"
    )


def _masked(inputs: Mapping[str, Any], mask: Callable[[str, str], str]) -> dict[str, Any]:
    """Return `inputs` with `mask(role, text)` in place of each text, except roles and the tokenizer's own tokens."""

    def walk(role: str, value: Any) -> Any:
        if isinstance(value, str):
            return mask(role, value)
        if isinstance(value, Mapping):
            return {walk(role, key): walk(role, item) for key, item in value.items()}
        return [walk(role, item) for item in value] if isinstance(value, list | tuple) else value

    own = ("messages", "bos_token", "eos_token")
    out = {key: value if key in own else walk("", value) for key, value in inputs.items()}
    return out | {
        "messages": [
            {key: value if key == "role" else walk(message["role"], value) for key, value in message.items()}
            for message in inputs["messages"]
        ]
    }


def _mask(text: str, plain: Callable[[str], str], read: str | None) -> str:
    if read is None:
        return plain(text)
    parts = re.split(f"({read})", text)
    return "".join(part if at % 2 else plain(part) for at, part in enumerate(parts))


def _replacing(marks: Collection[str], other: str) -> Callable[[str], str]:
    """Return a function that replaces each of the characters `marks` by the ASCII character `other`."""
    text_table = str.maketrans(dict.fromkeys(marks, other))
    if not all(mark.isascii() for mark in marks):
        return lambda text: text.translate(text_table)
    table = bytes(ord(other) if chr(byte) in marks else byte for byte in range(256))  # 20 times as fast
    return lambda text: text.encode(errors="surrogatepass").translate(table).decode(errors="surrogatepass")


def _source(vocabulary: Vocabulary, tools: Any) -> str:
    """Return the template's source; some models have one of their own for conversations with tools."""
    source = vocabulary.chat_templates.get("default")
    if tools:
        schemas(tools)  # refuses what is no tool
        source = vocabulary.chat_templates.get("tool_use", source)
    if source is None:
        raise BimetalError("the model has no chat template; give one, or send plain text")
    return source


def _thinking(template: str, think: bool) -> dict[str, bool]:
    """Return the variable that turns thinking on or off in a chat template."""
    if "enable_thinking" in template:
        return {"enable_thinking": think}
    if is_harmony(template):
        if think:
            return {}
        raise UsageError("the model always reasons; reasoning_effort, a variable of its chat template, may be low")
    if think:
        raise UsageError("the model's chat template cannot turn thinking on; leave think out")
    if "<think>" in template:
        raise UsageError("the model's chat template cannot turn thinking off; leave think out")
    return {}


def render(
    template: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **more: Any,
) -> str:
    """Return the text of `messages`.

    template  Jinja source
    messages  {"role", "content", ...} as in OpenAI's chat API; content is text, text parts or, for an assistant, None
    tools     {"type": "function", "function": {...}} each
    more      further variables of the template: bos_token, eos_token, enable_thinking, ...

    Raises BimetalError with the template's own words when it refuses the messages.
    """
    return run(template, _inputs(template, messages, tools, add_generation_prompt, **more))


def _inputs(
    template: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool = True,
    **more: Any,
) -> dict[str, Any]:
    messages = ITEMS.accept("messages", messages)
    chat = [_prepare(message, at, template) for at, message in enumerate(messages)]
    if tools and lacks_tools(template):
        chat, tools = spelled_out(chat, tools), None
    if is_harmony(template):
        chat, tools = arranged(chat), described(tools or ())
    given = {"messages": chat, "tools": list(tools) if tools else None, "documents": None}
    return given | {"add_generation_prompt": add_generation_prompt} | more


def _prepare(message: Message, index: int, template: str) -> dict[str, Any]:
    """Return a copy of a message in the form that templates expect; APIs and templates disagree on four points."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BimetalError(f"message {index} is {shown(message)}, not an object with a role")
    if not ROLE.fullmatch(message["role"]):  # templates print it among their control tokens
        raise BimetalError(f"message {index} has the role {shown(message['role'])}, which is no word")
    if message["role"] == "user" and "content" not in message:
        raise BimetalError(f"message {index} has no content; its keys are {shown(list(message))}")
    prepared = {**message, "content": _content(message.get("content"), index, template)}
    # Reasoning has had three names.
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning} | prepared | {"reasoning_content": reasoning}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise BimetalError(f"message {index} has tool_calls {shown(calls)}, not a list")
        prepared["tool_calls"] = [_parse_arguments(call, index) for call in calls]
    return prepared


def _content(content: Any, at: int, template: str) -> Any:
    if isinstance(content, str):
        return content
    if content is None:
        # Most templates would print "None"; those that look for none branch on it.
        return None if re.search(r"\bcontent\b\W*\s+is\s+(not\s+)?none", template) else ""
    if not isinstance(content, Sequence):
        raise BimetalError(f"message {at} has content of type {type(content).__name__}, not text")
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
            raise BimetalError(f"message {at} has a part of type {kind!r}; only text is supported")
    return list(content) if _reads_parts(template) else "\n".join(part["text"] for part in content)


def _parse_arguments(call: Any, index: int) -> Any:
    """Parse a tool call's arguments: APIs send JSON text, and templates need an object."""
    if not isinstance(call, Mapping):
        raise BimetalError(f"message {index} has a tool call {shown(call)}, not an object")
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call  # what a model wrote need not be JSON; a template may still print it
    if not isinstance(arguments, dict):
        return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


@lru_cache
def _reads_parts(template: str) -> bool:
    """Test whether a template prints the text of a list of parts, rather than the list or nothing."""
    probe = {"role": "user", "content": [{"type": "text", "text": "a probe"}]}
    given = {"messages": [probe], "tools": None, "documents": None, "add_generation_prompt": False}
    try:
        text = run(template, given)
    except BimetalError:  # it expects text
        return False
    return "a probe" in text and "'type'" not in text

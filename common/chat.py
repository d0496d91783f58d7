"""Conversations to prompts: a model's own Jinja chat template, rendered as transformers' `apply_chat_template` does."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from common.errors import BimetalError

Message = Mapping[str, Any]


def render(
    template: str | None,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> str:
    """The prompt for `messages`, to be encoded without adding bos: templates write it themselves.

    template  Jinja source; None (the model has none) is an error, because a guess would be answered with nonsense
    messages  {"role", "content", ...} as in OpenAI's chat API; content is text, text parts or, for an assistant, None
    tools     {"type": "function", "function": {...}} each
    kwargs    what else the template may read: bos_token, eos_token, enable_thinking, ...

    Raises BimetalError with the template's own words when it refuses the messages.
    """
    if template is None:
        raise BimetalError("the model has no chat template; give one, or send plain text")
    compiled = _compile(template)
    chat = [_prepare(message, at, template) for at, message in enumerate(messages)]
    try:
        return compiled.render(
            messages=chat,
            tools=list(tools) if tools else None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )
    except TemplateError as error:
        raise BimetalError(f"the chat template refuses this conversation: {error}") from None
    except Exception as error:  # a template is a program that came with the model; it can fail in any way
        raise BimetalError(f"the chat template fails on this conversation: {type(error).__name__}: {error}") from None


def _prepare(message: Message, at: int, template: str) -> dict[str, Any]:
    """A copy of a message in the form that templates expect; APIs and templates disagree on four points."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BimetalError(f"message {at} is {message!r:.80}, not an object with a role")
    prepared = {**message, "content": _content(message.get("content"), at, template)}
    # Reasoning has had three names.
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning} | prepared | {"reasoning_content": reasoning}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise BimetalError(f"message {at} has tool_calls {calls!r:.80}, not a list")
        prepared["tool_calls"] = [_parse_arguments(call, at) for call in calls]
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


def _parse_arguments(call: Any, at: int) -> Any:
    """APIs send a tool call's arguments as JSON text, templates walk through them as an object."""
    if not isinstance(call, Mapping):
        raise BimetalError(f"message {at} has a tool call {call!r:.80}, not an object")
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call  # what a model wrote need not be JSON; a template may still print it
    if not isinstance(arguments, dict):
        return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


@lru_cache
def _reads_parts(template: str) -> bool:
    """Whether a template prints the text of a list of parts, rather than the list or nothing."""
    probe = [{"role": "user", "content": [{"type": "text", "text": "a probe"}]}]
    try:
        text = _compile(template).render(messages=probe, tools=None, documents=None, add_generation_prompt=False)
    except Exception:  # it expects text
        return False
    return "a probe" in text and "'type'" not in text


class _Generation(Extension):
    """{% generation %} marks what the model wrote, for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Namespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _namespace(*args: Any, **values: Any) -> _Namespace:
    attributes = dict(*args, **values)
    for name in attributes:
        _check_name(name)
    return _Namespace(attributes)


def _check_name(name: str) -> None:
    if name.startswith("_"):  # such names reach into Python, past the sandbox
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _dict(*args: Any, **values: Any) -> dict:
    return dict(*args, **values)  # a function, because the type itself has attributes


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(namespace=_namespace, dict=_dict)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise BimetalError(f"the chat template has an error in line {error.lineno}: {error.message}") from None
    except (RecursionError, SyntaxError, MemoryError) as error:  # limits of Python's own parser
        raise BimetalError(f"the chat template is nested too deeply: {error}") from None

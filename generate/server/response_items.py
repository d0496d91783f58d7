"""The input items and tools of Responses, as messages and functions of a conversation."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from generate.server.conversation import (
    MOST_MESSAGES,
    MOST_TOOLS,
    PARTS,
    ROLES,
    Message,
    function_tool,
    text_of,
)
from generate.server.custom_tools import arguments_of, parameters_of
from generate.server.errors import ApiError
from generate.server.fields import OBJECT, TEXT, TEXT_OR_LIST, Fields
from generate.server.store import Store

DEFAULT = "functions"  # the namespace of functions that have none, which Codex writes out
SEARCH = "tool_search"  # a function by which a model asks the client for further ones
HOLDERS = ("additional_tools", "tool_search_output")  # items of a conversation that hold functions for what follows
HOSTED = {"file_search", "code_interpreter", "image_generation", "mcp", "programmatic_tool_calling"}
OUTPUT = {"input_text": "text", "output_text": "text", "text": "text"}
REASONING = {"summary_text": "text", "reasoning_text": "text", "text": "text"}
RUN = {  # calls of tools of OpenAI's API that the client runs, and the entry of their arguments
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
}
READ = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "agent_message",
    "additional_tools",
    "tool_search_call",
    "tool_search_output",
    *(f"{call}{end}" for call in RUN for end in ("", "_output")),
)
# Items of a conversation that hold nothing a model could read here: calls of tools that no request has here, what only
# OpenAI's servers can decrypt, and a client's own notes.
LEFT_OUT = {
    *("configuration_update", "ghost_snapshot", "other"),
    *("compaction", "compaction_summary", "context_compaction"),
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    *("computer_call", "computer_call_output"),
}


@dataclass(frozen=True)
class Tool:
    """A function as the client named it.

    namespace  the group that it was declared in
    kind       of the item that calls it: "function_call", "tool_search_call", or "custom_tool_call" if it takes free
               text, which the model sends as an argument `input`
    """

    name: str
    namespace: str | None = None
    kind: str = "function_call"


def tools_of(fields: Fields) -> tuple[list[dict[str, Any]], dict[str, Tool]]:
    """Return the functions in the form of Chat Completions, and what each of their names stands for.

    They are those of the request, and those that items of its input hold; of two with one name the later counts.
    Functions of a namespace are called NAMESPACE.NAME; kinds that only OpenAI's own servers run are left out.
    """
    found: dict[str, dict[str, Any]] = {}
    named: dict[str, Tool] = {}
    given = fields.values.get("input")
    items = [] if isinstance(given, str) else fields.objects("input", MOST_MESSAGES, TEXT_OR_LIST)
    for holder in (fields, *(item for item in items if item.text("type", "message") in HOLDERS)):
        for tool, namespace in _listed(holder):
            if (read := _tool(tool, namespace)) is not None:
                flat = _flat(read.name, read.namespace)
                found[flat], named[flat] = _function(tool, flat, read.kind), read
    return list(found.values()), named


def _listed(holder: Fields) -> Iterator[tuple[Fields, str | None]]:
    """Yield the tools that an object lists, each with its namespace."""
    for tool in holder.objects("tools", MOST_TOOLS):
        if tool.need("type", TEXT) != "namespace":
            yield tool, None
            continue
        namespace = tool.need("name", TEXT)
        for inner in tool.objects("tools", MOST_TOOLS):
            yield inner, None if namespace == DEFAULT else namespace


def _tool(tool: Fields, namespace: str | None) -> Tool | None:
    """Return what a tool is to its client; None for one that only OpenAI's servers run."""
    kind = tool.need("type", TEXT)
    if kind in ("function", "custom"):
        return Tool(tool.need("name", TEXT), namespace, "custom_tool_call" if kind == "custom" else "function_call")
    if kind == SEARCH:  # what OpenAI's servers search are functions of the request, all of which the model sees here
        client = tool.choice("execution", "server", "client") == "client"
        return Tool(SEARCH, kind="tool_search_call") if client else None
    if kind in HOSTED or kind.startswith("web_search"):
        return None
    raise tool.refuse("type", "it is not supported; give a tool that the client runs as a function or a custom tool")


def _function(tool: Fields, name: str, kind: str) -> dict[str, Any]:
    values = {**tool.values, "name": name} | ({"parameters": parameters_of(tool)} if kind == "custom_tool_call" else {})
    return function_tool(Fields(values, tool.where), "parameters")


def _flat(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a function of a namespace."""
    return f"{namespace}.{name}" if namespace and namespace != DEFAULT else name


def messages_of(fields: Fields, store: Store) -> list[Message]:
    """Return the conversation that `input` holds: text, or items; none only where it goes on from a response."""
    given = fields.values.get("input")
    if given in (None, []) and not fields.has("previous_response_id"):
        words = "is missing; it must be text or a list" if given is None else "is []; it must have at least one item"
        raise ApiError(400, f"input {words}", param="input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    out: list[Message] = []
    thought = ""
    for item in fields.objects("input", MOST_MESSAGES, TEXT_OR_LIST):
        if item.text("type", "message") == "item_reference":
            item = _referenced(item, store)
        kind = item.text("type", "message")
        if kind == "reasoning":
            thought = _reasoning(item)
            continue
        message = _message(item, kind)
        if message is None:
            continue
        if message["role"] == "assistant":
            if thought:
                message["reasoning_content"] = thought
            if out and out[-1]["role"] == "assistant" and "tool_calls" in message:
                _join(out[-1], message)
                message = out.pop()
        thought = ""
        out.append(message)
    return out


def _referenced(item: Fields, store: Store) -> Fields:
    """Return the output item of an earlier response that is named by its id."""
    found = store.item(item.need("id", TEXT))
    if found is None:
        raise item.refuse("id", "no response that is kept has this item; send the item itself")
    return Fields(found, item.where)


def _join(message: Message, call: Message) -> None:
    """Add a call to the assistant's message that it came after."""
    message["tool_calls"] = [*message.get("tool_calls", []), *call["tool_calls"]]
    if "reasoning_content" in call:
        message.setdefault("reasoning_content", call["reasoning_content"])


def _message(item: Fields, kind: str) -> Message | None:
    """Return the message of one item; None for kinds without content for a model."""
    if kind == "message":
        role = ROLES.get(item.need("role", TEXT))
        if role not in ("system", "user", "assistant"):
            raise item.refuse("role", "it must be system, developer, user or assistant")
        return {"role": role, "content": text_of(item, "content", PARTS) or ""}
    if kind in ("function_call", "custom_tool_call"):
        name = _flat(item.need("name", TEXT), item.text("namespace"))
        return _call(item, name, item.text("arguments", "{}") if kind == "function_call" else arguments_of(item))
    if kind in ("function_call_output", "custom_tool_call_output"):
        return _result(item, text_of(item, "output", OUTPUT) or "")
    if kind in ("tool_search_call", "tool_search_output") and item.text("execution") == "client":
        if kind == "tool_search_call":
            return _call(item, SEARCH, json.dumps(item.take("arguments", OBJECT, {}), ensure_ascii=False))
        names = [_flat(name, namespace) for tool, namespace in _listed(item) if (name := tool.text("name"))]
        return _result(item, json.dumps(names, ensure_ascii=False))
    if kind in RUN:
        arguments = json.dumps(item.take(RUN[kind], OBJECT, {}), ensure_ascii=False)
        return _call(item, kind.removesuffix("_call"), arguments)
    if kind.removesuffix("_output") in RUN:
        output = item.values.get("output") or item.text("status", "")
        return _result(item, output if isinstance(output, str) else json.dumps(output, ensure_ascii=False))
    if kind == "agent_message":
        text = text_of(_plain(item, "content"), "content", OUTPUT)
        return {"role": "user", "content": text} if text else None
    if kind not in LEFT_OUT and kind not in READ:
        raise item.refuse("type", f"supported are {', '.join(READ)}")
    return None


def _call(item: Fields, name: str, arguments: str) -> Message:
    call = {"id": item.text("call_id", ""), "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(item: Fields, content: str) -> Message:
    call = item.text("call_id") or item.text("id", "")  # `id` in the type local_shell_call_output
    return {"role": "tool", "tool_call_id": call, "content": content}


def _plain(item: Fields, key: str) -> Fields:
    """Return the item without those parts of an entry that only OpenAI's servers can decrypt."""
    parts = item.values.get(key)
    if not isinstance(parts, list):
        return item
    kept = [part for part in parts if not isinstance(part, dict) or part.get("type") != "encrypted_content"]
    return Fields({**item.values, key: kept}, item.where)


def _reasoning(item: Fields) -> str:
    """Return the text of a reasoning item: its content, else its summary."""
    for key in ("content", "summary"):
        if text := text_of(item, key, REASONING):
            return text
    return ""


def reply_message(text: str, reasoning: str, calls: Sequence[Any]) -> Message:
    """Return the reply as a message, for the continuation of the conversation."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message

"""The input items and tools of Responses, as messages and functions of a conversation."""

import json
from collections.abc import Sequence
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
from generate.server.errors import ApiError
from generate.server.fields import TEXT, TEXT_OR_LIST, Fields
from generate.server.store import Store

CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
OUTPUT = {"input_text": "text", "output_text": "text", "text": "text"}
REASONING = {"summary_text": "text", "reasoning_text": "text", "text": "text"}
READ = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "agent_message",
)
# Items of a conversation that hold nothing a model could read here: calls of tools that are left out of a request, what
# only OpenAI's servers can decrypt, and a client's own notes.
LEFT_OUT = {
    *("additional_tools", "configuration_update", "ghost_snapshot", "other"),
    *("compaction", "compaction_summary", "context_compaction"),
    *("tool_search_call", "tool_search_output"),
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    *(f"{tool}_call{end}" for tool in ("computer", "local_shell", "shell", "apply_patch") for end in ("", "_output")),
}


@dataclass(frozen=True)
class Tool:
    """A function as the client named it.

    namespace  the group that it was declared in
    custom     whether it takes free text, which the model sends as an argument `input`
    """

    name: str
    namespace: str | None = None
    custom: bool = False


def tools_of(fields: Fields) -> tuple[list[dict[str, Any]], dict[str, Tool]]:
    """Return the functions in the form of Chat Completions, and what each of their names stands for.

    Functions of a namespace are called NAMESPACE.NAME; kinds that only OpenAI's own servers run are left out.
    """
    found: list[dict[str, Any]] = []
    named: dict[str, Tool] = {}

    def add(tool: Fields, namespace: str | None) -> None:
        kind = tool.need("type", TEXT)
        if kind == "namespace" and namespace is None:
            for inner in tool.objects("tools", MOST_TOOLS):
                add(inner, tool.need("name", TEXT))
        elif kind in ("function", "custom"):
            name = tool.need("name", TEXT)
            flat = name if namespace is None else f"{namespace}.{name}"
            custom = kind == "custom"
            values = {**tool.values, "name": flat} | ({"parameters": CUSTOM} if custom else {})
            found.append(function_tool(Fields(values, tool.where), "parameters"))
            named[flat] = Tool(name, namespace, custom)

    for tool in fields.objects("tools", MOST_TOOLS):
        add(tool, None)
    return found, named


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
    """The output item of an earlier response that is named by its id."""
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
    """The message of one item; None for kinds that hold nothing a model could read here."""
    if kind == "message":
        role = ROLES.get(item.need("role", TEXT))
        if role not in ("system", "user", "assistant"):
            raise item.refuse("role", "it must be system, developer, user or assistant")
        return {"role": role, "content": text_of(item, "content", PARTS) or ""}
    if kind in ("function_call", "custom_tool_call"):
        name = item.need("name", TEXT)
        if namespace := item.text("namespace"):
            name = f"{namespace}.{name}"
        arguments = item.text("arguments", "{}") if kind == "function_call" else _input(item)
        call = {"id": item.text("call_id", ""), "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        content = text_of(item, "output", OUTPUT)
        return {"role": "tool", "tool_call_id": item.text("call_id", ""), "content": content or ""}
    if kind == "agent_message":
        text = text_of(_plain(item, "content"), "content", OUTPUT)
        return {"role": "user", "content": text} if text else None
    if kind not in LEFT_OUT:
        raise item.refuse("type", f"supported are {', '.join(READ)}")
    return None


def _plain(item: Fields, key: str) -> Fields:
    """The item without those parts of an entry that only OpenAI's servers can decrypt."""
    parts = item.values.get(key)
    if not isinstance(parts, list):
        return item
    kept = [part for part in parts if not isinstance(part, dict) or part.get("type") != "encrypted_content"]
    return Fields({**item.values, key: kept}, item.where)


def _input(item: Fields) -> str:
    return json.dumps({"input": item.text("input", "")}, ensure_ascii=False)


def _reasoning(item: Fields) -> str:
    """The text of a reasoning item: its content, else its summary."""
    for key in ("content", "summary"):
        if text := text_of(item, key, REASONING):
            return text
    return ""


def reply_message(text: str, reasoning: str, calls: Sequence[Any]) -> Message:
    """The reply as a message of a conversation that goes on."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message

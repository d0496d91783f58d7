"""Convert messages of a request for a chat template: plain texts, and system messages where the template takes them.

Equal conversations give equal prompts, regardless of how a client divides them into parts: a prompt that continues an
earlier one then begins with its tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from common.rules import FLAG
from generate.server.custom_tools import arguments_of, parameters_of
from generate.server.errors import ApiError
from generate.server.facts import Facts
from generate.server.fields import LIST, TEXT, TEXT_OR_LIST, Fields

MOST_MESSAGES = 4096
MOST_PARTS = 4096
MOST_TOOLS = 1024
MOST_CALLS = 1024

Message = dict[str, Any]


def text_of(fields: Fields, key: str, kinds: Mapping[str, str]) -> str | None:
    """Return the text of an entry that is text, null or a list of parts, joined by line breaks.

    kinds  the types of parts that hold text, and the entry that holds it
    """
    value = fields.values.get(key)
    if value is None or isinstance(value, str):
        return value
    texts = []
    for part in fields.objects(key, MOST_PARTS, TEXT_OR_LIST):
        kind = part.text("type", "text")
        if kind not in kinds:
            taken = f"{part.name('type')} is {kind!r:.40}; only text is supported, as {', '.join(kinds)}"
            raise ApiError(400, taken, param=part.name("type"))
        texts.append(part.need(kinds[kind], TEXT))
    return "\n".join(texts)


def arrange(messages: Sequence[Message], facts: Facts) -> list[Message]:
    """Join the first system messages, and put later ones where the template supports them.

    If a template refuses later system messages, their text is appended to the message before: a longer conversation
    begins in the same way. At the front the text would change the prompt from its first token on.
    """
    first = next((at for at, m in enumerate(messages) if m["role"] != "system"), len(messages))
    out: list[Message] = []
    if leading := [m["content"] for m in messages[:first] if m["content"]]:
        out.append({"role": "system", "content": "\n\n".join(leading)})
    for message in messages[first:]:
        if message["role"] != "system" or facts.late_system:
            out.append(message)
        elif out and out[-1]["role"] in ("user", "tool"):
            out[-1] = out[-1] | {"content": f"{out[-1]['content']}\n\n{message['content']}"}
        else:
            out.append({"role": "user", "content": message["content"]})
    return out


def reply_begun(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """Split off the text of the assistant's last message, with which the reply begins; "" without one."""
    last = messages[-1]
    plain = last["role"] == "assistant" and not last.get("tool_calls") and not last.get("reasoning_content")
    return (messages[:-1], last["content"]) if plain and last["content"] and len(messages) > 1 else (messages, "")


def tools_of(fields: Fields, kinds: Collection[str] = ("function", "custom")) -> list[dict[str, Any]]:
    """Return a request's tools as functions in the form of Chat Completions; refuses types other than `kinds`."""
    found = []
    for tool in fields.objects("tools", MOST_TOOLS):
        kind = tool.text("type", "function")
        if kind not in kinds:
            raise tool.refuse("type", f"supported are tools of the type {' and '.join(kinds)}")
        held = tool.object(kind)
        if held is None:
            raise tool.refuse(kind, "it must be an object with a name")
        if kind == "custom":
            held = Fields({**held.values, "parameters": parameters_of(held)}, held.where)
        found.append(function_tool(held, "parameters"))
    return found


def function_tool(fields: Fields, schema: str) -> dict[str, Any]:
    """Return one function in the form of Chat Completions; `schema` names the entry of its parameters."""
    name = fields.need("name", TEXT)
    if not name or len(name) > 256 or not all(c.isalnum() or c in "_.:/-" for c in name):
        raise fields.refuse("name", "it must be up to 256 letters, digits and _ . : / -")
    function: dict[str, Any] = {"name": name}
    if (description := fields.text("description")) is not None:
        function["description"] = description
    parameters = fields.object(schema)
    function["parameters"] = {"type": "object", "properties": {}} if parameters is None else dict(parameters.values)
    fields.take("strict", FLAG)
    return {"type": "function", "function": function}


def calls_of(fields: Fields) -> list[dict[str, Any]]:
    """Return the tool calls of an assistant's message, as calls of functions, in the form of Chat Completions."""
    found = []
    for call in fields.objects("tool_calls", MOST_CALLS):
        if call.text("type") == "custom":
            if (custom := call.object("custom")) is None:
                raise call.refuse("custom", "it must be an object with a name and an input")
            function = {"name": custom.need("name", TEXT), "arguments": arguments_of(custom)}
        else:
            if (called := call.object("function")) is None:
                raise call.refuse("function", "it must be an object with a name and arguments")
            function = _called(called)
        found.append({"id": call.text("id", ""), "type": "function", "function": function})
    if not found and (called := fields.object("function_call")) is not None:  # the older form of OpenAI's API
        found.append({"id": "", "type": "function", "function": _called(called)})
    return found


def _called(function: Fields) -> dict[str, Any]:
    arguments = function.values.get("arguments") or {}
    if not isinstance(arguments, str | dict):
        raise function.refuse("arguments", "they must be JSON text or an object")
    return {"name": function.need("name", TEXT), "arguments": arguments}


def reasoning_of(fields: Fields) -> dict[str, str]:
    """Return the reasoning of an assistant's message under the name that templates read, from either of its names."""
    text = fields.text("reasoning_content") or fields.text("reasoning") or fields.text("thinking")
    return {"reasoning_content": text} if text else {}


def messages_of(fields: Fields) -> list[Message]:
    """Return the messages of Chat Completions, checked; `developer` is system, `function` is tool."""
    raw = fields.need("messages", LIST)
    if not raw:
        raise fields.refuse("messages", "it must have at least one message")
    return [_message(message) for message in fields.objects("messages", MOST_MESSAGES)]


PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
ROLES = {"developer": "system", "function": "tool"} | {r: r for r in ("system", "user", "assistant", "tool")}


def _message(fields: Fields) -> Message:
    role = ROLES.get(fields.need("role", TEXT))
    if role is None:
        raise fields.refuse("role", f"it must be one of {', '.join(ROLES)}")
    if role == "user" and "content" not in fields.values:
        fields.need("content", TEXT_OR_LIST)
    content = text_of(fields, "content", PARTS)
    if role != "assistant":
        message: Message = {"role": role, "content": content or ""}
        if role == "tool":
            names = {key: value for key in ("tool_call_id", "name") if (value := fields.text(key)) is not None}
            message |= names
        return message
    message = {"role": role, "content": content if content is not None else fields.text("refusal", "")}
    message |= reasoning_of(fields)
    if calls := calls_of(fields):
        message["tool_calls"] = calls
    return message

"""Custom tools of OpenAI's APIs, whose calls are free text: models see them as functions with an argument `input`."""

import json
from typing import Any

from generate.server.fields import TEXT, Fields


def parameters_of(tool: Fields) -> dict[str, Any]:
    """Return the parameters of a custom tool. The model sees the grammar of its text, but may not follow it."""
    text = {"type": "string"}
    form = tool.object("format")
    if form is not None and form.choice("type", "text", "grammar") == "grammar":
        held = form.object("grammar") or form  # of Chat Completions; in Responses it is not nested
        text["description"] = f"Text of this {held.need('syntax', TEXT)} grammar:\n{held.need('definition', TEXT)}"
    return {"type": "object", "properties": {"input": text}, "required": ["input"]}


def arguments_of(call: Fields) -> str:
    """Return the arguments of a call, which holds its free text as `input`."""
    return json.dumps({"input": call.text("input", "")}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the free text among the arguments of a call."""
    found = arguments_object(arguments).get("input", "")
    return found if isinstance(found, str) else json.dumps(found)


def arguments_object(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none while its text is incomplete."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

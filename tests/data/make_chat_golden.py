"""Makes chat_golden.json: what transformers renders for CONVERSATIONS with each template of a folder.

    python tests/data/make_chat_golden.py FOLDER

FOLDER holds the .jinja files of https://github.com/ggml-org/llama.cpp/tree/master/models/templates (published with the
models, MIT); the four named in TEMPLATES go into the golden. Needs transformers.
"""

import json
import sys
from pathlib import Path

from jinja2 import TemplateError

TEMPLATES = ("GLM-4.7-Flash", "Qwen-Qwen3-0.6B", "Qwen3.5-4B", "poolside-Laguna-XS.2")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_train",
            "description": "Finds a train <from> one town & 'to' another, even to Zürich or 東京.",
            "parameters": {
                "type": "object",
                "properties": {"origin": {"type": "string"}, "stops": {"type": "array", "items": {"type": "string"}}},
                "required": ["origin"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}},
]


def call(name: str, **arguments: object) -> dict:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def say(role: str, content: object, **more: object) -> dict:
    return {"role": role, "content": content, **more}


SYSTEM, HELLO, AGAIN = (
    say("system", "You are terse.\n"),
    say("user", " Hello, <b>you</b> & 'me' — ça va? "),
    say("user", "And?"),
)
ANSWER = say("assistant", "Fine.\n")
TRAIN = say("user", "When is the next train?")
CALL = say("assistant", "", tool_calls=[call("find_train", origin="Zürich", stops=["Ulm", "東京"], limit=2)])
CALLS = say("assistant", "Let me look.", tool_calls=[call("now"), call("find_train", origin='a "b"\n<c>')])
RESULT = say("tool", '{"at": "10:15"}', tool_call_id="call_find_train")

CONVERSATIONS: dict[str, dict] = {
    "one turn": {"messages": [HELLO]},
    "no prompt for an answer": {"messages": [HELLO], "add_generation_prompt": False},
    "system": {"messages": [SYSTEM, HELLO]},
    "empty system": {"messages": [say("system", ""), HELLO]},
    "many turns": {"messages": [SYSTEM, HELLO, ANSWER, AGAIN, say("assistant", "No."), AGAIN]},
    "ends with an answer": {"messages": [HELLO, ANSWER], "add_generation_prompt": False},
    "thinking": {"messages": [HELLO], "enable_thinking": True},
    "no thinking": {"messages": [SYSTEM, HELLO], "enable_thinking": False},
    "reasoning": {"messages": [HELLO, say("assistant", "Fine.", reasoning_content="They greet.\n"), AGAIN]},
    "reasoning, older name": {"messages": [HELLO, say("assistant", "Fine.", reasoning="They greet."), AGAIN]},
    "reasoning in the text": {"messages": [HELLO, say("assistant", "<think>\nHm.\n</think>\n\nFine."), AGAIN]},
    "reasoning kept": {
        "messages": [HELLO, say("assistant", "Fine.", reasoning_content="They greet."), AGAIN],
        "clear_thinking": False,
        "enable_thinking": True,
    },
    "tools": {"messages": [TRAIN], "tools": TOOLS},
    "tools, system, thinking": {"messages": [SYSTEM, TRAIN], "tools": TOOLS, "enable_thinking": True},
    "tool call": {"messages": [SYSTEM, TRAIN, CALL, RESULT], "tools": TOOLS},
    "tool calls": {"messages": [TRAIN, CALLS, RESULT, RESULT, ANSWER, AGAIN], "tools": TOOLS, "enable_thinking": True},
    "reasoning, then a call": {
        "messages": [TRAIN, CALL | {"reasoning_content": "A train."}, RESULT],
        "tools": TOOLS,
        "enable_thinking": True,
    },
    "reasoning by an older name, then a call": {
        "messages": [TRAIN, CALL | {"reasoning": "A train."}, RESULT],
        "tools": TOOLS,
    },
    "no messages": {"messages": []},
    "no user": {"messages": [SYSTEM]},
    "unknown role": {"messages": [say("judge", "Guilty."), HELLO]},
    "system in the middle": {"messages": [HELLO, ANSWER, say("system", "Now in French."), AGAIN]},
    "special tokens": {"messages": [HELLO], "bos_token": "<s>", "eos_token": "</s>"},
}


def reference(template: str, conversation: dict) -> str | None:
    """What transformers renders, None if the template raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = {"add_generation_prompt": True} | conversation
    try:
        rendered, _ = render_jinja_template([conversation.pop("messages")], chat_template=template, **conversation)
    except (TemplateError, TypeError):
        return None
    return rendered[0]


def main(folder: str) -> None:
    golden: dict[str, dict] = {}
    for name in TEMPLATES:
        template = (Path(folder) / f"{name}.jinja").read_text(encoding="utf-8")
        cases = {label: reference(template, conversation) for label, conversation in CONVERSATIONS.items()}
        golden[name] = {"template": template, "rendered": cases}
    text = json.dumps({"conversations": CONVERSATIONS, "templates": golden}, ensure_ascii=False, indent=1)
    Path(__file__).with_name("chat_golden.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Tools of Messages: types that are left out, and the inputs of tools that a client sends without a schema.

The inputs are as Anthropic documents them. The date in a tool's type is its version. Before 20250429 the editor
could undo, and before 20250728 `insert` took its text as `new_str`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from generate.server.conversation import function_tool
from generate.server.fields import Fields

LEFT_OUT = (  # beginnings of the types of tools that Anthropic's servers run, or whose results are images
    *("advisor", "code_execution", "mcp_toolset", "tool_search_tool", "web_fetch", "web_search"),
    "computer",
)
Properties = dict[str, dict[str, Any]]


def tool_of(tool: Fields) -> dict[str, Any] | None:
    """Return a tool of Messages in the form of Chat Completions; None for one of LEFT_OUT. Refuses unknown types."""
    kind = tool.text("type", "custom")
    if kind.startswith(LEFT_OUT):
        return None
    if kind != "custom":
        family, _, version = kind.rpartition("_")
        if family not in KNOWN or not (version.isdecimal() and len(version) == 8):
            raise tool.refuse("type", f"supported are custom and, with a date, {', '.join(KNOWN)}")
        words, schema = KNOWN[family]
        tool = Fields({**tool.values, "description": words, "input_schema": schema(version)}, tool.where)
    return function_tool(tool, "input_schema")


def _bash(version: str) -> dict[str, Any]:
    return _schema(
        {
            "command": _text("The command to run. Needed unless `restart` is true."),
            "restart": {"type": "boolean", "description": "If true, a new shell is started and no command is run."},
        }
    )


def _editor(version: str) -> dict[str, Any]:
    commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if version < "20250429" else [])]
    if version < "20250728":
        edits = _edits("`str_replace`: the text to put in its place. `insert`: the text to insert.")
    else:
        edits = _edits() | {"insert_text": _text("`insert`: the text to insert.")}
    return _schema(_command(commands) | {"path": _text("The file or folder.")} | edits, "command", "path")


def _memory(version: str) -> dict[str, Any]:
    places = {
        "path": _text("The file or folder, of all commands but `rename`."),
        "old_path": _text("`rename`: the present path."),
        "new_path": _text("`rename`: the new path."),
    }
    edits = _edits() | {"insert_text": _text("`insert`: the text to insert.")}
    commands = ["view", "create", "str_replace", "insert", "delete", "rename"]
    return _schema(_command(commands) | places | edits, "command")


def _edits(replacement: str = "`str_replace`: the text to put in its place.") -> Properties:
    """Return the properties of commands that read or change a file."""
    lines = "`view`: the first and the last line to show of a file, counted from 1; -1 is its end."
    return {
        "view_range": {"type": "array", "items": {"type": "integer"}, "description": lines},
        "file_text": _text("`create`: the content of the new file."),
        "old_str": _text("`str_replace`: the text to replace, exactly as the file has it, once."),
        "new_str": _text(replacement),
        "insert_line": {"type": "integer", "description": "`insert`: the line to insert after; 0 is the file's start."},
    }


def _command(commands: Sequence[str]) -> Properties:
    return {"command": {"type": "string", "enum": list(commands), "description": "What to do."}}


def _text(words: str) -> dict[str, Any]:
    return {"type": "string", "description": words}


def _schema(properties: Properties, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


KNOWN: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {  # what each kind of tool does, and its schema
    "bash": ("Run a command in a shell, which keeps its state from one call to the next.", _bash),
    "text_editor": ("View, create and edit text files.", _editor),
    "memory": ("Keep notes between conversations, in files below /memories: view and edit them.", _memory),
}

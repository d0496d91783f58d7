"""Parse tool calls as models write them: find the syntax that a chat template shows, and read a call in it.

Three syntaxes cover the supported families. Each call is enclosed by <tool_call> and </tool_call>:

    Hermes, Qwen2.5, Qwen3      {"name": NAME, "arguments": {...}}
    Qwen3-Coder, Qwen3.5/3.6    <function=NAME> <parameter=KEY>⏎VALUE⏎</parameter> ... </function>
    GLM-4.5 to 4.7, Laguna      NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ...

The last two write strings unquoted and other values as JSON; the tool's JSON schema determines which one a value is.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from common.errors import UsageError, shown

OPEN, CLOSE = "<tool_call>", "</tool_call>"

Schemas = Mapping[str, Mapping[str, Any]]  # a tool's name to the JSON schema of its parameters
Call = tuple[str, dict[str, Any]]  # name and arguments
Parse = Callable[[str, Schemas], Call | None]

_NAME = r"[\w.:/-]+"


class Syntax(NamedTuple):
    """Syntax of a family's tool calls.

    parse  function that parses the text between the tags; returns None if that text ends inside a value, so that the
           closing tag belongs to the value; raises ValueError if the text is no call
    lead   text that follows <tool_call> and white space in every call
    bare   text that begins a call of the tool {} for models that often omit <tool_call>
    """

    parse: Parse
    lead: str = ""
    bare: str = ""


def find_syntax(template: str) -> Syntax | None:
    """Return the syntax that a chat template shows its model; None if it is none of ours."""
    if OPEN not in template:
        return None
    if "<function=" in template and "<parameter=" in template:
        return QWEN_XML
    if "<arg_key>" in template:
        return GLM
    return HERMES if "arguments" in template else None


def syntax_of(template: str) -> Syntax | None:
    """Return the syntax of calls in replies to prompts of a chat template: its own, or that of `spelled_out`."""
    return HERMES if lacks_tools(template) else find_syntax(template)


def lacks_tools(template: str) -> bool:
    """Test whether a chat template has no place for tools."""
    return "tools" not in template


TEACHING = """You may call functions, whose signatures are:
<tools>
TOOLS
</tools>
To call one, write a JSON object with its name and its arguments between tags, for each call:
<tool_call>
{"name": "NAME", "arguments": {"KEY": VALUE}}
</tool_call>"""


def spelled_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a conversation with tools for a template that has no place for them: tools, calls and results become text.

    messages  as templates take them; tools are appended to the system message, results are messages of the user
    """
    told = TEACHING.replace("TOOLS", "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    out: list[dict[str, Any]] = []
    results = False  # whether the last message holds results of calls
    for message in messages:
        role, text, calls = message["role"], plain_text(message.get("content")), message.get("tool_calls") or ()
        if role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if results:
                out[-1]["content"] += f"\n{text}"
                continue
        written = [json.dumps(_signature(call), ensure_ascii=False) for call in calls]
        text = "\n".join([*([text] if text else []), *(f"{OPEN}\n{call}\n{CLOSE}" for call in written)])
        kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        results = role == "tool"
        out.append(kept | {"role": "user" if results else role, "content": text})
    if not out or out[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": told}, *out]
    out[0]["content"] += f"\n\n{told}"
    return out


def plain_text(content: Any) -> str:
    """Return the text of a message's content: text, parts of text, or None."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def _signature(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    return {"name": function.get("name"), "arguments": function.get("arguments", {})}


def schemas(tools: Any) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of each tool, given as in OpenAI's API: {"type": "function", "function": {...}}."""
    if not isinstance(tools, list | tuple):
        raise UsageError(f"tools is {shown(tools)}, not a list")
    found = {}
    for at, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise UsageError(f"tool {at} is {shown(tool)}, not an object whose function has a name")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise UsageError(f"the parameters of tool {name} are {shown(parameters)}, not a JSON schema")
        found[name] = parameters
    return found


def read_call(syntax: Syntax, body: str, schemas: Schemas) -> dict[str, str] | None:
    """Read the call in `body` as OpenAI's name and arguments as JSON text. None and ValueError as in Syntax.parse."""
    try:
        call = syntax.parse(body, schemas)
        if call is None:
            return None
        arguments = json.dumps(call[1], ensure_ascii=False, allow_nan=False)
        arguments.encode()  # half a surrogate pair is a ValueError too
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return {"name": call[0], "arguments": arguments}


def _hermes(body: str, schemas: Schemas) -> Call | None:
    try:
        call = json.loads(body, strict=False)  # models put line breaks into strings
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            return None
        raise
    name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not re.fullmatch(_NAME, name) or not isinstance(arguments, dict):
        raise ValueError("not a name and arguments")
    return name, arguments


def _tagged(head: str, argument: str, close: str, tail: str, framed: bool) -> Parse:
    """Return a parser of a name and arguments between tags, from patterns.

    head      the call up to its first argument; group 1 is the name
    argument  an argument up to its value; group 1 is the key
    close     the tag after a value
    tail      what follows the last argument
    framed    values stand on lines of their own
    """
    begin, opening = re.compile(rf"\s*{head}"), re.compile(rf"\s*{argument}")
    end = re.compile(rf"\s*{tail}\s*\Z")
    tags, after = re.compile(rf"{argument}|{close}"), re.compile(rf"\s*(?:{argument}|{tail}\s*\Z)")

    def parse(body: str, schemas: Schemas) -> Call | None:
        match = begin.match(body)
        if match is None:
            raise ValueError("no name")
        name, arguments = match[1], dict[str, Any]()
        schema = schemas.get(name, {})
        while not end.match(body, match.end()):
            match = opening.match(body, match.end())
            if match is None or match[1].strip() in arguments:
                raise ValueError("neither a new argument nor the end")
            key, start = match[1].strip(), match.end()
            match = closing(body, start)
            if match is None:
                return None
            value = body[start : match.start()]
            if framed:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = typed(value, _property(schema, key), schema)
        return name, arguments

    def closing(body: str, start: int) -> re.Match[str] | None:
        """Find the tag that ends the value at `start`, not one of a pair inside the value or one before more of it."""
        depth = 0
        for tag in tags.finditer(body, start):
            if tag[0] != close:
                depth += 1
            elif depth:
                depth -= 1
            elif after.match(body, tag.end()):
                return tag
        return None

    return parse


HERMES = Syntax(_hermes, lead="{")
QWEN_XML = Syntax(
    _tagged(rf"<function=({_NAME})>", r"<parameter=([^<>\n]+)>", "</parameter>", "</function>", framed=True),
    lead="<function=",
    bare="<function={}>",
)
GLM = Syntax(_tagged(f"({_NAME})", r"<arg_key>([^<]+)</arg_key>\s*<arg_value>", "</arg_value>", "", framed=False))


# -- values ------------------------------------------------------------------------------------------------------------

_NAMES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
_TYPES = frozenset({*_NAMES.values(), "object"})
_PYTHON = {"None": None, "True": True, "False": False}  # Qwen's templates print these as Python does


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the value that `text` stands for under a JSON schema, whose $refs lead into `root`.

    If strings are allowed, JSON of another allowed type gets that type, any other text is a string. If they are not,
    JSON is parsed, and other text stays a string: the tool can then report to the model what is wrong.
    """
    types = _types(schema, root)
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        value = _PYTHON.get(text.strip(), text)
    if isinstance(value, float):
        if not math.isfinite(value):
            return text
        if "integer" in types and "number" not in types and value.is_integer():
            value = int(value)
    kind = _type(value)
    if "string" in types and (kind == "string" or kind not in types):
        return text
    return value


def _type(value: Any) -> str:
    return _NAMES.get(type(value), "object")


def _property(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def _types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """List the JSON types that a schema allows; all, if it does not restrict them."""
    types: set[str] = set()
    left, seen = [schema], set[int]()  # a $ref may lead back
    while left:
        schema = left.pop()
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        if not isinstance(schema, Mapping):
            return _TYPES
        named, members = schema.get("type"), [*_list(schema, "anyOf"), *_list(schema, "oneOf")]
        if isinstance(reference := schema.get("$ref"), str):
            left.append(_follow(reference, root))
        elif named is not None:
            types |= {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
        elif "const" in schema:
            types.add(_type(schema["const"]))
        elif values := _list(schema, "enum"):
            types |= {_type(value) for value in values}
        elif members:
            left += members
        else:
            return _TYPES
    if "number" in types:
        types.add("integer")
    return _TYPES & types or _TYPES


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _follow(reference: str, root: Mapping[str, Any]) -> Any:
    """Resolve a $ref such as #/$defs/Town; None if it points to nothing."""
    node: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node

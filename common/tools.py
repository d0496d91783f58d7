"""Parse tool calls as models write them: find the syntax that a chat template shows, and read a call in it.

Five syntaxes cover the supported families. In three, each call is enclosed by <tool_call> and </tool_call>:

    Hermes, Qwen2.5, Qwen3      {"name": NAME, "arguments": {...}}
    Qwen3-Coder, Qwen3.5/3.6    <function=NAME> <parameter=KEY>⏎VALUE⏎</parameter> ... </function>
    GLM-4.5 to 4.7, Laguna      NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ...

The last two write strings unquoted and other values as JSON; the tool's JSON schema determines which one a value is.
Gpt-oss writes a call as a message of its own, to a recipient (common/harmony.py).
Calls of Mistral's models follow [TOOL_CALLS] up to the next one, or to the end of the reply: a list of Hermes's
objects, or NAME[ARGS]{...} in newer models.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from common.errors import UsageError, shown

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HARMONY_START, HARMONY_CHANNEL, HARMONY_MESSAGE = "<|start|>", "<|channel|>", "<|message|>"

Schemas = Mapping[str, Mapping[str, Any]]  # a tool's name to the JSON schema of its parameters
Call = tuple[str, dict[str, Any]]  # name and arguments
Parse = Callable[[str, Schemas], Call | None]
ParseCut = Callable[[str, Schemas], tuple[str, str] | None]

_NAME = r"[\w.:/-]+"


class Syntax(NamedTuple):
    """Syntax of a family's tool calls.

    parse  function that parses the text between the tags; returns None if that text ends inside a value, so that the
           closing tag belongs to the value; raises ValueError if the text is no call
    cut    function that parses the beginning of a call: returns its name and the arguments so far, as JSON
           text that is cut where the call is; None before the end of the name
    lead   text that follows <tool_call> and white space in every call
    bare   text that begins a call of the tool {} for models that often omit <tool_call>
    open   tag before a call
    close  tag after it; "": it ends where the next one opens, or with the reply
    id     characters of a call's id; None: any number
    """

    parse: Parse
    cut: ParseCut
    lead: str = ""
    bare: str = ""
    open: str = OPEN
    close: str = CLOSE
    id: int | None = None

    def split(self, body: str) -> list[str]:
        """Divide the text between two tags into its calls, of which there may be several without a closing tag."""
        text = body.strip()
        return [body] if self.close or not text.startswith("[") else _items(text)


def is_harmony(template: str) -> bool:
    """Test whether a chat template writes messages in the format of common/harmony.py."""
    return all(tag in template for tag in (HARMONY_START, HARMONY_CHANNEL, HARMONY_MESSAGE))


def find_syntax(template: str) -> Syntax | None:
    """Return the syntax that a chat template shows its model; None if it is none of ours."""
    if is_harmony(template):
        return HARMONY
    if MISTRAL.open in template and "[ARGS]" in template:
        return MISTRAL
    if MISTRAL.open in template and "arguments" in template:
        return MISTRAL_LIST
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
    """Test whether a chat template has no place for tools.

    Phi-4-mini's reads them from a message alone; SmolLM3's has another name for them, and no place for calls.
    """
    own = re.search(r"""(?<![\w.'"])tools\b(?!['"])""", template)
    return not own or ("xml_tools" in template and "tool_calls" not in template)


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


def read_cut_call(syntax: Syntax, body: str, schemas: Schemas) -> dict[str, str] | None:
    """Read the beginning of a call, as a reply without more tokens ends in it, in the form of `read_call`.

    As in llama.cpp the arguments are the part that was written, so that no client takes them for complete ones. None
    before the end of the name.
    """
    found = syntax.cut(body, schemas)
    return None if found is None else {"name": found[0], "arguments": found[1].encode(errors="replace").decode()}


def _hermes(body: str, schemas: Schemas) -> Call | None:
    call = _json(body)
    if call is None:
        return None
    name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not re.fullmatch(_NAME, name) or not isinstance(arguments, dict):
        raise ValueError("not a name and arguments")
    return name, arguments


def _json(text: str) -> Any:
    """Parse JSON; None if the text ends inside a string."""
    try:
        return json.loads(text, strict=False)  # models put line breaks into strings
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            return None
        raise


def _hermes_cut(body: str, schemas: Schemas) -> tuple[str, str] | None:
    begun = re.match(rf'\s*{{\s*"name"\s*:\s*"({_NAME})"\s*(?:,\s*"arguments"\s*:\s*({{.*))?', body, re.DOTALL)
    return None if begun is None else (begun[1], _first_json(begun[2] or "{"))


def _first_json(text: str) -> str:
    """Return the JSON value with which the text begins, or all of the text if it ends inside the value."""
    try:
        return text[: json.JSONDecoder(strict=False).raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text


def _items(text: str) -> list[str]:
    """Divide JSON text of a list, which may be cut, into that of its items."""
    found, at = list[str](), 1
    while (begun := re.compile(r"[\s,]*(?=[^\s,\]])").match(text, at)) is not None:
        found.append(_first_json(text[begun.end() :]))
        at = begun.end() + len(found[-1])
    return [*found, text[at:].strip()] if text[at:].strip() not in ("", "]") else found


_MISTRAL_NAME = re.compile(rf"\s*({_NAME})\s*(?:\[CALL_ID\]\s*\w*\s*)?\[ARGS\]\s*")


def _mistral(body: str, schemas: Schemas) -> Call | None:
    begun = _MISTRAL_NAME.match(body)
    if begun is None:
        return _hermes(body, schemas)
    arguments = _json(body[begun.end() :])
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError("no arguments")
    return None if arguments is None else (begun[1], arguments)


def _mistral_cut(body: str, schemas: Schemas) -> tuple[str, str] | None:
    begun = _MISTRAL_NAME.match(body)
    return _hermes_cut(body, schemas) if begun is None else (begun[1], _first_json(body[begun.end() :] or "{"))


def _harmony(body: str, schemas: Schemas) -> Call | None:
    """Parse NAME<|message|>JSON, which HarmonyParser puts together; without any JSON the call has no arguments."""
    name, _, text = body.partition(HARMONY_MESSAGE)
    arguments = _json(text.strip() or "{}")
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError("no arguments")
    return None if arguments is None else (name, arguments)


def _harmony_cut(body: str, schemas: Schemas) -> tuple[str, str]:
    name, _, text = body.partition(HARMONY_MESSAGE)
    return name, _first_json(text.strip() or "{")


class _Tags(NamedTuple):
    """Patterns of a name and arguments between tags.

    begin      the call up to its first argument; group 1 is the name
    argument   an argument up to its value; group 1 is the key
    close      the tag after a value
    tags       any tag of an argument
    after      what may follow the tag after a value; after_cut: also the beginning of a tag, at the end of the text
    end        what follows the last argument; end_cut as after_cut, None if nothing shows the end
    framed     values stand on lines of their own
    """

    begin: re.Pattern[str]
    argument: re.Pattern[str]
    close: str
    tags: re.Pattern[str]
    after: re.Pattern[str]
    after_cut: re.Pattern[str]
    end: re.Pattern[str]
    end_cut: re.Pattern[str] | None
    framed: bool


def _tagged(head: str, argument: str, close: str, tail: str, framed: bool) -> tuple[Parse, ParseCut]:
    """Return the parsers of a syntax from patterns: of its `begin`, `argument`, `close` and `end`, as in _Tags."""
    tags = _Tags(
        begin=re.compile(rf"\s*{head}"),
        argument=re.compile(rf"\s*{argument}"),
        close=close,
        tags=re.compile(rf"{argument}|{close}"),
        after=re.compile(rf"\s*(?:{argument}|{tail}\s*\Z)"),
        after_cut=re.compile(rf"\s*(?:{argument}|(?:{tail})?\s*(?:<\S*)?\Z)"),
        end=re.compile(rf"\s*{tail}\s*\Z"),
        end_cut=re.compile(rf"\s*{tail}\s*(?:<\S*)?\Z") if tail else None,
        framed=framed,
    )
    return partial(_parse_tagged, tags), partial(_cut_tagged, tags)


def _parse_tagged(tags: _Tags, body: str, schemas: Schemas) -> Call | None:
    match = tags.begin.match(body)
    if match is None:
        raise ValueError("no name")
    name, arguments = match[1], dict[str, Any]()
    schema = schemas.get(name, {})
    while not tags.end.match(body, match.end()):
        match = tags.argument.match(body, match.end())
        if match is None or match[1].strip() in arguments:
            raise ValueError("neither a new argument nor the end")
        key, start = match[1].strip(), match.end()
        match = _closing(tags, body, start, tags.after)
        if match is None:
            return None
        value = body[start : match.start()]
        if tags.framed:
            value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = typed(value, _property(schema, key), schema)
    return name, arguments


def _cut_tagged(tags: _Tags, body: str, schemas: Schemas) -> tuple[str, str] | None:
    match = tags.begin.match(body)
    if match is None:
        return None
    name, text = match[1], "{"
    schema = schemas.get(name, {})
    while opened := tags.argument.match(body, match.end()):
        key, start = opened[1].strip(), opened.end()
        text += f"{', ' if text != '{' else ''}{json.dumps(key, ensure_ascii=False)}: "
        match = _closing(tags, body, start, tags.after_cut)
        value = body[start : len(body) if match is None else match.start()]
        value = value.removeprefix("\n") if tags.framed else value
        if match is None:
            return name, text + _cut_value(tags, value, _types(_property(schema, key), schema))
        value = value.removesuffix("\n") if tags.framed else value
        text += json.dumps(typed(value, _property(schema, key), schema), ensure_ascii=False)
    is_whole = tags.end_cut is not None and tags.end_cut.match(body, match.end())
    return name, text + ("}" if is_whole else "")


def _cut_value(tags: _Tags, value: str, types: Collection[str]) -> str:
    """Return the beginning of a value as JSON, without the beginning of the tag after it."""
    close = f"\n{tags.close}" if tags.framed else tags.close
    begun = next((n for n in range(len(close) - 1, 0, -1) if value.endswith(close[:n])), 0)
    value = value[: len(value) - begun]
    return json.dumps(value, ensure_ascii=False)[:-1] if "string" in types else value


def _closing(tags: _Tags, body: str, start: int, after: re.Pattern[str]) -> re.Match[str] | None:
    """Find the tag that ends the value at `start`: no tag of a pair inside the value, and `after` matches after it."""
    depth = 0
    for tag in tags.tags.finditer(body, start):
        if tag[0] != tags.close:
            depth += 1
        elif depth:
            depth -= 1
        elif after.match(body, tag.end()):
            return tag
    return None


HERMES = Syntax(_hermes, _hermes_cut, lead="{")
QWEN_XML = Syntax(
    *_tagged(rf"<function=({_NAME})>", r"<parameter=([^<>\n]+)>", "</parameter>", "</function>", framed=True),
    lead="<function=",
    bare="<function={}>",
)
MISTRAL = Syntax(_mistral, _mistral_cut, open="[TOOL_CALLS]", close="", id=9)  # its templates refuse other ids
MISTRAL_LIST = MISTRAL._replace(lead="[")
HARMONY = Syntax(_harmony, _harmony_cut, close="<|call|>")
GLM = Syntax(*_tagged(f"({_NAME})", r"<arg_key>([^<]+)</arg_key>\s*<arg_value>", "</arg_value>", "", framed=False))


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

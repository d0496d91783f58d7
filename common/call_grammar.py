"""Grammars of tool calls, in the syntax that a chat template teaches its model."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import UsageError
from common.grammar import json_rule
from common.tokenizer import Tokenizer
from common.tools import CLOSE, GLM, HARMONY, HERMES, MISTRAL, MISTRAL_LIST, OPEN, QWEN_XML, Schemas, Syntax
from common.tools import HARMONY_CHANNEL as CHANNEL
from common.tools import HARMONY_MESSAGE as MESSAGE
from common.tools import HARMONY_START as START

REPLY = "the reply"  # what has the schema of JSON that is no call, in errors
MOST_CALLS = 16  # of one reply
MOST_RULES = 1 << 20  # characters of a tool's rules


def reply_grammar(schema: Any, calls: str, head: str = "") -> str:
    """Write a Lark grammar of a reply: JSON of `schema`, or the calls of `call_rules`; if both are given, either one.

    schema  None: no JSON; calls: "" without; head: what precedes JSON, in the language of the grammar
    """
    starts = ([f"{head} reply".lstrip()] if schema is not None else []) + (["calls"] if calls else [])
    return f"start: {' | '.join(starts)}\n" + (json_rule("reply", schema, REPLY) if schema is not None else "") + calls


def literal(tokenizer: Tokenizer, text: str) -> str:
    """Write a text in the language of grammars; control tokens in it stand for themselves."""
    return _Literals(tokenizer).of(text)


def call_rules(syntax: Syntax, tools: Schemas, tokenizer: Tokenizer, several: bool) -> str:
    """Write the rule `calls` and the rules it needs: one call of any of `tools`; with `several`, one or more."""
    build = BUILD.get(syntax)
    if build is None or not tools:
        raise UsageError("the model's chat template shows no syntax of tool calls that a grammar could follow")
    literals = _Literals(tokenizer)
    names = [f"call_{at}" for at in range(len(tools))]
    between = "" if syntax is MISTRAL else literals.of("\n")
    has_several = several and syntax not in (MISTRAL_LIST, HARMONY)  # the latter ends a reply with a call
    more = f" ({between} call){{0,{MOST_CALLS - 1}}}" if has_several else ""
    rules = [f"calls: call{more}\n", f"call: {' | '.join(names)}\n"]
    for rule, (name, schema) in zip(names, tools.items(), strict=True):
        rules.append(build(rule, name, schema, literals))
    return "".join(rules)


class _Literals:
    """Texts as terminals of a grammar, in which control tokens have a form of their own."""

    def __init__(self, tokenizer: Tokenizer):
        self._ids = {text: tokenizer.token_to_id(text) for text in tokenizer.control_tokens}

    def of(self, text: str) -> str:
        control = [tag for tag in self._ids if tag in text]
        parts = re.split(f"({'|'.join(map(re.escape, control))})", text) if control else [text]
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part) for part in parts if part)


def _hermes(rule: str, name: str, schema: Mapping[str, Any], literals: _Literals) -> str:
    begin = f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": '
    return _json_call(rule, name, schema, literals, (begin, "}\n" + CLOSE))


def _qwen_xml(rule: str, name: str, schema: Mapping[str, Any], literals: _Literals) -> str:
    begin, end = f"{OPEN}\n<function={name}>\n", f"</function>\n{CLOSE}"
    return _arguments(rule, schema, literals, (begin, "<parameter={}>\n", "\n</parameter>\n", end))


def _glm(rule: str, name: str, schema: Mapping[str, Any], literals: _Literals) -> str:
    begin = f"{OPEN}{name}\n"
    return _arguments(rule, schema, literals, (begin, "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", CLOSE))


def _mistral(rule: str, name: str, schema: Mapping[str, Any], literals: _Literals) -> str:
    return _json_call(rule, name, schema, literals, (f"{MISTRAL.open}{name}[ARGS]", ""))


def _mistral_list(rule: str, name: str, schema: Mapping[str, Any], literals: _Literals) -> str:
    """Write a list of one call: the tag is before the list, so that another call would be another item."""
    begin = f'{MISTRAL.open} [{{"name": {json.dumps(name)}, "arguments": '
    return _json_call(rule, name, schema, literals, (begin, "}]"))


def _harmony(rule: str, name: str, schema: Mapping[str, Any], literals: _Literals) -> str:
    head = f"{START}assistant{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}"
    return _json_call(rule, name, schema, literals, (head, ""))


def _json_call(rule: str, name: str, schema: Mapping[str, Any], literals: _Literals, around: tuple[str, str]) -> str:
    begin, end = map(literals.of, around)
    return f"{rule}: {begin} {rule}_json {end}\n" + json_rule(
        f"{rule}_json", _object(schema), f"the tool {name}", lenient=True
    )


def _arguments(rule: str, schema: Mapping[str, Any], literals: _Literals, frame: tuple[str, str, str, str]) -> str:
    """Write a call whose arguments have the order of the schema: strings as they are, other values as JSON.

    frame  texts at the beginning of the call, before a value (with its key {}), after a value, and after the call
    """
    begin, opening, closing, end = frame
    properties = schema.get("properties")
    known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    needed: Sequence[Any] = schema["required"] if isinstance(schema.get("required"), list) else ()
    parts, rules = [literals.of(begin)], list[str]()
    for at, (key, given) in enumerate(known.items()):
        if re.search(r"[<>\n]", key):
            raise UsageError(f"a tool's parameter is named {key!r:.80}, which no call can spell")
        value, optional = f"{rule}_{at}", "" if key in needed else "?"
        parts.append(f"{value}_arg{optional}")
        head = literals.of(opening.format(key))
        if isinstance(given, Mapping) and given.get("type") == "string" and not {"enum", "const"} & given.keys():
            rules.append(f"{value}_arg: {head} {value}\n{value}[suffix={json.dumps(closing)}]: {_text(given)}\n")
        elif isinstance(given, Mapping) and _words(given):
            words = " | ".join(json.dumps(word) for word in _words(given))
            rules.append(f"{value}_arg: {head} ({words}) {literals.of(closing)}\n")
        else:
            described = {**given, **{k: schema[k] for k in ("$defs", "definitions") if k in schema}} if given else {}
            rule_of_value = json_rule(value, described, f"a tool's parameter {key:.80}", lenient=True)
            rules.append(f"{value}_arg: {head} {value} {literals.of(closing)}\n{rule_of_value}")
            if (size := sum(map(len, rules))) > MOST_RULES:  # definitions are repeated for each parameter
                raise UsageError(f"a tool's schema gives a grammar of {size} characters; at most {MOST_RULES} are read")
    return f"{rule}: {' '.join([*parts, literals.of(end)])}\n" + "".join(rules)


def _text(schema: Mapping[str, Any]) -> str:
    """Write a pattern of any text of the lengths that the schema allows."""
    most = schema.get("maxLength")
    return f"/(?s:.{{0,{most}}})/" if isinstance(most, int) and 0 < most <= 10000 else "/(?s:.*)/"


def _words(schema: Mapping[str, Any]) -> list[str]:
    """List the strings of a schema's enumeration, if all are strings; a call writes them without quotes."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed if isinstance(listed, list) and listed and all(isinstance(v, str) and v for v in listed) else []


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments; it allows no additional ones unless it says so."""
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), Mapping) else {}
    return {"type": "object", **closed, **schema}


BUILD = {
    HERMES: _hermes,
    QWEN_XML: _qwen_xml,
    GLM: _glm,
    MISTRAL: _mistral,
    MISTRAL_LIST: _mistral_list,
    HARMONY: _harmony,
}

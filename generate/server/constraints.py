"""Constraints on a reply's form: JSON of a schema, a grammar, a tool call, or reasoning of bounded length."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.call_grammar import call_rules, literal, reply_grammar
from common.errors import UsageError
from common.harmony import ANSWER
from common.rules import Rule, many, texts, whole
from common.text_grammar import choices_grammar, regex_grammar
from common.tools import Syntax, is_harmony, schemas, syntax_of
from generate.server.conversation import MOST_TOOLS
from generate.server.errors import ApiError
from generate.server.facts import EFFORT, Facts
from generate.server.fields import OBJECT, TEXT, Fields
from generate.server.task import Ending, Grammar

ANY_OBJECT = {"type": "object"}
EFFORT_BUDGETS = {"minimal": 512, "low": 2048}  # tokens of reasoning; higher efforts have no limit


@dataclass(frozen=True)
class ToolChoice:
    """Choice of a request: whether tools may or must be called.

    mode   "none", "auto" or "required"
    names  the only tools that may be called; None: any
    """

    mode: str
    names: Collection[str] | None = None

    def shown(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the tools that the model sees: none for "none", all for "required", else the tools of `names`."""
        if self.mode == "none":
            return []
        names = self.names if self.mode == "auto" else None
        return [tool for tool in tools if names is None or tool["function"]["name"] in names]


@dataclass(frozen=True)
class Form:
    """The JSON that a reply must be.

    field  of the request, which holds the schema
    """

    schema: dict[str, Any]
    field: str


def openai_choice(fields: Fields, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    """Return the `tool_choice` of Chat Completions and Responses."""
    given = fields.values.get("tool_choice")
    if given is None or isinstance(given, str):
        if given not in (None, "none", "auto", "required"):
            raise fields.refuse("tool_choice", "it must be none, auto, required or a tool")
        return _checked(fields, ToolChoice(given or "auto"), tools)
    chosen = fields.object("tool_choice")
    assert chosen is not None
    kind = chosen.text("type")
    if kind == "allowed_tools":
        return _allowed(fields, chosen.object(kind) or chosen, tools)
    if kind not in ("function", "custom"):
        raise chosen.refuse("type", "it must be function, custom or allowed_tools")
    named = chosen.object(kind) or chosen
    return _checked(fields, ToolChoice("required", [named.need("name", TEXT)]), tools)


def _allowed(fields: Fields, allowed: Fields, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    """Return the choice of `allowed_tools`, which lists tools of the request that may be called."""
    names = [
        (tool.object(tool.text("type", "")) or tool).need("name", TEXT) for tool in allowed.objects("tools", MOST_TOOLS)
    ]
    if not names:
        raise allowed.refuse("tools", "it must name at least one of the tools")
    return _checked(fields, ToolChoice(allowed.choice("mode", "auto", "required", default="auto"), names), tools)


def anthropic_choice(fields: Fields, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    """Return the `tool_choice` of Messages."""
    given = fields.object("tool_choice")
    if given is None:
        return ToolChoice("auto")
    mode = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}.get(given.need("type", TEXT))
    if mode is None:
        raise given.refuse("type", "it must be auto, any, tool or none")
    names = [given.need("name", TEXT)] if given.values["type"] == "tool" else None
    return _checked(fields, ToolChoice(mode, names), tools)


def _checked(fields: Fields, choice: ToolChoice, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    names = [tool["function"]["name"] for tool in tools]
    if (choice.mode == "required" and not names) or not set(choice.names or ()) <= set(names):
        known = ", ".join(names[:20]) or "none"
        raise fields.refuse("tool_choice", f"the functions among the tools are: {known}")
    return choice


def openai_format(form: Fields | None, nested: bool = False) -> Form | None:
    """Return the form that a request asks for; None for text.

    nested  the schema stands inside an entry `json_schema`, as in Chat Completions; else in `form` itself
    """
    if form is None:
        return None
    kind = form.choice("type", "text", "json_object", "json_schema")
    if kind == "json_schema":
        holder = form.object("json_schema")
        if nested and holder is None and not form.has("schema"):
            form.need("json_schema", Rule("an object with a schema", OBJECT.convert))
        holder = holder or form
        return Form(holder.need("schema", OBJECT), holder.name("schema"))
    return Form(form.take("schema", OBJECT, ANY_OBJECT), form.name("schema")) if kind == "json_object" else None


def _json(fields: Fields, key: str) -> Form:
    """Read a JSON schema, which may be written as text."""
    given = fields.values[key]
    if isinstance(given, str):
        try:
            fields = Fields({key: json.loads(given)}, fields.where)
        except ValueError:
            raise fields.refuse(key, "it must be a JSON schema") from None
    return Form(fields.need(key, OBJECT), fields.name(key))


def _regex(fields: Fields, key: str) -> Grammar:
    """Read a regular expression that the whole reply must match."""
    return Grammar(regex_grammar(fields.need(key, TEXT)), fields.name(key))


def _choices(fields: Fields, key: str) -> Grammar:
    """Read the texts of which the reply must be one."""
    if not (found := fields.need(key, CHOICES)):
        raise fields.refuse(key, f"it must be {CHOICES.words}")
    return Grammar(choices_grammar(found), fields.name(key))


def _language(fields: Fields, key: str) -> Grammar:
    return Grammar(fields.need(key, TEXT), fields.name(key))


CHOICES = texts("a list of texts, each of at least one character")
EMPTY: tuple[Any, ...] = ("", [], {})
Read = Callable[[Fields, str], Form | Grammar]
CONSTRAINTS: dict[str, tuple[Read, tuple[Any, ...]]] = {  # of llama.cpp and vLLM, and the values that request nothing
    "json_schema": (_json, EMPTY),
    "grammar": (_language, EMPTY),
    "guided_json": (_json, ("", [])),  # {} asks for any JSON
    "guided_regex": (_regex, EMPTY),
    "guided_choice": (_choices, EMPTY),
    "guided_grammar": (_language, EMPTY),
}
# of vLLM's `structured_outputs`
STRUCTURED: dict[str, Read] = {"json": _json, "regex": _regex, "choice": _choices, "grammar": _language}


def form_of(fields: Fields, form: Form | None) -> Form | Grammar | None:
    """Return what a reply must follow: `form`, of `response_format`, or what a field of llama.cpp or vLLM asks for."""
    found: dict[str, Form | Grammar] = {} if form is None else {"response_format": form}
    found |= {
        key: read(fields, key)
        for key, (read, neutral) in CONSTRAINTS.items()
        if fields.has(key) and fields.values[key] not in neutral
    }
    if (structured := fields.object("structured_outputs")) is not None:
        if structured.has("structural_tag"):
            raise structured.refuse("structural_tag", f"supported are {', '.join(STRUCTURED)} and json_object")
        found |= {key: read(structured, key) for key, read in STRUCTURED.items() if structured.has(key)}
        if structured.flag("json_object", False):
            found["json_object"] = Form(ANY_OBJECT, structured.name("json_object"))
    if len(found) > 1:
        raise ApiError(400, f"{' and '.join(found)} exclude each other; give one of them", param=list(found)[-1])
    return next(iter(found.values()), None)


def ollama_format(fields: Fields) -> Form | None:
    """Return the form that Ollama's `format` asks for by "json" or a schema; None for text."""
    given = fields.values.get("format")
    if given is None or given == "":
        return None
    if given == "json":
        return Form(ANY_OBJECT, "format")
    if not isinstance(given, dict):
        raise fields.refuse("format", "it must be json or a JSON schema")
    return Form(given, "format")


def call_syntax(facts: Facts) -> Syntax | None:
    """Find the syntax of the model's tool calls, by the template for conversations with tools."""
    return syntax_of(facts.tokenizer.chat_templates.get("tool_use", facts.template))


def grammar_of(
    facts: Facts, tools: Sequence[dict[str, Any]], choice: ToolChoice, form: Form | Grammar | None, several: bool
) -> Grammar | None:
    """Return the grammar of a reply: calls that are required, else JSON of `form`, beside which tools may be called.

    A grammar of the whole reply leaves no place for calls, and is refused with tools.

    several  a reply may have more than one call
    """
    head = ANSWER if is_harmony(facts.template) else ""  # what precedes an answer
    if isinstance(form, Grammar):
        if choice.shown(tools):
            raise ApiError(400, f"{form.field} does not go with tools; only a JSON schema does", param=form.field)
        return replace(form, head=head)
    syntax = call_syntax(facts)
    named = {name: s for name, s in schemas(list(tools)).items() if choice.names is None or name in choice.names}
    try:
        if choice.mode == "required":
            if syntax is None:
                why = "the model's chat template shows no syntax of calls"
                raise ApiError(400, f"tool_choice cannot be kept: {why}", param="tool_choice")
            return Grammar(reply_grammar(None, call_rules(syntax, named, facts.tokenizer, several)), "tools")
        if form is None:
            return None
        calls = syntax is not None and named and choice.mode == "auto"
        rules = call_rules(syntax, named, facts.tokenizer, several) if syntax and calls else ""
        return Grammar(reply_grammar(form.schema, rules, literal(facts.tokenizer, head)), form.field)
    except UsageError as error:
        raise ApiError(400, str(error), param="tools") from None


def text_grammar_of(form: Form | Grammar | None) -> Grammar | None:
    """Return the grammar of a text that continues a prompt, which is no chat."""
    return Grammar(reply_grammar(form.schema, ""), form.field) if isinstance(form, Form) else form


def budget_of(fields: Fields, facts: Facts, effort: str | None, *keys: str) -> int | None:
    """Return the most tokens of reasoning: the first given of the entries `keys`, else the budget of the effort.

    An effort that the template shows to the model has no budget.
    """
    for key in keys:
        if (budget := fields.take(key, whole(-1))) is not None:
            return None if budget < 0 else int(budget)
    return None if EFFORT in facts.template else EFFORT_BUDGETS.get(effort or "")


def ending_of(fields: Fields, facts: Facts, grammar: Grammar | None = None) -> Ending:
    """Return the tokens that end a reply, by fields of vLLM and llama.cpp.

    grammar  of the reply, whose end is an end token
    """
    ids = many(f"a list of token ids below {facts.vocab}", whole(0, facts.vocab - 1))
    ignores = fields.flag("ignore_eos", False)
    if ignores and grammar is not None:
        raise fields.refuse("ignore_eos", f"it does not go with {grammar.field}, by which the reply ends")
    least, shown = fields.take("min_tokens", whole(0), 0), fields.flag("include_stop_str_in_output", False)
    return Ending(fields.take("stop_token_ids", ids, ()), ignores, least, shown)

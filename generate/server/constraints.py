"""Constraints on a reply's form: JSON of a schema, a tool call, or reasoning of bounded length."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from common.call_grammar import call_rules, reply_grammar
from common.errors import UsageError
from common.rules import Rule, whole
from common.tools import Syntax, schemas, syntax_of
from generate.server.conversation import MOST_TOOLS
from generate.server.errors import ApiError
from generate.server.facts import Facts
from generate.server.fields import OBJECT, TEXT, Fields
from generate.server.task import Grammar

ANY_OBJECT = {"type": "object"}
EFFORT_BUDGETS = {"minimal": 512, "low": 2048}  # tokens of reasoning; higher efforts have no limit


@dataclass(frozen=True)
class Choice:
    """Choice of a request: whether tools may or must be called.

    mode   "none", "auto" or "required"
    names  the only tools that may be called; None: any
    """

    mode: str
    names: Collection[str] | None = None

    def shown(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the tools that the model sees: none, all, or where it may choose, those that may be called."""
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


def openai_choice(fields: Fields, tools: Sequence[dict[str, Any]]) -> Choice:
    """Return the `tool_choice` of Chat Completions and Responses."""
    given = fields.values.get("tool_choice")
    if given is None or isinstance(given, str):
        if given not in (None, "none", "auto", "required"):
            raise fields.refuse("tool_choice", "it must be none, auto, required or a tool")
        return _checked(fields, Choice(given or "auto"), tools)
    chosen = fields.object("tool_choice")
    assert chosen is not None
    kind = chosen.text("type")
    if kind == "allowed_tools":
        return _allowed(fields, chosen.object(kind) or chosen, tools)
    if kind not in ("function", "custom"):
        raise chosen.refuse("type", "it must be function, custom or allowed_tools")
    named = chosen.object(kind) or chosen
    return _checked(fields, Choice("required", [named.need("name", TEXT)]), tools)


def _allowed(fields: Fields, allowed: Fields, tools: Sequence[dict[str, Any]]) -> Choice:
    """Return the choice of `allowed_tools`: its list names those of the request's tools that may be called."""
    names = [
        (tool.object(tool.text("type", "")) or tool).need("name", TEXT) for tool in allowed.objects("tools", MOST_TOOLS)
    ]
    if not names:
        raise allowed.refuse("tools", "it must name at least one of the tools")
    return _checked(fields, Choice(allowed.choice("mode", "auto", "required", default="auto"), names), tools)


def anthropic_choice(fields: Fields, tools: Sequence[dict[str, Any]]) -> Choice:
    """Return the `tool_choice` of Messages."""
    given = fields.object("tool_choice")
    if given is None:
        return Choice("auto")
    mode = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}.get(given.need("type", TEXT))
    if mode is None:
        raise given.refuse("type", "it must be auto, any, tool or none")
    names = [given.need("name", TEXT)] if given.values["type"] == "tool" else None
    return _checked(fields, Choice(mode, names), tools)


def _checked(fields: Fields, choice: Choice, tools: Sequence[dict[str, Any]]) -> Choice:
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
    facts: Facts, tools: Sequence[dict[str, Any]], choice: Choice, form: Form | None, several: bool
) -> Grammar | None:
    """Return the grammar of a reply: calls that are required, else JSON of `form`, beside which tools may be called.

    several  a reply may have more than one call
    """
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
        return Grammar(reply_grammar(form.schema, rules), form.field)
    except UsageError as error:
        raise ApiError(400, str(error), param="tools") from None


def budget_of(fields: Fields, effort: str | None, *keys: str) -> int | None:
    """Return the most tokens of reasoning: the first given of the entries `keys`, else the budget of the effort."""
    for key in keys:
        if (budget := fields.take(key, whole(-1))) is not None:
            return None if budget < 0 else int(budget)
    return EFFORT_BUDGETS.get(effort or "")

"""Write the grammar of a reply that is JSON of a schema, matches a regular expression, or is one of several texts."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from common.call_grammar import reply_grammar
from common.errors import UsageError, shown
from common.gbnf import lark_of


def text_grammar(
    schema: Mapping[str, Any] | bool | None = None,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    grammar: str | None = None,
) -> str:
    """Write a grammar in llguidance's dialect of Lark; raises UsageError unless exactly one argument is given.

    grammar  in GBNF, llama.cpp's language, or in that dialect itself
    """
    given = {"schema": schema, "regex": regex, "choices": choices, "grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise UsageError(f"a guide takes one of {', '.join(given)}; given: {', '.join(names) or 'none'}")
    if schema is not None:
        if not isinstance(schema, Mapping | bool):
            raise UsageError(f"schema is {shown(schema)}; it must be a dict, or True for any JSON")
        return reply_grammar(schema, "")
    if choices is not None:
        if isinstance(choices, str) or not choices or not all(isinstance(each, str) and each for each in choices):
            raise UsageError(f"choices is {shown(choices)}; it must be a list of texts, none of them empty")
        return choices_grammar(choices)
    if not isinstance(text := regex if grammar is None else grammar, str):
        raise UsageError(f"{names[0]} is {shown(text)}; it must be text")
    return lark_of(text) if grammar is not None else regex_grammar(text)


def choices_grammar(choices: Sequence[str]) -> str:
    """Write the grammar of one of several texts."""
    return f"start: {' | '.join(json.dumps(each, ensure_ascii=False) for each in choices)}\n"


def regex_grammar(regex: str) -> str:
    """Write the grammar of a regular expression, which stands between slashes on one line."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], regex, flags=re.DOTALL)
    one_line = escaped.replace("\n", r"\n")
    return f"start: /{one_line}/\n"

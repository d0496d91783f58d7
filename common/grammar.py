"""Guides that follow a grammar: JSON of a schema, tool calls in a model's own syntax. llguidance keeps the state."""

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from common.errors import BimetalError, UsageError
from common.guide import Guide
from common.tokenizer import Tokenizer

# White space of JSON is bounded: otherwise a weak model may write spaces to the end of the context.
WHITE_SPACE = r"\n[ ]{0,24}|[ ]{1,2}"

SCHEMA_ERROR = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: ")
SHOWN = re.compile(r"<state>|\n +\d+ \| ")  # what llguidance shows after the words of an error
OF, GUIDANCE = "$comment", "x-guidance"  # keys of a schema: the name of its owner, and options of llguidance
COMBINING = ("allOf", "anyOf", "oneOf", "$ref")  # keys whose schemas apply to the same value as the keys beside them
OPENING = {"additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties"}  # other properties
BOUNDS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LISTING = {"multipleOf", "enum", "const"}  # keys that bound an integer, or do not go with bounds
MOST_INTEGER = 9 * 10**18  # about the largest that llguidance can bound
MOST_TRIES = 64  # of parts of a schema, of which one is at fault; each takes a millisecond


class SchemaError(UsageError):
    """A JSON schema that is not supported.

    owner  what has the schema, as in `json_rule`
    """

    def __init__(self, message: str, owner: str):
        super().__init__(message)
        self.owner = owner


class Grammars:
    """Makes guides for one tokenizer; data for llguidance are computed at the first use.

    vocab  logits of the model, of which those beyond the tokenizer are never allowed
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self._tokenizer, self._vocab, self._lock = tokenizer, vocab, threading.Lock()

    @cached_property
    def _known(self) -> Any:
        llguidance = _llguidance()
        if not self._tokenizer.end_ids:
            raise BimetalError("the model's tokenizer declares no end token, with which a constrained reply could end")
        ends = sorted(self._tokenizer.end_ids)
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Words(self._tokenizer, ends[0])), n_vocab=self._vocab, eos_token=ends
        )

    def guide(self, grammar: str) -> Callable[[], Guide]:
        """Return a function that makes a guide of one reply.

        grammar  in llguidance's Lark dialect. Raises UsageError where it is none; of a schema that `json_rule` wrote
                 a SchemaError, which names the place.
        """
        with self._lock:
            known = self._known
        matcher = _matcher(known, grammar)
        if matcher.is_error():
            raise _refusal(known, grammar, matcher.get_error())
        _Matched(matcher.deep_copy(), self._vocab).allowed()  # a schema that is a reference to itself fails only here
        return lambda: _Matched(matcher.deep_copy(), self._vocab)


def _matcher(known: Any, grammar: str) -> Any:
    """Compile a grammar for the tokenizer `known`; raises UsageError if llguidance cannot parse it."""
    llguidance = _llguidance()
    try:
        return llguidance.LLMatcher(known, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    except Exception as error:
        raise UsageError(f"the grammar is refused: {_words(str(error))}") from None


def _refusal(known: Any, grammar: str, error: str) -> UsageError:
    """Put an error of llguidance about a grammar into one sentence; for a rule of `json_rule` with the place."""
    found = SCHEMA_ERROR.match(error)
    rule = grammar.split("\n")[int(found[1]) - 1] if found else ""
    if OF not in rule:
        return UsageError(f"the grammar is not supported: {_words(error)}")
    schema = json.loads(rule.partition(" %json ")[2])
    place = _place(known, schema, _words(error))
    where = f" at #{place}" if place else ""
    return SchemaError(f"the JSON schema of {schema[OF]} is not supported{where}: {_words(error)}", schema[OF])


def _place(known: Any, schema: Mapping[str, Any], why: str) -> str:
    """Find the innermost part of a schema that is refused with the words `why`, as a JSON pointer; "" is all of it."""
    shared = {key: schema[key] for key in ("$defs", "definitions", GUIDANCE) if key in schema}
    tries, place, parts = MOST_TRIES, "", _parts(schema)
    while tries and (each := next(parts, None)):
        tries -= 1
        tried = _matcher(known, f"start: %json {json.dumps({**each[1], **shared})}")
        if tried.is_error() and _words(tried.get_error()) == why:
            place, parts = place + each[0], _parts(each[1])
    return place


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the schemas directly inside a schema, each with its place, as a JSON pointer has it."""
    for key in ("$defs", "definitions", "properties", "patternProperties", "anyOf", "oneOf", "allOf", "prefixItems"):
        held = schema.get(key)
        listed = held.items() if isinstance(held, Mapping) else enumerate(held) if isinstance(held, list) else ()
        for name, part in listed:
            if isinstance(part, Mapping):
                yield f"/{key}/{str(name).replace('~', '~0').replace('/', '~1')}", part
    for key in ("items", "additionalProperties"):
        if isinstance(part := schema.get(key), Mapping):
            yield f"/{key}", part


def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise UsageError("llguidance is not installed; grammars need it: pip install 'bimetal[grammar]'") from None
    return llguidance


class _Words:
    """A tokenizer as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end: int):
        self._tokenizer, self.eos_token_id = tokenizer, end
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        named = (tokenizer.token_to_id(text) for text in tokenizer.control_tokens)
        self.special_token_ids = sorted({id for id in named if id is not None})

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_special_tokens=False, parse_special=False)


class _Matched:
    """A guide by a matcher of llguidance; raises UsageError if the grammar allows no next token."""

    def __init__(self, matcher: Any, vocab: int):
        self._matcher, self._vocab = matcher, vocab

    def allowed(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little")[: self._vocab].astype(bool)

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UsageError(
                "the grammar cannot be followed, as no token may come next; a schema in it may refer to itself alone"
            )


def _words(error: str) -> str:
    """Put an error of llguidance into one sentence, without the grammar, pattern or state that it shows."""
    shown = SCHEMA_ERROR.sub("", SHOWN.split(error, maxsplit=1)[0])
    first, _, rest = shown.strip().partition("\n")
    what = rest.rpartition("error: ")[2] if "error: " in rest else rest
    return " ".join(f"{first} {what}".partition(". ")[0].replace("json-schema:///", "").split())[:300]


def json_rule(name: str, schema: Any, owner: str, lenient: bool = False) -> str:
    """Return a rule of a Lark grammar for JSON of a schema, as `closed` and `bounded` return it.

    owner    owner of the schema, in words, for errors
    lenient  leave out keywords that llguidance does not know
    """
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient}
    described = bounded(closed(schema)) if isinstance(schema, Mapping) else ({} if schema is True else {"not": {}})
    return f"{name}: %json {json.dumps(described | {OF: owner, GUIDANCE: options})}\n"


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Forbid other properties in objects whose schema names properties, unless it has a keyword about others.

    A weak model would otherwise add properties to the end of the context; llama.cpp, and vLLM by xgrammar, close
    objects too. A schema whose parts describe one object together, such as an allOf, is returned as it is.
    """
    return dict(schema) if _is_combined(schema) else _closed(schema)


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """Test whether any part of a schema applies several schemas to the same value."""
    applied = sum(
        len(schema[key]) if key == "allOf" and isinstance(schema[key], list) else 1
        for key in COMBINING
        if schema.get(key)
    )
    together = applied > 1 or (applied == 1 and "properties" in schema)
    return together or any(_is_combined(part) for _, part in _parts(schema))


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = _mapped(schema, _closed)
    named, required = schema.get("properties"), schema.get("required", [])
    if isinstance(named, Mapping) and named and not OPENING & schema.keys():
        can_close = isinstance(required, list) and all(key in named for key in required if isinstance(key, str))
        found |= {"additionalProperties": False} if can_close else {}
    return found


def bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema in which integers without bounds have at most 19 digits.

    A weak model would otherwise write digits to the end of the context; llama.cpp bounds them too. A schema whose parts
    describe one value together is returned as it is.
    """
    return dict(schema) if _is_combined(schema) else _bounded(schema)


def _bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = _mapped(schema, _bounded)
    kinds = schema.get("type")
    if kinds != "integer" and not (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds):
        return found
    low, high = ({*ends} & schema.keys() for ends in BOUNDS)
    if LISTING & schema.keys() or any(abs(_number(schema[key])) >= MOST_INTEGER for key in low | high):
        return found
    return found | ({} if low else {"minimum": -MOST_INTEGER}) | ({} if high else {"maximum": MOST_INTEGER})


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else math.inf


def _mapped(schema: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return the schema with each of the schemas directly inside it changed."""
    found = dict(schema)
    for key in ("$defs", "definitions", "properties"):
        if isinstance(held := schema.get(key), Mapping):
            found[key] = {name: change(part) if isinstance(part, Mapping) else part for name, part in held.items()}
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(held := schema.get(key), list):
            found[key] = [change(part) if isinstance(part, Mapping) else part for part in held]
    if isinstance(items := schema.get("items"), Mapping):
        found["items"] = change(items)
    return found

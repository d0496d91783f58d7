"""Guides that follow a grammar: JSON of a schema, tool calls in a model's own syntax. llguidance keeps the state."""

import json
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from common.errors import BimetalError, UsageError
from common.guide import Guide
from common.tokenizer import Tokenizer

# White space of JSON is bounded: a model that writes nonsense would else write spaces to the end of the context.
WHITE_SPACE = r"\n[ ]{0,24}|[ ]{1,2}"


class Grammars:
    """Makes guides for one tokenizer; what llguidance needs of it is found at the first use.

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

        grammar  in llguidance's Lark dialect. Raises UsageError in its own words where it is none.
        """
        llguidance = _llguidance()
        with self._lock:
            known = self._known
        try:
            matcher = llguidance.LLMatcher(known, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
        except Exception as error:
            raise UsageError(f"the grammar is refused: {error}") from None
        if matcher.is_error():
            raise UsageError(f"the grammar is not supported: {_words(matcher.get_error())}")
        _Matched(matcher.deep_copy(), self._vocab).allowed()  # a schema that is a reference to itself fails only here
        return lambda: _Matched(matcher.deep_copy(), self._vocab)


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
    """A guide by a matcher of llguidance; raises UsageError where the grammar leads to a place without a next token."""

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
            why = _words(self._matcher.get_error())
            raise UsageError(f"the grammar cannot be followed, as no token may come next: {why}")


def _words(error: str) -> str:
    """Put an error of llguidance into one line, without the state that it shows."""
    return " ".join(error.partition("<state>")[0].split())[:300]


def json_rule(name: str, schema: Any, lenient: bool = False) -> str:
    """A rule of a Lark grammar for JSON of a schema; `lenient` leaves out keywords that llguidance does not know."""
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient}
    described = dict(schema) if isinstance(schema, Mapping) else ({} if schema is True else {"not": {}})
    return f"{name}: %json {json.dumps(described | {'x-guidance': options})}\n"

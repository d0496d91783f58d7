"""Read the fields of a request: each is accepted by a rule, or refused by its name."""

from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Any

from common import rules
from common.errors import UsageError
from common.options import ChatOptions
from common.rules import Rule
from generate.server.errors import ApiError

OPTION_RULES: dict[str, Rule] = {f.name: f.metadata["rule"] for f in fields_of(ChatOptions)}
EXACT = 2.0**53  # floats beyond are not exact integers
MOST_STOPS, MOST_STOP_LENGTH = 64, 4096


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value


TEXT, OBJECT, LIST = Rule("text", _text), Rule("an object", _object), Rule("a list", _list)
FLAG = Rule("true or false", rules.FLAG.convert)  # as JSON writes them
TEXT_OR_LIST = Rule("text or a list", _list)  # of an entry that is not text
WHOLE = rules.whole(-(2**63), 2**64 - 1)


LIKELIEST = {"top_p": 0, "min_p": 1}  # the ends of the APIs' ranges, which keep only the most probable token
# Features of other servers that this one lacks, and the values that request nothing.
NOT_SAMPLED: dict[str, tuple[Any, ...]] = {
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "typical_p": (0, 1),
    "top_n_sigma": (0, -1),
    "use_beam_search": (0,),
    "allowed_token_ids": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (0,),
    "chat_template": ("",),
    "documents": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
}


class Fields:
    """The entries of an object in a request; null counts as absent.

    where  the object's own name, for messages: "response_format"
    """

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        self.values, self.where = values, where

    def name(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def refuse(self, key: str, words: str) -> ApiError:
        """Return an error that names the entry and its value: "KEY is VALUE; WORDS"."""
        name = self.name(key)
        return ApiError(400, f"{name} is {self.values.get(key)!r:.80}; {words}", param=name)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def take(self, key: str, rule: Rule, default: Any = None) -> Any:
        """Return an entry in plain types, `default` where it is absent; raises ApiError."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:
            value = int(value)  # JSON has one kind of number
        try:
            return rule.accept(self.name(key), value)
        except UsageError as error:
            raise ApiError(400, str(error), param=self.name(key)) from None

    def need(self, key: str, rule: Rule) -> Any:
        """Return an entry that has to be given."""
        if not self.has(key):
            raise ApiError(400, f"{self.name(key)} is missing; it must be {rule.words}", param=self.name(key))
        return self.take(key, rule)

    def text(self, key: str, default: Any = None) -> Any:
        return self.take(key, TEXT, default)

    def flag(self, key: str, default: bool | None = None) -> Any:
        return self.take(key, FLAG, default)

    def choice(self, key: str, *names: str, default: Any = None) -> Any:
        return self.take(key, rules.one_of(*names), default)

    def object(self, key: str) -> "Fields | None":
        value = self.take(key, OBJECT)
        return None if value is None else Fields(value, self.name(key))

    def objects(self, key: str, max_entries: int, rule: Rule = LIST) -> list["Fields"]:
        """Return a list of objects, none where it is absent."""
        found = self.take(key, rule, [])
        if len(found) > max_entries:
            raise ApiError(
                400, f"{self.name(key)} has {len(found)} entries; at most {max_entries} are supported", param=key
            )
        return [self.item(key, at, item) for at, item in enumerate(found)]

    def item(self, key: str, index: int, value: Any) -> "Fields":
        name = f"{self.name(key)}[{index}]"
        if not isinstance(value, dict):
            raise ApiError(400, f"{name} is {value!r:.80}; it must be an object", param=name)
        return Fields(value, name)

    def option(self, options: dict[str, Any], option: str, *keys: str) -> None:
        """Copy the first given of the entries `keys` to options of generation, under the option's own name."""
        for key in keys or (option,):
            value = self.take(key, OPTION_RULES[option])
            if value is not None:
                options[option] = value
                return


def sampling(fields: Fields) -> dict[str, Any]:
    """Return the sampling options of a request, under any of the names that clients give them.

    Raises ApiError also for samplers of other servers that this one lacks.
    """
    for key, neutral in NOT_SAMPLED.items():
        if fields.has(key) and fields.values[key] not in neutral:
            raise fields.refuse(key, "it is not supported; leave it out")
    found: dict[str, Any] = {}
    given = fields.values
    likeliest = [key for key, edge in LIKELIEST.items() if type(given.get(key)) in (int, float) and given[key] == edge]
    for option in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"):
        if option not in likeliest:
            fields.option(found, option)
    fields.option(found, "repetition_penalty", "repetition_penalty", "repeat_penalty")
    if (top_k := fields.take("top_k", rules.whole(-1))) is not None:
        found["top_k"] = max(top_k, 0)  # -1 keeps all, as in vLLM
    if likeliest:
        found["top_k"] = 1
    if (seed := fields.take("seed", WHOLE)) is not None:
        found["seed"] = None if seed == -1 else seed % 2**64  # -1 is a new one, as in vLLM, also if the server has one
    return found


def limit(fields: Fields, *keys: str, minimum: int = 1) -> dict[str, int | None]:
    """Return the option `max_tokens`, from the first given of the entries `keys`; none where none is given.

    -1 and -2 are no limit but the context, as in llama.cpp and Ollama: None, also if the server has a limit.
    """
    key = next((key for key in keys if fields.has(key)), None)
    if key is None:
        return {}
    words = f"-1, for no limit, or a whole number of at least {minimum}"
    most: int = fields.take(key, Rule(words, rules.whole(-2).convert))
    if 0 <= most < minimum:
        raise fields.refuse(key, f"it must be {words}")
    return {"max_tokens": None if most < 0 else most}


def priority(fields: Fields) -> dict[str, int]:
    """Read the priority of a request: as in vLLM, replies with lower numbers begin first."""
    lower = fields.take("priority", OPTION_RULES["priority"])
    return {"priority": -lower} if lower else {}


def stops(fields: Fields, key: str) -> dict[str, Any]:
    """Return the stop strings of a request."""
    found = fields.take(key, OPTION_RULES["stop"], ())
    if len(found) > MOST_STOPS or any(len(text) > MOST_STOP_LENGTH for text in found):
        most = f"at most {MOST_STOPS} strings of {MOST_STOP_LENGTH} characters are supported"
        raise ApiError(400, f"{fields.name(key)} has {len(found)} strings; {most}", param=fields.name(key))
    return {"stop": found} if found else {}

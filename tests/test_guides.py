"""Guided replies: the same text with every decoder, tool calls in each syntax, and reasoning that ends in time."""

import json
from functools import partial

import numpy as np
import pytest
from tiny_chat import write as write_model

import generate
from common.call_grammar import call_rules, reply_grammar
from common.errors import UsageError
from common.grammar import bounded, closed
from common.guide import AfterReasoning, spilling
from common.reply import THINKING
from common.tools import GLM, HERMES, MISTRAL, MISTRAL_LIST, QWEN_XML, find_syntax, read_call

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOOLS = {
    "look_up": {
        "type": "object",
        "properties": {
            "word": {"type": "string", "maxLength": 8},
            "count": {"type": "integer", "maximum": 99, "minimum": 0},
            "kind": {"enum": ["noun", "verb"]},
        },
        "required": ["word", "kind"],
    },
    "now": {},
}


@pytest.fixture(scope="module")
def demo():
    with generate.load("demo", backend="numpy", draft="demo") as llm:
        yield llm


@pytest.fixture(scope="module")
def nonsense(tmp_path_factory):
    """A model with random weights and a token for each byte."""
    with generate.load(write_model(tmp_path_factory.mktemp("model")), backend="numpy", ctx=2048) as llm:
        yield llm


def guide_of(llm, grammar):
    pytest.importorskip("llguidance", reason="the grammar extra is not installed")
    from common.grammar import Grammars

    return Grammars(llm.tokenizer, llm.vocab_size).guide(grammar)


def check(text):
    """The value of JSON that follows SCHEMA."""
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 150
    assert set(value["tags"]) <= {"a", "b"}
    assert len(value["tags"]) <= 3
    return value


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 3},
        pytest.param({"temperature": 0}, marks=pytest.mark.slow),
        pytest.param({"temperature": 1.5, "seed": 4}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.long
def test_the_text_is_the_same_with_every_decoder(demo, sampling):
    guide = guide_of(demo, reply_grammar(SCHEMA, ""))
    plain = demo.generate("person = ", guide=guide, spec="off", **sampling)
    check(plain.text)
    assert plain.finish_reason == "stop"
    for spec, budget in (("lookup", None), ("chain", 7), ("tree", None), ("tree", 7), ("lookup+tree", None)):
        reply = demo.generate("person = ", guide=guide, spec=spec, tree_budget=budget, **sampling)
        assert (reply.text, reply.tokens) == (plain.text, plain.tokens), (spec, budget)


@pytest.mark.parametrize("seed", range(6))
def test_json_of_a_model_that_writes_nonsense_ends(nonsense, seed):
    reply = nonsense.generate(
        "x", guide=guide_of(nonsense, reply_grammar(SCHEMA, "")), temperature=1.0, seed=seed, max_tokens=1500
    )
    assert reply.finish_reason == "stop"
    check(reply.text)
    places = 2 * (2 + 3 * 3 + 3)  # where white space may stand, before and after each token of the text
    assert len(reply.text) < 120 + 25 * places


SYNTAXES = {"hermes": HERMES, "qwen": QWEN_XML, "glm": GLM, "mistral": MISTRAL, "mistral, list": MISTRAL_LIST}


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.few(5)
def test_calls_of_a_model_that_writes_nonsense_are_calls(nonsense, syntax, seed):
    tools = TOOLS if syntax.close else {"look_up": TOOLS["look_up"]}  # the other one may get 1e999, which is no JSON
    rules = call_rules(syntax, tools, nonsense.tokenizer, False)
    options = {"temperature": 1.0, "seed": seed, "max_tokens": 1500}
    reply = nonsense.generate("x", guide=guide_of(nonsense, reply_grammar(None, rules)), **options)
    assert reply.finish_reason == "stop"
    body = reply.text.removeprefix(syntax.open).removesuffix(syntax.close)
    assert len(body) == len(reply.text) - len(syntax.open) - len(syntax.close)
    (body,) = syntax.split(body)
    call = read_call(syntax, body, TOOLS)
    assert call["name"] in TOOLS
    arguments = json.loads(call["arguments"])
    if call["name"] == "look_up":
        assert {"word", "kind"} <= arguments.keys() <= {"word", "kind", "count"}
        assert arguments["kind"] in ("noun", "verb")


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        (POINT, True),
        ({"type": "array", "items": POINT}, True),
        ({"properties": {"p": {"$ref": "#/$defs/point"}}, "required": ["p"], "$defs": {"point": POINT}}, True),
        ({"anyOf": [POINT, {"type": "null"}]}, True),
        ({**POINT, "additionalProperties": True}, False),
        ({**POINT, "additionalProperties": {"type": "integer"}}, False),
        ({**POINT, "required": ["x", "y"]}, False),
        ({"type": "object"}, False),
        ({"allOf": [POINT, {"properties": {"y": {"type": "integer"}}, "required": ["y"]}]}, False),
        ({**POINT, "anyOf": [{"required": ["y"]}, {"required": ["z"]}]}, False),
    ],
)
def test_objects_have_the_properties_that_their_schema_names(schema, is_closed):
    """Every value of a closed schema is one of the schema, and a schema that allows other properties stays open."""
    found = closed(schema)
    jsonschema = pytest.importorskip("jsonschema")
    shapes = ({"x": 1}, {"x": 1, "y": 2}, {"x": 1, "y": "b", "z": 3}, {}, {"x": "a"}, None)
    values = [*shapes, *([shape] for shape in shapes), *({"p": shape} for shape in shapes)]
    before, after = ([jsonschema.Draft202012Validator(s).is_valid(v) for v in values] for s in (schema, found))
    assert all(old or not new for old, new in zip(before, after, strict=True))
    assert any(after)
    assert (before != after) == is_closed


@pytest.mark.parametrize(
    ("schema", "bounds"),
    [
        ({"type": "integer"}, (-(9 * 10**18), 9 * 10**18)),
        ({"type": ["integer", "null"], "minimum": 0}, (0, 9 * 10**18)),
        ({"type": "integer", "exclusiveMaximum": 5}, (-(9 * 10**18), None)),
        ({"type": "integer", "minimum": 1, "maximum": 3}, (1, 3)),
        ({"type": "integer", "minimum": 10**19}, (10**19, None)),
        (
            {"type": "integer", "exclusiveMinimum": True, "minimum": 0},
            (0, 9 * 10**18),
        ),  # an older version of JSON Schema
        ({"type": "integer", "multipleOf": 5}, (None, None)),
        ({"type": "integer", "enum": [10**20]}, (None, None)),
        ({"type": "number"}, (None, None)),
        ({"allOf": [{"type": "integer"}, {"multipleOf": 5}]}, (None, None)),
    ],
)
def test_integers_are_bounded(nonsense, schema, bounds):
    for place in ({"properties": {"a": schema}}, {"items": schema}, {"$defs": {"a": schema}}, {"anyOf": [schema]}):
        found = bounded(place)
        ((key, held),) = found.items()
        part = held[0] if isinstance(held, list) else held.get("a", held)
        assert {**part, "minimum": bounds[0], "maximum": bounds[1]} == {"minimum": None, "maximum": None, **part}
        assert place[key] in (schema, {"a": schema}, [schema])
    if "exclusiveMinimum" not in schema and bounds != (10**19, None):
        guide_of(nonsense, reply_grammar({"type": "object", "properties": {"a": schema}}, ""))


def test_a_model_that_likes_digits_ends_its_integers(nonsense):
    """A model of 135M parameters wrote them until the limit of its reply."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    nine = nonsense.tokenizer.token_to_id("9")
    guide = guide_of(nonsense, reply_grammar(schema, ""))
    reply = nonsense.generate("x", guide=guide, logit_bias={nine: 50.0}, temperature=1.0, seed=1, max_tokens=200)
    assert (reply.finish_reason, json.loads(reply.text)["a"] < 10**19) == ("stop", True)


def test_a_grammar_that_is_none_is_refused(nonsense):
    guide_of(nonsense, reply_grammar({}, ""))
    for schema in ({"type": "frob"}, {"$ref": "http://elsewhere/"}, {"type": "string", "pattern": "(?=a)b"}):
        with pytest.raises(UsageError, match=r"^the JSON schema of the reply is not supported: .*$"):
            guide_of(nonsense, reply_grammar(schema, ""))
    with pytest.raises(UsageError, match="no syntax of tool calls"):
        call_rules(find_syntax("<tool_call> arguments"), {}, nonsense.tokenizer, False)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a/b": {"items": {"type": "frob"}}}}, "at #/properties/a~1b/items: Invalid type: frob"),
        ({"anyOf": [{}, {"if": {"type": "string"}}]}, 'at #/anyOf/1: Unimplemented keys: ["if"]'),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"enum": []}}}, "at #/properties/a: Unsatis"),
        ({"properties": {"a": {"pattern": "("}}}, "at #/properties/a: regex parse error: unclosed group"),
        ({"properties": {"a": {"$ref": "#/b"}}}, "at #/properties/a: Pointer '/b' does not exist"),
    ],
)
def test_a_schema_is_refused_in_one_sentence_with_the_place(nonsense, schema, words):
    """llguidance shows the grammar that we made of it, in several lines."""
    with pytest.raises(UsageError) as refused:
        guide_of(nonsense, reply_grammar(schema, ""))
    assert str(refused.value).startswith(f"the JSON schema of the reply is not supported {words}")
    assert "\n" not in str(refused.value)
    assert "guidance" not in str(refused.value)


@pytest.mark.parametrize(
    ("syntax", "words"),
    [(HERMES, "the tool f is not supported at #/properties/p"), (GLM, "a tool's parameter p is not")],
)
def test_a_schema_of_a_tool_is_refused_by_name(nonsense, syntax, words):
    tool = {"type": "object", "properties": {"p": {"type": "frob"}}}
    with pytest.raises(UsageError, match=f"^the JSON schema of {words}.*: Invalid type: frob$"):
        guide_of(nonsense, reply_grammar(None, call_rules(syntax, {"f": tool}, nonsense.tokenizer, False)))


def test_definitions_that_each_parameter_repeats_are_bounded(nonsense):
    listed = {"$ref": "#/$defs/long"}
    tool = {"properties": {f"p{i}": listed for i in range(900)}, "$defs": {"long": {"enum": ["x" * 10] * 2000}}}
    with pytest.raises(UsageError, match=r"a grammar of \d+ characters; at most 1048576 are read"):
        call_rules(QWEN_XML, {"f": tool}, nonsense.tokenizer, False)


def test_windows_of_wedlm_take_no_guide(tmp_path):
    with generate.load(write_model(tmp_path / "model", masked=True), backend="numpy") as llm:
        guide = guide_of(llm, reply_grammar(SCHEMA, ""))
        with pytest.raises(UsageError, match="choose spec off"):
            llm.generate("x", guide=guide, max_tokens=4)


class Only:
    """A guide that allows one token for ever."""

    def __init__(self, token, vocab):
        self.token, self.vocab, self.heard = token, vocab, []

    def allowed(self):
        mask = np.zeros(self.vocab, bool)
        mask[self.token] = True
        return mask

    def accept(self, token):
        self.heard.append(token)


def tokens_of(llm, text):
    return llm.tokenizer.encode(text, add_special_tokens=False)


def test_reasoning_is_closed_after_its_budget(nonsense):
    for is_open, prompt in ((True, "x"), (False, "x")):
        guide = partial(AfterReasoning, nonsense.tokenizer, nonsense.vocab_size, THINKING, is_open, None, 5, {})
        reply = nonsense.generate(prompt, guide=guide, temperature=0, max_tokens=40)
        free = nonsense.generate(prompt, temperature=0, max_tokens=40)
        if is_open:
            assert reply.text[:5] == free.text[:5]
            assert reply.text[5:].startswith("\n</think>\n\n")
        else:
            assert reply.text == free.text


def test_a_reply_may_open_its_reasoning_itself(nonsense):
    guide = AfterReasoning(nonsense.tokenizer, nonsense.vocab_size, THINKING, False, None, 2, {})
    for token in tokens_of(nonsense, "\n<think>ab"):
        assert guide.allowed() is None
        guide.accept(token)
    forced = []
    while (mask := guide.allowed()) is not None:
        [token] = np.flatnonzero(mask)
        forced.append(int(token))
        guide.accept(token)
    assert nonsense.tokenizer.decode(forced) == "\n</think>\n\n"


def test_a_grammar_begins_where_the_reasoning_ends(nonsense):
    only = Only(7, nonsense.vocab_size)
    spills = spilling(nonsense.tokenizer, THINKING.closing)
    guide = AfterReasoning(nonsense.tokenizer, nonsense.vocab_size, THINKING, True, lambda: only, None, spills)
    for token in tokens_of(nonsense, "so < it </thin and </think>"):
        mask = guide.allowed()
        assert mask[token]
        assert not mask[list(nonsense.tokenizer.end_ids)].any()
        guide.accept(token)
    assert np.flatnonzero(guide.allowed()).tolist() == [7]
    guide.accept(7)
    assert only.heard == [7]


def test_no_token_closes_the_reasoning_and_begins_the_reply(demo):
    spills, inner = spilling(demo.tokenizer, THINKING.closing), partial(Only, 7, demo.vocab_size)
    guide = AfterReasoning(demo.tokenizer, demo.vocab_size, THINKING, True, inner, None, spills)
    for token in tokens_of(demo, "so </think"):
        guide.accept(token)
    mask, texts = guide.allowed(), [demo.tokenizer.token_bytes(id) for id in range(demo.tokenizer.vocab_size)]
    begin = [id for id, text in enumerate(texts) if text.startswith(b">") and text[1:].strip()]
    assert begin
    assert not mask[begin].any()
    assert mask[demo.tokenizer.token_to_id(">")]

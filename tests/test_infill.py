"""Prompts with a gap, and the tokens that mark it."""

import asyncio

import pytest
import tiny_chat
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

import generate
from common.errors import BimetalError, PromptTooLongError, UsageError
from common.fim import FimTokens
from common.gguf_tokenizer import from_gguf
from common.infill import Gap, certain, gap_prompt
from common.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_chat.write(tmp_path_factory.mktemp("fim"), fim=tiny_chat.FIM, context=4096)
    with generate.load(folder, backend="numpy") as llm:
        yield llm


def ids(llm, *parts):
    """Ids of texts and of control tokens, each a part."""
    encode = llm.tokenizer.encode_plain
    return [id for part in parts for id in ([llm.tokenizer.token_to_id(part)] if part[0] == "<" else encode(part))]


def test_the_suffix_of_a_call_makes_a_gap(llm):
    expected = ids(llm, "<|fim_prefix|>", "def f(", "<|fim_suffix|>", "): pass", "<|fim_middle|>")
    assert llm.prepare(Gap("def f(", "): pass")).tokens == expected
    options = {"temperature": 0, "max_tokens": 12}
    reply = llm.generate("def f(", suffix="): pass", **options)
    assert reply.stats.prompt_tokens == len(expected)
    assert reply.text == llm.generate(expected, **options).text
    assert reply.text == llm.generate(Gap("def f(", "): pass"), **options).text
    assert reply.text == "".join(piece.text for piece in llm.stream("def f(", suffix="): pass", **options))
    assert reply.text == asyncio.run(llm.agenerate("def f(", suffix="): pass", **options)).text
    assert [reply.text] * 2 == [each.text for each in llm.generate(["def f("] * 2, suffix="): pass", **options)]
    assert llm.prepare(Gap("a", "")).tokens == ids(llm, "<|fim_prefix|>", "a", "<|fim_suffix|>", "<|fim_middle|>")


def test_other_files_come_first(llm):
    expected = ids(llm, "<|repo_name|>", "myproject\n", "<|file_sep|>", "b.py\n", "y\n", "<|file_sep|>", "filename\n")
    expected += ids(llm, "<|fim_prefix|>", "x\n", "re", "<|fim_suffix|>", "z", "<|fim_middle|>")
    assert llm.prepare(Gap("x\n", "z", "re", [("b.py", "y\n")])).tokens == expected


def test_control_tokens_in_the_texts_are_text(llm):
    spelled = "<|fim_suffix|><|im_end|><|file_sep|>"
    tokens = llm.prepare(Gap(spelled, spelled, spelled, [(spelled, spelled)])).tokens
    control = [id for id in tokens if id in llm.tokenizer.control_ids]
    layout = ["repo_name", "file_sep", "file_sep", "fim_prefix", "fim_suffix", "fim_middle"]
    assert control == ids(llm, *(f"<|{name}|>" for name in layout))
    assert llm.tokenizer.decode(tokens).count(spelled) == 5


@pytest.mark.parametrize("context", [64, 256, 1000, 2048, 4096, 9000])
@pytest.mark.parametrize("reserved", [1, 128, 4096])
def test_a_cut_prompt_leaves_room_for_the_reply(llm, context, reserved):
    gap = Gap("x" * 9000, "y" * 9000, "", [("a.py", "z" * 9000)], reserved)
    tokens, turns = gap_prompt(llm.tokenizer, gap, context)
    assert len(tokens) <= context - min(2 * reserved, context // 2) + 3
    text = llm.tokenizer.decode(tokens)
    assert text.count("x") > 2 * text.count("y") > 0
    assert turns.shared == tokens.index(llm.tokenizer.fim.suffix)


def test_a_gap_alone_is_not_cut(llm):
    with pytest.raises(PromptTooLongError):
        llm.generate("x" * 4095, suffix="y")


def test_refusals(llm, tmp_path):
    with pytest.raises(UsageError, match="suffix goes with a prompt of text or token ids"):
        llm.generate(Gap("a", "b"), suffix="c")
    with pytest.raises(UsageError, match="suffix is 5; it must be text"):
        llm.generate("a", suffix=5)
    with pytest.raises(TypeError, match=r"chat\(\) has no option suffix"):
        llm.chat([{"role": "user", "content": "a"}], suffix="b")
    with generate.load(tiny_chat.write(tmp_path), backend="numpy") as other:
        with pytest.raises(UsageError, match=r"lacks <\|fim_prefix\|>, <\|fim_suffix\|>, <\|fim_middle\|>"):
            other.generate("a", suffix="b")
        assert other.tokenizer.fim.ids == frozenset()


def test_drafts_give_the_text_of_plain_decoding_with_the_sampler():
    with generate.load("demo", backend="numpy", draft="demo") as pair:
        options = {"reweigh": certain(pair.tokenizer), "seed": 3, "top_k": 40, "top_p": 0.9, "max_tokens": 24}
        for temperature in (0, 0.9):
            texts = {
                pair.generate("class Stack:\n", spec=spec, temperature=temperature, **options).text
                for spec in ("off", "tree", "lookup")
            }
            assert len(texts) == 1


def test_an_error_of_the_sampler_ends_its_reply_alone(llm):
    def broken(weights):
        raise ZeroDivisionError("a")

    with pytest.raises(BimetalError, match="ZeroDivisionError"):
        llm.generate("a", reweigh=broken, max_tokens=2)
    assert llm.generate("a", max_tokens=2).finish_reason == "length"


@pytest.mark.parametrize(
    ("reweigh", "words"),
    [
        (lambda weights: weights[:3], "it must return an array of uint64"),
        (lambda weights: weights.astype(float), "it must return an array of uint64"),
        (lambda weights: None, "reweigh returned None"),
        (lambda weights: 0 * weights, "at least one token must have a weight"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_cannot_be(temperature, reweigh, words):
    with generate.load("demo", ctx=64) as llm, pytest.raises(UsageError, match=words):
        llm.generate("a", reweigh=reweigh, temperature=temperature, max_tokens=2)


def test_ids_of_the_files_metadata_come_first():
    tokens = ["<|endoftext|>", "a", "b", "<PRE>", "<SUF>", "<MID>", "<x>", "<y>", "<z>", "<r>"]
    config = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 1, 1, *[3] * 7],
        "tokenizer.ggml.merges": [],
    }
    backend, rest = from_gguf(config)
    assert Tokenizer(backend, **rest).fim == FimTokens(3, 4, 5)
    backend, rest = from_gguf(
        config
        | {"tokenizer.ggml.fim_pre_token_id": 6, "tokenizer.ggml.suffix_token_id": 7}
        | {"tokenizer.ggml.fim_mid_token_id": 8, "tokenizer.ggml.fim_rep_token_id": 9}
    )
    assert Tokenizer(backend, **rest).fim == FimTokens(6, 7, 8, repo=9)


def test_a_prompt_with_bos_has_it_before_the_prefix():
    """As in llama.cpp, after the other files."""
    vocabulary = {token: id for id, token in enumerate(["<s>", *tiny_chat.FIM[:3], "a", "b", "Ċ", "-", "Ġ", *"snipet"])}
    backend = Backend(models.BPE(vocabulary, []))
    backend.add_special_tokens(["<s>", *tiny_chat.FIM[:3]])
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, prefix=[0], bos_id=0)
    assert gap_prompt(tokenizer, Gap("a", "b"), 99)[0] == [0, 1, 4, 2, 5, 3]
    tokens = gap_prompt(tokenizer, Gap("a", "b", "", [("", "a")]), 9999)[0]
    assert tokens[-7:] == [4, 0, 1, 4, 2, 5, 3]

"""The WeDLM of the package: it answers its tasks, several tokens per forward, and verified text is plain text."""

import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import tiny

import generate
from common.checkpoint import open_checkpoint
from common.decode.alone import run_alone
from common.decode.run import DecoderRun
from common.decoders import Speculation, WedlmOptions
from common.demo import demo_path
from common.errors import BimetalError
from common.kv_formats import FORMATS
from common.models import load_model
from common.models.llama import read_config
from common.reference import NumpyOps
from common.sampling import Sampler, Sampling
from common.step import Step

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/train"))
import wedlm_tasks


@pytest.fixture(scope="module")
def llm():
    with generate.load("demo-wedlm", backend="numpy") as llm:
        yield llm


@pytest.mark.parametrize("task", wedlm_tasks.TASKS)
def test_held_out_questions(task, llm):
    for question, answer in wedlm_tasks.held_out(task)[:2]:
        for options in ({}, {"wedlm_verify": True}):
            reply = llm.generate(question, max_tokens=80, **options)
            assert (reply.text, reply.finish_reason) == (answer, "stop")
            assert reply.stats.wedlm.tokens_per_forward > 3


def score(llm, task, count, **options):
    """Share of right answers, and tokens per forward that filled a position."""
    right = tokens = fills = 0
    for question, answer in wedlm_tasks.held_out(task)[:count]:
        reply = llm.generate(question, max_tokens=80, **options)
        right += reply.text == answer
        tokens += reply.stats.new_tokens
        fills += reply.stats.wedlm.fills if reply.stats.wedlm else reply.stats.new_tokens
    return right / count, tokens / fills


@pytest.mark.slow
@pytest.mark.parametrize("task", wedlm_tasks.TASKS)
def test_accuracy_on_held_out_questions(task, llm):
    """`balanced` gives 3 tokens per forward and loses at most 2 points; verified text gives 2 and loses nothing."""
    verify = {"wedlm_verify": True, "wedlm_window": 16, "wedlm_tau": 1}
    assert score(llm, task, 20, **verify)[0] == score(llm, task, 20, spec="off")[0]  # as every text is plain decoding's
    verified, confirmed = score(llm, task, 200, **verify)
    balanced, filled = score(llm, task, 200, wedlm_preset="balanced")
    assert verified > 0.95
    assert confirmed >= 2
    assert balanced >= verified - 0.02
    assert filled >= 3


@pytest.mark.parametrize("order", ["streaming", "paper"])
def test_a_confirmed_token_has_the_log_probability_of_the_row_that_confirmed_it(order, llm):
    """It was that of the mask that had predicted the token."""
    chat = [{"role": "user", "content": "What is 77 + 15?"}]
    plain = llm.chat(chat, max_tokens=20, logprobs=2, spec="off")
    checked = llm.chat(chat, max_tokens=20, logprobs=2, wedlm_sure=0, wedlm_order=order)
    assert plain.tokens == checked.tokens
    for expected, given in zip(plain.logprobs, checked.logprobs, strict=True):
        assert given.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_ends(llm, monkeypatch):
    """An end token that is filled after a mask ends nothing until all before it are filled; limits cut a run."""
    question = wedlm_tasks.held_out("counting")[1][0]
    whole = llm.generate(question, max_tokens=24, spec="wedlm").tokens
    for count in range(1, len(whole), 4):
        assert llm.generate(question, max_tokens=count).tokens == whole[:count]
    for end in set(whole):
        monkeypatch.setattr(llm.tokenizer, "end_ids", frozenset({end}))
        reply = llm.generate(question, max_tokens=24)
        assert (reply.tokens, reply.finish_reason) == (whole[: whole.index(end)], "stop")


def test_the_template_asks_a_question(llm):
    reply = llm.chat([{"role": "user", "content": "Count by 2 from 11 to 19."}])
    assert reply.text == "Answer: 11, 13, 15, 17, 19.\n"


@pytest.mark.parametrize(
    "cache",
    [
        {"kv": "q8"},
        {"cache_type_k": "q4_0", "cache_type_v": "q4_0"},
        {"max_kv_size": 32},
        *(pytest.param({"cache_type_k": f, "cache_type_v": f}, marks=pytest.mark.slow) for f in FORMATS),
    ],
)
@pytest.mark.few(1)
def test_caches_that_lose(cache):
    """Committed rows alone are encoded or evicted: the verified text is plain decoding's over the same cache."""
    question = wedlm_tasks.held_out("counting")[0][0]
    with generate.load("demo-wedlm", backend="numpy", **cache) as llm:
        plain = llm.generate(question, max_tokens=60, spec="off")
        assert llm.generate(question, max_tokens=60, wedlm_verify=True).tokens == plain.tokens


def test_the_mask_of_a_gguf():
    checkpoint = open_checkpoint(demo_path("demo-wedlm"))
    assert read_config(checkpoint).mask_id == 1
    for wrong in (None, 640, -1, "1"):
        checkpoint.config["tokenizer.ggml.mask_token_id"] = wrong
        with pytest.raises(BimetalError, match=f"mask_token_id is {wrong}; the vocabulary has 640 tokens"):
            read_config(checkpoint)


def verified_is_plain(model, prompts, count, settings):
    for prompt in prompts:
        replies = []
        for options in (None, *settings):
            state = model.new_state(len(prompt) + count)
            last = slice(len(prompt) - 1, len(prompt))
            logits = model.forward(state, Step.chain(np.array(prompt, np.int32), 0), last)
            state.commit(np.arange(len(prompt)))
            sampler = Sampler(Sampling())
            if options is None:
                tokens = run_alone(DecoderRun(model, state, logits, sampler))
            else:
                tokens = run_alone(
                    DecoderRun(model, state, logits, sampler, prompt, Speculation("wedlm", wedlm=options))
                )
            with closing(tokens):
                replies.append([token for token, _ in islice(tokens, count)])
        assert all(reply == replies[0] for reply in replies), prompt


def prompts_of(model, count):
    random = np.random.default_rng(5)
    return [random.integers(2, min(model.config.vocab, 500), random.integers(1, 40)).tolist() for _ in range(count)]


def questions(llm, count):
    texts = [question for task in wedlm_tasks.TASKS for question, _ in wedlm_tasks.held_out(task)[:count]]
    return [llm.tokenizer.encode(text) for text in texts][:count]


VERIFIED = [WedlmOptions(16, 1.0, verify=True), WedlmOptions(5, 100.0, verify=True)]
OTHERS = [WedlmOptions(1, 1.0, verify=True), WedlmOptions(68, 0.3, verify=True), WedlmOptions(8, 0.0, verify=True)]
OTHERS.append(WedlmOptions(16, 2.0, 0.0, sure=0.0))  # every fill but the first mask's is confirmed


def test_verified_text_at_every_setting(llm):
    """The smallest and the largest window; drafts that hold nothing, and all that the masks predict."""
    model = load_model(demo_path("demo-wedlm"), NumpyOps())
    verified_is_plain(model, [questions(llm, 2)[1], *prompts_of(model, 1)], 12, [*VERIFIED, *OTHERS])


@pytest.mark.slow
@pytest.mark.parametrize("options", VERIFIED)
def test_verified_text_of_fifty_prompts(options, llm):
    """256 tokens each, past the ends of replies, of questions and of noise."""
    model = load_model(demo_path("demo-wedlm"), NumpyOps())
    verified_is_plain(model, [*questions(llm, 25), *prompts_of(model, 25)], 256, [options])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [*VERIFIED, *OTHERS])
def test_verified_text_of_fifty_prompts_on_cuda(options, llm):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuda_backend.ops import CudaOps

    model = load_model(demo_path("demo-wedlm"), CudaOps())
    verified_is_plain(model, [*questions(llm, 25), *prompts_of(model, 25)], 256, [options])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_verified_text_of_random_models(name, monkeypatch):
    """Any causal model: a mask row that nobody trained drafts badly, and the text is plain decoding's all the same."""
    model = tiny.load(name, NumpyOps())
    object.__setattr__(model.config, "mask_id", 90)
    settings = [WedlmOptions(16, 1.0, verify=True), WedlmOptions(5, 100.0, verify=True)]
    verified_is_plain(model, [[t % 90 for t in prompt] for prompt in prompts_of(model, 50)], 256, settings)

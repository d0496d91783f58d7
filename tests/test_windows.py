"""WeDLM decoding for users: options, sessions, stops, statistics, and refusals."""

import json
import threading

import numpy as np
import pytest
import tiny_chat

import generate
from common.checks import speculation_of
from common.decoders import PRESETS, WedlmOptions
from common.engine import Engine
from common.errors import UsageError
from common.options import GenerationOptions
from generate.__main__ import main
from generate.server.events import Usage
from generate.server.wire import dumps, timings

MESSAGES = [{"role": "user", "content": "hello"}]
LOOSE = {"wedlm_tau": 3.9, "wedlm_lambda": 0.02, "wedlm_window": 6}  # fills several masks of a random model at once


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_chat.write(tmp_path_factory.mktemp("tiny") / "wedlm", masked=True)


@pytest.fixture(scope="module")
def llm(folder):
    with generate.load(str(folder), backend="numpy") as llm:
        yield llm


def test_it_is_chosen_for_a_model_with_a_mask(llm):
    reply = llm.generate("hello", max_tokens=20, **LOOSE)
    assert reply.stats.accepted is None
    assert reply.stats.wedlm.tokens >= 20
    assert reply.stats.wedlm.fills < 20
    assert reply.tokens == llm.generate("hello", max_tokens=20, spec="wedlm", **LOOSE).tokens
    assert llm.generate("hello", max_tokens=20, spec="off").stats.wedlm is None


def test_presets_and_what_replaces_them():
    def chosen(**options):
        return speculation_of(GenerationOptions(**options), "wedlm").wedlm

    assert chosen() == chosen(wedlm_preset="balanced") == WedlmOptions(8, 0.4, 0.05)
    assert chosen(wedlm_preset="fast") == PRESETS["fast"] == WedlmOptions(16, 0.6, 0.02)
    assert chosen(wedlm_preset="quality", wedlm_tau=0) == WedlmOptions(10, 0.0, 0.02)
    assert chosen(wedlm_preset="checked") == WedlmOptions(16, 0.6, 0.02, sure=0.1)
    assert chosen(wedlm_preset="checked", wedlm_sure=1).sure == 1
    whole = {"wedlm_window": 3, "wedlm_tau": 1, "wedlm_lambda": 0, "wedlm_order": "paper", "wedlm_verify": True}
    assert chosen(**whole) == WedlmOptions(3, 1.0, 0.0, True, "paper")


@pytest.mark.parametrize("given", [None, False, True])
def test_an_explicit_verify_replaces_that_of_the_model(given):
    for loaded in (False, True):
        chosen = speculation_of(GenerationOptions(wedlm_verify=given), "wedlm", WedlmOptions(verify=loaded))
        assert chosen.wedlm.verify == (loaded if given is None else given)
    assert speculation_of(GenerationOptions(wedlm_verify=False), "off").kind == "off"


def test_one_token_per_step_from_left_to_right_is_any_windows_end(llm):
    """A great lambda fills the first mask alone, whatever the window."""
    texts = [llm.generate("hello", max_tokens=12, wedlm_tau=0, wedlm_lambda=50, wedlm_window=w) for w in (1, 2, 9)]
    assert [text.stats.wedlm.fills for text in texts] == [12] * 3
    assert texts[0].tokens == llm.generate("hello", max_tokens=12, wedlm_window=1).tokens


CHECKED = LOOSE | {"wedlm_sure": 3.5}


@pytest.mark.parametrize("options", [LOOSE, LOOSE | {"wedlm_order": "paper"}, {"wedlm_verify": True} | LOOSE, CHECKED])
def test_ends_within_a_window(llm, options, monkeypatch):
    """Stop strings, end tokens and max_tokens cut what a step yields; nothing follows."""
    whole = llm.generate("hello", max_tokens=40, **options)
    assert len(whole.tokens) > 12
    for stop in (whole.text[3:5], whole.text[9:11]):
        cut = llm.generate("hello", max_tokens=40, stop=[stop], **options)
        assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    for n in range(1, 9):
        assert llm.generate("hello", max_tokens=n, **options).tokens == whole.tokens[:n]
    for end in dict.fromkeys(whole.tokens[:9]):
        monkeypatch.setattr(llm.tokenizer, "end_ids", {end})
        cut = llm.generate("hello", max_tokens=40, **options)
        assert (cut.tokens, cut.finish_reason) == (whole.tokens[: whole.tokens.index(end)], "stop")


def test_the_context_ends_within_a_window(folder):
    """A window above the context left has as many masks as fit, and the reply fills the context."""
    with generate.load(str(folder), backend="numpy", ctx=20) as small:
        small.tokenizer.end_ids = set()
        for verify in (False, True):
            reply = small.generate("hello", wedlm_window=68, wedlm_tau=9, wedlm_lambda=0, wedlm_verify=verify)
            assert reply.stats.prompt_tokens + len(reply.tokens) in (20, 21)  # the newest need not be read
            assert reply.finish_reason == "length"


def test_verified_text_is_that_of_plain_decoding(llm):
    for prompt in ("hello", "a" * 100, "The end"):
        plain = llm.generate(prompt, max_tokens=60, spec="off", logprobs=1)
        for tau in (0, 3.9, 100):
            reply = llm.generate(prompt, max_tokens=60, wedlm_verify=True, wedlm_tau=tau, logprobs=1)
            assert reply.tokens == plain.tokens
            assert [p.token for p in reply.logprobs] == [p.token for p in plain.logprobs]
            assert np.allclose([p.logprob for p in reply.logprobs], [p.logprob for p in plain.logprobs], atol=1e-4)
            assert reply.stats.wedlm.forwards <= 60


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(LOOSE, marks=pytest.mark.slow),
        pytest.param(LOOSE | {"wedlm_verify": True}, marks=pytest.mark.slow),
        CHECKED,
    ],
)
def test_chats_go_on_from_the_state(folder, options):
    """Text does not depend on what the state holds from before: a regenerated turn, a next turn, a long prompt."""

    def fresh(history):
        with generate.load(str(folder), backend="numpy") as other:
            return other.chat(history, max_tokens=20, **options).text

    with generate.load(str(folder), backend="numpy") as llm:
        history = [{"role": "user", "content": "hello " * 20}]
        for text in ("more", "and more"):
            one = llm.chat(history, max_tokens=20, **options)
            assert one.text == fresh(history)
            assert llm.chat(history, max_tokens=20, **options).text == one.text
            history += [one.message, {"role": "user", "content": text}]
        follow = llm.chat(history, max_tokens=4, **options)
        assert follow.stats.cached_tokens > 100
        assert llm.chat(history, max_tokens=9, spec="off").text == fresh_plain(folder, history)


def fresh_plain(folder, history):
    with generate.load(str(folder), backend="numpy") as other:
        return other.chat(history, max_tokens=9, spec="off").text


def test_where_a_prompt_is_read_changes_nothing(llm):
    """Few tokens are read with the first window; of many all but the last are read before."""
    for length in (1, 2, 129, 130, 131, 140, 200):
        prompt = [2 + i % 200 for i in range(length)]
        options = {"max_tokens": 10, "wedlm_tau": 3.9, "wedlm_lambda": 0.02}
        fused, parts = [], []
        for spec in ("wedlm", "off"):  # after a plain reply the state holds the prompt
            parts.append(llm.generate(prompt, max_tokens=1, spec="off").tokens)
            fused.append(llm.generate(prompt, spec="wedlm", **options).tokens)
            llm.generate([7], max_tokens=1, spec=spec)
        assert fused[0] == fused[1] == llm.generate(prompt, **options).tokens


def test_a_stream_that_is_dropped_leaves_a_good_state(llm):
    for options in (LOOSE, LOOSE | {"wedlm_verify": True}):
        expected = llm.generate("hello", max_tokens=30, **options).tokens
        with llm.stream("hello", max_tokens=40, **options) as stream:
            for _, _piece in zip(range(3), stream, strict=False):
                pass
        assert llm.generate("hello", max_tokens=30, **options).tokens == expected


def test_cancelling(folder):
    from common.models import load_model
    from common.reference import NumpyOps
    from common.tokenizer import load_tokenizer

    session = Engine(load_model(folder, NumpyOps()), load_tokenizer(folder, {}), 128)
    cancel, prompt = threading.Event(), list(range(10, 40))
    pieces = []
    for piece in session.stream(prompt, GenerationOptions(**LOOSE), cancel):
        pieces.append(piece)
        cancel.set()
    assert pieces[-1].finish_reason == "cancelled"
    assert pieces[-1].stats.new_tokens < 20
    assert session.slots[0].tokens[: session.slots[0].state.length] == session.slots[0].committed


def test_log_probabilities_are_of_the_row_that_chose(llm):
    reply = llm.generate("hello", max_tokens=20, logprobs=1, **LOOSE)
    assert [p.top[0][0] for p in reply.logprobs] == reply.tokens


def test_a_seed_gives_the_same_text(llm):
    options = {"max_tokens": 30, "temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1} | LOOSE
    texts = [llm.generate("hello", seed=seed, **options).tokens for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_statistics(llm):
    reply = llm.generate("hello", max_tokens=40, **LOOSE)
    stats = reply.stats.wedlm
    assert 1 < stats.tokens_per_forward <= 40
    assert stats.cache_share == pytest.approx(1 / stats.rows_per_token)
    assert all(seconds > 0 for seconds in stats.seconds.values())
    answered = json.loads(dumps(timings(reply.stats, Usage(5))))["wedlm"]
    assert {"forwards", "tokens_per_forward", "rows_per_token", "p_cache", "forward_ms", "host_ms"} < answered.keys()
    assert answered["tokens_per_forward"] == pytest.approx(stats.tokens_per_forward, abs=1e-4)
    plain = llm.generate("hello", max_tokens=4, spec="off").stats
    assert "wedlm" not in timings(plain, Usage(5))


@pytest.mark.long
def test_the_command_line(folder, capsys):
    base = ["--model", str(folder), "--backend", "numpy", "--prompt", "hi", "-n", "16"]
    assert main([*base, "--spec", "off"]) == 0
    plain = capsys.readouterr().out
    flags = ["--wedlm-window", "5", "--wedlm-tau", "3.9", "--wedlm-lambda", "0.02"]
    assert main([*base, "--spec", "wedlm", *flags, "--wedlm-verify", "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out == plain
    assert "tokens per forward" in err
    assert "p_cache" in err
    assert "ms per forward: forward" in err
    assert main([*base, *flags, "--wedlm-order", "paper"]) == 0
    assert main([*base, "--wedlm-preset", "fast"]) == 0
    capsys.readouterr()
    for bad, words in (
        (["--wedlm-window", "0"], "'0' is not a whole number of at least 1"),
        (["--wedlm-window", "69"], "wedlm_window is 69; it must be a whole number from 1 to 68"),
        (["--wedlm-tau", "nan"], "wedlm_tau is nan; it must be a number of at least 0"),
        (["--wedlm-lambda", "-1"], "wedlm_lambda is -1.0; it must be a finite number of at least 0"),
        (["--wedlm-verify", "--temp", "1"], "wedlm_verify gives the text of greedy decoding"),
        (["--wedlm-preset", "checked", "--temp", "1"], "wedlm_sure 0.1 confirms tokens by greedy decoding"),
        (["--spec", "off", "--wedlm-window", "4"], "wedlm_window is for spec wedlm, and spec is off"),
        (["--tree-budget", "4"], "tree_budget is for spec lookup, chain, tree"),
    ):
        assert main([*base, *bad]) == 2
        assert words in capsys.readouterr().err


def test_a_model_without_a_mask(tmp_path):
    with generate.load(str(tiny_chat.write(tmp_path / "llama")), backend="numpy") as llm:
        assert llm.generate("hello", max_tokens=3).stats.wedlm is None
        for spec in ("wedlm", None):
            with pytest.raises(UsageError, match=r"mask token|wedlm_tau is for spec wedlm"):
                llm.generate("hello", spec=spec, wedlm_tau=0.5)

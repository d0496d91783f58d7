"""Chats over the prefix cache: how much of each turn is read, and that the text is the one of reading it all."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from prefix_states import check
from tiny_chat import write

import generate
from common.demo import demo_path
from common.pieces import Stats
from common.prefix_cache import PrefixCache
from generate.prefixes import Trim, fingerprint, memory_budget
from generate.terminal import figures

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
THINKING = (  # earlier reasoning is left out
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content.split('</think>')[-1] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n<think>\n{% endif %}"
)
TEMPLATES = {"plain": PLAIN, "thinking": THINKING}
LONG_CHATS = (12, 3, "thinking"), (270, 20, "plain"), (270, 20, "thinking")
CODE = "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 2))\n"


def load(template="plain", parallel=1, **options):
    llm = generate.load(str(demo_path()), backend="numpy", parallel=parallel, **options)
    llm.tokenizer.chat_templates["default"] = TEMPLATES[template]
    return llm


def forget(llm):
    """Empty the slots, so that what comes next is in the cache or is read."""
    llm._submit(llm._engine.reset).result()


def opening(topic, repeats):
    system = {"role": "system", "content": f"You complete code about {topic}. " + CODE * repeats}
    return [system, {"role": "user", "content": f"Begin with {topic}."}]


def turn(llm, messages, number):
    """The reply to `messages`, which get it and the next question; how many tokens were read."""
    reply = llm.chat(messages, max_tokens=8, temperature=0, repetition_penalty=1)
    stats = reply.stats
    messages += [
        {"role": "assistant", "content": f"hm {number}</think>{reply.text}" if number % 2 else reply.text},
        {"role": "user", "content": f"And {number}? " + CODE},
    ]
    return reply.text, stats.prompt_tokens - stats.cached_tokens, stats


def texts_without_cache(template, conversations, turns):
    with load(template, cache_memory=0) as llm:
        out = []
        for messages in conversations:
            replies = []
            for number in range(turns):
                forget(llm)
                replies.append(turn(llm, messages, number)[0])
            out.append(replies)
        return out


@pytest.mark.parametrize(
    ("repeats", "turns", "template"),
    [(12, 3, "plain"), *(pytest.param(*of, marks=pytest.mark.slow) for of in LONG_CHATS)],
)
@pytest.mark.long
def test_two_conversations_in_turns_and_a_restart(template, repeats, turns, tmp_path):
    """Each turn reads its own tokens alone; the text is that of a model without a cache."""
    chats = [opening("lists", repeats), opening("graphs", repeats)]
    replies = [[], []]

    def run(llm, numbers, first):
        for number in numbers:
            for chat in range(2):
                text, read, stats = turn(llm, chats[chat], number)
                replies[chat].append(text)
                assert read < 300 or number == first == 0, f"turn {number} of {chat}: {stats}"

    with load(template, cache_dir=tmp_path, ctx=16384) as llm:
        run(llm, range(turns - 1), 0)
        assert check(llm._engine.prefixes) > 0
    with load(template, cache_dir=tmp_path, ctx=16384) as again:
        run(again, [turns - 1], turns - 1)
    if repeats < 20:
        alone = [opening("lists", repeats), opening("graphs", repeats)]
        assert replies == texts_without_cache(template, alone, turns)


@pytest.mark.long
def test_an_agent_that_sends_everything_again():
    """Tool results, a repeated request, a changed last message, and the same system prompt in another conversation."""
    messages = opening("files", 16)
    with load(parallel=None) as llm:
        turn(llm, messages, 0)
        for number in range(1, 4):
            messages += [{"role": "assistant", "content": "call()"}, {"role": "tool", "content": CODE}]
            assert turn(llm, messages, number)[1] < 300
        again = llm.chat(messages, max_tokens=3).stats
        assert again.prompt_tokens - llm.chat(messages, max_tokens=3).stats.cached_tokens < 300
        changed = [*messages[:-1], {"role": "user", "content": "Something else."}]
        stats = llm.chat(changed, max_tokens=3).stats
        assert stats.prompt_tokens - stats.cached_tokens < 300
        assert stats.matched_tokens >= stats.cached_tokens
        other = llm.chat([messages[0], {"role": "user", "content": "Hello!"}], max_tokens=3).stats
        assert other.prompt_tokens - other.cached_tokens < 30


@pytest.mark.parametrize("spec", ["off", pytest.param("lookup", marks=pytest.mark.slow)])
@pytest.mark.long
def test_hits_have_the_bits_of_misses(spec):
    """Logits after a reply that was decoded, kept, restored and continued are those of reading everything."""
    messages = opening("bits", 12)
    with load() as warm, load(cache_memory=0) as cold:
        for number in range(3):
            kept = [dict(message) for message in messages]
            turn(warm, messages, number)
            forget(warm)
            replies = []
            forget(cold)
            for llm in (warm, cold):
                reply = llm.chat([*kept, *messages[len(kept) :]], max_tokens=6, temperature=0, logprobs=3, spec=spec)
                replies.append([(lp.token, lp.logprob, lp.top) for lp in reply.logprobs])
            assert replies[0] == replies[1]


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, (512, 512, 512, 524, 520)),
        ({"cache_type_k": "f16"}, (512, 512, 512, 524, 520)),
        ({"cache_type_k": "f16", "kv_recent": 64}, (0, 0, 0, 0, 0)),
        ({"max_kv_size": 400}, (0, 0, 0, 0, 0)),
    ],
    ids=["native", "packed", "exact rows", "window"],
)
@pytest.mark.few(1)
def test_a_restart_continues_where_two_texts_part(options, lengths, tmp_path):
    """Also from the middle of a longer state, unless it has a part that cannot be cut; with the bits of no cache."""
    folder = write(tmp_path / "model", context=2000)
    random = np.random.default_rng(3)
    ids, short = random.integers(2, 250, (2, 1200)).tolist()
    kept = ids[:900], short[:525]
    prompts = [kept[0], [*ids[:700], *short[:200]], ids, kept[1], [*short[:520], 5, 6]]

    def replies(prompts, **how):
        with generate.load(folder, backend="numpy", **options, **how) as llm:
            for prompt in prompts:
                forget(llm)
                yield llm.generate(prompt, max_tokens=4, temperature=0, logprobs=2)

    list(replies(kept, cache_dir=tmp_path / "states"))
    alone = list(replies(prompts, cache_memory=0))
    for i, length in enumerate(lengths):
        copy = shutil.copytree(tmp_path / "states", tmp_path / f"prompt {i}")
        (reply,) = replies([prompts[i]], cache_dir=copy)
        assert reply.logprobs == alone[i].logprobs
        assert (reply.stats.cached_tokens, reply.stats.matched_tokens) == (length, length)


@pytest.mark.long
def test_branches_of_a_long_text():
    """A text that leaves an earlier one in its middle is read from the last cut; the next such one finds that cut."""
    random = np.random.default_rng(0)
    with load() as llm:
        ids = random.integers(10, 9000, 1100).tolist()
        llm.generate(ids, max_tokens=2)
        forget(llm)
        first = llm.generate([*ids[:1060], *random.integers(10, 9000, 30).tolist()], max_tokens=2).stats
        assert (first.cached_tokens, first.matched_tokens) == (0, 1060)
        forget(llm)
        other = [*ids[:1060], *random.integers(10, 9000, 30).tolist()]
        reply = llm.generate(other, max_tokens=8, temperature=0, logprobs=0)
        assert reply.stats.cached_tokens == 1024
    with load(cache_memory=0) as cold:
        assert cold.generate(other, max_tokens=8, temperature=0, logprobs=0).logprobs == reply.logprobs


def test_the_share_of_memory(monkeypatch):
    choice = generate.llm.LoadOptions()
    monkeypatch.setattr("generate.prefixes.available_bytes", lambda: (10**9, "x"))
    assert memory_budget(choice) == 10**8
    monkeypatch.setattr("generate.prefixes.available_bytes", lambda: (10**12, "x"))
    assert memory_budget(choice) == 8 << 30
    assert memory_budget(replace(choice, cache_memory="1GB")) == 10**9
    assert memory_budget(replace(choice, cache_memory=0)) == 0


def test_memory_is_given_back(monkeypatch):
    trim, calls = Trim(), []
    monkeypatch.setattr(trim, "trim", calls.append)
    for _ in range(5):
        trim([np.empty(0), np.broadcast_to(np.uint8(0), (100 << 20,))])
    assert calls == [0]


def test_figures_name_what_was_not_kept():
    stats = Stats(500, 100, 1, 1.0, 1.0, 0, 0, 0, matched_tokens=400)
    assert "(and 100 kept from before) (400 begin an earlier text; no state was kept after the first 100)" in figures(
        stats
    )
    assert "earlier text" not in figures(replace(stats, matched_tokens=100))


def test_figures_of_a_few_tokens_have_no_speed():
    stats = Stats(500, 0, 4, 1.0, 1.0, 0, 0, 0)
    assert "decode 4 tokens; state 0.0 MiB" in figures(stats)
    assert "decode 5 tokens, 4.0 tok/s, 0.00 GB/s of weights; state" in figures(replace(stats, new_tokens=5))


def test_what_changes_bits_changes_the_fingerprint(tmp_path):
    from common.checkpoint import open_checkpoint
    from common.kv_cache import CacheOptions
    from common.models import load_model
    from common.reference import NumpyOps

    def named(folder, facts=("a card",), **changes):
        checkpoint = open_checkpoint(folder)
        return fingerprint(replace(load_model(checkpoint, NumpyOps()), **changes), [checkpoint], facts)

    one, copy, tuned = (write(tmp_path / name, seed) for name, seed in (("one", 0), ("copy", 0), ("tuned", 1)))
    base = named(one)
    assert len(base) == 32
    assert named(copy) == base
    model = load_model(one, NumpyOps())
    others = [
        named(tuned),
        named(one, ("another card",)),
        named(one, cache=CacheOptions("f16", "f16")),
        named(one, config=replace(model.config, rope=replace(model.config.rope, magnitude=2.0))),
    ]
    assert len({base, *others}) == 5


def test_a_model_without_a_cache():
    with load(cache_memory=0) as llm:
        assert llm._engine.prefixes is None
    with load() as llm:
        assert isinstance(llm._engine.prefixes, PrefixCache)

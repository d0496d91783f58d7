"""Speculative decoding gives the text of plain decoding, whatever is drafted."""

import itertools
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import tiny_draft
from test_plain import prefilled

from common.checks import default_spec
from common.decode import alone as driver
from common.decode import speculative
from common.decode.alone import run_alone
from common.decode.run import DecoderRun, DecodeStats
from common.decode.tuner import Tuner
from common.decoders import DECODERS, Speculation
from common.errors import UsageError
from common.models import Model, dflash
from common.models.dflash import DflashPair
from common.models.drafts import load_pair
from common.reference import NumpyOps
from common.sampling import Sampler, Sampling

PROMPT, NEW = 20, 28
NEAR_TIE = 1e-3  # two float32 ways to the same logits, as in tests/test_state.py
SLOW_VARIANTS = {name: pytest.mark.slow for name in ("llama-untied", "qwen3-yarn", "laguna-m1")}  # on MLX
KINDS = [row.name for row in DECODERS.values() if row.family == "speculative"]


def speculate(model, state, logits, sampler, tokens, options, stats=None):
    return run_alone(DecoderRun(model, state, logits, sampler, tokens, options, stats=stats or DecodeStats()))


def decode(model, prompt, count, speculation=None, capacity=tiny.CAPACITY, accepted=None, **sampling):
    """`count` tokens, the margin of each choice, and the state after the generator is closed."""
    state, logits = prefilled(model, prompt, capacity)
    sampler = Sampler(Sampling(**sampling), prompt)
    if speculation is None:
        tokens = run_alone(DecoderRun(model, state, logits, sampler))
    else:
        tokens = speculate(model, state, logits, sampler, list(prompt), speculation, accepted)
    out, margins = [], []
    for token, row in tokens:
        best = np.sort(model.ops.read(row)[-1])
        out.append(token)
        margins.append(best[-1] - best[-2])
        if len(out) == count:
            break
    tokens.close()
    return out, margins, state


def assert_same(tokens, expected, margins, ops):
    """To the end on NumPy, whose rows do not depend on each other; elsewhere up to the first near-tie."""
    assert len(tokens) == len(expected)
    for token, other, margin in zip(tokens, expected, margins, strict=True):
        if token != other:
            assert ops.name != "numpy"
            assert margin < NEAR_TIE
            return


@pytest.fixture
def prophet(monkeypatch):
    """A draft that knows the text: the token at each position is its first or second candidate, or none."""
    random = np.random.default_rng(1)

    def know(prompt, tokens, vocab, depth=4):
        text = [*prompt, *tokens, *[0] * 20]

        def draft(model, state, request):
            k = request.k
            at = state.length + 1
            ids = np.stack([random.permutation(vocab)[: max(k, 2)] for _ in range(depth)])
            for place, true in enumerate(text[at : at + depth]):
                if random.random() < 0.8 and true not in ids[place]:
                    ids[place, random.integers(min(k, 2))] = true
            return ids[:, :k].astype(np.int32), np.sort(random.uniform(-3, 0, (depth, k)))[:, ::-1]

        monkeypatch.setattr(driver, "drafted", draft)

    return know


def paired(model):
    """The model with a draft whose tokens the test decides."""
    given = {field.name: getattr(model, field.name) for field in fields(Model)}
    config = SimpleNamespace(taps=(0,), block=5, tokens=4, windows=(), layers=0)
    return Drafted(**given, draft=config, draft_weights=SimpleNamespace(layers=[]))


class Drafted(DflashPair):
    def new_state(self, capacity):
        return Model.new_state(self, capacity)

    def _logits(self, state, step, rows):
        return Model._logits(self, state, step, rows)


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen35", kind) for kind in KINDS] + [(m, "lookup+tree") for m in tiny.MODELS if m != "qwen35"]
)
@pytest.mark.few(4)
def test_greedy_equals_plain(name, kind, ops, prophet):
    model = paired(tiny.load(name, ops))
    prompt = tiny.golden(name)["ids"][:PROMPT].tolist()
    expected, margins, _ = decode(model, prompt, NEW)
    prophet(prompt, expected, model.config.vocab)
    for budget, seed_chain in ((None, False), (1, False), (9, True)):
        accepted = DecodeStats()
        speculation = Speculation(kind, budget, seed_chain=seed_chain)
        tokens, _, state = decode(model, prompt, NEW, speculation, accepted=accepted)
        assert_same(tokens, expected, margins, ops)
        assert state.length == PROMPT + NEW - 1  # all but the newest
        assert sum(length * count for length, count in accepted.lengths.items()) == NEW - 1


def test_right_draft_tokens_are_accepted(prophet):
    model = paired(tiny.load("llama", NumpyOps()))
    prompt = tiny.golden("llama")["ids"][:PROMPT].tolist()
    expected, _, _ = decode(model, prompt, NEW)
    prophet(prompt, expected, model.config.vocab)
    accepted = DecodeStats()
    decode(model, prompt, NEW, Speculation("tree", 40), accepted=accepted)
    assert accepted.length > 1.5
    assert accepted.by_position[0] > 0.5
    assert all(a >= b for a, b in zip(accepted.by_position, accepted.by_position[1:], strict=False))
    assert set(accepted.budgets) == {40}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(3)
def test_a_real_draft(kind, ops):
    target = tiny.load("qwen35", ops)
    pair = load_pair(tiny.FOLDER / "dflash", target)
    prompt = tiny.golden("qwen35")["ids"][:PROMPT].tolist()
    expected, margins, _ = decode(target, prompt, NEW)
    tokens, _, state = decode(pair, prompt, NEW, Speculation(kind, 12))
    assert_same(tokens, expected, margins, ops)
    alone, _ = prefilled(pair, [*prompt, *tokens[:-1]])
    for (name, a), b in zip(tiny.arrays_of(pair, state).items(), tiny.arrays_of(pair, alone).values(), strict=True):
        assert np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) < 1e-4, name


@pytest.mark.parametrize("kind", ["off", *KINDS])
@pytest.mark.parametrize("name", ["qwen35", "glm"])
@pytest.mark.few(4)
def test_a_multi_token_prediction_block(name, kind):
    """With a budget left open as well, which switches between plain steps and steps that verify."""
    target = tiny.load(name, NumpyOps())
    pair, prompt = load_pair(tiny.FOLDER / f"mtp-{name}", target), tiny.golden(name)["ids"][:PROMPT].tolist()
    expected, margins, _ = decode(target, prompt, NEW)
    for budget in (3, None) if kind != "off" else (None,):
        tokens, _, state = decode(pair, prompt, NEW, Speculation(kind, budget))
        assert_same(tokens, expected, margins, target.ops)
        alone, _ = prefilled(pair, [*prompt, *tokens[:-1]])
        for (part, a), b in zip(tiny.arrays_of(pair, state).items(), tiny.arrays_of(pair, alone).values(), strict=True):
            assert np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) < 1e-4, part
    assert default_spec(pair) == "chain"


def test_a_multi_token_prediction_block_on_each_backend(ops):
    target = tiny.load("qwen35", ops)
    pair, prompt = load_pair(tiny.FOLDER / "mtp-qwen35", target), tiny.golden("qwen35")["ids"][:PROMPT].tolist()
    expected, margins, _ = decode(target, prompt, 12)
    tokens, _, _ = decode(pair, prompt, 12, Speculation("chain", 2))
    assert_same(tokens, expected, margins, ops)


OTHER_MODELS = [name for name in tiny.MODELS if name != "qwen35"]


@pytest.mark.parametrize(
    ("ops", "kind", "name"),
    [
        *itertools.product(["numpy"], ["chain", "tree", "lookup+tree"], OTHER_MODELS),
        *(pytest.param("mlx", "lookup+tree", name, marks=SLOW_VARIANTS.get(name, ())) for name in OTHER_MODELS),
    ],
    indirect=["ops"],
)
@pytest.mark.few(4)
def test_a_real_draft_for_every_family(name, kind, ops, tmp_path):
    """With a random draft, so that mostly lookups are accepted; features come from the first and the last layer."""
    target = tiny.load(name, ops)
    c, layers = target.config, len(target.layout.layers)
    folder = tiny_draft.write(tmp_path / "draft", c.hidden, c.vocab, layers, [0, layers - 1], laguna="laguna" in name)
    pair, prompt, accepted = load_pair(folder, target), tiny.golden(name)["ids"][:PROMPT].tolist(), DecodeStats()
    expected, margins, _ = decode(target, prompt, NEW)
    tokens, _, state = decode(pair, prompt, NEW, Speculation(kind, 40, top_k=32), accepted=accepted)
    assert_same(tokens, expected, margins, ops)
    assert kind != "lookup+tree" or accepted.length > 1
    alone, _ = prefilled(pair, [*prompt, *tokens[:-1]])
    for (part, a), b in zip(tiny.arrays_of(pair, state).items(), tiny.arrays_of(pair, alone).values(), strict=True):
        assert np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) < 1e-4, part
    assert np.abs(ops.read(pair.propose(state, 5)) - ops.read(pair.propose(alone, 5))).max() < NEAR_TIE


class Script:
    """A tuner that chooses budgets from a list."""

    def __init__(self, budgets):
        self.left, self.recorded = list(budgets), []
        self.sizes = (0, *{size for size in budgets if size})

    def begin(self):
        pass

    def choose(self, most=None):
        return self.left.pop(0)

    def plain_steps(self):
        return 1

    def record(self, size, path, seconds, switched=False, steps=1):
        self.recorded.append((size, switched))


@pytest.mark.parametrize("budget", [None, 5])
def test_decoding_is_plain_while_no_draft_token_may_be_had(budget):
    """As beside many other replies; draft tokens come back with the room for them."""
    model, prompt = tiny.load("llama", NumpyOps()), [5, 6, 7, 8] * 4
    expected, _, _ = decode(model, prompt, 180, capacity=200)
    state, logits = prefilled(model, prompt, 200)
    run = DecoderRun(model, state, logits, Sampler(Sampling()), prompt, Speculation("lookup", budget), most_drafted=0)
    tokens, out = run_alone(run), []
    for token, _ in tokens:
        out.append(token)
        if len(out) == 40:
            assert run.stats.seconds["verify"] == 0
            run.limit_drafts(None)
        if len(out) == 180:
            break
    tokens.close()
    assert out == expected
    assert max(run.stats.budgets) > 0


@pytest.mark.parametrize(
    ("ops", "name", "sampling", "stretch"),
    [
        ("numpy", "laguna", {}, 270),
        pytest.param("mlx", "laguna", {}, 270, marks=pytest.mark.slow),
        *((backend, "qwen35", {"temperature": 1.0, "seed": 3}, 20) for backend in ("numpy", "mlx")),
    ],
    indirect=["ops"],
)
@pytest.mark.few(1)
def test_plain_stretches_leave_the_draft_alone(name, sampling, stretch, ops, tmp_path, monkeypatch):
    """As plain decoding goes; the draft has no rows of a stretch when it is used again."""
    target = tiny.load(name, ops)
    c, layers = target.config, len(target.layout.layers)
    folder = tiny_draft.write(tmp_path / "draft", c.hidden, c.vocab, layers, [0, layers - 1], laguna=name == "laguna")
    pair, prompt, new, reads = load_pair(folder, target), tiny.golden(name)["ids"][:PROMPT].tolist(), stretch + 15, []
    read = dflash.write_context
    monkeypatch.setattr(dflash, "write_context", lambda *args: (reads.append(len(args[4])), read(*args)))
    expected, margins, _ = decode(target, prompt, new, capacity=400, **sampling)
    for first in ([0, 0, 7, 7], [7, 0, 7])[: 1 if stretch > 100 else 2]:
        state, logits = prefilled(pair, prompt, 400)
        reads.clear()
        tuner = Script([*first, *[0] * stretch, *[7] * 60])
        sampler = Sampler(Sampling(**sampling), prompt)
        run = DecoderRun(pair, state, logits, sampler, prompt, Speculation("chain"), tuner)
        tokens = [token for (token, _), _ in zip(run_alone(run), range(new), strict=False)]
        assert_same(tokens, expected, margins, ops)
        assert len(reads) == sum(size > 0 for size, _ in tuner.recorded) + 1 > 2
        assert run.stats.budgets[0] >= stretch
        after_drafts = sum(size == 0 < before for before, size in zip(first, [*first[1:], 0], strict=True))
        assert [switched for size, switched in tuner.recorded if size == 0].count(True) == after_drafts


@pytest.mark.parametrize("kind", ["lookup", "tree"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 4},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 1.2, "repetition_penalty": 1.2, "presence_penalty": 0.5, "seed": 5},
    ],
)
@pytest.mark.few(6)
def test_sampling_with_a_seed_gives_the_same_text(sampling, kind, ops, prophet):
    """One random number per token is used in the order of the text, and penalties count each token as it comes."""
    model = paired(tiny.load("llama", ops))
    prompt = tiny.golden("llama")["ids"][:PROMPT].tolist()
    expected, _, _ = decode(model, prompt, NEW, **sampling)
    prophet(prompt, expected, model.config.vocab)
    accepted = DecodeStats()
    tokens, _, _ = decode(model, prompt, NEW, Speculation(kind, 15), accepted=accepted, **sampling)
    assert tokens == expected
    assert kind == "lookup" or accepted.length > 1.1


class Markov:
    """A model whose next token depends on the last alone, over a vocabulary of five."""

    table = np.log(np.random.default_rng(2).dirichlet(np.full(5, 4), 5)).astype(np.float32)

    def __init__(self):
        self.ops, self.config = NumpyOps(), SimpleNamespace(vocab=5)

    def new_state(self, capacity):
        return self.ops.new_state([], capacity)

    def forward(self, state, step, rows=slice(None)):
        return self.table[step.tokens][rows]


@pytest.mark.parametrize("kind", ["lookup", "tree"])
@pytest.mark.long
def test_chi_square(kind, monkeypatch):
    """6,000 texts of three tokens against their exact probabilities: 124 degrees of freedom, p = 0.001 at 179."""
    monkeypatch.setattr(speculative, "check", lambda *_: None)
    random = np.random.default_rng(0)
    monkeypatch.setattr(
        driver,
        "drafted",
        lambda model, state, request: (
            np.stack([random.permutation(5)[: request.k] for _ in range(3)]),
            np.sort(random.uniform(-3, 0, (3, request.k)))[:, ::-1],
        ),
    )
    model, sampler, counts = Markov(), Sampler(Sampling(temperature=1.0, seed=1)), Counter()
    for _ in range(6000):
        state = model.new_state(10)
        tokens = speculate(model, state, model.table[:1], sampler, [0, 1, 0, 1, 0], Speculation(kind, 6, top_k=3))
        counts[tuple(next(tokens)[0] for _ in range(3))] += 1
        tokens.close()
    p = np.exp(model.table)
    exact = p[0][:, None, None] * p[:, :, None] * p[None] * 6000
    observed = np.array([[[counts[a, b, c] for c in range(5)] for b in range(5)] for a in range(5)])
    assert ((observed - exact) ** 2 / exact).sum() < 179


@pytest.mark.parametrize("kind", ["lookup", "tree"])
@pytest.mark.parametrize("room", [0, 1, 2, 7])
def test_it_ends_where_the_state_is_full(kind, room, ops, prophet):
    model = paired(tiny.load("llama", ops))
    prompt = tiny.golden("llama")["ids"][:PROMPT].tolist()
    expected, _, full = decode(model, prompt, 99, capacity=PROMPT + room)
    prophet(prompt, expected, model.config.vocab)
    tokens, _, state = decode(model, prompt, 99, Speculation(kind, 15), capacity=PROMPT + room)
    assert tokens == expected
    assert len(tokens) == room + 1
    assert state.length == full.length == state.capacity


@pytest.mark.parametrize("count", range(1, 9))
def test_left_after_any_token_the_state_holds_all_but_the_newest(count, prophet):
    model = paired(tiny.load("qwen35", NumpyOps()))
    prompt = tiny.golden("qwen35")["ids"][:PROMPT].tolist()
    expected, _, _ = decode(model, prompt, NEW)
    prophet(prompt, expected, model.config.vocab)
    tokens, _, state = decode(model, prompt, count, Speculation("tree", 30))
    assert state.length == PROMPT + count - 1
    logits = tiny.run(model, state, np.array(tokens[-1:]))
    assert logits[-1].argmax() == expected[count]


def test_the_tuner_finds_the_fastest_size():
    """A step with n draft tokens takes 1 + n / 10, and accepts those within the first 12."""
    tuner, chosen = Tuner((0, 7, 15, 31)), []
    for _ in range(200):
        size = tuner.choose()
        chosen.append(size)
        tuner.record(size, [0, *(node for node in (2, 5, 9, 12) if node <= size)], 1 + size / 10)
    assert chosen[:18] == [7] * 3 + [0] * 3 + [7] * 5 + [15] * 6 + [31]  # upwards, six lengths of each
    assert Counter(chosen[18:]).most_common(1)[0][0] == 15
    assert tuner.lengths[7].value == 3
    assert tuner.plain_seconds == 1


def test_a_tuner_turns_speculation_off_where_it_does_not_pay():
    tuner, chosen = Tuner((0, 7, 15)), []
    for _ in range(100):
        size = tuner.choose()
        chosen.append(size)
        tuner.record(size, [0], 1 + size)
    assert Counter(chosen[9:]).most_common(1)[0][0] == 0


@pytest.mark.parametrize("slow", [{1: 900, 3: 200}, {1: 33, 2: 33, 3: 33}])
def test_a_tuner_comes_back_from_a_busy_machine(slow):
    """Plain steps were slow when they were first tried; sizes beside the best are worse than it."""
    ms, gains = {0: 11, 7: 70, 15: 66, 23: 90}, {0: 1, 7: 3, 15: 4, 23: 4}
    tuner, chosen = Tuner(tuple(ms)), []
    for _ in range(800):
        size = tuner.choose()
        chosen.append(size)
        seconds = slow.get(chosen.count(0), 11) if size == 0 else ms[size]
        tuner.record(size, range(gains[size]), seconds, steps=1 if size else tuner.plain_steps())
    assert Counter(chosen[500:]).most_common(1)[0][0] == 0


@pytest.mark.parametrize(
    ("kind", "row", "draft", "least"),
    [
        ("chain", 2.4, 20, 0.96),
        ("tree", 2.4, 20, 0.955),
        ("lookup", 2.4, 0, 1.5),
        ("chain", 0.1, 2, 2.5),
        ("tree", 0.1, 2, 2.2),
        ("lookup", 0.1, 0, 2.9),
    ],
)
def test_speed_of_a_budget_that_is_learnt(kind, row, draft, least, monkeypatch):
    """Mean speed of four texts over plain decoding, by a clock: a step takes 8.6 ms and `row` ms per row, the draft
    `draft` ms.

    2.4 and 20 are the demo model's times on one core. Three of four draft tokens are right, while all before them are.
    """
    clock, random = SimpleNamespace(now=0.0), np.random.default_rng(4)

    def forward(self, state, step, rows=slice(None)):
        clock.now += 8.6e-3 + row * 1e-3 * len(step)
        return self.table[step.tokens][rows]

    def drafts(token):
        for _ in range(15):
            token = int(Markov.table[token].argmax())
            yield token if random.random() < 0.75 else (token + 1) % 5

    def propose(model, state, request):
        clock.now += draft * 1e-3
        k = request.k
        ids = np.stack([np.roll(np.arange(5), -token)[:k] for token in drafts(request.token)])
        return ids, np.tile(-np.arange(k, dtype=np.float32) - 0.3, (15, 1))

    def find(self, count):
        return list(drafts(self.tokens[-1]))[:count], 4

    monkeypatch.setattr(speculative, "check", lambda *_: None)
    monkeypatch.setattr(speculative, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(Markov, "forward", forward)
    monkeypatch.setattr(driver, "drafted", propose)
    monkeypatch.setattr(speculative.Lookup, "find", find)
    for _ in range(4):
        model, accepted = Markov(), DecodeStats()
        state, speculation = model.new_state(2000), Speculation(kind)
        tokens = speculate(model, state, model.table[:1], Sampler(Sampling()), [0], speculation, accepted)
        for _ in range(1000):
            next(tokens)
        tokens.close()
        print(dict(accepted.budgets))
    assert 4 * 999 * (8.6 + row) * 1e-3 / clock.now > least


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "trees"}, "spec is 'trees'; supported: off, lookup, chain"),
        ({"kind": "tree", "budget": 0}, "tree_budget is 0"),
        ({"kind": "tree", "top_k": 0}, "tree_topk is 0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(UsageError, match=message):
        Speculation(**options)


def test_kinds_that_draft_need_a_draft():
    model = tiny.load("llama", NumpyOps())
    with pytest.raises(UsageError, match="spec tree needs a draft model"):
        decode(model, [1, 2, 3], 4, Speculation("tree"))
    with pytest.raises(UsageError, match="a model run by mlx-lm decodes one token at a time"):
        speculative.check(Speculation("lookup"), SimpleNamespace(ops=NumpyOps()), Sampler(Sampling()))

"""Perplexity and agreement: by hand on made-up models, against llama.cpp on a real one, and as a command."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_chat import write

from common import perplexity
from common.errors import BimetalError
from common.perplexity import CODE_NATS, check_saved, cut_windows, measure, open_saved, save, score, scored_targets
from generate.__main__ import main

ROOT = Path(__file__).parents[1]

VOCAB = 5


class MadeUp:
    """A model whose logits depend on the last token alone: row `token` of a table. It records what it reads."""

    def __init__(self, table):
        self.table = np.asarray(table, np.float32)
        self.config = SimpleNamespace(vocab=self.table.shape[1])
        self.ops = SimpleNamespace(read=np.asarray)
        self.reads, self.returned = [], []

    def new_state(self, capacity):
        self.reads.append([])
        return SimpleNamespace(commit=lambda path: None)

    def forward(self, state, step, rows):
        self.reads[-1] += list(step.tokens)
        assert list(step.positions) == list(range(len(self.reads[-1]) - len(step), len(self.reads[-1])))
        self.returned.append(len(step.tokens[rows]))
        return self.table[step.tokens[rows]]


def table(seed=0, vocab=VOCAB):
    return np.random.default_rng(seed).normal(0, 2, (vocab, vocab)).astype(np.float32)


def probabilities(logits):
    p = np.exp(np.float64(logits))
    return p / p.sum(-1, keepdims=True)


TEXT = [0, 1, 2, 3, 4, 3, 2, 1, 0, 4, 4, 2, 1]  # one window of 8 tokens, or three of 4, and a rest


def test_a_uniform_model_is_as_perplexed_as_its_vocabulary_is_large():
    result = measure(score(MadeUp(np.zeros((VOCAB, VOCAB))), cut_windows(TEXT, 8)))
    assert result.scored == 3
    assert result.perplexity.value == pytest.approx(VOCAB)
    assert result.perplexity.error == 0


def test_the_second_half_of_each_window_is_scored():
    p = probabilities(table())
    # windows 0 1 2 3 | 4 3 2 1 | 0 4 4 2: token 3 after token 2, 1 after 2, 2 after 4
    nll = -np.log([p[2, 3], p[2, 1], p[4, 2]])
    model = MadeUp(table())
    result = measure(score(model, cut_windows(TEXT, 4)))
    assert result.scored == 3
    assert result.perplexity.value == pytest.approx(np.exp(nll.mean()))
    assert result.perplexity.error == pytest.approx(np.exp(nll.mean()) * nll.std(ddof=1) / 3**0.5)
    assert model.reads == [[0, 1, 2], [4, 3, 2], [0, 4, 4]]  # each from an empty state


def test_a_beginning_token_leads_the_text_and_every_window():
    windows = cut_windows([1, 2, 3, 4, 1, 2, 3], 4, bos=0)
    np.testing.assert_array_equal(windows, [[0, 1, 2, 3], [0, 1, 2, 3]])  # the second 4 gives way


def test_agreement_by_hand():
    p, q = probabilities(table(1)), probabilities(table(2))
    windows = cut_windows(TEXT, 8)
    before = [4, 3, 2]  # the tokens after which rows 4, 5 and 6 of the window are scored
    kl = [(p[t] * np.log(p[t] / q[t])).sum() for t in before]
    a = measure(score(MadeUp(table(2)), windows), score(MadeUp(table(1)), windows)).agreement
    assert a.kl.value == pytest.approx(np.mean(kl))
    assert a.kl.error == pytest.approx(np.std(kl, ddof=1) / 3**0.5)
    assert a.kl_99 == pytest.approx(np.quantile(kl, 0.99))
    assert a.top1.value == np.mean([p[t].argmax() == q[t].argmax() for t in before])
    assert a.perplexity == measure(score(MadeUp(table(1)), windows)).perplexity


def test_a_model_agrees_with_itself():
    windows = cut_windows(TEXT, 8)
    a = measure(score(MadeUp(table()), windows), score(MadeUp(table()), windows)).agreement
    assert (a.kl.value, a.kl_99, a.top1.value) == (0, 0, 1)


@pytest.mark.parametrize(("rows", "logits", "block"), [(3, 1 << 25, 1 << 22), (512, 2 * VOCAB, 1 << 22), (512, 99, 7)])
def test_the_sizes_of_steps_and_blocks_change_nothing(monkeypatch, rows, logits, block):
    ids = np.random.default_rng(3).integers(0, VOCAB, 40)
    windows = cut_windows(ids, 17)
    other = list(score(MadeUp(table(1)), windows))
    expected = measure(score(MadeUp(table()), windows), other)
    monkeypatch.setattr(perplexity, "STEP_ROWS", rows)
    monkeypatch.setattr(perplexity, "STEP_LOGITS", logits)
    monkeypatch.setattr(perplexity, "BLOCK_LOGITS", block)
    model = MadeUp(table())
    assert measure(score(model, windows), other) == expected
    assert max(model.returned) <= min(rows, max(1, logits // VOCAB))


def test_logits_never_exist_for_more_than_a_step(monkeypatch):
    monkeypatch.setattr(perplexity, "STEP_LOGITS", 16 * 2048)
    monkeypatch.setattr(perplexity, "BLOCK_LOGITS", 16 * 2048)
    one, two = MadeUp(np.zeros((2048, 2048))), MadeUp(np.zeros((2048, 2048)))
    windows = cut_windows(np.arange(4096) % 2048, 1024)  # (T, vocab) in float64 would take 33 MB
    tracemalloc.start()
    measure(score(one, windows), score(two, windows))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2048 * 8 * 10


@pytest.mark.parametrize(
    ("ids", "size", "message"),
    [
        (TEXT, 3, "a window of 3 tokens is too short"),
        (TEXT, 16, "the text has 13 tokens, and one window takes 16"),
        ([], 4, "the text has 0 tokens"),
    ],
)
def test_texts_too_short(ids, size, message):
    with pytest.raises(BimetalError, match=message):
        cut_windows(ids, size)


def test_tokens_and_logits_that_make_no_sense():
    with pytest.raises(BimetalError, match="token id 9 of the text is outside the model's vocabulary of 5"):
        list(score(MadeUp(table()), cut_windows([0, 1, 9, 1], 4)))
    broken = table()
    broken[3, 1] = np.nan
    with pytest.raises(BimetalError, match="logits at position 5 of a window are not finite"):
        list(score(MadeUp(broken), cut_windows(TEXT, 8)))


# -- saved references --------------------------------------------------------------------------------------------------


def saved(path, windows, logits):
    model = MadeUp(logits)
    return measure(save(path, "a model", windows, model.config.vocab, score(model, windows)))


def test_a_saved_reference_says_what_the_model_itself_says(tmp_path):
    ids = np.random.default_rng(4).integers(0, 97, 600)
    windows = cut_windows(ids, 64)
    one, two = table(1, 97), table(2, 97)
    result = saved(tmp_path / "one", windows, one)
    assert result == measure(score(MadeUp(one), windows))
    reference = open_saved(tmp_path / "one")
    check_saved(reference, tmp_path / "one", windows, 97)
    itself = measure(score(MadeUp(one), windows), reference.blocks()).agreement
    assert itself.top1.value == 1
    assert abs(itself.kl.value) < CODE_NATS**2  # of second order in the rounding
    assert itself.perplexity.value == pytest.approx(result.perplexity.value, rel=CODE_NATS)
    direct = measure(score(MadeUp(two), windows), score(MadeUp(one), windows)).agreement
    loaded = measure(score(MadeUp(two), windows), reference.blocks()).agreement
    assert loaded.kl.value == pytest.approx(direct.kl.value, rel=1e-4)
    assert loaded.kl_99 == pytest.approx(direct.kl_99, rel=1e-3)
    assert loaded.top1 == direct.top1
    assert list(tmp_path.iterdir()) == [tmp_path / "one"]


def test_improbable_tokens_are_cut_at_32_nats(tmp_path):
    windows = cut_windows([0, 1, 0, 1], 4)
    saved(tmp_path / "one", windows, [[0, -100], [0, -100]])
    block = next(open_saved(tmp_path / "one").blocks())
    np.testing.assert_allclose(block.logprobs, [[0, -32]], atol=1e-9)


def test_a_reference_of_something_else_is_refused(tmp_path):
    file = tmp_path / "one"
    windows = cut_windows(TEXT, 4)
    saved(file, windows, table())
    reference = open_saved(file)
    for other, vocab, message in (
        (windows, 6, "over a vocabulary of 5 tokens .a model., the model's has 6"),
        (cut_windows(TEXT, 8), 5, "has 3 windows of 4 tokens .a model., this text gives 1 of 8"),
        (cut_windows([*TEXT[:6], 0, *TEXT[7:]], 4), 5, "another text or tokenizer .a model.: token 6 is 2 there and 0"),
    ):
        with pytest.raises(BimetalError, match=message):
            check_saved(reference, file, other, vocab)


def test_files_that_are_no_reference(tmp_path):
    file = tmp_path / "one"
    saved(file, cut_windows(TEXT, 4), table())
    whole = file.read_bytes()
    for data, message in (
        (whole[:-1], "cut short"),
        (whole[:100], "cut short"),
        (b"", "is empty"),
        (whole.replace(b'"best"', b'"rest"'), "is not a saved reference: it has tensors"),
        (whole.replace(b'"shape": [3, 4]', b'"shape": [4, 3]'), "is not a saved reference: its shapes"),
        (whole.replace(b'"shape": [3, 4]', b'"shape": [2, 6]'), "has 3 rows for 4 scored tokens"),
    ):
        file.write_bytes(data)
        with pytest.raises(BimetalError, match=message):
            open_saved(file)
    with pytest.raises(BimetalError, match="cannot be read"):
        open_saved(tmp_path / "absent")


def test_an_interrupted_save_leaves_nothing(tmp_path):
    broken = table()
    broken[2] = np.inf
    with pytest.raises(BimetalError, match="not finite"):
        saved(tmp_path / "one", cut_windows(TEXT, 4), broken)
    assert not list(tmp_path.iterdir())


def test_a_reference_larger_than_the_disk_is_refused_before_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=9))
    with pytest.raises(BimetalError, match=r"3 tokens over a vocabulary of 5 take \d+ bytes, .* has 9 bytes free"):
        saved(tmp_path / "one", cut_windows(TEXT, 4), table())
    assert not list(tmp_path.iterdir())


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("It was the best of times, it was the worst of times. " * 3)  # 159 one-byte tokens
    return str(file)


@pytest.fixture
def run(capsys):
    def run(*argv):
        code = main(["perplexity", *argv, "--backend", "numpy"])
        return code, *capsys.readouterr()

    return run


def test_the_command_prints_the_figures(run, folder, text):
    code, out, err = run(folder, "--text", text, "--ctx-window", "32")
    assert (code, err) == (0, "")
    assert "32 tokens in 1 window of 32;" in run(folder, "--text", text, "--ctx-window", "32", "--max-tokens", "32")[1]
    assert "128 tokens in 4 windows of 32; 60 scored, the second half of each window" in out
    figures = json.loads(run(folder, "--text", text, "--ctx-window", "32", "--json")[1])
    value, error = figures["perplexity"]["value"], figures["perplexity"]["error"]
    assert f"perplexity  {value:.4f} ± {error:.4f}" in out
    assert figures["agreement"] is None
    fewer = json.loads(run(folder, "--text", text, "--ctx-window", "32", "--max-tokens", "64", "--json")[1])
    assert (figures["scored"], fewer["scored"]) == (60, 30)


def test_a_text_on_stdin(run, folder, text):
    words = ("--ctx-window", "32", "--json", "--backend", "numpy")
    command = [sys.executable, "-m", "generate", "perplexity", folder, "--text", "-", *words]
    piped = subprocess.run(command, cwd=ROOT, input=Path(text).read_bytes(), stdout=subprocess.PIPE, check=True)
    found = json.loads(piped.stdout)
    assert found | {"text": text} == json.loads(run(folder, "--text", text, "--ctx-window", "32", "--json")[1])
    assert found["text"] == "/dev/stdin"


def test_the_default_window_is_as_long_as_the_model_was_trained_for(run, folder, tmp_path):
    """A window of 512 that nobody had asked for was refused."""
    (tmp_path / "long").write_text("It was the best of times. " * 12)
    code, out, _ = run(folder, "--text", str(tmp_path / "long"))
    assert (code, "256 tokens in 1 window of 256" in out) == (0, True)


def test_a_model_and_a_file_as_references(run, folder, text, tmp_path):
    other = str(write(tmp_path / "other", seed=1))
    kept = str(tmp_path / "kept")
    words = ["--text", text, "--ctx-window", "32", "--json"]
    assert run(other, *words, "--save-reference", kept)[0] == 0
    direct = json.loads(run(folder, *words, "--reference", other)[1])
    loaded = json.loads(run(folder, *words, "--reference-file", kept)[1])
    assert direct["reference"] == loaded["reference"] == "other"
    assert direct["agreement"]["kl"]["value"] > 0.1
    assert loaded["agreement"]["kl"]["value"] == pytest.approx(direct["agreement"]["kl"]["value"], rel=1e-4)
    code, out, _ = run(folder, *words[:-1], "--reference-file", kept)
    assert code == 0
    for line in ("against other", "its perplexity", "mean KL", "99 % KL", "same top token"):
        assert line in out


def test_what_cannot_be_compared_or_read(run, folder, text, tmp_path):
    kept, binary = tmp_path / "kept", tmp_path / "binary"
    binary.write_bytes(b"ab\xff")
    words = ["--text", text, "--ctx-window", "32"]
    run(folder, *words, "--save-reference", str(kept))
    smaller = write(tmp_path / "smaller")
    config = json.loads((smaller / "config.json").read_text())
    (smaller / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    for code, argv, message in (
        (2, [folder], "the following arguments are required: --text"),
        (2, [folder, *words, "--reference", folder, "--reference-file", str(kept)], "not allowed with argument"),
        (2, [folder, "--text", text, "--ctx-window", "512"], "--ctx-window is 512, and the model was trained for 256"),
        (2, [folder, "--text", text, "--ctx-window", "3"], "a window of 3 tokens is too short"),
        (1, [folder, "--text", str(tmp_path / "absent")], "No such file"),
        (1, [folder, "--text", str(binary)], "is not UTF-8: invalid start byte at byte 2"),
        (1, [folder, "--text", text, "--ctx-window", "200"], "the text has 159 tokens, and one window takes 200"),
        (1, [folder, *words, "--max-tokens", "1"], "the text has 1 token, and one window takes 32; give a longer"),
        (1, [folder, *words, "--max-tokens", "64", "--reference-file", str(kept)], "has 4 windows of 32 tokens"),
        (1, [folder, *words, "--reference-file", text], "is cut short or is not a safetensors file"),
        (1, [str(tmp_path / "no"), *words], "no"),
    ):
        got, out, err = run(*argv)
        assert (got, out, err.count("\n")) == (code, "", 1), err
        assert message in err


def test_a_reference_in_place_of_an_input_is_refused_first(run, folder, text, tmp_path, monkeypatch):
    """The text, or the model itself, was replaced by log-probabilities."""
    monkeypatch.setattr("generate.perplexity.open_model", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "link").symlink_to(text)
    weights = Path(folder) / "model.safetensors"
    before = weights.read_bytes()
    for model in (folder, str(weights)):
        for out in (text, str(tmp_path / "link"), str(weights), f"{folder}/config.json"):
            code, _, err = run(model, "--text", text, "--ctx-window", "32", "--save-reference", out)
            assert (code, f"{out} is an input" in err, err.count("\n")) == (2, True, 1)
    assert weights.read_bytes() == before
    missing = str(tmp_path / "no" / "kept")
    code, _, err = run(folder, "--text", text, "--save-reference", missing)
    assert (code, err) == (1, f"error: {missing}: No such file or directory\n")


@pytest.mark.model
def test_smollm2_is_as_perplexed_as_in_llama_cpp():
    """Within 0.4 % on WikiText-2: llama.cpp rounds activations to 8 bits before each product with Q4_1 weights."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from common.checkpoint import open_checkpoint
    from common.hub import resolve_model
    from common.models import load_model
    from common.reference import NumpyOps
    from common.tokenizer import load_tokenizer

    path = resolve_model("smollm2")
    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    ids = tokenizer.encode(PROSE, add_special_tokens=False, parse_special=False)
    windows = cut_windows(ids, 32)
    ours = list(score(load_model(checkpoint, NumpyOps()), windows))

    model = llama_cpp.llama_model_default_params
    params = model()
    params.use_extra_bufts = False  # its AMX layouts crash on some virtual machines
    try:
        llama_cpp.llama_cpp.llama_model_default_params = lambda: params
        peer = llama_cpp.Llama(str(path), n_ctx=32, logits_all=True, verbose=False)
    finally:
        llama_cpp.llama_cpp.llama_model_default_params = model
    theirs = []
    for window in windows:
        peer.reset()
        peer.eval(window.tolist())
        theirs.append(perplexity._block(np.array(peer.scores[16:31]), window[17:], 16))
    result = measure(ours, theirs)
    assert result.scored == len(scored_targets(windows)) >= 75
    assert result.perplexity.value == pytest.approx(result.agreement.perplexity.value, rel=0.02)
    assert 0 < result.agreement.kl.value < 0.01
    assert result.agreement.top1.value > 0.85


PROSE = """\
Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and nothing
particular to interest me on shore, I thought I would sail about a little and see the watery part of the world. It is a
way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim about the
mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before coffin
warehouses, and bringing up the rear of every funeral I meet; and especially whenever my hypos get such an upper hand of
me, that it requires a strong moral principle to prevent me from deliberately stepping into the street, and
methodically knocking people's hats off, then, I account it high time to get to sea as soon as I can.
"""  # Herman Melville, Moby-Dick, 1851

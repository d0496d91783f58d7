"""Architectures that are not ours: by mlx-lm's definition where it is installed, refused by name elsewhere."""

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import tiny_chat

import generate
from common.checkpoint import open_checkpoint
from common.decode.alone import run_alone
from common.decode.run import DecoderRun
from common.engine import Engine
from common.errors import BimetalError
from common.options import GenerationOptions
from common.sampling import Sampler, Sampling
from common.step import Step
from generate.backends import open_model

PROMPT = np.arange(40, 60, dtype=np.int32)


@pytest.fixture
def gemma(tmp_path):
    """A random Gemma 2 (attention only) with a byte tokenizer."""
    return unknown(
        tmp_path, "gemma2", query_pre_attn_scalar=8, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    )


@pytest.fixture
def granite(tmp_path):
    """A random Granite 4 hybrid: Mamba 2 layers, whose state cannot drop tokens, and attention."""
    return unknown(
        tmp_path,
        "granitemoehybrid",
        layer_types=["mamba", "attention"],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_proj_bias=False,
        mamba_conv_bias=True,
        embedding_multiplier=1.0,
        attention_multiplier=0.25,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        attention_bias=False,
        position_embedding_type="rope",
        tie_word_embeddings=True,
        num_local_experts=None,
    )


def unknown(folder, model_type, **keys):
    """mlx-lm's own random model of that type, in `folder`."""
    mx = pytest.importorskip("mlx.core")
    mlx_lm = pytest.importorskip("mlx_lm.utils")
    from mlx.utils import tree_flatten

    tiny_chat.write(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type, "head_dim": 8} | keys
    (folder / "config.json").write_text(json.dumps(config))
    network, arguments = mlx_lm._get_classes(config)
    mx.random.seed(0)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(network(arguments.from_dict(config)).parameters()))
    )
    return folder


@pytest.mark.model
@pytest.mark.parametrize("name", ["gemma", "granite"])
def test_mlx_lm_runs_it(name, request, capsys):
    model = open_model(open_checkpoint(request.getfixturevalue(name)), "mlx")
    assert "run by mlx-lm's own definition" in capsys.readouterr().err
    state = model.new_state(256)
    whole = model.ops.read(model.forward(state, Step.chain(PROMPT, 0)))
    state.commit(range(len(PROMPT)))
    assert state.length == len(PROMPT)

    state = model.new_state(256)
    pieces = []
    for at, n in ((0, 7), (7, 1), (8, 12)):
        pieces.append(model.ops.read(model.forward(state, Step.chain(PROMPT[at : at + n], at))))
        state.commit(range(n))
    assert np.abs(np.concatenate(pieces) - whole).max() < 1e-4


@pytest.mark.model
@pytest.mark.parametrize("name", ["gemma", "granite"])
def test_snapshots_and_whole_steps(name, request):
    model = open_model(open_checkpoint(request.getfixturevalue(name)), "mlx")
    state = model.new_state(256)
    logits = model.forward(state, Step.chain(PROMPT, 0), slice(-1, None))
    with pytest.raises(BimetalError, match="keep all 20 rows of a step"):
        state.commit([0])
    state.commit(range(len(PROMPT)))
    saved = state.snapshot()
    replies = []
    for _ in range(2):
        tokens = run_alone(DecoderRun(model, state, logits, Sampler(Sampling())))
        replies.append([next(tokens)[0] for _ in range(10)])
        state.restore(saved)
    assert replies[0] == replies[1]
    with pytest.raises(BimetalError, match="takes chains"):
        model.forward(state, Step.tree(PROMPT[:3], [-1, 0, 0], state.length))


@pytest.mark.model
def test_a_chat_over_it(gemma):
    with generate.load(gemma, backend="mlx") as llm:
        first = llm.chat([{"role": "user", "content": "hello"}], max_tokens=8)
        again = llm.chat([{"role": "user", "content": "hello"}], max_tokens=8)
    assert first.tokens == again.tokens
    assert first.stats.step_bytes > 0


def test_elsewhere_it_is_refused_with_the_list(tmp_path):
    tiny_chat.write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gemma2"}))
    with pytest.raises(BimetalError, match=r"model_type is .gemma2.; supported: deepseek2, .*qwen35"):
        open_model(open_checkpoint(tmp_path), "numpy")


def test_without_mlx_lm_it_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    tiny_chat.write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gemma2"}))
    monkeypatch.setattr("generate.backends.find_spec", lambda name: None if name == "mlx_lm" else sys)
    with pytest.raises(BimetalError, match="model_type is 'gemma2'"):
        open_model(open_checkpoint(tmp_path), "mlx")


class Ids:
    """A tokenizer of tokens without text or end."""

    end_ids: frozenset[int] = frozenset()
    vocab_size = 0

    def decoder(self):
        return SimpleNamespace(push=lambda token: "")


class Cache:
    """The tokens so far, as mlx-lm's caches hold keys and values."""

    def __init__(self, mx):
        self.state = mx.zeros(0, mx.int32)

    def empty(self) -> bool:
        return not self.state.size


def network_of(mx, vocab):
    """A network by which the token after tokens of sum s is 7 s + 1 modulo the vocabulary."""

    def logits(tokens, cache):
        seen, own = cache[0].state, tokens[0]
        cache[0].state = mx.concatenate([seen, own])
        return mx.eye(vocab)[(7 * (seen.sum() + mx.cumsum(own)) + 1) % vocab][None]

    return logits


def test_the_engine_runs_what_mlx_lm_loads(monkeypatch):
    """A stand-in for two functions of mlx-lm: a prompt of several steps, and one that continues its state."""
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    from mlx_backend.fallback import FallbackModel
    from mlx_backend.ops import MlxOps

    vocab, context = 50, 1200
    values = {
        "mlx_lm": {},
        "mlx_lm.utils": {"load_model": lambda path: (network_of(mx, vocab),)},
        "mlx_lm.models": {},
        "mlx_lm.models.cache": {"make_prompt_cache": lambda network: [Cache(mx)]},
    }
    for name in values:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(values[name])
    monkeypatch.setattr(FallbackModel, "step_bytes", 0)
    config = {"model_type": "unheard", "vocab_size": vocab, "max_position_embeddings": context}
    model = FallbackModel(SimpleNamespace(config=config, path="a folder"), MlxOps())
    engine, options = Engine(model, Ids(), context), GenerationOptions(max_tokens=5)
    text = np.random.default_rng(0).integers(0, vocab, 1000).tolist()
    for _ in range(2):
        reply = [token for piece in engine.stream(text, options) for token in piece.tokens]
        for token in reply:
            assert token == (7 * sum(text) + 1) % vocab
            text.append(token)
        text += [4, 4]

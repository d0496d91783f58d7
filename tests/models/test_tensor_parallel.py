"""Ranks that share every layer: the logits of one rank within rounding, equal on all, of each rank's own bytes."""

from dataclasses import replace

import numpy as np
import pytest
import ranks
import tiny
from gguf_files import write_gguf
from test_dialects import of_mlx_lm, of_qwen3_vl, with_stacked_experts

from common.checkpoint import open_checkpoint
from common.errors import BimetalError
from common.fit import predict_layers
from common.models import architecture, load_model, rank_config
from common.models.drafts import load_pair
from common.quantize import Format, encode
from common.quants import BLOCKS, dequantize
from common.reference import NumpyOps
from common.shards import Ranks, by_columns, by_expert_rows, by_rows
from common.tensors import Tensor
from common.weights import Matrix, account
from generate.synthetic import synthetic_checkpoint

# Partial sums are added in another order than one product adds them: float32 rounding. Gated DeltaNet's norms of small
# heads amplify it, as in test_golden.py where steps are cut otherwise.
LOGIT, DELTA_LOGIT, KL = 1e-4, 2e-3, 1e-8
TOKENS = 48
ON_EVERY_RANK = {"embed", "head", "router", "shared_gate", "down_qkv"}  # matrices; the last one makes GLM's latents


def compare(checkpoint, size, divides_head=False):
    """Assert that `size` ranks give one rank's logits; returns each rank's ops, and its model."""
    ids = np.arange(7, 7 + TOKENS, dtype=np.int32) * 31 % 96
    alone = tiny.logits_of(load_model(checkpoint, NumpyOps()), ids, [20, 1])

    def logits(ops):
        model = load_model(checkpoint, ops)
        return ops, model, tiny.logits_of(model, ids, [20, 1])

    found = ranks.together(size, logits, divides_head)
    errors = tiny.errors(found[0][2], alone)
    has_delta = hasattr(found[0][1].config, "key_heads")
    assert errors.logit < (DELTA_LOGIT if has_delta else LOGIT)
    assert errors.top1 == 1
    assert errors.kl < KL
    assert all(np.array_equal(logits, found[0][2]) for _, _, logits in found)
    return [(ops, model) for ops, model, _ in found]


@pytest.mark.parametrize("name", [n for n in tiny.MODELS if n not in ("qwen3-yarn", "glm")])
def test_two_ranks(name):
    for ops, model in compare(tiny.checkpoint(name), 2):
        assert ops.sums == 2 * len(model.layout.layers) * 3  # three steps
        if not name.startswith("deepseek"):  # whose latents every rank has
            assert model.config.kv_heads == (2 if name == "llama-untied" else 1)


@pytest.mark.parametrize(("name", "size"), [("glm", 2), ("glm", 3), ("qwen35moe", 3), ("qwen3next", 3)])
def test_ranks_of_wide_models(name, size):
    compare(ranks.wide(name), size)


@pytest.mark.parametrize(
    ("checkpoint", "size", "is_tied"),
    [
        (tiny.checkpoint("llama"), 2, True),
        (tiny.checkpoint("llama-untied"), 2, False),
        (tiny.checkpoint("qwen35"), 2, False),
        (tiny.checkpoint("laguna"), 2, False),
        (ranks.wide("glm"), 3, False),
        (ranks.grouped("qwen3"), 2, False),
    ],
    ids=["tied", "llama", "qwen35", "laguna", "three", "quantized"],
)
def test_head_divided_by_rows(checkpoint, size, is_tied):
    """Each rank multiplies its part of the vocabulary; a tied embedding stays whole beside it, for look-ups."""
    whole = load_model(checkpoint, NumpyOps()).step_bytes
    for ops, model in compare(checkpoint, size, divides_head=True):
        (head,), (embed,) = model.layout.top["head"].parts, model.layout.top["embed"].parts
        assert (model.config.tied, ops.gathers) == (is_tied, 3)
        assert head.shape[0] == model.config.vocab // size
        assert embed.shape[0] == model.config.vocab
        assert (head.names == embed.names) == is_tied
        assert size * ops.weight_bytes(model.weights.head) == ops.weight_bytes(model.weights.embed)
        assert model.step_bytes < 0.75 * whole


def test_a_vocabulary_that_ranks_do_not_divide():
    """Three ranks cannot share 32 rows by fours, so that each multiplies all of them."""
    assert [Ranks(0, n, True).head_rows(32) for n in (1, 2, 3, 4, 8, 16)] == [32, 16, 32, 8, 4, 32]
    assert Ranks(0, 2).head_rows(32) == 32


QUANTIZED = ["qwen3", "qwen3moe", "qwen35", "qwen35moe", "qwen3next", "gemma3", "laguna-m1", "glm", "glm4moe"]
QUANTIZED += ["gptoss", "olmo3"]


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_matrices(name):
    """Groups of 32 columns go whole to a rank; what it multiplies are the same numbers."""
    checkpoint = ranks.grouped(name)
    assert sum(tensor.scales is not None for tensor in checkpoint.tensors.values()) > 10
    compare(checkpoint, 2)


@pytest.mark.parametrize(
    ("shape", "few"),
    [
        ("qwen3.6-27b", 8),
        ("wedlm-8b", 0),
        ("gemma-3-27b", 8),
        ("laguna-xs.2", 4),
        ("qwen3-next-80b-a3b", 4),
        ("glm-4.7-flash", 4),
    ],
)
def test_released_sizes(shape, few):
    """Two ranks divide each in its K-quants; so do more, up to where a block of 256 columns would be divided."""
    divides(f"{shape}:q4_k_m", 2)
    if few:
        with pytest.raises(BimetalError, match=f"columns in Q6_K blocks of 256 cannot be divided among {few} ranks"):
            divides(f"{shape}:q4_k_m", few)
    else:
        divides(f"{shape}:q4_k_m", 8)


def divides(name, size):
    """Read the table of weights of one of `size` ranks."""
    checkpoint = synthetic_checkpoint(name)
    definition = architecture(checkpoint)[1]
    account(checkpoint, definition.layout(rank_config(definition, checkpoint, Ranks(size - 1, size)), checkpoint))


def test_networks_of_blocks_of_32():
    """Those of GLM-4.5-Air: 10944 channels of its first layer, 1408 of an expert."""
    divides("glm-4.5-air:q4_k_m", 2)
    with pytest.raises(BimetalError, match="10944 columns in Q8_0 blocks of 32 cannot be divided among 4 ranks"):
        divides("glm-4.5-air:q4_k_m", 4)


def test_experts_of_ninety_blocks():
    """Those of gpt-oss: 2880 channels in blocks of 32."""
    divides("gpt-oss-20b:mxfp4", 2)
    with pytest.raises(BimetalError, match="2880 columns in MXFP4 blocks of 32 cannot be divided among 4 ranks"):
        divides("gpt-oss-20b:mxfp4", 4)


def test_experts_of_three_blocks():
    """The 768 channels of an expert of Qwen3-30B-A3B are three blocks of a K-quant; smaller blocks divide."""
    divides("qwen3-30b-a3b:q8_0", 4)
    with pytest.raises(BimetalError, match="768 columns in Q6_K blocks of 256 cannot be divided"):
        divides("qwen3-30b-a3b:q4_k_m", 2)


@pytest.mark.parametrize("name", ["qwen3", "laguna-m1"])
def test_fewer_kv_heads_than_ranks(name):
    """Four ranks, two KV heads: two ranks hold each."""
    for _, model in compare(tiny.checkpoint(name), 4):
        assert (model.config.kv_heads, model.config.kv_ranks.size) == (1, 2)
        assert model.config.heads in (1, (1, 1, 1))


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("qwen3moe", with_stacked_experts),
        ("qwen3moe", of_qwen3_vl),
        ("qwen35moe", of_mlx_lm),
        ("qwen35moe", with_stacked_experts),
        ("qwen35", of_mlx_lm),
        ("qwen3next", of_mlx_lm),
    ],
)
def test_other_names(name, dialect):
    compare(dialect(tiny.checkpoint(name)), 2)


GGUF_FILES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3moe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "gemma3",
    "laguna",
    "glm4moe",
]
GGUF_FILES += ["smollm3", "granite", "olmo2", "olmo3", "deepseek2", "granitemoe", "gptoss", "phi3"]


@pytest.mark.parametrize("name", GGUF_FILES)
def test_gguf_files(tmp_path, name):
    """Value heads tiled over key heads, rope pairs as adjacent rows; 16-bit floats, which any ranks divide."""
    compare(open_checkpoint(write_gguf(tiny.FOLDER / name, tmp_path / "model.gguf", "F16")), 2)


def test_fused_projection_of_a_gguf_file(tmp_path):
    """Some writers fuse q, k and v: each rank takes rows of all three."""
    c = open_checkpoint(write_gguf(tiny.FOLDER / "qwen35", tmp_path / "model.gguf"))
    tensors = dict(c.tensors)
    for i in (3, 7):
        parts = [tensors.pop(f"blk.{i}.attn_{part}.weight") for part in "qkv"]
        name = f"blk.{i}.attn_qkv.weight"
        tensors[name] = replace(
            parts[0],
            name=name,
            shape=(sum(p.shape[0] for p in parts), parts[0].shape[1]),
            data=np.concatenate([p.data for p in parts]),
        )
    compare(replace(c, tensors=tensors), 2)


def test_glm_with_keys_and_values_fused():
    c = ranks.wide("glm")
    definition = architecture(c)[1]
    config = definition.read_config(c)
    assert {stored.part_of for stored in definition.layout(config, c).layers[0]["k_up"].parts} != {None}
    own = definition.for_rank(config, Ranks(1, 3))
    (stored,) = definition.layout(own, c).layers[0]["v_up"].parts
    whole = dequantize(c.tensors[stored.names[0]]).reshape(6, own.nope_dim + own.value_dim, own.latent)
    part = dequantize(stored.fix(stored.shard.cut(c.tensors[stored.names[0]])))
    assert np.array_equal(part, whole[2:4, own.nope_dim :])


@pytest.mark.parametrize(("name", "divides_head"), [("qwen35", True), ("qwen35moe", False)])
def test_a_block_that_drafts_is_shared_as_a_layer(name, divides_head):
    """The draft's logits after one token and after three, of ranks that have read the same text."""
    folder, ids = tiny.FOLDER / f"mtp-{name}", tiny.golden(name)["ids"].astype(np.int32)

    def drafted(ops):
        pair = load_pair(folder, load_model(tiny.checkpoint(name), ops))
        state = pair.new_state(64)
        tiny.run(pair, state, ids[:20], [13])
        tokens = ids[20:23].tolist()
        return np.concatenate([pair.propose(state, tokens[:n]) for n in (1, 3)]), pair

    alone, _ = drafted(NumpyOps())
    (first, pair), (second, _) = ranks.together(2, drafted, divides_head)
    assert np.array_equal(first, second)
    assert tiny.errors(first, alone).logit < DELTA_LOGIT
    assert tiny.errors(first, alone).top1 == 1
    assert pair.draft_spec[0]["kv"].kv_heads == 1


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3moe", "qwen35moe", "laguna", "wide glm"])
def test_each_rank_reads_its_own_bytes(name, monkeypatch):
    """What is sliced from the map is what the rank keeps: of all ranks together the file once, and replicas."""
    from common import shards

    checkpoint = ranks.wide("glm") if name == "wide glm" else tiny.checkpoint(name)
    sliced = []
    for function in ("take_columns", "_take"):
        real = getattr(shards, function)
        monkeypatch.setattr(shards, function, lambda *a, real=real: sliced.append(real(*a)) or sliced[-1])
    read = {}
    layout = None
    for rank in range(2):
        ops = ranks.RankOps(Ranks(rank, 2), None, None)
        layout = load_model(checkpoint, ops).layout
        for key, size in ops.taken.items():
            read[key] = read.get(key, 0) + size
    assert sliced
    for entry in layout.entries():
        for stored in entry.parts if isinstance(entry, Matrix) else ():
            for key in stored.names[:1]:
                stacked = sum(checkpoint.tensors[each].nbytes for each in stored.names)
                if "kv_b_proj" in key:
                    continue  # one tensor of which two weights take their rows
                copies = 1 if stored.shard else 2
                assert read[key] == copies * stacked, key
    for table in (layout.top, *layout.layers):
        on_all = {name for name, e in table.items() if isinstance(e, Matrix) and any(s.shard is None for s in e.parts)}
        assert on_all <= ON_EVERY_RANK
    sharded = {n for e in layout.entries() for s in e.parts if s.shard for n in s.names}
    uses = {n: sum(n in s.names for e in layout.entries() for s in e.parts) for n in sharded}
    assert sum(t.nbytes for t in sliced) == sum(checkpoint.tensors[n].nbytes * uses[n] for n in sharded)
    whole = predict_layers(checkpoint, load_model(checkpoint, NumpyOps()).layout, NumpyOps())
    assert sum(predict_layers(checkpoint, layout, NumpyOps())) < 0.7 * sum(whole)


# -- cutting stored tensors --------------------------------------------------------------------------------------------


def stored_as(type_, rows, columns):
    """A random tensor of a block type, an MLX mode or a plain type."""
    values = np.random.default_rng(3).standard_normal((rows, columns)).astype(np.float32)
    if type_.startswith("affine"):
        return encode(Tensor("w", "F32", values.shape, values.view(np.uint8)), Format("affine", 4, int(type_[6:])))
    if type_ == "F32":
        return Tensor("w", "F32", values.shape, values.view(np.uint8))
    block = BLOCKS[type_]
    data = np.random.default_rng(4).integers(0, 200, (rows, columns // block.elements * block.bytes), np.uint8)
    for half in block.halves:
        data.reshape(rows, -1, block.bytes)[:, :, half : half + 2] = np.array([1.5], np.float16).view(np.uint8)
    return Tensor("w", type_, (rows, columns), data)


@pytest.mark.parametrize(
    ("type_", "unit"), [("F32", 1), ("Q8_0", 32), ("Q4_0", 32), ("Q4_K", 256), ("Q6_K", 256), ("affine64", 64)]
)
def test_rows_and_columns_of_blocks(type_, unit):
    """Two segments, of which rank 1 of 2 takes the second half each."""
    tensor = stored_as(type_, 12, 8 * unit)
    values, half = dequantize(tensor), Ranks(1, 2)
    rows = by_rows(half.segment(4), half.segment(2))
    assert np.array_equal(dequantize(rows.cut(tensor)), values[[4, 5, 6, 7, 10, 11]])
    columns = by_columns(half.segment(2 * unit), half.segment(2 * unit))
    columns.check(tensor)
    whole = values.reshape(12, 4, 2 * unit)
    assert np.array_equal(dequantize(columns.cut(tensor)), whole[:, [1, 3]].reshape(12, -1))
    assert columns.whole((12, 4 * unit)) == (12, 8 * unit)
    stack = Tensor("w", "F32", (2, 12, 8 * unit), np.stack([values, -values]).view(np.uint8))
    assert np.array_equal(dequantize(by_expert_rows(half.segment(6)).cut(stack)), dequantize(stack)[:, 6:])


@pytest.mark.parametrize(
    ("type_", "columns", "size", "kind"),
    [
        ("Q4_K", 512, 4, "Q4_K blocks of 256"),
        ("Q8_0", 96, 2, "Q8_0 blocks of 32"),
        ("affine64", 192, 2, "groups of 64"),
    ],
)
def test_blocks_that_ranks_do_not_divide(type_, columns, size, kind):
    tensor = stored_as(type_, 4, columns)
    with pytest.raises(BimetalError, match=f"^w: {columns} columns in {kind} cannot be divided among {size} ranks;"):
        by_columns(Ranks(0, size).segment(columns // size)).check(tensor)


def test_blocks_are_checked_before_anything_is_loaded(tmp_path):
    path = write_gguf(tiny.FOLDER / "llama", tmp_path / "model.gguf", "Q8_0")  # heads of 16, two on each rank
    with pytest.raises(BimetalError, match=r"ffn_down|attn_output"):
        load_model(path, ranks.RankOps(Ranks(0, 4), None, None))


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("qwen3", 3, "2 KV heads cannot be divided among 3 ranks"),
        ("glm", 2, "3 heads cannot be divided among 2 ranks"),
        ("qwen35", 4, "2 key heads of Gated DeltaNet cannot be divided among 4 ranks"),
        ("glm", 3, "16 channels of an expert cannot be divided among 3 ranks"),
    ],
)
def test_sizes_that_ranks_do_not_divide(name, size, said):
    with pytest.raises(BimetalError, match=said):
        load_model(tiny.checkpoint(name), ranks.RankOps(Ranks(0, size), None, None))

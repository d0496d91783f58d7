"""Measure how fast experts are read while a mixture runs, against plain reads of the same blocks.

    python examples/stream_experts.py make FOLDER --sparse-layers 12       # 5.4 GB in the shapes of Laguna-XS.2
    python examples/stream_experts.py measure FOLDER --cache 1.5GB --memory 4GB
    python examples/stream_experts.py measure FOLDER --cache 1.5GB --memory 4GB --warm

The weights are random; biases of the routers make some experts more popular than others. Give the second command a
memory limit that the system enforces (a cgroup, as `systemd-run -p MemoryMax=4G` makes one): the cache of the system
then counts too. Without --warm the file leaves that cache before each pass.
"""

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common.checkpoint import open_checkpoint
from common.expert_files import ExpertSource
from common.expert_stream import THREADS
from common.experts import Key, Load
from common.host import peak_resident_bytes
from common.options import LoadOptions
from common.step import Step
from generate.backends import open_model
from generate.expert_streaming import expert_source, opener

HIDDEN, HEAD_DIM, HEADS, KV_HEADS, FFN, VOCAB, GROUP = 2048, 128, 16, 4, 512, 4096, 64
SKEW = 0.12  # of a router's bias per e-fold of popularity: 50 % of the experts then take some 80 % of the rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("make", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sparse-layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--cache", default=None)
    parser.add_argument("--memory", default=None)
    parser.add_argument("--pack", default=None)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--warm", action="store_true")
    args = parser.parse_args()
    if args.command == "make":
        make(args.folder, args.sparse_layers, args.experts)
    else:
        options = LoadOptions(
            stream_experts=True,
            expert_cache=args.cache,
            memory=args.memory,
            expert_pack=args.pack,
            ctx=512,
            backend="mlx",
        )
        print(json.dumps(measure(args.folder, options, args.tokens, args.warm), indent=1))


# -- a mixture to read -------------------------------------------------------------------------------------------------


def make(folder: Path, sparse_layers: int, experts: int) -> None:
    """Write an MLX folder of Laguna's form: one dense layer, then `sparse_layers` with `experts` experts each."""
    folder.mkdir(parents=True)
    layers = 1 + sparse_layers
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    config = {
        "model_type": "laguna",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "head_dim": HEAD_DIM,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "mlp_layer_types": ["dense"] + ["sparse"] * sparse_layers,
        "rope_parameters": {"full_attention": rope},
        "vocab_size": VOCAB,
        "intermediate_size": 4 * FFN,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": FFN,
        "shared_expert_intermediate_size": FFN,
        "moe_routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "quantization": {"group_size": GROUP, "bits": 4},
    }
    (folder / "config.json").write_text(json.dumps(config))
    parts = [part for name, shape in _weights(layers, experts).items() for part in _stored(name, shape)]
    header, at = {}, 0
    for name, dtype, shape in parts:
        size = int(np.prod(shape)) * {"F32": 4, "BF16": 2, "U32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dtype, shape in parts:
            _write(file, name, dtype, shape, noise)


def _weights(layers: int, experts: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    shapes["model.norm"] = (HIDDEN,)
    for i in range(layers):
        at = f"model.layers.{i}."
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "g": HEADS}
        shapes |= {f"{at}self_attn.{x}_proj": (n, HIDDEN) for x, n in rows.items()}
        shapes |= {f"{at}self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM)}
        shapes |= {f"{at}self_attn.{x}_norm": (HEAD_DIM,) for x in "qk"}
        shapes |= {f"{at}{x}_layernorm": (HIDDEN,) for x in ("input", "post_attention")}
        ffns = (
            [("mlp.", (), 4 * FFN)]
            if i == 0
            else [("mlp.switch_mlp.", (experts,), FFN), ("mlp.shared_expert.", (), FFN)]
        )
        for ffn, lead, width in ffns:
            shapes |= {f"{at}{ffn}{x}_proj": (*lead, width, HIDDEN) for x in ("gate", "up")}
            shapes |= {f"{at}{ffn}down_proj": (*lead, HIDDEN, width)}
        if i:
            shapes |= {f"{at}mlp.gate": (experts, HIDDEN), f"{at}mlp.gate.e_score_correction_bias": (experts,)}
    return shapes


def _stored(name: str, shape: tuple[int, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    """The tensors of one weight: vectors and routers as floats, other matrices in groups of 4 bits."""
    if len(shape) == 1:
        return [(name if name.endswith("bias") else f"{name}.weight", "F32", shape)]
    if name.endswith("mlp.gate"):
        return [(f"{name}.weight", "F32", shape)]
    groups = (*shape[:-1], shape[-1] // GROUP)
    return [
        (f"{name}.weight", "U32", (*shape[:-1], shape[-1] // 8)),
        (f"{name}.scales", "BF16", groups),
        (f"{name}.biases", "BF16", groups),
    ]


def _write(file, name: str, dtype: str, shape: tuple[int, ...], noise: np.random.Generator) -> None:
    """Write random values: codes of all kinds, and scales by which a matrix keeps the size of its input."""
    if name.endswith("correction_bias"):
        popularity = -SKEW * np.log1p(np.arange(shape[0]))
        file.write(noise.permutation(popularity).astype(np.float32).tobytes())
    elif dtype == "F32":
        values = np.ones(shape) if len(shape) == 1 else noise.standard_normal(shape) / np.sqrt(shape[-1])
        file.write(values.astype(np.float32).tobytes())
    elif dtype == "U32":
        for _ in range(shape[0] if len(shape) == 3 else 1):
            file.write(noise.bytes(4 * int(np.prod(shape[-2:]))))
    else:  # codes of 0 to 15, less 7.5, times 1 / (4.6 sqrt(columns))
        step = 1 / (4.6 * np.sqrt(shape[-1] * GROUP))
        value = step if name.endswith("scales") else -7.5 * step
        word = (np.float32(value).view(np.uint32) >> 16).astype(np.uint16)
        file.write(np.full(shape, word, np.uint16).tobytes())


# -- reading it --------------------------------------------------------------------------------------------------------


def measure(folder: Path, options: LoadOptions, tokens: int, warm: bool) -> dict[str, object]:
    """Run a prompt of 64 tokens and `tokens` more, then read the same groups of experts without a model."""
    checkpoint = open_checkpoint(folder)
    model = open_model(checkpoint, options.backend, experts=opener(options))
    stream = model.expert_stream
    assert stream is not None
    source, groups = stream.source, record(stream)
    for _ in range(2 if warm else 1):
        if not warm:
            forget(source)
        groups.clear()
        before, state, started = stream.stats(), model.new_state(512), time.perf_counter()
        token = np.arange(64, dtype=np.int32)
        for _ in range(tokens + 1):
            logits = model.forward(state, Step.chain(token, state.length), slice(len(token) - 1, len(token)))
            token = model.ops.read(logits).argmax(axis=-1).astype(np.int32)
            state.commit(np.arange(1 if state.length else 64))
        seconds = time.perf_counter() - started
    stats = stream.stats(before)
    peak = peak_resident_bytes()
    stream.close()
    if not warm:
        forget(source)
    ours, plain = interleaved(stream, expert_source(checkpoint, model.layout, options), groups)
    return {
        "tokens": stats.tokens,
        "seconds": round(seconds, 3),
        "hit_rate": round(stats.hit_rate, 4),
        "bytes_per_token": round(stats.bytes_per_token),
        "read_p50_ms": round(1e3 * stats.read_p50, 3),
        "read_p95_ms": round(1e3 * stats.read_p95, 3),
        "gb_read": round(stats.bytes_read / 1e9, 3),
        "gb_per_s": round(stats.bytes_read / 1e9 / stats.wait, 3),
        "replayed_gb_per_s": round(ours / 1e9, 3),
        "plain_gb_per_s": round(plain / 1e9, 3),
        "share_of_plain": round(ours / plain, 3),
        "slots_gb": round(stats.budget / 1e9, 3),
        "peak_resident_gb": round(peak / 1e9, 3),
        "peak_over_slots_gb": round((peak - stats.peak) / 1e9, 3),
    }


def record(stream) -> list[list[tuple[int, int]]]:
    """The list to which the stream from now on adds (layer, expert) of the reads that it begins together."""
    groups: list[list[tuple[int, int]]] = []
    start = stream._start

    def recorded(loads) -> None:
        loads = list(loads)
        if loads:
            groups.append([tuple(load.key) for load in loads])
        start(loads)

    stream._start = recorded
    return groups


def interleaved(stream, source: ExpertSource, groups: list[list[tuple[int, int]]]) -> tuple[float, float]:
    """Bytes per second of reads into slots, and of plain reads into buffers of their own, by as many threads.

    The groups take turns, so that whatever else runs on the machine slows both: even ones are read into slots, odd ones
    plainly. No block is read twice in a row, so that a cold one stays cold for the kind of read that it falls to.
    """
    most = max(map(len, groups))
    form = next(iter(source.forms.values()))
    own = [[np.zeros(n, np.uint8) for n in form.sizes] for _ in range(most)]
    counts, seconds = [0, 0], [0.0, 0.0]

    def into_slot(slot: int, key: tuple[int, int]) -> None:
        stream._read(Load(Key(*key), slot))

    def plainly(place: int, key: tuple[int, int]) -> None:
        source.read(*key, own[place])

    with ThreadPoolExecutor(THREADS) as pool:
        for turn, group in enumerate(groups):
            started = time.perf_counter()
            list(pool.map((into_slot, plainly)[turn % 2], range(len(group)), group))
            seconds[turn % 2] += time.perf_counter() - started
            counts[turn % 2] += sum(source.forms[layer].nbytes for layer, _ in group)
    return counts[0] / seconds[0], counts[1] / seconds[1]


def forget(source: ExpertSource) -> None:
    """Drop the files from the system's cache."""
    for file in source.files:
        with file.path.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()

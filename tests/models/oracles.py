"""mlx-lm and llama.cpp on the same checkpoint. Tests that use them are marked `model`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def mlx_lm_model(path: Path, **config: Any) -> Any:
    """mlx-lm's model of the folder, in float32; `config` overrides keys of its config.json."""
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
    model, _ = utils.load_model(path, model_config=config)
    model.set_dtype(mx.float32)
    return model


def mlx_lm_logits(model: Any, ids: np.ndarray, pieces: Iterable[int] = ()) -> np.ndarray:
    """Logits (len(ids), vocab) of mlx-lm's own cache and masks, reading pieces of the given sizes, then the rest."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache, logits, start = make_prompt_cache(model), [], 0
    for size in (*pieces, len(ids)):
        chunk = np.asarray(ids[start : start + size], np.int32)
        if len(chunk):
            logits.append(np.array(model(mx.array(chunk)[None], cache=cache)[0]))
        start += len(chunk)
    return np.concatenate(logits)


def write_mlx_lm(path: Path, config: dict[str, Any], seed: int, **quantize: Any) -> Path:
    """A random model of `config` as mlx-lm saves it, in float32 or quantized (group_size, bits)."""
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
    from mlx.utils import tree_map_with_path

    model_class, args_class = utils._get_classes(config)
    model = model_class(args_class.from_dict(config))
    mx.random.seed(seed)

    def random(name: str, array: Any) -> Any:
        noise = mx.random.normal(array.shape)
        if name.endswith("e_score_correction_bias"):
            return 0.2 * noise
        return 1 + 0.3 * noise if array.ndim == 1 else 1.3 * noise / array.shape[-1] ** 0.5

    model.update(tree_map_with_path(random, model.parameters()))
    if quantize:
        model, config = utils.quantize_model(model, config, **quantize)
    path.mkdir()
    utils.save_model(path, model)
    utils.save_config(config, path / "config.json")
    return path


def llama_cpp_logits(path: Path, ids: np.ndarray) -> np.ndarray:
    """Logits (len(ids), vocab) of llama.cpp on the CPU, with float32 KV, all tokens in one batch."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    options.use_extra_bufts = False  # its AMX kernels crash on matrices this narrow
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    assert model, f"llama.cpp does not load {path}"
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = len(ids)
    options.n_threads = 1
    options.type_k = options.type_v = 0  # GGML_TYPE_F32
    options.flash_attn_type = 0  # which would round keys and values to float16
    context = llama_cpp.llama_init_from_model(model, options)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, 1
        batch.seq_id[i][0] = 0
    assert llama_cpp.llama_decode(context, batch) == 0
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=(len(ids), vocab)).copy()
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return logits

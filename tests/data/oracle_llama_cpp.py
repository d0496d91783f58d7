"""llama.cpp, through llama-cpp-python, as precise as it gets on the CPU."""

import os

import llama_cpp.llama_cpp as api
from llama_cpp import Llama

_defaults = api.llama_model_default_params


def _plain_buffers() -> api.llama_model_params:
    params = _defaults()
    params.use_extra_bufts = False  # repacked for AMX, small matrices crash llama-cpp-python 0.3.36
    return params


def open_llama(path: str | os.PathLike[str], context: int) -> Llama:
    """The GGUF model at `path`, keys and values in float32, logits kept for every position."""
    f32 = 0
    api.llama_model_default_params = _plain_buffers
    return Llama(str(path), n_ctx=context, n_threads=2, logits_all=True, type_k=f32, type_v=f32, verbose=False)

"""The GPU tests over a stand-in for CuPy that runs every kernel on this machine's CPU: see tests/cuda_on_cpu."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)


def on_cpu(file: str, chosen: str, **settings: str) -> None:
    """Run the tests of a file that are marked gpu and match `chosen`, in a process whose CuPy is the stand-in."""
    quiet = "-q", "-x", "-p", "no:cacheprovider", "-o", "addopts="
    command = [sys.executable, "-m", "pytest", *quiet, str(TESTS / file), "-k", chosen]
    environment = os.environ | {"PYTHONPATH": str(TESTS / "cuda_on_cpu"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=environment | settings, capture_output=True, text=True, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert re.search(r"\b[1-9]\d* passed", done.stdout), f"no test ran: {done.stdout[-500:]}"


@pytest.mark.parametrize(
    ("file", "chosen", "reason"),
    [("ops/test_cuda_ops.py", "no_such_test", "deselected"), ("models/test_cuda_multi_gpu.py", "", "no test ran")],
)
def test_a_run_without_a_test_fails(file, chosen, reason):
    """A run fails if no test is chosen, or if all are skipped, as the tests of two GPUs are on one."""
    with pytest.raises(AssertionError, match=reason):
        on_cpu(file, chosen, BIMETAL_GPUS="1")


def test_row_ops():
    on_cpu("ops/test_cuda_ops.py", "nothing_is_read or test_op and (rms_norm or mul_ or glu or scale or block_conv)")
    on_cpu("ops/test_cuda_products.py", "quotient")


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("products", "bf16_where"),
        pytest.param("products", "extremes or prefill or largest_sums or two_types and Q4_K", marks=pytest.mark.slow),
        pytest.param("mixtures", "quantized_experts", marks=pytest.mark.slow),
        pytest.param("attention", "of_trees and 65-7 and (6.2.16 or .2.128)", marks=pytest.mark.slow),
        pytest.param("attention", "one_row_of_each and 3", marks=pytest.mark.slow),
        pytest.param("ops", "before_they_are_stored and 256", marks=pytest.mark.compile),
        pytest.param("exact", "one_row_has and (lm4/lm4 or q8_0/q8_0) and 20 and 300-130", marks=pytest.mark.slow),
        pytest.param("ops", "test_op and not 65", marks=pytest.mark.slow),
    ],
)
def test_compute_capability_7_5(file, chosen):
    on_cpu(f"ops/test_cuda_{file}.py", chosen, BIMETAL_CAPABILITY="75")


@pytest.mark.compile
def test_tables_of_experts():
    on_cpu("ops/test_cuda_experts.py", "table")


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(
            "laguna and stored and (counts or profile or fails or refused) or without", marks=pytest.mark.compile
        ),
        pytest.param("bits or moves", marks=pytest.mark.slow),
        pytest.param("not bits and not moves", marks=pytest.mark.slow),
    ],
)
def test_hot_and_cold_experts(chosen):
    on_cpu("models/test_cuda_hot_experts.py", chosen)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("trace", marks=pytest.mark.compile),
        pytest.param("bench or refusals", marks=pytest.mark.slow),
    ],
)
def test_replayed_routing(chosen):
    on_cpu("models/test_cuda_bench_spark.py", chosen)


@pytest.mark.slow
def test_spark():
    on_cpu("models/test_cuda_spark.py", "test_")


@pytest.mark.compile
def test_draws():
    on_cpu("ops/test_cuda_sampling.py", "test_draws and not 5003")


@pytest.mark.compile
def test_sampled_steps():
    on_cpu("ops/test_cuda_sampling.py", "sampled_steps or greedy_steps or chains or argmax or chosen_tokens")


@pytest.mark.compile
def test_rows_of_trees():
    layers = "(KVSpec-None or LatentSpec) and (6.2.16 or 3.1.16)"
    on_cpu("ops/test_cuda_attention.py", f"of_trees and (65-7 or 65-136) and {layers}")


@pytest.mark.parametrize(
    "chosen",
    [
        "refusals or memory_of_many or gaps or blocks_of_another",
        pytest.param("long_steps and (llama-rows or llama])", marks=pytest.mark.compile),
        pytest.param("between_the_parts and llama]", marks=pytest.mark.compile),
        pytest.param("parts_of_a_pair and dflash", marks=pytest.mark.compile),
        pytest.param("parts_of_a_pair and not dflash", marks=pytest.mark.slow),
        pytest.param("parts_of_a_long_step and not llama]", marks=pytest.mark.slow),
        pytest.param("long_steps and qwen35 and not moe", marks=pytest.mark.slow),
        pytest.param("long_steps and (qwen35moe or laguna)", marks=pytest.mark.slow),
        pytest.param("engine and (qwen35 or laguna) and not moe and not m1", marks=pytest.mark.slow),
        pytest.param("alone and qwen35 and not moe", marks=pytest.mark.slow),
        pytest.param("alone and qwen3 and not qwen35 and not yarn", marks=pytest.mark.slow),
        pytest.param("alone and laguna and not m1", marks=pytest.mark.slow),
        pytest.param("alone and glm", marks=pytest.mark.slow),
        pytest.param("prompt and (qwen35 and not moe or glm)", marks=pytest.mark.slow),
        pytest.param("prompt and laguna and not m1", marks=pytest.mark.slow),
    ],
)
def test_sequences_of_a_pool(chosen):
    on_cpu("ops/test_cuda_pool.py", chosen)


@pytest.mark.parametrize(
    "chosen",
    [
        "taken or cancelled or memory and not loaded or predicted",
        *(pytest.param(f"{name}] and (leaves or move)", marks=pytest.mark.slow) for name in ("qwen3", "qwen35", "glm")),
        pytest.param("laguna or run_out", marks=pytest.mark.slow),
        pytest.param("loaded or drafts", marks=pytest.mark.slow),
    ],
)
def test_pages_of_a_pool(chosen):
    on_cpu("ops/test_cuda_pages.py", chosen)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("qwen35-0-3", marks=pytest.mark.compile),
        *(pytest.param(f"{name}-0-3", marks=pytest.mark.slow) for name in ("qwen3", "laguna", "glm")),
        pytest.param("qwen35-1-6", marks=pytest.mark.slow),
    ],
)
def test_replies_of_an_engine(chosen):
    on_cpu("ops/test_cuda_engine.py", chosen)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("test_bytes and 64-3 or test_bytes and 128-3", marks=pytest.mark.compile),
        pytest.param("neighbours and (64-lm4 or 128-q8_0) and 50 or state or refusals", marks=pytest.mark.compile),
        pytest.param(
            "test_latents and lm4-128 or latents_do_not and lm4-50 or stretches and 64-lm4", marks=pytest.mark.compile
        ),
        pytest.param("latents", marks=pytest.mark.slow),
        pytest.param("test_bytes or windows or norm_and or strided", marks=pytest.mark.slow),
        pytest.param("test_attention", marks=pytest.mark.slow),
        pytest.param("neighbours", marks=pytest.mark.slow),
    ],
)
def test_formats_of_caches(chosen):
    on_cpu("ops/test_cuda_formats.py", chosen)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("left_out and 16 or scores", marks=pytest.mark.compile),
        pytest.param("not 16 and not scores", marks=pytest.mark.slow),
    ],
)
def test_blocks_of_keys_that_are_left_out(chosen):
    on_cpu("ops/test_cuda_block_sparse.py", chosen)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("as_numpy and lm4/lm4 or snapshots and (6 or 200) or bytes or alone", marks=pytest.mark.compile),
        pytest.param(
            "bits and (62 and lm4-60 or not 62 and (lm4-4 or lm4-60)) or counts and 150", marks=pytest.mark.compile
        ),
        pytest.param("one_row_has and (lm4/lm4 or lm4/q4_0 or q8_0/q8_0) and 20 and 300", marks=pytest.mark.compile),
        pytest.param("one_row_has and not (lm4/lm4 or lm4/q4_0 or q8_0/q8_0)", marks=pytest.mark.slow),
        pytest.param("outliers", marks=pytest.mark.compile),
        pytest.param("not every_pair", marks=pytest.mark.slow),
        pytest.param("every_pair", marks=pytest.mark.slow),
    ],
)
def test_exact_tokens(chosen):
    on_cpu("ops/test_cuda_exact.py", chosen)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("rms_norm or route", marks=pytest.mark.compile),
        pytest.param("not moe and not attention", marks=pytest.mark.slow),
    ],
)
def test_races_in_shared_memory(chosen):
    """Run kernels under the race detector, except for those that order shared memory by asynchronous copies."""
    on_cpu("ops/test_cuda_ops.py", f"test_op and ({chosen}) and not 65 and not 140", BIMETAL_RACES="1")


@pytest.mark.compile
def test_larger_blocks_after_a_long_past():
    on_cpu("ops/test_cuda_attention.py", "larger_blocks and 192")
    on_cpu("ops/test_cuda_exact.py", "larger_blocks and lm4/lm4")


@pytest.mark.compile
def test_products_of_warp_groups():
    on_cpu("ops/test_cuda_attention.py", "warp_groups and not 300- or stay_with and 2 or latents_after and 192 and 2]")
    on_cpu("ops/test_cuda_launch.py", "compiled_for_one_capability")


@pytest.mark.compile
def test_one_row_of_each_sequence():
    on_cpu("ops/test_cuda_delta.py", "one_row_of_each and not 64")
    on_cpu("ops/test_cuda_attention.py", "one_row_of_each and 3 or of_trees and (65-7 or 300-2) and .2.128")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("ops", "test_op and not attention and not 65 and not 140"),
        ("ops", "test_op and attention and (past0 or past1-) and not 65 and not 140"),
        ("products", "embed_decodes or mixed or expanded or prefill"),
        ("products", "quantized_linear and shape1"),
        ("mixtures", "experts"),
        ("sampling", "argmax or draws"),
        ("attention", "of_trees and (250-7 or 64-22)"),
        ("attention", "test_biases"),
        ("delta", "mixer_trees and 128"),
    ],
)
def test_ops(file, chosen):
    on_cpu(f"ops/test_cuda_{file}.py", chosen)


MODELS = ["qwen3-", "qwen3moe", "qwen2", "mistral", "qwen35 ", "qwen35moe", "qwen3next", "laguna", "gemma3", "glm"]
MODELS += ["gptoss", "phi", "smollm3", "granite", "olmo2", "olmo3", "deepseek2", "deepseek3", "granitemoe"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    chosen = "tree or snapshot or whole or replay"
    on_cpu("models/test_cuda_models.py", f"{name.strip(' -')} and not yarn and not m1 and ({chosen})")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35 ", "qwen35moe", "glm"])
def test_multi_token_prediction(name):
    chosen = f"test_multi_token_prediction and {name.strip()}" + (" and not moe" if name[-1] == " " else "")
    on_cpu("decode/test_cuda_speculation.py", chosen)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dspark", "dflash2"])
def test_drafts_that_depend_on_the_token_before(name):
    on_cpu("decode/test_cuda_speculation.py", f"token_before and {name}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DFlash2", "DSpark"])
@pytest.mark.parametrize("names", ["llama or qwen3", "laguna or glm"])
def test_drafts_of_every_family(kind, names):
    on_cpu("decode/test_cuda_speculation.py", f"of_every_family and {kind} and ({names})")


@pytest.mark.slow
def test_compressed_caches_of_a_draft():
    on_cpu("decode/test_cuda_speculation.py", "test_compressed_caches_of_a_draft")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen35", "qwen35moe", "laguna", "glm"])
def test_eagle(name):
    on_cpu("decode/test_cuda_speculation.py", f"test_eagle and [{name}]")


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["test_multi_token_prediction", "test_eagle", "token_before"])
def test_chains_on_several_gpus(chosen):
    on_cpu("models/test_cuda_multi_gpu.py", chosen, BIMETAL_GPUS="2")


def test_launches():
    on_cpu("ops/test_cuda_launch.py", "test_")


def test_ops_of_several_gpus():
    on_cpu("models/test_cuda_multi_gpu.py", "every_op_is_forwarded", BIMETAL_GPUS="2")


@pytest.mark.compile
def test_two_models_in_two_threads():
    on_cpu("models/test_cuda_threads.py", "two_models")


@pytest.mark.compile
def test_attention_scores():
    on_cpu("models/test_cuda_models.py", "attention_scores and (yarn or laguna and not m1)")


@pytest.mark.compile
def test_memory():
    on_cpu("models/test_cuda_models.py", "memory_of and (closed or laguna or qwen35moe)")
    on_cpu("models/test_cuda_models.py", "a_piece and (laguna or qwen35moe) and not m1")
    on_cpu("decode/test_cuda_speculation.py", "memory_of")
    on_cpu("models/test_cuda_work.py", "test_")


@pytest.mark.compile
@pytest.mark.parametrize(
    "chosen",
    [
        "test_logits and short and three",
        "not test_logits and not test_draft and not multi_token and not widths",
        "test_draft and own and qwen35",
        pytest.param("test_logits and not (short and three)", marks=pytest.mark.slow),
        pytest.param("test_draft and not (own and qwen35)", marks=pytest.mark.slow),
        pytest.param("widths", marks=pytest.mark.slow),
    ],
)
def test_several_gpus(chosen):
    on_cpu("models/test_cuda_multi_gpu.py", chosen, BIMETAL_GPUS="3")


@pytest.mark.compile
@pytest.mark.parametrize("file", ["exchange", "nccl"])
def test_sums_over_gpus(file):
    on_cpu(f"ops/test_cuda_{file}.py", "test_", BIMETAL_GPUS="3")


@pytest.mark.compile
@pytest.mark.parametrize(
    "chosen",
    [
        "test_logits[ and (llama or qwen35 and not moe) or lost or fails or forwarded or gpus or divide or part",
        "(by_nccl or greedy_tokens) and llama or hard_logits",
        pytest.param("test_logits and not llama", marks=pytest.mark.slow),
        pytest.param("alone or draws or api or prefixes or memory or refused", marks=pytest.mark.slow),
        pytest.param("prefill", marks=pytest.mark.slow),
        pytest.param("drafts or widths", marks=pytest.mark.slow),
    ],
)
def test_gpus_that_share_layers(chosen):
    on_cpu("models/test_cuda_tensor_parallel.py", chosen, BIMETAL_GPUS="2")


@pytest.mark.compile
@pytest.mark.parametrize(
    "chosen",
    [
        "qwen35 and (rows_of or before or replies and 2) or at_once and off or drafts and two",
        pytest.param("at_once and lookup or drafts and own", marks=pytest.mark.slow),
        pytest.param("qwen35 and not rows_of and not before", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-", "laguna", "glm")),
    ],
)
def test_sequences_on_several_gpus(chosen):
    on_cpu("ops/test_cuda_multi_gpu_pool.py", chosen, BIMETAL_GPUS="3")


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("reordered or no_row or not_committed or at_once", marks=pytest.mark.compile),
        pytest.param("leading_run or loop or prefills or simulators or verified and 8", marks=pytest.mark.compile),
        pytest.param("test_", marks=pytest.mark.slow),
    ],
)
def test_windows(chosen):
    on_cpu("decode/test_cuda_wedlm.py", chosen)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("families and (qwen35 or laguna) and not 140 or emptied", marks=pytest.mark.compile),
        pytest.param("wait or pinned or interpreter_ends", marks=pytest.mark.compile),
        *(pytest.param(c, marks=pytest.mark.slow) for c in ("families", "not fam")),
    ],
)
def test_saved_states(chosen):
    on_cpu("models/test_cuda_saved_states.py", chosen)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["every_family", "sampled or top_k", "cold_experts", "share_passes"])
def test_speculation(chosen):
    on_cpu("decode/test_cuda_speculation.py", chosen)


@pytest.mark.compile
def test_published_experts_of_gpt_oss():
    on_cpu("models/test_cuda_gpt_oss.py", "published")


@pytest.mark.compile
@pytest.mark.parametrize(
    ("file", "chosen"),
    [("ops", "test_op and (sinks or biased) and not 140"), ("exact", "sink_logits")],
)
def test_sink_logits_and_biased_experts(file, chosen):
    on_cpu(f"ops/test_cuda_{file}.py", chosen)


@pytest.mark.slow
def test_random_experts_of_a_benchmark():
    on_cpu("models/test_cuda_gpt_oss.py", "random")


@pytest.mark.slow
def test_real_widths():
    on_cpu("models/test_cuda_models.py", "real_widths")

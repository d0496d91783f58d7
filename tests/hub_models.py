"""A server on 127.0.0.1 that stands in for the Hub, with small models; and an empty cache that is pointed at it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, Repo

from common import hub, hub_download
from common.errors import BimetalError
from common.hub import resolve_model

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
    "modules.json": b'[{"of": "modules"}]',
    "1_Pooling/config.json": b'{"of": "pooling"}',
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
    for module in (hub, hub_download):
        monkeypatch.setattr(module, "WAITS", (0, 0, 0, 0))
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

"""The tokenizer of a Hugging Face folder: tokenizer.json and the files beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from common.errors import BimetalError
from common.files import check_regular


def from_folder(folder: Path, config: Mapping[str, Any]) -> tuple[Backend, dict[str, Any]]:
    """Read the package's tokenizer, and the other arguments of common.tokenizer.Tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise BimetalError(f"{folder} has no tokenizer.json, the only form of tokenizer that is supported")
    try:
        backend = Backend.from_buffer(file.read_bytes())  # the package takes no path that is not UTF-8
    except Exception as error:  # the package raises plain Exception
        raise BimetalError(f"{file} cannot be read: {error}") from None
    settings = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")

    def declared(name: str) -> list[int]:
        """List ids of "bos" or "eos" from every file that names one, the tokenizer's own first."""
        token = settings.get(f"{name}_token")
        if isinstance(token, dict):
            token = token.get("content")
        ids = [backend.token_to_id(token)] if isinstance(token, str) else []
        for source in (generation, config):
            value = source.get(f"{name}_token_id")
            ids += value if isinstance(value, list) else [value]
        return [id for id in ids if isinstance(id, int)]

    bos, eos = declared("bos"), declared("eos")
    # The post-processor shows whether a prompt begins with bos; an explicit setting overrides it.
    plain, full = backend.encode("a", add_special_tokens=False).ids, backend.encode("a").ids
    at = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    prefix, suffix = full[:at], full[at + len(plain) :]
    if settings.get("add_bos_token") is not None:
        prefix = bos[:1] if settings["add_bos_token"] else []
    return backend, dict(
        prefix=prefix,
        suffix=suffix,
        bos_id=bos[0] if bos else None,
        eos_id=eos[0] if eos else None,
        end_ids=eos,
        chat_templates=_folder_templates(folder, settings),
    )


def _folder_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """List the files of a Hugging Face folder that may hold chat templates; a later file overrides an earlier one."""
    templates: dict[str, Any] = {}
    for source in (settings, _read_json(folder / "chat_template.json")):
        found = source.get("chat_template") or []  # null in some files
        for entry in found if isinstance(found, list) else [{"name": "default", "template": found}]:
            if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
                raise BimetalError(f"{folder} has a chat template that is not text: {entry!r:.80}")
            templates[entry["name"]] = entry["template"]
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(file)
    return templates


def _read_text(file: Path) -> str:
    check_regular(file)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BimetalError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    text = _read_text(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # a ValueError also of a number of thousands of digits
        raise BimetalError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BimetalError(f"{file} holds a {type(value).__name__}, not an object")
    return value

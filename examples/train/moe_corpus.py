"""Build a corpus of two kinds of text, code and prose, so that a mixture's experts have something to divide.

    python moe_corpus.py build/

Code is Python of wheels with a permissive licence; prose is the English of the service descriptions in botocore
(Apache-2.0). Writes tokenizer.json, train.bin and held.bin (uint16, documents preceded by <|endoftext|>, both kinds in
turn) and kinds.json (tokens of each).
"""

import argparse
import gzip
import json
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from corpus import clean, download, fault, wheel_files
from tokens import encode, train_tokenizer

CODE = ["sympy", "networkx", "django", "sqlalchemy", "pandas", "scipy", "scikit-learn", "pydantic", "mypy", "aiohttp"]
PROSE = "botocore"
MOST = 16_000_000  # characters of each kind
SAMPLE = 12_000_000  # characters that the tokenizer is trained on
HELD_OUT = 40  # one document in HELD_OUT is not trained on
LEAST_PROSE = 60  # characters of a description that is kept


def code(wheels: Path) -> list[str]:
    """Python files, as corpus.py cleans and chooses them."""
    found = []
    for path in sorted(wheels.glob("*.whl")):
        if path.name.startswith(PROSE) or (read := wheel_files(path)) is None:
            continue
        texts = ((name, clean(source)) for name, source in read[1])
        found += [text for name, text in texts if fault(name, text) is None]
    return found


def descriptions(node: object) -> Iterator[str]:
    """The documentation strings within a service's description, as plain text."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "documentation" and isinstance(value, str):
                text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", value)).strip()
                if len(text) >= LEAST_PROSE:
                    yield text
            else:
                yield from descriptions(value)
    elif isinstance(node, list):
        for value in node:
            yield from descriptions(value)


def prose(wheels: Path) -> list[str]:
    """One document per service: its descriptions, each once."""
    (path,) = wheels.glob(f"{PROSE}-*.whl")
    seen, found = set[str](), []
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(n for n in wheel.namelist() if n.endswith("service-2.json.gz")):
            texts = [t for t in descriptions(json.loads(gzip.decompress(wheel.read(name)))) if t not in seen]
            seen.update(texts)
            found += ["\n\n".join(texts[i : i + 20]) + "\n" for i in range(0, len(texts), 20)]
    return found


def shortened(texts: list[str], seed: int) -> list[str]:
    """A random choice of `texts`, of MOST characters in all."""
    random.Random(seed).shuffle(texts)
    kept, room = [], MOST
    for text in texts:
        if (room := room - len(text)) < 0:
            break
        kept.append(text)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    if not list(wheels.glob("*.whl")):
        download([*CODE, PROSE], wheels)
    kinds = {"code": shortened(code(wheels), 1), "prose": shortened(prose(wheels), 2)}
    both = [text for texts in kinds.values() for text in texts]
    random.Random(3).shuffle(both)
    sample = both[: max(1, SAMPLE * len(both) // sum(map(len, both)))]
    tokenizer = train_tokenizer(sample)
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = list(encode(tokenizer, both))
    np.concatenate([row for i, row in enumerate(rows) if i % HELD_OUT]).tofile(folder / "train.bin")
    np.concatenate(rows[::HELD_OUT]).tofile(folder / "held.bin")
    counts = {kind: sum(len(row) for row in encode(tokenizer, texts)) for kind, texts in kinds.items()}
    (folder / "kinds.json").write_text(json.dumps(counts) + "\n")
    print(counts, sum(map(len, rows)))


if __name__ == "__main__":
    main()

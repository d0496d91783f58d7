"""BENCHMARKS.tsv: rows have the columns of `generate bench --log`, with the types that readers expect, once per run."""

import csv
import datetime
import re
from pathlib import Path

import pytest

from generate.bench_log import COLUMNS

LOG = Path(__file__).parents[1] / "BENCHMARKS.tsv"
NUMBERS = {
    *("context", "prompt_tokens", "new_tokens", "runs", "prefill_tps", "decode_tps_median", "decode_tps_min"),
    *("decode_tps_max", "gb_per_s", "accept_len", "peak_gb"),
}
KEY = ("commit", "machine", "versions", "model", "kv", "decoder", "context", "prompt_tokens", "new_tokens")
MOST_BYTES = 100_000  # baselines fit; a diary of variants does not: its facts belong into a kernel's Tried paragraph


def faults(line: str) -> list[str]:
    """What is wrong with a line of the log, by column."""
    cells = line.split("\t")
    if len(cells) != len(COLUMNS):
        return [f"{len(cells)} cells, the header has {len(COLUMNS)}"]
    row = dict(zip(COLUMNS, cells, strict=True))
    peer = row["versions"].startswith("llama.cpp")
    found = [f"{name}: {row[name]!r} is no number" for name in sorted(NUMBERS) if not _is_number(row[name])]
    if not _is_date(row["date"]):
        found.append(f"date: {row['date']!r} is no ISO date")
    if not re.fullmatch("[0-9a-f]{7}", row["commit"]) and not (peer and not row["commit"]):
        found.append(f"commit: {row['commit']!r} is no commit of seven digits")
    if row["base_commit"] and not re.fullmatch("[0-9a-f]{7}", row["base_commit"]):
        found.append(f"base_commit: {row['base_commit']!r} is no commit of seven digits")
    if row["dirty"] not in ("yes", "no"):
        found.append(f"dirty: {row['dirty']!r} is neither yes nor no")
    if row["verdict"] != "keep":
        found.append(f"verdict: {row['verdict']!r}; main holds baselines, whose verdict is keep")
    found += [f"{name}: empty" for name in ("machine", "versions", "model", "decoder") if not row[name]]
    if not (row["prefill_tps"] or row["decode_tps_median"] or row["gb_per_s"] or row["accept_len"]):
        found.append("no figure")
    return found


def _is_number(text: str) -> bool:
    return not text or re.fullmatch(r"\d+(\.\d+)?", text) is not None


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def test_every_row_has_the_columns_of_bench():
    header, *lines = LOG.read_text().splitlines()
    assert header.split("\t") == list(COLUMNS)
    assert lines
    found = {number: faults(line) for number, line in enumerate(lines, 2)}
    assert {number: faults for number, faults in found.items() if faults} == {}


def test_a_run_is_logged_once():
    with LOG.open(newline="") as file:
        keys = [tuple(row[name] for name in KEY) for row in csv.DictReader(file, delimiter="\t")]
    assert sorted({key for key in keys if keys.count(key) > 1}) == []


def test_the_log_holds_baselines_alone():
    assert LOG.stat().st_size <= MOST_BYTES


@pytest.mark.parametrize(
    ("column", "value", "fault"),
    [
        ("gb_per_s", "77a66f1", "gb_per_s: '77a66f1' is no number"),  # a row shifted by one cell
        ("date", "20261122", "is no ISO date"),
        ("commit", "main", "is no commit"),
        ("dirty", "", "neither yes nor no"),
        ("verdict", "drop", "main holds baselines"),
        ("machine", "", "machine: empty"),
    ],
)
def test_a_fault_is_found(column, value, fault):
    cells = LOG.read_text().splitlines()[1].split("\t")
    cells[COLUMNS.index(column)] = value
    assert any(fault in found for found in faults("\t".join(cells)))


def test_a_missing_cell_is_found():
    assert faults(LOG.read_text().splitlines()[1].partition("\t")[2]) == ["24 cells, the header has 25"]

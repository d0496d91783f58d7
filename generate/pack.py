"""`python -m generate pack MODEL OUT`: a mixture's experts in one file, from which each is read at once."""

import argparse
from pathlib import Path

from tqdm import tqdm

from common.checkpoint import open_checkpoint
from common.expert_pack import write_pack
from common.files import naming
from common.hub import resolve_model
from common.models import architecture


def run(args: argparse.Namespace) -> int:
    checkpoint = open_checkpoint(resolve_model(args.model))
    definition = architecture(checkpoint)[1]
    layout, out = definition.layout(definition.read_config(checkpoint), checkpoint), Path(args.out)
    with naming(out), tqdm(desc="packing", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        source, plan = write_pack(checkpoint, layout, out, bar.update)
    blocks = len(source.forms) * source.experts
    print(f"{out}: {blocks} experts of {len(source.forms)} layers, {plan.end / 2**20:.1f} MiB")
    return 0

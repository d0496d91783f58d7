"""Write a multi-token-prediction block of Qwen3.5 as a GGUF file of the block alone.

    python export_mtp.py out/demo-qwen35-mtp out/demo-qwen35-mtp-Q8_0.gguf

Reads what train_mtp.py wrote, and the metadata of the demo's GGUF file; needs the gguf package, and no torch. Matrices
are stored in Q8_0, and named as llama.cpp names those of a model whose last layer is such a block.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from common.checkpoint import open_checkpoint
from common.demo import demo_path
from common.gguf_file import copied_keys, finish_gguf, write_gguf
from common.gguf_keys import Key, Kind
from common.outputs import begin, output_of
from common.quantize import Format, gguf_format
from common.quants import dequantize
from common.weights import dense

NAMES = {  # of GGUF, and of Hugging Face
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
AROUND = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}


def export(folder: Path, target: Path, out: Path, type_: str = "Q8_0") -> None:
    """Write the block in `folder`, for the model of the GGUF file `target`."""
    block, format = open_checkpoint(folder), gguf_format(type_)
    keys = [key for key in copied_keys(target, format) if not key.name.startswith("tokenizer.")]
    (layers,) = (key.value for key in keys if key.name.endswith(".block_count"))
    architecture = next(key.value for key in keys if key.name == "general.architecture")
    vocab = open_checkpoint(target).tensors["token_embd.weight"].shape[0]
    stated = {"block_count": layers + 1, "nextn_predict_layers": 1, "vocab_size": vocab}
    keys = [key for key in keys if key.name.rpartition(".")[2] not in stated and key.name != "general.name"]
    keys += [Key(f"{architecture}.{name}", value, Kind.UINT32.value) for name, value in stated.items()]
    keys.append(Key("general.name", out.stem, Kind.STRING.value))
    outputs = []
    for theirs, ours in [
        *((f"layers.0.{hf}", gguf) for gguf, hf in NAMES.items()),
        *((b, a) for a, b in AROUND.items()),
    ]:
        name, values = f"blk.{layers}.{ours}.weight", dequantize(block.tensors[f"mtp.{theirs}.weight"])
        is_norm = values.ndim == 1  # stored around zero in a folder, around one in a GGUF file
        outputs.append(output_of(name, dense(name, values + is_norm), format=Format("F32") if is_norm else format))
    part = begin(out, block, outputs, {"format": type_})
    write_gguf(part, keys, outputs, format, lambda size: None)
    finish_gguf(part, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    export(args.folder, demo_path(), args.out)
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()

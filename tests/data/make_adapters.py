"""Write tests/data/adapters/: random LoRA adapters of tiny models as PEFT saves them, with logits that PEFT computes.

Made with peft 0.21, transformers 5.24 and torch 2.14 on the CPU, in float32. The numbers of an adapter are float16
numbers. golden.npz holds ids (64,) int32 and logits (64, vocab) float32 of the model with the adapter.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
POSITIONS = 64
ATTENTION, FFN = ["q_proj", "v_proj", "o_proj"], ["gate_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "llama": {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, *FFN], "rank_pattern": {"v_proj": 3}},
    "qwen35": {
        **{"r": 4, "lora_alpha": 6, "use_rslora": True, "alpha_pattern": {"out_proj": 3}},
        "target_modules": [*ATTENTION, *FFN, "in_proj_qkv", "in_proj_z", "out_proj"],
    },
    "glm": {"r": 5, "lora_alpha": 5, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    "deepseek2": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "kv_a_proj_with_mqa", "o_proj"]},
    "olmo2": {"r": 3, "lora_alpha": 6, "target_modules": [*ATTENTION, "k_proj", *FFN]},
}


def main() -> None:
    for number, (name, options) in enumerate(ADAPTERS.items()):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_pretrained(HERE / "models" / name, dtype=torch.float32)
        adapted = get_peft_model(model, LoraConfig(**options))
        with torch.no_grad():
            for parameter, values in adapted.named_parameters():
                if "lora_" in parameter:
                    values.copy_((torch.randn_like(values) * 0.2).half().float())
        folder = HERE / "adapters" / name
        adapted.save_pretrained(folder)
        (folder / "README.md").unlink()
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = None
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
        ids = np.random.default_rng(number).integers(model.config.vocab_size, size=POSITIONS).astype(np.int32)
        with torch.no_grad():
            logits = adapted.eval()(torch.tensor(ids[None].astype(np.int64))).logits[0].numpy()
        np.savez_compressed(folder / "golden.npz", ids=ids, logits=logits)


if __name__ == "__main__":
    main()

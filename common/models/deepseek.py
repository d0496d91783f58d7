"""DeepSeek-V2-Lite, DeepSeek-Coder-V2-Lite, Moonlight (`deepseek_v2`, `deepseek_v3`): GLM-4.7-Flash's latent attention.

Queries may have no latent, and YaRN scales the scores too. Version 2 chooses experts by a softmax and weights them by
their probabilities, version 3 as GLM-4.7-Flash does. Models that choose groups of experts first (DeepSeek-V2, V3 and
R1) are refused. GGUF files are `deepseek2`, which glm.py reads.
"""

from dataclasses import replace

from common.checkpoint import Checkpoint
from common.config import Keys
from common.models import glm
from common.models.blocks import hf_rope, yarn_magnitude
from common.models.glm import MTP as MTP
from common.models.glm import NORM_FIX as NORM_FIX
from common.models.glm import Config, hf_fields
from common.models.glm import check_mtp as check_mtp
from common.models.glm import for_rank as for_rank
from common.models.glm import forward as forward
from common.models.glm import halves as halves
from common.models.glm import layout as layout
from common.models.glm import mtp_spec as mtp_spec
from common.models.glm import mtp_weights as mtp_weights
from common.models.glm import state_spec as state_spec
from common.models.glm import write_past as write_past
from common.ops import Rope

MSCALES = ("mscale", "mscale_all_dim")  # of YaRN: factors of the rope's magnitude, the second also of the scores'
LATENT_EPS = 1e-6  # of the norms of latents in the models' own code, whatever rms_norm_eps is
GROUPS = {"deepseek_v2": 1, "deepseek_v3": 8}  # of experts, where config.json states none


def read_config(checkpoint: Checkpoint) -> Config:
    return glm.read_config(checkpoint) if checkpoint.format == "gguf" else _hf_config(checkpoint)


def _hf_config(checkpoint: Checkpoint) -> Config:
    """Read config.json; its keys without a value have the defaults of transformers."""
    keys, model_type = Keys(checkpoint.config, f"{checkpoint.path} config.json"), checkpoint.config["model_type"]
    sigmoid = model_type == "deepseek_v3"
    keys.expect("topk_method", *(("noaux_tc",) if sigmoid else ("greedy", "group_limited_greedy")))
    keys.expect("scoring_func", "sigmoid" if sigmoid else "softmax")
    keys.expect("norm_topk_prob", sigmoid)
    groups = {key: keys.read(key, int, GROUPS[model_type]) for key in ("n_group", "topk_group")}
    Keys(groups, keys.where).expect("n_group", 1)
    Keys(groups, keys.where).expect("topk_group", 1)
    fields = hf_fields(checkpoint, keys)
    rope, score_factor = _rope(keys, fields["rope_dim"])
    return Config(
        **fields,
        dense_layers=keys.read("first_k_dense_replace", int, 3 if sigmoid else 0),
        q_latent=keys.read("q_lora_rank", int, 0),
        rope=rope,
        score_factor=score_factor,
        sigmoid=sigmoid,
        eps=keys.positive("rms_norm_eps", 1e-6),
        latent_eps=LATENT_EPS,
    )


def _rope(keys: Keys, dim: int) -> tuple[Rope, float]:
    """Return the rope of `dim` channels, and YaRN's factor on scores."""
    group = "rope_parameters" if keys.read("rope_parameters", dict, {}) else "rope_scaling"
    stated = keys.read(group, dict, {})
    others = {key: value for key, value in stated.items() if key not in MSCALES}
    rope = hf_rope(Keys(dict(keys.values) | {group: others}, keys.where), dim)
    if (stated.get("rope_type") or stated.get("type")) != "yarn":
        return rope, 1.0
    factor = keys.positive(f"{group}.factor")
    of_rope, of_scores = (yarn_magnitude(factor, keys.read(f"{group}.{key}", float, 0.0)) for key in MSCALES)
    if all(stated.get(key) for key in MSCALES) and stated.get("attention_factor") is None:
        rope = replace(rope, magnitude=of_rope / of_scores)
    return rope, of_scores**2

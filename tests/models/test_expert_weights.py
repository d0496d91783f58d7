"""Which weights of a model are a mixture's experts, which a backend may hold elsewhere."""

import pytest
import tiny

from common.models import architecture, load_model
from common.reference import NumpyOps
from common.weights import ExpertMatrix


class Counted(NumpyOps):
    def __init__(self):
        super().__init__()
        self.layers, self.current = [], -1

    def loading_layer(self, layer):
        self.current = layer
        return super().loading_layer(layer)

    def expert_weight(self, *parts):
        self.layers.append((self.current, parts[0].shape[0]))
        return super().expert_weight(*parts)


EXPERTS = ["qwen3", "qwen3moe", "qwen35moe", "qwen3next", "laguna", "glm", "glm4moe", "gptoss"]
EXPERTS += ["deepseek2", "granitemoe"]


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_loaded_as_experts(name):
    """Two stacks per sparse layer, gates with ups and downs, and no other weight: latent heads are stacks too."""
    checkpoint, ops = tiny.checkpoint(name), Counted()
    definition = architecture(checkpoint)[1]
    tables = definition.layout(definition.read_config(checkpoint), checkpoint).layers
    found = [(i, key) for i, table in enumerate(tables) for key, e in table.items() if isinstance(e, ExpertMatrix)]
    sparse = [i for i, table in enumerate(tables) if "router" in table]
    assert found == [(i, key) for i in sparse for key in ("experts_gate_up", "experts_down")]
    assert bool(sparse) == (name != "qwen3")
    model = load_model(checkpoint, ops)
    count = model.config.experts.count if sparse else 0
    assert ops.layers == [(i, count) for i in sparse for _ in range(2)]

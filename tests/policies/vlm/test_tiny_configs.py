"""Tiny configurations are published ones with sizes cut: every switch and every kind of layer is
there, and the class builds them."""

from typing import Any

import pytest
import torch
import transformers

from tests.fixtures import tiny_configs

MAPPING = transformers.AutoModelForImageTextToText._model_mapping
TYPES = {kind.model_type: kind for kind in MAPPING}
OF = {name: entry.get("of", name) for name, entry in tiny_configs.table().items()}
KINDS = {name: TYPES[of] for name, of in OF.items() if of in TYPES}


def parts(config: dict[str, Any], name: str = "") -> dict[str, dict[str, Any]]:
    """Return a configuration and those inside it by their paths."""
    inside = {k: v for k, v in config.items() if k.endswith("_config") and isinstance(v, dict)}
    found = {name: {k: v for k, v in config.items() if k not in inside}}
    for key, value in inside.items():
        found |= parts(value, f"{name}.{key}")
    return found


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_cut_configuration_has_every_switch_and_kind_of_layer(name):
    kind = KINDS[name]
    whole, small = (
        parts(config)
        for config in (tiny_configs.published(kind, name), tiny_configs.tiny(kind, name).to_dict())
    )
    assert whole.keys() == small.keys()
    for path, part in whole.items():
        for key, value in part.items():
            if isinstance(value, (bool, str, float)):
                assert small[path][key] == value, (path, key)
            if key in ("layer_types", "mlp_layer_types", "indexer_types") and value:
                assert set(small[path][key]) == set(value), (path, key)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_cut_configuration_is_small(name):
    with torch.device("meta"):
        model = MAPPING[KINDS[name]](tiny_configs.tiny(KINDS[name], name))
    assert sum(p.numel() for p in model.parameters()) < 2e7


def test_layers_are_chosen_by_kind():
    """By hand: of eight layers, the last four share keys of others, every fourth has full
    attention."""
    config = {
        "num_hidden_layers": 8,
        "num_kv_shared_layers": 4,
        "layer_types": ["sliding", "sliding", "sliding", "full"] * 2,
        "deepstack_visual_indexes": [5, 7],
    }
    small = tiny_configs.cut(config)
    assert small["layer_types"] == ["sliding", "full", "sliding", "sliding", "full"]
    assert small["num_hidden_layers"] == 5 and small["num_kv_shared_layers"] == 3
    assert small["deepstack_visual_indexes"] == [3, 4]


def test_ropes_and_heads_are_scaled_by_one_number():
    rope = {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
    config = {"head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 2}
    small = tiny_configs.cut(config | {"rope_parameters": rope, "num_hidden_layers": 2})
    assert small["rope_parameters"]["mrope_section"] == [1, 1, 2]  # a quarter of 32, by pairs
    assert small["head_dim"] == 32 and small["num_attention_heads"] == 4
    assert small["num_key_value_heads"] == 2


def test_special_tokens_lie_within_the_small_vocabulary():
    config = {"vocab_size": 151936, "image_token_id": 151655, "video_token_id": 151656}
    config |= {"eos_token_id": 151645, "text_config": {"image_token_id": 151655}}
    small = tiny_configs.cut(config)
    assert small["image_token_id"] == small["text_config"]["image_token_id"] == 260
    assert small["video_token_id"] == 261 and small["eos_token_id"] == 259
    assert small["vocab_size"] == 288


def test_a_layer_with_heads_of_its_own_keeps_as_many_keys_as_queries():
    own = {"num_attention_heads": 64, "num_key_value_heads": 64}
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "per_layer_config": {"1": own},
    }
    small = tiny_configs.cut(config)["per_layer_config"]["1"]
    assert small["num_key_value_heads"] == small["num_attention_heads"]

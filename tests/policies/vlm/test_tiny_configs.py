"""Tiny configurations are published ones with sizes cut: every switch and every kind of layer is
there, and the class builds them."""

from typing import Any

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


def test_cut_configurations_are_small_and_have_every_switch_and_kind_of_layer():
    for name, kind in KINDS.items():
        compare(name, kind)
        with torch.device("meta"):
            model = MAPPING[kind](tiny_configs.tiny(kind, name))
        assert sum(p.numel() for p in model.parameters()) < 2e7, name


def compare(name, kind):
    whole, small = (
        parts(config)
        for config in (tiny_configs.published(kind, name), tiny_configs.tiny(kind, name).to_dict())
    )
    assert whole.keys() == small.keys()
    for path, part in whole.items():
        for key, value in part.items():
            if isinstance(value, (bool, str, float)):
                assert small[path][key] == value, (name, path, key)
            if key in ("layer_types", "mlp_layer_types", "indexer_types") and value:
                assert set(small[path][key]) == set(value), (name, path, key)

"""What FSDP2 gathers one by one: blocks that are there, and that hold most of the weights."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from mmrl.policies.contracts import KeepsWhole
from mmrl.policies.vlm.policy import VLM
from mmrl.train.device import Device
from mmrl.train.shard_units import shard_classes, ties_kept
from mmrl.zoo.models.masked.masked_lm import MaskedLM
from tests.fixtures import tiny_diffusers, tiny_masked_lm, tiny_vlms


def shares(net):
    """Which classes are chosen, that all of them are there, and the share of weights in them."""
    classes = shard_classes(net)
    inside = {
        id(p)
        for module in net.modules()
        if type(module).__name__ in classes
        for p in module.parameters()
    }
    assert set(classes) <= {type(module).__name__ for module in net.modules()}
    assert not {name for name in classes if hasattr(nn, name)}
    sizes = {id(p): p.numel() for p in net.parameters()}
    return classes, sum(sizes[key] for key in inside) / sum(sizes.values())


def vlm(name):
    return VLM(str(tiny_vlms.folder(name)), max_new_tokens=2).net


def transformer(name):
    return tiny_diffusers.pipeline(name).transformer


# a network, its blocks, and the least share of weights in them; the first four name other blocks
# than these models have, or none; the last two are mostly tables
UNITS = {
    "hunyuan_i2v": (transformer, "HunyuanVideoTokenReplaceTransformerBlock", 0.7),
    "kandinsky5": (transformer, "Kandinsky5TransformerDecoderBlock", 0.7),
    "amused": (transformer, "BasicTransformerBlock", 0.7),
    "llava": (vlm, "LlamaDecoderLayer", 0.5),
    "flux": (transformer, "FluxTransformerBlock", 0.5),
    "gemma3": (vlm, "Gemma3DecoderLayer", 0.5),
    "ltx": (transformer, "LTXVideoTransformerBlock", 0.3),
    "qwen2_5_vl": (vlm, "Qwen2_5_VLDecoderLayer", 0.3),
}


@pytest.mark.parametrize("name", UNITS)
def test_a_network_is_gathered_by_its_own_blocks(name):
    make, block, share = UNITS[name]
    classes, held = shares(make(name))
    assert block in classes and held > share


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.steps = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.nested = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])
        self.plain = nn.ModuleList([nn.Linear(8, 64), nn.Linear(8, 64)])
        self.few = nn.ModuleList([nn.LayerNorm(2)])


@pytest.mark.parametrize(
    ("plugin", "sharded", "named"),
    [
        (SimpleNamespace(transformer_cls_names_to_wrap=None), True, ["Block"]),
        (SimpleNamespace(transformer_cls_names_to_wrap=["Mine"]), True, ["Mine"]),
        (SimpleNamespace(transformer_cls_names_to_wrap=None), False, None),
        (None, True, None),
    ],
)
def test_what_a_user_names_at_launch_rules(plugin, sharded, named):
    state = SimpleNamespace(fsdp_plugin=plugin)
    accelerator = SimpleNamespace(state=state, device=torch.device("cpu"))
    device = SimpleNamespace(accelerator=accelerator, sharded=sharded)
    net = Net()
    policy = Mock(KeepsWhole, net=net, unsharded=[net.few])
    Device._name_units(device, policy)
    if named == ["Block"]:
        assert plugin.ignored_modules == [net.few]
    assert getattr(plugin, "transformer_cls_names_to_wrap", None) == named


def test_what_holds_the_embedding_or_stays_whole_is_not_gathered_by_itself():
    """BERT's class names the module around its embedding, whose weight and bias the head shares."""
    net = MaskedLM(str(tiny_masked_lm.folder()), max_new_tokens=2, steps=1).net
    assert "BertEmbeddings" in net._no_split_modules and shard_classes(net) == ["BertLayer"]
    assert shard_classes(net, whole=[net.bert.encoder]) == []
    head = net.get_output_embeddings()
    with ties_kept(net):  # its bias is registered a second time
        assert net.get_input_embeddings() is net.get_output_embeddings() is None
    assert net.get_output_embeddings() is head
    net.cls.predictions.bias = None
    with ties_kept(net):
        assert net.get_output_embeddings() is head


def test_lists_in_lists_are_looked_into_and_torchs_own_layers_are_no_blocks():
    net = Net()
    assert shard_classes(net) == ["Block"]
    adapted = Net()  # an adapter may have the name of what it adapts
    adapted.plain = nn.ModuleList([type("Linear", (Block,), {})() for _ in range(2)])
    assert shard_classes(adapted) == ["Block"]
    net._no_split_modules = ["Block"]
    assert shard_classes(net) == ["Block"]
    net._no_split_modules = ["Linear", "Gone"]  # what the class says, if it is there
    assert shard_classes(net) == ["Block", "Linear"]
    assert shard_classes(nn.Linear(2, 2)) == []

"""Third-party adapters start a run, and lora options mean the same as in peft."""

import json
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForImageTextToText

from mmrl.core.errors import UserError
from mmrl.policies import adapter_files
from mmrl.policies.lora import Lora, add_lora, ending_like, merged
from mmrl.policies.vlm.policy import VLM
from mmrl.zoo.models.image_tokens.janus import Janus
from tests.fixtures import tiny_vlms, vllm_models
from tests.fixtures.image_tokens import tiny_janus

QWEN = "qwen2_5_vl"


def policy(lora):
    return VLM(str(tiny_vlms.folder(QWEN)), max_new_tokens=4, lora=lora)


@pytest.fixture
def adapter(tmp_path):
    """Train nothing, but save random adapters as peft itself does."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_vlms.folder(QWEN))
    layers = r".*language_model.*\.(q_proj|v_proj)"
    config = LoraConfig(r=3, lora_alpha=5, target_modules=layers, init_lora_weights=False)
    torch.manual_seed(0)
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", adapted


def test_an_adapter_of_peft_begins_a_run(adapter):
    folder, theirs = adapter
    ours = policy(Lora(3, 5.0, ["q_proj", "v_proj"]))
    names = ours.weights.parameters()
    ours.weights.load(adapter_files.read(folder, ours.net, names))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = theirs.eval()(input_ids=ids).logits
        got = ours.net.hf(input_ids=ids).logits
        plain = AutoModelForImageTextToText.from_pretrained(tiny_vlms.folder(QWEN))(input_ids=ids)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert (expected - plain.logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        (None, "this policy trains all weights: set policy option lora: {rank: 3, alpha: 5}"),
        (Lora(2, 5.0, ["q_proj", "v_proj"]), "set policy option lora: {rank: 3, alpha: 5}"),
        (Lora(3, 6.0, ["q_proj", "v_proj"]), "set policy option lora: {rank: 3, alpha: 5}"),
        (Lora(3, 5.0, ["q_proj"]), "they leave out .*v_proj"),
        (Lora(3, 5.0), "it has none of .*; its own are .*q_proj"),
    ],
)
def test_another_adapter_is_refused(lora, sentence, adapter):
    ours = policy(lora)
    with pytest.raises(UserError, match=sentence):
        adapter_files.read(adapter[0], ours.net, ours.weights.parameters())


@pytest.mark.parametrize(
    "change", [{"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}]
)
def test_kinds_that_are_not_plain_are_refused(change, adapter):
    file = adapter[0] / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    ours = policy(Lora(3, 5.0, ["q_proj", "v_proj"]))
    with pytest.raises(UserError, match=f"{next(iter(change))} is .* merge it"):
        adapter_files.read(adapter[0], ours.net, ours.weights.parameters())


@pytest.mark.parametrize("lora", [None, 4])
def test_an_exported_adapter_is_no_path_of_a_model(lora, tmp_path):
    base = tiny_janus(tmp_path / "base", 16)
    Janus(base, lora=4).export(tmp_path / "adapter")
    with pytest.raises(UserError, match=f"LoRA adapter on {re.escape(str(base))}.*`start: "):
        Janus(str(tmp_path / "adapter"), lora=lora)
    again = Janus(base, lora=4)
    names = again.weights.parameters()
    assert adapter_files.read(tmp_path / "adapter", again.net, names).keys() == names.keys()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"q": nn.Linear(2, 2), "k": nn.Linear(2, 2)})])
        self.lm_head = nn.Linear(2, 3)


@pytest.mark.parametrize("targets", ["all-linear", r"layers\.\d+\.q", r".*\.(q|k)"])
def test_targets_are_those_of_peft(targets):
    ours, theirs = Net(), Net()
    add_lora(ours, Lora(1, None, targets))
    # peft knows the head of models of transformers alone
    meant = r".*layers\..*\.(q|k)" if targets == "all-linear" else targets
    theirs = get_peft_model(theirs, LoraConfig(r=1, target_modules=meant))
    names = {n.removeprefix("base_model.model.") for n, _ in theirs.named_parameters()}
    assert {n for n, _ in ours.named_parameters()} == names


def test_targets_that_are_no_regular_expression_are_refused():
    with pytest.raises(UserError, match="is no regular expression"):
        add_lora(Net(), Lora(1, None, "q(["))
    with pytest.raises(UserError, match="match no module of the part"):
        ending_like(["a.q"], "nothing", "part")


def test_all_linear_of_a_vision_language_model_is_its_language_model():
    chosen = [
        set(policy(Lora(2, None, targets)).weights.parameters()) for targets in ("all-linear", None)
    ]
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_of_tied_weights_are_not_merged(target):
    net = AutoModelForImageTextToText.from_pretrained(vllm_models.folder("tied_qwen2_5_vl"))
    add_lora(net, Lora(2, None, ["q_proj", target]))
    with pytest.raises(UserError, match=f"{target} cannot be merged: its weight is also that of"):
        merged(net)
    untied = AutoModelForImageTextToText.from_pretrained(tiny_vlms.folder(QWEN))
    add_lora(untied, Lora(2, None, ["q_proj", target]))
    assert not any("lora_" in name for name in merged(untied))

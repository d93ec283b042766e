"""Third-party adapters start a run, and lora options mean the same as in peft."""

import json
import re
from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForImageTextToText

from mmrl.core.errors import UserError
from mmrl.policies import adapter_files
from mmrl.policies.lora import (
    Lora,
    add_lora,
    casting_inputs,
    ending_like,
    keep_input_dtype,
    merged,
)
from mmrl.policies.vlm.policy import VLM
from mmrl.zoo.models.image_tokens.janus import Janus
from tests.fixtures import tiny_vlms, vllm_models
from tests.fixtures.image_tokens import tiny_janus

QWEN = "qwen2_5_vl"
PLAIN = Lora(3, 5.0, ["q_proj", "v_proj"])


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
    ours = policy(PLAIN)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        plain = ours.net.hf(input_ids=ids).logits
        ours.weights.load(adapter_files.read(folder, ours.net, ours.weights.parameters()))
        expected = theirs.eval()(input_ids=ids).logits
        got = ours.net.hf(input_ids=ids).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert (expected - plain).abs().max() > 1e-2


REFUSED = [
    (None, {}, "this policy trains all weights: set policy option lora: {rank: 3, alpha: 5}"),
    (Lora(2, 5.0, ["q_proj", "v_proj"]), {}, "set policy option lora: {rank: 3, alpha: 5}"),
    (Lora(3, 6.0, ["q_proj", "v_proj"]), {}, "set policy option lora: {rank: 3, alpha: 5}"),
    (Lora(3, 5.0, ["q_proj"]), {}, "they leave out .*v_proj"),
    (Lora(3, 5.0), {}, "it has none of .*; its own are .*q_proj"),
    (PLAIN, {"use_dora": True}, "use_dora is .* merge it"),
    (PLAIN, {"use_rslora": True}, "use_rslora is .* merge it"),
    (PLAIN, {"modules_to_save": ["lm_head"]}, "modules_to_save is .* merge it"),
]


def test_another_adapter_is_refused(adapter):
    file = adapter[0] / "adapter_config.json"
    written = json.loads(file.read_text())
    for lora, change, sentence in REFUSED:
        file.write_text(json.dumps(written | change))
        ours = policy(lora)
        with pytest.raises(UserError, match=sentence):
            adapter_files.read(adapter[0], ours.net, ours.weights.parameters())


def test_an_exported_adapter_is_no_path_of_a_model(tmp_path):
    base = tiny_janus(tmp_path / "base", 16)
    Janus(base, lora=4).export(tmp_path / "adapter")
    for lora in (None, 4):
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


def test_targets_are_those_of_peft():
    # peft knows the head of models of transformers alone
    alike = {r"layers\.\d+\.q": r"layers\.\d+\.q", "all-linear": r".*layers\..*\.(q|k)"}
    for targets, meant in alike.items():
        ours, theirs = Net(), Net()
        add_lora(ours, Lora(1, None, targets))
        theirs = get_peft_model(theirs, LoraConfig(r=1, target_modules=meant))
        names = {n.removeprefix("base_model.model.") for n, _ in theirs.named_parameters()}
        assert {n for n, _ in ours.named_parameters()} == names


def test_targets_that_name_nothing_are_refused():
    with pytest.raises(UserError, match="is no regular expression"):
        add_lora(Net(), Lora(1, None, "q(["))
    with pytest.raises(UserError, match="match no module of the part"):
        ending_like(["a.q"], "nothing", "part")


def test_adapters_of_tied_weights_are_not_merged():
    for target in ("lm_head", "embed_tokens"):
        net = AutoModelForImageTextToText.from_pretrained(vllm_models.folder("tied_qwen2_5_vl"))
        add_lora(net, Lora(2, None, ["q_proj", target]))
        with pytest.raises(UserError, match=f"{target} cannot be merged: its weight is also that"):
            merged(net)


def outputs_and_gradients(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    y.float().pow(2).sum().backward()
    return [y.detach(), *(p.grad for p in net.parameters() if p.requires_grad)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_under_autocast_inputs_are_taken_as_they_come_with_the_same_numbers(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to(dtype)
    add_lora(net, Lora(4, targets=["0", "2"]))
    for name, p in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)  # a new adapter's is zero, and its input's gradient with it
    x = torch.randn(5, 16, dtype=dtype)
    kept = deepcopy(net)
    keep_input_dtype(kept)
    assert not any(layer.cast_input_dtype_enabled for layer in (kept[0], kept[2]))
    for mine, plain in zip(outputs_and_gradients(kept, x), outputs_and_gradients(net, x)):
        assert torch.equal(mine, plain)
    x = x.bfloat16().to(dtype)
    with casting_inputs(kept):  # passes outside autocast cast within the block only
        assert torch.equal(kept(x), net(x))
    assert not kept[0].cast_input_dtype_enabled

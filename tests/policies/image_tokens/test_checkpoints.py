"""Published checkpoints of LlamaGen and VAR: their names and shapes at full size, and their files
as people have them."""

import hashlib
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmrl.core.errors import UserError
from mmrl.zoo.models.image_tokens import llamagen as llamagen_files
from mmrl.zoo.models.image_tokens import var as var_files
from mmrl.zoo.models.image_tokens.llamagen import _T5, LlamaGen
from mmrl.zoo.models.image_tokens.llamagen_gpt import LlamaGenGPT
from mmrl.zoo.models.image_tokens.llamagen_gpt import Shape as GPT
from mmrl.zoo.models.image_tokens.llamagen_vq import LlamaGenVQ
from mmrl.zoo.models.image_tokens.var import VAR
from mmrl.zoo.models.image_tokens.var_net import Shape as VARShape
from mmrl.zoo.models.image_tokens.var_net import VARNet
from mmrl.zoo.models.image_tokens.var_vq import VARVQ
from tests.fixtures.image_tokens import folder, policy_of

SIDES_512 = (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)


# at their published sizes: millions of parameters, and a checksum of the names and shapes of the
# published checkpoint, which were compared one by one with these modules' once
PUBLISHED = {
    "GPT-B": (LlamaGenGPT, (GPT(768, 12, 12),), 111, "b2cbce806faed8ee"),
    "GPT-XL of texts": (
        LlamaGenGPT,
        (GPT(1280, 36, 20, classes=0, condition=120),),
        775,
        "0dd7e2231cafa874",
    ),
    "GPT-3B": (LlamaGenGPT, (GPT(3200, 24, 32),), 3100, "7c1f092926ed74b7"),
    "VAR-d16": (VARNet, (VARShape(1024, 16, 16), None), 310, "b883c42c4fc284bb"),
    "VAR-d36": (
        VARNet,
        (VARShape(2304, 36, 36, SIDES_512, shared=True), None),
        2300,
        "440b6e13b9589788",
    ),
    "VQ-16": (LlamaGenVQ, (), 72, "91be226d824dacd5"),
    "VAR's VQ": (VARVQ, (), 108, "95680488cc11ed9c"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_networks_have_the_published_names_and_shapes_which_tell_their_sizes(name):
    kind, arguments, millions, checksum = PUBLISHED[name]
    with torch.device("meta"):
        net = kind(*arguments)
    state = net.state_dict()
    names = repr(sorted((name, tuple(value.shape)) for name, value in state.items()))
    assert hashlib.sha256(names.encode()).hexdigest()[:16] == checksum
    found = sum(p.numel() for p in net.parameters()) / 1e6
    assert found == pytest.approx(millions, rel=0.05)
    if kind is LlamaGenGPT:
        shape = llamagen_files.shape_of(state, "file", 16, None)
        assert replace(shape, feed=None) == arguments[0]
    elif kind is VARNet:
        sides = arguments[0].sides
        level = torch.arange(10).repeat_interleave(torch.tensor(sides) ** 2)
        shape = var_files.shape_of(state | {"lvl_1L": level[None]}, "file")
        assert replace(shape, feed=None, sides=tuple(shape.sides)) == arguments[0]


# --------------------------------------------------------------------------------------------------
# files


@pytest.fixture(scope="module")
def given():
    """The transformer's tensors and the tokenizer's file of the class-conditional model."""
    place = folder("llamagen-classes", 3)
    return load_file(place / "gpt.safetensors"), str(place / "vq.safetensors")


def saved(place, name, gpt, **beside):
    torch.save({"model": gpt, **beside}, place / name)
    return str(place / name)


def assert_holds(net, state):
    for name, value in state.items():
        assert torch.equal(net.state_dict()[name], value), name


def test_checkpoints_of_llamagen_are_read_or_refused(given, tmp_path):
    """A dictionary under "model" in a .pt file, with the rotations some of them carry."""
    gpt, vq = given
    file = saved(tmp_path, "c2i.pt", gpt | {"freqs_cis": torch.zeros(3)})
    assert_holds(LlamaGen(file, vq=vq, size=4, heads=2).net, gpt)
    codec = saved(tmp_path, "vq.pt", load_file(vq))
    broken = saved(tmp_path, "broken.pt", {k: v for k, v in gpt.items() if k != "norm.weight"})
    (tmp_path / "config.json").write_text('{"hidden_size": 16}')
    for path, options, sentence in (
        (file, {}, "vq is missing"),
        (codec, {"vq": codec}, "another kind of checkpoint"),
        (broken, {"vq": codec, "heads": 2}, r"(?s)does not fit LlamaGenGPT.*norm\.weight"),
        ("hub:peizesun/llamagen_t2i", {}, "write hub:owner/name/file"),
        (tmp_path / "nothing.pt", {"vq": codec}, "no file"),
        (file, {"vq": codec, "heads": 3}, "heads 3: the width 16"),
        (tmp_path, {"vq": codec, "size": None}, "has no size and no heads"),
    ):
        with pytest.raises(UserError, match=sentence):
            LlamaGen(str(path), **{"size": 4} | options)
    with pytest.raises(UserError, match="features have 12 numbers, and the checkpoint reads 16"):
        _T5(policy_of("llamagen").text_encoder, 16)


@pytest.mark.parametrize(
    ("name", "beside", "cells", "grid"),
    [
        ("c2i_L_384.pt", {}, None, 192),
        ("t2i_XL_stage2_512.pt", {}, None, 256),
        ("0050000.pt", {"args": Namespace(image_size=96, downsample_size=16)}, None, 6),
        ("c2i_L_384.pt", {}, 5, 5),
    ],
)
def test_pictures_have_the_size_of_the_checkpoint(name, beside, cells, grid, given, tmp_path):
    """The tokenizer of these tests makes two by two pixels of a token."""
    gpt, vq = given
    table = {} if cells is None else {"freqs_cis": torch.zeros(1 + cells**2, 4, 2)}
    policy = LlamaGen(saved(tmp_path, name, gpt | table, **beside), vq=vq, heads=2)
    assert policy.size == 2 * grid and policy.net.shape.grid == grid and not policy.report.notes


def test_a_size_that_nothing_tells_or_another_one_is_said(given, tmp_path):
    gpt, vq = given
    unknown = LlamaGen(saved(tmp_path, "gpt.pt", gpt), vq=vq, heads=2)
    assert unknown.size == 256 and "neither gpt.pt nor its name says" in unknown.report.notes[0]
    other = LlamaGen(saved(tmp_path, "c2i_L_384.pt", gpt), vq=vq, heads=2, size=4)
    assert other.size == 4 and "was trained at 384 pixels" in other.report.notes[0]


def test_a_checkpoint_of_the_published_training_is_read_without_other_pickles(given, tmp_path):
    gpt, vq = given
    wrapped = {f"_orig_mod.{name}": value for name, value in gpt.items()}
    file = saved(tmp_path, "0050000.pt", wrapped, optimizer={}, steps=1, args=Namespace(lr=1))
    assert_holds(LlamaGen(file, vq=vq, heads=2, size=4).net, gpt)
    file = saved(tmp_path, "other.pt", gpt, args=Path("anything"))
    with pytest.raises(UserError, match="cannot read .*other.pt as tensors"):
        LlamaGen(file, vq=vq, heads=2, size=4)


def test_checkpoints_of_var_are_read(tmp_path):
    """Two files of tensors, or the one of its training that holds both."""
    place = folder("var", 3)
    var, vae = (load_file(place / f"{name}.safetensors") for name in ("var", "vae"))
    hits = {"quantize.ema_vocab_hit_SV": torch.zeros(10, 3)}  # counts of training, of its scales
    both = {"config": {}, "var_wo_ddp": var, "vae_local": vae | hits, "var_opt": {}}
    for name, content in (
        ("var.pth", var),
        ("vae.pth", vae | hits),
        ("best.pth", {"epoch": 1, "iter": 0, "trainer": both, "args": {"depth": 16}}),
    ):
        torch.save(content, tmp_path / name)
    for first, second in (("var.pth", "vae.pth"), ("best.pth", "best.pth")):
        policy = VAR(str(tmp_path / first), vae=str(tmp_path / second))
        assert_holds(policy.net, var)
        assert_holds(policy.vae, {name: vae[name] for name in vae.keys() - hits.keys()})
    with pytest.raises(UserError, match="vae is missing"):
        VAR(str(tmp_path / "var.pth"))
    with pytest.raises(UserError, match="another kind of checkpoint"):
        VAR(str(tmp_path / "vae.pth"), vae=str(tmp_path / "vae.pth"))

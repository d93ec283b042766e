"""LoRA files in the forms of ComfyUI and kohya's sd-scripts: what diffusers' own readers make of
them is the network that was trained."""

from __future__ import annotations

import json
from functools import partial

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.core.errors import UserError
from mmrl.experiment import convert
from mmrl.experiment.build import begin_with, begin_with_lora
from mmrl.policies.diffusion import lora_files, lora_merging
from mmrl.policies.diffusion.lora_files import Base, Pair
from mmrl.policies.diffusion.lora_names import FAMILIES
from mmrl.policies.lora import Lora, merged
from tests.fixtures import tiny_diffusers
from tests.policies.diffusion import test_folder_families as folders

QKVO = ["to_q", "to_k", "to_v", "to_out.0"]
# diffusers' reader of FLUX knows the width of the published network's single blocks alone
OF_FLUX = [f"transformer_blocks.0.attn.{name}" for name in (*QKVO, "add_q_proj", "add_k_proj")]
# and cannot read the joined attention of HunyuanVideo's text refiner
OF_HUNYUAN = [f"transformer_blocks.0.attn.{name}" for name in (*QKVO, "add_v_proj", "to_add_out")]
FORMS = ["comfyui", "kohya"]
# tiny model -> forms that can be checked, modules to adapt where not the family's own
MADE = {
    "sdxl": (FORMS, None),
    "flux": (FORMS, [*OF_FLUX, "single_transformer_blocks.0.proj_out"]),
    "flux2": (FORMS, None),
    "qwen_image": (FORMS, None),
    "z_image": (FORMS, None),
    "ltx": (["comfyui"], None),
    "hunyuan_video": (["comfyui"], OF_HUNYUAN),
    "wan": (FORMS, None),
    "wan_i2v": (FORMS, None),
    "sana": ([], None),
}


def made(name, targets):
    """A policy of the family with a random adapter, and prompts for it."""
    lora = Lora(rank=2, alpha=3.0, targets=targets)
    policy = folders.make(name, lora=lora, fixed_batch_rows=None)
    randomise(policy.net)
    return policy, folders.CASES[name].prompts[:1]


def randomise(net, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)


def output(policy, net, prompts):
    """What a network says of fixed latents, through the family's own inputs."""
    own = policy.net
    policy.net = net
    try:
        with torch.no_grad():
            cond = {k: v for k, v in policy.encode(prompts).items() if k != "uncond"}
            x = torch.randn(1, *policy.shape, generator=torch.Generator().manual_seed(2))
            return policy.velocity(x, torch.full((1,), 0.7), cond)
    finally:
        policy.net = own


def network(base, place=None):
    """The network of a folder, as diffusers loads it."""
    return base.networks[base.part].from_pretrained(place or base.place, subfolder=base.part).eval()


def with_adapter(base, file):
    """The family's plain network with the file, as the pipeline loads it."""
    net = network(base)
    lora_files.load(base, net, file)
    return net.eval()


@pytest.mark.parametrize("name", MADE)
def test_diffusers_reads_our_network_from_every_form(name, tmp_path):
    forms, targets = MADE[name]
    policy, prompts = made(name, targets)
    base = Base.of(policy.place)
    ours = output(policy, policy.net, prompts)
    plain = output(policy, network(base), prompts)
    assert (ours - plain).abs().max() > 1e-2 * plain.abs().max()  # the adapter is seen

    def assert_read(file):
        theirs = output(policy, with_adapter(base, file), prompts)
        torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=2e-5)

    for form in FORMS:
        folder = tmp_path / form
        folder.mkdir()
        policy.export(folder)
        if form not in forms:
            with pytest.raises(UserError, match="has no reader of that form"):
                convert.rewrite_export(folder, policy.place, form)
            assert [file.name for file in folder.iterdir()] == [convert.LORA]
            continue
        if name == "wan" and form == "kohya":  # also by readers that know no metadata
            assert_read(folder / convert.LORA)
            assert_read(saved(tmp_path, "bare", load_file(folder / convert.LORA)))
        convert.rewrite_export(folder, policy.place, form)
        (file,) = folder.iterdir()
        assert_read(file)
        prefixes = {key.split(".")[0].split("_")[0] for key in load_file(file)}
        own_form = form == "comfyui" and FAMILIES[policy.pipeline].comfyui
        assert prefixes == ({"diffusion"} if own_form else {"lora"})


def random_adapter(base, modules, rank=2, seed=3):
    """Random adapters of modules of a network, of a scale and a rank that differ by module."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: module.weight.shape for name, module in modules_of(base).items()}
    return {
        name: Pair(
            torch.randn(rank + i % 2, shapes[name][1], generator=generator),
            torch.randn(shapes[name][0], rank + i % 2, generator=generator),
            0.5 + i,
        )
        for i, name in enumerate(modules)
    }


def modules_of(base):
    return {
        name: module
        for name, module in base.architecture().named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def test_joined_projections_of_flux_at_its_published_width(tmp_path):
    """kohya's form has query, key, value and the first layer of the MLP as one module."""
    with torch.device("meta"):
        net = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1)
    net.save_config(tmp_path / "transformer")
    index = {"transformer": ["diffusers", "FluxTransformer2DModel"], "_class_name": "FluxPipeline"}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    flux, single = Base.of(str(tmp_path)), "single_transformer_blocks.0"
    modules = [f"{single}.attn.to_q", f"{single}.attn.to_v", f"{single}.proj_out"]
    meant = random_adapter(flux, [*modules, "transformer_blocks.0.attn.add_k_proj"])
    lora_files.write(flux, meant, "kohya", tmp_path / "a.safetensors")
    stored = load_file(tmp_path / "a.safetensors")
    joined = "lora_unet_single_blocks_0_linear1"
    assert stored[f"{joined}.lora_up.weight"].shape == (3 * 3072 + 12288, 2 + 3)
    assert stored[f"{joined}.alpha"] == 5  # the rank: the scales are in the weights
    up, down = (stored[f"{joined}.lora_{name}.weight"] for name in ("up", "down"))
    parts = up[: 4 * 3072].view(4, 3072, 5)[:, :32] @ down  # query, key, value, and the MLP
    wanted = [meant[modules[i]].delta()[:32] for i in (0, 1)]
    nothing = torch.zeros_like(wanted[0])
    torch.testing.assert_close(parts, torch.stack([wanted[0], nothing, wanted[1], nothing]))


@pytest.fixture
def wan():
    return Base.of(str(tiny_diffusers.folder("wan")))


@pytest.fixture
def sdxl():
    return Base.of(str(tiny_diffusers.folder("sdxl")))


def test_forms_are_converted_into_each_other(sdxl, tmp_path):
    chosen = [name for name in modules_of(sdxl) if "attn" in name][::3]
    meant = random_adapter(sdxl, chosen)
    lora_files.write(sdxl, meant, "diffusers", tmp_path / "0.safetensors")
    for i, form in enumerate(["kohya", "comfyui", "diffusers"]):
        out = tmp_path / f"{i + 1}.safetensors"
        assert convert.convert(tmp_path / f"{i}.safetensors", sdxl.place, form, out) == out
    read = lora_files.read(sdxl, out)
    assert set(meant) <= set(read)
    for name, pair in read.items():
        wanted = meant[name].delta() if name in meant else torch.zeros_like(pair.delta())
        torch.testing.assert_close(pair.delta(), wanted, atol=1e-5, rtol=1e-5)
    first = load_file(tmp_path / "1.safetensors")
    assert "lora_unet_input_blocks_3_1_transformer_blocks_0_attn1_to_q.lora_up.weight" in first
    # diffusers' reader would give alphas that differ to the wrong modules
    assert not [key for key in first if key.endswith("alpha")]


def test_what_is_read_back_otherwise_is_not_written(sdxl, tmp_path, monkeypatch):
    meant = random_adapter(sdxl, [name for name in modules_of(sdxl) if "attn" in name][:2])
    true = lora_files.tensors

    def swapped(base, adapter, form):
        layers = true(base, adapter, form)
        ups = [key for key in layers if "lora_up" in key]
        return layers | {ups[0]: layers[ups[0]].flip(0)}

    monkeypatch.setattr(lora_files, "tensors", swapped)
    with pytest.raises(UserError, match="does not read 1 of 2 modules back as they are"):
        lora_files.write(sdxl, meant, "kohya", tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_module_without_a_checked_name_is_refused(tmp_path):
    refiner = "context_embedder.token_refiner.refiner_blocks.0.attn.to_q"
    for name, module, form in (
        ("sdxl", "add_embedding.linear_1", "kohya"),
        ("hunyuan_video", refiner, "comfyui"),
    ):
        base = Base.of(str(tiny_diffusers.folder(name)))
        with pytest.raises(UserError, match=f"the name of {module} in that form"):
            lora_files.write(base, random_adapter(base, [module]), form, tmp_path / "a.safetensors")


def assert_moved(ours, before, changes):
    """The weights are those before, moved by the changes."""
    assert set(ours) == set(before) >= set(changes)
    for name, weight in before.items():
        wanted = weight + changes.get(name, 0)
        torch.testing.assert_close(ours[name], wanted, atol=1e-5, rtol=1e-5)


def test_merging_adds_weighted_adapters_and_leaves_the_rest(wan, tmp_path):
    modules = [name for name in modules_of(wan) if name.startswith("blocks")][-4:]
    files, changes = [], {}
    for i, (form, weight) in enumerate([("diffusers", 0.5), ("comfyui", -2.0)]):
        files.append(tmp_path / f"{i}.safetensors")
        adapter = random_adapter(wan, modules[i:], seed=i)
        lora_files.write(wan, adapter, form, files[i])
        for name, pair in adapter.items():
            key = f"{name}.weight"
            changes[key] = changes.get(key, 0) + weight * pair.delta()
    place = convert.merge(files, wan.place, [0.5, -2.0], tmp_path / "merged")
    assert_moved(network(wan, place).state_dict(), network(wan).state_dict(), changes)
    text = "text_encoder/model.safetensors"
    assert (place / text).read_bytes() == (tiny_diffusers.folder("wan") / text).read_bytes()
    diffusers.WanPipeline.from_pretrained(place)


def of_flux(key):
    return {f"{key}.lora_A.weight": (2, 32), f"{key}.lora_B.weight": (32, 2)}


NOT_READ = "cannot read this LoRA|finds no LoRA weights"
FILES = {  # and what the sentence says
    "text": ({"lora_te1_text_model_q.lora_down.weight": (1, 2)}, "holds adapters of a text enc"),
    "half": ({"transformer.blocks.0.attn1.to_q.lora_A.weight": (1, 2)}, NOT_READ),
    "plain": ({"weight": (2,)}, NOT_READ),
    # of FLUX, which diffusers does not read, or of all modules only
    "peft": (of_flux("base_model.model.double_blocks.0.img_attn.proj"), NOT_READ),
    "comfyui": (of_flux("diffusion_model.double_blocks.0.img_attn.proj"), NOT_READ),
    "empty": ({}, "holds no tensors"),
}


def test_files_that_are_no_adapter_of_the_model(wan, sdxl, tmp_path):
    def refused(file, match, base=wan.place):
        with pytest.raises(UserError, match=match):
            convert.convert(file, base, "kohya", tmp_path / "out.safetensors")
        assert not (tmp_path / "out.safetensors").exists()

    chosen = [name for name in modules_of(sdxl) if "attn" in name][:2]
    lora_files.write(sdxl, random_adapter(sdxl, chosen), "kohya", tmp_path / "sdxl.safetensors")
    refused(tmp_path / "sdxl.safetensors", NOT_READ)
    for name, (shapes, match) in FILES.items():
        layers = {key: torch.zeros(shape) for key, shape in shapes.items()}
        base = str(tiny_diffusers.folder("flux")) if len(shapes) > 1 else wan.place
        refused(saved(tmp_path, name, layers), match, base)
    (tmp_path / "garbage.safetensors").write_bytes(b"\xff" * 100)
    refused(tmp_path / "garbage.safetensors", "no safetensors file")
    torch.save({"a": torch.zeros(1)}, tmp_path / "a.bin")
    refused(tmp_path / "a.bin", "give a .safetensors file")
    refused(tmp_path / "missing.safetensors", "no such file or folder")
    refused(tmp_path / "text.safetensors", "give --base", base=None)


def test_options_that_do_not_fit_are_refused_before_anything_is_read(tmp_path):
    file = tmp_path / "a.safetensors"
    file.touch()
    for out, says in ((file, "--out .* exists"), (tmp_path / "a.bin", "ends in .safetensors")):
        with pytest.raises(UserError, match=says):
            convert.convert(file, "base", "kohya", out)
    for scales, place, says in (
        ([1.0, 2.0], tmp_path / "new", "given 2 times for 1 adapters"),
        ([float("nan")], tmp_path / "new", "give finite numbers"),
        ([], tmp_path, "exists and is not empty"),
    ):
        with pytest.raises(UserError, match=says):
            convert.merge([file], "base", scales, place)
    with pytest.raises(UserError, match="did you mean 'kohya'"):
        convert.form_of("koyha")


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    wan = {"_class_name": "WanPipeline"}
    for index, message in (
        ({"_class_name": "os"}, "diffusers has no pipeline"),
        ({"_class_name": ["WanPipeline"]}, "diffusers has no pipeline"),
        (wan, "loads no LoRA weights"),
        (wan | {"transformer": "x"}, "loads no LoRA weights"),
        (wan | {"transformer": ["os", "system"]}, "loads no LoRA weights"),
        (wan | {"transformer": ["diffusers", "utils"]}, "loads no LoRA"),
    ):
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match=message):
            Base.of(str(tmp_path))


def saved(folder, name, layers, metadata=None):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.safetensors"
    save_file({k: v.contiguous() for k, v in layers.items()}, file, metadata)
    return file


def drawn(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def attention_layers(base, prefix, ends=("to_q", "to_v", "to_out.0"), seed=3):
    """Layers in diffusers' names, and the changes of weights that they mean."""
    chosen = [n for n in modules_of(base) if n.endswith(ends) and "attn" in n and "single" not in n]
    layers, changes = {}, {}
    for module, pair in random_adapter(base, chosen, seed=seed).items():
        layers[f"{prefix}{module}.lora_A.weight"] = pair.down
        layers[f"{prefix}{module}.lora_B.weight"] = 0.5 * pair.up
        changes[f"{module}.weight"] = 0.5 * pair.up @ pair.down
    return layers, changes


# --------------------------------------------------------------------------------------------------
# public layouts

IMAGE, TEXT = QKVO[:3], ["add_q_proj", "add_k_proj", "add_v_proj"]
BFL = {"img_attn.qkv": IMAGE, "txt_attn.qkv": TEXT, "img_attn.proj": ["to_out.0"]}
XLABS = {"qkv_lora1": IMAGE, "qkv_lora2": TEXT, "proj_lora1": ["to_out.0"]}
OWN = {f"attn.{part}": [part] for part in (*QKVO, "add_q_proj")}
OF_SD = {f"attn{i}.{part}": [f"attn{i}.{part}"] for i in (1, 2) for part in QKVO}
OF_WAN = {  # of its first code
    f"{layer}_attn.{letter}": [f"attn{i}.{part}"]
    for i, layer in enumerate(("self", "cross"), start=1)
    for letter, part in zip("qkvo", QKVO)
} | {"ffn.0": ["ffn.net.0.proj"], "ffn.2": ["ffn.net.2"]}
FLUX, WAN = "transformer_blocks.0.attn", "blocks.0"
SD = "down_blocks.1.attentions.0.transformer_blocks.0"
KOHYA, PEFT = ("lora_down", "lora_up"), ("lora_A", "lora_B")
SD_FLAT = SD.replace(".", "_")
# who writes it -> model, its block, names of the modules in a block, name of a layer, of down and
# up, and alpha's value
PUBLIC = {
    "kohya": ("flux", FLUX, BFL, "lora_unet_double_blocks_0_{_}", KOHYA, 1.0),
    "xlabs": ("flux", FLUX, XLABS, "double_blocks.0.processor.{}", ("down", "up"), None),
    "ai-toolkit": ("flux", FLUX, OWN, "transformer.transformer_blocks.0.{}", PEFT, None),
    "peft": ("flux", FLUX, OWN, "base_model.model.transformer_blocks.0.{}", PEFT, None),
    "onetrainer": ("flux", FLUX, OWN, "lora_transformer_transformer_blocks_0_{_}", KOHYA, 1.0),
    "diffsynth": (
        *("flux", FLUX, OWN, "transformer_blocks.0.{}"),
        *(("lora_A.default", "lora_B.default"), None),
    ),
    "bare": ("flux", FLUX, OWN, "transformer_blocks.0.{}", PEFT, None),
    "diffusers of sd": ("sd", SD, OF_SD, f"unet.{SD}.{{}}", PEFT, None),
    "kohya of sd": ("sd", SD, OF_SD, f"lora_unet_{SD_FLAT}_{{_}}", KOHYA, 0.5),
    "comfyui of wan": ("wan", WAN, OF_WAN, "diffusion_model.blocks.0.{}", KOHYA, None),
    "musubi-tuner": ("wan", WAN, OF_WAN, "lora_unet_blocks_0_{_}", KOHYA, 2.0),
}


def public_layers(kind, weights):
    """A file of that layout at rank 2, and the changes of weights that it means."""
    _, block, names, form, (first, second), alpha = PUBLIC[kind]
    layers, changes = {}, {}
    for i, (name, parts) in enumerate(names.items()):
        moved = [f"{block}.{part}.weight" for part in parts]
        shapes = [weights[name].shape for name in moved]
        down = drawn(2, shapes[0][1], 2 * i)
        up = drawn(sum(rows for rows, _ in shapes), 2, 2 * i + 1)
        key = form.replace("{_}", name.replace(".", "_")).format(name)
        layers |= {f"{key}.{first}.weight": down, f"{key}.{second}.weight": up}
        if alpha:
            layers[f"{key}.alpha"] = torch.tensor(alpha)
        change = (alpha / 2 if alpha else 1.0) * up @ down
        changes |= dict(zip(moved, change.split([rows for rows, _ in shapes])))
    return layers, changes


@pytest.mark.parametrize("kind", PUBLIC)
def test_the_layouts_of_public_trainers_are_merged(kind, tmp_path):
    """Written by their names: the weights move by up @ down times its scale."""
    base = Base.of(str(tiny_diffusers.folder(PUBLIC[kind][0])))
    before = network(base).state_dict()
    layers, changes = public_layers(kind, before)
    place = convert.merge([saved(tmp_path, "a", layers)], base.place, [], tmp_path / "to")
    assert_moved(network(base, place).state_dict(), before, changes)


def more_than_pairs(base, kind):
    """A layout that changes more than products of two matrices, and its metadata."""
    part, net = base.part, network(base)
    plain, changes = attention_layers(base, f"{part}.")
    modules = [name.removesuffix(".weight") for name in changes]
    if kind == "norms":
        name = "transformer.transformer_blocks.0.attn.norm_q.weight"
        return plain | {name: torch.full((16,), 1.7)}, None
    ranks = {module: len(plain[f"{part}.{module}.lora_A.weight"]) for module in modules}
    said = {"r": 2, "lora_alpha": 2, "peft_type": "LORA", "use_dora": True}
    said |= {"rank_pattern": ranks, "alpha_pattern": ranks}
    said["target_modules"] = sorted({module.rpartition(".")[2] for module in modules})
    for module in modules:
        norm = net.get_submodule(module).weight.norm(dim=1)
        plain[f"{part}.{module}.lora_magnitude_vector"] = 1.5 * norm
    metadata = json.dumps({f"{part}.{key}": value for key, value in said.items()})
    return plain, {lora_files.METADATA: metadata}


@pytest.mark.parametrize(("name", "kind"), [("sd", "dora"), ("flux", "norms")])
def test_what_no_pair_holds_is_merged_as_diffusers_loads_it_and_not_converted(name, kind, tmp_path):
    base = Base.of(str(tiny_diffusers.folder(name)))
    policy, prompts = made(name, ["to_q"] if name == "flux" else None)
    plain = output(policy, network(base), prompts)
    file = saved(tmp_path, kind, *more_than_pairs(base, kind))
    pipe = diffusers.DiffusionPipeline.from_pretrained(base.place)
    pipe.load_lora_weights(str(tmp_path), weight_name=file.name)
    theirs = output(policy, getattr(pipe, base.part).eval(), prompts)
    place = convert.merge([file], base.place, [], tmp_path / "merged")
    ours = output(policy, network(base, place), prompts)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    assert (ours - plain).abs().max() > 1e-3 * plain.abs().max()
    with pytest.raises(UserError, match="only a merged model has; use mmrl convert"):
        convert.convert(file, base.place, "diffusers", tmp_path / "out.safetensors")


def test_lightx2vs_biases_and_differences_of_whole_weights_are_merged(wan, tmp_path, caplog):
    """Pairs and their biases as diffusers loads them, the rest as ComfyUI adds it."""
    before = network(wan).state_dict()
    layers, _ = public_layers("comfyui of wan", before)
    ups = {key: up for key, up in layers.items() if key.endswith("lora_up.weight")}
    layers |= {
        key.replace("lora_up.weight", "diff_b"): torch.full((len(up),), 0.3)
        for key, up in ups.items()
    }
    # names of Wan's own code -> diffusers'; norm2 and norm3 change places
    places = {
        "blocks.0.self_attn.norm_q.diff": "blocks.0.attn1.norm_q.weight",
        "blocks.0.norm3.diff": "blocks.0.norm2.weight",
        "blocks.0.norm3.diff_b": "blocks.0.norm2.bias",
        "blocks.0.modulation.diff": "blocks.0.scale_shift_table",
        "head.head.diff": "proj_out.weight",
        "head.head.diff_b": "proj_out.bias",
        "time_projection.1.diff_b": "condition_embedder.time_proj.bias",
        "patch_embedding.diff": "patch_embedding.weight",
    }
    whole = {f"diffusion_model.{k}": torch.randn_like(before[name]) for k, name in places.items()}
    unknown = {"diffusion_model.blocks.9.norm3.diff": torch.ones(24)}
    saved(tmp_path, "pairs", layers)
    pipe = diffusers.WanPipeline.from_pretrained(wan.place)
    pipe.load_lora_weights(str(tmp_path), weight_name="pairs.safetensors")
    pipe.fuse_lora(["transformer"], lora_scale=0.5)
    pipe.unload_lora_weights()
    file = saved(tmp_path, "lightx2v", layers | whole | unknown)
    place = convert.merge([file], wan.place, [0.5], tmp_path / "merged")
    changes = {name: 0.5 * whole[f"diffusion_model.{key}"] for key, name in places.items()}
    assert_moved(network(wan, place).state_dict(), pipe.transformer.state_dict(), changes)
    assert "leaves out 1 of 9 differences of whole weights" in caplog.text
    assert "blocks.9.norm3.diff" in caplog.text and "norm_q" not in caplog.text
    with pytest.raises(UserError, match="changes whole weights, mostly of norms"):
        lora_files.read(wan, file)


def test_norms_of_lycoris_are_merged_by_their_flat_names(tmp_path):
    base = Base.of(str(tiny_diffusers.folder("sd")))
    before = network(base).state_dict()
    name = next(n for n in before if n.endswith("transformer_blocks.0.norm2.weight"))
    stem = "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
    change = torch.randn_like(before[name])
    file = saved(tmp_path, "norms", {f"{stem}.w_norm": change, f"{stem}.b_norm": 2 * change})
    place = convert.merge([file], base.place, [], tmp_path / "merged")
    changes = {name: change, name.replace(".weight", ".bias"): 2 * change}
    assert_moved(network(base, place).state_dict(), before, changes)


# --------------------------------------------------------------------------------------------------
# text encoders


def text_layers(pipe):
    """Pairs of the attention of a pipeline's text encoders, in diffusers' names and in kohya's."""
    parts = [part for part in pipe._lora_loadable_modules if part.startswith("text_encoder")]
    layers, kohya = {}, {}
    for number, part in enumerate(parts, start=1):
        for i, (name, module) in enumerate(getattr(pipe, part).named_modules()):
            if name.endswith(("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")):
                down = 0.3 * drawn(2, module.in_features, i)
                up = 0.3 * drawn(module.out_features, 2, i + 1)
                name = name if name.startswith("text_model.") else f"text_model.{name}"
                if name.endswith(("q_proj", "v_proj")):
                    key = f"{part}.{name}"
                    layers |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
                key = f"lora_te{number}_{name.replace('.', '_')}"
                kohya |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
                kohya[f"{key}.alpha"] = torch.tensor(1.0)
    return layers, kohya


def parts_of(pipe):
    loadable = [part for part in pipe._lora_loadable_modules if getattr(pipe, part, None)]
    return {part: getattr(pipe, part).state_dict() for part in loadable}


def fused(base, file):
    """The weights of a pipeline's parts with the file, as diffusers fuses them."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(base.place)
    pipe.load_lora_weights(str(file.parent), weight_name=file.name)
    pipe.fuse_lora(list(parts_of(pipe)))
    pipe.unload_lora_weights()
    return parts_of(pipe)


def with_scale(layers, parts, scale):
    """The layers at rank 2 and the metadata that says their scale."""
    cut = {k: v[:2] if "lora_A" in k else v[:, :2] for k, v in layers.items()}
    metadata = {}
    for part in parts:
        of_part = {k.removeprefix(f"{part}.") for k in cut if k.startswith(f"{part}.")}
        targets = {k.removeprefix("text_model.").split(".lora_")[0] for k in of_part}
        said = {"r": 2, "lora_alpha": 2 * scale, "target_modules": sorted(targets)}
        metadata |= {f"{part}.{key}": value for key, value in said.items()}
        metadata[f"{part}.peft_type"] = "LORA"
    return cut, {lora_files.METADATA: json.dumps(metadata)}


def assert_equal(ours, theirs):
    for part, state in theirs.items():
        assert set(state) == set(ours[part])
        for key, weight in state.items():
            torch.testing.assert_close(ours[part][key], weight, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [("sd", ["lora_te_"]), ("sdxl", ["lora_te1_", "lora_te2_"])],
)
def test_adapters_of_text_encoders_are_converted_and_merged(name, prefixes, tmp_path):
    """Of two of an attention's four projections, at half their change: diffusers fuses what was
    written as it fuses the original, and the merged folder is that."""
    base = Base.of(str(tiny_diffusers.folder(name)))
    pipe = diffusers.DiffusionPipeline.from_pretrained(base.place)
    layers = text_layers(pipe)[0] | attention_layers(base, f"{base.part}.")[0]
    file = saved(tmp_path, "all", *with_scale(layers, [base.part, *base.text_encoders], 0.5))
    out = convert.convert(file, base.place, "kohya", tmp_path / "out.safetensors")
    meant, plain = fused(base, file), parts_of(pipe)
    for part, state in meant.items():
        assert any(not plain[part][key].equal(weight) for key, weight in state.items())
    assert_equal(fused(base, out), meant)
    if name == "sdxl":
        place = convert.merge([out], base.place, [], tmp_path / "merged")
        assert_equal(parts_of(diffusers.DiffusionPipeline.from_pretrained(place)), meant)
    written = load_file(out)
    keys = [key for key in written if key.startswith(lora_files.OF_TEXT_ENCODERS)]
    assert {key.split("text_model")[0] for key in keys} == set(prefixes)
    for prefix in prefixes:
        key = f"{prefix}text_model_encoder_layers_0_self_attn_q_proj"
        assert written[f"{key}.alpha"] == 1 and len(written[f"{key}.lora_down.weight"]) == 2


@pytest.mark.parametrize(
    ("key", "own"),
    [
        ("lora_te3_encoder_block_0_layer_0_SelfAttention_q", False),  # sd-scripts
        ("lora_te2_encoder_block_0_layer_0_SelfAttention_q", True),  # OneTrainer
        ("text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q", False),
    ],
)
def test_a_text_encoder_without_a_place_is_left_out_and_named(key, own, tmp_path, caplog):
    """FLUX's T5, which diffusers' pipeline loads no adapters into, beside CLIP, which it does."""
    base = Base.of(str(tiny_diffusers.folder("flux")))
    pipe = diffusers.DiffusionPipeline.from_pretrained(base.place)
    _, clip = text_layers(pipe)
    names = [key, *(["lora_transformer_transformer_blocks_0_attn_to_q"] if own else [])]
    tensors = dict(clip)
    if key.startswith("text_encoders"):  # ComfyUI's names of both
        for name, _ in pipe.text_encoder.named_modules():
            kohya = f"lora_te1_text_model_{name.replace('.', '_')}."
            theirs = f"text_encoders.clip_l.transformer.{name}."
            tensors = {k.replace(kohya, theirs): v for k, v in tensors.items()}
    for i, name in enumerate(names):
        tensors[f"{name}.lora_down.weight"] = drawn(2, 32, i)
        tensors[f"{name}.lora_up.weight"] = drawn(32, 2, i + 2)
        tensors[f"{name}.alpha"] = torch.tensor(1.0)
    out = tmp_path / "out.safetensors"
    convert.convert(saved(tmp_path, "all", tensors), base.place, "kohya", out)
    said = f"leaves out 1 of {len(clip) // 3 + 1} layers of text encoders, which diffusers'"
    assert said in caplog.text and f": {key}\n" in caplog.text
    assert {name for name in load_file(out) if name.startswith("lora_te")} == set(clip)


def test_what_the_pipeline_has_no_place_for_is_named(wan, tmp_path, caplog):
    layers, _ = attention_layers(wan, "transformer.")
    text = {"text_encoder.encoder.block.0.q.lora_A.weight": torch.ones(1, 2)}
    convert.merge([saved(tmp_path, "both", layers | text)], wan.place, [], tmp_path / "merged")
    assert "leaves out 1 tensors of text encoders, such as 'text_encoder" in caplog.text
    more = {k.replace("blocks.0", "blocks.7"): v.clone() for k, v in layers.items()}
    lora_files.read(wan, saved(tmp_path, "more", layers | more))
    assert "blocks.7" in caplog.text


# --------------------------------------------------------------------------------------------------
# runs that begin with a file


def test_a_run_begins_with_a_lora_file(tmp_path):
    policy, prompts = made("flux", ["to_q", "to_k"])
    plain, base = output(policy, policy.net, prompts), Base.of(policy.place)
    layers, _ = attention_layers(base, "transformer.", ends=("attn.to_q",))
    file = saved(tmp_path, "some", layers)
    theirs = output(policy, with_adapter(base, file), prompts)
    lora_merging.begin(base, policy.net, file)  # of rank 2, as the policy's
    torch.testing.assert_close(output(policy, policy.net, prompts), theirs, atol=2e-5, rtol=2e-5)
    assert (theirs - plain).abs().max() > 1e-4
    whole = folders.make("flux", fixed_batch_rows=None)
    lora_merging.begin(base, whole.net, file)
    torch.testing.assert_close(output(whole, whole.net, prompts), theirs, atol=2e-5, rtol=2e-5)
    assert all(p.requires_grad for p in whole.net.parameters())
    large, _ = attention_layers(base, "transformer.", ends=("add_q_proj",))
    with pytest.raises(UserError, match="is not there; set lora: .rank: .* mmrl convert"):
        lora_merging.begin(base, policy.net, saved(tmp_path, "other", large))


class Here:
    """The configuration of a run, and the place of its option."""

    file = "run.yaml"

    def place(self, keys):
        return self

    def say(self, text):
        return text


HIGH, LOW = "my-lora_000002500_high_noise", "Wan2.2-Lightning_LOW_fp16"


def of_two_experts(wan, folder):
    """A pair of files by their names, and a folder each; the changes that they mean."""
    changes = {}
    for seed, (part, name) in enumerate({"transformer": HIGH, "transformer_2": LOW}.items()):
        layers, changes[part] = attention_layers(wan, "transformer.", seed=seed)
        saved(folder / "pair", name, layers)
        saved(folder / "apart" / part, convert.LORA.removesuffix(".safetensors"), layers)
    return changes


@pytest.mark.parametrize(
    ("start", "lora"),
    [
        ("pair", None),
        ("apart", Lora(rank=3, targets=["to_q", "to_v", "to_out.0"])),
        (f"pair/{LOW}.safetensors", None),
    ],
)
def test_files_of_two_experts_begin_a_run(start, lora, wan, tmp_path):
    changes = of_two_experts(wan, tmp_path)
    if LOW in start:
        changes["transformer"] = {}
    two = folders.make("wan-two", lora=lora, fixed_batch_rows=None)
    begin_with(two, Here(), tmp_path / start)
    plain = tiny_diffusers.pipeline("wan-two")
    for part, change in changes.items():
        net = two.net.get_submodule(part)
        before = getattr(plain, part).state_dict()
        assert_moved(merged(net) if lora else net.state_dict(), before, change)


def test_both_experts_are_merged_in_the_precision_of_their_folder(wan, tmp_path):
    changes, source = of_two_experts(wan, tmp_path), tmp_path / "base"
    pipe = diffusers.WanPipeline.from_pretrained(tiny_diffusers.folder("wan-two"))
    pipe.to(torch.bfloat16).save_pretrained(source)
    base = Base.of(str(source))
    place = convert.merge([tmp_path / "pair"], str(source), [], tmp_path / "merged")
    for part, change in changes.items():
        load = partial(base.networks[part].from_pretrained, subfolder=part, dtype=torch.bfloat16)
        before, after = (load(at).state_dict() for at in (source, place))
        for name, weight in before.items():
            assert after[name].equal((weight.float() + change.get(name, 0)).bfloat16()), name
        assert lora_files.stored_dtype(str(place), part) == torch.bfloat16


def test_a_file_that_does_not_say_which_of_two_experts_it_is_for_says_what_to_do(wan, tmp_path):
    two = folders.make("wan-two", fixed_batch_rows=None)
    layers, _ = attention_layers(wan, "transformer.")
    for name in ("style", "high_and_low", "highlight"):
        file = saved(tmp_path, name, layers)
        with pytest.raises(UserError, match="write high_noise .transformer. or low_noise"):
            begin_with_lora(two, file, Here())
    with pytest.raises(UserError, match="has transformer and transformer_2, and the names do not"):
        convert.merge([file], two.place, [], tmp_path / "other")

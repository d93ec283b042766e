"""LoRA files in the forms of ComfyUI and kohya's sd-scripts: what diffusers' own readers make of
them is the network that was trained."""

from __future__ import annotations

import json

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.core.errors import UserError
from mmrl.experiment import build, convert
from mmrl.experiment.build import begin_with_lora
from mmrl.policies.diffusion import lora_files, lora_merging
from mmrl.policies.diffusion.lora_files import Base, Pair
from mmrl.policies.diffusion.lora_names import FAMILIES
from mmrl.policies.lora import Lora, merged
from tests.fixtures import command, tiny_diffusers
from tests.policies.diffusion import test_folder_families as folders

QKVO = ["to_q", "to_k", "to_v", "to_out.0"]
# diffusers' reader of FLUX knows the width of the published network's single blocks alone
OF_FLUX = [f"transformer_blocks.0.attn.{name}" for name in (*QKVO, "add_q_proj", "add_k_proj")]
# and cannot read the joined attention of HunyuanVideo's text refiner
OF_HUNYUAN = [f"transformer_blocks.0.attn.{name}" for name in (*QKVO, "add_v_proj", "to_add_out")]
FORMS = ["comfyui", "kohya"]
# tiny model -> forms that can be checked, modules to adapt where not the family's own
MADE = {
    "sd": (FORMS, None),
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
    for form in FORMS:
        folder = tmp_path / form
        folder.mkdir()
        policy.export(folder)
        if form not in forms:
            with pytest.raises(UserError, match="has no reader of that form"):
                convert.rewrite_export(folder, policy.place, form)
            assert [file.name for file in folder.iterdir()] == [convert.LORA]
            continue
        convert.rewrite_export(folder, policy.place, form)
        (file,) = folder.iterdir()
        theirs = output(policy, with_adapter(base, file), prompts)
        torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=2e-5)
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


def assert_same(read, meant):
    assert set(meant) <= set(read)
    for name, pair in read.items():
        wanted = meant[name].delta() if name in meant else torch.zeros_like(pair.delta())
        torch.testing.assert_close(pair.delta(), wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """FLUX.1 at its published width with a block of each kind; no weights."""
    folder = tmp_path_factory.mktemp("flux")
    with torch.device("meta"):
        net = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1)
    net.save_config(folder / "transformer")
    index = {"transformer": ["diffusers", "FluxTransformer2DModel"]}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **index}))
    return Base.of(str(folder))


def test_joined_projections_of_flux_at_its_published_width(flux, tmp_path):
    """kohya's form has query, key, value and the first layer of the MLP as one module."""
    single = "single_transformer_blocks.0"
    modules = [f"{single}.attn.to_q", f"{single}.attn.to_v", f"{single}.proj_out"]
    meant = random_adapter(flux, [*modules, "transformer_blocks.0.attn.add_k_proj"])
    lora_files.write(flux, meant, "kohya", tmp_path / "a.safetensors")
    stored = load_file(tmp_path / "a.safetensors")
    joined = "lora_unet_single_blocks_0_linear1"
    assert stored[f"{joined}.lora_up.weight"].shape == (3 * 3072 + 12288, 2 + 3)
    assert stored[f"{joined}.alpha"] == 5  # the rank: the scales are in the weights
    up, down = (stored[f"{joined}.lora_{name}.weight"] for name in ("up", "down"))
    wanted = torch.zeros(4, 3072, 3072)  # query, key, value, and a part of the MLP
    wanted[0], wanted[2] = meant[modules[0]].delta(), meant[modules[1]].delta()
    torch.testing.assert_close((up[: 4 * 3072] @ down).view(4, 3072, 3072), wanted)


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
    for i, form in enumerate(["kohya", "comfyui", "kohya", "diffusers"]):
        out = tmp_path / f"{i + 1}.safetensors"
        assert convert.convert(tmp_path / f"{i}.safetensors", sdxl.place, form, out) == out
    assert_same(lora_files.read(sdxl, out), meant)
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


@pytest.mark.parametrize(
    "name, module, form",
    [
        ("sdxl", "add_embedding.linear_1", "kohya"),
        ("hunyuan_video", "context_embedder.token_refiner.refiner_blocks.0.attn.to_q", "comfyui"),
    ],
)
def test_a_module_without_a_checked_name_is_refused(name, module, form, tmp_path):
    base = Base.of(str(tiny_diffusers.folder(name)))
    with pytest.raises(UserError, match=f"the name of {module} in that form"):
        lora_files.write(base, random_adapter(base, [module]), form, tmp_path / "a.safetensors")


def test_merging_adds_weighted_adapters_and_leaves_the_rest(wan, tmp_path):
    chosen = list(modules_of(wan))[-6:]
    adapters = [random_adapter(wan, chosen[i:], seed=i) for i in range(2)]
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for adapter, file, form in zip(adapters, files, ["diffusers", "comfyui"], strict=True):
        known = {n: p for n, p in adapter.items() if n.startswith("blocks")}
        lora_files.write(wan, known, form, file)
    place = convert.merge(files, wan.place, [0.5, -2.0], tmp_path / "merged")
    before, after = (network(wan, at).state_dict() for at in (None, place))
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        for scale, adapter in zip([0.5, -2.0], adapters, strict=True):
            if module in adapter and module.startswith("blocks") and module != name:
                weight = weight + scale * adapter[module].delta()
        torch.testing.assert_close(after[name], weight, atol=1e-5, rtol=1e-5)
    changed = [name for name in before if not before[name].equal(after[name])]
    assert {name.removesuffix(".weight") for name in changed} == {
        name for name in chosen if name.startswith("blocks")
    }
    text = "text_encoder/model.safetensors"
    assert (place / text).read_bytes() == (tiny_diffusers.folder("wan") / text).read_bytes()
    diffusers.WanPipeline.from_pretrained(place)


def test_merging_both_experts_in_half_precision(tmp_path):
    source = tmp_path / "base"
    diffusers.WanPipeline.from_pretrained(tiny_diffusers.folder("wan-two")).to(
        torch.bfloat16
    ).save_pretrained(source)
    base = Base.of(str(source))
    (tmp_path / "adapter").mkdir()
    adapters = {}
    for seed, part in enumerate(base.networks):
        (tmp_path / "adapter" / part).mkdir()
        adapters[part] = random_adapter(base, ["blocks.0.attn1.to_q"], seed=seed)
        file = tmp_path / "adapter" / part / convert.LORA
        lora_files.write(base, adapters[part], "diffusers", file)
    place = convert.merge([tmp_path / "adapter"], str(source), [], tmp_path / "merged")
    for part, adapter in adapters.items():
        load = base.networks[part].from_pretrained
        before, after = (
            load(at, subfolder=part, dtype=torch.bfloat16).blocks[0].attn1.to_q.weight
            for at in (source, place)
        )
        delta = adapter["blocks.0.attn1.to_q"].delta()
        assert after.equal((before.float() + delta).bfloat16())
        assert lora_files.stored_dtype(str(place), part) == torch.bfloat16
    with pytest.raises(UserError, match="has transformer and transformer_2, and the names do not"):
        convert.merge([file], str(source), [], tmp_path / "other")


def test_files_that_are_no_adapter_of_the_model(wan, sdxl, tmp_path):
    def refused(file, match, base=wan.place):
        with pytest.raises(UserError, match=match):
            convert.convert(file, base, "kohya", tmp_path / "out.safetensors")
        assert not (tmp_path / "out.safetensors").exists()

    chosen = [name for name in modules_of(sdxl) if "attn" in name][:2]
    lora_files.write(sdxl, random_adapter(sdxl, chosen), "kohya", tmp_path / "sdxl.safetensors")
    refused(tmp_path / "sdxl.safetensors", "cannot read this LoRA|finds no LoRA weights")
    for name, tensors in {
        "text": {"lora_te1_text_model_q.lora_down.weight": torch.zeros(1, 2)},
        "half": {"transformer.blocks.0.attn1.to_q.lora_A.weight": torch.zeros(1, 2)},
        "plain": {"weight": torch.zeros(2)},
        "empty": {},
    }.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    refused(tmp_path / "text.safetensors", "holds adapters of a text encoder")
    refused(tmp_path / "half.safetensors", "cannot read this LoRA|finds no LoRA weights")
    refused(tmp_path / "plain.safetensors", "cannot read this LoRA|finds no LoRA weights")
    refused(tmp_path / "empty.safetensors", "holds no tensors")
    (tmp_path / "garbage.safetensors").write_bytes(b"\xff" * 100)
    refused(tmp_path / "garbage.safetensors", "no safetensors file")
    torch.save({"a": torch.zeros(1)}, tmp_path / "a.bin")
    refused(tmp_path / "a.bin", "give a .safetensors file")
    refused(tmp_path / "missing.safetensors", "no such file or folder")
    refused(tmp_path / "text.safetensors", "give --base", base=None)


def test_options_that_do_not_fit_are_refused_before_anything_is_read(tmp_path):
    file = tmp_path / "a.safetensors"
    file.touch()
    with pytest.raises(UserError, match="--out .* exists"):
        convert.convert(file, "base", "kohya", file)
    with pytest.raises(UserError, match="ends in .safetensors"):
        convert.convert(file, "base", "kohya", tmp_path / "a.bin")
    with pytest.raises(UserError, match="given 2 times for 1 adapters"):
        convert.merge([file], "base", [1.0, 2.0], tmp_path / "new")
    with pytest.raises(UserError, match="give finite numbers"):
        convert.merge([file], "base", [float("nan")], tmp_path / "new")
    with pytest.raises(UserError, match="exists and is not empty"):
        convert.merge([file], "base", [], tmp_path)
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


def saved(tmp_path, name, layers, metadata=None):
    file = tmp_path / f"{name}.safetensors"
    save_file(layers, file, {"format": "pt"} | (metadata or {}))
    return file


def attention_layers(base, prefix, ends=("to_q", "to_v", "to_out.0"), seed=3):
    """Layers in diffusers' names, with the modules that they are of."""
    chosen = [n for n in modules_of(base) if n.endswith(ends) and "attn" in n and "single" not in n]
    adapter = random_adapter(base, chosen, seed=seed)
    layers = {}
    for module, pair in adapter.items():
        layers[f"{prefix}{module}.lora_A.weight"] = pair.down
        layers[f"{prefix}{module}.lora_B.weight"] = 0.5 * pair.up
    return adapter, layers


def kinds_of(name, base):
    """Public layouts, written with their own names: kind -> (tensors, metadata)."""
    part = base.part
    adapter, plain = attention_layers(base, f"{part}.")
    net = network(base)
    names = {f"{part}.r": 2, f"{part}.lora_alpha": 2, f"{part}.peft_type": "LORA"}
    names |= {
        f"{part}.rank_pattern": {module: pair.rank for module, pair in adapter.items()},
        f"{part}.alpha_pattern": {module: pair.rank for module, pair in adapter.items()},
        f"{part}.target_modules": sorted({module.rpartition(".")[2] for module in adapter}),
        f"{part}.use_dora": True,
    }
    magnitudes = {
        f"{part}.{module}.lora_magnitude_vector": 1.5 * net.get_submodule(module).weight.norm(dim=1)
        for module in adapter
    }
    biased = {
        f"{part}.{m}.lora_B.bias": torch.full((p.up.shape[0],), 0.7) for m, p in adapter.items()
    }
    kinds = {
        "diffusers": (plain, None),
        "dora": (plain | magnitudes, {"lora_adapter_metadata": json.dumps(names)}),
    }
    if name == "flux":
        norm = {"transformer.transformer_blocks.0.attn.norm_q.weight": torch.full((16,), 1.7)}
        kinds |= {
            "bias": (plain | biased, None),
            "norms": (plain | norm, None),
            "peft": (
                {k.replace("transformer.", "base_model.model.", 1): v for k, v in plain.items()},
                None,
            ),
        }
    if name == "sd":
        kohya = {}
        for module, pair in adapter.items():
            key = "lora_unet_" + module.replace(".", "_")
            kohya |= {f"{key}.lora_down.weight": pair.down, f"{key}.lora_up.weight": pair.up}
            kohya[f"{key}.alpha"] = torch.tensor(0.5)
        kinds["kohya"] = (kohya, None)
    return kinds


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sd", k) for k in ("diffusers", "dora", "kohya")]
    + [("flux", k) for k in ("diffusers", "dora", "bias", "norms", "peft")],
)
def test_the_whole_change_of_a_public_layout_is_merged(name, kind, tmp_path):
    """Beside plain diffusers' load_lora_weights, twice: two files of each layout."""
    base = Base.of(str(tiny_diffusers.folder(name)))
    policy, prompts = made(name, ["to_q"] if name == "flux" else None)
    plain = output(policy, network(base), prompts)
    tensors, metadata = kinds_of(name, base)[kind]
    for number, scale in enumerate((1.0, -0.5)):
        layers = {
            k: scale * v if "lora_B" in k or "lora_up" in k else v for k, v in tensors.items()
        }
        file = saved(
            tmp_path, f"{kind}{number}", {k: v.contiguous() for k, v in layers.items()}, metadata
        )
        pipe = diffusers.DiffusionPipeline.from_pretrained(base.place)
        if kind == "peft":  # which diffusers itself reads by its own names alone
            renamed = {k.replace("base_model.model.", "transformer."): v for k, v in layers.items()}
            pipe.load_lora_weights(str(saved(tmp_path, "renamed", renamed)))
        else:
            pipe.load_lora_weights(str(tmp_path), weight_name=file.name)
        theirs = output(policy, getattr(pipe, base.part).eval(), prompts)
        place = convert.merge([file], base.place, [], tmp_path / f"merged{number}")
        ours = output(policy, network(base, place), prompts)
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
        assert (ours - plain).abs().max() > 1e-3 * plain.abs().max()


# names of Wan's parts in its first code, by those of diffusers
OF_WAN = [("attn1", "self_attn"), ("attn2", "cross_attn"), ("to_out.0", "o"), ("to_q", "q")]
OF_WAN += [("to_k", "k"), ("to_v", "v"), ("ffn.net.0.proj", "ffn.0"), ("ffn.net.2", "ffn.2")]


def of_wan(module):
    for ours, theirs in OF_WAN:
        module = module.replace(ours, theirs)
    return module


def wan_layouts(base):
    """The same change as trainers and users of Wan write it: ComfyUI's and DiffSynth's names,
    lightx2v's with biases and norms, musubi-tuner's."""
    chosen = [n for n in modules_of(base) if n.startswith("blocks") and of_wan(n) != n]
    adapter = random_adapter(base, chosen, seed=3)
    comfyui, musubi, plain = {}, {}, {}
    for module, pair in adapter.items():
        key = of_wan(module)
        up = 0.5 * pair.up
        plain |= {f"transformer.{module}.lora_A.weight": pair.down}
        plain |= {f"transformer.{module}.lora_B.weight": up}
        comfyui[f"diffusion_model.{key}.lora_down.weight"] = pair.down
        comfyui[f"diffusion_model.{key}.lora_up.weight"] = up
        flat = "lora_unet_" + key.replace(".", "_")
        musubi |= {f"{flat}.lora_down.weight": pair.down, f"{flat}.lora_up.weight": up}
        musubi[f"{flat}.alpha"] = torch.tensor(float(pair.rank))  # of the rank: a scale of 1
    return plain, {"comfyui": comfyui, "musubi": musubi}


@pytest.mark.parametrize("kind", ["comfyui", "musubi"])
def test_wans_layouts_of_comfyui_and_musubi_tuner_are_the_same_change(wan, kind, tmp_path):
    """Beside the same layers in diffusers' own names, which diffusers merges."""
    plain, layouts = wan_layouts(wan)
    places = []
    for name, layers in (("plain", plain), (kind, layouts[kind])):
        file = saved(tmp_path, name, {k: v.contiguous() for k, v in layers.items()})
        places.append(convert.merge([file], wan.place, [], tmp_path / f"{name}-merged"))
    before, first, second = (network(wan, place).state_dict() for place in (None, *places))
    moved = [n for n in before if not torch.equal(before[n], first[n])]
    assert len(moved) == len(plain) // 2
    for name in before:
        torch.testing.assert_close(first[name], second[name], atol=1e-6, rtol=1e-6)


def test_lightx2vs_biases_and_differences_of_whole_weights_are_merged(wan, tmp_path, caplog):
    """Pairs and their biases as diffusers loads them, the rest as ComfyUI adds it."""
    _, layouts = wan_layouts(wan)
    layers = {k: v for k, v in layouts["comfyui"].items() if "lora" in k}
    biases = {
        f"{key.removesuffix('.lora_up.weight')}.diff_b": torch.full((up.shape[0],), 0.3)
        for key, up in layers.items()
        if key.endswith("lora_up.weight")
    }
    before = network(wan).state_dict()
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
    generator = torch.Generator().manual_seed(5)
    whole = {
        f"diffusion_model.{key}": torch.randn(before[name].shape, generator=generator)
        for key, name in places.items()
    }
    unknown = {"diffusion_model.blocks.9.norm3.diff": torch.ones(24)}
    layers = {k: v.contiguous() for k, v in (layers | biases).items()}
    saved(tmp_path, "pairs", layers)
    pipe = diffusers.WanPipeline.from_pretrained(wan.place)
    pipe.load_lora_weights(str(tmp_path), weight_name="pairs.safetensors")
    pipe.fuse_lora(["transformer"], lora_scale=0.5)
    pipe.unload_lora_weights()
    theirs = pipe.transformer.state_dict()
    file = saved(tmp_path, "lightx2v", layers | whole | unknown)
    place = convert.merge([file], wan.place, [0.5], tmp_path / "merged")
    ours = network(wan, place).state_dict()
    changes = {name: 0.5 * whole[f"diffusion_model.{key}"] for key, name in places.items()}
    for name, weight in theirs.items():
        meant = weight + changes.get(name, 0)
        torch.testing.assert_close(ours[name], meant, atol=1e-5, rtol=1e-5)
    assert "leaves out 1 of 9 differences of whole weights" in caplog.text
    assert "blocks.9.norm3.diff" in caplog.text and "norm_q" not in caplog.text
    with pytest.raises(UserError, match="changes whole weights, mostly of norms"):
        lora_files.read(wan, file)


def test_norms_of_lycoris_are_merged_by_their_flat_names(tmp_path):
    base = Base.of(str(tiny_diffusers.folder("sd")))
    before = network(base).state_dict()
    name = next(n for n in before if n.endswith("transformer_blocks.0.norm2.weight"))
    stem = "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
    change = torch.randn(before[name].shape, generator=torch.Generator().manual_seed(0))
    file = saved(tmp_path, "norms", {f"{stem}.w_norm": change, f"{stem}.b_norm": 2 * change})
    place = convert.merge([file], base.place, [], tmp_path / "merged")
    ours = network(base, place).state_dict()
    bias = name.replace(".weight", ".bias")
    meant = {name: before[name] + change, bias: before[bias] + 2 * change}
    for key, weight in before.items():
        torch.testing.assert_close(ours[key], meant.get(key, weight), atol=1e-6, rtol=1e-6)


def text_layers(pipe, form):
    """Pairs of the attention of a pipeline's text encoders, in the names of a layout."""
    generator = torch.Generator().manual_seed(4)
    parts = [part for part in pipe._lora_loadable_modules if part.startswith("text_encoder")]
    layers = {}
    for number, part in enumerate(parts, start=1):
        for name, module in getattr(pipe, part).named_modules():
            if name.endswith(("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")):
                down = 0.3 * torch.randn(2, module.in_features, generator=generator)
                up = 0.3 * torch.randn(module.out_features, 2, generator=generator)
                name = name if name.startswith("text_model.") else f"text_model.{name}"
                if form == "diffusers":
                    key = f"{part}.{name}"
                    layers |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
                else:
                    key = f"lora_te{number if len(parts) > 1 else ''}_{name.replace('.', '_')}"
                    layers |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
                    layers[f"{key}.alpha"] = torch.tensor(1.0)
    return layers


@pytest.mark.parametrize(
    ("name", "form", "alone"),
    [
        ("sd", "kohya", True),
        ("sdxl", "diffusers", True),
        ("sdxl", "kohya", False),
        ("flux", "diffusers", False),
    ],
)
def test_adapters_of_text_encoders_are_merged_as_diffusers_fuses_them(name, form, alone, tmp_path):
    base = Base.of(str(tiny_diffusers.folder(name)))
    pipe = diffusers.DiffusionPipeline.from_pretrained(base.place)
    layers = text_layers(pipe, form)
    if not alone:
        prefix = f"{base.part}." if form == "diffusers" else "lora_unet_"
        _, own = attention_layers(base, f"{base.part}.")
        if form == "kohya":
            own = {}
            for module, pair in attention_layers(base, "")[0].items():
                key = prefix + module.replace(".", "_")
                own |= {f"{key}.lora_down.weight": pair.down, f"{key}.lora_up.weight": pair.up}
                own[f"{key}.alpha"] = torch.tensor(float(pair.rank))
        layers |= own
    file = saved(tmp_path, "all", {k: v.contiguous() for k, v in layers.items()})
    pipe.load_lora_weights(str(tmp_path), weight_name=file.name)
    loadable = [part for part in pipe._lora_loadable_modules if getattr(pipe, part, None)]
    pipe.fuse_lora(loadable, lora_scale=0.5)
    pipe.unload_lora_weights()
    place = convert.merge([file], base.place, [0.5], tmp_path / "merged")
    ours = diffusers.DiffusionPipeline.from_pretrained(place)
    plain = diffusers.DiffusionPipeline.from_pretrained(base.place)
    for part in loadable:
        meant, merged, before = (getattr(p, part).state_dict() for p in (pipe, ours, plain))
        assert set(meant) == set(merged)
        for key, weight in meant.items():
            torch.testing.assert_close(merged[key], weight, atol=1e-5, rtol=1e-5)
        moved = any(not before[key].equal(merged[key]) for key in before)
        assert moved == (part.startswith("text_encoder") or not alone)


def fused(base, file):
    """The weights of a pipeline's parts with the file, as diffusers fuses them."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(base.place)
    pipe.load_lora_weights(str(file.parent), weight_name=file.name)
    loadable = [part for part in pipe._lora_loadable_modules if getattr(pipe, part, None)]
    pipe.fuse_lora(loadable)
    pipe.unload_lora_weights()
    return {part: getattr(pipe, part).state_dict() for part in loadable}


def with_scale(layers, parts, scale):
    """The layers at rank 2 and the metadata that says their scale."""
    cut = {k: (v[:2] if "lora_A" in k else v[:, :2]).contiguous() for k, v in layers.items()}
    metadata = {}
    for part in parts:
        of_part = {k.removeprefix(f"{part}.") for k in cut if k.startswith(f"{part}.")}
        targets = {k.removeprefix("text_model.").split(".lora_")[0] for k in of_part}
        metadata |= {f"{part}.r": 2, f"{part}.lora_alpha": 2 * scale, f"{part}.peft_type": "LORA"}
        metadata[f"{part}.target_modules"] = sorted(targets)
    return cut, {lora_files.METADATA: json.dumps(metadata)}


@pytest.mark.parametrize(
    ("name", "form", "prefixes"),
    [
        ("sd", "kohya", ["lora_te_"]),
        ("sdxl", "kohya", ["lora_te1_", "lora_te2_"]),
        ("sdxl", "diffusers", []),
        ("flux", "kohya", ["lora_te1_"]),
    ],
)
def test_adapters_of_text_encoders_are_converted(name, prefixes, form, tmp_path):
    """Of two of an attention's four projections, at half their change: diffusers fuses what was
    written as it fuses the original."""
    base = Base.of(str(tiny_diffusers.folder(name)))
    pipe = diffusers.DiffusionPipeline.from_pretrained(base.place)
    texts = text_layers(pipe, "diffusers")
    layers = {k: v for k, v in texts.items() if ".q_proj." in k or ".v_proj." in k}
    layers |= attention_layers(base, f"{base.part}.")[1]
    file = saved(tmp_path, "all", *with_scale(layers, [base.part, *base.text_encoders], 0.5))
    out = convert.convert(file, base.place, form, tmp_path / "out.safetensors")
    meant, ours = fused(base, file), fused(base, out)
    for part, state in meant.items():
        plain = getattr(pipe, part).state_dict()
        assert any(not plain[key].equal(weight) for key, weight in state.items())
        for key, weight in state.items():
            torch.testing.assert_close(ours[part][key], weight, atol=1e-5, rtol=1e-5)
    written = load_file(out)
    keys = [key for key in written if key.startswith(lora_files.OF_TEXT_ENCODERS)]
    if form == "kohya":
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
    clip = {k.replace("te_", "te1_"): v for k, v in text_layers(pipe, "kohya").items()}
    layers = {key: (torch.ones(2, 32), torch.ones(32, 2))}
    if own:
        layers["lora_transformer_transformer_blocks_0_attn_to_q"] = drawn(2, 32, 0), drawn(32, 2, 1)
    tensors = dict(clip)
    for name, (down, up) in layers.items():
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        tensors[f"{name}.alpha"] = torch.tensor(1.0)
    if key.startswith("text_encoders"):  # ComfyUI's names of both
        parts = {
            k: f"text_encoders.clip_l.transformer.{name}"
            for name, _ in pipe.text_encoder.named_modules()
            for k in [f"lora_te1_text_model_{name.replace('.', '_')}"]
        }
        tensors = {
            f"{parts.get(stem, stem)}{k[len(stem) :]}": v
            for k, v in tensors.items()
            for stem in [k if k.startswith("text_enc") else k.split(".")[0]]
        }
    file = saved(tmp_path, "all", {k: v.contiguous() for k, v in tensors.items()})
    out = convert.convert(file, base.place, "kohya", tmp_path / "out.safetensors")
    said = f"leaves out 1 of {len(clip) // 3 + 1} layers of text encoders, which diffusers'"
    assert said in caplog.text and f": {key}\n" in caplog.text
    assert {name for name in load_file(out) if name.startswith("lora_te")} == set(clip)


def test_a_text_encoder_that_the_pipeline_reads_no_adapters_for_is_named(wan, tmp_path, caplog):
    _, layers = attention_layers(wan, "transformer.")
    text = {"text_encoder.encoder.block.0.q.lora_A.weight": torch.ones(1, 2)}
    convert.merge([saved(tmp_path, "both", layers | text)], wan.place, [], tmp_path / "merged")
    assert "leaves out 1 tensors of text encoders, such as 'text_encoder" in caplog.text


def drawn(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def joined_layers(width, names, seed):
    """Pairs of modules of FLUX's first code and what they change in diffusers' network; ``names``:
    of the joined query, key and value, and of the projection after them."""
    block = "transformer_blocks.0.attn"
    layers, meant = {}, {}
    for key, parts in names.items():
        down, up = drawn(2, width, seed), drawn(width * len(parts), 2, seed + 1)
        layers[key] = (down, up)
        changes = (up @ down).chunk(len(parts))
        meant |= {f"{block}.{part}": change for part, change in zip(parts, changes, strict=True)}
        seed += 2
    return layers, meant


IMAGE, TEXT = QKVO[:3], ["add_q_proj", "add_k_proj", "add_v_proj"]
BFL = {"img_attn.qkv": IMAGE, "txt_attn.qkv": TEXT, "img_attn.proj": ["to_out.0"]}
XLABS = {"qkv_lora1": IMAGE, "qkv_lora2": TEXT, "proj_lora1": ["to_out.0"]}
OWN = {f"attn.{part}": [part] for part in (*QKVO, "add_q_proj")}
# what diffusers' readers do not take, or of all modules only
UNREAD = ["base_model.model.double_blocks.0.{}", "diffusion_model.double_blocks.0.{}"]
# who writes it -> names of the modules in a block, name of a layer, of down and up, alpha's value
PUBLIC = {
    "kohya": (BFL, "lora_unet_double_blocks_0_{_}", ("lora_down", "lora_up"), 1.0),
    "xlabs": (XLABS, "double_blocks.0.processor.{}", ("down", "up"), None),
    "ai-toolkit": (OWN, "transformer.transformer_blocks.0.{}", ("lora_A", "lora_B"), None),
    "peft": (OWN, "base_model.model.transformer_blocks.0.{}", ("lora_A", "lora_B"), None),
    "onetrainer": (OWN, "lora_transformer_transformer_blocks_0_{_}", ("lora_down", "lora_up"), 1.0),
    "diffsynth": (OWN, "transformer_blocks.0.{}", ("lora_A.default", "lora_B.default"), None),
    "bare": (OWN, "transformer_blocks.0.{}", ("lora_A", "lora_B"), None),
}


@pytest.mark.parametrize("kind", PUBLIC)
def test_the_layouts_of_public_trainers_of_flux_are_merged(kind, tmp_path):
    """Two files of each, written by their names: the weights move by up @ down times its scale."""
    base = Base.of(str(tiny_diffusers.folder("flux")))
    names, form, (first, second), alpha = PUBLIC[kind]
    before = network(base).state_dict()
    width = before["transformer_blocks.0.attn.to_q.weight"].shape[1]
    for seed in (0, 10):
        pairs, meant = joined_layers(width, names, seed)
        layers = {}
        for name, (down, up) in pairs.items():
            key = form.replace("{_}", name.replace(".", "_")).format(name)
            layers |= {f"{key}.{first}.weight": down, f"{key}.{second}.weight": up}
            if alpha:
                layers[f"{key}.alpha"] = torch.tensor(alpha)
        scale = alpha / 2 if alpha else 1.0
        file = saved(tmp_path, f"{kind}{seed}", {k: v.contiguous() for k, v in layers.items()})
        ours = network(
            base, convert.merge([file], base.place, [], tmp_path / f"to{seed}")
        ).state_dict()
        for name, weight in before.items():
            change = meant.get(name.removesuffix(".weight"))
            wanted = weight if change is None else weight + scale * change
            torch.testing.assert_close(ours[name], wanted, atol=1e-5, rtol=1e-5)


def test_layouts_of_flux_that_diffusers_does_not_read_are_refused(tmp_path):
    base = Base.of(str(tiny_diffusers.folder("flux")))
    for form in UNREAD:
        key = form.format("img_attn.proj")
        layers = {f"{key}.lora_A.weight": drawn(2, 32, 0), f"{key}.lora_B.weight": drawn(32, 2, 1)}
        with pytest.raises(UserError, match="cannot read this LoRA|finds no LoRA weights"):
            convert.merge([saved(tmp_path, "a", layers)], base.place, [], tmp_path / "to")


def test_what_no_pair_holds_is_not_converted(tmp_path):
    base = Base.of(str(tiny_diffusers.folder("flux")))
    kinds = kinds_of("flux", base)
    for kind in ("dora", "bias", "norms"):
        tensors, metadata = kinds[kind]
        file = saved(tmp_path, kind, {k: v.contiguous() for k, v in tensors.items()}, metadata)
        with pytest.raises(UserError, match="only a merged model has; use mmrl convert"):
            convert.convert(file, base.place, "diffusers", tmp_path / "out.safetensors")


def test_blocks_that_the_base_lacks_are_named(tmp_path, caplog):
    base = Base.of(str(tiny_diffusers.folder("flux")))
    _, layers = attention_layers(base, "transformer.")
    more = {k.replace("blocks.0", "blocks.7"): v.clone() for k, v in layers.items()}
    lora_files.read(base, saved(tmp_path, "more", layers | more))
    assert "blocks.7" in caplog.text


def test_a_run_begins_with_a_lora_file(tmp_path):
    policy, prompts = made("flux", ["to_q", "to_k"])
    plain, base = output(policy, policy.net, prompts), Base.of(policy.place)
    _, layers = attention_layers(base, "transformer.", ends=("attn.to_q",))
    file = saved(tmp_path, "some", layers)
    theirs = output(policy, with_adapter(base, file), prompts)
    lora_merging.begin(base, policy.net, file)  # of rank 2, as the policy's
    torch.testing.assert_close(output(policy, policy.net, prompts), theirs, atol=2e-5, rtol=2e-5)
    assert (theirs - plain).abs().max() > 1e-4
    whole = folders.make("flux", fixed_batch_rows=None)
    lora_merging.begin(base, whole.net, file)
    torch.testing.assert_close(output(whole, whole.net, prompts), theirs, atol=2e-5, rtol=2e-5)
    assert all(p.requires_grad for p in whole.net.parameters())
    _, large = attention_layers(base, "transformer.", ends=("add_q_proj",))
    with pytest.raises(UserError, match="is not there; set lora: .rank: .* mmrl convert"):
        lora_merging.begin(base, policy.net, saved(tmp_path, "other", large))


class Here:
    def say(self, text):
        return text


@pytest.mark.parametrize("lora", [None, Lora(rank=3, targets=["to_q", "to_v", "to_out.0"])])
def test_files_of_two_experts_begin_a_run(lora, wan, tmp_path):
    """A pair of files by their names, one of them alone, a folder each: beside diffusers."""
    pipe = diffusers.WanPipeline.from_pretrained(tiny_diffusers.folder("wan-two"))
    plain = {part: getattr(pipe, part).state_dict() for part in ("transformer", "transformer_2")}
    plain = {part: {k: v.clone() for k, v in state.items()} for part, state in plain.items()}
    pair = tmp_path / "pair"
    pair.mkdir()
    for seed, (name, more) in enumerate(
        [("my-lora_000002500_high_noise", {}), ("Wan2.2-Lightning_LOW_fp16", {"transformer_2": 1})]
    ):
        _, layers = attention_layers(wan, "transformer.", seed=seed)
        saved(pair, name, layers)
        pipe.load_lora_weights(
            str(pair),
            weight_name=f"{name}.safetensors",
            adapter_name=f"of_{seed}",
            load_into_transformer_2=bool(more),
        )
    apart = tmp_path / "apart"
    for part, file in zip(plain, sorted(pair.iterdir(), reverse=True), strict=True):
        (apart / part).mkdir(parents=True)
        (apart / part / convert.LORA).write_bytes(file.read_bytes())
    pipe.fuse_lora(["transformer", "transformer_2"])
    pipe.unload_lora_weights()
    low = pair / "Wan2.2-Lightning_LOW_fp16.safetensors"
    for start, changed in ((pair, set(plain)), (apart, set(plain)), (low, {"transformer_2"})):
        two = folders.make("wan-two", lora=lora, fixed_batch_rows=None)
        begin_with_lora(two, lora_merging.lora_at(start), Here())
        for part, before in plain.items():
            ours = merged(two.net.get_submodule(part)) if lora else two.net.get_submodule(part)
            state = ours if lora else ours.state_dict()
            meant = getattr(pipe, part).state_dict() if part in changed else before
            assert set(state) == set(meant)
            for name, weight in meant.items():
                torch.testing.assert_close(state[name], weight, atol=1e-5, rtol=1e-5)
    (merged_to := tmp_path / "merged").mkdir()
    convert.merge([pair], str(tiny_diffusers.folder("wan-two")), [], merged_to)
    again = diffusers.WanPipeline.from_pretrained(merged_to)
    for part in plain:
        for name, weight in getattr(pipe, part).state_dict().items():
            state = getattr(again, part).state_dict()
            torch.testing.assert_close(state[name], weight, atol=1e-5, rtol=1e-5)


def test_a_file_that_does_not_say_which_of_two_experts_it_is_for_says_what_to_do(wan, tmp_path):
    two = folders.make("wan-two", fixed_batch_rows=None)
    _, layers = attention_layers(wan, "transformer.")
    for name in ("style", "high_and_low", "highlight"):
        with pytest.raises(UserError, match="write high_noise .transformer. or low_noise"):
            begin_with_lora(two, saved(tmp_path, name, layers), Here())


@pytest.mark.slow
def test_a_run_of_the_command_begins_with_a_lora_file(tmp_path):
    """As its adapter: what is sampled before any step is plain diffusers' with it."""
    base = Base.of(str(tiny_diffusers.folder("sd")))
    _, layers = attention_layers(base, "unet.", ends=("to_q", "to_k", "to_v", "to_out.0"))
    file = saved(tmp_path, "style", {k: v.contiguous() for k, v in layers.items()})
    (tmp_path / "p.txt").write_text("a red seven\na blue two\n")
    (tmp_path / "c.yaml").write_text(
        f"policy: {{sd: {{path: {base.place}, size: 16, steps: 2, lora: 3}}}}\n"
        f"start: {file}\ndata: {{prompts: {{path: {tmp_path}/p.txt, held_out: 0}}}}\n"
        "reward: {sharpness: 1.0}\nobjective: policy_gradient\noptimizer: {adamw: {lr: 0.0}}\n"
        "train: {prompts_per_iteration: 2, group_size: 2, train_batch_size: 4, iterations: 1}\n"
        "log: {tensorboard: false}\n"
    )
    command.mmrl("train", tmp_path / "c.yaml", f"run={tmp_path}/run", cwd=tmp_path)
    policy = build.trained(tmp_path / "run").policy
    prompts = [{"text": "a red seven"}]
    theirs = output(policy, with_adapter(base, file), prompts)
    torch.testing.assert_close(output(policy, policy.net, prompts), theirs, atol=2e-5, rtol=2e-5)
    assert (theirs - output(policy, network(base), prompts)).abs().max() > 1e-4


def test_readers_that_know_no_metadata_take_the_same_change(tmp_path):
    policy, prompts = made("sd", None)
    policy.export(tmp_path)
    ours = output(policy, policy.net, prompts)
    bare = saved(tmp_path, "bare", load_file(tmp_path / convert.LORA))
    base = Base.of(policy.place)
    for file in (bare, tmp_path / convert.LORA):
        theirs = output(policy, with_adapter(base, file), prompts)
        torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=2e-5)

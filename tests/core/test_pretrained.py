"""The door through which models come in: no code runs, nothing is asked, every weight is there."""

import ast
import io
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from mmrl.core import pretrained, weight_files
from mmrl.core.errors import UserError
from mmrl.core.foreign_code import ForeignCode, guarded
from tests.core.test_imports import FILES, ROOT
from tests.fixtures import sources, tiny_diffusers, tiny_vlms, vllm_models

DOOR = {"pretrained.py", "weight_files.py", "tensor_files.py"}
CALLS = set(
    "from_pretrained from_single_file load_components create_model create_model_and_transforms "
    "safe_open load_file load_checkpoint get_class_from_dynamic_module load_state_dict_from_url "
    "load_custom_pretrained".split()
)
QWEN = "qwen2_5_vl"


def loads(node: ast.AST) -> bool:
    """Tell whether a call loads a model or tensors by a library."""
    if not isinstance(node, ast.Call):
        return False
    text = ast.unparse(node.func)
    owner, _, name = text.rpartition(".")
    if owner == "pretrained" or (name == "create_model" and not owner):
        return False  # the door itself; pydantic's
    if name == "from_config":
        return owner.rpartition(".")[2].startswith("Auto")
    return name in CALLS or text == "torch.load"


def test_nothing_but_the_door_loads_models_or_tensors():
    beside = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if path.parent != ROOT / "mmrl" / "core" or path.name not in DOOR
        for node in sources.nodes(path)
        if loads(node)
    ]
    assert not beside, "load by mmrl/core/pretrained.py or weight_files.py"


CODE = """
from pathlib import Path
Path({mark!r}).write_text("ran")
class Own:
    pass
"""


@pytest.fixture
def model(tmp_path):
    """A copy of a tiny model."""
    return Path(shutil.copytree(tiny_vlms.folder(QWEN), tmp_path / "model"))


def poison(folder: Path, file: str, entries: dict[str, Any], **changes: str) -> Path:
    """Let a config file of a folder name classes of a Python file beside it; returns the file that
    this code would write."""
    mark = folder.parent / f"{folder.name}-ran"
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    config = folder / file
    content = json.loads(config.read_text()) if config.is_file() else {}
    config.write_text(json.dumps(content | {"auto_map": entries} | changes))
    return mark


@pytest.fixture
def yes(monkeypatch):
    """Answer every question at the terminal with yes; collects what is asked."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    return asked


OWN = "own.Own"
AUTO = {"AutoConfig": OWN, "AutoModel": OWN, "AutoModelForImageTextToText": OWN}
TOKENIZER = {"AutoTokenizer": [OWN, OWN]}
# file, its auto_map, its changes, class of transformers that reads it
NAMING_CODE = [
    ("config.json", AUTO, {"model_type": "of_nobody"}, "AutoModelForImageTextToText"),
    ("config.json", AUTO, {"model_type": "of_nobody"}, "AutoConfig"),
    ("config.json", AUTO, {"model_type": "of_nobody"}, "AutoTokenizer"),
    ("processor_config.json", {"AutoProcessor": OWN}, {"processor_class": "Own"}, "AutoProcessor"),
    ("tokenizer_config.json", TOKENIZER, {"tokenizer_class": "OwnTokenizer"}, "AutoTokenizer"),
    (
        "preprocessor_config.json",
        {"AutoImageProcessor": OWN},
        {"image_processor_type": "Own"},
        "AutoImageProcessor",
    ),
    ("preprocessor_config.json", {"AutoProcessor": OWN}, {}, "AutoProcessor"),
    ("video_preprocessor_config.json", {"AutoVideoProcessor": OWN}, {}, "AutoVideoProcessor"),
]


@pytest.mark.parametrize(("file", "entries", "changes", "kind"), NAMING_CODE)
def test_no_code_of_a_folder_runs_and_nothing_is_asked(file, entries, changes, kind, model, yes):
    import transformers

    mark = poison(model, file, entries, **changes)
    load = pretrained.load_model if "Model" in kind else pretrained.load_processor
    try:
        load(getattr(transformers, kind), model)
    except UserError as error:
        assert "would run Python code of this folder" in str(error)
    # without an error the library has its own class for it, which was loaded
    assert not mark.exists() and not yes


def test_a_pipeline_whose_index_names_files_of_the_folder_is_refused(tmp_path, yes):
    from diffusers import AutoModel, StableDiffusionPipeline

    folder = Path(shutil.copytree(tiny_diffusers.folder("sd"), tmp_path / "sd"))
    index = json.loads((folder / "model_index.json").read_text())
    code = CODE.format(mark=str(tmp_path / "ran"))
    for place in ("pipeline.py", "unet/own.py"):
        (folder / place).write_text(code)
    for changes in ({"_class_name": ["pipeline", "Own"]}, {"unet": ["own", "Own"]}):
        (folder / "model_index.json").write_text(json.dumps(index | changes))
        with pytest.raises(UserError, match="code of (a|the) folder"):
            pretrained.load_pipeline(StableDiffusionPipeline, folder)
    (folder / "model_index.json").write_text(json.dumps(index))
    pretrained.load_pipeline(StableDiffusionPipeline, folder)
    (folder / "None.py").write_text(code)  # which diffusers 0.42 looks for
    with pytest.raises(UserError, match="would run Python code"):
        pretrained.load_pipeline(StableDiffusionPipeline, folder)
    poison(folder / "vae", "config.json", {"AutoModel": OWN})
    with pytest.raises(UserError, match="would run Python code"):
        pretrained.load_model(AutoModel, folder / "vae")
    assert not (tmp_path / "ran").exists() and not (folder / "vae-ran").exists() and not yes


def test_a_tokenizer_that_a_folder_of_open_clip_trusts_runs_nothing(model, yes):
    """Its config may hand options to transformers, ``trust_remote_code`` among them."""
    import open_clip

    mark = poison(model, "tokenizer_config.json", TOKENIZER, tokenizer_class="OwnTokenizer")
    with pytest.raises(ForeignCode), guarded():
        open_clip.tokenizer.HFTokenizer(str(model), trust_remote_code=True)
    assert not mark.exists() and not yes


def test_trusted_code_runs_but_never_under_safe(model, monkeypatch):
    from transformers import AutoConfig

    mark = poison(model, "config.json", {"AutoConfig": OWN}, model_type="of_nobody")
    for safe, sentence in (("1", "--safe refuses"), ("0", "cannot load it")):  # an empty class
        assert not mark.exists()
        monkeypatch.setenv("MMRL_SAFE", safe)
        with pytest.raises(UserError, match=sentence):
            pretrained.load_processor(AutoConfig, model, remote_code=True)
    assert mark.exists()


def changed(tmp_path, change, part=".", source=None):
    """Copy a folder with its weights changed."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    shutil.copytree(source or tiny_vlms.folder(QWEN), folder)
    file = next((folder / part).glob("*.safetensors"))
    save_file(change(load_file(file)), file, {"format": "pt"})
    return folder


def vlm(folder):
    from transformers import AutoModelForImageTextToText

    return pretrained.load_model(AutoModelForImageTextToText, folder, dtype=torch.float32)


def without(part):
    return lambda weights: {name: value for name, value in weights.items() if part not in name}


def prefixed(name: str) -> str:
    return "_fsdp_wrapped_module." + name.replace(".mlp.", "._checkpoint_wrapped_module.mlp.")


WRAPPED = [prefixed, lambda name: f"_orig_mod.{name}", lambda name: f"module.model.{name}"]


@pytest.mark.parametrize("rename", WRAPPED)
def test_names_of_wrappers_are_taken_off_and_that_is_said(rename, tmp_path):
    folder = changed(tmp_path, lambda weights: {rename(n): v for n, v in weights.items()})
    with pytest.warns(UserWarning, match="saved with a wrapper around the model"):
        weights = vlm(folder).state_dict()
    plain = vlm(tiny_vlms.folder(QWEN)).state_dict()
    assert plain.keys() == weights.keys()
    assert all(torch.equal(value, plain[name]) for name, value in weights.items())


INCOMPLETE = [
    (without("layers.1.mlp"), "3 of the .* missing, such as .*mlp.*; download the folder"),
    (without("visual.blocks"), "are missing, such as .*visual"),
    (without("lm_head"), "1 of the .* missing, such as lm_head.weight"),
    (lambda w: {n.replace("self_attn", "attention"): v for n, v in w.items()}, "names that"),
    (lambda w: {n.replace("q_proj", "q_proj.base_layer"): w[n] for n in w}, "with a LoRA loaded"),
    (lambda w: {n: v[:2].clone() for n, v in w.items()}, "have another shape"),
    (lambda w: w | {"model.layers.0.mlp.up_proj.bias": torch.zeros(3)}, "do not use, so it"),
    (lambda w: w | {n: v / 0 for n, v in w.items() if "norm" in n}, "norm.* NaN or infinity"),
]


def test_a_model_that_is_not_whole_is_refused(tmp_path, subtests):
    from diffusers import StableDiffusionPipeline

    for change, sentence in INCOMPLETE:
        with subtests.test(sentence), pytest.raises(UserError, match=sentence):
            vlm(changed(tmp_path, change))
    for part, gone in (("unet", "conv_in"), ("vae", "conv_in"), ("text_encoder", "q_proj")):
        folder = changed(tmp_path, without(gone), part, tiny_diffusers.folder("sd"))
        sentence = f"{part}: .* missing, such as .*{gone}"
        with subtests.test(part), pytest.raises(UserError, match=sentence):
            pretrained.load_pipeline(StableDiffusionPipeline, folder)
    with pytest.warns(UserWarning, match="does not use 1 tensors of its files, such as v_head"):
        vlm(changed(tmp_path, lambda weights: weights | {"v_head.weight": torch.zeros(1)}))
    with warnings.catch_warnings(action="error"):
        vlm(vllm_models.folder("tied_qwen2_5_vl"))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"


def test_a_broken_file_is_named(model, subtests):
    from transformers import AutoTokenizer

    file = model / "model.safetensors"
    content = file.read_bytes()
    sharded = Path(shutil.copytree(model, model.parent / "sharded"))
    vlm(model).save_pretrained(sharded, max_shard_size="50KB")
    (sharded / "model.safetensors").unlink()
    for written, sentence in [
        (content[:-1000], r"model.safetensors is cut short: it has [\d,]+ bytes of [\d,]+"),
        (POINTER, "model.safetensors is a Git LFS pointer"),
        (b"", "model.safetensors is empty"),
        (save({}), "holds no tensors"),
        (b"\xff" * 99, "cut short, or no safetensors file"),
    ]:
        file.write_bytes(written)
        with subtests.test(sentence), pytest.raises(UserError, match=sentence):
            vlm(model)
    file.unlink()
    with pytest.raises(UserError, match="no file named model.safetensors"):
        vlm(model)
    shards = sorted(sharded.glob("model-*.safetensors"))
    shards[0].unlink()
    with pytest.raises(UserError, match=f"lacks 1 of its {len(shards)} files.*{shards[0].name}"):
        vlm(sharded)
    (model / "tokenizer.json").write_bytes(POINTER)
    with pytest.raises(UserError, match="tokenizer.json is a Git LFS pointer"):
        pretrained.load_processor(AutoTokenizer, model)


def test_an_adapter_is_no_model(tmp_path):
    base = {"base_model_name_or_path": "somebody/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(base))
    with pytest.raises(UserError, match=r"adapter on somebody/base.*path: somebody/base.*`start: "):
        vlm(tmp_path)


def test_the_only_variant_of_a_folder_is_read(tmp_path):
    from diffusers import UNet2DConditionModel

    source = Path(shutil.copytree(tiny_diffusers.folder("sd"), tmp_path / "sd")) / "unet"
    file = next(source.glob("*.safetensors"))
    half = {name: value.half() for name, value in load_file(file).items()}
    save_file(half, file.with_name(f"{file.stem}.fp16.safetensors"), {"format": "pt"})
    file.unlink()
    net = pretrained.load_model(UNet2DConditionModel, source, dtype=torch.float16)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in half.items())


def test_pickled_objects_are_not_read(tmp_path):
    from mmrl.core.weight_files import read_tensors

    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    with pytest.raises(UserError, match="could run code"):
        read_tensors(tmp_path / "module.pt")
    torch.save({"state_dict": {"a": torch.ones(1), "epoch": 3}}, tmp_path / "state.pt")
    assert read_tensors(tmp_path / "state.pt") == {"a": torch.ones(1)}


def test_the_layout_of_a_model_s_authors_is_named_with_its_conversion(tmp_path):
    from transformers import AutoProcessor, JanusForConditionalGeneration

    for kind, sentence in [
        ("Emu3", "take BAAI/Emu3-Gen-hf .*/convert_emu3_weights_to_hf.py"),
        ("multi_modality", "take deepseek-community/Janus-Pro-1B .*/convert_janus_weights_to"),
        ("internvl_chat", "model_type internvl_chat.*-hf at its end"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(UserError, match=sentence):
            pretrained.load_model(JanusForConditionalGeneration, tmp_path)
    with pytest.raises(UserError, match="BAAI/Emu3-Gen is in the layout of its authors"):
        pretrained.load_processor(AutoProcessor, "BAAI/Emu3-Gen")  # before a download


def test_a_bound_may_be_infinite_and_no_weight():
    """Gemma 4's towers clip what goes into a layer and out of it."""
    infinite, unknown = torch.tensor(torch.inf), torch.tensor(torch.nan)
    tensors = {"a.input_max": infinite, "a.input_min": -infinite, "a.weight": torch.ones(2)}
    assert not list(weight_files.not_finite(tensors))
    broken = {"b.input_max": unknown, "b.scale": infinite, "b.x_max": infinite.expand(2)}
    assert list(weight_files.not_finite(tensors | broken)) == list(broken)

"""Published pipelines without a family: sizes that are known, encodings in place of encoders, and
what a replay on fakes takes beside the family of the same pipeline."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from mmrl.apps.dry_run import published, rehearsal, replays
from mmrl.apps.dry_run.dryrun import dry_run
from mmrl.apps.dry_run.fakes import Fakes
from mmrl.apps.dry_run.page import lines
from mmrl.config.options import TrainOptions
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.policies.diffusion.pipeline_folder import class_of
from tests.fixtures import tiny_diffusers

load_built_in()
PIPELINE = Path(__file__).parents[2] / "configs/digits/pipeline.yaml"
MODELS = published.table()["models"]
ENCODED = [name for name, model in MODELS.items() if "encodings" in model]
PLAIN = TrainOptions(1, 2, 2, 1)

# of the papers, model cards and weights' files, in billions; "6B" of CogView4 and Z-Image is
# rounded, of VACE is the network without the layers of its condition
BILLIONS = {
    "black-forest-labs/FLUX.2-dev": 32,
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v": 8.3,
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_i2v": 8.3,
    "HiDream-ai/HiDream-I1-Full": 17,
    "Alpha-VLLM/Lumina-Image-2.0": 2.6,
    "lodestones/Chroma1-HD": 8.9,
    "nvidia/Cosmos-Predict2-2B-Text2Image": 2,
    "nvidia/Cosmos-Predict2-2B-Video2World": 2,
    "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers": 6,
    "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers": 2,
    "Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers": 1.6,
    "Efficient-Large-Model/SANA-Video_2B_480p_diffusers": 2,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": 5,
    "Qwen/Qwen-Image-Edit-2509": 20,
    "Lightricks/LTX-2": 19,
}
ROUNDED = {"THUDM/CogView4-6B": 6, "Tongyi-MAI/Z-Image-Omni-Base": 6}
ENCODERS = {
    "mistral3_24b": 24,
    "qwen2_5_vl_7b_text": 7.07,
    "t5_11b": 4.86,  # the half of T5 that reads
    "llama3_1_8b": 8.03,
    "siglip_so400m": 0.428,
    "byt5_small": 0.218,  # the part of ByT5 that reads
}


def test_sizes_are_those_that_are_published():
    def billions(name):
        return MODELS[name]["parameters"]["transformer"] / 1e9

    for name, known in BILLIONS.items():
        assert billions(name) == pytest.approx(known, rel=0.05), name
    for name, known in ROUNDED.items():
        assert round(billions(name) - 0.05) == known, name
    for size, name in {"1.3B": "Wan-AI/Wan2.1-T2V-1.3B", "14B": "Wan-AI/Wan2.1-T2V-14B"}.items():
        vace, base = MODELS[f"Wan-AI/Wan2.1-VACE-{size}-diffusers"], MODELS[f"{name}-Diffusers"]
        config = vace["parts"]["transformer"]
        layers = len(config.get("vace_layers", range(8)))
        whole, plain = (x["parameters"]["transformer"] for x in (vace, base))
        more = (whole - plain) / layers
        assert more == pytest.approx(plain / config.get("num_layers", 40), rel=0.2)
    for name, known in ENCODERS.items():
        count = published.table()["encoders"][name]["parameters"] / 1e9
        assert count == pytest.approx(known, rel=0.01), name


@pytest.mark.parametrize("name", ["Alpha-VLLM/Lumina-Image-2.0", "Wan-AI/Wan2.2-TI2V-5B-Diffusers"])
def test_what_stands_in_the_table_is_what_the_meta_device_counts(name):
    known = MODELS[name]
    nets = {
        part: published.on_meta(config["_class_name"], config)
        for part, config in known["parts"].items()
        if part in known["parameters"]
    }
    assert {part: published.parameters(net) for part, net in nets.items()} == known["parameters"]


@pytest.mark.parametrize("name", ENCODED)
def test_every_entry_is_a_folder_of_its_pipeline(name):
    known = MODELS[name]
    cls = getattr(diffusers, known["pipeline"])
    taken = inspect.signature(cls.__init__).parameters
    assert set(known["parts"]) | set(known.get("index", {})) <= set(taken)
    assert all(hasattr(cls, method) for method in known["encodings"])
    index = json.loads((published.folder(name) / "model_index.json").read_text())
    for part, config in known["parts"].items():
        of_part = class_of(index[part])
        values = of_part.load_config(published.folder(name), subfolder=part)
        assert {key: values[key] for key in config} == config
        assert set(config) <= {"_class_name", *inspect.signature(of_part.__init__).parameters}


def test_encodings_are_of_as_many_rows_as_prompts():
    def made(returned):
        return replays.encoding(returned, 3, torch.bfloat16)

    text, mask, none = made([{"shape": [5, 2]}, {"mask": [5]}, None])
    assert text.shape == (3, 5, 2) and text.dtype == torch.bfloat16 and none is None
    assert mask.tolist() == [[1] * 5] * 3 and mask.dtype == torch.long
    assert made({"shape": [4, "rows", 5, 2]}).shape == (4, 3, 5, 2)
    assert made({"plain": [5, 3]}).shape == (5, 3)
    assert made({"lengths": 5}).tolist() == [0, 5, 10, 15]
    (texts,) = made([{"rows": [{"rows": {"shape": [5, 2]}}]}])
    assert [[text.shape for text in row] for row in texts] == [[(5, 2)]] * 3


def test_a_mask_of_every_token_by_every_other_takes_no_memory():
    """HunyuanVideo 1.5 repeats one of its texts so, in each of its 54 blocks."""
    small, large = (torch.ones(1, 1, 1, n, dtype=torch.bool) for n in (1_000, 50_000))
    with Fakes().running():
        assert not isinstance(small.repeat(1, 1, 1_000, 1), FakeTensor)
        repeated = large.repeat(1, 1, 50_000, 1)
    assert isinstance(repeated, FakeTensor) and repeated.shape == (1, 1, 50_000, 50_000)


def test_a_replay_on_fakes_takes_what_the_family_of_the_same_pipeline_takes(tmp_path):
    """Without encoders, and without a tokenizer: its folder says what they would return."""
    whole = tiny_diffusers.folder("flux")
    place = tmp_path / "flux"
    shutil.copytree(whole, place)
    index = json.loads((place / "model_index.json").read_text())
    for part in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
        shutil.rmtree(place / part)
        index[part] = [None, None]
    (place / "model_index.json").write_text(json.dumps(index))
    config = json.loads((place / "transformer/config.json").read_text())
    widths = config["joint_attention_dim"], config["pooled_projection_dim"]
    encoded = [{"shape": [8, widths[0]]}, {"shape": [widths[1]]}, {"plain": [8, 3]}]
    (place / published.ENCODINGS).write_text(json.dumps({"encode_prompt": encoded}))
    options = {"steps": 3, "lora": 2, "fixed_batch_rows": 2}
    call = {"height": 16, "width": 16, "max_sequence_length": 8}
    stage = replays.replayed(place, options | {"call": call}, PLAIN, 2)
    flow = options | {"path": str(whole), "size": 16, "text_length": 8}
    family = rehearsal.flow(POLICIES["flux"], whole, flow, PLAIN, 2)
    once, plain = rehearsal.rehearse(stage), rehearsal.rehearse(family)
    assert stage.network_rows == 1 and stage.policy.encoder_parameters == 0
    assert once.update.flops == plain.update.flops > 0
    assert once.sampling.flops == plain.sampling.flops
    for part in ("parameters", "activations"):
        assert once.update.memory[part] == pytest.approx(plain.update.memory[part], rel=0.01), part
    assert once.trained == plain.trained > 0


def test_a_published_pipeline_is_looked_at_offline():
    """The one with the fewest layers, at the size of a thumbnail, guided and not."""
    words = [
        "policy.pipeline.path=Efficient-Large-Model/SANA-Video_2B_480p_diffusers",
        "policy.pipeline.call={height: 480, width: 832, frames: 5}",
        "policy.pipeline.dtype=bfloat16",
        "policy.pipeline.lora=4",
        "train.precision=bf16",
        "train.micro_batch_size=1",
    ]
    found = dry_run(PIPELINE, words)
    assert found.shape == (16, 2, 60, 104) and found.network_rows == 1 and not found.unknown
    known = MODELS[found.path]
    once = found.rehearsed
    assert once.parameters == known["parameters"]["transformer"]
    assert found.encoders == 2 * published.table()["encoders"]["gemma2_2b"]["parameters"]
    assert once.bytes_decoder == 4 * known["parameters"]["vae"]
    assert found.counted.sampling == 240 * 8 and found.counted.decisions == 240 * 4
    assert "forwards" in "\n".join(lines(found))

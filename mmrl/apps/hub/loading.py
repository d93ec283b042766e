"""Explains how to load an export: in diffusers, transformers and ComfyUI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmrl.core.files import json_object
from mmrl.monitoring.report.runs import Run

Kind = Literal["diffusers_lora", "diffusers", "peft", "transformers", "other"]
LIBRARIES = {
    "diffusers_lora": "diffusers",
    "diffusers": "diffusers",
    "peft": "peft",
    "transformers": "transformers",
    "other": "",
}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# words in the name of a pipeline -> the hub's name of its task
TASKS = (
    (("ImageToVideo", "I2V"), "image-to-video"),
    (("Wan", "HunyuanVideo", "LTX", "CogVideo", "SkyReels"), "text-to-video"),
    (("Kontext", "Edit", "Img2Img"), "image-to-image"),
    (("Pipeline",), "text-to-image"),
)


@dataclass(frozen=True)
class Export:
    """Describes an export. ``pipeline``: diffusers' class; ``base``: the trained model, as named in
    the configuration; ``base_id``: its name on the hub, if any. ``auto_class``: the class of
    transformers that loads it."""

    kind: Kind
    pipeline: str
    base: str
    base_id: str
    task: str
    options: Mapping[str, Any]
    auto_class: str = "AutoModelForImageTextToText"

    @property
    def library(self) -> str:
        return LIBRARIES[self.kind]


def describe(
    folder: Path, run: Run, pipeline: str, makes: str | None, auto_class: str = ""
) -> Export:
    """Describe an export by its files. ``pipeline``, ``auto_class``: the policy's classes in
    diffusers and transformers, if any."""
    kind = kind_of(folder)
    index = json_object(folder / "model_index.json")
    pipeline = str(index.get("_class_name") or pipeline)
    options = policy_options(run)
    base = str(options.get("path") or "")
    is_id = bool(HUB_ID.fullmatch(base)) and not Path(base).exists()
    task = next((task for words, task in TASKS if any(w in pipeline for w in words)), "")
    if kind in ("peft", "transformers"):
        task = "image-text-to-text" if makes == "text" else "text-to-image"
    auto_class = auto_class or Export.auto_class
    return Export(kind, pipeline, base, base if is_id else "", task, options, auto_class)


def kind_of(folder: Path) -> Kind:
    """Return the kind of an export, by its files."""
    marks: tuple[tuple[str, Kind], ...] = (
        ("pytorch_lora_weights.safetensors", "diffusers_lora"),
        ("model_index.json", "diffusers"),
        ("adapter_config.json", "peft"),
    )
    for name, kind in marks:
        if (folder / name).is_file():
            return kind
    return "transformers" if "model_type" in json_object(folder / "config.json") else "other"


def policy_options(run: Run) -> dict[str, Any]:
    """Return the options of the policy, without its family's name."""
    section = run.config.get("policy")
    if not isinstance(section, dict):
        return {}
    inner = [value for value in section.values() if isinstance(value, dict)]
    return dict(inner[0]) if len(section) == 1 and inner else dict(section)


def instructions(export: Export, repository: str) -> str:
    """Write the section "How to load", in Markdown."""
    writers = {
        "diffusers_lora": _diffusers_lora,
        "diffusers": _diffusers,
        "peft": _peft,
        "transformers": _transformers,
        "other": _other,
    }
    return writers[export.kind](export, repository)


def code(export: Export, place: str) -> str:
    """Return the Python lines that load an export from ``place``; "" if there are none."""
    text = instructions(export, place)
    return text.partition("```python\n")[2].partition("\n```")[0]


def _call(export: Export) -> str:
    options = export.options
    arguments = ['"a prompt"']
    if isinstance(options.get("steps"), int):
        arguments.append(f"num_inference_steps={options['steps']}")
    if isinstance(options.get("guidance_scale"), (int, float)):
        arguments.append(f"guidance_scale={options['guidance_scale']}")
    if isinstance(size := options.get("size"), int):
        arguments += [f"height={size}", f"width={size}"]
    answer = "frames[0]" if export.task.endswith("video") else "images[0]"
    if export.task.startswith("image-to"):
        arguments.insert(0, "image=picture")
    return f"result = pipe({', '.join(arguments)}).{answer}"


def _diffusers_lora(export: Export, repository: str) -> str:
    base = export.base_id or "PATH_OF_THE_BASE_MODEL"
    pipeline = export.pipeline or "DiffusionPipeline"
    return f"""### diffusers

```python
import torch
from diffusers import {pipeline}

pipe = {pipeline}.from_pretrained("{base}", torch_dtype=torch.bfloat16)
pipe.load_lora_weights("{repository}")
pipe.to("cuda")
{_call(export)}
```

### ComfyUI

Put `pytorch_lora_weights.safetensors` into `ComfyUI/models/loras` and add the node
*LoraLoaderModelOnly* behind the one that loads the base model, with strength 1. If it does not know
the names: `mmrl convert pytorch_lora_weights.safetensors --base {base} --format comfyui --out
lora.safetensors`. Neither was tried in ComfyUI.

### transformers

Not for this model: it is no model of transformers.
"""


def _diffusers(export: Export, repository: str) -> str:
    pipeline = export.pipeline or "DiffusionPipeline"
    return f"""### diffusers

```python
import torch
from diffusers import {pipeline}

pipe = {pipeline}.from_pretrained("{repository}", torch_dtype=torch.bfloat16).to("cuda")
{_call(export)}
```

### ComfyUI

Put `transformer/diffusion_pytorch_model.safetensors` (or `unet/...`) into
`ComfyUI/models/diffusion_models` and load it with the node *Load Diffusion Model*, text encoders
and VAE as for the base model. ComfyUI reads diffusers' names of weights for the families it
supports; this was not tried.

### transformers

Not for this model: it is no model of transformers.
"""


def _transformers(export: Export, repository: str) -> str:
    return f"""### transformers

```python
from transformers import AutoProcessor, {export.auto_class}

model = {export.auto_class}.from_pretrained("{repository}", dtype="auto", device_map="auto")
processor = AutoProcessor.from_pretrained("{repository}")
```

### diffusers, ComfyUI

Not for this model: it writes answers, or is a model of transformers.
"""


def _peft(export: Export, repository: str) -> str:
    base = export.base_id or "PATH_OF_THE_BASE_MODEL"
    return f"""### transformers, with peft

```python
from peft import PeftModel
from transformers import AutoProcessor, {export.auto_class}

model = {export.auto_class}.from_pretrained("{base}", dtype="auto", device_map="auto")
model = PeftModel.from_pretrained(model, "{repository}")
processor = AutoProcessor.from_pretrained("{repository}")
```

### diffusers, ComfyUI

Not for this model: it writes answers, or is a model of transformers.
"""


def _other(export: Export, repository: str) -> str:
    return f"""The files are in the format of the model's own library; neither diffusers,
transformers nor ComfyUI loads them by themselves.

```bash
hf download {repository} --local-dir model
```
"""

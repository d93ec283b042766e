"""Defines the arguments and options of the commands: names, values and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mmrl.cli import completion

# of several commands
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes such as train.iterations=20 policy.sd3.lora=16.")
]
RunFolder = Annotated[
    Path,
    typer.Argument(help="Folder that `mmrl train` named.", autocompletion=completion.of_runs),
]
RunOrConfig = Annotated[
    Path,
    typer.Argument(
        help="A run folder (trained model) or a configuration (base model).",
        autocompletion=completion.of_runs_and_configs,
    ),
]
Served = Annotated[
    Path,
    typer.Argument(
        help="A .yaml file with what is served and perhaps `serve:`, or a name.",
        autocompletion=completion.of_configs,
    ),
]
ServeOverrides = Annotated[
    list[str] | None, typer.Argument(help="Changes such as serve.port=8200.")
]
At = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        help="Name such as iteration-000050, or best (train.save_best); default: the newest.",
    ),
]

BestOf = Annotated[
    int | None,
    typer.Option("--best-of", min=1, help="Every sample is the best of this many, by --by."),
]
By = Annotated[
    str | None,
    typer.Option("--by", help="The reward or vote that chooses it, such as majority_vote."),
]

# of one command each, in the order of the commands
TrainConfig = Annotated[
    Path,
    typer.Argument(
        help="A .yaml file, a shipped name such as digits/flow_grpo, or a run.",
        autocompletion=completion.of_runs_and_configs,
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run folder given as CONFIG.")
]
AcceptChanges = Annotated[
    bool,
    typer.Option(
        "--accept-changes",
        help="With --resume: go on although seed, data, objective or the like have changed.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check and estimate only; no weights are needed.")
]
Processes = Annotated[int, typer.Option(min=1, help="With --dry-run: how many share the work.")]
Devices = Annotated[
    str | None,
    typer.Option(help="With --dry-run: rehearse at true size for cards such as 8xH100."),
]
Fit = Annotated[
    bool, typer.Option("--fit", help="With --devices: propose overrides that fit the cards.")
]
TrainEngine = Annotated[
    str | None,
    typer.Option(help="ray: trainers and workers on a Ray cluster; default: this process."),
]
ScoresFile = Annotated[
    Path | None, typer.Option(help="Also write what every prompt scored to this JSON file.")
]
Benchmark = Annotated[
    str | None,
    typer.Option(
        help="geneval, ocr, dpg, refcoco ... of a run, a configuration, or a folder of samples "
        "as PATH; its options are benchmark.KEY=VALUE (mmrl list benchmarks)."
    ),
]
PromptTexts = Annotated[
    list[str] | None, typer.Option("--prompt", "-p", help="May be given several times.")
]
PromptImages = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        help="A picture of the prompt; repeatable: several of one prompt, or one of each.",
    ),
]
PromptVideos = Annotated[
    list[Path] | None, typer.Option("--video", help="A video of the prompt; repeatable.")
]
Guidance = Annotated[float | None, typer.Option(help="Guidance scale; default: as configured.")]
ComparedBy = Annotated[
    str, typer.Option("--by", help="The reward that compares; default: the weighted sum.")
]
Margin = Annotated[float, typer.Option(min=0, help="Least difference of the two rewards.")]
Rated = Annotated[
    Path,
    typer.Argument(
        help="A .csv or .jsonl file of sample and score or ratings, or pairs of `mmrl view "
        "--rate` or `mmrl label`."
    ),
]
ClipFeatures = Annotated[
    str | None, typer.Option(help="Features of open_clip: NAME/TAG, hf-hub:ID or a folder.")
]
VisionFeatures = Annotated[
    str | None,
    typer.Option(help="Features of a vision model of transformers (DINO, SigLIP, CLIP)."),
]
TextFeatures = Annotated[
    str | None, typer.Option(help="Features of answers with prompts, by a text model.")
]
JoinText = Annotated[
    bool, typer.Option("--join-text", help="Join features of picture and prompt (with --clip).")
]
TextPool = Annotated[Literal["mean", "last"], typer.Option(help="Tokens of --text-model.")]
EnsembleSize = Annotated[
    int, typer.Option(min=1, help="Heads of an ensemble, fitted to resampled rows.")
]
HiddenWidths = Annotated[
    list[int] | None,
    typer.Option(min=1, help="Width of a hidden layer, repeatable; default: a linear head."),
]
HeldOut = Annotated[
    float, typer.Option(min=0.05, max=0.5, help="Share that the head is measured on.")
]
LoraForm = Annotated[
    str,
    typer.Option("--format", help="Of LoRA weights: diffusers, comfyui or kohya."),
]
Adapters = Annotated[
    list[Path],
    typer.Argument(metavar="ADAPTER...", help="LoRA files, or folders as `export` writes."),
]
BaseModel = Annotated[
    str | None,
    typer.Option(help="Folder or hub id of the model they are for; peft's name it themselves."),
]
FileForm = Annotated[
    str | None, typer.Option("--format", help="diffusers, comfyui or kohya: of one file.")
]
LoraFile = Annotated[
    Path | None, typer.Option("--out", "-o", help="New .safetensors file of --format.")
]
MergedFolder = Annotated[
    Path | None, typer.Option(help="Merge all adapters into their model: a new folder.")
]
AdapterWeights = Annotated[
    list[float] | None, typer.Option(help="With --into: of each adapter; default: 1.")
]
PushFolder = Annotated[
    Path | None,
    typer.Option("--dry-run", help="Write what would be uploaded to this new folder instead."),
]
License = Annotated[
    str | None, typer.Option(help="The hub's name of one; default: the base model's, if known.")
]
ComparedConfigs = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG... [KEY=VALUE...]",
        help="Configurations, each perhaps with changes, digits/flow_grpo+train.epochs=2; "
        "the first is the baseline. KEY=VALUE changes all.",
    ),
]
Varied = Annotated[
    list[str] | None,
    typer.Option(help="Compare the one configuration with this change of it; repeatable."),
]
Swept = Annotated[
    list[str] | None,
    typer.Option(help="KEY=V1,V2: try each, choose on development prompts; repeatable."),
]
Budget = Annotated[
    list[str] | None,
    typer.Option(help="Of a run: cpu_seconds=, iterations=, samples= or forwards=N."),
]
ViewedRuns = Annotated[
    list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders with runs.")
]
RatingsFile = Annotated[
    Path | None,
    typer.Option(help="Let a person rate pairs of samples; a .jsonl file for the ratings."),
]
ArtifactNames = Annotated[
    list[str] | None, typer.Argument(help="Such as digits/sd3; default: quickstart's.")
]
AuditedConfig = Annotated[
    Path,
    typer.Argument(
        help="A .yaml file with `data:` and `reward:`, or a shipped name.",
        autocompletion=completion.of_configs,
    ),
]
ShownPrompts = Annotated[
    int, typer.Option("--samples", min=0, help="Prompts of each side that are shown.")
]
ListWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KIND] [NAME]",
        help="rewards, policies, presets, configs ..., or a name such as policy_gradient.",
        autocompletion=completion.of_list,
    ),
]
SearchWord = Annotated[
    str | None,
    typer.Option("--search", "-s", help="Names and first lines that have this word."),
]
AsMarkdown = Annotated[
    bool, typer.Option("--markdown", help="Rewards only, with all their cards say.")
]

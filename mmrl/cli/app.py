"""Defines the ``mmrl`` command. A user's mistake is one message and exit status 2, never a
traceback."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer

from mmrl.cli import completion

app = typer.Typer(
    help="Reinforcement fine-tuning for vision-language models and image and video generators.\n\n"
    "`mmrl --safe COMMAND` runs no code that a configuration brings.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# what a file system refuses: that is the user's to mend, and no bug of ours
OF_THE_DISK = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)
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
    typer.Option("--checkpoint", help="Name such as iteration-000050; default: the newest."),
]

BestOf = Annotated[
    int | None,
    typer.Option("--best-of", min=1, help="Every sample is the best of so many, by --by."),
]
By = Annotated[
    str | None,
    typer.Option("--by", help="The reward or vote that chooses it, such as majority_vote."),
]


def _print_version(version: bool) -> None:
    if version:
        from mmrl import __version__

        print(f"mmrl {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    safe: Annotated[
        bool,
        typer.Option(
            "--safe",
            help="For configurations of others: refuse `plugins`, code by module:name or "
            "file.py:name, and remote_code of models.",
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            is_eager=True,
            callback=_print_version,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    if safe:
        from mmrl.core.registry import refuse_foreign_code

        refuse_foreign_code()


@app.command()
def train(
    config: Annotated[
        Path,
        typer.Argument(
            help="A .yaml file, a shipped name such as digits/flow_grpo, or a run.",
            autocompletion=completion.of_runs_and_configs,
        ),
    ],
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run folder given as CONFIG.")
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="With --resume: go on although seed, data, objective or the like have changed.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and estimate only; no weights are needed.")
    ] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="With --dry-run: how many share the work.")
    ] = 1,
    devices: Annotated[
        str | None,
        typer.Option(help="With --dry-run: rehearse at true size for cards such as 8xH100."),
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="With --devices: propose overrides that fit the cards.")
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(help="ray: trainers and workers on a Ray cluster; default: this process."),
    ] = None,
) -> None:
    """Train a configuration, or go on with a run.

    Exit status: 0 finished; 75 stopped by SIGTERM, SIGHUP, SIGQUIT or train.time_limit, to be
    resumed; 130 stopped by Ctrl-C; 3 stopped by alarms.stop, with nothing to learn from; 2 an
    error.
    """
    from mmrl.core.errors import UserError
    from mmrl.run.lifecycle import trained
    from mmrl.utils.paths import find_config

    if dry_run:
        from mmrl.cli import commands

        return commands.dry_run(config, overrides or [], processes, devices, fit)
    if devices or fit:
        raise UserError("--devices and --fit belong to --dry-run, which loads no weights")
    if config.is_dir() and not resume:
        raise UserError(f"{config} is a folder; to go on with a run: mmrl train --resume {config}")
    name = config if resume else find_config(config)
    if engine is not None:
        from mmrl.launch import command

        raise typer.Exit(command.train(engine, name, overrides or [], resume, accept_changes))
    ended = trained(name, overrides or [], resume, accept_changes)
    raise typer.Exit(ended.status)


@app.command()
def rerun(
    run: RunFolder,
    folder: Annotated[
        Path | None, typer.Option("--out", help="New folder; default: RUN-rerun.")
    ] = None,
) -> None:
    """Repeat a finished run from its folder alone, and say whether it is equal to the bit.

    Exit status 1 if something differs.
    """
    from mmrl.run.rerun import rerun as repeat

    outcome = repeat(run, folder)
    print("\n".join(outcome.lines()))
    raise typer.Exit(int(bool(outcome.differences)))


@app.command()
def evaluate(
    path: RunOrConfig,
    overrides: Overrides = None,
    checkpoint: At = None,
    best_of: BestOf = None,
    by: By = None,
    scores: Annotated[
        Path | None, typer.Option(help="Also write what every prompt scored to this JSON file.")
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(
            help="geneval, ocr, dpg, refcoco ... of a run, a configuration, or a folder of samples "
            "as PATH; its options are benchmark.KEY=VALUE (mmrl list benchmarks)."
        ),
    ] = None,
) -> None:
    """Measure rewards on held-out prompts with 95 % confidence intervals: base model and trained
    model. Or score a benchmark of the field."""
    from mmrl.cli import commands
    from mmrl.cli.tables import change_sentences, evaluation_table

    if benchmark is not None:
        commands.refuse_with_benchmark({"--best-of": best_of, "--by": by, "--scores": scores})
        return commands.evaluate_benchmark(path, benchmark, overrides or [], checkpoint)
    best = commands.Selection.of(best_of, by)
    rows, target = commands.evaluate(path, overrides or [], checkpoint, best, scores)
    evaluation_table(rows)
    for sentence in change_sentences(rows):
        print(f"trained against base, {sentence}")
    print(f"written to {target}")


@app.command()
def sample(
    path: RunOrConfig,
    overrides: Overrides = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="May be given several times.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="A .txt or .jsonl file of prompts.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            "--image",
            help="A picture of the prompt; repeatable: several of one prompt, or one of each.",
        ),
    ] = None,
    video: Annotated[
        list[Path] | None, typer.Option("--video", help="A video of the prompt; repeatable.")
    ] = None,
    checkpoint: At = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the files.")] = Path("samples"),
    num_samples: Annotated[int, typer.Option(min=1, max=10**6, help="Samples a prompt.")] = 4,
    copies: Annotated[int | None, typer.Option(hidden=True)] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    guidance: Annotated[
        float | None, typer.Option(help="Guidance scale; default: as configured.")
    ] = None,
    best_of: BestOf = None,
    by: By = None,
) -> None:
    """Sample a trained or a base model into files."""
    from mmrl.cli import commands
    from mmrl.core.errors import UserError
    from mmrl.data.prompts import read

    if copies is not None:
        raise UserError("--copies is now --num-samples")

    texts = [{"text": text} for text in prompt or []]
    shown = commands.shown_prompts(texts, image or [], video or [])
    requests = shown + (read(prompts) if prompts else [])
    sampling = commands.Sampling(
        num_samples, seed, guidance, commands.Selection.of(best_of, by), checkpoint
    )
    for file in commands.sample(path, requests, folder, sampling, overrides or []):
        print(file)


@app.command()
def label(
    path: RunOrConfig,
    overrides: Overrides = None,
    file: Annotated[Path, typer.Option("--out", "-o", help="New .jsonl file.")] = Path(
        "pairs.jsonl"
    ),
    num_samples: Annotated[int, typer.Option(min=2, max=10**4, help="Samples a prompt.")] = 8,
    by: Annotated[
        str, typer.Option("--by", help="The reward that compares; default: the weighted sum.")
    ] = "",
    margin: Annotated[
        float, typer.Option(min=0, help="Least difference of the two rewards.")
    ] = 0.0,
    split: Annotated[str, typer.Option(help="train or held_out: prompts of the data.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts; default: all.")] = None,
    checkpoint: At = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Make preference pairs: the best and the worst of several samples of a prompt, by rewards."""
    from mmrl.cli.labelling import Labelling, label

    how = Labelling(num_samples, by, margin, split, limit, seed, checkpoint)
    outcome = label(path, file, how, overrides or [])
    print(f"{file}: {outcome.pairs} pairs; {outcome.equal} prompts without a better sample")


@app.command(name="fit-head")
def fit_head(
    data: Annotated[
        Path,
        typer.Argument(
            help="A .csv or .jsonl file of picture and score, or pairs of `mmrl view --rate` or "
            "`mmrl label`."
        ),
    ],
    folder: Annotated[Path, typer.Option("--out", "-o", help="New folder.")] = Path("head"),
    clip: Annotated[
        str | None, typer.Option(help="Features of open_clip: NAME/TAG, hf-hub:ID or a folder.")
    ] = None,
    vision: Annotated[
        str | None,
        typer.Option(help="Features of a vision model of transformers (DINO, SigLIP, CLIP)."),
    ] = None,
    hidden: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Width of a hidden layer, repeatable; default: a linear head."),
    ] = None,
    held_out: Annotated[
        float, typer.Option(min=0.05, max=0.5, help="Share that the head is measured on.")
    ] = 0.2,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:0 ...")] = "auto",
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Fit a reward of your own, `fitted_head: {path: FOLDER}`, to rated pictures or pairs."""
    from mmrl.cli.fitting import FeatureChoice, fit_head

    chosen = FeatureChoice(clip, vision, device)
    print(fit_head(data, folder, chosen, tuple(hidden or ()), held_out, seed))


@app.command()
def export(
    run: RunFolder,
    folder: Annotated[Path, typer.Option("--out", "-o", help="New folder.")] = Path("export"),
    checkpoint: At = None,
    form: Annotated[
        str,
        typer.Option("--format", help="Of LoRA weights: diffusers, comfyui or kohya."),
    ] = "diffusers",
) -> None:
    """Write the trained weights for the model's own library (diffusers, peft)."""
    from mmrl.cli import commands

    print(commands.export(run, folder, checkpoint, form))


@app.command()
def convert(
    adapters: Annotated[
        list[Path],
        typer.Argument(metavar="ADAPTER...", help="LoRA files, or folders as `export` writes."),
    ],
    base: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of the model they are for; peft's name it themselves."),
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", help="diffusers, comfyui or kohya: of one file.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--out", "-o", help="New .safetensors file of --format.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="Merge all adapters into their model: a new folder.")
    ] = None,
    weight: Annotated[
        list[float] | None, typer.Option(help="With --into: of each adapter; default: 1.")
    ] = None,
) -> None:
    """Convert a LoRA file to another form, or merge adapters into the model they are for."""
    from mmrl.cli.converting import converted

    print(converted(adapters, base, form, file, into, weight or []))


@app.command()
def push(
    run: RunFolder,
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Made if it is missing.")],
    dry_run: Annotated[
        Path | None,
        typer.Option("--dry-run", help="Write what would be uploaded to this new folder instead."),
    ] = None,
    checkpoint: At = None,
    license: Annotated[
        str | None, typer.Option(help="The hub's name of one; default: the base model's, if known.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    message: Annotated[str, typer.Option(help="Of the commit.")] = "Trained with mmrl",
) -> None:
    """Upload a run to the Hugging Face hub: weights, and a model card with the evidence."""
    from mmrl.hub import command

    request = command.Request(repository, checkpoint, license, private, message)
    if dry_run is None:
        print(command.push(run, request))
        return
    print(command.write(run, request, dry_run))


@app.command()
def report(run: RunFolder) -> None:
    """Write one self-contained HTML page about a run."""
    from mmrl.monitoring.report.page import write_report

    print(write_report(run))
    if (run / "before_after.png").exists():
        print(run / "before_after.png")


@app.command()
def compare(
    configs: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG... [KEY=VALUE...]",
            help="Configurations, each perhaps with changes, digits/flow_grpo+train.epochs=2; "
            "the first is the baseline. KEY=VALUE changes all.",
        ),
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(help="Compare the one configuration with this change of it; repeatable."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="KEY=V1,V2: try each, choose on development prompts; repeatable."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with seeds 0, 1, ...")] = 3,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Of a run: cpu_seconds=, iterations=, samples= or forwards=N."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 1,
    folder: Annotated[Path, typer.Option("--out", help="Folder for runs, page and JSON.")] = Path(
        "comparison"
    ),
) -> None:
    """Train configurations with several seeds at one budget and say, with intervals, what
    differs."""
    from mmrl.compare import command
    from mmrl.utils.files import check_writable

    check_writable(folder)
    request = command.Request(vary or (), sweep or (), seeds, budget or (), jobs, folder)
    path, sentences = command.compare(configs, request)
    print("\n".join(sentences))
    print(f"written to {path}")


@app.command()
def view(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders with runs.")
    ],
    rate: Annotated[
        Path | None,
        typer.Option(help="Let a person rate pairs of samples; a .jsonl file for the ratings."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 7007,
) -> None:
    """Serve running and finished runs to a browser: live reports, overlaid curves, galleries."""
    from mmrl.view import command

    command.view(runs, rate, host, port)


@app.command()
def build(
    names: Annotated[
        list[str] | None, typer.Argument(help="Such as digits/sd3; default: quickstart's.")
    ] = None,
) -> None:
    """Build parts of the embedded world ahead of time. They are cached."""
    from mmrl.cli import commands

    commands.build_artifacts(names or list(commands.QUICKSTART))


@app.command(name="serve-reward")
def serve_reward(
    config: Served,
    overrides: ServeOverrides = None,
) -> None:
    """Serve the rewards of a configuration to other machines over HTTP."""
    from mmrl.remote.server import serve
    from mmrl.utils.paths import find_config

    serve(find_config(config), overrides or [])


@app.command(name="serve-teacher")
def serve_teacher(
    config: Served,
    overrides: ServeOverrides = None,
) -> None:
    """Serve the policy of a configuration as a teacher for distillation on other machines."""
    from mmrl.remote import server
    from mmrl.utils.paths import find_config

    server.serve_teacher(find_config(config), overrides or [])


@app.command(name="check-reward")
def check_reward(
    config: Annotated[
        Path,
        typer.Argument(
            help="A .yaml file with `data:` and `reward:`, or a shipped name.",
            autocompletion=completion.of_configs,
        ),
    ],
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(min=1, help="Prompts to look at.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Which of them.")] = 0,
) -> None:
    """Audit the rewards of a configuration on its own data: ground truths must win, tricks must not
    pay."""
    from mmrl.audit import audit
    from mmrl.audit.tables import print_audits
    from mmrl.utils.paths import find_config

    if not print_audits(audit(find_config(config), overrides or [], samples, seed)):
        raise typer.Exit(1)


@app.command()
def data(
    config: Annotated[Path, typer.Argument(help="A .yaml file with `data:`, or a shipped name.")],
    overrides: Overrides = None,
    page: Annotated[Path, typer.Option("--out", help="The HTML page.")] = Path("data.html"),
    count: Annotated[
        int, typer.Option("--samples", min=0, help="Prompts of each side that are shown.")
    ] = 24,
) -> None:
    """Show what will be trained on: counts, lengths, samples, what is left out and why."""
    from mmrl.cli import commands

    print("\n".join(commands.show_data(config, overrides or [], page, count)))


@app.command(name="list")
def list_(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND] [NAME]",
            help="rewards, policies, presets, configs ..., or a name such as policy_gradient.",
            autocompletion=completion.of_list,
        ),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option("--search", "-s", help="Names and first lines that have this word."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Rewards only, with all their cards say.")
    ] = False,
) -> None:
    """List what can be named in a configuration: the kinds, a kind's names, or a name's options."""
    if markdown:
        from mmrl.cli.reward_table import markdown as table

        print(table(), end="")
        return
    from mmrl.cli.listing import show_list

    show_list(words or [], search)


@app.command()
def doctor() -> None:
    """Report versions, devices, attention backends and disk: what is there and what is missing."""
    from mmrl.cli.doctor import print_report

    if not print_report():
        raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    from mmrl.utils.threads import prepare

    prepare()  # before anything imports torch
    from mmrl.core.errors import UserError
    from mmrl.utils.output import lasting_output

    with lasting_output():
        try:
            app()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except OSError as error:
            if error.errno not in OF_THE_DISK or not error.filename:
                raise
            print(
                f"error: {error.filename}: {error.strerror}; look at the permissions and the free "
                f"space there, or name another place",
                file=sys.stderr,
            )
            sys.exit(2)
        except KeyboardInterrupt:
            print(
                "stopped; the last checkpoint is whole: mmrl train --resume RUN goes on from it",
                file=sys.stderr,
            )
            sys.exit(130)

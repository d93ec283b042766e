"""Defines the ``mmrl`` command. A user's mistake is one message and exit status 2, never a
traceback."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mmrl.cli import arguments

app = typer.Typer(
    help="Reinforcement fine-tuning for vision-language models and image and video generators.\n\n"
    "`mmrl --safe COMMAND` runs no code that a configuration brings. `mmrl docs` has the "
    "documentation: `mmrl docs start` is the first hour.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # rewraps the lines of docstrings
)
# errors of the file system are the user's to fix, not bugs
OF_THE_DISK = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)


def _look_at(path: Path, overrides: list[str] | None, **use: Any) -> None:
    """Raise UserError for a name that is neither a folder nor a configuration, and for definite
    mistakes in it, before torch and the model libraries are loaded, which takes seconds. ``use``:
    sections that the command uses, as in ``first_look``."""
    from mmrl.core.paths import find_config

    file = path / "config.yaml" if path.is_dir() else find_config(path)
    if file.is_file():  # else the command reports what the folder lacks
        from mmrl.config.first_look import first_look

        first_look(file, overrides or [], **use)


def _print_version(version: bool) -> None:
    if version:
        from mmrl.core.version import __version__

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
    config: arguments.TrainConfig,
    overrides: arguments.Overrides = None,
    resume: arguments.Resume = False,
    accept_changes: arguments.AcceptChanges = False,
    dry_run: arguments.DryRun = False,
    processes: arguments.Processes = 1,
    devices: arguments.Devices = None,
    fit: arguments.Fit = False,
    engine: arguments.TrainEngine = None,
) -> None:
    """Train a configuration, or resume a run.

    Exit status: 0 finished; 75 stopped by SIGTERM, SIGHUP, SIGQUIT or train.time_limit, to be
    resumed; 130 stopped by Ctrl-C; 3 stopped by alarms.stop, with nothing to learn from; 2 an
    error.
    """
    if resume or not config.is_dir():
        shared = None if devices else processes
        _look_at(config, overrides, every_stage=True, processes=shared)
    from mmrl.core.errors import UserError
    from mmrl.core.paths import find_config
    from mmrl.experiment.lifecycle import trained

    if dry_run:
        from mmrl.cli import commands

        return commands.dry_run(config, overrides or [], processes, devices, fit)
    if devices or fit:
        raise UserError("--devices and --fit belong to --dry-run, which loads no weights")
    if config.is_dir() and not resume:
        raise UserError(f"{config} is a folder; to go on with a run: mmrl train --resume {config}")
    name = config if resume else find_config(config)
    if engine is not None:
        from mmrl.apps.ray import command

        raise typer.Exit(command.train(engine, name, overrides or [], resume, accept_changes))
    ended = trained(name, overrides or [], resume, accept_changes)
    raise typer.Exit(ended.status)


@app.command()
def rerun(
    run: arguments.RunFolder,
    folder: Annotated[
        Path | None, typer.Option("--out", help="New folder; default: RUN-rerun.")
    ] = None,
) -> None:
    """Repeat a finished run from its folder alone, and tell whether it is bit-equal.

    Exit status 1 if something differs.
    """
    from mmrl.experiment.rerun import rerun as repeat

    outcome = repeat(run, folder)
    print("\n".join(outcome.lines()))
    raise typer.Exit(int(bool(outcome.differences)))


@app.command()
def evaluate(
    path: arguments.RunOrConfig,
    overrides: arguments.Overrides = None,
    checkpoint: arguments.At = None,
    best_of: arguments.BestOf = None,
    by: arguments.By = None,
    scores: arguments.ScoresFile = None,
    benchmark: arguments.Benchmark = None,
) -> None:
    """Measure rewards on held-out prompts with 95 % confidence intervals: base model and trained
    model. Or score a public benchmark."""
    if benchmark is None:
        _look_at(path, overrides)
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
    print(f"base: {commands.base_of(path)}")
    print(f"written to {target}")
    if path.is_dir():
        print(f"next: mmrl report {path} | mmrl export {path} --out FOLDER")


@app.command()
def sample(
    path: arguments.RunOrConfig,
    overrides: arguments.Overrides = None,
    prompt: arguments.PromptTexts = None,
    prompts: Annotated[Path | None, typer.Option(help="A .txt or .jsonl file of prompts.")] = None,
    image: arguments.PromptImages = None,
    video: arguments.PromptVideos = None,
    checkpoint: arguments.At = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the files.")] = Path("samples"),
    num_samples: Annotated[int, typer.Option(min=1, max=10**6, help="Samples a prompt.")] = 4,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    guidance: arguments.Guidance = None,
    best_of: arguments.BestOf = None,
    by: arguments.By = None,
    animated_png: Annotated[
        bool, typer.Option("--animated-png", help="Videos as animated PNG in place of .mp4.")
    ] = False,
) -> None:
    """Write samples of a trained or base model to files: pictures as .png, videos as .mp4."""
    _look_at(path, overrides)
    from mmrl.cli import commands
    from mmrl.data.prompts import read

    texts = [{"text": text} for text in prompt or []]
    shown = commands.shown_prompts(texts, image or [], video or [])
    requests = shown + (read(prompts) if prompts else [])
    sampling = commands.Sampling(
        num_samples,
        seed,
        guidance,
        commands.Selection.of(best_of, by),
        checkpoint,
        animated_png,
    )
    for file in commands.sample(path, requests, folder, sampling, overrides or []):
        print(file)


@app.command()
def label(
    path: arguments.RunOrConfig,
    overrides: arguments.Overrides = None,
    file: Annotated[Path, typer.Option("--out", "-o", help="New .jsonl file.")] = Path(
        "pairs.jsonl"
    ),
    num_samples: Annotated[int, typer.Option(min=2, max=10**4, help="Samples a prompt.")] = 8,
    by: arguments.ComparedBy = "",
    margin: arguments.Margin = 0.0,
    split: Annotated[str, typer.Option(help="train or held_out: prompts of the data.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts; default: all.")] = None,
    checkpoint: arguments.At = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Create preference pairs: the best and the worst of several samples of a prompt, by
    rewards."""
    _look_at(path, overrides)
    from mmrl.cli.labelling import Labelling, label

    how = Labelling(num_samples, by, margin, split, limit, seed, checkpoint)
    outcome = label(path, file, how, overrides or [])
    print(f"{file}: {outcome.pairs} pairs; {outcome.equal} prompts without a better sample")


@app.command(name="fit-head")
def fit_head(
    data: arguments.Rated,
    folder: Annotated[Path, typer.Option("--out", "-o", help="New folder.")] = Path("head"),
    clip: arguments.ClipFeatures = None,
    vision: arguments.VisionFeatures = None,
    text_model: arguments.TextFeatures = None,
    join_text: arguments.JoinText = False,
    pool: arguments.TextPool = "mean",
    hidden: arguments.HiddenWidths = None,
    count: arguments.EnsembleSize = 1,
    held_out: arguments.HeldOut = 0.2,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:0 ...")] = "auto",
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Fit a reward, `fitted_head: {path: FOLDER}`, to rated samples or pairs."""
    from mmrl.cli.fitting import choose_encoder, fit_head
    from rewards.heads.fit import Recipe

    choice = choose_encoder(clip, vision, text_model, join_text, pool)
    recipe = Recipe(count, tuple(hidden or ()), held_out=held_out, seed=seed)
    print(fit_head(data, folder, choice, recipe, device))


@app.command()
def export(
    run: arguments.RunFolder,
    folder: Annotated[Path, typer.Option("--out", "-o", help="New folder.")] = Path("export"),
    checkpoint: arguments.At = None,
    form: arguments.LoraForm = "diffusers",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16 of what is stored; default: the base's."),
    ] = None,
) -> None:
    """Write the trained weights for the model's own library (diffusers, peft)."""
    from mmrl.cli import commands

    print(commands.export(run, folder, checkpoint, form, dtype))


@app.command()
def convert(
    adapters: arguments.Adapters,
    base: arguments.BaseModel = None,
    form: arguments.FileForm = None,
    file: arguments.LoraFile = None,
    into: arguments.MergedFolder = None,
    weight: arguments.AdapterWeights = None,
) -> None:
    """Convert a LoRA file to another format, or merge adapters into their model."""
    from mmrl.cli.converting import converted

    print(converted(adapters, base, form, file, into, weight or []))


@app.command()
def push(
    run: arguments.RunFolder,
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Made if it is missing.")],
    dry_run: arguments.PushFolder = None,
    checkpoint: arguments.At = None,
    license: arguments.License = None,
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    message: Annotated[str, typer.Option(help="Of the commit.")] = "Trained with mmrl",
) -> None:
    """Upload a run to the Hugging Face hub: weights, and a model card with the evidence."""
    from mmrl.apps.hub import command

    request = command.Request(repository, checkpoint, license, private, message)
    if dry_run is None:
        print(command.push(run, request))
        return
    print(command.write(run, request, dry_run))


@app.command()
def report(run: arguments.RunFolder) -> None:
    """Write one self-contained HTML page about a run."""
    from mmrl.monitoring.report.page import BEFORE_AFTER, write_report
    from mmrl.monitoring.report.pictures import saved_picture

    print(write_report(run))
    if picture := saved_picture(run / BEFORE_AFTER):
        print(picture)


@app.command()
def compare(
    configs: arguments.ComparedConfigs,
    vary: arguments.Varied = None,
    sweep: arguments.Swept = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with seeds 0, 1, ...")] = 3,
    budget: arguments.Budget = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 1,
    folder: Annotated[Path, typer.Option("--out", help="Folder for runs, page and JSON.")] = Path(
        "comparison"
    ),
) -> None:
    """Train configurations with several seeds at one budget and report differences with
    intervals."""
    from mmrl.apps.compare.settings import budget_of, overrides_of, settings_of
    from mmrl.core.paths import find_config

    limits = budget_of(budget or ())
    for setting in settings_of(configs, vary or (), sweep or ()):
        _look_at(find_config(setting.config), overrides_of(setting, limits, seed=0))
    from mmrl.apps.compare import command
    from mmrl.core.files import check_writable

    check_writable(folder)
    request = command.Request(vary or (), sweep or (), seeds, budget or (), jobs, folder)
    path, sentences = command.compare(configs, request)
    print("\n".join(sentences))
    print(f"written to {path}")


@app.command()
def view(
    runs: arguments.ViewedRuns,
    rate: arguments.RatingsFile = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 7007,
) -> None:
    """Serve running and finished runs to a browser: live reports, galleries."""
    from mmrl.apps.view import command

    command.view(runs, rate, host, port)


@app.command()
def build(
    names: arguments.ArtifactNames = None,
) -> None:
    """Build parts of the embedded world ahead of time. They are cached."""
    from mmrl.cli import commands

    commands.build_artifacts(names or list(commands.QUICKSTART))


@app.command(name="serve-reward")
def serve_reward(
    config: arguments.Served,
    overrides: arguments.ServeOverrides = None,
) -> None:
    """Serve the rewards of a configuration to other machines over HTTP."""
    from mmrl.apps.serve.server import serve
    from mmrl.core.paths import find_config

    serve(find_config(config), overrides or [])


@app.command(name="serve-teacher")
def serve_teacher(
    config: arguments.Served,
    overrides: arguments.ServeOverrides = None,
) -> None:
    """Serve the policy of a configuration as a teacher for distillation on other machines."""
    from mmrl.apps.serve import server
    from mmrl.core.paths import find_config

    server.serve_teacher(find_config(config), overrides or [])


@app.command(name="check-reward")
def check_reward(
    config: arguments.AuditedConfig,
    overrides: arguments.Overrides = None,
    samples: Annotated[int, typer.Option(min=1, help="Prompts to use.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Which of them.")] = 0,
) -> None:
    """Audit the rewards of a configuration on its data: ground truths must win, exploits must not
    pay."""
    _look_at(config, overrides, sections=("data", "reward"))
    from mmrl.apps.check_reward import audit
    from mmrl.apps.check_reward.tables import print_audits
    from mmrl.core.paths import find_config

    if not print_audits(audit(find_config(config), overrides or [], samples, seed)):
        raise typer.Exit(1)


@app.command()
def data(
    config: Annotated[Path, typer.Argument(help="A .yaml file with `data:`, or a shipped name.")],
    overrides: arguments.Overrides = None,
    page: Annotated[
        Path | None, typer.Option("--out", help="The HTML page; default: none is written.")
    ] = None,
    count: arguments.ShownPrompts = 24,
    check: Annotated[
        bool, typer.Option("--check", help="Decode every picture and clip whole.")
    ] = False,
) -> None:
    """Show the training data: counts, lengths, samples, what is left out and why."""
    _look_at(config, overrides, sections=("data",))
    from mmrl.cli import commands

    print("\n".join(commands.show_data(config, overrides or [], page, count, check)))


@app.command(name="list")
def list_(
    words: arguments.ListWords = None,
    search: arguments.SearchWord = None,
    markdown: arguments.AsMarkdown = False,
) -> None:
    """List what can be named in a configuration: the kinds, a kind's names, or a name's options."""
    if markdown:
        from mmrl.cli.reward_table import markdown as table

        print(table(), end="")
        return
    from mmrl.cli.listing import show_list

    show_list(words or [], search)


@app.command()
def docs(
    page: Annotated[str | None, typer.Argument(help="Such as start; default: a list.")] = None,
) -> None:
    """Show a page of the packaged documentation, or list the pages."""
    from mmrl.cli.pages import show_page

    show_page(page)


@app.command()
def doctor() -> None:
    """Report versions, devices, attention backends and disk: what is installed and what is
    missing."""
    from mmrl.cli.doctor import print_report

    if not print_report():
        raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    from mmrl.core.encoding import use_utf8
    from mmrl.core.rounding import prepare

    use_utf8()
    prepare()  # before anything imports torch
    from mmrl.core import peers, slurm
    from mmrl.core.at_once import ending_at_once
    from mmrl.core.errors import UserError
    from mmrl.core.output import lasting_output

    with lasting_output(), ending_at_once():
        try:
            slurm.join()
            app()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except RuntimeError as error:  # how a collective call fails after a process has died
            if (watch := peers.gone(error)) is None:
                raise
            print(f"error: {watch.sentence()}", file=sys.stderr)
            sys.exit(2)
        except OSError as error:
            if error.errno not in OF_THE_DISK or not error.filename:
                raise
            print(
                f"error: {error.filename}: {error.strerror}; check the permissions and the free "
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

"""The commands of all pages are run, trainings at a size that takes a second; exceptions give a
reason. docs/start.md and docs/extending.md, which are read from top to bottom, have separate
tests."""

import json
import re
import shlex
import shutil

import pytest
from PIL import Image

from tests.cli.test_docs import COMMANDS
from tests.fixtures.command import mmrl

pytestmark = pytest.mark.slow
# before the words of the page, which count where they differ
SHORT = (
    "train.prompts_per_iteration=2 train.group_size=2 train.train_batch_size=4 "
    "train.micro_batch_size=null train.evaluate_every=0 evaluate.prompts=2 evaluate.num_samples=2 "
    "log.tensorboard=false"
).split()
WORLDS = {"ar_grpo": "llamagen", "janus_grpo": "janus", "var_grpo": "var"}
WORLDS |= {"grounding": "vlm", "counting": "vlm"}
# what a command holds -> why it is not run here
NOT_RUN = {
    r"^scripts/": "runs this suite, or what tests/cli/test_first_hour.py runs",
    r"^python scripts/real_": "writes data of real weights: tests/scripts/test_real_data.py",
    r"^(pip|ray) ": "installs or starts the programs of others",
    r"^(accelerate|torchrun|OMP_NUM_THREADS=1 torchrun) ": "tests/train/test_processes.py starts "
    "several processes",
    r"--engine ray": "tests/launch starts the processes of Ray",
    r"^mmrl compare ": "tests/notebooks compare; what is checked before a first run is checked",
    r"^mmrl (view|serve-(reward|teacher)) ": "serves until it is stopped: tests/view, tests/remote",
    r"^mmrl push .* --private": "uploads: tests/hub, against a local server",
    r"--benchmark": "needs the weights or files of a benchmark: tests/benchmarks",
    r"^mmrl train (?!digits/)(?!--resume)": "needs the weights of a large model, or builds it "
    "without weights: tests/dry_run",
    r"^mmrl check-reward my_run.yaml": "the reader's own configuration",
    r"--devices |benchmarks/.*--dry-run": "places every part of a large model, or writes a "
    "benchmark's prompts, for half a minute: tests/dry_run, tests/benchmarks",
    r"^mmrl convert |--format (comfyui|kohya)": "needs LoRA files of families that have such a "
    "form: tests/policies/diffusion/test_lora_files.py, tests/experiment/test_convert.py",
    r"--install-completion": "changes the reader's shell",
}
PAGE_COMMANDS = [(p, x) for p, x in COMMANDS if p.name != "start.md" and x.split("#")[0].strip()]


def reason_for(line):
    """Why a command is not run; None for one that is."""
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, line)), None)


def form(line):
    """The command and its options, without what is chosen."""
    words = shlex.split(line, comments=True)
    return (*words[:2], *sorted(word for word in words if word.startswith("--")))


# one of every form
RUN = {form(line): (page, line) for page, line in PAGE_COMMANDS if reason_for(line) is None}


def test_every_reason_is_that_of_a_command():
    lines = [line for _, line in COMMANDS]
    idle = [pattern for pattern in NOT_RUN if not any(re.search(pattern, x) for x in lines)]
    assert not idle, f"no page has such a command any more: {idle}"
    assert len(RUN) > 10


def trained(words):
    """The words of a training at a size that takes a second."""
    name = words[1].removeprefix("digits/")
    world = f"policy.path=world:digits/{WORLDS.get(name, 'sd3')}-test"
    scenes = (
        ["data.scenes=40", "data.held_out_scenes=4"] if name in ("grounding", "counting") else []
    )
    return [*words[:2], world, *scenes, *SHORT, *words[2:], "train.iterations=1"]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder as a reader has it: runs of a generator and of a VLM, prompts, and questions."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "prompts.txt").write_text("a red seven\na blue two\n")
    Image.new("RGB", (64, 48)).save(folder / "one.png")
    row = {"text": "Where is it?", "image": "one.png", "boxes": [[4, 4, 40, 30]]}
    for place in ("rows.jsonl", "my_images/train.jsonl"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(json.dumps(row) + "\n")
    shutil.copy(folder / "one.png", folder / "my_images")
    for name, run in (("flow_grpo", "generator"), ("counting", "answers")):
        mmrl(*trained(["train", f"digits/{name}", f"run={run}"]), cwd=folder)
    return folder


def on(desk, page, words):
    """Put a run where the command of a page looks for one: of a VLM on pages about VLMs."""
    shutil.rmtree(desk / "runs", ignore_errors=True)
    talks = page.stem == "vlm" or any("self_certainty" in word for word in words)
    for name in ("NAME", "a"):
        shutil.copytree(desk / ("answers" if talks else "generator"), desk / "runs" / name)
    if "--resume" in words and not any("train.iterations" in word for word in words):
        return [*words, "train.iterations=2"]
    return [re.sub(r"train.iterations=\d+", "train.iterations=2", word) for word in words]


@pytest.mark.parametrize(("page", "line"), RUN.values(), ids=map(" ".join, RUN))
def test_a_command_of_a_page_works(desk, page, line):
    _, *words = shlex.split(line, comments=True)
    if words[0] == "train" and words[1].startswith("digits/"):
        words = [*trained(words), f"run={desk / 'trained'}"]
        shutil.rmtree(desk / "trained", ignore_errors=True)
    elif words[0] == "label":
        words += ["--limit", "2", "policy.path=world:digits/sd3-test"]
    elif any("runs/" in word for word in words):
        words = on(desk, page, words)
    done = mmrl(*words, cwd=desk)
    assert "Traceback" not in done.stderr

"""The shipped recipes of papers: each is checked as a whole, and learns for two iterations on a
tiny model."""

import json
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from mmrl import config
from mmrl.config.options import TrainOptions
from mmrl.core.media.movies import write_mp4
from mmrl.core.registry import ADVANTAGES, DATA
from mmrl.core.types import Completion
from mmrl.experiment.build import Session, check_needs, read, scorer
from rewards.answers.coords import Unscorable
from rewards.servers.chat_server import ChatServer
from tests.fixtures import tiny_vlms
from tests.fixtures.records import make_rollout

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "configs/vlm").glob("*.yaml"))
MOST = 34  # values in a configuration; in a mixture each source has two more

BOX = [[10, 12, 40, 44]]
TABLE = "<table><tr><td>a</td><td>1</td></tr><tr><td>b</td><td>2</td></tr></table>"
CHOICES = {"choices": ["a cat", "a dog", "a bird"], "answer": "A, C"}
STEPS = {"answer": "12", "key_steps": ["3 boxes", ["4 each", "four each"]]}
HINTS = {"hint": "Look at the dog.", "reasoning": ["a cat comes", "a dog goes", "so both"]}
CHOICE, BOXED = {"task": "choice", **CHOICES}, {"task": "box", "boxes": BOX}


def task(name, answer):
    return {"task": name, "answer": answer}


OPEN = task("open", "a long sentence about a dog")
TASKS = {
    "boxes": [{"boxes": BOX, "labels": ["dog"]}],
    "counts": [{"answer": 7}],
    "referring": [{"boxes": BOX}],
    "questions": [{"boxes": BOX, "labels": ["dog"]}],
    "videos": [{**CHOICES, "spans": [[0.5, 1.5]], **HINTS}],
    "videochat_r1": [
        {"task": "ground", "spans": [[0.5, 1.5]]},
        {"task": "track", "tracks": BOX * 3},
        {"task": "qa", **CHOICES},
    ],
    "steps": [STEPS],
    "mixed": [CHOICE, BOXED, OPEN, task("match", "red"), task("chart", "[1, 2]")],
    "mixed_vlaa": [CHOICE, BOXED, OPEN, task("digit", 4), task("maths", "1/2")],
    "mixed_wethink": [CHOICE, OPEN, task("number", "1/2"), task("word", "red")],
    "screens": [{"action": "click", "boxes": BOX}, {"action": {"type": "type", "text": "hello"}}],
    "tables": [{"answer": TABLE}],
    "table_questions": [STEPS],
    "diagnoses": [{"labels": ["asthma", "gout"]}],
    "unlabelled": [{}],
    "science": [CHOICES],
    "drawings": [{}],
}
SIZES = [
    "policy.max_new_tokens=8",
    "policy.dtype=float32",
    "policy.lora=4",
    "train.prompts_per_iteration=2",
    "train.group_size=4",
    "train.train_batch_size=8",
    "train.micro_batch_size=null",
    "train.iterations=2",
    "train.precision=fp32",
    # tells random answers apart, which all earn 0
    "train.gradient_checkpointing=false",
    "reward.mean_logprob=0.01",
]


@pytest.fixture(scope="module", autouse=True)
def quiet():
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """A picture and a video of two seconds."""
    folder = tmp_path_factory.mktemp("media")
    tiny_vlms.image(70, 60).save(folder / "picture.png")
    write_mp4(folder / "clip.mp4", torch.from_numpy(tiny_vlms.video(8, 64, 64)), 4)
    return folder


@pytest.fixture
def recipe(request, tmp_path, media, monkeypatch):
    """A recipe's file and the folder it is run in, which holds rows as the file describes them."""
    name = request.param
    path = ROOT / "configs/vlm" / f"{name}.yaml"
    for file in files(yaml.safe_load(path.read_text())["data"]):
        kind = Path(file).stem
        rows = TASKS.get(name) or TASKS.get(kind) or [{"answer": "12"}]
        shown = {"image": str(media / "picture.png")}
        if "video" in kind:
            shown = {"video": str(media / "clip.mp4")}
        elif kind == "text_maths":
            shown = {}
        count = 2 * len(rows) + 2
        lines = [{"text": f"question {i}?", **shown, **rows[i % len(rows)]} for i in range(count)]
        (tmp_path / file).write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ChatServer, "ask", agreeing)
    return path


def agreeing(server, questions):
    """A judge of open questions: full marks for answers that hold the reference."""
    values = []
    for question in questions:
        text = "\n".join(part for part in question.parts if isinstance(part, str))
        _, _, rest = text.partition("Reference answer:\n")
        reference, _, answer = rest.partition("\n\nAnswer to be judged:\n")
        values.append({"score": 10.0 * (reference in answer.partition("\n\nRate")[0])})
    return values


def few(name):
    """Overrides of recipes that draw thousands of rows."""
    return ["data.mazes.mazes=20", "data.mazes.held_out=4"] if "alphamaze" in name else []


def files(section):
    """Every path in a data section."""
    if not isinstance(section, dict):
        return []
    inner = [file for key, value in section.items() if key != "path" for file in files(value)]
    return ([section["path"]] if "path" in section else []) + inner


def values(section):
    if isinstance(section, dict):
        return sum(map(values, section.values()))
    return 1


def test_recipes_are_whole_small_and_valid_and_their_rows_are_in_the_form_they_read(subtests):
    for name in RECIPES:
        with subtests.test(name):
            path = ROOT / f"configs/vlm/{name}.yaml"
            loaded = read(path, few(name))
            plain, stages = config.load_stages(path)
            for stage in stages or [None]:
                shown = config.stages.narrowed(plain, {}, stage)[0] if stage else plain
                assert values(shown) <= MOST
            assert max(map(len, path.read_text().splitlines())) <= 120
            source = loaded.build("data", DATA)
            assert len(source.train)
            check_needs(loaded, source, {})  # before a reward is built: what their classes say
            score = scorer(loaded, ("reward",), loaded.section("train", TrainOptions))
            check_needs(loaded, source, score.rewards)


# a mixture, rewards of steps, a tree, videos, reuse of answers, a vote over another model's answers
DIFFERENT = ["mixed_r1", "step_grpo", "tree_rpo", "video_r1", "avatar", "ttrv"]


@pytest.mark.parametrize("recipe", DIFFERENT, indirect=True)
def test_a_recipe_learns_for_two_iterations(recipe, caplog):
    torch.manual_seed(0)
    tiny = "internvl" if "InternVL" in recipe.read_text() else "qwen2_5_vl"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", module="torch|transformers")
        session = Session.of(read(recipe, [*SIZES, f"policy.path={tiny_vlms.folder(tiny)}"]))
        trainer = session.trainer()
        for _ in range(2):
            metrics = trainer.iterate()
            assert metrics["loss"] == metrics["loss"] and 0 < metrics["grad_norm"] < float("inf")
            assert metrics["samples/excluded"] == 0 and metrics["skipped_steps"] == 0
            assert all(f"reward/{name}/mean" in metrics for name in session.scorer.rewards)
    said = [line for line in caplog.records if line.name.startswith(("mmrl", "rewards"))]
    assert not session.scorer.failures and not said
    assert trainer.iteration == trainer.update.step == 2


# What is better is worth more

THOUGHT = "<think>so it is</think>"
DRAWING = '<svg viewBox="0 0 8 8"><rect x="1" y="2" width="4" height="5" fill="red"/></svg>'
WRONG = f"{THOUGHT} <answer>nothing of the kind</answer>"


def completions(texts):
    """Answers of one length, whose tokens are letters; the model was equally sure of all."""
    limit = max(map(len, texts))
    beginnings = [[text[: i + 1] for i in range(len(text))] for text in texts]
    return [
        Completion(text, len(text), True, -1.0, 1.0, limit, partial(list, known))
        for text, known in zip(texts, beginnings, strict=True)
    ]


def rolled(texts, prompts):
    """What a policy would have done that wrote these texts, all of one group."""
    rows = torch.arange(len(texts))
    mask = torch.arange(max(map(len, texts))) < torch.tensor([len(text) for text in texts])[:, None]
    spread = torch.sin(torch.arange(mask.numel())).view_as(mask) - 2.0
    return make_rollout(
        group=torch.zeros_like(rows),
        prompts=prompts[:1],
        row_id=rows,
        sample=rows,
        mask=mask,
        logprob=spread,
        entropy=-spread,
        divergence=-spread,
    )


def compared(loaded, texts, prompts):
    """[B, 1] or [B, K] advantages of these texts under a recipe's rewards and advantage."""
    score = scorer(loaded, ("reward",), loaded.section("train", TrainOptions))
    rollout = rolled(texts, prompts)
    if "tree" in loaded.plain["policy"]["vlm"]:  # of which these answers share nothing
        rollout = rollout.replace(edge_id=rollout.row_id[:, None].expand(rollout.mask.shape))
    rewards = score(completions(texts), prompts, rollout.group)
    advantage = loaded.build("advantage", ADVANTAGES)(rewards, rollout)
    return advantage.expand(rollout.mask.shape).masked_fill(~rollout.mask, torch.nan)


def judge_of(reward):
    """The reward that knows the ground truth: itself, or the main part of a composed one."""
    reward = getattr(reward, "reward", reward)
    return judge_of(reward.main) if hasattr(reward, "main") else reward


def right_text(loaded, prompt):
    """A ground truth in the form that the recipe asks for; of votes what most answers say."""
    rewards = scorer(loaded, ("reward",), loaded.section("train", TrainOptions)).rewards.values()
    knowing = [judge for judge in map(judge_of, rewards) if not getattr(judge, "shaping", False)]
    text = "<answer>most</answer>"
    try:
        if hasattr(knowing[0], "ground_truth"):
            text = knowing[0].ground_truth(prompt)
    except Unscorable:  # a judge's question
        text = f"<answer>{prompt['answer']}</answer>"
    return text if "<think>" in text else f"{THOUGHT} {text}"


@pytest.mark.parametrize("recipe", RECIPES, indirect=True)
def test_the_better_of_two_answers_has_the_greater_advantage(recipe):
    """Whatever the rewards are and how they are compared; for every kind of question in a
    mixture."""
    loaded = read(recipe, few(recipe.stem))
    train = loaded.build("data", DATA).train
    kinds = {}
    for prompt in train:
        target = {"svg": DRAWING} if recipe.stem == "rlrf" else {}
        kinds.setdefault((prompt.get("task"), prompt.get("source")), {**prompt, **target})
    assert len(kinds) > 1 or "routed" not in recipe.read_text()
    for kind, prompt in kinds.items():
        right = right_text(loaded, prompt)
        answers = [right, right, WRONG, right, WRONG.replace("nothing", "no")]
        worth = compared(loaded, answers, [prompt] * len(answers)).nanmean(1)
        assert worth[[0, 1, 3]].min() > 0 > worth[[2, 4]].max(), (kind, worth.tolist())


def test_every_recipe_has_its_section_on_the_page():
    page = (ROOT / "docs/recipes.md").read_text()
    missing = [name for name in RECIPES if f"`configs/vlm/{name}.yaml`" not in page]
    assert not missing, missing

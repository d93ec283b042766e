"""Training on prompts and functions that live in Python only."""

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.objectives.policy_gradient import PolicyGradient
from tests.api.worlds import POLICY, QUIET, SMALL, TEXTS, redness
from tests.fixtures.mistakes import message

pandas = pytest.importorskip("pandas")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def policy():
    return mmrl.load_policy(POLICY)


def test_a_frame_and_a_function_train_the_policy_in_place(policy, folder):
    frame = pandas.DataFrame({"text": TEXTS, "label": range(6)})
    labels = []

    def red(image, prompt):
        labels.append(prompt["label"])
        return redness(image)

    before = policy.sample(["a red one"], 1)[0].tobytes()
    trainer = mmrl.Trainer(policy, frame, red, learning_rate=0.01, held_out=0.3, **SMALL)
    run = trainer.train(progress=False)
    assert run.finished and run.policy is policy and set(labels) <= set(range(6))
    assert {"reward/red/mean", "loss"} <= set(run.metrics)
    assert policy.sample(["a red one"], 1)[0].tobytes() != before
    loaded = mmrl.load_run(run.folder).policy  # as another session would
    pictures = [p.sample(["a red one"], 1)[0].tobytes() for p in (policy, loaded)]
    assert pictures[0] == pictures[1]
    assert run.evaluate()["trained", "red"].n == 2 * 2
    assert run.folder.parent.name == "runs" and "trainer-" in run.folder.name


def test_a_stopped_run_goes_on_to_the_bit(folder):
    """With the same Trainer; the command line says where the function lives."""
    stop = mmrl.Callback(on_iteration=lambda i, metrics: i == 1)
    trainers = {
        name: mmrl.Trainer(POLICY, TEXTS, redness, callbacks=callbacks, run=name, **SMALL)
        for name, callbacks in {"whole": (), "stopped": stop}.items()
    }
    whole, stopped = (trainer.train(progress=False) for trainer in trainers.values())
    assert whole.finished and stopped.stopped
    said = message(mmrl.train, stopped.folder, resume=True)
    assert "lives in the Python session" in said
    assert "already holds a run" in message(trainers["stopped"].train, progress=False)
    ended = stopped.resume(progress=False)
    first, second = (run.policy.model.weights.full() for run in (whole, ended))
    assert ended.finished and all(torch.equal(first[name], second[name]) for name in first)


def test_objects_of_the_users_are_plug_ins(folder):
    def centred(rewards, rollout):
        return (rewards.total() - rewards.total().mean())[:, None]

    trainer = mmrl.Trainer(
        POLICY,
        TEXTS,
        [redness, "jpeg_compressibility"],
        reward_weights=[1.0, 0.1],
        objective=PolicyGradient(clip_range=0.01),
        advantage=centred,
        optimizer={"adamw": {"lr": 1e-3}},
        run="objects",
        **SMALL,
    )
    run = trainer.train(progress=False)
    assert {"reward/redness/mean", "reward/jpeg_compressibility/mean"} <= set(run.metrics)
    assert run.metrics["grad_norm"].max() > 0


def test_a_policy_of_ones_own_is_trained_and_its_weights_load_into_it(folder):
    """It cannot be built from the run's folder: that says so, and the object itself can go on."""
    model = mmrl.load_policy(POLICY).model
    run = mmrl.Trainer(model, TEXTS, redness, learning_rate=0.01, **SMALL).train(progress=False)
    assert run.config["policy"] == "python:policy" and run.policy.model is model
    assert run.evaluate()["trained", "redness"].n == 2
    more = run.resume({"train.iterations": 3}, progress=False)
    assert more.finished and len(more.metrics) == 3
    said = message(lambda: mmrl.load_run(run.folder).policy)
    assert "'python:policy' lives in the Python session" in said


def test_a_mistake_is_found_before_a_model_is_built(subtests):
    for change, sentence in [
        ({"iterations": -1}, "iterations"),
        ({"objective": "flow_gro"}, "flow_gro"),
        ({"reward": "clip_scor"}, "did you mean 'clip_score'"),
        ({"held_out": 2.0}, "share from 0"),
        ({"prompts": "nowhere.csv"}, "nowhere.csv"),
        ({"policy": "digits/flow_grop"}, "no configuration"),
        ({"overrides": {"trian.x": 1}}, "trian"),
        ({"learning_rate": -1.0}, "lr"),
    ]:
        with subtests.test(change=change, sentence=sentence):
            options = {"policy": POLICY, "prompts": TEXTS, "reward": redness} | change
            assert sentence in message(mmrl.Trainer, **options)
    said = message(mmrl.Trainer(POLICY, TEXTS, redness).train, resume=True)
    assert "there is no run yet" in said


def test_a_policy_that_writes_answers_questions(folder):
    """One answer is the likeliest, several differ; their boxes are drawn where they are shown."""
    small = {"data.scenes": 20, "data.held_out_scenes": 4}
    words = {"policy.path": "world:digits/vlm-test"} | small
    policy = mmrl.load_policy("digits/grounding", words)
    questions = policy.prompts[:2]
    one_each = policy.sample(questions, 1)
    assert all(isinstance(text, str) for text in one_each)
    assert len(policy.sample(questions, 3)) == 6 and policy.model.greedy_evaluation
    changes = {**QUIET, "log.rollouts": 1, "train.evaluate_every": 0}
    trainer = mmrl.Trainer(
        policy,
        policy.prompts[:8],
        {"referring": 1.0, "short": lambda text: -len(text) / 100},
        iterations=1,
        prompts_per_iteration=2,
        group_size=2,
        overrides=changes,
    )
    run = trainer.train(progress=False)
    answers = run.samples["iteration 1"]
    assert len(answers) == 4 and set(answers.rewards) == {"referring", "short"}
    assert "&lt;rect" in run._repr_html_()  # boxes


def test_check_reward_tries_a_function(folder):
    Image.new("RGB", (16, 16), "red").save("red.png")
    prompts = [{"text": "red", "image": "red.png"}, {"text": "rose", "image": "red.png"}]
    audits = mmrl.check_reward(redness, prompts, media="image")
    assert audits[0].reward == "redness" and "redness" in repr(audits)
    assert "<table>" in audits._repr_html_() and isinstance(audits.passed, bool)
    assert "say what it judges" in message(mmrl.check_reward, redness, prompts)
    assert "give the prompts" in message(mmrl.check_reward, redness)

"""Names of earlier versions are errors that say the new name."""

import re
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from mmrl import config
from mmrl.cli.app import app
from mmrl.config import renamed
from mmrl.config.options import EvaluateOptions, TrainOptions
from mmrl.core import registry
from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import ADVANTAGES, ALL, DATA, OBJECTIVES, POLICIES, SURROGATES, options
from mmrl.policies.lora import Lora

registry.load_built_in()
PLAIN = {
    "policy": {"sd3": {"path": "world:digits/sd3"}},
    "data": "digits",
    "reward": "digits",
    "advantage": "grpo",
    "objective": "policy_gradient",
    "optimizer": {"adamw": {"lr": 1e-4}},
    "train": {
        "prompts_per_iteration": 4,
        "group_size": 4,
        "train_batch_size": 16,
        "iterations": 1,
    },
}


def complaint(**sections):
    """Reads a configuration with these sections changed and returns what is wrong with it."""
    with pytest.raises(UserError) as error:
        config.check(config.Config({**PLAIN, **sections}))
    return str(error.value)


def known(section):
    """Names every option that something in this section takes, nested ones too."""
    if section in ("train", "evaluate"):
        return set(options(TrainOptions if section == "train" else EvaluateOptions))
    entries = {
        "policy": POLICIES.values(),
        "objective": [*OBJECTIVES.values(), *SURROGATES.values(), importance()],
        "advantage": ADVANTAGES.values(),
        "data": DATA.values(),
    }[section]
    return {name for entry in entries for name in options(entry)}


def importance():
    from mmrl.objectives.importance_sampling import Importance

    return Importance


@pytest.mark.parametrize("section", renamed.OPTIONS)
def test_every_new_name_is_an_option_that_something_takes(section):
    new = {name.partition(".")[0] for names in renamed.OPTIONS[section].values() for name in names}
    assert new <= known(section) | {field.name for field in fields(Lora)}  # within its option


def test_new_plug_ins_and_kinds_exist_and_old_ones_do_not():
    for kind, names in renamed.PLUG_INS.items():
        entries = {"advantage": ADVANTAGES, "objective": OBJECTIVES}[kind]
        assert set(names.values()) <= set(entries) and not set(names) & set(entries)
    assert set(renamed.KINDS.values()) <= set(ALL) and not set(renamed.KINDS) & set(ALL)


@pytest.mark.parametrize("old", renamed.OPTIONS["train"])
def test_an_old_option_of_training_says_the_new_one(old):
    (new,) = renamed.OPTIONS["train"][old]
    assert f"train.{old} is now train.{new}" in complaint(train={**PLAIN["train"], old: 1})


def test_old_options_of_plug_ins_say_the_new_ones_with_their_place():
    message = complaint(policy={"sd3": {"path": "world:digits/sd3", "eta": 0.5, "sde": "all"}})
    assert "policy.sd3.eta is now policy.sd3.noise_level" in message
    assert "policy.sd3.sde is now policy.sd3.noise_window" in message
    message = complaint(
        objective={"policy_gradient": {"clip": 1e-3}}, advantage={"grpo": {"flat": "drop"}}
    )
    assert "objective.policy_gradient.clip is now objective.policy_gradient.clip_range" in message
    assert "advantage.grpo.flat is now advantage.grpo.zero_variance_groups" in message


def test_old_names_that_lead_to_two_new_ones_choose_by_what_takes_them():
    surrogate = {"ppo": {"low": 0.1}}
    nested = {"policy_gradient": {"surrogate": surrogate, "importance_sampling": {"low": 0.1}}}
    message = complaint(objective=nested)
    surrogate = "objective.policy_gradient.surrogate.ppo"
    assert f"{surrogate}.low is now {surrogate}.clip_low" in message
    assert (
        "importance_sampling.low is now objective.policy_gradient.importance_sampling.floor"
        in message
    )


def test_old_plug_ins_and_values_say_the_new_ones():
    assert "advantage 'dance' is now 'dance_grpo'" in complaint(advantage="dance")
    assert "objective 'guard' is now 'grpo_guard'" in complaint(objective="guard")
    message = complaint(train={**PLAIN["train"], "loss_agg_mode": "row"})
    assert "row is now seq_mean_token_mean" in message


@pytest.mark.parametrize("name", ["text", "grpo"])
def test_the_two_objectives_that_became_one_are_named_with_what_their_defaults_were(name):
    message = complaint(objective=name)
    assert f"objective {name!r} is now 'policy_gradient'" in message
    assert ("write clip_range: 1e-4 and advantage_clip: 5.0" in message) == (name == "grpo")
    both = {"policy_gradient": {}, name: {"kl": 0.1}}  # as an override of the old name makes it
    assert f"objective {name!r} is now 'policy_gradient'" in complaint(objective=both)


def test_what_never_existed_is_no_old_name():
    message = complaint(train={**PLAIN["train"], "group_sizes": 4})
    assert "is now" not in message and re.search("did you mean 'group_size'", message)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": {"policy_gradient": {"clp": 1}}}, "did you mean 'clip_range'?"),
        ({"objective": {"policy_gradient": {"kl_fomr": 1}}}, "did you mean 'kl.form'?"),
        ({"train": {**PLAIN["train"], "copeis": 4}}, "did you mean 'group_size'?"),
        ({"policy": {"sd3": {"path": "x", "kernl": 1}}}, "did you mean 'sde_type'?"),
        ({"objective": "gpro"}, "unknown objective 'gpro'; did you mean 'policy_gradient'?"),
        ({"objective": "gaurd"}, "unknown objective 'gaurd'; did you mean 'grpo_guard'?"),
        (
            {"train": {**PLAIN["train"], "loss_agg_mode": "evry_row"}},
            "did you mean 'seq_mean_token_mean_all'?",
        ),
        ({"advantage": "gpro"}, "unknown advantage 'gpro'; did you mean 'grpo'?"),
    ],
)
def test_a_misspelt_old_name_suggests_the_new_one(sections, message):
    assert message in complaint(**sections)


def test_a_present_name_is_suggested_before_an_old_one_and_no_absent_one():
    clips = {"clip": "clip_range"}
    assert suggest("clp", ["clip", "clap"], clips) == "did you mean 'clip'?"
    assert renamed.former_options(("objective",), ["clip", "kl"]) == {"kl_form": "kl.form"}
    assert renamed.former_plug_ins("objective", ["toy"]) == {}


def test_old_words_on_the_command_line_say_the_new_ones(capsys):
    run = CliRunner().invoke(app, ["sample", "digits/flow_grpo", "--copies", "2"])
    assert isinstance(run.exception, UserError)
    assert str(run.exception) == "--copies is now --num-samples"
    run = CliRunner().invoke(app, ["list", "kernels"])
    assert str(run.exception) == "`mmrl list kernels` is now `mmrl list sde_types`"
    run = CliRunner().invoke(app, ["list", "kernel"])
    assert str(run.exception) == "no plug-ins called 'kernel'; did you mean 'sde_types'?"

"""Waits for the device and tensors of two devices, which a CPU does not show, on the pretend one of
sim_device.py.

A device is registered once per process and changes torch, so everything runs in separate processes,
one for each part.
"""

import json

import pytest

from mmrl.core import registry
from mmrl.core.registry import POLICIES
from tests.fixtures import toys, warm
from tests.fixtures.tiny_image_rewards import TINY_OPTIONS
from tests.objectives.test_objective_pairs import PAIRS

registry.load_built_in()
STEP = 1  # stops between two passes of a rollout, at most on average
# what libraries add: transformers reads every padding mask (and a general protocol has to give
# it one)
STEPS = {
    "policy:masked_lm": 2,
    "policy:masked_image_lm": 2,
    "policy:z_image": 4,  # diffusers' own network indexes by masks
    # every pass is a run of diffusers' code, which makes times, sizes and guidance again
    "policy:pipeline": 20,
}
ROLLOUT = 24  # of one rollout besides: prompts, encoders, first passes
ROLLOUTS = {"policy:pipeline": 40}
UPDATE = 12  # of an optimizer step of any number of passes, besides PASS for each of its passes
# of one pass with gradients of a real network: transformers and diffusers ask in their own code
LIBRARY = 2
PASS = {  # where it is otherwise; many decide by values what to compute
    **dict.fromkeys([f"policy:{name}" for name in ("sd3", "sd", "amused", "llamagen", "var")], 0),
    "policy:emu3": 4,
    "policy:z_image": 8,
    "policy:vlm": 12,
    "distill:vlm": 12,
    "sft:vlm": 22,  # two prompts with images in every pass
    "preferences:vlm": 22,
    "policy:pipeline": 32,
    "objective:adjoint_matching:flow": 1,  # whether a step has noise
}
TOKENS = ("hidden", "causal")
UPDATE_TOKENS = 11  # of toys of tokens, which make few passes
TOYS = (*toys.POLICIES, "hidden", "module")


def covering() -> list[str]:
    """Every objective on a flow and on tokens, where it can be: of the two kinds of tokens, which
    take the same way through it, on one or the other in turn."""
    names = list(dict.fromkeys(name for name, _ in PAIRS))
    pairs = set(PAIRS)
    cases = []
    for place, name in enumerate(names):
        kinds = [kind for kind in (*TOKENS[place % 2 :], *TOKENS) if (name, kind) in pairs][:1]
        cases += [(name, kind) for kind in ("flow", *kinds) if (name, kind) in pairs]
    return [f"objective:{name}:{kind}" for name, kind in cases]


OBJECTIVE_CASES = covering()
FURTHER = [  # a teacher beside the policy; answers and pairs of the data: nothing is sampled
    *(f"distill:{family}" for family in ("flow", "hidden", "vlm")),
    *(f"sft:{family}" for family in ("amused", "causal", "masked_lm", "module", "vlm")),
    *(f"preferences:{family}" for family in ("causal", "module", "vlm")),
]
MODELS = sorted({*TINY_OPTIONS, "aesthetic", "clip_score"} - {"ocr", "ocr_layout", "per_frame"})
REWARD = 16  # stops of a reward's call for four samples
REWARDS = {  # those that transformers' processors and families stop besides, by sample or question
    "geneval": 32,
    "face_identity": 56,  # a reference for each prompt too
    "hpsv3": 24,
    "video_align": 28,
    "vqa_score": 64,
    "tifa": 176,
}
# of collecting pairs: comparing, statistics, and what the family reads of prompts
COLLECT = {"preferences": 80}
SLOW = [f"policy:{name}" for name in POLICIES]
FAST = [f"toy:{family}" for family in (*toys.POLICIES, "hidden")]
SEEN_ALWAYS = [
    f"policy:{name}"
    for name in ("vlm", "amused", "sd3", "sd", "llamagen", "var", "janus", "janus_unified")
]


def worker(*cases: str) -> list[dict]:
    """What tests.fixtures.sim_worker saw, one record a case."""
    words = ["-m", "tests.fixtures.sim_worker", *cases]
    finished = warm.run(words, ACCELERATE_TORCH_DEVICE="sim:0")
    records = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    assert len(records) == len(cases), finished.stderr[-2000:]
    return records


def complaints(record: dict) -> list[str]:
    """What a case did that it should not."""
    case = record["case"]
    words = []
    if record["error"]:
        return [f"{case}: {record['error'][-1500:]}"]
    steps = record["steps"]
    passes = record["passes"]
    if steps and sum(steps) > STEPS.get(case, STEP) * len(steps):
        words.append(f"{case}: {steps} waits from pass to pass: {record['where']['steps']}")
    kind, _, name = case.partition(":")
    most = COLLECT.get(kind, ROLLOUTS.get(case, ROLLOUT))
    if kind == "reward":
        most = REWARDS.get(name, REWARD)
    if record["rollout"] - sum(steps) > most:
        words.append(
            f"{case}: sampling, collecting or scoring waits {record['rollout']} times: "
            f"{record['where']['rollout']}"
        )
    allowed = PASS.get(case, 0 if name.rpartition(":")[2] in TOYS else LIBRARY)
    most = UPDATE_TOKENS if name.rpartition(":")[2] in TOKENS else UPDATE
    if record["update"] > most + allowed * passes:
        words.append(
            f"{case}: a step of {passes} passes waits {record['update']} times: "
            f"{record['where']['update']}"
        )
    if not record["moved"] > 0:
        words.append(f"{case}: nothing was learnt")
    if not record["right"]:
        words.append(f"{case}: it says something else than on the CPU")
    if not record["resumed"]:
        words.append(f"{case}: a checkpoint does not bring the weights back")
    return words


def check(*cases: str) -> None:
    wrong = [line for record in worker(*cases) for line in complaints(record)]
    assert not wrong, "\n".join(wrong)


def parts(cases: list[str], count: int) -> list[list[str]]:
    return [cases[k::count] for k in range(count)]


@pytest.mark.parametrize("cases", parts(FAST + OBJECTIVE_CASES, 2), ids=["first", "second"])
def test_toys_never_wait_for_a_step_and_every_objective_a_constant_number_of_times(cases):
    check(*cases)


def test_families_wait_at_most_once_a_step_or_token():
    check(*SEEN_ALWAYS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", parts([case for case in SLOW if case not in SEEN_ALWAYS], 2), ids="ab"
)
def test_all_other_policies_wait_at_most_once_a_step_or_token(cases):
    check(*cases)


def test_teachers_answers_and_pairs_are_on_the_device_and_wait_no_more():
    check(*FURTHER)


def test_rewards_with_networks_score_on_the_device_what_they_do_on_the_cpu():
    check(*(f"reward:{name}" for name in MODELS))


SELF = """
import torch
from tests.fixtures import sim_device as sim

def stops(work):
    with sim.counted() as counts:
        work()
    return counts.total()

x = torch.arange(6.0, device="sim").view(2, 3)
host = torch.zeros(3)
try:
    x + host
except RuntimeError as error:
    assert "same device" in str(error)
else:
    raise SystemExit("tensors of two devices were added")
try:
    host[torch.tensor([0], device="sim")]
except RuntimeError as error:
    assert "on cpu or on the same device" in str(error)
else:
    raise SystemExit("a tensor of the CPU was indexed by one of the device")
assert stops(lambda: x + torch.tensor(1.0)) == 0  # a number
assert stops(lambda: x @ x.T + x.sum()) == 0
for wait in (x.tolist, x.sum().item, x.cpu, lambda: bool((x > 0).all()), lambda: x[x > 2],
             lambda: x.nonzero(),
             lambda: x.unique(), lambda: x[[0, 1]], lambda: torch.tensor([1.0], device="sim"),
             lambda: x.new_tensor([1.0]), lambda: host.to("sim"), lambda: x[torch.tensor([0])]):
    assert stops(wait) == 1, wait
assert stops(lambda: host.to("sim", non_blocking=True)) == 0
assert stops(lambda: x.masked_fill(x > 2, 0.0)) == 0
"""


def test_the_device_refuses_mixed_tensors_and_counts_waits():
    finished = warm.run(["-c", SELF])
    assert finished.returncode == 0, finished.stderr[-2000:]


DIGITS = """
import torch
from tests.fixtures import sim_device as sim
from rewards.images.digits import Digits

first = {"digit": 1, "color": "red", "place": "top left"}
prompt = {"objects": [first, {"digit": 2}], "relation": "above"}
reward = Digits()
pictures = torch.rand(6, 3, 32, 32, device="sim", requires_grad=True)
reward(pictures[:1], [prompt])  # the reader moves
with sim.counted() as counts:
    reward(pictures, [prompt] * 6).sum().backward()
assert counts.total() == 0, counts
"""


def test_the_digits_reward_never_waits():
    finished = warm.run(["-c", DIGITS])
    assert finished.returncode == 0, finished.stderr[-2000:]


DRY_RUN = """
import os
import sys
os.environ["ACCELERATE_TORCH_DEVICE"] = "sim:0"
from tests.fixtures import sim_device
from mmrl.cli.app import main
sys.argv = ["mmrl", "train", "sd3/flow_grpo", "--dry-run", "--devices", "8xH100"]
main()
"""


def test_a_dry_run_counts_passes_on_a_machine_with_a_device():
    finished = warm.run(["-c", DRY_RUN])
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert "PFLOP an iteration" in finished.stdout


def test_waits_and_errors_are_complained_about():
    """The check itself can fail, each way."""
    fine = {
        "case": "toy:flow",
        "error": "",
        "steps": [1, 1],
        "rollout": 5,
        "update": 5,
        "passes": 100,
        "moved": 0.1,
        "resumed": True,
        "right": True,
        "where": {"steps": [], "rollout": [], "update": []},
    }
    assert not complaints(fine)
    for wrong in (
        {"error": "RuntimeError: cpu and sim:0"},
        {"steps": [1, 2]},
        {"rollout": 100},
        {"update": 105},
        {"moved": 0.0},
        {"resumed": False},
        {"right": False},
    ):
        assert len(complaints(fine | wrong)) == 1, wrong

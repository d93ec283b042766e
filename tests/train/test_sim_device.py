"""Waits for the device and tensors of two devices, which a CPU does not show, on the pretend one of
sim_device.py: a case of each way through the code.

A device is registered once per process and changes torch, so everything runs in a separate process.
"""

import json

from tests.fixtures import warm

STEP = 1  # stops between two passes of a rollout, at most on average
# what libraries add: transformers reads every padding mask (and a general protocol has to give
# it one); every pass of a pipeline is a run of diffusers' code, which makes times and sizes again
STEPS = {"distill:masked_lm": 2, "policy:pipeline": 20}
# of one rollout besides: prompts, encoders, first passes; of a reward's call
# for four samples, which transformers' processors stop by sample or question
ROLLOUT = 24
ROLLOUTS = {"policy:pipeline": 40, "reward:vqa_score": 64}
UPDATE = 12  # of an optimizer step of any number of passes, besides PASS for each of its passes
# of one pass with gradients of a real network: transformers and diffusers ask in their own code
LIBRARY = 2
PASS = {  # where it is otherwise; many decide by values what to compute
    **dict.fromkeys(["policy:sd3", "policy:var"], 0),
    "policy:vlm": 12,
    "sft:vlm": 22,  # two prompts with images in every pass
    "policy:pipeline": 32,
    "objective:adjoint_matching:flow": 1,  # whether a step has noise
}
CASES = (
    *("toy:flow", "toy:masked", "objective:draft:flow"),
    *("objective:adjoint_matching:flow", "objective:dpo:causal"),
    *("policy:sd3", "policy:var", "policy:pipeline", "policy:vlm"),
    *("distill:masked_lm", "sft:vlm", "reward:pickscore", "reward:vqa_score"),
)


def complaints(record: dict) -> list[str]:
    """What a case did that it should not."""
    case = record["case"]
    if record["error"]:
        return [f"{case}: {record['error'][-1500:]}"]
    steps, passes, where = record["steps"], record["passes"], record["where"]
    words = []
    if steps and sum(steps) > STEPS.get(case, STEP) * len(steps):
        words.append(f"{steps} waits from pass to pass: {where['steps']}")
    besides = record["rollout"] - sum(steps)
    if besides > ROLLOUTS.get(case, ROLLOUT):
        words.append(f"sampling, collecting or scoring waits {besides} times: {where['rollout']}")
    is_toy = case.startswith(("toy", "objective"))
    if record["update"] > UPDATE + PASS.get(case, 0 if is_toy else LIBRARY) * passes:
        words.append(f"a step of {passes} passes waits {record['update']} times: {where['update']}")
    if not record["moved"] > 0:
        words.append("nothing was learnt")
    if not record["right"]:
        words.append("it says something else than on the CPU")
    if not record["resumed"]:
        words.append("a checkpoint does not bring the weights back")
    return [f"{case}: {each}" for each in words]


def test_waits_are_few_and_no_tensors_of_two_devices_meet():
    """Steps of a toy wait a constant number of times, those of a family at most once a pass."""
    words = ["-m", "tests.fixtures.sim_worker", *CASES]
    finished = warm.run(words, ACCELERATE_TORCH_DEVICE="sim:0")
    records = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    assert [record["case"] for record in records] == [*CASES], finished.stderr[-2000:]
    wrong = [line for record in records for line in complaints(record)]
    assert not wrong, "\n".join(wrong)


DRY_RUN = """
import os
import sys
os.environ["ACCELERATE_TORCH_DEVICE"] = "sim:0"
from tests.fixtures import sim_device
from mmrl.cli.app import main
sys.argv = ["mmrl", "train", "digits/flow_grpo", "--dry-run", "--devices", "H100"]
sys.argv += ["policy.path=world:digits/sd3-test"]
main()
"""


def test_a_dry_run_counts_passes_on_a_machine_with_a_device():
    finished = warm.run(["-c", DRY_RUN])
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert "FLOP an iteration" in finished.stdout, finished.stdout

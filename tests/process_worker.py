"""Run by test_processes.py as one process, as two copies (DDP), and as two halves (FSDP2): a few
iterations of every toy and of the SD3 family in float64, a checkpoint, one iteration more after a
restore; results to files.
"""

import argparse
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmrl.advantages import DDPO, opo
from mmrl.config.options import EvaluateOptions, TrainOptions
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.registry import locate
from mmrl.core.sharding import is_sharded
from mmrl.objectives import Masked, PolicyGradient, Text
from mmrl.policies.diffusion.models.sd3 import SD3
from mmrl.policies.diffusion.models.wan import Wan
from mmrl.policies.diffusion.models.wan_i2v import WanI2V
from mmrl.policies.image_tokens.models.janus import Janus
from mmrl.policies.image_tokens.models.llamagen import LlamaGen
from mmrl.policies.masked.amused import Amused
from mmrl.policies.vlm.policy import VLM
from mmrl.run import checkpoint, state
from mmrl.run.evaluation import evaluate
from mmrl.scoring import Scorer
from mmrl.train import trainer
from mmrl.train.device import Device

from . import image_tokens, tiny_diffusers, tiny_vlms, toys
from .test_trainer import make_trainer

SIZES = {
    "train_batch_size": 16,
    "micro_batch_size": 5,
    "epochs": 2,
    "loss_agg_mode": "seq_mean_token_mean",
}
SMALL = {"prompts_per_iteration": 4, "group_size": 4, "train_batch_size": 8, "micro_batch_size": 3}
SPARSE = {
    "prompts_per_iteration": 4,
    "group_size": 2,
    "train_batch_size": 2,
    "micro_batch_size": None,
}  # steps in which one of two processes has no row
# passes of one time, so of one expert
UNEVEN = SMALL | {"group_size": 2, "train_batch_size": 4, "micro_batch_size": 1}
TEXT = SIZES | {
    "epochs": 1,
    "loss_agg_mode": "seq_mean_token_mean_all",
    "dynamic_sampling_rounds": 2,
}
CASES = {
    **{family: (partial(toys.make, family, double=True), SIZES) for family in toys.POLICIES},
    "text": (lambda: ragged(), TEXT),
    "sparse": (partial(toys.make, "flow", double=True), SPARSE),
    "vlm": (lambda: tiny_vlm(), SMALL),
    "janus": (lambda: tiny_janus(), SMALL),
    "llamagen": (lambda: tiny_llamagen(), SMALL),
    "amused": (lambda: tiny_amused(), SMALL),
    "sd3": (lambda: tiny_sd3(), SMALL),
    "sd3-lora": (lambda: tiny_sd3(lora=4, logprob_guidance="guided_stopgrad_uncond"), SMALL),
    "wan-two": (lambda: tiny_wan(Wan, "wan-two", lora=2), UNEVEN),
    "wan_i2v-two": (lambda: tiny_wan(WanI2V, "wan_i2v-two"), UNEVEN),
}
IMAGES = {
    "janus": PolicyGradient(kl=0.1),
    "llamagen": PolicyGradient(kl=0.1),
    "amused": Masked(kl=0.1),
}
# of cases that do not compute in float64 throughout
APART = {"vlm": 2e-6, "janus": 2e-6, "amused": 2e-6}
SHARDED = (
    "flow",
    "masked",
    "sparse",
    "janus",
    "amused",
    "sd3",
    "sd3-lora",
    "wan-two",
    "wan_i2v-two",
)
RESTORED = ("masked", "sd3-lora")
NUMBERS = ("kl", "clip_fraction", "grad_norm", "reward/mean", "samples/excluded", "loss")


class Sharded(Device):
    """FSDP2 through accelerate, which without a GPU never chooses it: told that it has, it shards
    on gloo as well."""

    def __init__(self, options):
        from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState

        if PartialState._shared_state:
            # as before the first of them
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
        super().__init__(options)
        known = self.accelerator.state
        known.distributed_type = DistributedType.FSDP
        # an AcceleratorState made later, as each optimizer makes one, takes the type from here
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        known.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=True,
        )
        if known.mixed_precision != "no":
            known.fsdp_plugin.set_mixed_precision(known.mixed_precision)
        assert self.accelerator.is_fsdp2


def tiny_vlm():
    """Its tower and norms round to float32 on the way, whatever the weights are."""
    policy = VLM(str(tiny_vlms.folder("qwen2_5_vl")), max_new_tokens=6)
    policy.net.double()
    return policy


def questions(n):
    """One image, two, or none."""
    images = [
        [tiny_vlms.image(56 + 14 * (i % 3), 56, i * 2 + j) for j in range(i % 3)] for i in range(n)
    ]
    return [{"text": "which " * (1 + i % 2), "label": i % 2, "images": images[i]} for i in range(n)]


def spelled(media, prompts):
    return torch.tensor(
        [sum(map(ord, text)) % 97 / 97 + prompt["label"] for text, prompt in zip(media, prompts)]
    )


def tiny_sd3(**options):
    torch.manual_seed(0)  # of the adapters
    policy = SD3(
        locate("world:digits/sd3-test"),
        size=32,
        steps=3,
        guidance_scale=2.0,
        text_encoder_placement="release",
        **options,
    )
    policy.net.double()
    policy.vae.double()
    policy.prepare(toys.prompts(16))  # in one batch: the text encoders stay in float32
    return policy


def tiny_janus():
    policy = Janus(str(tiny_vlms.folder("janus")), guidance_scale=2.0)
    policy.net.double()
    return policy


def tiny_llamagen():
    folder = str(image_tokens.folder("llamagen-classes"))
    policy = LlamaGen(folder, guidance_scale=2.0, logprob_guidance="guided_stopgrad_uncond")
    policy.net.double()
    policy.vq.double()
    return policy


def tiny_amused():
    policy = Amused(
        str(tiny_diffusers.folder("amused")),
        steps=3,
        guidance_scale=2.0,
        text_encoder_placement="release",
    )
    policy.net.double()
    policy.vae.double()
    policy.prepare(toys.prompts(16))  # in one batch, as above
    return policy


def tiny_wan(family, name, **options):
    """Two experts, of which a step needs one."""
    torch.manual_seed(0)
    policy = family(
        str(tiny_diffusers.folder(name)),
        size=16,
        frames=5,
        steps=4,
        text_length=16,
        text_encoder_placement="release",
        **options,
    )
    policy.net.double()
    policy.vae.double()
    policy.prepare(shown(16))  # in one batch, as above
    return policy


def shown(n):
    """Prompts with a picture each."""
    return [
        prompt | {"image": tiny_vlms.image(16, 16, i % 2)}
        for i, prompt in enumerate(toys.prompts(n))
    ]


class Ragged(toys.ToyCausal):
    """Answers of many lengths."""

    def rollout(self, prompts, copies, rng):
        found = super().rollout(prompts, copies, rng)
        ended = (found.sample == 4).cumsum(1)
        return found.replace(mask=(ended == 0) | ((ended == 1) & (found.sample == 4)))


def ragged():
    policy = Ragged()
    policy.net.double()
    return policy


def partly_flat(media, prompts):
    """All answers to one label earn the same."""
    even = torch.tensor([p["label"] == 0 for p in prompts])
    return torch.where(even, 0.5, partly_missing(media, prompts))


def partly_missing(media, prompts):
    """The samples of one label that are nearest to the goal cannot be scored; which does not depend
    on their order."""
    if media.ndim == 4:
        return media.flatten(1).mean(1)
    found = toys.reward(media, prompts).double()
    odd = torch.tensor([p["label"] == 1 for p in prompts])
    return torch.where(odd & (found > found.new_tensor(0.7)), torch.nan, found)


def some_videos(media, prompts):
    """Some videos, by digits that nothing orders, cannot be scored."""
    mean = media.flatten(1).mean(1)
    return torch.where((mean * 1e4).frac() < 0.3, torch.nan, mean)


def trainer_of(case):
    make, sizes = CASES[case]
    if case == "vlm":  # Adam would divide the rounding of gradients that are zero by itself
        return trainer.Trainer(
            make(),
            questions(8),
            Scorer({"toy": spelled}),
            opo,
            Text(kl=0.1),
            partial(torch.optim.SGD, lr=0.05),
            TrainOptions(iterations=3, ema=0.9, **sizes),
        )
    if case in IMAGES:
        return trainer.Trainer(
            make(),
            toys.prompts(16),
            Scorer({"toy": partly_missing}),
            opo,
            IMAGES[case],
            partial(torch.optim.SGD, lr=0.05),
            TrainOptions(iterations=3, ema=0.9, **sizes),
        )
    if case.startswith("wan"):
        return trainer.Trainer(
            make(),
            shown(16),
            Scorer({"toy": some_videos}, max_failures=1.0),
            DDPO(),
            PolicyGradient(kl=0.1),
            partial(torch.optim.SGD, lr=0.05),
            TrainOptions(iterations=3, ema=0.9, max_reward_failure_rate=1.0, **sizes),
        )
    if case == "text":  # couples over all processes, replaces groups of either, weighs by length
        objective = Text(kl=0.1, top_entropy=0.6)
        return make_trainer(
            policy=make(), ema=0.9, objective=objective, advantage=opo, reward=partly_flat, **sizes
        )
    return make_trainer(
        policy=make(),
        kl=0.1,
        ema=0.9,
        advantage=DDPO(),
        reward=partly_missing,
        max_reward_failure_rate=1.0,
        **sizes,
    )


def arrays_of(one):
    arrays, _ = state.capture(one)
    named = {
        f"{part}/{name}": value
        for part, tensors in arrays.items()
        for name, value in tensors.items()
    }
    return {
        name: (value.full_tensor() if is_sharded(value) else value).clone()
        for name, value in named.items()
    }


def results(case, folder, start):
    """Everything one process must agree with."""
    one = trainer_of(case)
    found = {}
    idle = []
    make_idle = one._idle
    one._idle = lambda *given: idle.append(1) or make_idle(*given)
    whole_gradients = []
    backward = one.device.backward
    one.device.backward = lambda loss: backward(loss) or whole_gradients.append(not reduced(one))
    for i in range(2):
        rollout, rewards = one.collect()
        columns = {
            "sample": rollout.sample,
            "reward": rewards["toy"],
            "advantage": rollout.advantage,
            "row": rollout.row_id,
            "logprob": rollout.logprob,
        }
        found |= {
            f"{i}/{name}": distributed.all_gather_rows(value.contiguous())
            for name, value in columns.items()
        }
        metrics = one.iterate()
        found[f"{i}/metrics"] = torch.tensor(
            [metrics[name] for name in NUMBERS], dtype=torch.float64
        )
    held_out = evaluate(one.policy, one.prompts[:7], one.scorer, EvaluateOptions())["toy"]
    found["evaluation"] = torch.tensor(
        [held_out.mean, held_out.low, held_out.n], dtype=torch.float64
    )
    found |= arrays_of(one)
    if case in RESTORED:  # a checkpoint of many processes is one, and restores on any number
        checkpoint.save(folder / case, 2, *state.capture(one))
        found |= {f"next/{name}": value for name, value in one_more(case, start).items()}
    found["idle"] = distributed.all_sum(torch.tensor(len(idle)))
    if isinstance(one.device, Sharded):
        assert_fsdp2(one)
        assert case != "flow" or (whole_gradients and not any(whole_gradients)), (
            "a pass kept its whole gradient"
        )
    return {name: value.contiguous().clone() for name, value in found.items()}, one


def reduced(one):
    """Whether every trained weight has a gradient: FSDP2 hands it over once it was reduced to this
    process's part."""
    return all(p.grad is not None for p in one.policy.net.parameters() if p.requires_grad)


def assert_fsdp2(one):
    """At the end accelerate still takes this for FSDP2, and every weight is a shard."""
    from accelerate.state import AcceleratorState

    assert AcceleratorState().is_fsdp2 and one.device.accelerator.is_fsdp2 and one.device.sharded
    assert all(is_sharded(p) for p in one.policy.net.parameters())


def one_more(case, start):
    """The state one iteration after a checkpoint, which another number of processes may have
    written."""
    again = trainer_of(case)
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        block = checkpoint.Part.block
        patch.setattr(
            checkpoint.Part, "block", lambda *call: sizes.append(prod(call[3])) or block(*call)
        )
        state.restore(again, *checkpoint.load(checkpoint.latest(start / case)))
    stored = sum(value.numel() for value in arrays_of(again).values())
    assert sum(sizes) < 0.75 * stored or not again.device.sharded, (
        "a process read more than its shards"
    )
    again.iterate()
    return arrays_of(again)


def refuse_together():
    """A UserError of the last process reaches every one, and nobody waits for it."""
    rank, size = distributed.world()
    for culprits in ((), (size - 1,), tuple(range(size))):
        told = ""
        try:
            with distributed.together():
                if rank in culprits:
                    raise UserError("prêt à échouer")
        except UserError as error:
            told = str(error)
        assert told == ("prêt à échouer" if culprits else ""), (rank, culprits, told)


def agree_on_chunks():
    """The process with the least memory decides, so that all make equally many passes."""
    policy = toys.make("flow")
    rank = distributed.world()[0]
    policy.sampling_memory_gib = (2 - rank) / 2**10  # GiB
    found = policy.chunk(10**6, lambda rows: torch.zeros(rows, 2**10, dtype=torch.uint8))
    assert (
        distributed.all_max(torch.tensor(found))
        == found
        == (2 - distributed.world()[1] + 1) * 2**10
    ), found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--start", type=Path, help="folder with the checkpoints to restore; default: the same"
    )
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--cases", nargs="*", help="default: all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    # transformers saves on the first of many processes only
    for name in ("amused", "wan-two", "wan_i2v-two"):
        tiny_diffusers.folder(name)
    for name in ("qwen2_5_vl", "janus"):
        tiny_vlms.folder(name)
    trainer.Device = Sharded if given.sharded else Device
    for case in given.cases or (SHARDED if given.sharded else CASES):
        found, one = results(case, given.folder, given.start or given.folder)
        if one.device.main:
            save_file(found, given.folder / f"{case}.safetensors")
        one.device.wait()
    refuse_together()
    agree_on_chunks()


if __name__ == "__main__":
    main()

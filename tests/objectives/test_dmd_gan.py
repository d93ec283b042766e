"""The discriminator of distribution matching: losses and gradients by hand, learning, what it
needs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.objectives.base import Critic
from mmrl.train.critic import SnapshotUpdate
from mmrl.train.optimizers import adamw
from mmrl.zoo.objectives.discriminator import Discriminator, Gan, middle_block, reading
from mmrl.zoo.objectives.distribution_matching import FAKE, DistributionMatching, Judged, Noising
from samplers.noise import Rng
from samplers.processes import Flow, noised
from tests.experiment.test_resume import resumes
from tests.fixtures import toys
from tests.objectives import test_few_step as few_step
from tests.objectives.test_few_step import MEANS, Points, moved_on, rows, slopes_of, teacher


def trainer_of(objective, count=32, **options):
    return few_step.trainer_of(objective, 2, count, double=True, **options)


def judged(policy, objective, count=6):
    """A point of the fake model, and the head with its weights."""
    for name in objective.snapshots:
        policy.weights.keep(name)
    with torch.no_grad():
        rollout = policy.rollout(rows(count), 1, Rng.of("a"))
    (point,) = objective.critic().objective.points(policy, rollout, Rng.of("b"))
    objective.judge.measure(policy, point)
    with torch.no_grad():
        for parameter in objective.judge.module.parameters():
            parameter.add_(0.05 * torch.arange(parameter.numel()).view(parameter.shape).sin())
    return rollout, point


def features(net, state, time, mean):
    """What comes out of the middle block of the toy's row of layers."""
    hidden = torch.cat([state, time[:, None], mean], 1)
    middle = len(net) // 2
    for layer in list(net)[: middle + 1]:
        hidden = layer(hidden)
    return hidden


def test_the_critics_loss_and_gradients_by_hand():
    policy = Points(steps=3)
    objective = DistributionMatching(teacher=teacher, gan=Gan(critic_weight=0.3))
    _, point = judged(policy, objective)
    head = objective.judge.module
    drawn = point.coupled(Judged)
    places = [i % 2 for i in range(len(point))]
    real = torch.stack([row["answer"] for row in rows(6)])
    assert torch.equal(drawn.real, real)
    assert (drawn.noise != drawn.real_noise).all()
    with policy.weights.using(FAKE):
        loss = objective.critic().objective.loss(policy, point)
        loss.sum().backward()
    slopes = [p.grad.clone() for p in (*policy.net.parameters(), *head.parameters())]
    policy.net.zero_grad()
    head.zero_grad()
    mean = MEANS[places]
    net = policy.net
    with torch.no_grad():
        state = torch.cat([point.state, point.time[:, None], mean], 1)
        jump = point.state - point.time[:, None] * net(state)
    tau = drawn.time
    made = noised(Flow(), jump, drawn.noise, tau)
    shown = noised(Flow(), real, drawn.real_noise, tau)
    output = net(torch.cat([made, tau[:, None], mean], 1))
    error = (output - (drawn.noise - jump)).square().mean(1)
    told = softplus(head.layers(features(net, made, tau, mean)))[:, 0]
    told = told + softplus(-head.layers(features(net, shown, tau, mean)))[:, 0]
    torch.testing.assert_close(loss[:, 0], error + 0.3 * told)
    (error + 0.3 * told).sum().backward()
    for slope, parameter in zip(slopes, (*net.parameters(), *head.parameters())):
        torch.testing.assert_close(slope, parameter.grad)
        assert slope.abs().max() > 0


def test_the_students_loss_and_gradient_by_hand():
    """Its gradient goes through the fake model, whose weights it leaves alone."""
    policy = Points(steps=3)
    plain = DistributionMatching(teacher=teacher)
    plain.setup(policy)
    objective = DistributionMatching(teacher=teacher, gan=Gan(weight=0.7))
    objective.setup(policy)
    rollout, _ = judged(policy, objective)
    fake = toys.mlp(5, 2).double()
    moved_on(policy)  # the fake model stays behind
    (point,) = objective.points(policy, rollout, Rng.of("c"))
    alone, both = (each.loss(policy, point) for each in (plain, objective))
    drawn = point.coupled(Noising)
    mean = MEANS[[i % 2 for i in range(len(point))]]
    state = torch.cat([point.state, point.time[:, None], mean], 1)
    jump = point.state - point.time[:, None] * policy.net(state)
    again = noised(Flow(), jump, drawn.noise, drawn.time)
    verdict = objective.judge.module.layers(features(fake, again, drawn.time, mean))
    fooled = 0.7 * softplus(-verdict)
    torch.testing.assert_close(both, alone + fooled)
    assert all(p.grad is None for p in objective.judge.module.parameters())
    for whole, part, extra in zip(*(slopes_of(policy, x) for x in (both, alone, fooled))):
        torch.testing.assert_close(whole, part + extra)
        assert extra.abs().max() > 0


def test_a_run_resumes_to_the_bit(tmp_path):
    def fresh():
        objective = DistributionMatching(teacher=teacher, gan=Gan(weight=0.5), reward_weight=0.3)
        sizes = {"group_size": 2, "train_batch_size": 8, "micro_batch_size": 3}
        return trainer_of(objective, 4, ema=0.9, precision="bf16", **sizes)

    resumes(fresh, tmp_path)


def test_passes_change_nothing():
    weights = []
    for size in (3, 4):
        objective = DistributionMatching(teacher=teacher, gan=Gan(weight=0.5, critic_weight=0.5))
        one = trainer_of(objective, 4, micro_batch_size=size)
        one.iterate()
        weights.append([*one.policy.net.parameters(), *objective.judge.module.parameters()])
    for mine, its in zip(*weights):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)


# networks


def test_hidden_states_of_the_middle_of_diffusers_networks():
    import diffusers

    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    assert middle_block(unet) is unet.mid_block
    head = Discriminator()
    with reading(unet, 3) as hidden:
        unet(torch.randn(3, 3, 8, 8), 1)
    assert hidden().shape[:2] == (3, 16)
    head.grow(16, torch.float32, "cpu")
    assert head(hidden()).shape == (3, 1)
    before = [p.clone() for p in head.parameters()]
    head.grow(16, torch.float32, "cpu")
    assert all(torch.equal(x, y) for x, y in zip(before, head.parameters()))

    net = diffusers.SD3Transformer2DModel(
        sample_size=4,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        pos_embed_max_size=4,
    )
    assert middle_block(net) is net.transformer_blocks[1]
    with reading(net, 2) as hidden:
        net(
            torch.randn(2, 4, 4, 4),
            encoder_hidden_states=torch.randn(2, 5, 8),
            pooled_projections=torch.randn(2, 8),
            timestep=torch.tensor([1.0, 2.0]),
        )
    assert hidden().shape == (2, 16, 16)  # the picture's tokens, of which there are more


@pytest.mark.parametrize(
    ("net", "says"),
    [
        (nn.Linear(2, 2), "the network has no row of blocks"),
        (nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "nothing came out of .* middle block"),
    ],
)
def test_networks_that_cannot_be_read_are_refused(net, says):
    with pytest.raises(UserError, match=says), reading(net, 1) as hidden:
        hidden()


# what does not fit


def test_a_prompt_without_a_picture_is_named():
    objective = DistributionMatching(teacher=teacher, gan=Gan(field="photo"))
    with pytest.raises(UserError, match="'0': no 'photo', which holds a real picture"):
        judged(Points(steps=2), objective)
    with pytest.raises(UserError, match="'0': no 'photo', which holds a real picture"):
        objective.check(Points(steps=2), rows(3))
    lost = [{"text": "a cat", "photo": "nowhere.png", "origin": "rows.jsonl:7"}]
    with pytest.raises(UserError, match="rows.jsonl:7: .*nowhere.png"):
        objective.check(Points(steps=2), lost)
    DistributionMatching(teacher=teacher).check(Points(steps=2), lost)


def test_policies_without_demonstrations_and_shards_are_refused():
    objective = DistributionMatching(teacher=teacher, gan=Gan())
    reasons = dict(objective.unfit(toys.make("flow")))
    assert "takes no pictures of others" in reasons["gan"]
    assert "gan" not in dict(DistributionMatching().unfit(toys.make("flow")))
    device = SimpleNamespace(scales_loss=False, sharded=True, optimizer_of=lambda *_: None)
    options = TrainOptions(prompts_per_iteration=4, group_size=1, train_batch_size=4, iterations=1)
    with pytest.raises(UserError, match="objective.dmd.gan: .* FSDP2 gathers and frees"):
        SnapshotUpdate(objective.critic(), Points(steps=2), adamw, options, device)
    assert isinstance(objective.critic(), Critic)

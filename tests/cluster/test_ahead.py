"""The correction of samples that older weights have drawn, without a cluster."""

import pytest
import torch

from mmrl.apps.ray.rollouts import corrected
from samplers.noise import Rng
from tests.fixtures import toys


@pytest.mark.parametrize("family", ["flow", "causal"])
def test_older_samples_are_scored_by_the_weights_of_now(family):
    policy = toys.make(family, double=True)
    policy.pass_sizes.rows = 4
    with torch.no_grad():
        drawn = policy.rollout(toys.prompts(3), 4, Rng.of(0, "rollout"))
        same = corrected(policy, drawn)
        for parameter in policy.weights.parameters().values():
            parameter.add_(0.05 * torch.randn_like(parameter))
        moved = corrected(policy, drawn)
    mask = drawn.mask
    torch.testing.assert_close(same.logprob[mask], drawn.logprob[mask], rtol=0, atol=1e-9)
    assert torch.equal(moved.provenance.sampler_logprob, drawn.logprob)
    assert (moved.logprob - drawn.logprob)[mask].abs().max() > 1e-4
    # another engine's own log-probs stay what the samples were drawn with
    with torch.no_grad():
        again = corrected(policy, moved)
    assert torch.equal(again.provenance.sampler_logprob, drawn.logprob)

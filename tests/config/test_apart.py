"""A group of one sample learns from demonstrations by a separate loss."""

from mmrl.config.options import TrainOptions
from mmrl.config.plan import _warnings
from mmrl.zoo.stages.written_answers import Demonstrated


def test_one_sample_beside_written_answers_that_are_set_apart_is_no_mistake():
    options = {"prompts_per_iteration": 2, "group_size": 1, "train_batch_size": 2, "iterations": 1}
    alone = TrainOptions(**options)
    apart = TrainOptions(**options, stages=(Demonstrated(path="a", own_baseline=True),))
    assert any("nothing would be learned" in text for text in _warnings(alone, False))
    assert not any("nothing would be learned" in text for text in _warnings(apart, False))

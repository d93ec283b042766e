"""What a type checker must see of the Python API; mypy reads this file, nothing runs it."""

from typing import assert_type

import mmrl


def typed() -> None:
    run = mmrl.train("digits/flow_grpo", {"train.iterations": 2})
    assert_type(run, mmrl.Run)
    assert_type(mmrl.load_policy("digits/flow_grpo").sample(["a red one"]), mmrl.Samples)
    assert_type(mmrl.Trainer("digits/flow_grpo", ["a"], lambda image: 1.0).train(), mmrl.Run)
    assert_type(mmrl.evaluate(run), mmrl.Evaluation)

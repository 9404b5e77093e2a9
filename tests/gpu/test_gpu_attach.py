"""An attached policy on a GPU: answers from CUDA graphs, and the policy's own weights on the host."""

from __future__ import annotations

import pytest
import torch

import vla_accel
from tests.support.gpu_policies import DEVICE
from tests.support.small_lerobot_policy import Policy, batch_of

pytestmark = pytest.mark.gpu


def test_an_attached_policy_leaves_the_gpu_to_the_engines() -> None:
    policy = Policy().to(DEVICE)
    policy.network[0].to(DEVICE)

    def answer(count: int) -> torch.Tensor:
        torch.manual_seed(3)
        return policy.predict_action_chunk({name: value.to(DEVICE) for name, value in batch_of(count).items()})

    before = {count: answer(count) for count in (1, 3)}
    attached = vla_accel.attach(policy)
    for count in (1, 3, 1):
        ours = answer(count)
        assert ours.device == before[count].device and ours.dtype == before[count].dtype
        assert (ours - before[count]).float().std() < 0.1 * before[count].float().std()
    assert attached.engine is not None and attached.engine.device.type == torch.device(DEVICE).type
    assert {p.device.type for p in policy.parameters()} == {"cpu"}
    assert {entry["used"] for entry in attached.engine.ledger.as_list()} <= {"native", "cuda_graph"}
    attached.detach()
    assert {p.device.type for p in policy.parameters()} == {torch.device(DEVICE).type}
    assert torch.equal(answer(3), before[3])

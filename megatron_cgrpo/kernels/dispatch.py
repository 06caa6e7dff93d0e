"""The one place that chooses an implementation of a hot operation."""

from __future__ import annotations

from megatron_cgrpo.kernels.policy_loss import policy_loss_reference
from megatron_cgrpo.kernels.token_logprob import token_logprob_reference

token_logprob = token_logprob_reference
policy_loss = policy_loss_reference

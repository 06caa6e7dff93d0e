"""The numbers of one step, by name. Shares and means are over what their name says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_cgrpo.policy.results import ScoreResult, UpdateResult
from megatron_cgrpo.rollout import events
from megatron_cgrpo.rollout.events import AGREEMENT, events_of
from megatron_cgrpo.types import Group, Sample


def per(value: float, count: float) -> float:
    """A share; 0 of nothing."""
    return value / count if count else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, failures, rescues and lengths."""
    happened = events_of(groups)
    initial = [s for g in groups for s in g.initial]
    refined = [s for g in groups for s in g.refinements]
    failed = [g for g in groups if g.initial and not any(s.verdict.correct for s in g.initial)]
    tried = [g for g in failed if g.attempted]
    return {
        "reward/initial": _mean([s.reward for s in initial]),
        "reward/refined": _mean([s.reward for s in refined]),
        "groups/all_failed": len(failed) / len(groups),
        "groups/refined": sum(g.attempted > 0 for g in groups) / len(groups),
        "groups/rescue_rate": _mean([float(g.rescued) for g in tried]),
        "groups/learning": sum(any(g.advantages) for g in groups) / len(groups),
        "samples/initial": len(initial),
        "samples/refinements_attempted": sum(g.attempted for g in groups),
        "samples/refinements_kept": len(refined),
        events.UNJUDGED: happened[events.UNJUDGED],
        events.SHORTENED: happened[events.SHORTENED],
        events.NOT_FITTING: happened[events.NOT_FITTING],
        events.WITHOUT_CRITIQUE: happened[events.WITHOUT_CRITIQUE],
        "samples/answer_copy_share": per(
            happened[events.ANSWER_COPIES], happened[events.RIGHT_WITH_ANSWER]
        ),
        "length/initial": _mean([len(s.completion.token_ids) for s in initial]),
        "length/refined": _mean([len(s.completion.token_ids) for s in refined]),
        "truncated/initial": _mean([float(s.completion.truncated) for s in initial]),
        "truncated/refined": _mean([float(s.completion.truncated) for s in refined]),
        "tokens/generated": happened[events.INITIAL_TOKENS] + happened[events.REFINEMENT_TOKENS],
        "time/refine_group_s": per(
            happened[events.REFINE_SECONDS], happened[events.REFINED_GROUPS]
        ),
        **_agreement(happened),
    }


def _agreement(happened: Mapping[str, float]) -> dict[str, float]:
    """Critic × verifier: how often a critic that judges by itself says what the rule says."""
    matrix = {name: happened[name] for name in AGREEMENT.values()}
    if not any(matrix.values()):
        return {}
    both = {pair: matrix[name] for pair, name in AGREEMENT.items() if None not in pair}
    agreed = sum(n for (said, rule), n in both.items() if said == rule)
    return {
        **matrix,
        "critic/agreement": per(agreed, sum(both.values())),
        events.LABELS_FROM_RULE: happened[events.LABELS_FROM_RULE],
    }


def update_metrics(score: ScoreResult, updates: Sequence[UpdateResult]) -> dict[str, float]:
    """Scores over all tokens of the step, losses and norms over its optimizer steps."""
    s = score.sums
    total = {k: sum(u.sums[k] for u in updates) for k in updates[0].sums}
    taken = [u for u in updates if u.grad_norm > 0]
    refinement_norms = [u.refinement_grad_norm for u in taken if u.refinement_grad_norm is not None]

    return {
        "policy/entropy": per(s["entropy"], s["tokens"]),
        "policy/engine_gap_mean": per(s["engine_gap"], s["initial_tokens"]),
        "policy/engine_gap_max": score.max_engine_gap,
        "policy/context_shift_kl": per(s["context_shift_kl"], s["refinement_tokens"]),
        # 0 unless scoring and training disagree: ratio = 1 at the first update of a step.
        "policy/first_max_log_ratio": updates[0].max_log_ratio,
        "policy/ratio_mean": per(total["ratio"], total["initial_tokens"]),
        "policy/clip_low": per(total["clipped_low"], total["initial_tokens"]),
        "policy/clip_high": per(total["clipped_high"], total["initial_tokens"]),
        "policy/rho_mean": per(total["rho"], total["refinement_tokens"]),
        "policy/rho_clip": per(total["rho_clipped"], total["refinement_tokens"]),
        "policy/approx_kl": per(total["approx_kl"], total["initial_tokens"]),
        "policy/reference_kl": per(
            total["reference_kl"], total["initial_tokens"] + total["refinement_tokens"]
        ),
        "loss/objective_initial": total["objective_initial"],
        "loss/objective_refinement": total["objective_refinement"],
        "gradient/norm": _mean([u.grad_norm for u in taken]),
        "gradient/norm_refinements": _mean(refinement_norms),
        "gradient/refinement_share": per(
            _mean(refinement_norms), _mean([u.grad_norm for u in taken])
        ),
        "optimizer/lr": updates[-1].lr,
        "optimizer/updates": sum(u.applied for u in updates),
        "optimizer/skipped_non_finite": sum(not u.applied and u.grad_norm != 0.0 for u in updates),
        "tokens/scored": s["tokens"],
        "tokens/trained": total["initial_tokens"] + total["refinement_tokens"],
    }


def lineages(step: int, groups: Sequence[Group], count: int) -> list[dict]:
    """Full stories of up to `count` problems, refined ones first, for samples.jsonl."""
    chosen = sorted(groups, key=lambda g: not g.refinements)[:count]
    return [
        {
            "step": step,
            "problem": g.problem.id,
            "question": g.problem.question,
            "answer": g.problem.answer,
            "initial": [_sample(s) for s in g.initial],
            "refinements": [_sample(s) for s in g.refinements],
            "advantages": list(g.advantages),
        }
        for g in chosen
    ]


def _sample(s: Sample) -> dict:
    return {
        "text": s.completion.text,
        "finish_reason": s.completion.finish_reason,
        "weight_versions": list(s.completion.weight_versions),
        "correct": s.verdict.correct,
        "extracted": s.verdict.extracted,
        "reason": s.verdict.reason,
        "critique": s.critique.text if s.critique else None,
        "critic": s.critique.critic if s.critique else None,
        "critic_says": s.critique.says_correct if s.critique else None,
        "parent": s.parent,
    }

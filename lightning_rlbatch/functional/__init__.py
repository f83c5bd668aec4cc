"""Pure functions and frozen dataclasses: no torch.distributed, no Lightning, no transformers."""

from lightning_rlbatch.functional.advantages import (
    discounted_returns,
    gae,
    merge_moments,
    moments,
    place_rewards,
    spread_to_tokens,
    token_sums,
    whiten,
)
from lightning_rlbatch.functional.advantages_group import (
    GroupStatistics,
    SampleAdvantages,
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    group_statistics,
    opo_advantages,
    pass_at_k_advantages,
    remax_advantages,
    rloo_advantages,
)
from lightning_rlbatch.functional.aggregation import AGGREGATION_MODES, AggregationMode, Denominators, aggregate, check_per_token
from lightning_rlbatch.functional.algorithms import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    SAPO,
    ClipCov,
    FunctionLoss,
    KLCov,
    PPOClip,
    Reinforce,
)
from lightning_rlbatch.functional.attention import varlen_attention
from lightning_rlbatch.functional.balancing import balanced_partition, karmarkar_karp
from lightning_rlbatch.functional.bounds import equal_partition_bound, free_partition_bound, step_workload_bound
from lightning_rlbatch.functional.estimators import (
    GAE,
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    OutcomeEstimator,
    ReinforcePlusPlus,
)
from lightning_rlbatch.functional.estimators_group import (
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    DrGRPO,
    PassAtK,
    PassAtKTraining,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from lightning_rlbatch.functional.filters import ZeroVariance, drop_samples, overlong_penalty, should_resample, zero_variance_groups
from lightning_rlbatch.functional.importance import (
    ImportanceCorrection,
    effective_sample_size,
    effective_sample_size_sums,
    importance_weights,
)
from lightning_rlbatch.functional.kl import KL_KINDS, AdaptiveKL, FixedKL, KLController, full_kl, kl_penalty
from lightning_rlbatch.functional.losses import LossTerms, entropy, entropy_bonus, policy_loss, ppo_clip_loss
from lightning_rlbatch.functional.losses_covariance import (
    clip_cov_loss,
    kl_cov_loss,
    select_clip_cov,
    select_kl_cov,
    token_covariance,
    token_keys,
)
from lightning_rlbatch.functional.losses_sequence import gmpo_loss, gspo_loss
from lightning_rlbatch.functional.losses_token import binary_kl, cispo_loss, dppo_loss, reinforce_loss, sapo_loss
from lightning_rlbatch.functional.majority import majority_reward
from lightning_rlbatch.functional.metrics import (
    add_pairs,
    explained_variance,
    explained_variance_sums,
    length_metrics,
    quotients,
    sample_mean,
    token_mean,
)
from lightning_rlbatch.functional.optimal_token_baseline import OTB, optimal_token_baseline
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.parallel_sizes import sequence_parallel_times
from lightning_rlbatch.functional.pass_at_k import best_of_k, pass_at_k_training_advantages
from lightning_rlbatch.functional.peers import ALONE, Peers
from lightning_rlbatch.functional.per_rank import count_micro_steps, plan_rank
from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.functional.plan_input import OversizeWarning
from lightning_rlbatch.functional.planning import plan_mini_batch, recut
from lightning_rlbatch.functional.policy_loss_base import LossInputs, PolicyLoss
from lightning_rlbatch.functional.rewards import combine_rewards, reward_columns
from lightning_rlbatch.functional.schema import FieldSpec, Schema
from lightning_rlbatch.functional.sizes import IterationSizes, iteration_sizes
from lightning_rlbatch.functional.value import value_loss
from lightning_rlbatch.functional.workload import attention_workload, fit_workload_coefficient, workload_coefficient

__all__ = [
    "AGGREGATION_MODES",
    "ALONE",
    "CISPO",
    "DPPO",
    "GAE",
    "GDPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "KL_KINDS",
    "OPO",
    "OTB",
    "RLOO",
    "SAPO",
    "AdaptiveKL",
    "AdvantageEstimator",
    "AdvantageInputs",
    "Advantages",
    "AggregationMode",
    "BatchPlan",
    "ClipCov",
    "Denominators",
    "DrGRPO",
    "FieldSpec",
    "FixedKL",
    "FunctionLoss",
    "GroupStatistics",
    "ImportanceCorrection",
    "IterationSizes",
    "KLController",
    "KLCov",
    "LossInputs",
    "LossTerms",
    "OutcomeEstimator",
    "OversizeWarning",
    "PPOClip",
    "PackedBatch",
    "PassAtK",
    "PassAtKTraining",
    "Peers",
    "PolicyLoss",
    "ReMax",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "SampleAdvantages",
    "Schema",
    "ZeroVariance",
    "add_pairs",
    "aggregate",
    "attention_workload",
    "balanced_partition",
    "best_of_k",
    "binary_kl",
    "check_per_token",
    "cispo_loss",
    "clip_cov_loss",
    "combine_rewards",
    "count_micro_steps",
    "discounted_returns",
    "dppo_loss",
    "drop_samples",
    "effective_sample_size",
    "effective_sample_size_sums",
    "entropy",
    "entropy_bonus",
    "equal_partition_bound",
    "explained_variance",
    "explained_variance_sums",
    "fit_workload_coefficient",
    "free_partition_bound",
    "full_kl",
    "gae",
    "gdpo_advantages",
    "gmpo_loss",
    "gpg_advantages",
    "group_advantages",
    "group_statistics",
    "gspo_loss",
    "importance_weights",
    "iteration_sizes",
    "karmarkar_karp",
    "kl_cov_loss",
    "kl_penalty",
    "length_metrics",
    "majority_reward",
    "merge_moments",
    "moments",
    "opo_advantages",
    "optimal_token_baseline",
    "overlong_penalty",
    "pass_at_k_advantages",
    "pass_at_k_training_advantages",
    "place_rewards",
    "plan_mini_batch",
    "plan_rank",
    "policy_loss",
    "ppo_clip_loss",
    "quotients",
    "recut",
    "reinforce_loss",
    "remax_advantages",
    "reward_columns",
    "rloo_advantages",
    "sample_mean",
    "sapo_loss",
    "select_clip_cov",
    "select_kl_cov",
    "sequence_parallel_times",
    "should_resample",
    "spread_to_tokens",
    "step_workload_bound",
    "token_covariance",
    "token_keys",
    "token_mean",
    "token_sums",
    "value_loss",
    "varlen_attention",
    "whiten",
    "workload_coefficient",
    "zero_variance_groups",
]

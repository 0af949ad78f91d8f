"""The metrics that reports draw as curves."""

from collections.abc import Iterable
import re

SEVERAL = re.compile(r'eval/(pass|maj)_at_(\d+)')  # Of k samples a problem.

# Curves in the order of the page: title, note, metrics by label.
CURVES = (
  ('Reward', 'mean over the rows of a step', {'': 'rollout/reward_mean'}),
  (
    'Success',
    'fraction of finished episodes',
    {'at any time': 'env/success_once', 'at the end': 'env/success_at_end'},
  ),
  ('Return', 'mean of finished episodes', {'': 'env/return'}),
  ('Episode length', 'environment steps', {'': 'env/episode_length'}),
  ('Loss', 'minimized by the updates', {'': 'train/loss'}),
  (
    'Held-out probability',
    'mean over tokens',
    {'': 'eval/token_probability'},
  ),
  (
    'Agreement',
    'with held-out actions; 1 is perfect',
    {'': 'eval/agreement'},
  ),
  (
    'Implicit reward',
    'of completions, in nats',
    {
      'preferred': 'train/reward_chosen',
      'rejected': 'train/reward_rejected',
    },
  ),
  (
    'Policy loss',
    'a surrogate objective: near zero is normal',
    {'': 'train/policy_loss'},
  ),
  ('Value loss', 'error of the critic', {'': 'train/value_loss'}),
  (
    'Explained variance',
    'of returns, by the critic; 1 is perfect',
    {'': 'train/explained_variance'},
  ),
  ('Q value', 'of the actions taken, by the critics', {'': 'train/q_value'}),
  ('Entropy', 'nats per token or action', {'': 'train/entropy'}),
  (
    'Temperature',
    'weight of the entropy in the objective',
    {'': 'train/temperature'},
  ),
  (
    'KL divergence',
    'nats per token or action',
    {
      'from the sampler': 'train/kl_behavior',
      'from the reference': 'train/kl_reference',
    },
  ),
  (
    'KL to the teacher',
    'nats per token',
    {'': 'rollout/kl_teacher'},
  ),
  (
    'Sampler and trainer',
    'difference of log-probabilities, in nats',
    {
      'mean': 'rollout/logprob_gap_mean',
      'largest': 'rollout/logprob_gap_max',
    },
  ),
  (
    'Clip fraction',
    'tokens or actions with a clipped ratio',
    {'': 'train/clip_fraction'},
  ),
  (
    'Response length',
    'tokens',
    {
      'mean': 'rollout/response_length_mean',
      'longest': 'rollout/response_length_max',
    },
  ),
  (
    'Truncated',
    'fraction of completions cut at the limit',
    {'': 'rollout/truncated_fraction'},
  ),
  (
    'Groups without signal',
    'fraction whose rewards are all equal',
    {'': 'rollout/groups_degenerate'},
  ),
  ('Gradient norm', 'before clipping', {'': 'train/grad_norm'}),
  ('Learning rate', '', {'': 'train/lr', 'critic': 'train/lr_critic'}),
  (
    'Idle',
    'fraction of a rollout spent waiting',
    {'simulators': 'wait/simulators', 'policy': 'wait/policy'},
  ),
  ('Throughput', 'tokens per second', {'': 'throughput/tokens_per_second'}),
  (
    'Throughput',
    'environment steps per second',
    {'': 'throughput/steps_per_second'},
  ),
)


def of_samples(names: Iterable[str]) -> dict[str, str]:
  """The scores of all samples of a problem, such as pass@8, by label.

  Args:
    names: metrics, of which some may be of several samples.
  """
  found = [match for name in names if (match := SEVERAL.fullmatch(name))]
  most = max((int(x[2]) for x in found), default=0)
  labels = {f'{x[1]}@{most}': x[0] for x in found if int(x[2]) == most}
  return dict(sorted(labels.items(), reverse=True))

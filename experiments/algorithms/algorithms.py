"""The algorithms of the experiment, and what each changes in its recipe."""

from typing import NamedTuple


class Algorithm(NamedTuple):
  """A recipe of sums, and what it changes.

  Attributes:
    name: in the table.
    recipe: file of `gin_configs`, without its ending.
    workflow: that the recipe trains by.
    variants: files of `gin_configs` that are read after it.
    bindings: values of macros and bindings by name.
    shuffled: whether the rewards of a batch are shuffled: a control.
  """

  name: str
  recipe: str = 'grpo_arithmetic'
  workflow: str = 'grpo'
  variants: tuple[str, ...] = ()
  bindings: tuple[tuple[str, object], ...] = ()
  shuffled: bool = False


def _variant(name: str, file: str, *bindings) -> Algorithm:
  return Algorithm(name, variants=(f'algorithms/{file}',), bindings=bindings)


STEPS = 50
WARM_START = Algorithm(
  'warm start',
  bindings=(
    ('STEPS', 0),
    ('SEED', 1),
    ('imitate/train.train.stop_at_score', 0.3),
    ('imitate/train.train.evaluate_every', 10),
  ),
)
TEACHER = 'GRPO'  # Distillation learns from its run of seed 0.

# As published, these have no or little KL, which is for models and batches that
# are larger by far. So small a batch soon spoils so small a model without it:
# each gets the weight of GRPO's recipe, in the place where it has a KL.
_IN_LOSS = ('KL', 0.2)
_K2 = ('workflows.grpo.kl_estimator', '@losses.kl_k2')

POLICY_GRADIENT = (
  Algorithm('GRPO'),
  _variant('Dr. GRPO', 'dr_grpo', _IN_LOSS, _K2),
  _variant('GSPO', 'gspo', _IN_LOSS, _K2),
  _variant('CISPO', 'cispo', _IN_LOSS, _K2),
  _variant('REINFORCE++', 'reinforce_pp'),
  # In groups of four: twice the prompts, for as many completions.
  _variant('RLOO', 'rloo', ('arithmetic.problems.batch_size', 112)),
  _variant('ReMax', 'remax', ('arithmetic.problems.batch_size', 112)),
  Algorithm('PPO', 'ppo_arithmetic', 'ppo'),
)
OTHERS = (
  Algorithm('DAPO', 'dapo_arithmetic', 'dapo'),
  Algorithm(
    'expert iteration', 'expert_iteration_arithmetic', 'expert_iteration'
  ),
  Algorithm(
    'LoRA-GRPO', variants=('tasks/lora',), bindings=(('LORA_RANK', 16),)
  ),
  Algorithm('distillation', 'distillation_arithmetic', 'distillation'),
)
# Settings of their own for those that end below 85 % under GRPO's; README.md
# has the reasons.
_RATE = 'optimizers.adamw.learning_rate'
_OWN = {
  'Dr. GRPO': (('KL', 0.08), (_RATE, 1e-3)),
  'GSPO': (
    ('workflows.grpo.clip_low', 0.03),
    ('workflows.grpo.clip_high', 0.04),
  ),
  'ReMax': (('workflows.grpo.kl_reward_coef', 0.05),),
}
OWN_SETTINGS = tuple(
  algorithm._replace(
    name=f'{algorithm.name}, own settings',
    bindings=tuple(
      (dict(algorithm.bindings) | dict(_OWN[algorithm.name])).items()
    ),
  )
  for algorithm in (*POLICY_GRADIENT, *OTHERS)
  if algorithm.name in _OWN
)
# Distillation reads no rewards; the variants of GRPO are one family.
_FAMILIES = ('GRPO', 'PPO', 'DAPO', 'expert iteration')
CONTROLS = tuple(
  algorithm._replace(
    name=f'{algorithm.name}, shuffled rewards',
    # The best of a group by a shuffled reward is any of them.
    bindings=(('KEEP', '@selection.best'),)
    if algorithm.workflow == 'expert_iteration'
    else algorithm.bindings,
    shuffled=True,
  )
  for algorithm in (*POLICY_GRADIENT, *OTHERS)
  if algorithm.name in _FAMILIES
)
ALL = (*POLICY_GRADIENT, *OTHERS, *OWN_SETTINGS, *CONTROLS)

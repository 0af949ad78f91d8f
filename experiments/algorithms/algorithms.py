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


WARM_START = Algorithm('warm start')
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
  _variant('RLOO', 'rloo'),
  _variant('ReMax', 'remax'),
  Algorithm('PPO', 'ppo_arithmetic', 'text_ppo'),
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
# Distillation reads no rewards; the variants of GRPO are one family.
CONTROLS = tuple(
  algorithm._replace(name=f'{algorithm.name}, shuffled rewards', shuffled=True)
  for algorithm in (*POLICY_GRADIENT, *OTHERS)
  if algorithm.name in ('GRPO', 'PPO', 'DAPO', 'expert iteration')
)
ALL = (*POLICY_GRADIENT, *OTHERS, *CONTROLS)

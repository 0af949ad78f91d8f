"""From a robot's folder to a policy: fine-tuning, export, and acting."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors import numpy as st

import claims
from rlinf_jax import evaluate, train
from rlinf_jax.config import config
from rlinf_jax.data.episodes import source, statistics
from rlinf_jax.data.lerobot import layout, write
from rlinf_jax.prepare import tiny_vla
from stages import workflows
from stages.envs import action_chunks, push, seed_source
from stages.learn import optimizers
from stages.models.files import weights
from stages.vla import instructions
from stages.vla.openvla import (
  action_tokens,
  openvla_env,
  openvla_files,
  openvla_oft_env,
  openvla_settings,
  tuning_files,
)

pytest.importorskip('pyarrow', reason='LeRobot folders are parquet files.')
pytest.importorskip('av', reason='LeRobot folders are videos.')

SEEDS = 64


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A tiny model, and episodes of a controller in the push world."""
  out = tmp_path_factory.mktemp('tiny')
  tiny_vla.model(out / 'model')
  write.write(out / 'data', tiny_vla.episodes(64, 64), fps=tiny_vla.FPS)
  return out


def test_episodes_are_of_the_controller_that_does_what_words_say(folder):
  data = layout.read(str(folder / 'data'))
  assert {*data.tasks.values()} <= {*push.INSTRUCTIONS}
  assert len(data.episodes) > 48
  assert data.features[tiny_vla.CAMERA].shape == (32, 32, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
  'film, augment',
  claims.some([(False, True), (True, False), (True, True)], [(True, True)]),
)
def test_fine_tuning_exports_the_published_layout(
  folder, tmp_path, film, augment
):
  """The first command of docs/vla.md."""
  bindings = [
    f'MODEL = {str(folder / "model")!r}',
    f'DATA = {str(folder / "data")!r}',
    'CHUNK = 2',
    'STEPS = 3',
    'LORA_RANK = 4',
    f'FILM = {film}',
    f'AUGMENT = {augment}',
    'train.train.plan = None',
  ]
  config.parse(
    ['gin_configs/sft_openvla_oft.gin'], bindings, str(tmp_path / 'run')
  )
  config.call(train.train, workdir=str(tmp_path / 'run'))
  model = tmp_path / 'run' / 'model'
  metrics = [
    json.loads(line)
    for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()
  ]
  losses = [x['eval/loss'] for x in metrics if 'eval/loss' in x]
  assert len(losses) == 2 and losses[1] < losses[0]
  # Its checkpoint is evaluated without training.
  record = config.call(
    evaluate.evaluate,
    bindings_of=train.train,
    workdir=str(tmp_path / 'scores'),
    checkpoint_of=str(tmp_path / 'run'),
  )
  assert record['sets']['all']['loss']['value'] == losses[1]
  stored = weights.read_json(model / tuning_files.STATISTICS)
  assert stored == statistics.norm_stats(str(folder / 'data'))
  # With its own statistics and projector of the state, it acts anywhere.
  encode = functools.partial(instructions.openvla, checkpoint=str(model))
  env = push.push(image_size=32, instructions=encode)
  policy = openvla_oft_env.pretrained(env, checkpoint=str(model), chunk=2)
  _, obs = env.init(np.arange(2, dtype=np.int32))
  keys = jax.random.split(jax.random.key(0), 2)
  params = policy.init(jax.random.key(0))
  assert 'state_projector' in params
  # Beside adapters of the language model, FiLM is trained.
  learned = any(np.any(x) for x in jax.tree.leaves(params.get('film', ())))
  assert learned == film
  command = policy.to_env_action(policy.act(params, obs, keys).action)
  assert command.shape == (2, 2, 2) and np.isfinite(command).all()


@pytest.mark.slow
def test_openvla_is_fine_tuned_without_its_towers_and_acts(folder, tmp_path):
  bindings = [
    f'MODEL = {str(folder / "model")!r}',
    f'DATA = {str(folder / "data")!r}',
    'STEPS = 3',
    'LORA_RANK = None',
    "FROZEN = ('vision',)",
    'AUGMENT = True',
    'train.train.plan = None',
  ]
  run = tmp_path / 'run'
  config.parse(['gin_configs/sft_openvla.gin'], bindings, str(run))
  config.call(train.train, workdir=str(run))
  metrics = map(json.loads, (run / 'metrics.jsonl').read_text().splitlines())
  losses = [x['eval/loss'] for x in metrics if 'eval/loss' in x]
  assert len(losses) == 2 and losses[1] < losses[0]
  stored = [
    st.load_file(x / 'model.safetensors')
    for x in (folder / 'model', run / 'model')
  ]
  differ = {k for k, x in stored[0].items() if (x != stored[1][k]).any()}
  assert not {k for k in differ if k.startswith('vision_backbone.')}
  assert {k.split('.')[0] for k in differ} == {'language_model', 'projector'}

  # It acts in the units of its data, which the folder tells by their name.
  model = str(run / 'model')
  want = statistics.norm_stats(str(folder / 'data'), state=None)
  assert weights.read_json(run / 'model' / tuning_files.STATISTICS) == want
  encode = functools.partial(instructions.openvla, checkpoint=model)
  env = push.push(image_size=32, instructions=encode)
  policy = openvla_env.pretrained(
    env, checkpoint=model, data_set='data', center_crop=True
  )
  _, obs = env.init(np.arange(2, dtype=np.int32))
  keys = jax.random.split(jax.random.key(0), 2)
  x = policy.act(policy.init(jax.random.key(0)), obs, keys)
  own = action_tokens.action_stats(want, 'data')
  command = np.asarray(policy.to_env_action(x.action))
  assert command.shape == (2, 2)
  assert (command >= np.maximum(own.q01, -1)).all()
  assert (command <= np.minimum(own.q99, 1)).all()


def test_several_cameras_are_refused_where_a_model_sees_one():
  assert source.only_camera(('image/top',)) == 'image/top'
  with pytest.raises(ValueError, match='has image/top, image/wrist: name its'):
    source.only_camera(('image/top', 'image/wrist'))


@pytest.mark.slow
@pytest.mark.claims  # Ninety CPU-seconds.
def test_fine_tuning_raises_success_in_the_push_world(
  folder, tmp_path, monkeypatch, fully_optimized
):
  """The state has all positions, so that 300 steps suffice.

  From pictures alone, a model of this size needs thousands.
  """
  monkeypatch.setattr(push, 'proprioception', push.observe)
  steps, model, data = 300, str(folder / 'model'), str(tmp_path / 'data')
  found = tiny_vla.episodes(256, 256, noise_std=0.1)
  write.write(data, found, fps=tiny_vla.FPS)
  encode = functools.partial(instructions.openvla, checkpoint=model, length=24)
  env = push.push(
    dense=False, terminate=True, image_size=32, instructions=encode
  )
  workflow = workflows.behavior_cloning(
    action_chunks.chunked(env, 2, 0.97),
    functools.partial(
      openvla_oft_env.pretrained,
      checkpoint=model,
      chunk=2,
      norm_stats=statistics.norm_stats(data),
      new_heads=True,
      critic=False,
    ),
    optimizers.adamw(3e-3, decay_steps=500, updates_per_step=1),
    normalize_obs=False,
  )
  made = source.source(
    data,
    batch_size=64,
    instructions=encode,
    normalize=action_tokens.normalizer(statistics.norm_stats(data)),
    chunk=2,
    window_rows=5000,
    evaluation=seed_source.seeds(held_out=SEEDS, held_out_batch=SEEDS),
  )
  (seeds,) = made.held_out()
  step = jax.jit(workflow.step)
  state, at = workflow.init(jax.random.key(0)), made.init(0)
  start = success(workflow, state, seeds)
  for i in range(steps):
    at, batch = made.next(at, {})
    state, _ = step(state, batch, jax.random.key(i))
  end = success(workflow, state, seeds)
  print(f'Success of {SEEDS} held-out episodes: {start:.0%}, then {end:.0%}.')
  assert start < 0.1 and end > 0.5


@pytest.mark.parametrize(
  ('data_set', 'low', 'is_refused'),
  [('raw', 0.0, True), ('raw', -1.0, False), ('openvla', 0.0, False)],
)
def test_a_gripper_of_the_opposite_sign_is_refused(
  folder, data_set, low, is_refused
):
  """LIBERO's own data open by −1, OpenVLA's version of them by 1."""
  model = str(folder / 'model')
  encode = functools.partial(instructions.openvla, checkpoint=model, length=24)
  env = push.push(image_size=32, instructions=encode)
  raw = {'q01': [-1.0, -1.0], 'q99': [1.0, 1.0]}
  bits = {'q01': [-1.0, 0.0], 'q99': [1.0, 1.0], 'mask': [True, False]}
  make = functools.partial(
    openvla_oft_env.pretrained,
    env._replace(action_low=(-1.0, low)),
    checkpoint=model,
    chunk=1,
    norm_stats={'raw': {'action': raw}, 'openvla': {'action': bits}},
    data_set=data_set,
    critic=False,
  )
  if is_refused:
    with pytest.raises(
      ValueError, match=r'−1 opens it, .* \(GRIPPER_OPENS in gin'
    ):
      make()
  else:
    make()


def success(workflow, state, seeds):
  info = workflow.evaluate(state, seeds, jax.random.key(1))
  return float(info['eval/success_once'].value()[''])


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    ([{'width': 3}, {}], 'timm_model_args is .*two objects of embed_dim'),
    ([{'embed_dim': -1}, {}], 'timm_model_args'),
  ],
)
def test_sizes_of_towers_that_have_no_meaning_are_refused(
  folder, tmp_path, args, message
):
  raw = weights.read_json(folder / 'model' / 'config.json')
  raw[openvla_settings.TOWER_ARGS] = args
  path = pathlib.Path(tmp_path) / 'config.json'
  path.write_text(json.dumps(raw))
  with pytest.raises(weights.CheckpointError, match=message):
    openvla_files.read(tmp_path)

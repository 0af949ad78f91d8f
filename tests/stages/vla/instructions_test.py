"""Instructions: published prompts as tokens, read by every policy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers
from tokenizers import (
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
  trainers,
)
import transformers

import stages
from stages import base, workflows
from stages.envs import demonstrations, push
from stages.language import tokens
from stages.models import transformer
from stages.models.vision import vit
from stages.vla import instructions, pictures
from stages.vla.openvla import (
  openvla,
  openvla_env,
  openvla_oft,
  openvla_oft_env,
)
from stages.vla.pi0 import pi0, pi0_policy

TASK = 'put the Spoon on the towel'
SIZE = 16
TABLE = (0.11, 0.11, 0.126)


@pytest.fixture(scope='module')
def llama(tmp_path_factory):
  """A tokenizer like Llama's: a space of its own, and a beginning."""
  folder = tmp_path_factory.mktemp('llama')
  made = tokenizers.Tokenizer(models.BPE(unk_token='<unk>'))
  made.pre_tokenizer = pre_tokenizers.Metaspace()
  made.decoder = decoders.Metaspace()
  texts = [instructions.openvla_text(TASK), f'{TASK}\n', *push.INSTRUCTIONS]
  special = ['<unk>', '<s>', '</s>']
  made.train_from_iterator(
    texts, trainers.BpeTrainer(special_tokens=special, show_progress=False)
  )
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=made, bos_token='<s>', unk_token='<unk>'
  ).save_pretrained(folder)
  return str(folder)


def gemma(folder, *, split_digits: bool):
  """A tokenizer like Gemma's, whose digits are tokens of their own."""
  made = tokenizers.Tokenizer(models.BPE(unk_token='<unk>'))
  made.normalizer = normalizers.Replace(' ', instructions.SPACE)
  parts = [pre_tokenizers.Split(instructions.SPACE, 'merged_with_next')]
  if split_digits:
    parts.append(pre_tokenizers.Digits(individual_digits=True))
  made.pre_tokenizer = pre_tokenizers.Sequence(parts)
  made.decoder = decoders.Replace(instructions.SPACE, ' ')
  rng = np.random.default_rng(0)
  texts = [
    instructions.pi05_text(task, rng.uniform(-1.1, 1.1, 8))
    for task in (TASK, *push.INSTRUCTIONS) * 20
  ]
  special = ['<pad>', '<unk>', '<bos>']
  made.train_from_iterator(
    texts, trainers.BpeTrainer(special_tokens=special, show_progress=False)
  )
  made.post_processor = processors.TemplateProcessing(
    single='<bos> $A', special_tokens=[('<bos>', special.index('<bos>'))]
  )
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=made,
    bos_token='<bos>',
    pad_token='<pad>',
    unk_token='<unk>',
  ).save_pretrained(folder)
  return str(folder)


@pytest.fixture(scope='module')
def encode(tmp_path_factory):
  """An encoder of the push world's instructions by a small tokenizer."""
  folder = tmp_path_factory.mktemp('small')
  texts = [instructions.openvla_text(task) for task in push.INSTRUCTIONS]
  tokens.train_tokenizer(folder, texts, 160)
  return functools.partial(
    instructions.openvla, checkpoint=str(folder), length=24
  )


def test_openvla_reads_the_published_prompt(llama):
  prompt = instructions.openvla([TASK, 'put'], checkpoint=llama)
  tokenizer = tokens.load_tokenizer(llama)
  assert prompt.token.shape == (2, 48) and prompt.token.dtype == np.int32
  row = prompt.token[0, : prompt.mask[0].sum()].tolist()
  assert row[0] == tokenizer.bos_token_id
  assert tokenizer.decode(row[1:]).strip() == (
    'In: What action should the robot take to put the spoon on the towel?\nOut:'
  )
  assert tokenizer.convert_ids_to_tokens(row)[-1] == instructions.SPACE
  # Padded on the right.
  assert (np.diff(prompt.mask, axis=1) <= 0).all()


def test_pi0_reads_the_task_and_a_new_line(llama):
  prompt = instructions.pi0([f' {TASK.replace(" ", "_")}'], checkpoint=llama)
  tokenizer = tokens.load_tokenizer(llama)
  row = prompt.token[0, : prompt.mask[0].sum()].tolist()
  assert row[0] == tokenizer.bos_token_id
  assert tokenizer.decode(row[1:]) == f'{TASK}\n'


def test_bytes_of_a_task_need_no_tokenizer():
  prompt = instructions.utf8([f' {TASK} ', 'π'], length=27)
  assert bytes(prompt.token[0, :26].tolist()).decode() == TASK
  assert prompt.token[1].tolist() == [0xCF, 0x80] + [0] * 25
  assert prompt.mask.sum(1).tolist() == [26, 2]
  with pytest.raises(ValueError, match='has 26 tokens.*24 columns'):
    instructions.utf8([TASK], length=24)


def test_pi05_reads_the_bins_of_its_state_also_when_compiled(tmp_path):
  checkpoint = gemma(tmp_path, split_digits=True)
  tokenizer = tokens.load_tokenizer(checkpoint)
  tasks = [TASK, *push.INSTRUCTIONS]
  table = instructions.state_tokens(checkpoint)
  prompt = instructions.pi05(tasks, checkpoint=checkpoint)
  state = np.random.default_rng(1).uniform(-1.2, 1.2, (3, 4)).astype('float32')
  state[0] = -1.0, 0.0, 1.0 - 2**-7, -1.0 - 1e-6  # At edges of bins.
  got = jax.jit(table.follow)(prompt, jnp.asarray(state))
  assert got.token.dtype == got.mask.dtype == np.int32
  for i, task in enumerate(tasks):
    text = instructions.pi05_text(task, state[i])
    want = tokenizer(text, add_special_tokens=False)['input_ids']
    row = np.asarray(got.token)[i][np.asarray(got.mask)[i] > 0].tolist()
    assert row == [tokenizer.bos_token_id, *want]
  assert ' -1;' in instructions.pi05_text(TASK, state[0])


def test_a_tokenizer_that_merges_digits_is_refused(tmp_path):
  checkpoint = gemma(tmp_path, split_digits=False)
  with pytest.raises(ValueError, match='give that of PaliGemma'):
    instructions.state_tokens(checkpoint)


def test_instructions_that_cannot_be_read_are_refused(llama):
  encode = functools.partial(instructions.openvla, checkpoint=llama)
  with pytest.raises(ValueError, match='Task 1 has no text'):
    encode([TASK, ' '])
  with pytest.raises(ValueError, match='tokens, and prompts have 5 columns'):
    encode([TASK], length=5)
  with pytest.raises(ValueError, match=r"has .'ж'., which the tokenizer"):
    encode(['put ж'])


def test_an_episode_has_the_instruction_of_its_goal(encode):
  seeds = jnp.arange(32, dtype=jnp.int32)
  env = push.push(image_size=64, instructions=encode)
  state, obs = env.init(seeds)
  want = encode(push.INSTRUCTIONS)
  index = np.asarray(state.task_state.instruction)
  assert {*index.tolist()} == {0, 1}
  np.testing.assert_array_equal(obs[base.PROMPT]['token'], want.token[index])
  np.testing.assert_array_equal(obs[base.PROMPT]['mask'], want.mask[index])
  # The discs have the colors of the words, but under puck and gripper.
  table = state.task_state
  colors = 255 * np.array([*push.DISCS.values()])
  seen = 0
  for b in range(32):
    for at, disc in (table.goal[b], index[b]), (table.other[b], 1 - index[b]):
      over = [table.puck[b] - at, table.gripper[b] - at]
      if min(map(np.linalg.norm, over)) < 2 * push.TOUCH or max(abs(at)) > 0.9:
        continue
      column, row = int(32 * (at[0] + 1)), int(32 * (1 - at[1]))
      pixel = np.asarray(obs['image']['table'][b, row, column])
      np.testing.assert_allclose(pixel, colors[disc], atol=1)
      seen += 1
  assert seen > 20


def test_equal_seeds_have_equal_goals_with_and_without_pictures(encode):
  seeds = jnp.arange(8, dtype=jnp.int32)
  shown, _ = push.push(image_size=8, instructions=encode).init(seeds)
  state, obs = push.push(instructions=encode).init(seeds)
  jax.tree.map(np.testing.assert_array_equal, shown, state)
  np.testing.assert_allclose(obs[:, 4:6], state.task_state.goal)


@pytest.mark.slow
def test_demonstrations_hold_the_instruction_of_each_step(encode):
  settings = {'horizon': 30, 'instructions': encode}
  data, succeeded = demonstrations.collect(
    push.push(image_size=8, **settings),
    push.controller,
    num_envs=8,
    noise_std=0.0,
    num_episodes=8,
    controller_env=push.push(**settings),
  )
  assert succeeded > 3
  rows = {tuple(x) for x in data.obs[base.PROMPT]['token'].tolist()}
  assert rows == {tuple(x) for x in encode(push.INSTRUCTIONS).token.tolist()}


def openvla_config(**tower):
  sizes = {'patch_size': 4, 'D': 16, 'L': 2, 'H': 2, 'F': 32} | tower
  tower = {'image_size': SIZE, 'init_stddev': 0.1} | sizes
  llama = {'V': 192, 'D': 32, 'L': 2, 'H': 2, 'K': 2, 'W': 16, 'F': 64}
  return openvla.Config(
    vit.Config(has_class=True, registers=1, layer_scale=True, **tower),
    vit.Config(activation='gelu', **tower),
    transformer.Config(
      qkv_bias=False, tie_embeddings=False, init_stddev=0.1, **llama
    ),
    padded=8,
    bins=8,
    pictures=pictures.Pictures(
      sizes=(SIZE, SIZE), means=(TABLE, TABLE), stds=((0.3,) * 3,) * 2
    ),
  )


OPENVLA = openvla_config()
OFT = openvla_oft.Config(OPENVLA, Z=1, A=2, O=2)


def make_pi0(env):
  sizes = {'L': 1, 'H': 2, 'K': 1, 'W': 8, 'F': 16, 'init_stddev': 0.3}
  config = pi0.Config(
    vit.Config(image_size=SIZE, patch_size=8, D=8, L=1, H=2, F=8),
    pi0.GEMMA(V=192, D=16, **sizes),
    pi0.GEMMA(V=1, D=12, **sizes),
    Z=1,
    A=2,
    O=2,
  )
  return pi0_policy.policy(env, config, critic_width=8)


POLICIES = {
  'openvla': functools.partial(openvla_env.policy, config=OPENVLA),
  'openvla_oft': functools.partial(
    openvla_oft_env.policy, config=OFT, state='state'
  ),
  'pi0': make_pi0,
}


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  [
    'openvla_oft',
    pytest.param('openvla', marks=pytest.mark.claims),
    pytest.param('pi0', marks=pytest.mark.claims),
  ],
)
def test_policies_read_the_words_and_nothing_of_their_padding(encode, name):
  seeds = jnp.arange(4, dtype=jnp.int32)
  evaluate = {}
  for length in 24, 30:
    env = push.push(
      image_size=SIZE, instructions=functools.partial(encode, length=length)
    )
    policy = POLICIES[name](env)
    state, obs = env.init(seeds)
    if not evaluate:
      params = policy.init(jax.random.key(0))
      keys = stages.keys(jax.random.key(1), seeds)
      action = jax.jit(policy.act)(params, obs, keys).action
      other = encode(push.INSTRUCTIONS[::-1])
      index = state.task_state.instruction
      changed = jnp.array([1, 1, 0, 0]) == 1
      words = {
        k: jnp.where(changed[:, None], x[index], obs[base.PROMPT][k])
        for k, x in other._asdict().items()
      }
      swapped = obs | {base.PROMPT: words}
    evaluate[length] = jax.jit(policy.evaluate)(params, obs, action)
    if length == 24:
      now = jax.jit(policy.evaluate)(params, swapped, action)
  for field in 'logp', 'value':
    short, long = (getattr(evaluate[x], field) for x in (24, 30))
    np.testing.assert_allclose(short, long, atol=1e-5)
  moved = np.abs(now.logp - evaluate[24].logp) > 1e-6
  np.testing.assert_array_equal(moved, changed)


@pytest.mark.parametrize('name', POLICIES)
def test_an_environment_without_words_is_refused(name):
  with pytest.raises(ValueError, match='no instruction .prompt/token'):
    POLICIES[name](push.push(image_size=SIZE))


@pytest.mark.slow
def test_a_clone_does_what_the_words_say(encode):
  """Eight scenes have both instructions, and the same picture and state.

  A clone that does not read them is right in half of the cases.
  """
  env = push.push(image_size=SIZE, instructions=encode)
  state, obs = env.init(jnp.arange(8, dtype=jnp.int32))
  table = state.task_state
  swapped = table._replace(
    goal=table.other, other=table.goal, instruction=1 - table.instruction
  )
  prompt = encode(push.INSTRUCTIONS)

  def seen(table):
    words = {
      k: jnp.asarray(x)[table.instruction] for k, x in prompt._asdict().items()
    }
    return obs | {base.PROMPT: words}

  def toward_goal(table):
    return jnp.clip((table.goal - table.gripper) / 0.3, -1.0, 1.0)

  both = [(seen(x), toward_goal(x)) for x in (table, swapped)]
  batch = base.Demonstration(
    *jax.tree.map(lambda *xs: jnp.concatenate(xs), *both)
  )
  workflow = workflows.behavior_cloning(
    env,
    functools.partial(POLICIES['openvla_oft'], critic=False),
    optax.adam(2e-3),
    normalize_obs=False,
  )
  step, now = jax.jit(workflow.step), workflow.init(jax.random.key(0))
  for i in range(100):
    now, _ = step(now, batch, jax.random.key(i))
  policy = POLICIES['openvla_oft'](env, critic=False)
  keys = stages.keys(jax.random.key(1), jnp.arange(16))
  x = policy.act(now.actor.params, batch.obs, keys, greedy=True)
  moved = policy.to_env_action(x.action)
  other = jnp.roll(batch.action, 8, axis=0)
  right = jnp.linalg.norm(moved - batch.action, axis=1)
  wrong = jnp.linalg.norm(moved - other, axis=1)
  # Both discs may lie in one direction.
  differ = jnp.linalg.norm(batch.action - other, axis=1) > 0.3
  assert differ.sum() >= 10
  assert ((right < wrong) | ~differ).all()

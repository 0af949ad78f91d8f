"""Training on completions of your own, by the commands of the docs."""

import contextlib
import json
import pathlib
import re
import shlex

import pytest

import front_door
import own_data

ROOT = pathlib.Path(__file__).parents[4]
SMALL = (
  '--gin.STEPS=4',
  '--gin.BATCH=8',
  '--gin.PROMPT=64',
  '--gin.LENGTH=16',
  '--gin.LEARNING_RATE=1e-2',
  '--gin.train.train.plan=None',
  '--gin.optimizers.adamw.warmup_steps=1',
)


def documented() -> list[list[str]]:
  """The arguments of the commands: SFT, then DPO from its result."""
  text = (ROOT / 'docs/algorithms.md').read_text()
  block = re.search(r'```sh\n(python [^`]*sft\.gin.*?)```', text, re.S)[1]
  lines = block.replace('\\\n', ' ').splitlines()
  return [shlex.split(line)[3:] for line in lines]


def run(folder, args, model) -> list[dict]:
  """The metrics of a run."""
  args = [
    arg.replace('gin_configs/', f'{ROOT}/gin_configs/').replace(
      '/models/Qwen2.5-1.5B', model
    )
    for arg in args
  ]
  with contextlib.chdir(folder):
    done = front_door.run(*args, *SMALL)
  assert done.returncode == 0, done.stderr
  workdir = folder / args[args.index('--workdir') + 1]
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [x for x in map(json.loads, lines) if 'eval/loss' in x]


@pytest.mark.slow
def test_sft_and_then_dpo_train_on_files(tmp_path):
  model = own_data.model(tmp_path)
  for name in 'train', 'test', 'pairs', 'test_pairs':
    own_data.write_replies(tmp_path / f'{name}.jsonl', range(20))
  sft, dpo = documented()
  before, after = run(tmp_path, sft, model)
  assert after['eval/loss'] < before['eval/loss'] - 0.3
  assert (tmp_path / 'runs/sft/model/model.safetensors').exists()
  before, after = run(tmp_path, dpo, model)
  # The exported model is the reference, too.
  assert before['eval/loss'] == pytest.approx(0.6931, abs=1e-4)
  assert before['eval/reward_margin'] == 0
  assert after['eval/accuracy'] == 1 and after['eval/reward_margin'] > 0

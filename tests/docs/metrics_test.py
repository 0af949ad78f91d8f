"""The page on metrics lists every metric that the code logs."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
NAME = re.compile(r"'((?:train|rollout|env|eval|throughput|wait)/\w+)'")
STATISTIC = re.compile(r'_(mean|std|max|p50|p95)$')
# Rows and frames, which go to files of their own.
NOT_NUMBERS = {'eval/samples', 'rollout/samples', 'eval/video'}


def logged():
  """Names in the code, without the statistic that some of them end in."""
  files = [*ROOT.glob('stages/**/*.py'), *ROOT.glob('rlinf_jax/**/*.py')]
  names = {x for file in files for x in NAME.findall(file.read_text())}
  return {STATISTIC.sub('', x) for x in names - NOT_NUMBERS}


def test_every_metric_is_explained():
  names = logged()
  assert len(names) > 50
  page = (ROOT / 'docs/run_folder.md').read_text()
  words = set(re.findall(r'`([\w/]+)`', page))
  words |= {STATISTIC.sub('', x) for x in words}
  missing = {x for x in names if not {x, x.split('/')[1]} & words}
  assert not missing, f'Not in docs/run_folder.md: {sorted(missing)}'

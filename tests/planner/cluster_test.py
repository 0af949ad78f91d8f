"""Clusters are plain data, and every file of them can be read."""

import json
import math
import pathlib
import re

import pytest

from planner import cluster
from rlinf_jax.config import config
from rlinf_jax.planning.compiled import topology

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(ROOT.glob('gin_configs/clusters/*.gin'))
DEVICES = {
  'cpu': 2,
  'h100': 8,
  'h100x64': 64,
  'h100x128': 128,
  'h100x256': 256,
  'h100x1024': 1024,
  'h200': 8,
  'tpu_v5e': 8,
  'tpu_v5p': 64,
  'tpu_v5p_8': 8,
  'tpu_v5p_256': 256,
  'tpu_v6e': 8,
}


def read(name) -> cluster.Cluster:
  config.parse([f'gin_configs/clusters/{name}.gin'], [], 'runs/x')
  loaded = config.call(cluster.Cluster)
  config.refuse_unused()
  return loaded


def test_every_cluster_file_is_tested():
  assert {path.stem for path in FILES} == set(DEVICES)


@pytest.mark.parametrize('name', DEVICES)
def test_a_file_reads_as_a_cluster_without_unused_bindings(name):
  toy = read(name)
  assert toy.num_devices == DEVICES[name]
  assert topology.parse(toy.topology).num_devices == DEVICES[name]
  assert cluster.Cluster.from_json(toy.to_json()) == toy


def test_figures_are_those_of_data_sheets():
  h100, h200 = read('h100'), read('h200')
  assert h100.device.peak('bfloat16') == 989e12
  assert h100.device.memory_bandwidth == 3.35e12
  assert h200.device.memory_bandwidth == 4.8e12
  assert h200.device.peak('bfloat16') == h100.device.peak('bfloat16')
  assert read('h100x1024').device == h100.device


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_every_number_has_a_source(path):
  """In a comment on its line, or above it or what it is part of."""
  lines = path.read_text().splitlines()
  for i, line in enumerate(lines):
    number = re.search(r' = .*\d', line) and 'name' not in line
    if number and 'num_devices = ' not in line:
      above = next(
        x for x in reversed(lines[:i]) if not x.strip().startswith("'")
      )
      assert '#' in line or '#' in above, f'{path.name}:{i + 1}: {line}'


def test_slowdown_is_linear_up_to_the_shared_cores_and_proportional_beyond():
  toy = small(shared_cores=2, contention=1.5)
  assert [toy.slowdown(busy) for busy in (1, 2, 3, 4)] == [1, 1.5, 2.25, 3]
  assert toy.slowdown(2, 1.1) == 1.1
  four = small(shared_cores=4, contention=1.6)
  assert [four.slowdown(n) for n in (1, 2, 4)] == pytest.approx([1, 1.2, 1.6])
  assert [small(shared_cores=1).slowdown(n) for n in (1, 4)] == [1, 4]
  assert small().slowdown(4) == 1


def test_contention_below_one_is_refused():
  with pytest.raises(ValueError, match='give 1 or more of each'):
    small(shared_cores=2, contention=0.5)


def small(**changes) -> cluster.Cluster:
  device = cluster.Device('d', {'float32': 1e9}, 1e8, 1e9, 1e8, 1e7)
  near, far = cluster.Link(1e-6, 1e9), cluster.Link(1e-5, 1e8)
  return cluster.Cluster(
    **({'device': device, 'num_devices': 4, 'devices_per_node': 2} | changes),
    intra_node=near,
    inter_node=far,
  )


def test_devices_of_different_nodes_use_the_inter_node_link():
  toy = small()
  assert toy.link((2, 3)) == toy.intra_node
  assert toy.link((1, 2)) == toy.inter_node
  assert toy.intra_node.seconds(1e6, 3) == pytest.approx(1e-3 + 3e-6)


def test_capacity_leaves_a_reserve():
  assert small().capacity == pytest.approx(0.9e9)


def test_the_peak_of_an_unknown_type_is_the_lowest():
  device = cluster.Device('d', {'a': 2.0, 'b': 1.0}, 1, 1, 1, 1)
  assert device.peak('c') == 1.0


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'num_devices': 5}, 'no whole number of nodes'),
    ({'num_devices': 0}, 'at least one'),
  ],
)
def test_invalid_numbers_of_devices_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    small(**changes)


def test_a_device_without_bandwidth_is_refused():
  with pytest.raises(ValueError, match=r"\['memory_bandwidth'\] of \[0\]"):
    cluster.Device('d', {'float32': 1e9}, 1e8, 1e9, 0, 1e7)


@pytest.mark.parametrize('latency, bandwidth', [(0, 0), (-1, 1), (0, math.nan)])
def test_a_link_without_bandwidth_or_of_negative_latency_is_refused(
  latency, bandwidth
):
  with pytest.raises(ValueError, match=f'A link .* of {latency} .*{bandwidth}'):
    cluster.Link(latency, bandwidth)


@pytest.mark.parametrize('part', ['Cluster', *cluster.PARTS])
def test_json_that_is_no_dictionary_is_refused(part):
  plain = [1] if part == 'Cluster' else json.loads(small().to_json())
  if part != 'Cluster':
    plain[part] = [1]
  with pytest.raises(ValueError, match=r'A \w+ is \[1\]: give a dictionary'):
    cluster.Cluster.from_json(json.dumps(plain))


def test_json_with_unknown_or_missing_fields_is_refused():
  plain = json.loads(small().to_json())
  with pytest.raises(ValueError, match=r"Cluster has no \['color'\]"):
    cluster.Cluster.from_json(json.dumps(plain | {'color': 1}))
  del plain['device']['memory_bytes']
  with pytest.raises(ValueError, match=r"Device needs \['memory_bytes'\]"):
    cluster.Cluster.from_json(json.dumps(plain))

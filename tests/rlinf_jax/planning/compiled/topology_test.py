import pytest

from planner import cluster as cluster_lib
from rlinf_jax.planning.compiled import topology


def test_names():
  there = topology.parse('h100:1x2x8')
  assert (there.kind, there.shape, there.num_devices) == ('h100', (1, 2, 8), 16)
  assert str(there) == 'h100:1x2x8'


@pytest.mark.parametrize(
  'name', ['v5p', 'v5p:4x4', 'v9:2x2', 'cpu:0', 'h100:8', 'cpu:2x']
)
def test_other_names_are_refused(name):
  with pytest.raises(ValueError, match='is not a topology: name a kind'):
    topology.parse(name)


def test_a_missing_package_is_named(monkeypatch):
  monkeypatch.setattr(topology.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ImportError, match=r'package libtpu .*rlinf-jax\[aot\]'):
    topology.prepare(topology.parse('v5e:2x2'))
  with pytest.raises(ImportError, match='package jax-cuda12-pjrt is needed'):
    topology.prepare(topology.parse('h200:1x1x8'))


def test_a_cluster_names_as_many_devices_as_it_has():
  device = cluster_lib.Device('d', {'float32': 1e9}, 1e8, 1e9, 1e8, 1e7)
  link = cluster_lib.Link(1e-6, 1e9)

  def cluster(name):
    return cluster_lib.Cluster(device, 8, 8, link, link, topology=name)

  assert topology.of_cluster(cluster('v6e:2x4')).num_devices == 8
  with pytest.raises(ValueError, match='names no topology'):
    topology.of_cluster(cluster(None))
  with pytest.raises(ValueError, match='has 4 devices, and the cluster 8'):
    topology.of_cluster(cluster('v6e:2x2'))


def test_gpus_differ_in_memory():
  h100, h200 = map(topology.gpu_target, ('h100', 'h200'))
  assert 'device_memory_size: 84942979072' in h100
  assert 'device_memory_size: 151397597184' in h200
  assert '$' not in h100 + h200

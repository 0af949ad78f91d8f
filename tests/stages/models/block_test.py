"""Parameters of a layer have the shapes that its sizes say."""

import dataclasses

from flax import errors
import jax
import jax.numpy as jnp
import pytest

from stages.models import transformer
import tiny


def test_parameters_of_another_shape_are_refused():
  config = tiny.CONFIG
  wider = dataclasses.replace(config, F=2 * config.F)
  params = jax.eval_shape(
    lambda key: transformer.init_params(config, key), jax.random.key(0)
  )
  tokens = jnp.ones((1, 3), int), jnp.ones((1, 3), bool)

  def logits(config):
    model = transformer.Transformer(config)
    return jax.eval_shape(model.apply, {'params': params}, *tokens)

  assert logits(config).shape == (1, 3, config.V)
  with pytest.raises(errors.ScopeParamShapeError, match='gate_DF.*128.*64'):
    logits(wider)

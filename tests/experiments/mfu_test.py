"""Needed arithmetic, against a count by hand."""

from experiments.compiled import case, mfu

CONFIG = {
  'hidden_size': 8,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 16,
  'num_hidden_layers': 3,
  'vocab_size': 32,
}


def test_a_gradient_needs_six_operations_for_each_weight_and_token():
  one = case.Case('', '', '', (), groups=2, group_size=3, prompt=4, length=5)
  # Queries and outputs of 8 x 8, keys and values of 8 x 4, three of 8 x 16.
  layer = 2 * 64 + 2 * 32 + 3 * 128
  tokens, completions = 2 * (4 + 3 * 5), 2 * 3 * 5
  # Tokens of prompts see 1 to 4 tokens, those of completions 5 to 9.
  pairs = 2 * ((1 + 2 + 3 + 4) + 3 * (5 + 6 + 7 + 8 + 9))
  wanted = 6 * (3 * layer * tokens + 8 * 32 * completions) + 12 * 3 * 8 * pairs
  assert mfu.needed_flops(one, CONFIG) == wanted

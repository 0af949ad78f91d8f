from rlinf_jax.report.html import evaluation_table


def test_scores_of_more_samples_come_after_those_of_fewer():
  names = ('maj_at_16', 'pass_at_16', 'accuracy', 'pass_at_2')
  results = {'all': {name: {'value': 0.5} for name in names}}
  titles = evaluation_table.rows(results)[0]
  assert titles[2:] == ['accuracy', 'pass@2', 'pass@16', 'maj@16']

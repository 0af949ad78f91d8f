"""Language models as policies: tokens, generation and evaluation."""

"""Places of a plan: how values lie there, and how stages run on devices."""

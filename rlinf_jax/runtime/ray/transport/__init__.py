"""Values between the processes of a plan, and who may receive them."""

"""When and where: flows, plans, and the programs that they become."""

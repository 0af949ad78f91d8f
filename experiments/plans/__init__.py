"""Plans of the recipes with published hyper-parameters."""

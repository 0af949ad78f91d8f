"""GRPO on word problems, from a real pretrained model of 135M parameters."""

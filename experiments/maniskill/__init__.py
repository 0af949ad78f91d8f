"""ManiSkill: what was learned there, and a script that demonstrates a task."""

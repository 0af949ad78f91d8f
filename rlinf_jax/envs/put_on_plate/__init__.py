"""ManiSkill's Panda puts one of many objects on a plate, as it is told to."""

"""Models the time of decoding, whose rows end one by one."""

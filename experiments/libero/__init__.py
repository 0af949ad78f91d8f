"""Somebody who can do a task of LIBERO, filmed."""

"""Continuous batching on the device mesh: `engine` (prefill, insert, generate), `scheduler` (slots), `sampling`."""

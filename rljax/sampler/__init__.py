"""Continuous batching on the device mesh: `engine` (prefill, insert, generate), `scheduler` (slots), `sampling`;
`jetstream` serves the engine over gRPC, and nothing else imports it."""

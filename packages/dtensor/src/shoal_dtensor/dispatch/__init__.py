"""One operator call: its key, the cached decision, the local call, and the result."""

"""Tasks in, accepted groups out: dispatch, episodes, acceptance, the durable buffer, evaluation and audit."""

"""What a cache will take (`plan`, `model_shape`, `memory`), and what a storage format costs (`fidelity`)."""

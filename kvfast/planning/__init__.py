"""The memory that a cache will take (`plan`, `model_shape`, `memory`), and the accuracy of a storage format (`fidelity`)."""

"""Programs that use kvfast.

- llama: the example runtime
- evaluation: what a format costs a model
- cli: the commands

The modules `kvfast.llama` and `kvfast.evaluation` have what users import.
"""

"""Programs that use kvfast: an example runtime, the evaluation of formats, and the commands.

    llama, evaluation -> cli

The modules `kvfast.llama` and `kvfast.evaluation` have what users import.
"""

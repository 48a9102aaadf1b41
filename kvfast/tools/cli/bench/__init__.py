"""How fast kvfast is here, as fractions of what the machine can do: `python -m kvfast bench` and `pytest bench`.

- cases, real_rows: shapes of models, and what is measured; rows of a model on a text
- measure: rounds of calls, each with a measurement of the machine
- report, scaling, stream, json_file: tables and plots, time over threads, in cache and from memory, JSON
- command: the command
"""

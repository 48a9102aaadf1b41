"""How fast kvfast is here, as fractions of what the machine can do: ``python -m kvfast bench`` and ``pytest bench``.

cases      shapes of models; what is measured, ready to be called
measure    rounds of calls, each with a measurement of the machine
report     table, JSON and plot (extras ``bench`` and ``plot``)
scaling    the table and the plot of time over threads
command    the command
"""

"""Measuring instruments: each takes a `TrainStep` and reads one thing of it, with nothing else in the way.

`device` the accelerator layer, `steps` the step itself and the state it starts from, `timing` pairs of step times,
`memory` peaks, `flops` exact counts, `parity` bit-for-bit comparison, `environment` what it all ran on.
"""

"""Checks of a training run, one in each file. `regard.doctor.tables` lists them."""

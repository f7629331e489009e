"""Engines: who computes what a run says, and how a run is written for another one."""

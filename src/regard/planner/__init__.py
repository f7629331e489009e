"""Plan a training run: model, batches, learning rate and schedule for a text, a device and a time."""

from regard.planner.candidates import candidates
from regard.planner.plan import Chosen, Given, adamw, plan
from regard.planner.speed import Hardware, hardware, nominal

__all__ = ["Chosen", "Given", "Hardware", "adamw", "candidates", "hardware", "nominal", "plan"]

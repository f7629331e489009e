"""Plan a training run: choose model, batch size, learning rate and schedule for a text, a device and a time limit."""

from regard.planner.candidates import candidates
from regard.planner.plan import ModelChoice, Plan, adamw, plan, suggested_rate
from regard.planner.speed import Hardware, hardware, nominal

__all__ = ["Hardware", "ModelChoice", "Plan", "adamw", "candidates", "hardware", "nominal", "plan", "suggested_rate"]

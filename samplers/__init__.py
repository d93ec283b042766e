"""Samplers as pure functions on tensors: kernels, time grids, noise windows, noise, batching. Needs torch only."""

from samplers.kernels import dance_sde, flow_sde, ode
from samplers.schedules import all_but_last, all_steps, dynamic, flow_match_euler, linear, shifted, window

KERNELS = {"flow_sde": flow_sde, "dance_sde": dance_sde, "ode": ode}
GRIDS = {"linear": linear, "shifted": shifted, "dynamic": dynamic, "flow_match_euler": flow_match_euler}
WINDOWS = {"all": all_steps, "all_but_last": all_but_last, "window": window}

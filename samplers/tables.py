"""Names kernels, solvers, time grids and noise windows as configurations do."""

from samplers import kernels, schedules, solvers, windows

KERNELS = {
    name: getattr(kernels, name)
    for name in (
        "flow_sde",
        "dance_sde",
        "wan_sde",
        "cps",
        "memoryless",
        "consistency",
        "flow_ddim",
        "ddim",
        "ode",
    )
}
SOLVERS = {"ddim": solvers.ddim, "dpm": solvers.dpm}
GRIDS = {
    name: getattr(schedules, name) for name in ("linear", "shifted", "dynamic", "flow_match_euler")
}
WINDOWS = {
    "all": windows.all_steps,
    "all_but_last": windows.all_but_last,
    "window": windows.window,
    "random_window": windows.random_window,
    "random_steps": windows.random_steps,
    "progressive": windows.progressive,
    "decay": windows.decay,
    "exp_decay": windows.exp_decay,
}

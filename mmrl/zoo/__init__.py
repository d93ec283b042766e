"""What a run may use and a reader may ignore: papers, models, curricula and stages, each behind a
registry of the kernel that loads it by name."""

"""Records a run and warns when it goes wrong."""

"""Go on with a run that was stopped: what makes it the same run, its folder, the checkpoint of its search."""

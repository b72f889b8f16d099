"""What `learn_scales` is made of: the checks of its arguments, and the objective that it minimises."""

"""Parts of `learn_scales`: the checks of its arguments, and the objective that it minimises."""

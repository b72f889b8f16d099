"""
Learning tasks without forgetting
=================================

Five tasks of two digits each, one after the other. A network that is simply trained on forgets; a structured learner
gives every task neurons of its own.
"""

import matplotlib.pyplot as plt
import torch

import structured_ensembles as se

torch.manual_seed(0)
tasks = se.continual.split_tasks(se.load_data("digits"), tasks=5)
print(*tasks, sep="\n")

# %%
# ``run_sequence`` learns the tasks in their order. After each, it measures the accuracy on all tasks so far.

matrices = {}
for name, kind in (("naive", se.continual.NaiveLearner), ("structured", se.continual.StructuredLearner)):
    learner = kind(se.zoo.lenet5_backbone(), epochs=8, rate=0.01, quiet=True)
    matrices[name] = se.continual.run_sequence(learner, tasks)
    print(f"{name}: accuracy {matrices[name].final_accuracy:.1%}, forgetting {matrices[name].forgetting:.1%}")

# %%
# A row for each task learned, a column for each task tested. The columns of the structured learner do not change from
# top to bottom: what a task owns is never trained again.

figure, axes = plt.subplots(1, 2, figsize=(8.5, 4), layout="constrained")
for axis, (name, matrix) in zip(axes, matrices.items(), strict=True):
    values = matrix.values.numpy()
    drawn = axis.imshow(values, cmap="Blues", vmin=0.4, vmax=1)
    for row in range(len(tasks)):
        for column in range(row + 1):
            value = float(values[row, column])
            axis.text(column, row, f"{value:.0%}", ha="center", va="center", color="white" if value > 0.75 else "black")
    axis.set(title=name, xlabel="tested on task", ylabel="after learning task", xticks=range(5), yticks=range(5))
figure.colorbar(drawn, ax=axes, label="accuracy", shrink=0.8)
plt.show()

# %%
# Who owns how many neurons.

print(learner.memory())

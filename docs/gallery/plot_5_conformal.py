"""
Sets that hold the truth nine times out of ten
==============================================

A conformal set names the classes that may be right. It is small where the ensemble is sure, and large where it is not.
"""

import matplotlib.pyplot as plt
import torch

import structured_ensembles as se

torch.manual_seed(0)
digits = se.load_data("digits")


def add_noise(images: torch.Tensor) -> torch.Tensor:
    return ((images.int() + torch.randint(0, 256, images.shape)) / 2).to(torch.uint8)


x, y = add_noise(digits.train.inputs), digits.train.targets
x_test, y_test = add_noise(digits.test.inputs), digits.test.targets

# %%
# The promise is exact for samples that nothing else was chosen by. So a third of the samples is set aside before
# training, beyond the validation split that has chosen the best epoch and the temperature.

aside = torch.arange(len(y)) % 3 == 0
data = se.Data.from_arrays(x[~aside], y[~aside])
ensemble = se.structured_ensemble(
    se.zoo.mlp(64), data, members=4, memory=1.0, selection="random", recipe=se.Recipe.named("modern", epochs=20)
)

# %%
# Coverage is measured on the test split, against what was asked for.

asked = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99]
covered, sizes = [], []
for coverage in asked:
    ensemble.conformal((x[aside], y[aside]), coverage=coverage)
    sets = ensemble.predict_set(x_test)
    covered.append(sets[torch.arange(len(y_test)), y_test].float().mean().item())
    sizes.append(sets.sum(1).float().mean().item())

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
left.plot([0.5, 1], [0.5, 1], color="0.6", linestyle=":")
left.plot(asked, covered, "o-")
left.set(xlabel="coverage asked for", ylabel="coverage on the test split")
right.plot(asked, sizes, "o-", color="tab:orange")
right.set(xlabel="coverage asked for", ylabel="classes in a set, on average", ylim=(0, None))
plt.show()

# %%
# Some samples with their sets at 95 %.

ensemble.conformal((x[aside], y[aside]), coverage=0.95)
sets = ensemble.predict_set(x_test)
order = sets.sum(1).argsort()
figure, axes = plt.subplots(2, 4, figsize=(7, 4), layout="constrained")
for axis, index in zip(axes.flat, order[torch.linspace(0, len(order) - 1, 8).long()], strict=True):
    axis.imshow(x_test[index, 0].numpy(), cmap="gray_r")
    names = ", ".join(str(label) for label in sets[index].nonzero().flatten().tolist())
    axis.set(title=f"{{{names}}}", xlabel=f"true: {y_test[index]}", xticks=[], yticks=[])
plt.show()

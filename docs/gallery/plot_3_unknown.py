"""
Knowing what it does not know
=============================

An ensemble trained on digits sees digits that are turned, and pieces of photographs. Its entropy tells the photographs
apart from digits, and about half of the turned digits.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_image

import structured_ensembles as se

torch.manual_seed(0)
data = se.load_data("digits")
model = se.zoo.mlp(64)
ensemble = se.structured_ensemble(
    model, data, members=4, prune=0.5, selection="random", recipe=se.Recipe.named("modern", epochs=20)
)

# %%
# Two kinds of images that are not what it was trained on: the test digits turned by a quarter, and pieces of 8×8
# pixels from a photograph that ships with scikit-learn.

digits = data.test.inputs
turned = digits.rot90(dims=(2, 3))
photograph = torch.from_numpy(load_sample_image("china.jpg").mean(2)).to(torch.uint8)
pieces = photograph[:424, :640].unfold(0, 8, 8).unfold(1, 8, 8).reshape(-1, 1, 8, 8)[::11]
images = {"digits": digits, "turned digits": turned, "pieces of a photograph": pieces}

# %%
# The line is the threshold that training has fitted on the validation split: it keeps 95 % of the right predictions.

figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
edges = torch.linspace(0, 2.4, 25).tolist()
for name, x in images.items():
    entropy = ensemble.uncertainty(x).entropy
    axis.hist(entropy.clamp(max=2.39).numpy(), bins=edges, density=True, histtype="step", linewidth=2, label=name)
    print(f"{name:24} kept: {ensemble.keep(x).float().mean():.0%}")
axis.axvline(ensemble.threshold, color="0.4", linestyle="--", label="discarded to the right")
axis.set(xlabel="entropy of the prediction (nats)", ylabel="density")
axis.legend()
plt.show()

# %%
# The images of each kind that it doubts least and most, with the class it would name. A turned digit may look like
# another one: of that it is sure, and wrong.

figure, axes = plt.subplots(len(images), 6, figsize=(6.5, 4), layout="constrained")
for row, (name, x) in zip(axes, images.items(), strict=True):
    order = ensemble.uncertainty(x).entropy.argsort()
    for axis, index in zip(row, [*order[:3], *order[-3:]], strict=True):
        axis.imshow(x[index, 0].numpy(), cmap="gray_r")
        probability, label = ensemble.predict_proba(x[index : index + 1])[0].max(0)
        axis.set(title=f"{label}: {probability:.0%}", xticks=[], yticks=[])
    row[0].set_ylabel(name.replace(" ", "\n", 1))
plt.show()

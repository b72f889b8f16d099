"""
What the members keep
=====================

The walk on handwritten digits, step by step, up to a map of the neurons that each of three members keeps.
"""

import matplotlib.pyplot as plt
import torch

import structured_ensembles as se

torch.manual_seed(0)
data = se.load_data("digits")
model = se.zoo.lenet5(num_classes=10, in_channels=1)

# %%
# ``trace`` follows the network and finds the groups of channels that can be removed together.

graph = se.trace(model, data.example())
print(graph)

# %%
# The search learns scaling vectors while the weights are frozen; the gradient with respect to them says how much
# every neuron matters to every member; each member keeps the better half of each layer.

scales = se.learn_scales(model, graph, data, members=3, epochs=5)
scores = se.saliency(model, graph, scales, data)
subnets = se.select(graph, scores, prune=0.5)

# %%
# A row for each member, a column for each neuron. Two members share about half of what they keep, as
# chance would have it.

figure, axes = plt.subplots(len(graph.prunable), 1, figsize=(7, 4.5), layout="constrained")
for axis, (name, size) in zip(axes, graph.prunable.items(), strict=True):
    kept = torch.zeros(len(subnets), size)
    for row, subnet in zip(kept, subnets, strict=True):
        row[list(subnet.kept[name])] = 1
    axis.imshow(kept.numpy(), cmap="Blues", vmin=-0.1, vmax=1.2, aspect="auto", interpolation="nearest")
    axis.set(title=f"{name}: {size} neurons", yticks=range(len(subnets)), ylabel="member", xticks=[])
plt.show()

# %%
# ``extract`` makes an ordinary, smaller network of each subnet.

members = [se.extract(model, graph, subnet) for subnet in subnets]
full = sum(parameter.numel() for parameter in model.parameters())
print([f"{sum(parameter.numel() for parameter in member.parameters()) / full:.0%}" for member in members])

"""
A regression with intervals
===========================

How far has diabetes progressed after a year? Each patient gets a distribution, and an interval that holds the target
nine times out of ten.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

import structured_ensembles as se

torch.manual_seed(0)
features, target = load_diabetes(return_X_y=True)
x, x_test, y, y_test = train_test_split(features, target, test_size=0.3, random_state=0)

# %%
# The network ends in two outputs, a mean and a variance, and ``gaussian_nll`` trains both. Targets stay in their units.

data = se.Data.from_arrays(x, y, test=(x_test, y_test), validation=0.25)
model = se.zoo.mlp(10, 2, hidden=(64, 64))
recipe = se.Recipe.named("regression", epochs=40)
ensemble = se.structured_ensemble(model, data, members=5, prune=0.5, loss=se.gaussian_nll, recipe=recipe)

low, high = ensemble.predict_interval(x_test)
inside = (low <= torch.tensor(y_test)) & (torch.tensor(y_test) <= high)
print(f"targets within their intervals: {inside.float().mean():.0%}")

# %%
# Patients in the order of their predictions. Intervals are wider where the ensemble expects more noise or its members
# differ.

mean = ensemble.predict(x_test).numpy()
order = mean.argsort()
figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
axis.fill_between(range(len(order)), low.numpy()[order], high.numpy()[order], alpha=0.25, label="90 % interval")
axis.plot(mean[order], label="prediction")
hit = inside.numpy()[order]
places = torch.arange(len(order)).numpy()
axis.plot(places[hit], y_test[order][hit], ".", color="0.3", label="target")
axis.plot(places[~hit], y_test[order][~hit], "x", color="tab:red", label="target outside")
axis.set(xlabel="patient, by prediction", ylabel="progression")
axis.legend(ncols=2)
plt.show()

# %%
# Where the deviation comes from: noise that no member can explain, and what the members differ in.

distribution = ensemble.distribution(x_test)
figure, axis = plt.subplots(figsize=(5, 4), layout="constrained")
axis.scatter(distribution.aleatoric.numpy(), distribution.epistemic.numpy(), s=12)
axis.set(xlabel="aleatoric deviation", ylabel="epistemic deviation", xlim=(0, None), ylim=(0, None))
plt.show()

"""
Calibration before and after temperature
========================================

One number, fitted on held-out samples, makes the probabilities of an ensemble mean what they say.
"""

import matplotlib.pyplot as plt
import torch

import structured_ensembles as se

# %%
# Digits are easy, and a network that is always right needs no calibration. So we take few of them, blurred by noise,
# and train for so long that the members are too sure of themselves.

torch.manual_seed(0)
digits = se.load_data("digits")


def blur(images: torch.Tensor) -> torch.Tensor:
    noise = torch.randint(0, 200, images.shape, generator=torch.Generator().manual_seed(0))
    return ((images.int() + noise) / 2).to(torch.uint8)


few = slice(0, 500)
data = se.Data.from_arrays(
    blur(digits.train.inputs[few]),
    digits.train.targets[few],
    validation=0.3,
    test=(blur(digits.test.inputs), digits.test.targets),
)
recipe = se.Recipe.named("modern", epochs=60, weight_decay=0.0, keep="last")
ensemble = se.structured_ensemble(se.zoo.mlp(64), data, members=3, memory=1.0, recipe=recipe)
print(f"temperature: {ensemble.temperature:.2f}")

# %%
# Of the samples that got a probability of 70 to 80 %, about three in four should be right. On the diagonal they are.

figure, axis = plt.subplots(figsize=(5, 4.5), layout="constrained")
axis.plot([0, 1], [0, 1], color="0.6", linestyle=":", label="perfect")
x, y = data.test.inputs, data.test.targets
for name, temperature in (("before temperature", 1.0), ("after temperature", None)):
    confidence, labels = ensemble.predict_proba(x, temperature=temperature).max(1)
    right = (labels == y).float()
    bins = (confidence * 8).long().clamp(max=7)
    filled = [number for number in range(8) if (bins == number).sum() > 3]
    axis.plot(
        [confidence[bins == number].mean().item() for number in filled],
        [right[bins == number].mean().item() for number in filled],
        marker="o",
        label=name,
    )
axis.set(xlabel="confidence", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1))
axis.legend()
plt.show()

# %%
# ``evaluate`` has the errors as numbers.

figures = se.evaluate(ensemble, data)
for name in ("cls/accuracy", "cal/nll", "cal/nll_t", "cal/ece15", "cal/ece15_t"):
    print(f"{name:14} {figures[name]:.3f}")

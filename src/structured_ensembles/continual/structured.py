"""StructuredLearner (Section 3.3 of the paper): every task takes some free neurons and reuses those of the past.

A task's neurons are selected as those of an ensemble's member: scaling vectors on the frozen network, saliency, select.
It then trains on the subnetwork that its mask keeps, where past neurons are frozen.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Literal, Unpack, get_args

from torch import nn

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.common.checks import check_choice, check_share, check_whole
from structured_ensembles.continual.fitting import fold_seed
from structured_ensembles.continual.freezing import freeze
from structured_ensembles.continual.heads import TaskNetwork
from structured_ensembles.continual.learner import Common
from structured_ensembles.continual.owning import NONE_FREE, OwningLearner
from structured_ensembles.data import Data
from structured_ensembles.saliency import Scores, saliency
from structured_ensembles.scaling import Initial, Placement
from structured_ensembles.search import learn_scales
from structured_ensembles.selection import Scope, Selection, select

Extraction = Literal["hard", "soft"]
Neurons = dict[str, tuple[int, ...]]
SELECTIONS = ("learned", "random", "magnitude")  # "mirrored" shares neurons out among members, but a task is one


class StructuredLearner(OwningLearner):
    """Learner with one backbone, and one mask and one head per task, which never forgets.

    prune: the share of neurons that a task leaves to others: of n it takes n - ⌈prune·(n-1)⌉.
    scope: rank the neurons of each "layer", or of the whole "network".
    extraction: "hard" ranks the free neurons only; "soft" ranks all, and the task takes the free ones among the chosen.
    search_epochs, initial, placement: how long the scaling vectors are trained, how they are drawn, what they scale.
    selection: "learned", or a control: "random", "magnitude".
    tasks: instead of `prune`, the number of tasks to come: each takes an equal share of every layer's neurons, give or
        take one, and the last one those that are left. With `prune` alone a task takes a share of what is left, so that
        later tasks get fewer. It needs scope="layer" and extraction="hard".
    seal: when a task is done, cut the connections from neurons outside its mask into its own.
    The other arguments are those of `Learner`.
    """

    method = "structured"

    def __init__(
        self,
        backbone: nn.Module,
        prune: float = 0.5,
        scope: Scope = "layer",
        extraction: Extraction = "hard",
        *,
        search_epochs: int = 10,
        initial: Initial = "N(0,1)",
        placement: Placement = "output",
        selection: Selection = "learned",
        tasks: int | None = None,
        seal: bool = True,
        **common: Unpack[Common],
    ) -> None:
        check_share("prune", prune)
        check_choice("scope", scope, get_args(Scope))
        check_choice("extraction", extraction, get_args(Extraction))
        check_choice("selection", selection, SELECTIONS)
        check_choice("initial", initial, get_args(Initial))
        check_choice("placement", placement, get_args(Placement))
        check_whole("search_epochs", search_epochs, least=0)
        check_whole("tasks", tasks, or_none=True)
        if tasks is not None and (scope, extraction) != ("layer", "hard"):
            raise ValueError(
                "tasks shares out the free neurons of each layer: scope must be 'layer' and extraction 'hard', not "
                f"{scope!r} and {extraction!r}"
            )
        super().__init__(backbone, seal=seal, **common)
        self.prune, self.scope, self.extraction = prune, scope, extraction
        self.search_epochs, self.initial, self.placement = search_epochs, initial, placement
        self.selection, self.tasks = selection, tasks
        self.settings |= {
            "prune": prune,
            "scope": scope,
            "extraction": extraction,
            "search_epochs": search_epochs,
            "initial": initial,
            "placement": placement,
            "selection": selection,
        } | ({} if tasks is None else {"tasks": tasks})  # files from before there were plans have none

    def _learn(self, number: int, data: Data, head: nn.Module) -> tuple[nn.Module, list[float]]:
        network = TaskNetwork(self.backbone, head)
        graph = self.shared.trace(head, self._example(data.shape))
        free = self.shared.owners.free()
        chosen = self._choose(network, graph, data, free, fold_seed(self.seed, number, 2)) if free else {}
        if not any(chosen.values()):
            why = "the selected ones are all taken" if free else NONE_FREE
            warnings.warn(
                f"task {number} gets no neuron, as {why}: it learns only a head on past neurons", stacklevel=3
            )
        subnetwork = self.shared.cut(network, graph, chosen)
        losses = self._fit(
            subnetwork.network, data, number, after_step=freeze(subnetwork.network.backbone, subnetwork.past)
        )
        self._commit(number, subnetwork, chosen)
        return subnetwork.network.head, losses

    def _choose(self, network: TaskNetwork, graph: ChannelGraph, data: Data, free: Neurons, seed: int) -> Neurons:
        """Select the free neurons that the task takes, AN_t."""
        scores = None
        if self.selection == "learned":
            scales = learn_scales(
                network,
                graph,
                data,
                members=1,
                diversity=None,
                epochs=self.search_epochs,
                seed=seed,
                initial=self.initial,
                placement=self.placement,
                batch_size=self.recipe.batch_size,
                device=self.device,
                precision="float32",  # as tasks are trained
                quiet=self.quiet,
            )
            size = self.recipe.batch_size
            scores = saliency(network, graph, scales, data, batch_size=size, device=self.device, quiet=self.quiet)[0]
        if self.extraction == "soft":
            ranked = self._select(graph, scores, seed)
            return {name: tuple(sorted(set(kept) & set(free.get(name, ())))) for name, kept in ranked.items()}
        if self.tasks is not None:
            return self._choose_shares(graph, scores, free, seed, self.tasks)
        free_graph, free_scores = _restrict_to_free(graph, scores, free)
        selected = self._select(free_graph, free_scores, seed)
        return {name: tuple(free[name][index] for index in kept) for name, kept in selected.items()}

    def _choose_shares(
        self, graph: ChannelGraph, scores: Scores | None, free: Neurons, seed: int, tasks: int
    ) -> Neurons:
        """Select of every group the task's share of the free neurons."""
        chosen: Neurons = {}
        for index, (name, channels) in enumerate(free.items()):
            count = len(channels)
            dropped = count - count_share(count, self.next_stage, tasks)
            # `select` drops ⌈prune·(count-1)⌉: half a neuron less than `dropped` is rounded up to it
            prune = (dropped - 0.5) / (count - 1) if dropped else 0.0
            group_graph, group_scores = _restrict_to_free(graph, scores, {name: channels})
            kept = self._select(group_graph, group_scores, fold_seed(seed, index), prune)[name]
            chosen[name] = tuple(channels[position] for position in kept)
        return chosen

    def _select(self, graph: ChannelGraph, scores: Scores | None, seed: int, prune: float | None = None) -> Neurons:
        """Select the neurons of one subnet of the graph. prune: by default the learner's."""
        share = self.prune if prune is None else prune
        ranked = None if scores is None else [scores]
        with warnings.catch_warnings():
            # Expected when capacity runs out, which `capacity()` shows: the last neuron of a layer is taken.
            warnings.filterwarnings("ignore", message="prune=.* would (empty|leave less than one)")
            subnet = select(
                graph, ranked, prune=share, scope=self.scope, selection=self.selection, members=1, seed=seed
            )[0]
        return subnet.kept


def count_share(free: int, stage: int, tasks: int) -> int:
    """Count the neurons that a task takes of those that are free, so that all planned tasks get equally many.

    stage: how many tasks came before. The remainder goes to the first tasks; a task beyond the plan takes what is left.
    """
    return math.ceil(free / max(tasks - stage, 1))


def _restrict_to_free(graph: ChannelGraph, scores: Scores | None, free: Neurons) -> tuple[ChannelGraph, Scores | None]:
    """Restrict graph and scores to the free neurons, in their order."""
    groups = tuple(replace(group, size=len(free[group.name])) for group in graph.groups if group.name in free)
    magnitudes = {name: graph.magnitudes[name][list(channels)] for name, channels in free.items()}
    values = None if scores is None else {name: scores.values[name][list(channels)] for name, channels in free.items()}
    return replace(graph, groups=groups, magnitudes=magnitudes), None if values is None else Scores(values)

"""The backend: what metatrain's PET calls, on flat rows."""

from typing import Final

import torch
from torch import Tensor

from . import pairs
from .transformer import GNNLayer, Norm


class FlatPETBackend(torch.nn.Module):
    """
    Takes the place of metatrain's ``PETBackend``: same function, same parameters, same methods.

    Metatrain multiplies edge features ``[N, neighbors, d]`` by ``batch_data["cutoff_factors"]`` and
    sums them over neighbors. Here these sums are done already: such features come as ``[N, 1, d]``,
    the factors are ones ``[N, 1]``, and ``batch_data["padding_mask"]``, which metatrain adds up to
    count the neighbors, is their number ``[N, 1]``. Inference only: parameters have no gradients.

    What is scripted here is frozen in the files that users export. ``PetBackend`` in
    cpp/pet/backend.hpp lists what C++ calls and reads of it.

    :param stock: a ``PETBackend`` that :func:`replace.reason_for_stock` has nothing against. Its
        linear layers, embeddings and heads are used, not copied.
    :param cutoff_width_adaptive: as in :meth:`preprocess`, for :meth:`edges_of_system`
    :param energies: the targets that :meth:`energies_of_features` can give, with the factors and
        the energies to add for each species, ``[2, species]``
    :param uncertainty: the matrix whose product with the last-layer features of the target
        ``energy`` has the uncertainty of an atom's energy as its norm; empty without one
    """

    feedforward: Final[bool]
    adaptive: Final[str]
    bump: Final[bool]
    cutoff: Final[float]
    cutoff_width: Final[float]
    num_neighbors: Final[float]
    cutoff_width_adaptive: Final[float]
    #: To be raised when what C++ calls or reads here changes, names, shapes or meaning; with
    #: PetBackend in cpp/pet/backend.hpp, which also says what the earlier ones are. Files without
    #: this number are those of interface 0.
    interface: int
    energy_targets: list[str]
    num_layers: int

    def __init__(
        self,
        stock: torch.nn.Module,
        cutoff_width_adaptive: float,
        energies: dict[str, Tensor],
        uncertainty: Tensor,
    ):
        super().__init__()
        self.interface = 1
        self.feedforward = stock.featurizer_type == "feedforward"
        self.adaptive = "none"
        self.num_neighbors = 0.0
        if stock.num_neighbors_adaptive is not None:
            self.adaptive = stock.adaptive_cutoff_method.lower()
            self.num_neighbors = stock.num_neighbors_adaptive
        self.bump = stock.cutoff_function.lower() == "bump"
        self.cutoff = stock.cutoff
        self.cutoff_width = stock.cutoff_width
        self.cutoff_width_adaptive = cutoff_width_adaptive
        self.energy_targets = list(energies)
        tables = torch.stack(list(energies.values())) if energies else torch.empty(0, 2, 0)
        self.register_buffer("energy_scales", tables[:, 0])
        self.register_buffer("energy_shifts", tables[:, 1])
        self.register_buffer("uncertainty_matrix", uncertainty)

        self.register_buffer("species_to_species_index", stock.species_to_species_index)
        self.gnn_layers = torch.nn.ModuleList(
            [GNNLayer(layer, stock.edge_embedder) for layer in stock.gnn_layers]
        )
        self.num_layers = len(self.gnn_layers)
        self.combination_norms = torch.nn.ModuleList(
            [Norm(norm) for norm in stock.combination_norms]
        )
        self.combination_mlps = stock.combination_mlps
        self.node_embedders = stock.node_embedders
        self.edge_embedder = stock.edge_embedder
        self.system_conditioning = stock.system_conditioning
        self.node_heads = stock.node_heads
        self.edge_heads = stock.edge_heads
        self.node_last_layers = stock.node_last_layers
        self.edge_last_layers = stock.edge_last_layers
        self.requires_grad_(False)

    @torch.jit.export
    def preprocess(
        self,
        positions: Tensor,
        centers: Tensor,
        neighbors: Tensor,
        species: Tensor,
        cells: Tensor,
        cell_shifts: Tensor,
        system_indices: Tensor,
        cutoff_width_adaptive: float,
    ) -> dict[str, Tensor]:
        """
        Edges, and everything that depends on them and on the positions only.

        :param positions: ``[N, 3]``, those of all systems
        :param centers: ``[P]``, indices into ``positions``; the pairs may lie beyond the cutoff
        :param neighbors: ``[P]``
        :param species: ``[N]``, atomic types
        :param cells: ``[systems, 3, 3]``
        :param cell_shifts: ``[P, 3]``
        :param system_indices: ``[N]``
        :param cutoff_width_adaptive: width of the function that counts neighbors for the adaptive
            cutoffs
        :return: the tensors that the other methods and metatrain's PET read
        :raises RuntimeError: if a pair is in the list in one direction only
        """
        neighbors, cell_shifts, row_starts = torch.ops.metatomic_tc.pet_sort_by_center(
            centers, neighbors, cell_shifts, len(positions)
        )
        batch_data, status = self.edges_of_pairs(
            positions,
            cells,
            neighbors,
            cell_shifts,
            row_starts,
            system_indices.to(torch.int32),
            species,
            cutoff_width_adaptive,
            -1,
        )
        pairs.expect_all_reverses(int(status[1]))
        return batch_data

    def edges_of_pairs(
        self,
        positions: Tensor,
        cells: Tensor,
        neighbors: Tensor,
        cell_shifts: Tensor,
        row_starts: Tensor,
        systems: Tensor,
        species: Tensor,
        cutoff_width_adaptive: float,
        capacity: int,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """
        The tensors of :meth:`preprocess`, from pairs in rows.

        :param systems: ``[N]``, the system of each atom
        :param capacity: of edges, as in ``pet_select_edges``; without one, the GPU is waited for
        :return: the tensors; and ``[2]``, the number of edges, which may be more than the capacity,
            and the number of pairs without a reverse
        """
        missing = torch.zeros(1, dtype=torch.int64, device=positions.device)
        if self.adaptive == "solver":
            atomic_cutoffs = torch.ops.metatomic_tc.pet_adaptive_cutoffs(
                positions,
                cells,
                neighbors,
                cell_shifts,
                row_starts,
                systems,
                self.num_neighbors,
                self.cutoff,
                cutoff_width_adaptive,
            )
        elif self.adaptive == "grid":
            reverse, missing = pairs.reverse_edges(neighbors, cell_shifts, row_starts)
            vectors = torch.ops.metatomic_tc.pet_edge_vectors(
                positions, cells, neighbors, cell_shifts, row_starts, reverse, systems
            )
            atomic_cutoffs = pairs.grid_cutoffs(
                vectors, row_starts, self.num_neighbors, self.cutoff, cutoff_width_adaptive
            )
        else:
            atomic_cutoffs = torch.full(
                (len(positions),), self.cutoff, dtype=positions.dtype, device=positions.device
            )

        neighbors, cell_shifts, row_starts, number = torch.ops.metatomic_tc.pet_select_edges(
            positions.detach(),
            cells.detach(),
            neighbors,
            cell_shifts,
            row_starts,
            systems,
            atomic_cutoffs.detach(),
            capacity,
        )
        reverse, missing_edges = pairs.reverse_edges(neighbors, cell_shifts, row_starts)
        vectors = torch.ops.metatomic_tc.pet_edge_vectors(
            positions, cells, neighbors, cell_shifts, row_starts, reverse, systems
        )
        cutoff_factors = torch.ops.metatomic_tc.pet_cutoff_factors(
            vectors,
            atomic_cutoffs,
            neighbors,
            row_starts,
            reverse,
            self.cutoff_width,
            self.bump,
        )
        node_species = self.species_to_species_index.index_select(0, species).to(torch.int32)
        batch_data = {
            "element_indices_nodes": node_species,
            "element_indices_neighbors": node_species.index_select(0, neighbors),
            "edge_vectors": vectors,
            "reverse_neighbor_index": reverse,
            "edge_cutoff_factors": cutoff_factors,
            "row_starts": row_starts,
            "neighbors": neighbors,
            "cell_shifts": cell_shifts,
            "atomic_cutoffs_stats": atomic_cutoffs.detach(),
            "padding_mask": torch.diff(row_starts)[:, None],
            "cutoff_factors": torch.ones(
                (len(positions), 1), dtype=positions.dtype, device=positions.device
            ),
        }
        return batch_data, torch.cat([number, (missing + missing_edges).to(torch.int32)])

    @torch.jit.export
    def edges_of_system(
        self,
        positions: Tensor,
        cell: Tensor,
        neighbors: Tensor,
        cell_shifts: Tensor,
        row_starts: Tensor,
        species: Tensor,
        capacity: int,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """
        :meth:`edges_of_pairs` for one system. Like all that PetStep calls, it does not wait for the
        GPU if there is a capacity.

        :param positions: ``[N, 3]``
        :param cell: ``[3, 3]``
        :param neighbors: ``[P]``, in rows by their centre, in both directions; the pairs may lie
            beyond the cutoff
        :param cell_shifts: ``[P, 3]``
        :param row_starts: ``[N + 1]``
        :param species: ``[N]``, atomic types
        """
        return self.edges_of_pairs(
            positions,
            cell[None],
            neighbors,
            cell_shifts,
            row_starts,
            torch.zeros_like(row_starts[1:]),
            species,
            self.cutoff_width_adaptive,
            capacity,
        )

    @torch.jit.export
    def calculate_features(
        self, batch_data: dict[str, Tensor], capture_diagnostics: bool = False
    ) -> tuple[list[Tensor], list[Tensor]]:
        """
        Features of nodes and edges for the heads.

        :param batch_data: of :meth:`preprocess`; with system conditioning also ``charge``,
            ``spin_multiplicity`` and ``system_indices``
        :param capture_diagnostics: only False is supported
        :return: node features ``[N, d_node]`` and edge features ``[E, d]``: of the last layer with
            the feedforward featurizer, of each layer with the residual one
        :raises RuntimeError: if diagnostics are wanted
        """
        if capture_diagnostics:
            raise RuntimeError(
                "the backend of metatomic-tc has no diagnostic outputs; use that of metatrain"
            )
        if self.system_conditioning is not None:
            batch_data["conditioning"] = self.system_conditioning(
                batch_data["charge"], batch_data["spin_multiplicity"], batch_data["system_indices"]
            )
        node_features: list[Tensor] = []
        edge_features: list[Tensor] = []
        nodes, messages = self.first_features(batch_data)
        for i in range(self.num_layers):
            nodes, edges, messages = self.layer(i, nodes, messages, batch_data)
            if i == self.num_layers - 1 or not self.feedforward:
                node_features.append(nodes)
                edge_features.append(edges)
        return node_features, edge_features

    @torch.jit.export
    def first_features(self, batch_data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Nodes ``[N, d_node]`` and messages ``[E, d]`` in front of the first layer."""
        return (
            self.node_embedders[0](batch_data["element_indices_nodes"]),
            self.edge_embedder(batch_data["element_indices_neighbors"]),
        )

    @torch.jit.export
    def layer(
        self, index: int, nodes: Tensor, messages: Tensor, batch_data: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        One layer of the graph neural network.

        :param nodes: ``[N, d_node]``, not read with the residual featurizer
        :param messages: ``[E, d]``
        :param batch_data: of :meth:`preprocess`; with system conditioning also ``conditioning``
        :return: nodes and edges, which are features for the heads (with the feedforward featurizer
            only those of the last layer), and messages
        """
        vectors = batch_data["edge_vectors"]
        species = batch_data["element_indices_nodes"]
        neighbor_species = batch_data["element_indices_neighbors"]
        reverse = batch_data["reverse_neighbor_index"]
        cutoff_factors = batch_data["edge_cutoff_factors"]
        row_starts = batch_data["row_starts"]
        edges = messages
        # TorchScript knows modules of a list in a loop only.
        if not self.feedforward:
            for i, embedder in enumerate(self.node_embedders):
                if i == index:
                    nodes = embedder(species)
        for i, layer in enumerate(self.gnn_layers):
            if i == index:
                nodes, edges = layer(
                    nodes, messages, vectors, neighbor_species, cutoff_factors, row_starts
                )
        if "conditioning" in batch_data:
            nodes = nodes + batch_data["conditioning"]
        if not self.feedforward:
            averages = torch.ops.metatomic_tc.pet_average_reversed(messages, edges, reverse)
            return nodes, edges, averages
        for i, (norm, mlp) in enumerate(
            zip(self.combination_norms, self.combination_mlps, strict=True)
        ):
            if i == index:
                normed, edges = torch.ops.metatomic_tc.pet_reversed_pair_norm(
                    edges, reverse, norm.weight, norm.bias, norm.epsilon(edges.dtype)
                )
                messages = torch.ops.metatomic_tc.pet_sum(messages, edges, mlp(normed))
        return nodes, messages, messages

    @torch.jit.export
    def predict(
        self,
        node_features_list: list[Tensor],
        edge_features_list: list[Tensor],
        batch_data: dict[str, Tensor],
        cells: Tensor,
        system_indices: Tensor,
        requested_output_names: list[str],
    ) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]], dict[str, list[Tensor]]]:
        """
        Predictions for atoms, and the features in front of the last layers.

        Only the heads of the requested targets are evaluated. Without any all of them are, for
        their last-layer features.

        :param node_features_list: of :meth:`calculate_features`
        :param edge_features_list: of :meth:`calculate_features`; afterwards it holds the sums
            ``[N, 1, d]`` over the edges of each atom
        :param batch_data: of :meth:`preprocess`
        :param cells: ``[systems, 3, 3]``
        :param system_indices: ``[N]``
        :param requested_output_names: the targets wanted
        :return: for each target the predictions ``[N, size of the block]`` for its blocks; and its
            last-layer features for each readout layer, of nodes ``[N, d_head]`` and, summed over
            the edges of each atom, of edges ``[N, 1, d_head]``
        """
        cutoff_factors = batch_data["edge_cutoff_factors"]
        row_starts = batch_data["row_starts"]
        all_heads = len(requested_output_names) == 0

        node_features: dict[str, list[Tensor]] = {}
        for name, node_heads in self.node_heads.items():
            if all_heads or name in requested_output_names:
                features: list[Tensor] = []
                for i, node_head in enumerate(node_heads):
                    features.append(node_head(node_features_list[i]))
                node_features[name] = features

        edge_features: dict[str, list[Tensor]] = {}
        for name, edge_heads in self.edge_heads.items():
            if all_heads or name in requested_output_names:
                features: list[Tensor] = []
                for i, edge_head in enumerate(edge_heads):
                    head_features = edge_head(edge_features_list[i])
                    features.append(self.sum_edges(head_features, cutoff_factors, row_starts))
                edge_features[name] = features

        for i in range(len(edge_features_list)):
            edge_features_list[i] = self.sum_edges(
                edge_features_list[i], cutoff_factors, row_starts
            )

        predictions: dict[str, list[Tensor]] = {}
        for name, node_last_layers in self.node_last_layers.items():
            if name in requested_output_names:
                blocks: list[Tensor] = []
                for i, node_layers in enumerate(node_last_layers):
                    for b, node_layer in enumerate(node_layers.values()):
                        prediction = node_layer(node_features[name][i])
                        if i == 0:
                            blocks.append(prediction)
                        else:
                            blocks[b] = blocks[b] + prediction
                predictions[name] = blocks

        # A last layer is linear, so it can follow the sum over edges. Its bias counts for each.
        sums_of_factors = self.sum_edges(
            torch.ones_like(cutoff_factors)[:, None], cutoff_factors, row_starts
        )[:, 0]
        for name, edge_last_layers in self.edge_last_layers.items():
            if name in requested_output_names:
                blocks = predictions[name]
                for i, edge_layers in enumerate(edge_last_layers):
                    for b, edge_layer in enumerate(edge_layers.values()):
                        prediction = torch.nn.functional.linear(
                            edge_features[name][i][:, 0], edge_layer.weight
                        )
                        blocks[b] = blocks[b] + prediction + sums_of_factors * edge_layer.bias
                if name == "non_conservative_stress":
                    blocks[0] = stress_of_atoms(blocks[0], cells, system_indices)

        return predictions, node_features, edge_features

    @torch.jit.export
    def energies_of_edges(
        self, batch_data: dict[str, Tensor], cell: Tensor, target: str, uncertainty: bool
    ) -> tuple[Tensor, Tensor]:
        """:meth:`calculate_features` and :meth:`energies_of_features`."""
        node_features, edge_features = self.calculate_features(batch_data, False)
        return self.energies_of_features(
            node_features, edge_features, batch_data, cell, target, uncertainty
        )

    @torch.jit.export
    def energies_of_features(
        self,
        node_features_list: list[Tensor],
        edge_features_list: list[Tensor],
        batch_data: dict[str, Tensor],
        cell: Tensor,
        target: str,
        uncertainty: bool,
    ) -> tuple[Tensor, Tensor]:
        """
        The energies of one system's atoms as the whole model gives them, and their uncertainties.

        :param node_features_list: of :meth:`calculate_features`
        :param edge_features_list: of :meth:`calculate_features`
        :param batch_data: of :meth:`edges_of_system`
        :param cell: ``[3, 3]``
        :param target: one of ``energy_targets``
        :param uncertainty: whether uncertainties are wanted, of the target ``energy`` only
        :return: ``[N]``, FP64; and ``[N]`` or none ``[0]``, without gradients
        """
        species = batch_data["element_indices_nodes"]
        predictions, node_features, edge_features = self.predict(
            node_features_list,
            edge_features_list,
            batch_data,
            cell[None],
            torch.zeros_like(species),
            [target],
        )
        index = self.energy_targets.index(target)
        scales = self.energy_scales[index].index_select(0, species).to(torch.float64)
        shifts = self.energy_shifts[index].index_select(0, species).to(torch.float64)
        energies = predictions[target][0][:, 0].to(torch.float64) * scales + shifts
        if not uncertainty:
            return energies, energies[:0].detach()
        features: list[Tensor] = []
        for nodes, edges in zip(node_features[target], edge_features[target], strict=True):
            features.append(nodes.detach())
            features.append(edges.detach()[:, 0])
        weighted = torch.cat(features, dim=1) @ self.uncertainty_matrix.T
        return energies, torch.linalg.vector_norm(weighted, dim=1)

    def sum_edges(self, features: Tensor, cutoff_factors: Tensor, row_starts: Tensor) -> Tensor:
        """``[E, d]`` to ``[N, 1, d]``."""
        return torch.ops.metatomic_tc.pet_segment_sum(features, cutoff_factors, row_starts)[:, None]


def stress_of_atoms(prediction: Tensor, cells: Tensor, system_indices: Tensor) -> Tensor:
    """
    Symmetric, and divided by the volume of the cell: 0 for systems that have none.

    :param prediction: ``[N, 9 * properties]``
    :param cells: ``[systems, 3, 3]``
    :param system_indices: ``[N]``
    :return: ``[N, 3, 3, properties]``
    """
    volumes = torch.linalg.det(cells).abs()
    volumes = torch.where(volumes == 0.0, torch.inf, volumes)
    stress = prediction.reshape(len(prediction), 3, 3, prediction.shape[1] // 9)
    stress = 0.5 * (stress + stress.transpose(1, 2))
    return stress / volumes.index_select(0, system_indices)[:, None, None, None]

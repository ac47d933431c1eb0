"""
The linear layers of the published sizes of PET, and how many rows each of them gets.

Written by ``benchmarks/pet_layers.py``, which evaluates the models of metatrain 2026.4.1 with hooks
on their linear layers, and checked against them by ``tests/python/test_bench.py``. The benchmark of
the products needs neither metatrain nor a model that way.
"""

from typing import NamedTuple


class Layer(NamedTuple):
    """Linear layers of one shape that differ only in the numbers of their names."""

    #: name in the model, with ``*`` for numbers
    name: str
    in_features: int
    out_features: int
    #: what a row of the input is: ``node`` (an atom), ``edge`` (a neighbor of an atom, padding
    #: included) or ``token`` (an edge, or the atom in the middle)
    rows: str
    #: how many of them a model has
    count: int


#: Neighbors that the list of every atom is padded to, in water at 1 g/cc
PADDED_NEIGHBORS = {"xs": 30, "s": 37, "m": 51, "l": 52}
#: Layers of every size, in the order of evaluation
LINEAR_LAYERS = {
    "xs": [
        Layer("gnn_layers.*.edge_embedder", 4, 128, "edge", 2),
        Layer("gnn_layers.*.compress.0", 256, 128, "edge", 1),
        Layer("gnn_layers.*.compress.2", 128, 128, "edge", 2),
        Layer("gnn_layers.*.trans.layers.*.center_contraction", 512, 128, "node", 2),
        Layer("gnn_layers.*.trans.layers.*.attention.input_linear", 128, 384, "token", 2),
        Layer("gnn_layers.*.trans.layers.*.attention.output_linear", 128, 128, "token", 2),
        Layer("gnn_layers.*.trans.layers.*.center_expansion", 128, 512, "node", 2),
        Layer("gnn_layers.*.trans.layers.*.center_mlp.w_in", 512, 2048, "node", 2),
        Layer("gnn_layers.*.trans.layers.*.center_mlp.w_out", 1024, 512, "node", 2),
        Layer("gnn_layers.*.trans.layers.*.mlp.w_in", 128, 512, "edge", 2),
        Layer("gnn_layers.*.trans.layers.*.mlp.w_out", 256, 128, "edge", 2),
        Layer("combination_mlps.*.0", 256, 256, "edge", 2),
        Layer("combination_mlps.*.2", 256, 128, "edge", 2),
        Layer("gnn_layers.*.compress.0", 384, 128, "edge", 1),
        Layer("node_heads.energy.*.0", 512, 128, "node", 1),
        Layer("node_heads.energy.*.2", 128, 128, "node", 1),
        Layer("edge_heads.energy.*.0", 128, 128, "edge", 1),
        Layer("edge_heads.energy.*.2", 128, 128, "edge", 1),
        Layer("node_last_layers.energy.*.energy___0", 128, 1, "node", 1),
        Layer("edge_last_layers.energy.*.energy___0", 128, 1, "edge", 1),
    ],
    "s": [
        Layer("gnn_layers.*.edge_embedder", 4, 256, "edge", 3),
        Layer("gnn_layers.*.compress.0", 512, 256, "edge", 1),
        Layer("gnn_layers.*.compress.2", 256, 256, "edge", 3),
        Layer("gnn_layers.*.trans.layers.*.center_contraction", 1024, 256, "node", 3),
        Layer("gnn_layers.*.trans.layers.*.attention.input_linear", 256, 768, "token", 3),
        Layer("gnn_layers.*.trans.layers.*.attention.output_linear", 256, 256, "token", 3),
        Layer("gnn_layers.*.trans.layers.*.center_expansion", 256, 1024, "node", 3),
        Layer("gnn_layers.*.trans.layers.*.center_mlp.w_in", 1024, 4096, "node", 3),
        Layer("gnn_layers.*.trans.layers.*.center_mlp.w_out", 2048, 1024, "node", 3),
        Layer("gnn_layers.*.trans.layers.*.mlp.w_in", 256, 1024, "edge", 3),
        Layer("gnn_layers.*.trans.layers.*.mlp.w_out", 512, 256, "edge", 3),
        Layer("combination_mlps.*.0", 512, 512, "edge", 3),
        Layer("combination_mlps.*.2", 512, 256, "edge", 3),
        Layer("gnn_layers.*.compress.0", 768, 256, "edge", 2),
        Layer("node_heads.energy.*.0", 1024, 256, "node", 1),
        Layer("node_heads.energy.*.2", 256, 256, "node", 1),
        Layer("edge_heads.energy.*.0", 256, 256, "edge", 1),
        Layer("edge_heads.energy.*.2", 256, 256, "edge", 1),
        Layer("node_last_layers.energy.*.energy___0", 256, 1, "node", 1),
        Layer("edge_last_layers.energy.*.energy___0", 256, 1, "edge", 1),
    ],
    "m": [
        Layer("gnn_layers.*.edge_embedder", 4, 384, "edge", 3),
        Layer("gnn_layers.*.compress.0", 768, 384, "edge", 1),
        Layer("gnn_layers.*.compress.2", 384, 384, "edge", 3),
        Layer("gnn_layers.*.trans.layers.*.center_contraction", 1536, 384, "node", 6),
        Layer("gnn_layers.*.trans.layers.*.attention.input_linear", 384, 1152, "token", 6),
        Layer("gnn_layers.*.trans.layers.*.attention.output_linear", 384, 384, "token", 6),
        Layer("gnn_layers.*.trans.layers.*.center_expansion", 384, 1536, "node", 6),
        Layer("gnn_layers.*.trans.layers.*.center_mlp.w_in", 1536, 6144, "node", 6),
        Layer("gnn_layers.*.trans.layers.*.center_mlp.w_out", 3072, 1536, "node", 6),
        Layer("gnn_layers.*.trans.layers.*.mlp.w_in", 384, 1536, "edge", 6),
        Layer("gnn_layers.*.trans.layers.*.mlp.w_out", 768, 384, "edge", 6),
        Layer("combination_mlps.*.0", 768, 768, "edge", 3),
        Layer("combination_mlps.*.2", 768, 384, "edge", 3),
        Layer("gnn_layers.*.compress.0", 1152, 384, "edge", 2),
        Layer("node_heads.energy.*.0", 1536, 384, "node", 1),
        Layer("node_heads.energy.*.2", 384, 384, "node", 1),
        Layer("edge_heads.energy.*.0", 384, 384, "edge", 1),
        Layer("edge_heads.energy.*.2", 384, 384, "edge", 1),
        Layer("node_last_layers.energy.*.energy___0", 384, 1, "node", 1),
        Layer("edge_last_layers.energy.*.energy___0", 384, 1, "edge", 1),
    ],
    "l": [
        Layer("gnn_layers.*.edge_embedder", 4, 512, "edge", 4),
        Layer("gnn_layers.*.compress.0", 1024, 512, "edge", 1),
        Layer("gnn_layers.*.compress.2", 512, 512, "edge", 4),
        Layer("gnn_layers.*.trans.layers.*.center_contraction", 2048, 512, "node", 8),
        Layer("gnn_layers.*.trans.layers.*.attention.input_linear", 512, 1536, "token", 8),
        Layer("gnn_layers.*.trans.layers.*.attention.output_linear", 512, 512, "token", 8),
        Layer("gnn_layers.*.trans.layers.*.center_expansion", 512, 2048, "node", 8),
        Layer("gnn_layers.*.trans.layers.*.center_mlp.w_in", 2048, 8192, "node", 8),
        Layer("gnn_layers.*.trans.layers.*.center_mlp.w_out", 4096, 2048, "node", 8),
        Layer("gnn_layers.*.trans.layers.*.mlp.w_in", 512, 2048, "edge", 8),
        Layer("gnn_layers.*.trans.layers.*.mlp.w_out", 1024, 512, "edge", 8),
        Layer("combination_mlps.*.0", 1024, 1024, "edge", 4),
        Layer("combination_mlps.*.2", 1024, 512, "edge", 4),
        Layer("gnn_layers.*.compress.0", 1536, 512, "edge", 3),
        Layer("node_heads.energy.*.0", 2048, 512, "node", 1),
        Layer("node_heads.energy.*.2", 512, 512, "node", 1),
        Layer("edge_heads.energy.*.0", 512, 512, "edge", 1),
        Layer("edge_heads.energy.*.2", 512, 512, "edge", 1),
        Layer("node_last_layers.energy.*.energy___0", 512, 1, "node", 1),
        Layer("edge_last_layers.energy.*.energy___0", 512, 1, "edge", 1),
    ],
}


def rows_per_atom(size: str, layer: Layer) -> int:
    """Rows of the layer's input for each atom of water."""
    neighbors = PADDED_NEIGHBORS[size]
    return {"node": 1, "edge": neighbors, "token": neighbors + 1}[layer.rows]

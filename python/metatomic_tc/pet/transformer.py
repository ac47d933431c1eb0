"""The layers of PET's graph neural network, on the parameters of metatrain's."""

from typing import Final

import torch
from torch import Tensor


class Norm(torch.nn.Module):
    """
    A RMSNorm or LayerNorm of rows.

    :param stock: a ``torch.nn.RMSNorm`` or ``torch.nn.LayerNorm`` of one dimension
    """

    layer_norm: Final[bool]
    fixed_epsilon: Final[float]

    def __init__(self, stock: torch.nn.RMSNorm | torch.nn.LayerNorm):
        super().__init__()
        self.weight = stock.weight
        self.register_parameter("bias", getattr(stock, "bias", None))
        self.layer_norm = isinstance(stock, torch.nn.LayerNorm)
        # Without one, PyTorch takes that of the dtype.
        self.fixed_epsilon = -1.0 if stock.eps is None else stock.eps

    def epsilon(self, dtype: torch.dtype) -> float:
        if self.fixed_epsilon >= 0.0:
            return self.fixed_epsilon
        return 2.0**-23 if dtype == torch.float32 else 2.0**-52

    def forward(self, x: Tensor) -> Tensor:
        """``[R, d]`` to ``[R, d]``."""
        return torch.ops.metatomic_tc.pet_norm(
            x, self.weight, self.bias, self.epsilon(x.dtype), self.layer_norm
        )

    def concatenated(self, nodes: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        """
        :param nodes: ``[N, d]``
        :param edges: ``[E, d]``
        :return: the norms of both ``[N + E, d]``; and ``edges``, to be used from here on
        """
        return torch.ops.metatomic_tc.pet_concatenated_norm(
            nodes, edges, self.weight, self.bias, self.epsilon(edges.dtype), self.layer_norm
        )

    def residual(self, tokens: Tensor, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """
        :param tokens: ``[N + E, d]``
        :param edges: ``[E, d]``
        :return: the first N tokens, the sums of the others and the edges, and the sums' norms
        """
        return torch.ops.metatomic_tc.pet_residual_norm(
            tokens, edges, self.weight, self.bias, self.epsilon(edges.dtype), self.layer_norm
        )


class TransformerLayer(torch.nn.Module):
    """
    Attention among the tokens of each atom (itself and its edges), and a network for each token.

    :param stock: metatrain's ``TransformerLayer``
    """

    norm_first: Final[bool]
    expanded: Final[bool]
    num_heads: Final[int]
    scale: Final[float]

    def __init__(self, stock: torch.nn.Module):
        super().__init__()
        self.norm_first = stock.transformer_type == "PreLN"
        self.expanded = stock.expanded_node_features
        self.num_heads = stock.attention.num_heads
        self.scale = 1.0 / (stock.attention.head_dim**0.5 * stock.attention.temperature)
        self.input_linear = stock.attention.input_linear
        self.output_linear = stock.attention.output_linear
        self.norm_attention = Norm(stock.norm_attention)
        self.norm_mlp = Norm(stock.norm_mlp)
        self.mlp = stock.mlp
        # identities if the nodes are as wide as the edges
        self.center_contraction = stock.center_contraction
        self.center_expansion = stock.center_expansion
        self.center_mlp = stock.center_mlp
        self.norm_center_features = (
            Norm(stock.norm_center_features) if self.expanded else torch.nn.Identity()
        )

    def forward(
        self, nodes: Tensor, edges: Tensor, cutoff_factors: Tensor, row_starts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """
        :param nodes: ``[N, d_node]``
        :param edges: ``[E, d]``
        :param cutoff_factors: ``[E]``
        :return: new nodes and edges
        """
        narrow = self.center_contraction(nodes)
        if self.norm_first:
            tokens, edges = self.norm_attention.concatenated(narrow, edges)
            tokens = self.attention(tokens, cutoff_factors, row_starts)
            narrow, edges, normed = self.norm_mlp.residual(tokens, edges)
            edges = edges + self.mlp(normed)
        else:
            tokens = torch.cat([narrow, edges])
            tokens = self.norm_attention(
                tokens + self.attention(tokens, cutoff_factors, row_starts)
            )
            tokens = self.norm_mlp(tokens + self.mlp(tokens))
            narrow, edges = tokens[: len(nodes)], tokens[len(nodes) :]
        if not self.expanded:
            return narrow, edges
        nodes = nodes + self.center_expansion(narrow)
        return nodes + self.center_mlp(self.norm_center_features(nodes)), edges

    def attention(self, tokens: Tensor, cutoff_factors: Tensor, row_starts: Tensor) -> Tensor:
        qkv = self.input_linear(tokens)
        attended = torch.ops.metatomic_tc.pet_attention(
            qkv, cutoff_factors, row_starts, self.num_heads, self.scale
        )
        return self.output_linear(attended)


class GNNLayer(torch.nn.Module):
    """
    Makes tokens of edges and messages, and passes them through the transformer layers.

    The layer in front of the first SiLU acts on the concatenation of three linear embeddings, so it
    is folded into these, in FP64: ``geometry_weight`` [d, 4] for an edge's vector and length, and
    ``neighbor_table`` [species, d] for its neighbor, with all biases. Only the product with the
    messages remains, and none in the first layer, whose messages are embeddings of the neighbor.

    :param stock: metatrain's ``CartesianTransformer``
    :param messages: the embedding that makes the messages, for the first layer
    """

    is_first: Final[bool]

    def __init__(self, stock: torch.nn.Module, messages: torch.nn.Embedding):
        super().__init__()
        self.is_first = stock.is_first
        compress, embedder = stock.compress[0], stock.edge_embedder
        dim, dtype = compress.out_features, compress.weight.dtype
        blocks = compress.weight.detach().double().split(dim, dim=1)
        bias = blocks[0] @ embedder.bias.detach().double() + compress.bias.detach().double()
        neighbor = messages if self.is_first else stock.neighbor_embedder
        table = neighbor.weight.detach().double() @ blocks[1].T + bias
        geometry = blocks[0] @ embedder.weight.detach().double()
        self.register_buffer("geometry_weight", geometry.to(dtype))
        self.register_buffer("neighbor_table", table.to(dtype))
        self.compress_messages = torch.nn.Identity()
        if not self.is_first:
            self.compress_messages = torch.nn.Linear(dim, dim, bias=False, device="meta")
            self.compress_messages.weight = torch.nn.Parameter(blocks[2].to(dtype).contiguous())
        self.compress = stock.compress[2]
        self.layers = torch.nn.ModuleList([TransformerLayer(layer) for layer in stock.trans.layers])

    def forward(
        self,
        nodes: Tensor,
        messages: Tensor,
        vectors: Tensor,
        neighbor_species: Tensor,
        cutoff_factors: Tensor,
        row_starts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """
        :param nodes: ``[N, d_node]``
        :param messages: ``[E, d]``, not read in the first layer
        :param vectors: ``[E, 3]``
        :param neighbor_species: ``[E]``, indices of the neighbors' species
        :param cutoff_factors: ``[E]``
        :return: new nodes and edges ``[E, d]``
        """
        compressed: Tensor | None = None
        if not self.is_first:
            compressed = self.compress_messages(messages)
        tokens = torch.ops.metatomic_tc.pet_edge_tokens(
            compressed, vectors, self.geometry_weight, self.neighbor_table, neighbor_species
        )
        edges = self.compress(tokens)
        for layer in self.layers:
            nodes, edges = layer(nodes, edges, cutoff_factors, row_starts)
        return nodes, edges

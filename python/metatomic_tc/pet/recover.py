"""Reads a metatrain PET back from an exported file, which holds all it is made of."""

import random
import warnings

import torch
from metatomic.torch import AtomisticModel

from ..model_files import first_line
from ..models import convert
from .replace import replace_backend, unknown_metatrain

#: hyperparameters that the exported model and its backend have as attributes
OF_MODEL = (
    "cutoff cutoff_function cutoff_width cutoff_width_adaptive num_neighbors_adaptive "
    "adaptive_cutoff_method d_pet d_node d_head num_gnn_layers featurizer_type"
).split()
OF_BACKEND = (
    "d_feedforward num_heads num_attention_layers normalization activation attention_temperature "
    "transformer_type"
).split()

#: how much energies and forces of the two may differ, relative to the largest of them
TOLERANCE = {"float32": 1e-4, "float64": 1e-8}


def replace_exported_backend(model: AtomisticModel) -> tuple[AtomisticModel, str | None]:
    """
    Replace metatrain's backend in a PET that was exported.

    :param model: loaded from a file
    :return: a new model and None; or ``model`` itself, and why it keeps the backend it has
    """
    pet, reason = recover_pet(model)
    if pet is None:
        return model, reason
    reason = replace_backend(pet)
    if reason is not None:
        return model, reason
    try:
        pet.metadata = model.metadata()
        replaced = pet.export()
        # Both in FP32, and scripted: TorchScript computes powers in ZBL a little differently.
        reason = difference(convert(model, "fp32"), torch.jit.script(replaced))
    except (AttributeError, KeyError, RuntimeError, ValueError) as error:
        reason = _cannot(error)
    return (replaced, None) if reason is None else (model, reason)


def recover_pet(model: AtomisticModel) -> tuple[torch.nn.Module | None, str | None]:
    """
    The metatrain PET that a model with metatrain's backend was exported from.

    :param model: loaded from an exported file, with an inner module that is a scripted PET, alone
    :return: the PET in its dtype, on the CPU; or None, and why there is none
    """
    scripted = model.module
    if getattr(scripted, "original_name", None) != "PET":
        return None, "only PET alone can be read back from an exported file; use the checkpoint"
    if (reason := unknown_metatrain()) is not None:
        return None, reason
    try:
        return _rebuild(scripted, model.capabilities().length_unit), None
    except (AttributeError, KeyError, RuntimeError, ValueError) as error:
        return None, _cannot(error)


def _cannot(error: Exception) -> str:
    return f"PET cannot be read back from this file ({first_line(str(error))}); use the checkpoint"


def _rebuild(scripted: torch.nn.Module, length_unit: str) -> torch.nn.Module:
    from metatrain.pet import PET
    from metatrain.pet.documentation import ModelHypers
    from metatrain.utils.data import DatasetInfo
    from metatrain.utils.hypers import init_with_defaults

    if scripted.long_range:
        raise ValueError("it has long-range features")
    if scripted.system_conditioning is not None:
        raise ValueError("it depends on charges and spins")
    backend = scripted.backend
    hypers = init_with_defaults(ModelHypers)
    hypers.update({name: getattr(scripted, name) for name in OF_MODEL})
    hypers.update({name: getattr(backend, name) for name in OF_BACKEND})
    hypers["zbl"] = len(list(scripted.additive_models.children())) > 1

    targets = {name: _target_info(scripted, name) for name in scripted.target_names}
    info = DatasetInfo(length_unit, list(scripted.atomic_types), targets)
    state = scripted.state_dict()
    dtype = next(value.dtype for name, value in state.items() if name.endswith(".weight"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pet = PET(hypers, info).to(dtype).eval()
        pet.load_state_dict(state)
    pet.additive_models[0].sync_tensor_maps()
    pet.scaler.sync_tensor_maps()
    # as PET.export leaves it
    pet.additive_models[0].weights_to(torch.device("cpu"), torch.float64)
    return pet.requires_grad_(False)


def _target_info(scripted: torch.nn.Module, name: str):
    """A target as training described it, but for what matters in training only."""
    from metatensor.torch import Labels, TensorBlock, TensorMap
    from metatrain.utils.data.target_info import TargetInfo

    per_atom = scripted.scaler.model.sample_kinds[name] != "per_structure"
    samples = ["system", "atom"] if per_atom else ["system"]
    blocks = []
    for components, properties in zip(
        scripted.component_labels[name], scripted.property_labels[name], strict=True
    ):
        shape = [0, *(len(component) for component in components), len(properties)]
        empty = Labels(samples, torch.empty((0, len(samples)), dtype=torch.int32))
        blocks.append(TensorBlock(torch.empty(shape), empty, components, properties))
    output = scripted.outputs[name]
    quantity = "energy" if name.partition("/")[0] == "energy" else ""
    layout = TensorMap(scripted.key_labels[name], blocks)
    return TargetInfo(layout, quantity, output.unit, output.description)


def difference(model: AtomisticModel, other: AtomisticModel) -> str | None:
    """
    Where two models of the same outputs differ by more than rounding, on atoms at random places.

    :return: a sentence, or None if they do not differ
    """
    from metatomic.torch import ModelEvaluationOptions, ModelOutput

    tolerance = TOLERANCE[model.capabilities().dtype]
    units = {name: output.unit for name, output in model.capabilities().outputs.items()}
    for name in model.module.target_names:
        wanted = {name: ModelOutput(unit=units[name], sample_kind="atom")}
        options = ModelEvaluationOptions(model.capabilities().length_unit, wanted)
        results = []
        for one in (model, other):
            system = _atoms_at_random(model)
            with torch.jit.optimized_execution(False):
                blocks = one([system], options, False)[name].blocks()
            values = torch.cat([block.values.flatten() for block in blocks])
            (gradient,) = torch.autograd.grad(values.sum(), system.positions)
            results.append((values.detach(), gradient))
        for what, found, expected in zip(("values", "gradients"), *results, strict=True):
            bound = tolerance * expected.abs().max() + 1e-30
            if not ((found - expected).abs().max() <= bound):
                return f"the {what} of its output {name} are not those of the model read back"
    return None


def _atoms_at_random(model: AtomisticModel):
    """A metatomic system with two atoms of each element, without periodic images."""
    from metatensor.torch import Labels, TensorBlock
    from metatomic.torch import System, register_autograd_neighbors

    types = 2 * list(model.capabilities().atomic_types)
    dtype = getattr(torch, model.capabilities().dtype)
    unit = model.capabilities().length_unit
    requests = model.requested_neighbor_lists()
    spacing = max(request.engine_cutoff(unit) for request in requests) / 5.0
    places = [(i, j, k) for i in range(8) for j in range(8) for k in range(8)][: len(types)]
    generator = random.Random(0)
    positions = torch.tensor(
        [[spacing * (x + 0.3 * generator.random()) for x in place] for place in places],
        dtype=dtype,
        requires_grad=True,
    )
    system = System(
        torch.tensor(types, dtype=torch.int32),
        positions,
        torch.zeros(3, 3, dtype=dtype),
        torch.tensor([False, False, False]),
    )
    vectors = positions.detach()[None] - positions.detach()[:, None]
    distances = vectors.norm(dim=2)
    names = ["first_atom", "second_atom", "cell_shift_a", "cell_shift_b", "cell_shift_c"]
    for request in requests:
        near = (distances < request.engine_cutoff(unit)) & (distances > 0)
        first, second = (near if request.full_list else near.triu()).nonzero().T
        zeros = torch.zeros_like(first)
        block = TensorBlock(
            vectors[first, second][:, :, None],
            Labels(names, torch.stack([first, second, zeros, zeros, zeros], dim=1).int()),
            [Labels.range("xyz", 3)],
            Labels.range("distance", 1),
        )
        register_autograd_neighbors(system, block, check_consistency=False)
        system.add_neighbor_list(request, block)
    return system

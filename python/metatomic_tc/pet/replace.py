"""Gives metatrain's PET the backend of metatomic-tc, where that can do what the model needs."""

import copy

import torch

from ..modes import build_info

#: the only place that knows which metatrain this backend is made for
METATRAIN_VERSIONS = ["2026.4.1"]

#: the modules of metatrain's backend; another one computes something that is not known here
KNOWN_MODULES = {
    "torch.nn.modules": (
        "Embedding Identity LayerNorm Linear ModuleDict ModuleList RMSNorm Sequential SiLU".split()
    ),
    "metatrain.pet.modules": (
        "AttentionBlock CartesianTransformer DummyModule FeedForward PETBackend "
        "SystemConditioningEmbedding Transformer TransformerLayer".split()
    ),
}


def replace_backend(model: torch.nn.Module) -> str | None:
    """
    Replace the backend of a PET model, alone or in an LLPR model, in place, for inference.

    :param model: a metatrain model
    :return: None if it was replaced, else why the model keeps the one it has
    """
    pet, reason = _pet_of(model)
    reason = reason or reason_for_stock(pet)
    if reason is None:
        from .backend import FlatPETBackend

        pet.backend = FlatPETBackend(
            pet.backend, pet.cutoff_width_adaptive, scales_and_shifts(pet), uncertainty_of(model)
        ).train(pet.training)
    return reason


def reason_for_stock(pet: torch.nn.Module) -> str | None:
    """Why a metatrain PET needs metatrain's backend, or None if it does not."""
    if (reason := unknown_metatrain()) is not None:
        return reason
    if pet.long_range:
        return "the model has long-range features"
    backend = pet.backend
    head_size = backend.d_pet // backend.num_heads
    largest = build_info()["largest_head_size"]
    if head_size > largest:
        return (
            f"its attention heads have {head_size} columns, and the backend has kernels for up to "
            f"{largest}"
        )
    for module in backend.modules():
        kind = type(module)
        if not any(
            kind.__module__.startswith(package) and kind.__name__ in names
            for package, names in KNOWN_MODULES.items()
        ):
            return f"the model has a module {kind.__name__}, which the backend does not know"
    settings = {
        "transformer type": (backend.transformer_type, ["PreLN", "PostLN"]),
        "featurizer": (backend.featurizer_type, ["feedforward", "residual"]),
        "cutoff function": (backend.cutoff_function.lower(), ["bump", "cosine"]),
        "method of adaptive cutoffs": (backend.adaptive_cutoff_method.lower(), ["grid", "solver"]),
    }
    for name, (value, known) in settings.items():
        if value not in known:
            return f"the model has the {name} '{value}', which the backend does not know"
    return None


def unknown_metatrain() -> str | None:
    """Why the installed metatrain is not one that the backend is made for, or None if it is."""
    try:
        from metatrain import __version__ as version
    except ImportError:
        return (
            "metatrain is not installed, which the backend is made with; run: "
            f"pip install metatrain=={METATRAIN_VERSIONS[-1]}"
        )
    if version in METATRAIN_VERSIONS:
        return None
    return (
        f"metatrain {version} is installed, and the backend is made for "
        f"{', '.join(METATRAIN_VERSIONS)}"
    )


def used_backend(asked: str | None, reason: str | None) -> str:
    """
    What a PET is said to be evaluated by.

    :param asked: the backend that was asked for, if one was
    :param reason: why the model keeps that of metatrain, if it does
    :return: ``tc``, or ``stock`` with the reason
    :raises ValueError: if ``tc`` was asked for, and cannot be had
    """
    if reason is None:
        return "tc"
    if asked == "tc":
        raise ValueError(f"the model cannot have the backend tc: {reason}; leave out --backend")
    return f"stock, since {reason}"


def scales_and_shifts(pet: torch.nn.Module) -> dict[str, torch.Tensor]:
    """
    What a metatrain PET makes of the backend's prediction for an energy, in eV: for each such
    target the factors and what is added, ``[2, species]``, in FP64. Empty for a model that adds
    more than an energy of each species (ZBL), has other units, or needs charges and spins.
    """
    from metatomic.torch import ModelOutput, System

    if (
        len(pet.additive_models) != 1
        or pet.dataset_info.length_unit.lower() != "angstrom"
        or pet.system_conditioning is not None
    ):
        return {}
    # Their functions convert what they hold to the type of the systems.
    composition, scaler = copy.deepcopy(pet.additive_models[0]), copy.deepcopy(pet.scaler)
    atoms = [
        System(
            types=torch.tensor([atomic_type], dtype=torch.int32),
            positions=torch.zeros(1, 3, dtype=torch.float64),
            cell=torch.zeros(3, 3, dtype=torch.float64),
            pbc=torch.tensor([False, False, False]),
        )
        for atomic_type in pet.atomic_types
    ]
    order = pet.backend.species_to_species_index[torch.tensor(pet.atomic_types)]
    tables = {}
    for name in pet.target_names:
        is_energy = name.partition("/")[0] == "energy" and pet.outputs[name].unit == "eV"
        if not is_energy or list(pet.output_shapes[name].values()) != [[1]]:
            continue
        wanted = {name: ModelOutput(unit="eV", sample_kind="atom")}
        table = torch.zeros(2, len(atoms), dtype=torch.float64)
        table[0, order] = scaler.get_scales(atoms, wanted)[name].block().values[:, 0]
        if name in composition.outputs:
            table[1, order] = composition(atoms, wanted)[name].block().values[:, 0]
        tables[name] = table
    return tables


def uncertainty_of(model: torch.nn.Module) -> torch.Tensor:
    """
    What an LLPR model computes the uncertainty of an atom's energy with: the norm of the product of
    this matrix and the last-layer features. Empty for other models.
    """
    name = "energy_uncertainty"
    buffers = dict(model.named_buffers())
    if f"cholesky_{name}" not in buffers or "energy" not in model.model.target_names:
        return torch.empty(0, 0, dtype=torch.float64)
    cholesky = buffers[f"cholesky_{name}"].double()
    identity = torch.eye(len(cholesky), dtype=torch.float64, device=cholesky.device)
    inverse = torch.linalg.solve_triangular(cholesky, identity, upper=False)
    return buffers[f"multiplier_{name}"].double() * inverse


def backend_of(model: torch.nn.Module) -> str | None:
    """``tc`` or ``stock`` for a PET model, scripted or not; None for other models."""
    for module in model.modules():
        # PetBackend in cpp/pet/backend.cpp knows it by the same attribute.
        if hasattr(module, "energy_targets"):
            return "tc"
        if getattr(module, "original_name", type(module).__name__) == "PETBackend":
            return "stock"
    return None


def _pet_of(model: torch.nn.Module) -> tuple[torch.nn.Module, str | None]:
    """The PET in a metatrain model, and why there is none if it is another model."""
    from metatrain.llpr import LLPRUncertaintyModel
    from metatrain.pet import PET

    inner = model.model if isinstance(model, LLPRUncertaintyModel) else model
    return inner, None if type(inner) is PET else f"the model is a {type(inner).__name__}, not PET"

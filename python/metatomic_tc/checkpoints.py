"""Metatrain checkpoints and upet names, as metatomic models."""

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from metatomic.torch import AtomisticModel, ModelMetadata

from .model_files import first_line
from .pet import replace_backend
from .pet.replace import used_backend

#: e.g. "pet-mad-s", "pet-mad-s@1.6.0" or "pet-mad-s-v1.6.0"
UPET_NAME = re.compile(
    r"(?P<model>pet-\w+)-(?P<size>xs|s|m|l|xl)((@v?|-v)(?P<version>\d+\.\d+\.\d+))?"
)


def read_checkpoint(
    path: Path,
    outputs: list[str] | None = None,
    name: str | None = None,
    backend: str | None = None,
) -> tuple[AtomisticModel, str]:
    """
    Read a metatrain checkpoint; the best model in it counts, as for ``mtt export``.

    :param path: a checkpoint that the installed metatrain can read
    :param outputs: outputs to keep, e.g. ``["energy"]``; None keeps all. Only PET, alone or in an
        LLPR model, can drop outputs. Without an uncertainty or ensemble among them, an LLPR model
        becomes the model that it wraps.
    :param name: name for a model that has none in its metadata
    :param backend: ``tc``: PET on flat rows, see docs/pet_backend.md; ``stock``: that of metatrain;
        None: ``tc`` where it can do what the model needs
    :return: the model, and its backend: ``tc``, or ``stock`` with the reason
    :raises ValueError: if one of ``outputs`` does not exist, outputs cannot be dropped, or ``tc``
        cannot do what the model needs
    :raises RuntimeError: if metatrain cannot read the checkpoint
    """
    from metatrain.utils.io import model_from_checkpoint

    with _quiet():
        try:
            checkpoint = torch.load(path, weights_only=False, map_location="cpu")
            model = model_from_checkpoint(checkpoint, context="export")
        except Exception as error:
            cause = error.__cause__ or error
            raise RuntimeError(
                f"metatrain cannot read the checkpoint '{path}': {first_line(str(error))}"
                + (f" ({type(cause).__name__}: {cause})" if cause is not error else "")
            ) from error
        if outputs is not None:
            model = _keep_outputs(model, outputs)
        used = _choose_backend(model, backend)
        wrapped = getattr(model, "model", model)
        if name is not None and not wrapped.metadata.name:
            return model.export(ModelMetadata(name=name)), used
        return model.export(), used


def download_upet(model: str, size: str, version: str | None) -> tuple[Path, str]:
    """
    Get the checkpoint of a upet model from huggingface.co, or from the local cache.

    :param model: e.g. ``pet-mad``
    :param size: e.g. ``s``
    :param version: e.g. ``1.6.0``, or None for the newest
    :return: the file, and the version
    :raises RuntimeError: if the package upet or the network is missing
    :raises ValueError: if there is no such model or version
    """
    try:
        from upet import list_upet
    except ImportError as error:
        raise RuntimeError(
            f"'{model}-{size}' is the name of a upet model, and getting it needs the package upet "
            f"({error}); run: pip install upet"
        ) from error
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from huggingface_hub.utils import logging as hub_logging

    # Without a network every request is tried five times, with a warning each.
    hub_logging.set_verbosity_error()
    offline = (
        f"the checkpoint of '{model}-{size}' cannot be downloaded from huggingface.co, and it is "
        "not in the local cache; upet names need the network, without it download the .ckpt file "
        "elsewhere and give its path"
    )

    def versions() -> list[str]:
        try:
            return [
                found["version"] for found in list_upet(model=model, size=size, print_summary=False)
            ]
        except Exception as error:
            raise RuntimeError(f"{offline} ({type(error).__name__}: {error})") from error

    if version is None:
        found = versions()
        if not found:
            raise ValueError(
                f"upet has no model '{model}-{size}'; list the models with: "
                'python -c "import upet; upet.list_upet()"'
            )
        version = found[-1]

    try:
        path = huggingface_hub.hf_hub_download(
            repo_id="lab-cosmo/upet", subfolder="models", filename=f"{model}-{size}-v{version}.ckpt"
        )
    except LocalEntryNotFoundError as error:
        raise RuntimeError(f"{offline}.") from error
    except EntryNotFoundError as error:
        raise ValueError(
            f"upet has no version {version} of '{model}-{size}'; it has: "
            f"{', '.join(versions()) or 'none'}"
        ) from error
    except Exception as error:
        raise RuntimeError(f"{offline} ({type(error).__name__}: {error})") from error
    return Path(path), version


def _choose_backend(model: torch.nn.Module, backend: str | None) -> str:
    if backend == "stock":
        return "stock, as asked for"
    return used_backend(backend, replace_backend(model))


def _keep_outputs(model: torch.nn.Module, outputs: list[str]) -> torch.nn.Module:
    from metatrain.llpr import LLPRUncertaintyModel
    from metatrain.pet import PET

    wrapper = model if isinstance(model, LLPRUncertaintyModel) else None
    pet = model.model if wrapper is not None else model
    if not isinstance(pet, PET):
        raise ValueError(
            f"outputs can be dropped from PET models only, and this is a {type(pet).__name__}; "
            "export it without --outputs"
        )

    available = list(pet.target_names)
    if wrapper is not None:
        extra = [name for name in wrapper.supported_outputs() if _is_uncertainty(name)]
        available += [name for name in extra if wrapper._get_original_name(name) in available]
    unknown = [name for name in outputs if name not in available]
    if unknown:
        raise ValueError(
            f"the model has no output '{unknown[0]}'; it has: {', '.join(sorted(available))}"
        )

    keep_wrapper = any(_is_uncertainty(name) for name in outputs)
    targets = {
        wrapper._get_original_name(name) if _is_uncertainty(name) else name for name in outputs
    }
    for name in [name for name in pet.target_names if name not in targets]:
        _remove_output(pet, name)
    return _wrap_again(wrapper, pet) if keep_wrapper else pet


def _is_uncertainty(name: str) -> bool:
    return name.endswith(("_uncertainty", "_ensemble"))


def _remove_output(pet: torch.nn.Module, name: str) -> None:
    # The same calls in metatrain: pet/modules/finetuning.py, where it drops stale targets.
    pet.remove_output(name)
    pet.target_names.remove(name)
    pet.dataset_info.targets.pop(name, None)
    for additive_model in pet.additive_models:
        if name in additive_model.outputs:
            additive_model.remove_output(name)
    if name in pet.scaler.outputs:
        pet.scaler.remove_output(name)


def _wrap_again(wrapper: torch.nn.Module, pet: torch.nn.Module) -> torch.nn.Module:
    """The LLPR model of ``pet`` after outputs of it have been removed."""
    dataset_info = wrapper.dataset_info
    for name in [name for name in dataset_info.targets if name not in pet.target_names]:
        dataset_info.targets.pop(name)
    ensembles = {
        name: members
        for name, members in wrapper.hypers["num_ensemble_members"].items()
        if name in pet.target_names
    }
    new = type(wrapper)({**wrapper.hypers, "num_ensemble_members": ensembles}, dataset_info)
    new.set_wrapped_model(pet)
    new.to(next(wrapper.parameters()).dtype)
    state = wrapper.state_dict()
    new.load_state_dict({name: state[name] for name in new.state_dict()})
    return new


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Metatrain and PET warn about their own past and their internals, which helps no user here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

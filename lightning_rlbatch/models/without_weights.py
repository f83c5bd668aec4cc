"""Call a function that makes a model so that the model's parameters take no memory: another rank brings their values."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode


def make_without_weights(make: Callable[[], object]) -> object:
    """Return what a function makes, its parameters on the meta device if the function does not need their values.

    Buffers and everything else that is no parameter are real: the function runs as always, and only what a module is given as a
    parameter is exchanged for one without memory. (Under ``torch.device("meta")`` buffers and constants would be without values too, and
    transformers' ``from_pretrained`` refuses to run.) Parameters that modules share stay shared. A function that needs values of
    parameters, moves its model to a device, draws random numbers for something else than parameters (they would be others here, where the
    parameters draw none), or leaves parameters, or a tensor computed from them, elsewhere than in the model, is called once more, without
    any of this: the model is whole then.

    No random numbers are drawn, so that the random state afterwards is not that of a rank with a whole model.

    Args:
        make: Makes the same model whenever it is called.

    Returns:
        What ``make`` returned.

    Raises:
        Exception: What ``make`` raises without any of this.

    Example:
        >>> model = make_without_weights(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        >>> model[0].weight.device.type, model[1].running_var.tolist()
        ('meta', [1.0, 1.0])
    """
    random_state = torch.get_rng_state()
    try:
        attempt = _WithoutWeights()
        with attempt.active():
            model = make()
        if isinstance(model, nn.Module) and attempt.has_left_nothing_but(model):
            return model
        del model
    except Exception:
        pass  # it needs the weights; if not, the second call raises the same
    torch.set_rng_state(random_state)
    return make()


def give_memory(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Give every tensor of a model that is on the meta device memory with any content; in place. What is shared stays shared.

    Args:
        model: Any module.
        device: Where to.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # old and new: an id belongs to the old one as long as that is alive

    def real(old: Tensor) -> Tensor:
        if id(old) not in made:
            data = torch.empty_like(old, device=device)
            made[id(old)] = (old, nn.Parameter(data, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else data)
        return made[id(old)][1]

    for child in model.modules():
        parameters = child.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in (*parameters, *child.named_buffers(recurse=False, remove_duplicate=False)):
            if tensor.is_meta:
                setattr(child, name, real(tensor))


class _WithoutWeights(TorchFunctionMode):
    """Gives modules parameters without memory, and keeps an eye on what is computed from these."""

    def __init__(self) -> None:
        super().__init__()
        self._twins: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}  # by the id of the real parameter, which may die
        self._computed: list[weakref.ref[Tensor]] = []  # the twins included
        self._has_drawn = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Exchange parameters of modules made inside."""
        # The type of the hook forbids the result that its documentation allows.
        handle = register_module_parameter_registration_hook(self._exchange)  # type: ignore[arg-type]
        try:
            with warnings.catch_warnings(), self:
                warnings.filterwarnings("ignore", message=".*to a meta parameter in the current model, which is a no-op")  # load_state_dict
                yield
        finally:
            handle.remove()
            self._twins.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        random_state = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        self._has_drawn = self._has_drawn or not torch.equal(random_state, torch.get_rng_state())
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.is_meta:
                self._computed.append(weakref.ref(value))
        return result

    @torch.no_grad()
    def _exchange(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if type(parameter) is not nn.Parameter or parameter.is_meta:  # other kinds have a memory of their own kind
            return None
        known = self._twins.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        twin = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        vars(twin).update(vars(parameter))
        self._twins[id(parameter)] = (weakref.ref(parameter), twin)
        self._computed.append(weakref.ref(twin))
        return twin

    def has_left_nothing_but(self, model: nn.Module) -> bool:
        """Return whether the model is what it would be with its weights: no tensor without values is alive but its own, none was drawn.

        Args:
            model: What was made.
        """
        if self._has_drawn:
            return False
        if self._others_alive(model):
            gc.collect()  # slow, and seldom needed: what is in a cycle with nothing but itself is gone, too
        return not self._others_alive(model)

    def _others_alive(self, model: nn.Module) -> bool:
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        alive = (reference() for reference in self._computed)
        return any(tensor is not None and id(tensor) not in own for tensor in alive)

"""Updates of optimizers: an element of a parameter p and of its state, from its gradient g and hyperparameters.

Formulas apply in order, each to the results of those before it; p's is the last.  Before them g is scaled for clipping,
and gets the decay added.  A number that is not an operand is a slot of the hyperparameters, or one of COEFFICIENTS.
"""

from __future__ import annotations

from functools import partial

from calcvm.formulas import number as n
from calcvm.formulas.declare import UPDATES, update

__all__ = ["HYPER_SLOTS", "UPDATES"]

# float64 numbers, in any heap, that a program keeps for an optimizer.
HYPER_SLOTS = (
    # set by the user
    "learning_rate",
    "beta1",  # or momentum
    "beta2",  # or alpha
    "eps",
    "weight_decay",
    "clip_value",
    "clip_norm",
    "step_size",  # of the schedule `Step`
    "gamma",  # or of `CosineRestarts`: the factor
    "total_steps",  # or of `CosineRestarts`: the period
    "min_lr",
    "warmup_steps",
    # advanced by `tick` and `clip_norm_scale`
    "t",  # steps counted
    "beta1_t",  # beta1^t
    "beta2_t",
    "gamma_t",  # gamma to the power of its uses so far, or of `CosineRestarts`: the step a cycle began with, from 1
    "lr_t",  # scheduled learning rate
    "step_size_t",  # lr_t / (1 - beta1^t)
    "inv_sqrt_correction2_t",  # 1 / sqrt(1 - beta2^t)
    "clip_scale",
)
# Computed from slots in float64: in float32 a difference from 1 would have lost most of its digits.
COEFFICIENTS = {
    "rest1": lambda beta1: 1 - beta1,
    "rest2": lambda beta2: 1 - beta2,
    "keep": lambda lr_t, weight_decay: 1 - lr_t * weight_decay,
    "step_size_hat": lambda step_size_t, inv_sqrt_correction2_t: step_size_t / inv_sqrt_correction2_t,
}
_update = partial(update, coefficients=COEFFICIENTS)


@_update(source="torch.optim.SGD")
class sgd:
    def p(p, g, lr_t):
        return p - lr_t * g


@_update(source="Polyak 1964; torch.optim.SGD(momentum), dampening 0")
class momentum:
    def m(g, m, beta1):
        return beta1 * m + g

    def p(p, m, lr_t):
        return p - lr_t * m


@_update(source="Sutskever et al. 2013; torch.optim.SGD(nesterov=True)")
class nesterov:
    def m(g, m, beta1):
        return beta1 * m + g

    def p(p, g, m, lr_t, beta1):
        return p - lr_t * (g + beta1 * m)


@_update(source="Kingma and Ba 2015; torch.optim.Adam")
class adam:
    def m(g, m, rest1):
        return m + rest1 * (g - m)

    def v(g, v, beta2, rest2):
        return beta2 * v + rest2 * g * g

    def p(p, m, v, step_size_t, inv_sqrt_correction2_t, eps):
        return p - step_size_t * m / (n.sqrt(v) * inv_sqrt_correction2_t + eps)


@_update(source="Kingma and Ba 2015, end of section 2, with epsilon hat; sklearn.neural_network")
class adamhat:
    m, v = adam.steps["m"], adam.steps["v"]

    def p(p, m, v, step_size_hat, eps):
        return p - step_size_hat * m / (n.sqrt(v) + eps)


@_update(source="Loshchilov and Hutter 2019; torch.optim.AdamW", decay=False)
class adamw:
    m, v = adam.steps["m"], adam.steps["v"]

    def p(p, m, v, keep, step_size_t, inv_sqrt_correction2_t, eps):
        return keep * p - step_size_t * m / (n.sqrt(v) * inv_sqrt_correction2_t + eps)


@_update(source="Chen et al. 2023", decay=False)
class lion:
    def p(p, g, m, keep, lr_t, beta1, rest1):
        return keep * p - lr_t * n.sign(beta1 * m + rest1 * g)

    def m(g, m, beta2, rest2):
        return beta2 * m + rest2 * g


@_update(source="Tieleman and Hinton 2012; torch.optim.RMSprop")
class rmsprop:
    def v(g, v, beta2, rest2):
        return beta2 * v + rest2 * g * g

    def p(p, g, v, lr_t, eps):
        return p - lr_t * g / (n.sqrt(v) + eps)


@_update(source="torch.optim.RMSprop(momentum)")
class rmsprop_momentum:
    v = rmsprop.steps["v"]

    def m(g, v, m, beta1, eps):
        return beta1 * m + g / (n.sqrt(v) + eps)

    def p(p, m, lr_t):
        return p - lr_t * m


@_update(source="Duchi et al. 2011; torch.optim.Adagrad")
class adagrad:
    def v(g, v):
        return v + g * g

    def p(p, g, v, lr_t, eps):
        return p - lr_t * g / (n.sqrt(v) + eps)

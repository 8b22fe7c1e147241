"""The equations of FORMAT.md, written as they stand there, without anything of the library.

Each rule takes its fields, the state before a step, `W`, `b` and `g`, and returns the parts of the
common form: `d = σ g + l W`, `b ← p b + q d`, `W ← c W − A b − D d`. `A`, `D` and `q` are arrays
or numbers, or functions where they are no elementwise factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = dict[str, float]
State: TypeAlias = dict[str, Any]


def bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The upper 16 bits of a float32, rounded to the nearest, ties to even."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    found: NDArray[np.float32] = rounded.astype(np.uint32).view(np.float32)
    return found


def int8(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Multiples of a row's scale, and the scale: its largest size, divided by 127."""
    scales = np.abs(x).max(1, keepdims=True) / np.float32(127)
    return np.rint(x / scales).astype(np.int8), scales


def keys(shards: list[tuple[dict[str, Any], dict[str, Any]]], at: int, stream: str) -> Any:
    """The keys of a stream's records in a shard; of each shard of the log, its line and arrays."""
    line, arrays = shards[at]
    source = line.get("same_keys", {}).get(stream, stream)
    if f"{source}/places" not in arrays:
        return arrays[f"{source}/keys"]
    table: list[Any] = []
    for own, held in shards[: at + 1]:
        if source in [declared["stream"]["name"] for declared in own["streams"]]:
            table = []
        table += [held[f"{source}/keys"]] if f"{source}/keys" in held else []
    sizes, segments = dict(arrays["batches"].tolist()), arrays[f"{stream}/segments"].tolist()
    counts = [each for _, batch, each in segments for _ in range(sizes[batch])]
    every, places = np.concatenate(table), arrays[f"{source}/places"].tolist()
    return np.concatenate([every[p : p + n] for p, n in zip(places, counts, strict=True)])


def residual(x: NDArray[np.float32], e: NDArray[np.float32]) -> tuple[Array, Array]:
    """What entries in bfloat16 miss of a linear layer's rows: of its weight, and of its bias."""
    X, E, X_, E_ = (part.astype(np.float64) for part in (x, e, bfloat16(x), bfloat16(e)))
    return E.T @ X - E_.T @ X_, E.sum(0) - E_.sum(0)


@dataclass
class Form:
    """What a step needs; `state` is what the optimizer remembers after it."""

    state: State
    sigma: float
    l: float = 0.0  # noqa: E741
    c: float = 1.0
    p: float = 1.0
    q: Any = 0.0
    A: Any = 0.0
    D: Any = 0.0

    def step(self, W: Array, b: Array, g: Array) -> tuple[Array, Array]:
        """The parameter and its buffer after the step."""
        d = self.sigma * g + self.l * W
        b = self.p * b + times(self.q, d)
        return self.c * W - times(self.A, b) - times(self.D, d), b


def times(factor: Any, x: Array) -> Array:
    return factor(x) if callable(factor) else factor * x


def begun(f: Numbers, state: State, W: Array, g: Array, decoupled: bool) -> tuple[Form, Array]:
    """The form with its decay, and the direction."""
    sigma = -1.0 if f.get("maximize", state.get("maximize", 0.0)) else 1.0
    form = Form(dict(state), sigma, l=f.get("weight_decay", 0.0))
    if decoupled:
        form.l, form.c = 0.0, 1 - f["lr"] * f["weight_decay"]
    return form, form.sigma * g + form.l * W


def adam(f: Numbers, s: State, W: Array, b: Array, g: Array) -> Form:
    form, d = begun(f, s, W, g, bool(f["decoupled_weight_decay"]))
    t, beta1, beta2 = s.get("step", 0) + 1, f["beta1"], f["beta2"]
    v = beta2 * s.get("exp_avg_sq", 0) + (1 - beta2) * d**2
    form.state |= {"step": t, "exp_avg_sq": v}
    if f.get("amsgrad"):
        v = form.state["max_exp_avg_sq"] = np.maximum(s.get("max_exp_avg_sq", v), v)
    form.p, form.q = beta1, 1 - beta1
    form.A = f["lr"] / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + f["eps"])
    return form


def nadam(f: Numbers, s: State, W: Array, b: Array, g: Array) -> Form:
    form = adam(f, s, W, b, g)
    t, v = form.state["step"], form.state["exp_avg_sq"]

    def mu(t: float) -> float:
        return float(f["beta1"] * (1 - 0.96 ** (t * f["momentum_decay"]) / 2))

    product = form.state["mu_product"] = s.get("mu_product", 1.0) * mu(t)
    P = f["lr"] / (np.sqrt(v / (1 - f["beta2"] ** t)) + f["eps"])
    form.A, form.D = P * mu(t + 1) / (1 - product * mu(t + 1)), P * (1 - mu(t)) / (1 - product)
    return form


def radam(f: Numbers, s: State, W: Array, b: Array, g: Array) -> Form:
    form = adam(f, s, W, b, g)
    t, v, beta2 = form.state["step"], form.state["exp_avg_sq"], f["beta2"]
    most = 2 / (1 - beta2) - 1
    rho = most - 2 * t * beta2**t / (1 - beta2**t)
    form.A = f["lr"] / (1 - f["beta1"] ** t)
    if rho > 5:
        top, bottom = (rho - 4) * (rho - 2) * most * (1 - beta2**t), (most - 4) * (most - 2) * rho
        form.A = form.A * np.sqrt(top / bottom) / (np.sqrt(v) + f["eps"])
    return form


def adamax(f: Numbers, s: State, W: Array, b: Array, g: Array) -> Form:
    form, d = begun(f, s, W, g, False)
    t = s.get("step", 0) + 1
    u = np.maximum(f["beta2"] * s.get("exp_inf", 0), np.abs(d) + f["eps"])
    form.state |= {"step": t, "exp_inf": u}
    form.p, form.q, form.A = f["beta1"], 1 - f["beta1"], f["lr"] / (1 - f["beta1"] ** t) / u
    return form


def rmsprop(f: Numbers, s: State, W: Array, b: Array, g: Array) -> Form:
    form, d = begun(f, s, W, g, False)
    alpha = f["alpha"]
    v = form.state["square_avg"] = alpha * s.get("square_avg", 0) + (1 - alpha) * d**2
    if f["centered"]:
        a = form.state["grad_avg"] = alpha * s.get("grad_avg", 0) + (1 - alpha) * d
        v = v - a**2
    P = 1 / (np.sqrt(v) + f["eps"])
    if f["momentum"] > 0:
        form.p, form.q, form.A = f["momentum"], P, f["lr"]
    else:
        form.D = f["lr"] * P
    return form


def adagrad(f: Numbers, s: State, W: Array, b: Array, g: Array) -> Form:
    form, d = begun(f, s, W, g, False)
    t = s["step"] + 1
    total = s["sum"] + d**2
    form.state |= {"step": t, "sum": total}
    form.D = f["lr"] / (1 + (t - 1) * f["lr_decay"]) / (np.sqrt(total) + f["eps"])
    return form


def adadelta(f: Numbers, s: State, W: Array, b: Array, g: Array) -> Form:
    form, d = begun(f, s, W, g, False)
    rho, u = f["rho"], s.get("acc_delta", 0)
    v = rho * s.get("square_avg", 0) + (1 - rho) * d**2
    P = np.sqrt(u + f["eps"]) / np.sqrt(v + f["eps"])
    form.state |= {"square_avg": v, "acc_delta": rho * u + (1 - rho) * (P * d) ** 2}
    form.D = f["lr"] * P
    return form


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


def adafactor(f: Numbers, s: State, W: Array, b: Array, g: Array) -> Form:
    form, _ = begun(f, s, W, g, True)
    t = s.get("step", 0) + 1
    new = t ** f["beta2_decay"]
    if W.ndim > 1:
        R = (1 - new) * s.get("row_var", 0) + new * (g**2).mean(-1, keepdims=True)
        C = (1 - new) * s.get("col_var", 0) + new * (g**2).mean(-2, keepdims=True)
        V = R @ C / np.maximum(R.mean(-2, keepdims=True), f["eps1"])
        form.state |= {"row_var": R, "col_var": C}
    else:
        V = form.state["variance"] = (1 - new) * s.get("variance", 0) + new * g**2
    form.state["step"] = t
    P = 1 / np.sqrt(np.maximum(V, f["eps1"] ** 2))
    far = max(f["eps2"], rms(W)) * min(f["lr"], 1 / np.sqrt(t))
    form.D = far / max(1, rms(P * g) / f["d"]) * P
    return form


def asgd(f: Numbers, s: State, W: Array, b: Array, g: Array) -> Form:
    form, _ = begun(f, s, W, g, False)
    t, h = s.get("step", 0) + 1, s.get("eta", f["lr"])
    later = f["lr"] / (1 + f["lambd"] * f["lr"] * t) ** f["alpha"]
    form.state |= {"step": t, "eta": later}
    form.c, form.D = 1 - f["lambd"] * h, h
    return form


def rprop(f: Numbers, s: State, W: Array, b: Array, g: Array) -> Form:
    form, d = begun(f, s, W, g, False)
    same = d * s.get("prev", 0)
    h = s.get("step_size", f["lr"]) * np.where(
        same > 0, f["grow"], np.where(same < 0, f["shrink"], 1.0)
    )
    h = np.clip(h, f["shortest"], f["longest"])
    d = np.where(same < 0, 0.0, d)
    form.state |= {"prev": d, "step_size": h}
    form.D = np.divide(h, np.abs(d), out=np.zeros_like(d), where=d != 0)
    return form


def muon(f: Numbers, s: State, W: Array, b: Array, g: Array) -> Form:
    form, _ = begun(f, s, W, g, True)
    mu = f["momentum"]
    u = mu * b + (1 - mu) * g
    if f["nesterov"]:
        u = mu * u + (1 - mu) * g
    tall = u.shape[0] > u.shape[1]
    size = max(float(np.linalg.norm(u)), f["eps"])
    x = (u.T if tall else u) / size
    B, one = np.eye(len(x)) / size, np.eye(len(x))
    for _ in range(int(f["ns_steps"])):
        G = x @ x.T
        turn = f["ns_1"] * one + f["ns_3"] * G + f["ns_5"] * G @ G
        B, x = turn @ B, turn @ x
    B = B.T if tall else B
    inverse = np.linalg.pinv(u, rcond=1e-3)
    off = _in_bfloat16(f, u, tall) - (u @ B if tall else B @ u)
    B = B + (inverse @ off if tall else off @ inverse)
    rows, columns = W.shape
    adjusted = {0: np.sqrt(max(1, rows / columns)), 1: 0.2 * np.sqrt(max(rows, columns)), 2: 1}
    F = f["lr"] * B * adjusted[int(f["adjustment"])]
    form.p, form.q = mu, 1 - mu
    on_b, on_d = (mu, 1 - mu) if f["nesterov"] else (1.0, 0.0)
    form.A = lambda y: on_b * (y @ F if tall else F @ y)
    form.D = lambda y: on_d * (y @ F if tall else F @ y)
    return form


def _in_bfloat16(f: Numbers, u: Array, tall: bool) -> Array:
    x = torch.tensor(u.T if tall else u).bfloat16()
    x = x / x.norm().clamp(min=f["eps"])
    for _ in range(int(f["ns_steps"])):
        G = x @ x.T
        G = torch.addmm(G, G, G, beta=f["ns_3"], alpha=f["ns_5"])
        x = torch.addmm(x, G, x, beta=f["ns_1"])
    found: Array = (x.T if tall else x).double().numpy()
    return found


def along(matrices: list[Array | None], x: Array) -> Array:
    """Each matrix along its dimension."""
    for at, matrix in enumerate(matrices):
        if matrix is not None:
            x = np.moveaxis(np.tensordot(matrix, x, (1, at)), 0, at)
    return x


def moment(g: Array, at: int) -> Array:
    G = np.moveaxis(g, at, 0).reshape(g.shape[at], -1)
    found: Array = G @ G.T
    return found


def packed(matrices: list[Array]) -> Array:
    return np.concatenate([matrix.ravel() for matrix in matrices])


def unpacked(flat: Array, sizes: list[int]) -> list[Array]:
    ends = np.cumsum([size**2 for size in sizes])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(size, size) for part, size in zip(parts, sizes, strict=True)]


def shampoo(f: Numbers, s: State, W: Array, b: Array, g: Array) -> Form:
    form, _ = begun(f, s, W, g, False)
    form.l, form.c = 0.0, 1 - (1 if f["fixed_decay"] else f["lr"]) * f["weight_decay"]
    sizes = list(W.shape)
    S = [f["matrix_eps"] * np.eye(size) for size in sizes]
    A = [np.zeros((size, size)) for size in sizes]
    if "pre_cond" in s:
        S, A = unpacked(s["pre_cond"], sizes), unpacked(s["inv_pre_cond"], sizes)
    S = [S_i + moment(g, at) for at, S_i in enumerate(S)]
    if (f["step"] + 1) % s["every"] == 0:
        found = [np.linalg.eigh(S_i) for S_i in S]
        A = [(Q * np.abs(e) ** (-1 / (2 * W.ndim))) @ Q.T for e, Q in found]
    form.state |= {"pre_cond": packed(S), "inv_pre_cond": packed(A)}
    form.D = lambda x: f["lr"] * along([*A], x)
    return form


def soap(f: Numbers, s: State, W: Array, b: Array, g: Array) -> Form:
    if f["step"] == 0:
        return Form(dict(s), 1.0)
    form, d = begun(f, s, W, g, True)
    beta1, beta2 = f["beta1"], f["beta2"]
    turned = [
        n <= f["max_precondition_dim"] and (W.ndim > 1 or bool(f["precondition_1d"]))
        for n in W.shape
    ]
    sizes = [size for size, own in zip(W.shape, turned, strict=True) if own]
    bases = iter(unpacked(s["Q"], sizes) if any(turned) else [])
    Q = [next(bases) if own else None for own in turned]
    back = [None if one is None else one.T for one in Q]
    V = beta2 * s["exp_avg_sq"] + (1 - beta2) * along(back, d) ** 2
    form.state["exp_avg_sq"] = V

    def F(x: Array) -> Array:
        return along(Q, along(back, x) / (np.sqrt(V) + f["eps"]))

    far = f["lr"]
    if f["correct_bias"]:
        far *= np.sqrt(1 - beta2 ** f["step"]) / (1 - beta1 ** f["step"])
    if f["normalize_gradient"]:
        far /= rms(F(beta1 * b + (1 - beta1) * d)) + f["eps"]
    form.p, form.q, form.A = beta1, 1 - beta1, lambda x: form.c * far * F(x)
    return form


RULES: dict[str, Callable[..., Form]] = {
    "adam": adam,
    "adamw": adam,
    "nadam": nadam,
    "radam": radam,
    "adamax": adamax,
    "rmsprop": rmsprop,
    "adagrad": adagrad,
    "adadelta": adadelta,
    "adafactor": adafactor,
    "asgd": asgd,
    "rprop": rprop,
    "muon": muon,
    "shampoo": shampoo,
    "soap": soap,
}

"""Gradients of the router and of AdaMTP's loss against JAX's automatic differentiation (SPEC E-10, M-04, A-02).

    python scripts/check_gradients_jax.py [--seed 0]

Two programs that share nothing but their input: hsmoe's, and the formulas of the specification written in JAX, dense where hsmoe is sparse. All in float64 on a CPU, on random numbers,
with the cases in which such code goes wrong: tokens that do not count, experts nobody chose, quantised logits, positions that ask nothing, ends of documents and of the text, one matrix as
embedding and unembedding. Scores of experts are kept apart, since a choice between equals has no derivative. Each line has a tensor, the largest number in JAX's gradient of it, and the
largest difference over that. The exit code is 1 where one of them is above 1e-10. JAX is an option: scripts/setup_env.sh --extras jax.
"""
import argparse, os, sys
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")
try:
    import jax
    import jax.numpy as jnp
except ImportError as e:
    print(f"check_gradients_jax: JAX cannot be imported ({e}); install it with pip install 'jax[cpu]', or build the environment with scripts/setup_env.sh --extras jax", file=sys.stderr)
    sys.exit(2)
import numpy as np
import torch

from hsmoe.model.experts import MoE
from hsmoe.model.routing import reference_route
from hsmoe.mtp.loss import LogitsHandle, adamtp_loss, adamtp_loss_reference, compute_adamtp_loss
from hsmoe.quant.fake import fake_quant

jax.config.update("jax_enable_x64", True)
LIMIT = 1e-10


# The formulas in JAX. Letters as in hsmoe: T tokens, E experts, D width, B sequences, S positions, V vocabulary.

@jax.custom_vjp
def straight_through_mix(p_TE, chosen_TE, answer_TED, mean_ED):
    "y = Σ_e g_e E_e(x) with g = p over its sum on the chosen; backward, dL/dp_e is ⟨dL/dy, E_e(x)⟩ for the chosen and ⟨dL/dy, Ē_e⟩ for the others (M-04)."
    return plain_mix(p_TE, chosen_TE, answer_TED)

def plain_mix(p_TE, chosen_TE, answer_TED):
    weight_TE = jnp.where(chosen_TE, p_TE, 0.0)
    return jnp.einsum("te,ted->td", weight_TE / weight_TE.sum(1, keepdims=True), answer_TED)

def _mix_forward(p_TE, chosen_TE, answer_TED, mean_ED): return plain_mix(p_TE, chosen_TE, answer_TED), (p_TE, chosen_TE, answer_TED, mean_ED)

def _mix_backward(kept, dy_TD):
    p_TE, chosen_TE, answer_TED, mean_ED = kept
    g_TE = p_TE * chosen_TE / jnp.sum(p_TE * chosen_TE, 1)[:, None]
    dp_TE = jnp.where(chosen_TE, jnp.einsum("td,ted->te", dy_TD, answer_TED), dy_TD @ mean_ED.T)
    return dp_TE, None, g_TE[:, :, None] * dy_TD[:, None, :], None

straight_through_mix.defvjp(_mix_forward, _mix_backward)


def routed_jax(logits_TE, answer_TED, given, how, top_k, temperature):
    "(y, p, Σ entropy, Σ logsumexp²) over tokens that count; `given` has the balancing bias, the mask, what quantisation adds to the logits, and the experts' mean answers."
    at = jax.lax.top_k(jax.lax.stop_gradient(logits_TE) + given["balance"], top_k)[1]
    chosen_TE = jax.nn.one_hot(at, logits_TE.shape[1]).sum(1) > 0
    z_TE = (logits_TE + given["quantised"]) / temperature
    p_TE = jax.nn.softmax(z_TE, axis=1)
    y_TD = plain_mix(p_TE, chosen_TE, answer_TED) if how == "topk" else straight_through_mix(p_TE, chosen_TE, answer_TED, given["mean"])
    counts_T = given["mask"]
    entropy_T = jax.scipy.special.entr(p_TE).sum(1)
    lse_T = jnp.log(jnp.sum(jnp.exp(z_TE), 1))
    return y_TD * counts_T[:, None], p_TE, jnp.sum(entropy_T * counts_T), jnp.sum(lse_T**2 * counts_T)


def expert_jax(x_TD, w_in, b_in, w_out, b_out):
    "W_out·GELU(W_in·x + b_in) + b_out of every expert, [T, E, D]"
    h = jax.nn.gelu(jnp.einsum("td,end->ten", x_TD, w_in) + b_in, approximate=False)
    return jnp.einsum("ten,edn->ted", h, w_out) + b_out


def moe_jax(x_TD, w, given, how, top_k):
    "(y, Σ entropy) of a layer: the chosen experts by their gates, and the mean of the shared ones (M-04, M-05)."
    routed = expert_jax(x_TD, w["w_in"], w["b_in"], w["w_out"], w["b_out"])
    shared = expert_jax(x_TD, w["shared_w_in"], w["shared_b_in"], w["shared_w_out"], w["shared_b_out"])
    y_TD, _, entropy, _ = routed_jax(x_TD @ w["router"].T + w["router_bias"], routed, given, how, top_k, 1.0)
    return y_TD + shared.mean(1), entropy


def adamtp_jax(hidden_BSD, unembed_VD, heads, tokens_BL, depth_BS, alpha, share=1.0, normalizer=None):
    "Σ_t Σ_{k ≤ h(t)} α^k (−log P(x_{t+k} | x_{≤t})) over the number of positions that ask, from the full logits of every depth (A-02)."
    t, total = jnp.arange(depth_BS.shape[1]), 0.0
    for k in range(1, len(heads) + 2):
        partly = share * hidden_BSD + (1 - share) * jax.lax.stop_gradient(hidden_BSD)
        z = hidden_BSD if k == 1 else jnp.einsum("ij,bsj->bsi", jnp.eye(heads.shape[1]) + heads[k - 2], partly)
        logits = jnp.einsum("bsd,vd->bsv", z, unembed_VD)
        asks = (depth_BS >= k) & (t + k < tokens_BL.shape[1])
        label = tokens_BL[:, jnp.minimum(t + k, tokens_BL.shape[1] - 1)]
        nll = jax.scipy.special.logsumexp(logits, axis=2) - jnp.sum(logits * jax.nn.one_hot(label, len(unembed_VD)), 2)
        total = total + alpha**k * jnp.sum(jnp.where(asks, nll, 0.0))
    if normalizer is None: normalizer = jnp.maximum(jnp.sum((depth_BS >= 1) & (t + 1 < tokens_BL.shape[1])), 1)
    return total / normalizer


# One case: the same leaves through both programs.

def compare(ours, theirs, leaves):
    "[(name, largest |gradient| of JAX, relative error)] for the value of two functions of `leaves`, {name: array}, and for its gradients"
    tensors = {name: torch.tensor(v, requires_grad=True) for name, v in leaves.items()}
    value = ours(tensors)
    got = [value.item(), *(g.numpy() for g in torch.autograd.grad(value, list(tensors.values())))]
    value, gradients = jax.jit(jax.value_and_grad(theirs))({name: jnp.asarray(v) for name, v in leaves.items()})
    rows = []
    for name, a, b in zip(["(value)", *leaves], got, [value, *(gradients[name] for name in leaves)]):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape or a.dtype != np.float64: raise AssertionError(f"{name}: {a.dtype} {a.shape} against {b.dtype} {b.shape}")
        largest = np.abs(b).max(initial=0.0)
        error = np.abs(a - b).max(initial=0.0)
        rows.append((name, largest, error / largest if largest else error))
    return rows


class NearTie(ValueError):
    "Scores between which rounding could choose."


def apart(score_TE, top_k):
    "`NearTie` where the last chosen score and the first other are nearly equal"
    ranked = np.sort(score_TE, 1)[:, ::-1]
    if top_k < ranked.shape[1] and (ranked[:, top_k - 1] - ranked[:, top_k]).min() < 1e-9: raise NearTie("two experts have nearly the same score; take another --seed")


def router_case(rng, how="ste", jax_how=None, *, T=40, D=12, E=16, top_k=4, temperature=1.0, balance=0.0, masked=0.0, fmt=None):
    "`reference_route`, from token, weight and bias to gates, entropy and z-loss; `jax_how`: the rule in JAX where it is not to be the same."
    leaves = dict(x=rng.normal(size=(T, D)), weight=rng.normal(size=(E, D)), bias=rng.normal(size=E), answers=rng.normal(size=(T, E, 5)))
    given = dict(balance=balance * rng.normal(size=E), mask=(rng.random(T) >= masked).astype(float), quantised=0.0, mean=np.zeros((E, 5)))
    upstream_TD, upstream_TE = rng.normal(size=(T, 5)), rng.normal(size=(T, E))
    logits = leaves["x"] @ leaves["weight"].T + leaves["bias"]
    apart(logits + given["balance"], top_k)
    if fmt: given["quantised"] = fake_quant(torch.tensor(logits), fmt).numpy() - logits

    def ours(v):
        r = reference_route(v["x"], v["weight"], v["bias"], torch.tensor(given["balance"]), torch.tensor(given["mask"] > 0),
                            top_k=top_k, temperature=temperature, straight_through=how, fmt=fmt)
        chosen = v["answers"].gather(1, r.expert_TC[:, :, None].expand(-1, -1, 5))
        y_TD = (r.gate_TC[:, :, None] * chosen).sum(1)
        return (y_TD.sin() * torch.tensor(upstream_TD)).sum() + (r.probs_TE * torch.tensor(upstream_TE)).sum() + 0.3 * r.entropy_sum + 0.1 * r.z_sum

    def theirs(v):
        y_TD, p_TE, entropy, z = routed_jax(v["x"] @ v["weight"].T + v["bias"], v["answers"], given, jax_how or how, top_k, temperature)
        return jnp.sum(jnp.sin(y_TD) * upstream_TD) + jnp.sum(p_TE * upstream_TE) + 0.3 * entropy + 0.1 * z
    return compare(ours, theirs, leaves)


LAYER = dict(w_in="routed.w_in", b_in="routed.b_in", w_out="routed.w_out", b_out="routed.b_out", router="router.weight", router_bias="router.bias",
             shared_w_in="shared.w_in", shared_b_in="shared.b_in", shared_w_out="shared.w_out", shared_b_out="shared.b_out")

def layer(rng, how, D, E, J, N, top_k):
    "An `MoE` in float64, random arrays for its parameters with the shared experts one by one, and a function that reads a dictionary of tensors as its state"
    moe = MoE(D, E, J, top_k, N, straight_through=how, bias_init=0.0).double().eval()
    if moe.output_mean is not None: moe.output_mean.mean_ED.copy_(torch.tensor(rng.normal(size=(E, D))))
    shapes = dict(w_in=(E, N, D), b_in=(E, N), w_out=(E, D, N), b_out=(E, D), router=(E, D), router_bias=(E,))
    shapes |= dict(shared_w_in=(J, N, D), shared_b_in=(J, N), shared_w_out=(J, D, N), shared_b_out=(J, D))
    leaves = {name: rng.normal(size=shape) * (1.0 if name == "router" else 0.3) for name, shape in shapes.items()}
    def state(v):
        joined = dict(shared_w_in=v["shared_w_in"].flatten(0, 1), shared_b_in=v["shared_b_in"].flatten(), shared_w_out=v["shared_w_out"].transpose(0, 1).flatten(1))
        return {ours: joined.get(name, v[name]) for name, ours in LAYER.items()}
    given = dict(balance=np.zeros(E), mask=None, quantised=0.0, mean=np.zeros((E, D)) if moe.output_mean is None else moe.output_mean.mean_ED.numpy())
    return moe, leaves, state, given


def moe_case(rng, how, *, T=24, D=8, E=8, J=2, N=6, top_k=2, masked=0.0):
    "A layer of experts: router, routed and shared experts, with tokens that do not count."
    moe, leaves, state, given = layer(rng, how, D, E, J, N, top_k)
    given["mask"] = (rng.random(T) >= masked).astype(float)
    leaves["x"], upstream = rng.normal(size=(T, D)), rng.normal(size=(T, D))
    apart(leaves["x"] @ leaves["router"].T + leaves["router_bias"], top_k)

    def ours(v):
        y_TD, routing = torch.func.functional_call(moe, state(v), (v["x"], torch.tensor(given["mask"] > 0)))
        return (y_TD.sin() * torch.tensor(upstream)).sum() + 0.1 * routing.entropy_sum

    def theirs(v):
        y_TD, entropy = moe_jax(v["x"], v, given, how, top_k)
        return jnp.sum(jnp.sin(y_TD) * upstream) + 0.1 * entropy
    return compare(ours, theirs, leaves)


def cut_depths(rng, B, S, L, K):
    "Depths 0…K, cut so that no question reaches beyond the end of its document; about a tenth of L positions end one."
    ends = rng.random((B, L)) < 0.1
    depth = rng.integers(0, K + 1, size=(B, S))
    for b, t in np.ndindex(B, S):
        left = np.flatnonzero(ends[b, t:])
        if len(left): depth[b, t] = min(depth[b, t], left[0])
    return depth


def loss_case(rng, loss, *, B=3, S=13, L=13, D=8, V=19, K=10, depth=None, alpha=0.85, **options):
    "`adamtp_loss` or its reference: hidden states, unembedding and heads. `depth`: of every position, where it is not to be random."
    leaves = dict(hidden=rng.normal(size=(B, S, D)), unembedding=rng.normal(size=(V, D)), heads=0.3 * rng.normal(size=(K - 1, D, D)))
    tokens = rng.integers(0, V, size=(B, L))
    depths = cut_depths(rng, B, S, L, K) if depth is None else np.full((B, S), depth)
    def ours(v): return loss(v["hidden"], v["unembedding"], v["heads"], torch.tensor(tokens), torch.tensor(depths), alpha=alpha, **options)
    def theirs(v):
        share, normalizer = options.get("trunk_gradient", 1.0), options.get("normalizer")
        return adamtp_jax(v["hidden"], v["unembedding"], v["heads"], jnp.asarray(tokens), jnp.asarray(depths), alpha, share, normalizer)
    return compare(ours, theirs, leaves)


def whole_case(rng, *, B=2, S=12, D=8, V=17, E=8, J=2, N=6, K=4, top_k=2):
    "Embedding, a layer of experts around which x is added, and the loss with its entropy term; the embedding is also the unembedding."
    moe, leaves, state, given = layer(rng, "ste", D, E, J, N, top_k)
    given["mask"] = np.ones(B * S)
    leaves |= dict(embedding=rng.normal(size=(V, D)), heads=0.3 * rng.normal(size=(K - 1, D, D)))
    tokens, depths = rng.integers(0, V, size=(B, S)), cut_depths(rng, B, S, S, K)
    apart(leaves["embedding"] @ leaves["router"].T + leaves["router_bias"], top_k)

    def ours(v):
        x_BSD = v["embedding"][torch.tensor(tokens)]
        y_BSD, routing = torch.func.functional_call(moe, state(v), (x_BSD,))
        return compute_adamtp_loss(LogitsHandle(x_BSD + y_BSD, v["embedding"], v["heads"], [routing]), torch.tensor(tokens), torch.tensor(depths))

    def theirs(v):
        x_TD = v["embedding"][tokens.reshape(-1)]
        y_TD, entropy = moe_jax(x_TD, v, given, "ste", top_k)
        hidden = (x_TD + y_TD).reshape(B, S, D)
        return adamtp_jax(hidden, v["embedding"], v["heads"], jnp.asarray(tokens), jnp.asarray(depths), 0.85) + 0.1 * entropy / (B * S)
    return compare(ours, theirs, leaves)


def cases():
    "{title: a function of a random generator that makes the rows of the table}"
    made = {f"router, {how}": partial(router_case, how=how) for how in ("ste", "topk")}
    made |= {f"router, {how}, balancing bias, τ 0.7, a third masked": partial(router_case, how=how, balance=2.0, temperature=0.7, masked=0.33) for how in ("ste", "topk")}
    made |= {"router, ste, logits in nvfp4:1x16": partial(router_case, fmt="nvfp4:1x16"), "router, ste, one expert a token": partial(router_case, top_k=1),
             "router, topk, all experts": partial(router_case, how="topk", top_k=16)}
    made |= {f"layer, {how}, a quarter masked": partial(moe_case, how=how, masked=0.25) for how in ("ste", "topk", "default_moe")}
    for name, loss in (("reference", adamtp_loss_reference), ("live rows", partial(adamtp_loss, chunk=7))):
        made |= {f"AdaMTP {name}, documents": partial(loss_case, loss=loss), f"AdaMTP {name}, labels beyond the positions": partial(loss_case, loss=loss, L=20),
                 f"AdaMTP {name}, nothing asked": partial(loss_case, loss=loss, depth=0), f"AdaMTP {name}, depth 1, no heads": partial(loss_case, loss=loss, depth=1, K=1),
                 f"AdaMTP {name}, α 0.8, trunk 0.25, normaliser 50": partial(loss_case, loss=loss, alpha=0.8, trunk_gradient=0.25, normalizer=50)}
    return made | {"embedding, layer, AdaMTP with entropy": whole_case}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default 0)")
    seed = parser.parse_args().seed
    torch.set_num_threads(1)
    print(f"JAX {jax.__version__}, torch {torch.__version__}, float64, seed {seed}; {'largest':>22} {'relative error':>15}")
    worst = 0.0
    for n, (title, case) in enumerate(cases().items()):
        print(title)
        for name, largest, error in case(np.random.default_rng([seed, n])):
            wrong = not error <= LIMIT          # NaN is wrong too
            worst = max(worst, np.inf if np.isnan(error) else error)
            print(f"    {name:<40} {largest:22.6g} {error:15.2e}{'  WRONG' if wrong else ''}")
    print(f"The largest relative error is {worst:.2e}; allowed is {LIMIT:.0e}.")
    sys.exit(int(worst > LIMIT))


if __name__ == "__main__":
    try: main()
    except NearTie as e:
        print(f"check_gradients_jax: {e}", file=sys.stderr)
        sys.exit(2)

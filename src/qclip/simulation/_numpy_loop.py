"""The numpy loop of the simulator, for any problem: the reference that reads like the equations."""

import numpy as np

from qclip.simulation._types import SAME_NORM, Draws, Records, Setup, SimulationState
from qclip.simulation.problems.noise import clip_factor


def numpy_loop(setup: Setup, state: SimulationState, draws: Draws, first: int, offsets: np.ndarray) -> Records:
    """Run the steps of one chunk, one at a time (see `Loop`)."""
    problem, B = setup.problem, setup.batch_size
    seeds = state.x.shape[0]
    records = Records.blank(offsets.size, seeds, problem.dim)
    row = 0
    for i in range(draws.counts.shape[0]):
        gamma, level = setup.gamma[first + i], setup.level[first + i]
        x = state.x
        tau = problem.quantile(x, level) if setup.kind == "quantile" else np.full(seeds, level)
        g = problem.example_gradients(x, draws.examples[i])
        norms = np.linalg.norm(g, axis=-1)
        drawn = np.arange(g.shape[1]) < draws.counts[i][:, None]
        factor = clip_factor(norms, tau[:, None]) * drawn
        update = np.einsum("sn,snd->sd", factor, g) / B
        if setup.error_feedback:
            update = update + state.memory * clip_factor(np.linalg.norm(state.memory, axis=-1), tau)[:, None]
            state.memory = state.memory + np.einsum("sn,snd->sd", drawn, g) / B - update
        if setup.noise_multiplier:
            update = update + setup.noise_multiplier / B * tau[:, None] * draws.noise[i]
        if row < offsets.size and offsets[row] == i:
            kept = ((norms <= tau[:, None] * (1 + SAME_NORM)) & drawn).sum(1)
            unclipped = np.divide(kept, draws.counts[i], out=np.full(seeds, np.nan), where=draws.counts[i] > 0)
            for column, value in zip(records, (x, tau, unclipped, state.weighted), strict=True):
                column[row] = value
            row += 1
        state.weighted = state.weighted + gamma * (problem.grad(x) ** 2).sum(-1)
        state.x = x - gamma * update
        state.require_finite(first + i + 1)
    return records
